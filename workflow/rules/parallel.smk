# Scaling runs: one cell of Table 2 a job, which forks its ranks itself.


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
    conda:
        environment
    threads: CORES  # all of them, whatever its ranks use: a job beside it would be part of its times
    resources:
        mem_mb=doubled(8000),
        gpu=gpus_of_scaling,
    params:
        spec=lambda wildcards: PLAN.scaling[wildcards.cell].json,
        devices=lambda wildcards: on_devices(gpus_of_scaling(wildcards), up_to=True),  # a lack of them is a result
    message:
        "scaling {wildcards.cell}"
    shell:
        "printf '%s\\n' {params.spec:q} > {output.spec:q} && "
        "exec {params.devices}python -m flarepp parallel {output.spec:q} > {log:q} 2>&1"
