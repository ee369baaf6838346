# What every rule file shares: the plan of runs, and names of files. A wrong configuration stops here, before any job.

import glob
import re

try:
    PLAN = spec.expand(config)
except ValueError as error:
    raise WorkflowError(str(error))

SCALE = PLAN.scale
CORES = workflow.resource_settings.cores or os.cpu_count()  # `snakemake --report` is given no number
RESULTS = f"results/{SCALE}"
FIGURE_FOLDER = f"paper_figures/{SCALE}"

# Each table and figure with the suite whose records it is a function of.
TABLES = {"figure3_cells": "figure3", "operations": "figure5", "figure5_cells": "figure5"}
TABLES |= {name: name for name in ("table2", "table6")}
TABLES |= dict.fromkeys(["table1", "table4", "table5"], "table1")
FIGURES = {name: name for name in ("figure3", "figure4", "figure5")}
FIGURES |= dict.fromkeys(["figure6", "figure7", "figure8", "figure9", "learning_curves", "error_distribution"], "table1")
OF_DATA = ["table3", "figure2"]  # functions of the datasets themselves

# The axes along which each suite's artefacts can tell runs apart.
AXES = {"table1": (), "figure3": ("num_blocks", "num_latents"), "figure4": ("num_blocks", "precision")}
for suite, known in AXES.items():
    if suite not in PLAN.suites:
        raise WorkflowError(f"suites: the suite {suite!r} is missing; its tables and figures are part of the pipeline")
    for key in config["suites"][suite].get("axes", {}):
        if key not in known:
            raise WorkflowError(f"suites.{suite}.axes: got {key!r}; allowed: {', '.join(known) or 'none'}")


wildcard_constraints:
    dataset="|".join([*PLAN.datasets, *PLAN.tasks]),
    suite="|".join(PLAN.suites),
    run="|".join(re.escape(path) for path in PLAN.trained),
    predictor="|".join(re.escape(path) for path in PLAN.predictors),
    cell="|".join(re.escape(path) for path in PLAN.scaling),
    curve="|".join(re.escape(path) for path in PLAN.curves),


# What a run leaves that later steps read; `all` asks for it, so that a deleted file is made again.
RUN_FILES = ["spec.json", "metrics.json", "history.csv", "predictions.h5", "model.safetensors"]
COST_CELLS = PLAN.suite_runs(spec.COST)


def records_of(suite):
    """Everything an artefact of a suite reads: the records, and what stands in the folders of its runs."""
    read = dict.fromkeys([*PLAN.scaling, *COST_CELLS], ["metrics.json"])
    read |= dict.fromkeys(PLAN.trained, ["metrics.json", "history.csv", "predictions.h5"])
    runs = [f"{run}/{name}" for run in PLAN.suite_runs(suite) for name in read.get(run, ())]
    return [f"{RESULTS}/records/{suite}.csv", f"{RESULTS}/records/{suite}.csv.sha256", *runs]


def paper_code(module):
    """What one artefact is made with besides records: its sources and the paper's numbers. Editing one re-draws it alone."""
    return [*spec.sources(f"flarepp.paper.{module}"), *sorted(glob.glob("src/flarepp/paper/published/*.csv"))]
