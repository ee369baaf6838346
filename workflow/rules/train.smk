# Runs: one spec in, one record out, by the verb that trains its model; and the records of a suite as one table.
# A run of R x P processes has the threads, and where it may use CUDA the devices, of all of them.
# The card stands for the dataset: it holds the fingerprint and is small enough to be compared by checksum.


# `exec`: it is the command that signals reach, not the shell around it.
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
    conda:
        environment
    threads: lambda wildcards: training_of(wildcards)["num_threads"] * ranks_of(wildcards)
    resources:
        mem_mb=lambda wildcards, attempt: 4000 * ranks_of(wildcards) * 2 ** (attempt - 1),
        gpu=gpus_of,
        options=" --tensorboard" if config["tensorboard"] else "",  # not a parameter: it re-runs nothing
        runtime=0,  # minutes after which it stops with a checkpoint, from which the next attempt goes on; 0: no limit
    params:
        spec=lambda wildcards: PLAN.trained[wildcards.run].json,
        verb=lambda wildcards: PLAN.trained[wildcards.run].verb,
        devices=lambda wildcards: on_devices(gpus_of(wildcards), training_of(wildcards)["device"] == "auto"),
    message:
        "{params.verb} {wildcards.run}"
    shell:
        "printf '%s\\n' {params.spec:q} > {output.spec:q} && exec {params.devices}"
        "python -m flarepp {params.verb} {output.spec:q} --data {input.store:q} --minutes {resources.runtime}"
        "{resources.options}"
        " > {log:q} 2>&1"


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
    conda:
        environment
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
    conda:
        environment
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
    conda:
        environment
    message:
        "records of all suites"
    shell:
        "python -m flarepp records --join {input.tables:q} --out {output.table:q} > {log:q} 2>&1"
