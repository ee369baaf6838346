# The paper layer: pure functions of records (and of the predictions that stand beside them), or of the datasets. One rule an
# artefact, so that `snakemake table1` builds it and the report shows its own caption; the last sets all as one document.

SHOWN = f"--shown {PLAN.shown} --scale {SCALE}"
CATEGORIES = {"table": "Tables", "figure": "Figures", "ledger": "Ledger"}  # of the report, by how names begin


for name, suite in TABLES.items():

    rule:
        name:
            name
        input:
            records=records_of(suite),
            code=paper_code(f"tables.{name}"),
        output:
            **table_files(name),
        log:
            f"{RESULTS}/logs/paper/{name}.log",
        conda:
            environment
        params:
            name=name,
            folder=subpath(output[0], parent=True),
            shown=f"{SHOWN} --compared {PLAN.compared} --beside {PLAN.beside}",
        message:
            "{params.name}"
        shell:
            "python -m flarepp table {params.name} --records {input.records[0]:q} --out {params.folder:q} {params.shown}"
            " > {log:q} 2>&1"


for name, suite in FIGURES.items():

    rule:
        name:
            name
        input:
            records=records_of(suite),
            code=paper_code(f"figures.{name}"),
        output:
            **figure_files(name),
        log:
            f"{RESULTS}/logs/paper/{name}.log",
        conda:
            environment
        params:
            name=name,
            folder=subpath(output[0], parent=True),
            shown=SHOWN,
        message:
            "{params.name}"
        shell:
            "python -m flarepp figure {params.name} --records {input.records[0]:q} --out {params.folder:q} {params.shown}"
            " > {log:q} 2>&1"


rule table3:
    input:
        cards=expand(f"{RESULTS}/data/{{dataset}}.json", dataset=PLAN.datasets),
        code=paper_code("tables.table3"),
    output:
        **table_files("table3"),
    log:
        f"{RESULTS}/logs/paper/table3.log",
    conda:
        environment
    params:
        folder=subpath(output[0], parent=True),
        scale=SCALE,
    message:
        "table3"
    shell:
        "python -m flarepp table table3 --cards {input.cards:q} --out {params.folder:q} --scale {params.scale} > {log:q} 2>&1"


# The cards stand for the files, as in the rules of the runs.
rule figure2:
    input:
        cards=expand(f"{RESULTS}/data/{{dataset}}.json", dataset=PLAN.datasets),
        stores=ancient(expand(f"{RESULTS}/data/{{dataset}}.h5", dataset=PLAN.datasets)),
        code=paper_code("figures.figure2"),
    output:
        **figure_files("figure2"),
    log:
        f"{RESULTS}/logs/paper/figure2.log",
    conda:
        environment
    params:
        folder=subpath(output[0], parent=True),
        scale=SCALE,
    message:
        "figure2"
    shell:
        "python -m flarepp figure figure2 --stores {input.stores:q} --out {params.folder:q} --scale {params.scale} > {log:q} 2>&1"


rule ledger:
    input:
        records=f"{RESULTS}/records.csv",
        digest=f"{RESULTS}/records.csv.sha256",
        steps=expand("{run}/metrics.json", run=[*PLAN.scaling, *COST_CELLS]),
        runs=expand("{run}/{name}", run=PLAN.trained, name=["metrics.json", "predictions.h5"]),
        code=paper_code("ledger"),
        claims="src/flarepp/paper/claims.yaml",
    output:
        **table_files("ledger", RESULTS),
        consistency=f"{RESULTS}/consistency.csv",
    log:
        f"{RESULTS}/logs/paper/ledger.log",
    conda:
        environment
    params:
        folder=subpath(output[0], parent=True),
        shown=f"{SHOWN} --compared {PLAN.compared}",
    message:
        "claims ledger"
    shell:
        "python -m flarepp ledger --records {input.records:q} --out {params.folder:q} {params.shown} > {log:q} 2>&1"


# Without a LaTeX engine and the packages that it needs there is no paper.pdf, and the log says so.
rule paper_pdf:
    input:
        tables=[getattr(rules, name).output.tex for name in (*TABLES, "table3", "ledger")],
        figures=[getattr(rules, name).output.pdf for name in (*FIGURES, "figure2")],
        captions=[f"workflow/report/{name}.rst" for name in (*FIGURES, "figure2")],
        code=paper_code("document"),
    output:
        [f"{FIGURE_FOLDER}/paper.{kind}" for kind in ("tex", *(["pdf"] if has_latex() else []))],
    log:
        f"{RESULTS}/logs/paper/paper_pdf.log",
    conda:
        environment
    params:
        folder=subpath(output[0], parent=True),
        scale=SCALE,
    message:
        "all tables and figures in one document"
    shell:
        "python -m flarepp document --tables {input.tables:q} --figures {input.figures:q} --out {params.folder:q}"
        " --scale {params.scale} > {log:q} 2>&1"
