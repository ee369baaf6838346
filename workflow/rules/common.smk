# What the files of rules share, functions included; the plan of runs, and names of files. A wrong configuration stops here, before any job.

import glob
import math
import re
import shutil
import subprocess

try:
    PLAN = spec.expand(config)
    if config["tensorboard"]:
        events.require()
except ValueError as error:
    raise WorkflowError(str(error))

SCALE = PLAN.scale
if sys.stderr.isatty():
    logger.addHandler(status.TimeLeft(PLAN))  # of Snakemake
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


def left_by(run):
    """RUN_FILES, of a run that was imported without its weights the others."""
    imported = os.path.exists(f"{run}/imported.json") and not os.path.exists(f"{run}/model.safetensors")
    return [f"{run}/{name}" for name in RUN_FILES if not (imported and name == "model.safetensors")]


def environment(wildcards):
    """The conda environment of every job under `snakemake --sdm conda`; else none, and its file is not read."""
    methods = [method.name for method in workflow.deployment_settings.deployment_method]
    return f"../../envs/{PLAN.conda}.yaml" if "CONDA" in methods else None


def on_devices(number, up_to=False):
    """Words before a command that give it CUDA devices of its own, or with `up_to` as many of them as there are."""
    return f"python -m flarepp.devices {'--up-to ' if up_to else ''}{number} " if number else ""


def doubled(amount):
    """A resource that doubles with every attempt at a job."""
    return lambda wildcards, attempt: amount * 2 ** (attempt - 1)


def records_of(suite):
    """Everything an artefact of a suite reads: the records, and what stands in the folders of its runs."""
    read = dict.fromkeys([*PLAN.scaling, *COST_CELLS], ["metrics.json"])
    read |= dict.fromkeys(PLAN.trained, ["metrics.json", "history.csv", "predictions.h5"])
    runs = [f"{run}/{name}" for run in PLAN.suite_runs(suite) for name in read.get(run, ())]
    return [f"{RESULTS}/records/{suite}.csv", f"{RESULTS}/records/{suite}.csv.sha256", *runs]


def paper_code(module):
    """What one artefact is made with besides records: its sources and the paper's numbers. Editing one re-draws it alone."""
    return [*spec.sources(f"flarepp.paper.{module}"), *sorted(glob.glob("src/flarepp/paper/published/*.csv"))]


def dataset_of(run):
    return f"{RESULTS}/data/{run.spec['dataset']['name']}"


def training_of(wildcards):
    return PLAN.trained[wildcards.run].spec["training"]


def ranks_of(wildcards):
    return math.prod(training_of(wildcards).get(key, 1) for key in ("context_parallel", "data_parallel"))


def gpus_of(wildcards):
    """Devices that a run may take, one a process; under "auto" it is content with the CPU."""
    return ranks_of(wildcards) if training_of(wildcards)["device"] != "cpu" else 0


def cost_of(wildcards):
    return PLAN.curves[wildcards.curve].spec["cost"]


def scaling_of(wildcards):
    return PLAN.scaling[wildcards.cell].spec["scaling"]


def gpus_of_scaling(wildcards):
    return scaling_of(wildcards)["num_ranks"] if scaling_of(wildcards)["device"] == "cuda" else 0


def in_report(path, name):
    """An output that the report shows, under the number that the paper gives it: figure5_cells is "Figure 5 cells"."""
    title = re.sub(r"^(table|figure)(\d+)", r"\1 \2", name).replace("_", " ").capitalize()
    category = next((CATEGORIES[start] for start in CATEGORIES if name.startswith(start)), "Supplementary")
    return report(path, category=category, labels={"artefact": title}, caption=f"../report/{name}.rst")


def table_files(name, folder=f"{RESULTS}/tables"):
    """A table or the ledger: the page for the report, whose numbers link to runs, and the forms for papers and programs."""
    files = {kind: f"{folder}/{name}.{kind}" for kind in ("tex", "csv", "md")}
    return files | {"html": in_report(f"{folder}/{name}.html", name)}


def figure_files(name):
    return {"pdf": f"{FIGURE_FOLDER}/{name}.pdf", "png": in_report(f"{FIGURE_FOLDER}/{name}.png", name)}


def has_latex():
    """Whether paper.pdf can be made; then it is an output beside paper.tex."""
    if not all(map(shutil.which, ("pdflatex", "kpsewhich"))):
        return False
    return subprocess.run(["kpsewhich", "booktabs.sty", "hyperref.sty"], capture_output=True).returncode == 0
