# The paper layer: pure functions of records (and of the predictions that stand beside them), or of the datasets. One rule an
# artefact, so that `snakemake table1` builds it and the report shows its own caption.

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


rule table3:
    input:
        cards=expand(f"{RESULTS}/data/{{dataset}}.json", dataset=PLAN.datasets),
        code=paper_code("tables.table3"),
    output:
        tex=f"{RESULTS}/tables/table3.tex",
        csv=f"{RESULTS}/tables/table3.csv",
        md=report(f"{RESULTS}/tables/table3.md", category="Tables", caption="../report/table3.rst"),
    log:
        f"{RESULTS}/logs/paper/table3.log",
    params:
        folder=f"{RESULTS}/tables",
    message:
        "table3"
    shell:
        "python -m flarepp table table3 --cards {input.cards:q} --out {params.folder:q} --scale {SCALE} > {log:q} 2>&1"


# The cards stand for the files, as in the rules of the runs.
rule figure2:
    input:
        cards=expand(f"{RESULTS}/data/{{dataset}}.json", dataset=PLAN.datasets),
        stores=ancient(expand(f"{RESULTS}/data/{{dataset}}.h5", dataset=PLAN.datasets)),
        code=paper_code("figures.figure2"),
    output:
        pdf=f"{FIGURE_FOLDER}/figure2.pdf",
        png=report(f"{FIGURE_FOLDER}/figure2.png", category="Figures", caption="../report/figure2.rst"),
    log:
        f"{RESULTS}/logs/paper/figure2.log",
    params:
        folder=FIGURE_FOLDER,
    message:
        "figure2"
    shell:
        "python -m flarepp figure figure2 --stores {input.stores:q} --out {params.folder:q} --scale {SCALE} > {log:q} 2>&1"


rule ledger:
    input:
        records=f"{RESULTS}/records.csv",
        runs=expand("{run}/metrics.json", run=[*PLAN.runs, *PLAN.scaling, *COST_CELLS]),
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
