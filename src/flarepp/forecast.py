"""What a scale would run, how long that takes on this device and what it leaves: the verb `plan`. It runs none of it.

    which jobs, and which are done      Snakemake's own summary of its DAG
    what each is                        the same expansion of the configuration, `spec.expand`
    how long it takes                   a process's start + steps x seconds a step + evaluations x samples x seconds a sample

Seconds a step are measured (see `calibration`) at the fewest and the most operations of a class: one architecture, mixer,
width, precision and number of threads. In between and beyond they are linear in the operations.
"""

from __future__ import annotations

import heapq
import importlib
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from flarepp import spec
from flarepp.record import digest, read_json, write_json
from flarepp.status import identity, span, took_s

FOLDER = Path("results/calibration")
STAGES = ("start", "data", "counts", "steps")
ALONE = ("cost", "scaling")  # rules that measure, each with the machine to itself
STATES = ("done", "stale", "missing")
HIDDEN = ("after", "run", "dataset")  # of a job, from what is shown
# Samples (training, dev, test) of tasks whose files say it only once they are there.
PUBLISHED = {"text": (25_000, 0, 25_000), "retrieval": (147_086, 18_090, 17_437), "image": (45_000, 5_000, 10_000),
             "listops": (96_000, 2_000, 2_000), "pathfinder": (160_000, 20_000, 20_000)}
DOCUMENTS, CLASSES, SYMBOLS, PIXELS = {"retrieval": 2}, {"listops": 10, "image": 10}, {"listops": 15}, 32 * 32
FIRST_STEP = 1.4  # of a cost cell: its first step over the next ones
TOUCHED_S = 0.7e-3  # of a cost cell: seconds a MiB that is taken and freed
PLAIN_MB, IDLE_MB = 130.0, 280.0  # of a process without PyTorch, with it
RECORD_BYTES = 15_000  # of spec.json, metrics.json, the log
ROW_BYTES, ROWS = 85, 510  # of the learning curve
BUSY = 0.5  # load a core from which measurements are doubtful
AT_A_TIME = 16  # measurements at most, each a process of some 300 MB
SEVERAL = {"figure": 2.0}  # starts that drawing a figure takes


@dataclass
class Job:
    """One job of the DAG. ranks: its processes; devices: those of CUDA that it takes where there are some; after: names of jobs
    that it waits for."""

    name: str
    rule: str
    suite: str
    state: str
    threads: int
    ranks: int = 1
    devices: int = 0
    after: set[str] = field(default_factory=set)
    file: str = ""  # one of its outputs
    run: spec.Run | None = None
    dataset: dict | None = None
    seconds: float = 0.0
    memory_mb: float = 0.0
    bytes: float = 0.0
    took_s: float | None = None  # what it took, of one that is done


# --- which jobs


def configuration(files: list[Path], changes: list[str], scale: str | None) -> dict:
    """config.yaml with files, KEY=VALUE and the scale laid over it, as Snakemake does; ValueError for what it cannot read."""
    from snakemake.common.configfile import load_configfile
    from snakemake.exceptions import WorkflowError
    from snakemake.utils import update_config

    config: dict = {}
    try:
        for layer in (*map(load_configfile, ["config.yaml", *map(str, files)]), _parsed(changes)):
            update_config(config, layer)
    except WorkflowError as error:
        raise ValueError(str(error)) from None
    return config | ({"scale": scale} if scale else {})


def _parsed(changes: list[str]) -> dict:
    if not changes:
        return {}
    from snakemake.cli import parse_config  # a second to import

    try:
        return parse_config(changes)
    except ValueError as error:  # a word without "="
        raise ValueError(f"--config: {error}") from None


def summary(targets: list[str], files: list[Path], changes: list[str], scale: str) -> list[dict]:
    """Snakemake's summary of the DAG of `targets`: output_file, rule, status and plan of a file. ValueError in its words."""
    words = [*(["--configfile", *map(str, files)] if files else []), "--config", *changes, f"scale={scale}"]
    answer = subprocess.run([sys.executable, "-m", "snakemake", "--cores", "all", "--summary", "--rerun-incomplete", *words,
                             "--", *targets], capture_output=True, text=True)
    if answer.returncode:
        lines = [line for line in answer.stderr.splitlines() if line.strip()]
        raise ValueError(f"snakemake --summary: {' '.join(lines[-3:])}")
    rows = [line.split("\t") for line in answer.stdout.splitlines() if line.count("\t") >= 5]
    return [dict(zip(rows[0], row)) for row in rows[1:]]


def jobs_of(plan: spec.Plan, rows: list[dict], cores: int) -> list[Job]:
    """The jobs that make the files of a summary, with what they wait for."""
    known = plan.trained | plan.predictors | plan.scaling | plan.curves
    cells = {f"{path}/N{tokens}": path for path in plan.curves for tokens in plan.num_tokens}
    states: dict[tuple[str, str], set[str]] = {}
    files: dict[str, str] = {}
    for row in rows:
        folder, stem = str(Path(row["output_file"]).parent), Path(row["output_file"]).name.partition(".")[0]
        name = cells.get(folder, folder) if cells.get(folder, folder) in known else (
            stem if row["rule"] in ("dataset", "suite_records") else row["rule"])
        state = "missing" if row["status"] == "missing" else "stale" if row["plan"] == "update pending" else "done"
        states.setdefault((name, row["rule"]), set()).add(state)
        if name not in files or row["output_file"].endswith("metrics.json"):
            files[name] = row["output_file"]
    jobs = [_job(plan, known, name, rule, max(found, key=STATES.index), cores) for (name, rule), found in states.items()]
    made = {job.name for job in jobs if job.run or job.dataset}
    for job in jobs:
        job.file = files[job.name]
        if not job.run and not job.dataset:
            job.after = made
    return jobs


def _job(plan: spec.Plan, known: dict, name: str, rule: str, state: str, cores: int) -> Job:
    datasets = plan.datasets | plan.tasks
    if rule == "dataset":
        return Job(name, rule, "data", state, max(1, cores // len(plan.datasets)), dataset=datasets[name])
    if name not in known:
        return Job(name, rule, "paper", state, 1)
    run = known[name]
    after = {run.spec["dataset"]["name"]} if "dataset" in run.spec else set()
    training, suite = run.spec["training"] if rule == "train" else {}, name.split("/")[3]
    settings = training or run.spec.get(rule, {})
    ranks = math.prod(settings.get(key, 1) for key in ("context_parallel", "data_parallel", "num_ranks"))
    threads = cores if rule in ALONE else ranks * training.get("num_threads", 1)
    devices = ranks if settings.get("device", "cpu") != "cpu" else 0
    took = took_s(Path(name)) if state == "done" else None
    return Job(name, rule, suite, state, min(threads, cores), ranks, devices, after, run=run, took_s=took)


# --- what has to be measured


def starts_of(plan: spec.Plan, jobs: list[Job], workers: int) -> dict[str, dict]:
    """Small runs, as many at a time as there are workers, of the verbs of `jobs`. ValueError for a plan without training runs."""
    if not plan.runs:
        raise ValueError("suites: none trains on a benchmark; a plan measures a process by such a run")
    given = next(iter(plan.runs.values())).spec | {"dataset": {"name": "random"}}
    training = given["training"] | {"steps": 4, "num_evaluations": 1, "pct_start": 0.5, "gradient_weight": 0.0,
                                    "context_parallel": 1, "data_parallel": 1}
    wanted = {"predictor": {"verb": "predictor", "copies": workers, "spec": given | {"model": {"name": "constant"}}}}
    for job in jobs:
        if job.rule == "train":
            wanted["train"] = {"verb": "train", "copies": workers, "spec": given | {"training": training}}
        elif job.rule == "cost" and job.run:
            cell = {"num_tokens": [64], "warmup_steps": 1, "timed_steps": 1, "device": "cpu", "compile": False}
            wanted.setdefault("cost", {"verb": "cost", "spec": job.run.spec | {"cost": job.run.spec["cost"] | cell}})
        elif job.rule == "scaling" and job.run:
            cell = job.run.spec["scaling"] | {"num_tokens": 64, "warmup_steps": 3, "timed_steps": 1, "device": "cpu"}
            item: dict = {"verb": "parallel", "spec": job.run.spec | {"scaling": cell}}
            wanted.setdefault(f"parallel {cell['num_ranks']}", item)
        elif not job.run and not job.dataset:
            wanted["paper"] = {"verb": "paper", "copies": workers}
    return wanted


def data_of(plan: spec.Plan, jobs: list[Job]) -> dict[str, dict]:
    """The datasets, by the digests of their specs, of which samples are solved to learn their sizes and times."""
    named = {job.name for job in jobs} | {name for job in jobs for name in job.after}
    return {digest(data): data for name, data in (plan.datasets | plan.tasks).items()
            if name in named and data["source"] == "generate"}


def facts_of(data: dict, known: dict) -> dict:
    """Sizes of a dataset: how many samples, of the dev and test splits how many, tokens; and seconds and bytes a sample."""
    name, published = data["name"], PUBLISHED.get(data["name"], (0, 0, 0))
    counts = [data.get(f"num_{split}", count) for split, count in zip(("train", "dev", "test"), published)]
    sizes = {"samples": sum(published if "num_train" not in data else counts), "evaluated": counts[1:]}
    if data["source"] == "generate":
        return known["data"][digest(data)] | sizes
    if name in PUBLISHED:
        tokens, documents = data.get("max_length", PIXELS), DOCUMENTS.get(name, 1)
        return sizes | {"tokens": tokens, "seconds": 0.0, "bytes": documents * tokens, "symbols": SYMBOLS.get(name, 256),
                         "classes": CLASSES.get(name, 2), "documents": documents, "lengths": [tokens]}
    points = _published_points(data)
    return sizes | {"tokens": points, "seconds": 0.0, "bytes": 16 * points}  # x, y and a value or two in FP32


def _published_points(data: dict) -> int:
    """Points of a sample that models see of a published benchmark."""
    if "resolution" in data:
        return data["resolution"] ** 2
    points = importlib.import_module(spec.data_module(data["name"])).PUBLISHED_POINTS
    if isinstance(points, int):
        return points
    return math.prod((count - 1) // step + 1 for count, step in zip(points, data["stride"]))


def units_of(job: Job, facts: dict, device: str) -> list[dict]:
    """What a job does a step of: one, or one a number of tokens of a cost curve. `calibration` measures such units."""
    if not job.run or job.rule == "predictor":
        return []
    verb, given = job.run.verb if job.rule == "train" else job.rule, job.run.spec
    wanted = given["training" if job.rule == "train" else verb]["device"]
    if (wanted, device) == ("cuda", "cpu") and job.rule != "train":
        return []  # recorded as "not run"
    unit = {"verb": verb, "model": given["model"], "device": "cpu" if wanted == "cpu" else device}
    if verb == "train":
        return [unit | {"training": given["training"], "tokens": facts["tokens"]}]
    if verb == "classify":
        batch, lengths = given["training"]["batch_size"], facts["lengths"]
        longest = lengths[min(len(lengths) - 1, len(lengths) * batch // (batch + 1))]  # of a batch, which is as long
        tokens = facts["tokens"] if given["model"]["protocol"] == "authors" else longest
        return [unit | {"training": given["training"], "tokens": tokens, "lengths": lengths}
                | {key: facts[key] for key in ("symbols", "classes", "documents")}]
    tokens = given[verb]["num_tokens"]
    return [unit | {verb: given[verb], "tokens": count}
            for count in (tokens if isinstance(tokens, list) else [tokens])]


def _settings(unit: dict) -> dict:
    return unit["training"] if "training" in unit else unit[unit["verb"]]


def class_of(unit: dict) -> tuple:
    """What units have in common whose times are compared by their operations."""
    model, settings = unit["model"], _settings(unit)
    return (unit["verb"], unit["device"], model["name"], model.get("mixer"), model.get("channel_dim"), settings["precision"],
            settings["num_threads"])


def count_key(unit: dict) -> str:
    """The name of a unit's counts."""
    return digest([unit["model"], unit["tokens"], unit.get("documents")])


def operations(unit: dict, known: dict) -> int:
    """Multiply-adds of the forward pass of a step."""
    return _settings(unit)["batch_size"] * known["counts"][count_key(unit)]["multiply_adds"]


def step_key(unit: dict) -> str:
    """The name of what was measured of a unit."""
    return digest({key: value for key, value in unit.items() if key != "lengths"})


def extremes(units: list[dict], known: dict) -> dict[str, dict]:
    """Of every class the units of the fewest and the most operations."""
    classes: dict[tuple, list[dict]] = {}
    for unit in units:
        classes.setdefault(class_of(unit), []).append(unit)
    chosen = [pick(members, key=lambda unit: operations(unit, known)) for members in classes.values() for pick in (min, max)]
    return {step_key(unit): unit for unit in chosen}


# --- how long it takes


def line(points: list[tuple[float, float]], at: float) -> float:
    """The value at `at` of a quantity with values at one or two places: linear, proportional where only one tells.

    Beyond the larger place it grows at least half as fast as in proportion.
    """
    (least, low), (most, high) = min(points), max(points)
    if most < 1.2 * least:
        return high * at / most
    slope = max(high - low, 0) / (most - least)
    if at > most:
        return high + max(slope, high / most / 2) * (at - most)
    return max(low + slope * (at - least), min(low, high) / 2)


@dataclass
class Forecast:
    """Seconds, MiB and bytes of jobs, from what is `known` of a device."""

    known: dict
    points: dict[tuple, list[dict]]  # of every class, what was measured

    def step(self, unit: dict, key: str = "seconds") -> float:
        """Seconds of a step, or of the evaluation of a sample."""
        return line([(point["multiply_adds"], point[key]) for point in self.points[class_of(unit)]],
                    operations(unit, self.known))

    def memory(self, unit: dict) -> float:
        """MiB above the idle process: of the largest that was measured, in proportion to tokens x blocks."""
        point = max(self.points[class_of(unit)], key=lambda point: point["rows"])
        return point["memory_mb"] * _rows(unit, unit["tokens"]) / point["rows"]

    def fill(self, job: Job, facts: dict, units: list[dict]) -> None:
        """Predict one job."""
        start = self.known["start"]
        if job.rule == "dataset":
            job.seconds = start["predictor"]["seconds"] + facts["seconds"] * facts["samples"] / job.threads
            job.memory_mb, job.bytes = PLAIN_MB, facts["bytes"] * facts["samples"]
        elif not job.run:
            starts = next((several for name, several in SEVERAL.items() if job.name.startswith(name)), 1)
            job.seconds = starts * start["paper"]["seconds"]
            job.bytes = 10 * RECORD_BYTES
        elif job.rule == "train":
            self._fill_training(job, facts, units[0])
        else:
            kind = {"cost": self._cost, "scaling": self._scaling}.get(job.rule)
            job.seconds = kind(job, units) if kind else start["predictor"]["seconds"]
            idle = PLAIN_MB if job.rule == "predictor" else IDLE_MB * job.ranks
            job.memory_mb = idle + max([0.0, *map(self.memory, units)])
            job.bytes = RECORD_BYTES * max(1, len(units))

    def _fill_training(self, job: Job, facts: dict, unit: dict) -> None:
        training, start, ranks = unit["training"], self.known["start"]["train"], job.ranks
        dev, test = facts["evaluated"]
        rounds = training["num_evaluations"]
        samples = rounds * test if unit["verb"] == "train" else rounds * dev + (rounds + 1) / 2 * test
        working = training["steps"] * self.step(unit) + samples * self.step(unit, "evaluation_s")
        job.seconds = start["seconds"] + working / ranks
        job.memory_mb = start["memory_mb"] + self.memory(unit) / ranks
        weights = 8 * self.known["counts"][count_key(unit)]["parameters"]
        predictions = 24 * facts["tokens"] if unit["verb"] == "train" else 3  # coordinates, target, both predictions; classes
        job.bytes = RECORD_BYTES + weights + test * predictions + ROW_BYTES * min(training["steps"], ROWS)

    def _cost(self, job: Job, units: list[dict]) -> float:
        """Of a curve: its cells up to the first that is predicted to take too long."""
        seconds, start = self.known["start"]["cost"]["seconds"], self.known["start"]["cost"]["cell_s"]
        for unit in units:
            cell, step = unit["cost"], self.step(unit)
            if step > cell["max_step_seconds"]:
                break
            often = sum(min(count, math.ceil(cell["max_seconds"] / step))
                        for count in (cell["warmup_steps"] - 1, cell["timed_steps"]))
            seconds += start + step * (FIRST_STEP + often) + TOUCHED_S * self.memory(unit)
        return seconds

    def _scaling(self, job: Job, units: list[dict]) -> float:
        assert job.run
        settings = job.run.spec["scaling"]
        start, ranks = self.known["start"][f"parallel {settings['num_ranks']}"], settings["num_ranks"]
        if not units:
            return start["seconds"]
        lanes = self.known["devices"] if units[0]["device"] == "cuda" else self.known["cores"] // settings["num_threads"]
        step = self.step(units[0]) / max(1, min(ranks, lanes)) + (start["step_s"] if ranks > 1 else 0)
        return start["seconds"] + start["cell_s"] + step * (2 + settings["warmup_steps"] + settings["timed_steps"])


def _rows(unit: dict, tokens: int) -> float:
    return _settings(unit)["batch_size"] * tokens * unit["model"].get("num_blocks", 1) * unit.get("documents", 1)


def wall(jobs: list[Job], cores: int, devices: int = 0) -> float:
    """Seconds of `jobs` on so many cores and, if not 0, CUDA devices: those of most threads first, each as soon as it can."""
    names, free, now = {job.name for job in jobs}, np.array([cores, devices]), 0.0
    running: list = []
    waiting = sorted(jobs, key=lambda job: (-job.threads, len(job.after)))
    while waiting or running:
        for job in list(waiting):
            taken = np.minimum([job.threads, job.devices], [cores, devices])
            if (taken <= free).all() and not job.after & names:
                free -= taken
                heapq.heappush(running, (now + job.seconds, id(job), job.name, taken))
                waiting.remove(job)
        now, _, name, taken = heapq.heappop(running)
        free += taken
        names.discard(name)
    return now


# --- the verb


def calibrated(plan: spec.Plan, jobs: list[Job], device: str) -> tuple[Forecast, Path]:
    """What is known of the device, after measuring what is lacking; and the file that keeps it. load: the greatest under which
    was measured what is used."""
    from flarepp import calibration

    facts = calibration.device_of(device)
    path = FOLDER / f"{re.sub(r'[^a-z0-9]+', '-', facts['device'].lower()).strip('-')}.json"
    known = {stage: {} for stage in STAGES} | _kept(path, facts) | facts | {"load": 0.0}
    device, load = facts["device_type"], os.getloadavg()[0]
    workers = min(facts["cores"], AT_A_TIME) if device == "cpu" else 1

    def lacking(stage: str, wanted: dict[str, dict], workers: int, **how: bool) -> None:
        if new := {key: item for key, item in wanted.items() if key not in known[stage]}:
            measured = calibration.measure(stage, new, workers, **how)
            known[stage] |= {key: item | {"load": load} for key, item in measured.items()}
            write_json(known, path)
        known["load"] = max([known["load"], *(known[stage][key].get("load", 0.0) for key in wanted)])

    lacking("start", starts_of(plan, jobs, workers), 1)
    lacking("data", data_of(plan, jobs), workers)
    datasets = plan.datasets | plan.tasks
    units = [unit for job in jobs if job.run for unit in units_of(job, _facts(job, datasets, known), device)]
    lacking("counts", {count_key(unit): unit for unit in units}, workers)
    chosen = extremes(units, known)
    alone = {key: unit for key, unit in chosen.items() if unit["verb"] in ALONE}
    on_cpu = {"apart": device == "cpu", "fork": device == "cpu"}
    lacking("steps", {key: unit for key, unit in chosen.items() if key not in alone}, workers, **on_cpu)
    lacking("steps", alone, 1, **on_cpu)
    points: dict[tuple, list[dict]] = {}
    for key, unit in chosen.items():
        found = known["steps"][key]
        points.setdefault(class_of(unit), []).append(found | {"rows": _rows(unit, found["tokens"])})
    return Forecast(known, points), path


def _kept(path: Path, facts: dict) -> dict:
    """What the file of a device keeps; {} without one, and when it was measured with another PyTorch or number of cores."""
    kept = read_json(path) if path.exists() else {}
    return kept if all(kept.get(key) == facts[key] for key in ("torch", "cores")) else {}


def _facts(job: Job, datasets: dict, known: dict) -> dict:
    data = job.dataset
    if job.run and "dataset" in job.run.spec:
        data = datasets.get(job.run.spec["dataset"]["name"])
    return facts_of(data, known) if data else {}


def forecast(targets: list[str], files: list[Path], changes: list[str], scale: str | None, cores: int | None,
             device: str) -> dict:
    """Everything that `plan` says, as a JSON object; calibrates what it lacks.

    Times in seconds, memory in MiB. ValueError in Snakemake's words for a configuration or a target that cannot be.
    """
    plan, whole, cores = spec.expand(configuration(files, changes, scale)), cores is None, cores or os.cpu_count() or 1
    started = time.monotonic()
    jobs = jobs_of(plan, summary(targets, files, changes, plan.scale), cores)
    dag, datasets = time.monotonic() - started, plan.datasets | plan.tasks
    predicted, path = calibrated(plan, jobs, device)
    for job in jobs:
        facts = _facts(job, datasets, predicted.known)
        predicted.fill(job, facts, units_of(job, facts, predicted.known["device_type"]))
    open_jobs = [job for job in jobs if job.state != "done"]
    known = predicted.known
    suites = {suite: _totals([job for job in jobs if job.suite == suite], known["device_type"])
              for suite in dict.fromkeys(job.suite for job in jobs)}
    found = {"scale": plan.scale, "cores": cores, "calibration": path.as_posix(), "dag_s": dag,
             **{key: known[key] for key in ("device", "device_type", "devices", "load")},
             "suites": suites, "total": _totals(jobs, known["device_type"]), "to_do": _totals(open_jobs, known["device_type"]),
             "wall_s": dag + wall(jobs, cores, known["devices"]),
             "wall_to_do_s": dag + wall(open_jobs, cores, known["devices"]) if open_jobs else 0.0,
             "jobs": [{key: value for key, value in vars(job).items() if key not in HIDDEN} for job in jobs]}
    if not targets and whole and device == "auto":  # as all of it would run here: `status` tells the time left by it
        write_json(found | {"of": identity(plan)}, Path(f"results/{plan.scale}/plan.json"))
    return found


def _totals(jobs: list[Job], device: str) -> dict:
    """Numbers of jobs by state; seconds of all, of those that are open, and as those that are done took; hours of cores or
    CUDA devices."""
    done = [job for job in jobs if job.took_s is not None]
    return {"jobs": len(jobs), **{state: sum(job.state == state for job in jobs) for state in STATES},
            "seconds": sum(job.seconds for job in jobs), "open_s": sum(job.seconds for job in jobs if job.state != "done"),
            "device_hours": sum(job.seconds * (job.devices if device == "cuda" else job.threads) for job in jobs) / 3600,
            "done_predicted_s": sum(job.seconds for job in done), "done_took_s": sum(job.took_s for job in done),
            "memory_mb": max((job.memory_mb for job in jobs), default=0.0), "bytes": sum(job.bytes for job in jobs)}


def shown(found: dict) -> str:
    """A forecast as text: a line a suite, and what all of it takes."""
    from tabulate import tabulate

    head = ["", "jobs", *STATES, "all", "to do", "took / predicted", "a job's memory", "disk"]
    rows = [[name, part["jobs"], *(part[state] for state in STATES), span(part["seconds"]), span(part["open_s"]),
             f"{part['done_took_s'] / part['done_predicted_s']:.2f}" if part["done_took_s"] else "",
             f"{part['memory_mb']:,.0f} MiB" if part["memory_mb"] else "", f"{part['bytes'] / 2**20:,.1f} MiB"]
            for name, part in (found["suites"] | {"all": found["total"]}).items()]
    hours = "device-hours" if found["device_type"] == "cuda" else "core-hours"
    lines = [tabulate(rows, head, tablefmt="simple", colalign=("left", *["right"] * (len(head) - 1))), "",
             f"scale {found['scale']}, {found['device']}, {found['cores']} cores",
             f"all of it: {span(found['wall_s'])} on the clock, {found['total']['device_hours']:,.2f} {hours}",
             f"to do: {span(found['wall_to_do_s'])} on the clock, {found['to_do']['device_hours']:,.2f} {hours}",
             f"measured here, kept in {found['calibration']}; delete it to measure again"]
    if found["load"] > BUSY * (os.cpu_count() or 1):
        lines.append(f"the device was busy then (load {found['load']:.1f}): idle, it is faster, perhaps twice")
    return "\n".join(lines)
