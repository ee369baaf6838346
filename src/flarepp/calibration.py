"""What this device needs for a step: short measurements of what a plan would run, kept in one file a device.

    start    small runs of every verb from beginning to end: seconds of a process besides its steps
    data     a few samples of a dataset: their sizes, seconds and bytes a sample
    counts   multiply-adds of a forward pass of one sample at N tokens, and parameters, of every model
    steps    a few steps of a class on random samples, and an evaluation: seconds, memory above the idle process

Training steps are measured as many at a time as would run at a time, up to forecast.AT_A_TIME, since they share caches and
memory; measuring runs alone, as their rules have it. On the CPU a second is one of computing on every thread, and the least of
several counts, so that what else the machine does meanwhile hardly does. A step of more than LIMIT multiply-adds is measured at
fewer tokens. Times at other sizes follow from the operations, in `forecast`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from flarepp import classify, data, record, train
from flarepp.cost import FORKING, in_child
from flarepp.data import lra, store
from flarepp.data.lra.sequences import Sequences, Task
from flarepp.models import build_model
from flarepp.operations import mixer_multiply_adds, model_multiply_adds
from flarepp.provenance import choose_device, machine, num_cores, peak_memory_mb
from flarepp.step import IN_DIM, OUT_DIM, Step, configure

LIMIT = {"cpu": 1.5e9, "cuda": 2e11}  # multiply-adds, forward, of the largest step that is measured
LEAST_TOKENS = 64
SAMPLES = 16  # of a dataset that are solved: a batch of the slowest solver
DEV = 64  # samples of a task that are classified
SCHEDULE = 1000  # steps of the schedule, more than are taken
Measured = tuple[Callable, tuple[Callable, int] | None]  # a step; an evaluation and its samples
SECONDS, STEPS = 0.25, (2, 30)  # a step is repeated so long, and so often at least and at most


def device_of(wanted: str) -> dict:
    """Facts of the device that calibrates; ValueError when CUDA is asked for and absent."""
    device = choose_device(wanted)
    return {"device": machine(device, "fp32", [])["device"], "device_type": device.type, "cores": num_cores("cpu"),
            "devices": num_cores(device.type) if device.type == "cuda" else 0, "torch": torch.__version__}


def measure(stage: str, items: dict[str, dict], workers: int, *, apart: bool = False, fork: bool = True) -> dict[str, dict]:
    """The results of `items` by key, measured in children of this process, `workers` at a time.

    apart: each item in a child of its own, which makes its peak of memory its own; fork: not where they use CUDA.
    cost.ChildFailed for a bug.
    """
    names, count = list(items), len(items) if apart else min(workers, len(items))
    groups = [{"stage": stage, "items": {name: items[name] for name in names[start::count]}} for start in range(count)]
    found: dict[str, dict] = {}
    with ThreadPoolExecutor(workers) as pool, tqdm(total=len(names), desc=f"calibrating: {stage}", disable=None) as bar:
        for answer in pool.map(lambda group: in_child(Path(f"calibration of {stage}"), _measure, group, fork), groups):
            found |= answer
            with FORKING:  # a fork while the bar is drawn would wait for its lock for ever
                bar.update(len(answer))
    return found


def _measure(group: dict) -> dict[str, dict]:
    function: Callable = {"start": _start, "data": _data, "counts": _counts, "steps": _step}[group["stage"]]
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
        return {name: function(item) for name, item in group["items"].items()}


# --- counts and steps


def _model(unit: dict, tokens: int) -> nn.Module:
    sizes: dict[str, Any] = {"in_dim": IN_DIM, "out_dim": OUT_DIM}
    if unit["verb"] == "classify":
        sizes = {"in_dim": unit["symbols"] + 1, "out_dim": unit["classes"], "seq_len": tokens,
                 "num_documents": unit["documents"]}
    return build_model(**unit["model"], **sizes)


def _multiply_adds(unit: dict, model: nn.Module, tokens: int) -> int:
    """Of the forward pass of one sample; of a classifier those of its blocks."""
    if unit["verb"] != "classify":
        return model_multiply_adds(model, tokens, IN_DIM)
    blocks, width = model.get_submodule("blocks").children(), unit["model"]["channel_dim"]
    return unit["documents"] * sum(mixer_multiply_adds(block, tokens, width) for block in blocks)


def _counts(unit: dict) -> dict:
    torch.set_num_threads(1)
    model = _model(unit, unit["tokens"])
    return {"multiply_adds": _multiply_adds(unit, model, unit["tokens"]),
            "parameters": sum(parameter.numel() for parameter in model.parameters())}


def _repeated(function: Callable, device: torch.device) -> float:
    """Least seconds of a call, after one that warms up: what else the machine does only adds to it."""
    cuda = device.type == "cuda"
    clock, threads = (time.perf_counter, 1) if cuda else (time.process_time, torch.get_num_threads())
    times: list[float] = []
    for index in range(1 + STEPS[1]):
        started = clock()
        function()
        if cuda:
            torch.cuda.synchronize(device)
        times += [(clock() - started) / threads] if index else []
        if len(times) >= STEPS[0] and sum(times) > SECONDS:
            break
    return min(times)


def _step(unit: dict) -> dict:
    """Seconds of a step, of the evaluation of one sample with both sets of weights, and MiB above the idle process."""
    torch.set_num_threads(1)
    settings = unit["training"] if "training" in unit else unit[unit["verb"]]
    tokens, device = unit["tokens"], choose_device(unit["device"])
    while (operations := settings["batch_size"] * _multiply_adds(unit, _model(unit, tokens), tokens)) > LIMIT[device.type]:
        if tokens <= LEAST_TOKENS:
            break
        tokens //= 2
    idle = peak_memory_mb(device) if device.type == "cpu" else 0.0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    step, evaluate = {"train": _training, "classify": _classifying}.get(unit["verb"], _measuring)(unit, tokens, device)
    found = {"seconds": _repeated(step, device), "multiply_adds": operations, "tokens": tokens,
             "memory_mb": peak_memory_mb(device) - idle}
    return found | ({"evaluation_s": _repeated(evaluate[0], device) / evaluate[1]} if evaluate else {})


def _measuring(unit: dict, tokens: int, device: torch.device) -> Measured:
    verb = unit["verb"]
    settings = unit[verb] | {"num_tokens": tokens}
    configure(settings)
    return Step({"model": unit["model"], verb: settings}, verb, device), None


def _training(unit: dict, tokens: int, device: torch.device) -> Measured:
    training = unit["training"] | {"device": device.type, "steps": SCHEDULE}
    benchmark = random_benchmark(tokens, 4 * training["batch_size"], training["eval_batch_size"])
    if training["gradient_weight"]:
        side = int(tokens**0.5)
        benchmark = random_benchmark(side * side, 4 * training["batch_size"], training["eval_batch_size"], (side, side))
    run = train.build_run({"model": unit["model"], "training": training}, benchmark)
    return lambda: train.training_step(run), (lambda: train.evaluate(run), training["eval_batch_size"])


def _classifying(unit: dict, tokens: int, device: torch.device) -> Measured:
    training = unit["training"] | {"device": device.type, "steps": SCHEDULE, "eval_batch_size": DEV // 4}
    lengths = [min(length, tokens) for length in unit["lengths"]]
    learned, dev, test = (_sequences(unit, tokens, lengths, count) for count in (4 * training["batch_size"], DEV, DEV))
    task = Task("random", learned, dev, test, num_symbols=unit["symbols"], num_classes=unit["classes"], card={})
    run = classify.build_run({"model": unit["model"], "training": training}, task)
    return lambda: classify.training_step(run), (lambda: classify.evaluate(run, "dev"), DEV)


def random_benchmark(points: int, num_train: int, num_test: int, grid: tuple[int, ...] | None = None) -> store.Benchmark:
    """Samples of `points` random points, features [S, N, 3] and target [S, N, 1]."""
    draws = np.random.default_rng(0)
    train_set, test_set = (store.Samples(*(draws.standard_normal((count, points, dim), np.float32) for dim in (IN_DIM, OUT_DIM)))
                           for count in (num_train, num_test))
    card = {"source": "random", "split": "random", "channels": {"features": ["x", "y", "z"], "target": ["value"]}}
    return store.Benchmark("random", train_set, test_set, store.Affine.identity(IN_DIM), store.Affine.identity(OUT_DIM), grid,
                           False, card)


def _sequences(unit: dict, tokens: int, lengths: list[int], count: int) -> Sequences:
    draws = np.random.default_rng(0)
    shape = count, unit["documents"]
    drawn = draws.permutation(np.resize(np.array(lengths, np.int32), shape).ravel()).reshape(shape)
    symbols = draws.integers(0, unit["symbols"], (*shape, tokens)).astype(np.uint8)
    symbols[np.arange(tokens) >= drawn[..., None]] = 0
    return Sequences(symbols, drawn, draws.integers(0, unit["classes"], count).astype(np.uint8))


# --- datasets


def _data(spec: dict) -> dict:
    """Sizes of a dataset's samples, seconds and bytes a sample, from a few that are solved."""
    with tempfile.TemporaryDirectory() as folder:
        return (_task if spec["name"] in lra.task_names() else _benchmark)(spec, Path(folder))


def _benchmark(spec: dict, folder: Path) -> dict:
    small = spec | {"num_train": SAMPLES - SAMPLES // 4, "num_test": SAMPLES // 4}
    data.benchmark_module(spec["name"])  # importing it is part of the start
    started = time.process_time()
    data.prepare(small, folder / "store.h5", folder / "card.json", folder / "generated", folder / "lock.json", 1)
    seconds = time.process_time() - started
    files = [folder / "store.h5", *(path for path in (folder / "generated").rglob("*") if path.is_file())]
    return {"tokens": record.read_card(folder / "card.json")["counts"]["points"], "seconds": seconds / SAMPLES,
            "bytes": sum(path.stat().st_size for path in files) / SAMPLES}


def _task(spec: dict, folder: Path) -> dict:
    module = lra.task_module(spec["name"])
    small = spec | {"num_train": module.CHUNK // 2, "num_dev": DEV, "num_test": DEV}
    started = time.process_time()
    task = module.generate(small, num_workers=1)
    seconds, drawn = time.process_time() - started, 2 * module.CHUNK
    return {"tokens": task.max_length, "seconds": seconds / drawn, "bytes": task.train.tokens[0].nbytes + 5.0,
            "symbols": task.num_symbols, "classes": task.num_classes, "documents": task.num_documents,
            "lengths": np.quantile(task.train.lengths, np.linspace(0, 1, DEV), method="nearest").tolist()}


# --- processes


def _start(item: dict) -> dict:
    """Seconds and MiB of a small run of a verb from beginning to end, without its steps, `copies` at a time."""
    with tempfile.TemporaryDirectory() as folder:
        return {"train": _start_run, "predictor": _start_run, "paper": _start_paper}.get(item["verb"], _start_measuring)(
            item, Path(folder))


def _ended(commands: list[list[str]], folder: Path) -> list[tuple[float, float]]:
    """Seconds on the clock and of computing of processes that run at a time; subprocess.CalledProcessError, with the log, for one
    that fails."""
    started, found = time.perf_counter(), []
    with open(folder / "log", "w+") as log:
        children = [subprocess.Popen([sys.executable, *words], stdout=log, stderr=log) for words in commands]
        for child in children:
            _, status, used = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
            found.append((time.perf_counter() - started, used.ru_utime + used.ru_stime))
        log.seek(0)
        if failed := next((child for child in children if child.returncode), None):
            raise subprocess.CalledProcessError(failed.returncode, failed.args, log.read())
    return found


def _computing(commands: list[list[str]], folder: Path) -> float:
    """Least seconds of computing of processes that run at a time."""
    return min(computing for _, computing in _ended(commands, folder))


def _start_run(item: dict, folder: Path) -> dict:
    store.write(random_benchmark(LEAST_TOKENS, 8, 4), folder / "store.h5")
    runs = [folder / f"run{index}" for index in range(item["copies"])]
    for run in runs:
        record.write_json(item["spec"], run / "spec.json")
    words = [["-m", "flarepp", item["verb"], str(run / "spec.json"), "--data", str(folder / "store.h5")] for run in runs]
    seconds = _computing(words, folder)
    return {"seconds": seconds, "memory_mb": max(record.read_run(run)[1]["metrics"].get("peak_memory_mb", 0) for run in runs)}


def _start_paper(item: dict, folder: Path) -> dict:
    words = ["-c", "import pandas, matplotlib.pyplot, seaborn, h5py, flarepp.paper.panels"]
    return {"seconds": _computing([words] * item["copies"], folder)}


def _start_measuring(item: dict, folder: Path) -> dict:
    """Of a measuring run, at a few tokens: the process, each of its cells, and what ranks add to a step."""
    verb, spec = item["verb"], item["spec"]
    record.write_json(spec, folder / "spec.json")
    ((seconds, _),) = _ended([["-m", "flarepp", verb, str(folder / "spec.json")]], folder)
    metrics = record.read_run(folder if verb == "parallel" else folder / f"N{LEAST_TOKENS}")[1]["metrics"]
    steps = metrics["step_ms"] * 6 if verb == "parallel" else metrics["step_ms"] + metrics["first_step_ms"]
    return {"seconds": seconds - metrics["wall_time_s"], "cell_s": max(0.0, metrics["wall_time_s"] - steps / 1e3),
            "step_s": metrics["step_ms"] / 1e3}
