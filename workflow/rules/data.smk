# Datasets: solve the equations, or fetch and read the published files, into one HDF5 file and its card. Tasks of the Long
# Range Arena likewise: draw their samples, or read the published ones.

SOURCES = {data["source"] for data in [*PLAN.datasets.values(), *PLAN.tasks.values()]}


rule dataset:
    input:
        code=lambda wildcards: spec.sources(spec.data_module(wildcards.dataset)),
    output:
        store=f"{RESULTS}/data/{{dataset}}.h5",
        card=report(
            f"{RESULTS}/data/{{dataset}}.json",
            category="Data",
            labels={"artefact": "{dataset}"},
            caption="../report/dataset.rst",
        ),
    log:
        f"{RESULTS}/logs/data/{{dataset}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/data/{{dataset}}.tsv"
    retries: 2 if "download" in SOURCES else None  # else what the profile says
    conda:
        environment
    threads: max(1, CORES // len(PLAN.datasets))
    resources:
        mem_mb=doubled(4000),
    params:
        spec=lambda wildcards: PLAN.dataset_json(wildcards.dataset),
        published=lambda wildcards: PLAN.published_json(wildcards.dataset),
        generated=f"{RESULTS}/data/generated",
        lock=PLAN.lock,
    message:
        "dataset {wildcards.dataset}"
    shell:
        "python -m flarepp data {params.spec:q} --store {output.store:q} --card {output.card:q}"
        " --generated {params.generated:q} --lock {params.lock:q} --workers {threads} > {log:q} 2>&1"
