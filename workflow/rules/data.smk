# Datasets: solve the equations, or fetch and read the published files, into one HDF5 file and its card.


rule dataset:
    input:
        code=lambda wildcards: spec.sources(f"flarepp.data.{wildcards.dataset}"),
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
    threads: max(1, CORES // len(PLAN.datasets))
    retries: 2 if any(spec["source"] == "download" for spec in PLAN.datasets.values()) else 0
    resources:
        mem_mb=4000,
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
