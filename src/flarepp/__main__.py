"""The command line: `python -m flarepp VERB ...`, one verb for each thing the pipeline's rules do."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flarepp.errors import unknown

PACKAGE = Path(__file__).parent
WORDS = {  # for what a system says of a file, and what to do
    FileNotFoundError: "not there; snakemake makes what the pipeline has, else correct the path",
    FileExistsError: "a file is where a folder is wanted; name another folder",
    NotADirectoryError: "a file is where a folder is wanted; name another folder",
    IsADirectoryError: "a folder is where a file is wanted; name a file",
    PermissionError: "no permission; change that of the file, or name another",
}


def data(arguments: argparse.Namespace) -> None:
    """List the benchmarks, fetch published files, or make one dataset file."""
    from flarepp import data as benchmarks
    from flarepp.data import lra

    if arguments.list:
        print(benchmarks.listing(arguments.root, arguments.lock, arguments.generated))
        print(f"\nLong Range Arena\n{lra.listing(arguments.root, arguments.lock, arguments.generated)}")
    elif arguments.fetch:
        from flarepp.data import download

        for name in arguments.fetch:
            module = lra.task_module(name) if name in lra.task_names() else benchmarks.benchmark_module(name)
            download.fetch(name, module, arguments.root, arguments.lock)
    elif arguments.spec and arguments.store and arguments.card:
        spec, files = parse_object(arguments.spec), (arguments.store, arguments.card)
        if spec.get("name") in lra.task_names():
            lra.prepare(spec, *files, arguments.lock, arguments.workers)
        else:
            benchmarks.prepare(spec, *files, arguments.generated, arguments.lock, arguments.workers)
    else:
        raise ValueError("data: give --list, --fetch NAME, or a dataset spec with --store FILE and --card FILE")


def presample(arguments: argparse.Namespace) -> None:
    from flarepp.data import drivaerml
    from flarepp.data import presample as full_data

    full_data.presample(arguments.full, arguments.root / drivaerml.FOLDER, full_data.read_split(arguments.split))


def train(arguments: argparse.Namespace) -> int:
    from flarepp.processes import terminate_after
    from flarepp.record import read_json
    from flarepp.train import train_on_ranks

    terminate_after(arguments.minutes)
    return on_ranks(train_on_ranks, read_json(arguments.spec), data_of(arguments), arguments.spec.parent, arguments.tensorboard)


def classify(arguments: argparse.Namespace) -> None:
    from flarepp.classify import classify as run
    from flarepp.processes import terminate_after
    from flarepp.record import read_json

    terminate_after(arguments.minutes)
    show(run(read_json(arguments.spec), data_of(arguments), arguments.spec.parent, arguments.tensorboard))


def parallel(arguments: argparse.Namespace) -> int:
    from flarepp.record import read_json
    from flarepp.scaling import measure

    return on_ranks(measure, read_json(arguments.spec), arguments.spec.parent)


def cost(arguments: argparse.Namespace) -> int:
    """Exit code 1: a cell failed, for want of neither memory nor time; those before it are measured."""
    from flarepp.cost import ChildFailed, measure
    from flarepp.record import read_json

    try:
        if arguments.spec:
            measure(read_json(arguments.spec), arguments.spec.parent)
        else:
            cost_sweep(arguments)
    except ChildFailed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def cost_sweep(arguments: argparse.Namespace) -> None:
    """The cost curves of a configuration, without Snakemake: PyTorch, NumPy and PyYAML are enough."""
    import yaml

    from flarepp import spec
    from flarepp.cost import reference_folder, sweep
    from flarepp.provenance import choose_device

    device = choose_device(arguments.device).type
    if not arguments.minutes >= 0:
        raise ValueError(f"--minutes: got {arguments.minutes}; a number from 0 on")
    changes = {"device": device} | ({"compile": False, "precision": "fp32"} if device == "cpu" else {})
    out = arguments.out or reference_folder(device)
    try:
        config = yaml.safe_load(arguments.config.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{arguments.config}: not valid YAML ({error})") from None
    if not isinstance(config, dict):
        raise ValueError(f"{arguments.config}: expected a mapping, got {type(config).__name__}")
    _, entries = spec.cost_sweep(config, arguments.scale, out.as_posix(), **changes)
    curves, _ = spec.cost_sweep(config, arguments.scale, out.as_posix(), **changes, models=arguments.models)
    suite = {"suite": spec.COST, "scale": arguments.scale}
    sweep({path: run.spec for path, run in curves.items()}, entries, suite, out, arguments.minutes)


def on_ranks(function: Callable, *words: Any) -> int:
    """Make a record with several processes and show it. Exit code 1: one of them failed."""
    from flarepp.parallel import RankFailed

    try:
        result = function(*words)
    except RankFailed as error:
        print(error, file=sys.stderr)
        return 1
    if result:  # only the main process has one
        show(result)
    return 0


def show(result: dict) -> None:
    """A record in one line."""
    print(f"{result['status']}{': ' if result['message'] else ''}{result['message']} {json.dumps(result['metrics'])}")


def evaluate(arguments: argparse.Namespace) -> int:
    """Exit code 1: the evaluation succeeded and contradicts the record."""
    from flarepp.evaluate import evaluate as run

    if not arguments.run_dir.is_dir():
        raise FileNotFoundError(f"{arguments.run_dir}: there is no such run folder")
    arguments.spec = arguments.run_dir / "spec.json"
    out = arguments.out or arguments.run_dir / "evaluation"
    result = run(arguments.run_dir, data_of(arguments), out)
    for name in ("last", "ema"):
        error = f"mean error {result['metrics'][name]}" if name in result["metrics"] else "diverged, the error is not finite"
        print(f"{name}: {error}, {result['num_samples']} samples")
    follows = result["record"]["follows"]
    print(f"{out}: {result['record']['verdict']}", file=sys.stdout if follows else sys.stderr)
    return 0 if follows else 1


def predictor(arguments: argparse.Namespace) -> None:
    """Run the trivial predictor of fields or of classes that has the spec's name."""
    from flarepp import class_baselines, predictors
    from flarepp.record import read_json

    spec = read_json(arguments.spec)
    name, modules = spec.get("model", {}).get("name"), (predictors, class_baselines)
    by_name = {known: module for module in modules for known in module.PREDICTORS}
    if name not in by_name:
        raise ValueError(f"{arguments.spec}: {unknown('predictor', name, by_name)}")
    show(by_name[name].run(spec, data_of(arguments), arguments.spec.parent))


def records(arguments: argparse.Namespace) -> None:
    from flarepp.record import join_records, write_records
    from flarepp.record import records as collect

    if arguments.join:
        join_records(arguments.join, arguments.out)
    else:
        plan = arguments.plan.read_text() if arguments.plan else sys.stdin.read()
        write_records(collect(parse_object(plan)), arguments.out)


def paper(arguments: argparse.Namespace) -> None:
    """Tables, figures and the ledger: `build` of one module of the paper layer, with the arguments that it names."""
    from flarepp.record import read_card, read_records

    read = {"records": read_records, "cards": lambda paths: {path.stem: read_card(path) for path in paths}}
    build = importlib.import_module(f"flarepp.paper.{arguments.module}").build
    given = {name: getattr(arguments, name) for name in inspect.signature(build).parameters if hasattr(arguments, name)}
    if missing := [f"--{name}" for name, value in given.items() if value is None]:
        raise ValueError(f"{arguments.module} is made from {', '.join(missing)}: not given")
    build(**{name: read.get(name, lambda value: value)(value) for name, value in given.items()})


def trace(arguments: argparse.Namespace) -> None:
    from flarepp.paper.trace import trace as lines

    print(lines(arguments.artefact, arguments.words, arguments.results))


def plan(arguments: argparse.Namespace) -> None:
    from flarepp.forecast import forecast, shown

    laid_over = arguments.configfile, arguments.config, arguments.scale
    found = forecast(arguments.targets, *laid_over, arguments.cores, arguments.device)
    print(json.dumps(found, indent=1) if arguments.json else shown(found))


def status(arguments: argparse.Namespace) -> None:
    from flarepp.forecast import configuration
    from flarepp.spec import expand
    from flarepp.status import shown, states

    plan = expand(configuration(arguments.configfile, arguments.config, arguments.scale))
    print(shown(plan, states(plan)))


def archive(arguments: argparse.Namespace) -> None:
    from flarepp.archive import pack

    print(pack(arguments.results, arguments.out, arguments.weights))


def place(arguments: argparse.Namespace) -> None:
    from flarepp.archive import place as run

    print(run(arguments.archive, arguments.replace))


def export(arguments: argparse.Namespace) -> None:
    from flarepp.export import export as run

    print(run(arguments.run_dir, arguments.out, arguments.weights))


def document(arguments: argparse.Namespace) -> None:
    from flarepp.paper.document import build

    print(build(arguments.tables, arguments.figures, arguments.captions, arguments.out, scale=arguments.scale))


def artefact(arguments: argparse.Namespace) -> None:
    """A table or figure by name: a file of paper/tables or paper/figures."""
    folder = PACKAGE / "paper" / f"{arguments.verb}s"
    names = sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
    if arguments.name not in names:
        raise ValueError(unknown(arguments.verb, arguments.name, names))
    arguments.module = f"{arguments.verb}s.{arguments.name}"
    paper(arguments)


def parse_object(text: str) -> dict:
    """A JSON object given as text; ValueError otherwise."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")
    return value


def data_of(arguments: argparse.Namespace) -> Path:
    """The dataset file: --data, else the one of the same results folder, results/<scale>/data/<dataset>.h5."""
    from flarepp.record import read_json

    if arguments.data:
        return arguments.data
    dataset = read_json(arguments.spec).get("dataset")
    if not isinstance(dataset, dict) or not isinstance(name := dataset.get("name"), str):
        raise ValueError(f"{arguments.spec}: the section 'dataset' is missing, or its name")
    folders = [parent for parent in arguments.spec.absolute().parents if parent.name == "runs"]
    path = folders[0].parent / "data" / f"{name}.h5" if folders else Path(f"{name}.h5")
    if not path.exists():
        raise FileNotFoundError(f"{path}: the dataset file is missing; make it with snakemake, or give --data FILE")
    return path


def parser() -> argparse.ArgumentParser:
    """All verbs and their arguments."""
    top = argparse.ArgumentParser(prog="python -m flarepp", description=__doc__)
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, function: Callable, help: str) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=help, description=help, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        sub.set_defaults(function=function)
        return sub

    sub = verb("data", data, "list the benchmarks, fetch published files, or make one dataset file")
    sub.add_argument("spec", nargs="?", help="dataset spec, a JSON object: solve the equations or read the published files")
    sub.add_argument("--list", action="store_true", help="show every benchmark with its sources, licence, size and state")
    sub.add_argument("--fetch", nargs="+", metavar="NAME", help="download the published files of these benchmarks")
    sub.add_argument("--store", type=Path, help="HDF5 file to write")
    sub.add_argument("--card", type=Path, help="dataset card (JSON) to write")
    sub.add_argument("--root", type=Path, default="data", help="folder of the published files")
    sub.add_argument("--lock", type=Path, default="envs/data.lock.json", help="file that pins what was downloaded")
    sub.add_argument("--generated", type=Path, default="results/quick/data/generated",
                     help="folder of the generated files in the published layout")
    sub.add_argument("--workers", type=int, default=1, help="solver processes")
    sub = verb("presample", presample, "draw DrivAerML's 40,000 surface points a run from the full public data")
    sub.add_argument("--full", type=Path, required=True, help="folder with run_<i>/boundary_<i>.vtp, or .npy files of theirs")
    sub.add_argument("--root", type=Path, default="data", help="folder of the published files, to write to")
    sub.add_argument("--split", type=Path, required=True, help='JSON file {"train": [run ids], "test": [run ids]}')
    add_runs(verb)
    sub = verb("records", records, "collect the metrics of a suite's runs into one tidy CSV, or join such files; "
               "its digest is written beside it")
    source = sub.add_mutually_exclusive_group()
    source.add_argument("--plan", type=Path, help="JSON plan of the suite; by default read from standard input")
    source.add_argument("--join", type=Path, nargs="+", metavar="CSV", help="records to put one behind the other")
    sub.add_argument("--out", type=Path, required=True, help="CSV file to write; OUT.sha256 is its digest")
    add_artefacts(verb)
    add_overviews(verb)
    add_travel(verb)
    return top


def add_runs(verb: Callable[..., argparse.ArgumentParser]) -> None:
    """The verbs that make, measure or evaluate runs, by the function that adds one."""
    for name, function, help in (("train", train, "train one run from its spec.json; resumes from its checkpoint"),
                                 ("classify", classify, "train one of the Long Range Arena; resumes from its checkpoint"),
                                 ("predictor", predictor, "evaluate one trivial predictor from its spec.json")):
        sub = verb(name, function, help)
        sub.add_argument("spec", type=Path, help="spec.json; the record is written beside it")
        sub.add_argument("--data", type=Path, help="dataset file; by default that of the same results folder")
        if name != "predictor":
            sub.add_argument("--minutes", type=float, default=0, help="stop after so many, with a checkpoint; 0: never")
            sub.add_argument("--tensorboard", action="store_true", help="leave event files for TensorBoard beside the record")
    sub = verb("parallel", parallel, "measure time and memory of a step whose tokens several ranks share, from a spec.json of the "
               "scaling experiment; starts the ranks itself")
    sub.add_argument("spec", type=Path, help="spec.json; the record, metrics.json, is written beside it")
    sub = verb("cost", cost, "measure time and memory of a step against the number of tokens: one curve from its spec.json, "
               "or without SPEC those of a configuration; goes on where it stopped")
    sub.add_argument("spec", nargs="?", type=Path, help="spec.json of a curve; records are written to folders beside it")
    sub.add_argument("--config", type=Path, default="config.yaml", help="configuration; this and all below go without SPEC")
    sub.add_argument("--scale", default="paper", help="which of its scales")
    sub.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to run")
    sub.add_argument("--models", nargs="+", metavar="NAME", default=["flare", "flarepp", "transolver3", "full"],
                     help="models of the configuration, in the order they are measured")
    sub.add_argument("--minutes", type=float, default=8, help="time after which no further cell is started")
    sub.add_argument("--out", type=Path, help="folder of the records and of suite.json, the plan for the verb `records`; "
                     "by default results/reference/DEVICE")
    sub = verb("evaluate", evaluate, "recompute predictions and errors of a finished run from its weights and compare them "
               "with its record; exit code 1 if the record does not follow from the weights")
    sub.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of the run; its own files are only read")
    sub.add_argument("--data", type=Path, help="dataset file to evaluate on, seen through the run's normalisers; by default "
                     "that of the same results folder")
    sub.add_argument("--out", type=Path, help="folder for predictions.h5 and metrics.json; by default RUN_DIR/evaluation")


def add_artefacts(verb: Callable[..., argparse.ArgumentParser]) -> None:
    """The verbs of the paper layer, by the function that adds one."""
    for name, help in (("table", "write a table as .tex, .csv, .md, .html"), ("figure", "draw one figure as .pdf and .png"),
                       ("ledger", "judge every claim of the paper")):
        sub = verb(name, artefact if name != "ledger" else paper, help)
        if name == "ledger":
            sub.set_defaults(module="ledger")
        else:
            sub.add_argument("name", help=f"file of src/flarepp/paper/{name}s, such as {name}4")
        sub.add_argument("--records", type=Path, help="records CSV")
        sub.add_argument("--out", type=Path, required=True, help="folder to write to")
        errors = ("last", "ema", "best_test")
        sub.add_argument("--shown", choices=errors, help="which error to show")
        if name != "figure":
            sub.add_argument("--compared", choices=errors, help="which error to put beside the paper's, and to judge")
        if name == "table":
            sub.add_argument("--beside", choices=("both", "ours", "paper", "difference"), default="both",
                             help="which numbers: ours and the paper's, one of them, or ours and how far they lie off")
            sub.add_argument("--cards", type=Path, nargs="+", help="dataset cards, named as the datasets; for table3")
        if name == "figure":
            sub.add_argument("--stores", type=Path, nargs="+", help="dataset files; for figure2")
        sub.add_argument("--scale", required=True, help="scale of the runs, stamped on everything but 'paper'")
    sub = verb("trace", trace, "show the runs behind the numbers of a table, a figure or the ledger")
    sub.add_argument("artefact", help="its name, such as table1, figure4 or ledger")
    sub.add_argument("words", nargs="*", metavar="WORD", help="what the cell is named by, in any order: dataset, model, "
                     "precision, a size such as B8, M64, N4096, R2, or the id of a claim")
    sub.add_argument("--results", type=Path, default="results/quick", help="results folder of a scale")
    sub = verb("document", document, "set tables, figures and ledger as paper.tex, and as paper.pdf if pdflatex is there")
    sub.add_argument("--tables", type=Path, nargs="+", required=True, metavar="TEX", help="tables and the ledger, .tex")
    sub.add_argument("--figures", type=Path, nargs="+", required=True, metavar="PDF", help="figures, .pdf")
    sub.add_argument("--captions", type=Path, default="workflow/report", help="folder of the figures' captions, <name>.rst")
    sub.add_argument("--out", type=Path, required=True, help="folder to write to")
    sub.add_argument("--scale", required=True, help="scale of the runs, named in title and captions")


def add_overviews(verb: Callable[..., argparse.ArgumentParser]) -> None:
    """The verbs that look at the whole of a scale, by the function that adds one."""
    for name, function, help in (
            ("plan", plan, "show what would run, which of it is done, and the time, memory and disk it takes here; runs nothing "
             "but short measurements, which it keeps"),
            ("status", status, "show what is done, runs, stopped or is missing at this moment, and the time that is left")):
        sub = verb(name, function, help)
        sub.add_argument("--scale", help="scale, by default that of the configuration")
        sub.add_argument("--configfile", type=Path, nargs="+", default=[], help="as for snakemake: laid over config.yaml")
        sub.add_argument("--config", nargs="+", default=[], metavar="KEY=VALUE", help="as for snakemake: laid over those")
        if name == "plan":
            sub.add_argument("targets", nargs="*", metavar="TARGET", help="as snakemake takes them: table1, figure5, a file; "
                             "by default all")
            sub.add_argument("--cores", type=int, help="cores that snakemake would be given, by default all")
            sub.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where runs would run")
            sub.add_argument("--json", action="store_true", help="everything, for each job too, as JSON")


def add_travel(verb: Callable[..., argparse.ArgumentParser]) -> None:
    """The verbs by which results leave and enter a project, by the function that adds one."""
    sub = verb("archive", archive, "pack finished runs, their datasets, and what was drawn from them, with checksums")
    sub.add_argument("--results", type=Path, default="results/quick", help="results folder of a scale, or one of results/reference")
    sub.add_argument("--out", type=Path, required=True, help=".tar.gz to write; the same results give the same bytes")
    sub.add_argument("--weights", action="store_true", help="also pack the weights, for `evaluate` and `export`")
    sub = verb("import", place, "make the results in an archive usable here, verified, without training")
    sub.add_argument("archive", type=Path, help=".tar.gz that `archive` wrote")
    sub.add_argument("--replace", action="store_true", help="let its runs replace those here that differ, also their weights, of "
                     "which it may have none")
    sub = verb("export", export, "write a finished run as a folder for the Hugging Face hub: weights, configuration, model card; "
               "uploads nothing")
    sub.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of the run")
    sub.add_argument("--out", type=Path, required=True, help="new folder")
    sub.add_argument("--weights", choices=("last", "ema"), default="last", help="those that are loaded by default; both are in it")


def in_words(error: OSError, arguments: argparse.Namespace) -> str:
    """What is wrong with a file, the argument that named it, and what to do."""
    if error.errno is None or error.filename is None:  # in the words of whoever raised it
        return str(error)
    path, named = Path(os.fsdecode(error.filename)), ""
    for name, value in vars(arguments).items():
        if path in (value if isinstance(value, list) else [value]):
            named = f"--{name} "
    return f"{named}{path}: {WORDS.get(type(error), error.strerror)}"


def refuse(error: Exception) -> int:
    """Say what is wrong with the input, in one line also where a library wrote several."""
    print("error:", *str(error).splitlines(), file=sys.stderr)
    return 2


def main() -> int:
    """Run one verb. Errors of input are one line on standard error and exit code 2; a bug keeps its traceback."""
    arguments = parser().parse_args()
    try:
        return arguments.function(arguments) or 0
    except OSError as error:  # a missing file, a folder in place of one, no permission, a full disk
        return refuse(OSError(in_words(error, arguments)))
    except ValueError as error:
        raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
        if not Path(raised_in).is_relative_to(PACKAGE):
            raise
        return refuse(error)


if __name__ == "__main__":
    sys.exit(main())
