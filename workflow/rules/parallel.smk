# Scaling runs: one cell of Table 2 a job, which forks its ranks itself.


def scaling_of(wildcards):
    return PLAN.scaling[wildcards.cell].spec["scaling"]


rule scaling:
    input:
        code=lambda wildcards: PLAN.scaling[wildcards.cell].code,
    output:
        spec="{cell}/spec.json",
        metrics=ensure("{cell}/metrics.json", non_empty=True),
    log:
        "{cell}/parallel.log",
    benchmark:
        "{cell}/benchmark.tsv"
    threads: CORES  # all of them, whatever its ranks use: a job beside it would be part of its times
    resources:
        mem_mb=8000,
        gpu=lambda wildcards: scaling_of(wildcards)["num_ranks"] if scaling_of(wildcards)["device"] == "cuda" else 0,
    params:
        spec=lambda wildcards: PLAN.scaling[wildcards.cell].json,
    message:
        "scaling {wildcards.cell}"
    shell:
        "printf '%s\\n' {params.spec:q} > {output.spec:q} && "
        "python -m flarepp parallel {output.spec:q} > {log:q} 2>&1"
