# Runs: one spec in, one record out, by the verb that trains its model; and the records of a suite as one table.
# A run of R x P processes has the threads, and where it may use CUDA the devices, of all of them.
# The card stands for the dataset: it holds the fingerprint and is small enough to be compared by checksum.

import math


def dataset_of(run):
    return f"{RESULTS}/data/{run.spec['dataset']['name']}"


def training_of(wildcards):
    return PLAN.trained[wildcards.run].spec["training"]


def ranks_of(wildcards):
    return math.prod(training_of(wildcards).get(key, 1) for key in ("context_parallel", "data_parallel"))


def gpus_of(wildcards):
    """Devices that several processes may take; a run of one process is not limited."""
    return ranks_of(wildcards) if ranks_of(wildcards) > 1 and training_of(wildcards)["device"] != "cpu" else 0


rule train:
    input:
        card=lambda wildcards: dataset_of(PLAN.trained[wildcards.run]) + ".json",
        store=lambda wildcards: ancient(dataset_of(PLAN.trained[wildcards.run]) + ".h5"),
        code=lambda wildcards: PLAN.trained[wildcards.run].code,
    output:
        spec="{run}/spec.json",
        metrics=ensure("{run}/metrics.json", non_empty=True),
        history="{run}/history.csv",
        predictions="{run}/predictions.h5",
        weights="{run}/model.safetensors",
    log:
        "{run}/train.log",
    benchmark:
        "{run}/benchmark.tsv"
    threads: lambda wildcards: training_of(wildcards)["num_threads"] * ranks_of(wildcards)
    resources:
        mem_mb=lambda wildcards: 4000 * ranks_of(wildcards),
        gpu=gpus_of,
    params:
        spec=lambda wildcards: PLAN.trained[wildcards.run].json,
        verb=lambda wildcards: PLAN.trained[wildcards.run].verb,
    message:
        "{params.verb} {wildcards.run}"
    shell:
        "printf '%s\\n' {params.spec:q} > {output.spec:q} && "
        "python -m flarepp {params.verb} {output.spec:q} --data {input.store:q} > {log:q} 2>&1"


rule predictor:
    input:
        card=lambda wildcards: dataset_of(PLAN.predictors[wildcards.predictor]) + ".json",
        store=lambda wildcards: ancient(dataset_of(PLAN.predictors[wildcards.predictor]) + ".h5"),
        code=lambda wildcards: PLAN.predictors[wildcards.predictor].code,
    output:
        spec="{predictor}/spec.json",
        metrics=ensure("{predictor}/metrics.json", non_empty=True),
    log:
        "{predictor}/predictor.log",
    threads: 1
    params:
        spec=lambda wildcards: PLAN.predictors[wildcards.predictor].json,
    message:
        "trivial predictor {wildcards.predictor}"
    shell:
        "printf '%s\\n' {params.spec:q} > {output.spec:q} && "
        "python -m flarepp predictor {output.spec:q} --data {input.store:q} > {log:q} 2>&1"


rule suite_records:
    input:
        metrics=lambda wildcards: [f"{run}/metrics.json" for run in PLAN.suite_runs(wildcards.suite)],
        code=spec.sources("flarepp.record"),
    output:
        table=f"{RESULTS}/records/{{suite}}.csv",
        digest=f"{RESULTS}/records/{{suite}}.csv.sha256",
    log:
        f"{RESULTS}/logs/records/{{suite}}.log",
    params:
        plan=lambda wildcards: PLAN.suite_json(wildcards.suite),
    message:
        "records of {wildcards.suite}"
    shell:
        "printf '%s' {params.plan:q} | python -m flarepp records --out {output.table:q} > {log:q} 2>&1"


rule records:
    input:
        tables=expand(f"{RESULTS}/records/{{suite}}.csv", suite=PLAN.suites),
        digests=expand(f"{RESULTS}/records/{{suite}}.csv.sha256", suite=PLAN.suites),
        code=spec.sources("flarepp.record"),
    output:
        table=f"{RESULTS}/records.csv",
        digest=f"{RESULTS}/records.csv.sha256",
    log:
        f"{RESULTS}/logs/records/all.log",
    message:
        "records of all suites"
    shell:
        "python -m flarepp records --join {input.tables:q} --out {output.table:q} > {log:q} 2>&1"
