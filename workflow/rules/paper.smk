# The paper layer: pure functions of records (and of the predictions that stand beside them).


rule table:
    input:
        records=lambda wildcards: f"{PAPER}/records/{TABLES[wildcards.table]}.csv",
        code=lambda wildcards: paper_code(f"tables.{wildcards.table}"),
    output:
        tex=f"{PAPER}/tables/{{table}}.tex",
        csv=f"{PAPER}/tables/{{table}}.csv",
        md=report(f"{PAPER}/tables/{{table}}.md", category="Tables", caption="../report/{table}.rst"),
    params:
        shown=PLAN.shown,
        scale=SCALE,
        folder=f"{PAPER}/tables",
    log:
        f"{PAPER}/logs/paper/{{table}}.log",
    message:
        "{wildcards.table}"
    shell:
        "python -m flarepp table {wildcards.table} --records {input.records:q} --out {params.folder:q}"
        " --shown {params.shown} --scale {params.scale} > {log:q} 2>&1"


rule figure:
    input:
        records=lambda wildcards: f"{PAPER}/records/{FIGURES[wildcards.figure]}.csv",
        code=lambda wildcards: paper_code(f"figures.{wildcards.figure}"),
    output:
        pdf=f"paper_figures/{SCALE}/{{figure}}.pdf",
        png=report(f"paper_figures/{SCALE}/{{figure}}.png", category="Figures", caption="../report/{figure}.rst"),
    params:
        shown=PLAN.shown,
        scale=SCALE,
        folder=f"paper_figures/{SCALE}",
    log:
        f"{PAPER}/logs/paper/{{figure}}.log",
    message:
        "{wildcards.figure}"
    shell:
        "python -m flarepp figure {wildcards.figure} --records {input.records:q} --out {params.folder:q}"
        " --shown {params.shown} --scale {params.scale} > {log:q} 2>&1"


rule ledger_files:
    input:
        records=f"{PAPER}/records.csv",
        code=paper_code("ledger"),
        claims="src/flarepp/paper/claims.yaml",
    output:
        md=report(f"{PAPER}/ledger.md", category="Ledger", caption="../report/ledger.rst"),
        csv=f"{PAPER}/ledger.csv",
        tex=f"{PAPER}/ledger.tex",
    params:
        shown=PLAN.shown,
        scale=SCALE,
        folder=PAPER,
    log:
        f"{PAPER}/logs/paper/ledger.log",
    message:
        "claims ledger"
    shell:
        "python -m flarepp ledger --records {input.records:q} --out {params.folder:q}"
        " --shown {params.shown} --scale {params.scale} > {log:q} 2>&1"


# Targets by name.
for name in TABLES:

    rule:
        name: name
        input:
            expand(f"{PAPER}/tables/{name}.{{kind}}", kind=["tex", "csv", "md"]),


for name in FIGURES:

    rule:
        name: name
        input:
            expand(f"paper_figures/{SCALE}/{name}.{{kind}}", kind=["pdf", "png"]),


rule ledger:
    input:
        LEDGER_FILES,
