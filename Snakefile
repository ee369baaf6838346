# The whole reproduction as one DAG: datasets -> runs -> records -> tables, figures, ledger.
#
#   snakemake --cores all                       everything at the scale of config.yaml
#   snakemake --cores all table1                one artefact: table1 to table6, operations, figure3_cells, figure5_cells,
#                                               figure2 to figure9, learning_curves, error_distribution, ledger, paper_pdf
#   snakemake --cores all --config scale=paper  another scale; `--configfile mine.yaml` lays values over config.yaml
#   snakemake --report report.html              figures, tables and ledger with their provenance, after a run

import os
import sys

from snakemake.utils import min_version

min_version("9.0")
SOURCE = os.path.join(workflow.basedir, "src")
sys.path.insert(0, SOURCE)
os.environ.update(PYTHONPATH=os.pathsep.join(filter(None, (SOURCE, os.environ.get("PYTHONPATH")))))  # of the jobs

from flarepp import events, spec, status


configfile: "config.yaml"


include: "workflow/rules/common.smk"
include: "workflow/rules/data.smk"
include: "workflow/rules/train.smk"
include: "workflow/rules/parallel.smk"
include: "workflow/rules/cost.smk"
include: "workflow/rules/paper.smk"


rule all:
    default_target: True
    input:
        [getattr(rules, name).output for name in (*TABLES, *FIGURES, *OF_DATA, "ledger", "paper_pdf")],
        f"{RESULTS}/records.csv",
        [left_by(run) for run in PLAN.trained],
        expand("{run}/metrics.json", run=[*PLAN.predictors, *PLAN.scaling, *COST_CELLS]),
        expand(f"{RESULTS}/data/{{dataset}}.{{kind}}", dataset=[*PLAN.datasets, *PLAN.tasks], kind=["h5", "json"]),
