# The paper layer: pure functions of records (and of the predictions that stand beside them). One rule an artefact, so that
# `snakemake table1` builds it and the report shows its own caption.

SHOWN = f"--shown {PLAN.shown} --scale {SCALE}"


for name, suite in TABLES.items():

    rule:
        name:
            name
        input:
            records=records_of(suite),
            code=paper_code(f"tables.{name}"),
        output:
            tex=f"{RESULTS}/tables/{name}.tex",
            csv=f"{RESULTS}/tables/{name}.csv",
            md=report(f"{RESULTS}/tables/{name}.md", category="Tables", caption=f"../report/{name}.rst"),
        log:
            f"{RESULTS}/logs/paper/{name}.log",
        params:
            name=name,
            folder=f"{RESULTS}/tables",
            shown=f"{SHOWN} --compared {PLAN.compared}",
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
            pdf=f"{FIGURE_FOLDER}/{name}.pdf",
            png=report(f"{FIGURE_FOLDER}/{name}.png", category="Figures", caption=f"../report/{name}.rst"),
        log:
            f"{RESULTS}/logs/paper/{name}.log",
        params:
            name=name,
            folder=FIGURE_FOLDER,
            shown=SHOWN,
        message:
            "{params.name}"
        shell:
            "python -m flarepp figure {params.name} --records {input.records[0]:q} --out {params.folder:q} {params.shown}"
            " > {log:q} 2>&1"


rule ledger:
    input:
        records=f"{RESULTS}/records.csv",
        runs=expand("{run}/metrics.json", run=PLAN.runs),
        code=paper_code("ledger"),
        claims="src/flarepp/paper/claims.yaml",
    output:
        md=report(f"{RESULTS}/ledger.md", category="Ledger", caption="../report/ledger.rst"),
        csv=f"{RESULTS}/ledger.csv",
        tex=f"{RESULTS}/ledger.tex",
    log:
        f"{RESULTS}/logs/paper/ledger.log",
    params:
        folder=RESULTS,
        shown=f"--shown {PLAN.compared} --scale {SCALE}",
    message:
        "claims ledger"
    shell:
        "python -m flarepp ledger --records {input.records:q} --out {params.folder:q} {params.shown} > {log:q} 2>&1"
