# Cost curves: one model over all numbers of tokens of Figure 5 a job, which measures each in a process of its own.


rule cost:
    input:
        code=lambda wildcards: PLAN.curves[wildcards.curve].code,
    output:
        expand("{{curve}}/N{tokens}/spec.json", tokens=PLAN.num_tokens),
        spec="{curve}/spec.json",
        metrics=ensure(expand("{{curve}}/N{tokens}/metrics.json", tokens=PLAN.num_tokens), non_empty=True),
    log:
        "{curve}/cost.log",
    benchmark:
        "{curve}/benchmark.tsv"
    conda:
        environment
    threads: CORES  # all of them, whatever a step uses: a job beside it would be part of its times
    resources:
        mem_mb=doubled(8000),
        gpu=lambda wildcards: int(cost_of(wildcards)["device"] == "cuda"),
    params:
        spec=lambda wildcards: PLAN.curves[wildcards.curve].json,
        device=lambda wildcards: cost_of(wildcards)["device"],
        devices=lambda wildcards: on_devices(int(cost_of(wildcards)["device"] == "cuda"), up_to=True),  # a lack is a result
        tokens=lambda wildcards: ", ".join(map(str, cost_of(wildcards)["num_tokens"])),
    message:
        "cost {wildcards.curve} on {params.device}, N {params.tokens}"
    shell:
        "printf '%s\\n' {params.spec:q} > {output.spec:q} && "
        "exec {params.devices}python -m flarepp cost {output.spec:q} > {log:q} 2>&1"
