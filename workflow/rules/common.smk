import glob
import re

# What every rule file shares: the plan of runs, and names of files. A wrong configuration stops here, before any job.

try:
    PLAN = spec.expand(config)
except ValueError as error:
    raise WorkflowError(str(error))

SCALE = PLAN.scale
PAPER = f"results/{SCALE}"

# Each table and figure with the suite whose records it is a function of.
TABLES = {"table1": "table1", "table4": "table1", "table5": "table1"}
FIGURES = {"figure4": "figure4", "figure6": "table1", "figure7": "table1"}

TABLE_FILES = expand(f"{PAPER}/tables/{{name}}.{{kind}}", name=TABLES, kind=["tex", "csv", "md"])
FIGURE_FILES = expand(f"paper_figures/{SCALE}/{{name}}.{{kind}}", name=FIGURES, kind=["pdf", "png"])
LEDGER_FILES = expand(f"{PAPER}/ledger.{{kind}}", kind=["md", "csv", "tex"])


wildcard_constraints:
    dataset="|".join(PLAN.datasets),
    suite="|".join(PLAN.suites),
    table="|".join(TABLES),
    figure="|".join(FIGURES),
    run="|".join(re.escape(path) for path in PLAN.runs),
    predictor="|".join(re.escape(path) for path in PLAN.predictors),


def paper_code(module):
    """What one artefact is made with besides records: its sources and the paper's own numbers. Editing one re-draws it alone."""
    return [*spec.sources(f"flarepp.paper.{module}"), *sorted(glob.glob("src/flarepp/paper/published/*.csv"))]
