"""What there is of a scale at this moment: the verb `status`. Reads folders and starts nothing, so that it takes a second.

    done        a record of the planned spec; of a dataset a card with the planned source and numbers of samples
    stale       one of another; all else, such as an edit of the code, is for Snakemake to find, see the verb `plan`
    running     its lock is held: the step of its last checkpoint, and when it will end. A dataset has none: its log is young
    stopped     a log and no record: at the step of its checkpoint, from which it goes on, else the log's last line
    missing     nothing yet

The time that is left is that of the last `plan` of all of this scale, corrected by what jobs since took.
"""

from __future__ import annotations

import logging
import math
import pickle
import sys
import time
import zipfile
from collections import Counter, OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flarepp import spec
from flarepp.record import digest, held, read_json

STATES = ("done", "running", "stopped", "stale", "missing")
LOGS = {"train": "train.log", "classify": "train.log", "predictor": "predictor.log", "parallel": "parallel.log",
        "cost": "cost.log"}  # by the verb that makes a run
TAIL = 4096  # bytes of a log that are read
YOUNG_S = 60.0  # a dataset in the making writes to its log more often
GENERATED = ("generated", "stand-in")  # what cards of generated datasets say of their source


@dataclass(frozen=True)
class State:
    """One run or dataset: where it stands, and a word on that. left_s: seconds until it ends, where a checkpoint tells."""

    name: str
    suite: str
    state: str
    note: str = ""
    left_s: float | None = None


def states(plan: spec.Plan) -> list[State]:
    """Where everything that a scale runs stands, datasets first."""
    runs = plan.trained | plan.predictors | plan.scaling
    found = [_dataset(plan, name) for name in [*plan.datasets, *plan.tasks]]
    found += [_run(path, run.spec, Path(path), LOGS[_verb(plan, path)]) for path, run in runs.items()]
    for path, run in plan.curves.items():
        for tokens in plan.num_tokens:
            cell = run.spec | {"cost": run.spec["cost"] | {"num_tokens": tokens}}
            found.append(_run(f"{path}/N{tokens}", cell, Path(path), LOGS["cost"]))
    return found


def _verb(plan: spec.Plan, path: str) -> str:
    return "parallel" if path in plan.scaling else (plan.trained | plan.predictors)[path].verb


def _dataset(plan: spec.Plan, name: str) -> State:
    folder = Path(f"results/{plan.scale}")
    wanted, log = (plan.datasets | plan.tasks)[name], folder / f"logs/data/{name}.log"
    with suppress(OSError, ValueError, KeyError, TypeError):
        return State(name, "data", "done" if _is_of(read_json(folder / f"data/{name}.json"), wanted) else "stale")
    with suppress(OSError):
        young = time.time() - log.stat().st_mtime < YOUNG_S
        return State(name, "data", "running" if young else "stopped", _last_line(log))
    return State(name, "data", "missing")


def _is_of(card: dict, wanted: dict) -> bool:
    """Whether a card is of the planned dataset, as far as it tells: generated or not, and so many samples."""
    if wanted["source"] != "generate":
        return card["source"] != "generated"
    counts = {what: wanted[f"num_{what}"] for what in card["counts"] if f"num_{what}" in wanted}  # cars: points too
    return card["source"] in GENERATED and card["counts"] | counts == card["counts"]


def _run(name: str, wanted: dict, folder: Path, log: str) -> State:
    """folder: the one that has the log and the lock, of a cost cell that of its curve."""
    suite, running = name.split("/")[3], held(folder / ".lock")  # before the record: it is left before the lock is
    with suppress(OSError, ValueError, KeyError):
        planned = digest(read_json(Path(name) / "metrics.json")["spec"]) == digest(wanted)
        return State(name, suite, "done" if planned else "stale")
    note, left = _how_far(folder, wanted)
    if running:
        return State(name, suite, "running", note, left)
    if not (folder / log).exists():
        return State(name, suite, "missing")
    return State(name, suite, "stopped", note or _last_line(folder / log))


def _how_far(folder: Path, wanted: dict) -> tuple[str, float | None]:
    """The step of a run's last checkpoint in words, and the seconds that are left; ("", None) without one."""
    saved: list[tuple[float, Path]] = []
    for path in folder.glob("checkpoint-*.pt"):
        with suppress(FileNotFoundError):  # the run has just ended
            saved.append((path.stat().st_mtime, path))
    progress = progress_of(max(saved)[1]) if saved else None
    if progress is None or "training" not in wanted:
        return "", None
    (reached, seconds), steps, age = progress, wanted["training"]["steps"], time.time() - max(saved)[0]
    return f"step {reached:,} of {steps:,}, {age:.0f} s ago", max(seconds / reached * (steps - reached) - age, 0)


def progress_of(checkpoint: Path) -> tuple[int, float] | None:
    """Steps and seconds of the run of a checkpoint, without PyTorch: no tensor is read. None before the first step, and for
    a damaged file."""
    with suppress(Exception):  # whatever a file can hold that anybody may have written
        with zipfile.ZipFile(checkpoint) as archive:  # what stands before it in the file, a digest, is skipped
            (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            with archive.open(name) as stream:
                progress = _Numbers(stream).load()["progress"]
        steps, seconds = int(progress["steps"]), float(progress["seconds"])
        return (steps, seconds) if steps > 0 and math.isfinite(seconds) else None
    return None


class _Numbers(pickle.Unpickler):
    """Reads no storage and calls nothing of what a file names: in place of every object stands None."""

    def find_class(self, module: str, name: str) -> Any:
        return OrderedDict if name == "OrderedDict" else lambda *arguments: None  # not dict: a state dict has an attribute

    def persistent_load(self, pid: object) -> None:
        return None


def _last_line(log: Path) -> str:
    """"" for a log that is gone."""
    lines: list[str] = []
    with suppress(FileNotFoundError), open(log, "rb") as stream:
        stream.seek(max(0, log.stat().st_size - TAIL))
        lines = ["an empty log", *stream.read().decode("utf-8", "replace").replace("\r", "\n").split("\n")]  # \r: of a bar
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


# --- what is left


def seconds_left(plan: spec.Plan, found: list[State]) -> float | None:
    """Seconds until all of a scale is done, by the forecast that `plan` left; None without one of this configuration.

    Corrected by what took jobs that were done since, and those that run count for what their checkpoints leave.
    """
    path = Path(f"results/{plan.scale}/plan.json")
    with suppress(OSError, ValueError):
        forecast = read_json(path)
        if forecast.get("of") == identity(plan):
            return _seconds_left(forecast, path.stat().st_mtime, found)
    return None


def identity(plan: spec.Plan) -> str:
    """Twelve hex digits over the specs of all that a scale runs."""
    runs = plan.trained | plan.predictors | plan.scaling | plan.curves
    return digest([plan.datasets, plan.tasks, {path: run.spec for path, run in runs.items()}])


def _seconds_left(forecast: dict, written: float, found: list[State]) -> float:
    running = {state.name: state.left_s for state in found if state.left_s is not None}
    left, predicted, took = 0.0, 0.0, 0.0
    for job in forecast["jobs"]:
        if not _closed(job, written):
            left += running.get(job["name"], job["seconds"]) * job["threads"]
        elif job["state"] != "done" and (seconds := took_s(Path(job["name"]))):
            predicted += job["seconds"]
            took += seconds
    return left / forecast["cores"] * (took / predicted if predicted else 1.0)


def _closed(job: dict, written: float) -> bool:
    """Whether a job of a forecast needs no more time: done then, or since."""
    with suppress(FileNotFoundError):
        changed = Path(job["file"]).stat().st_mtime
        return job["state"] == "done" or changed > written
    return False


def took_s(folder: Path) -> float | None:
    """Seconds that Snakemake says a finished run took; None where it does not, or not yet: its record is there earlier."""
    with suppress(OSError, ValueError, IndexError):
        return float((folder / "benchmark.tsv").read_text().split("\n")[1].split("\t")[0])
    return None


class TimeLeft(logging.Handler):
    """Says after each job of Snakemake, on whose logger it is put, how long the rest of the scale will take, asked for or
    not; nothing without a forecast."""

    def __init__(self, plan: spec.Plan):
        super().__init__()
        self.plan = plan

    def emit(self, message: logging.LogRecord) -> None:
        if getattr(message, "event", "") != "progress":
            return
        with suppress(Exception):  # it would end Snakemake in the middle of its jobs: a plan.json that is none, say
            if left := seconds_left(self.plan, []):
                print(f"all of scale {self.plan.scale}: about {span(left)} left", file=sys.stderr, flush=True)


def shown(plan: spec.Plan, found: list[State]) -> str:
    """States as text: a line a suite, then what runs and what stopped, then the time that is left."""
    from tabulate import tabulate

    suites = {suite: Counter(state.state for state in found if state.suite == suite)
              for suite in dict.fromkeys(state.suite for state in found)}
    suites["all"] = Counter(state.state for state in found)
    rows = [[suite, *(counts[state] or "" for state in STATES)] for suite, counts in suites.items()]
    lines = [f"scale {plan.scale}", tabulate(rows, ["", *STATES])]
    for wanted in ("running", "stopped"):
        lines += ["", *(_line(state) for state in found if state.state == wanted)]
    if len(found) > suites["all"]["done"]:
        left = seconds_left(plan, found)
        lines += ["", f"about {span(left)} left" if left is not None else
                  "time left: `python -m flarepp plan` makes an estimate"]
    return "\n".join(line for place, line in enumerate(lines) if line or lines[place - 1])


def _line(state: State) -> str:
    left = "" if state.left_s is None else f", {span(state.left_s)} left"
    return f"{state.state} {state.name}{': ' if state.note else ''}{state.note}{left}"


def span(seconds: float) -> str:
    """Seconds as "42 s", "12 min 05 s", "3 h 20 min", "5 d 03 h"."""
    for limit, unit, parts in ((99.5, 1, "{1} s"), (3600, 60, "{0} min {1:02d} s"), (86400, 3600, "{0} h {1:02d} min")):
        if seconds < limit:
            whole, rest = divmod(round(seconds / max(1, unit / 60)), 60)
            return parts.format(whole, round(seconds) if unit == 1 else rest)
    return "{} d {:02d} h".format(*divmod(round(seconds / 3600), 24))
