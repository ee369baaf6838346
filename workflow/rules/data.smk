# Datasets: solve the equations, or read the published files, into one HDF5 file and its card.


rule dataset:
    input:
        code=lambda wildcards: spec.sources(f"flarepp.data.{wildcards.dataset}"),
    output:
        store=f"{PAPER}/data/{{dataset}}.h5",
        card=report(f"{PAPER}/data/{{dataset}}.json", category="Data", caption="../report/dataset.rst"),
    params:
        spec=lambda wildcards: PLAN.dataset_json(wildcards.dataset),
        generated=f"{PAPER}/data/generated",
    threads: 1
    resources:
        mem_mb=4000,
    log:
        f"{PAPER}/logs/data/{{dataset}}.log",
    benchmark:
        f"{PAPER}/benchmarks/data/{{dataset}}.tsv"
    message:
        "dataset {wildcards.dataset}"
    shell:
        "python -m flarepp data {params.spec:q} --store {output.store:q} --card {output.card:q}"
        " --generated {params.generated:q} --workers {threads} > {log:q} 2>&1"
