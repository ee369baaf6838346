"""The loop that every run shares: a step at a time to the last, evaluations, learning curve, checkpoints, and how it ends.

What a step and an evaluation are, and which numbers of them go into the record, each kind of run says in its `Work`.
A checkpoint is written atomically every `checkpoint_seconds`, and on SIGTERM, with which the run then ends: started again
it resumes, and ends with the same bits on CPU. A run that diverges or runs out of memory is a result.
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn
from tqdm import tqdm

from flarepp import record
from flarepp.events import event_writer
from flarepp.memory import keep_freed
from flarepp.optimise import Optimiser, optimiser_step
from flarepp.parallel import Ranks
from flarepp.processes import sigterm_noted
from flarepp.provenance import (
    choose_device,
    code_digest,
    git_state,
    is_out_of_memory,
    machine,
    parameter_dtypes,
    peak_memory_mb,
)

HISTORY = ("step", "lr", "loss", "grad_norm", "loss_scale")  # columns of every learning curve
HISTORY_ROWS = 500  # rows of the learning curve besides the evaluations
LEAST_LOSS_SCALE = 1.0  # a scaler that shrinks below this finds no finite gradients any more


class Diverged(Exception):
    """Training produced numbers that are not finite; the message says what and at which step."""


@dataclass
class Progress:
    """Where a run stands; everything a resumed run needs besides weights and optimiser."""

    steps: int = 0  # optimiser steps taken
    batches: int = 0  # batches drawn, the sampler's position
    skipped: int = 0  # steps the loss scaler skipped
    loss_sum: float = 0.0  # since the last row of the history
    loss_count: int = 0
    seconds: float = 0.0
    best_test: float = math.inf
    history: list = field(default_factory=list)


class Placed(Protocol):
    """A spec and where it is carried out."""

    spec: dict
    ranks: Ranks

    @property
    def device(self) -> torch.device: ...


class Run(Placed, Protocol):
    """What the loop needs of a run in memory."""

    models: dict[str, nn.Module]  # "last": the weights as they are, "ema": their average
    optimiser: Optimiser
    progress: Progress
    step_seconds: list[float]  # of every step that this process took

    @property
    def num_train(self) -> int: ...


SomeRun = TypeVar("SomeRun", bound=Run)


@dataclass(frozen=True)
class Work(Generic[SomeRun]):
    """What a kind of run does, for the loop."""

    build: Callable[[], SomeRun]
    step: Callable[[SomeRun], Tensor]  # attempts an optimiser step; the gradient norm
    evaluate: Callable[[SomeRun], tuple[dict[str, float], str]]  # columns of the learning curve, and a line for people
    finish: Callable[[SomeRun], None]  # after the last step: what a run resumed there still lacks
    metrics: Callable[[SomeRun], dict]  # of a run that succeeded


def say(run: Placed, text: str) -> None:
    """Print on the main rank."""
    if run.ranks.is_main:
        print(text, flush=True)


def prepare(training: dict) -> torch.device:
    """Seed torch's global generator, set its threads and precision; returns the run's device."""
    torch.set_num_threads(training["num_threads"])
    keep_freed()
    torch.set_float32_matmul_precision("highest")  # no TF32 in a run called FP32
    torch.manual_seed(training["seed"])
    return choose_device(training["device"])


def precision(run: Placed) -> torch.autocast:
    """The context in which the models of a run are called."""
    return torch.autocast(run.device.type, dtype=torch.float16, enabled=run.spec["training"]["precision"] == "fp16")


def next_batch(run: Run) -> Tensor:
    """Indices [B] of the next batch: a fresh permutation each epoch from (seed, epoch), the short last batch dropped."""
    training = run.spec["training"]
    epoch, position = divmod(run.progress.batches, run.num_train // training["batch_size"])
    order = np.random.default_rng([training["seed"], epoch]).permutation(run.num_train)
    start = position * training["batch_size"]
    run.progress.batches += 1
    return torch.from_numpy(order[start:start + training["batch_size"]]).to(run.device)


def attempt_step(run: Run, loss: Tensor) -> Tensor:
    """One attempt at an optimiser step; returns the gradient norm. Raises Diverged on a loss without a value and on collapse
    of the loss scale."""
    progress, ranks = run.progress, run.ranks
    norm, taken = optimiser_step(run.models["last"], run.optimiser, loss, ranks.sync_gradients)
    if taken:
        value = ranks.mean(loss).item()
        if not math.isfinite(value):
            raise Diverged(f"the loss is {value} at step {progress.steps}")
        progress.steps, progress.loss_sum, progress.loss_count = (
            progress.steps + 1, progress.loss_sum + value, progress.loss_count + 1)
    else:
        progress.skipped += 1
        if run.optimiser.scaler.get_scale() < LEAST_LOSS_SCALE:
            raise Diverged(f"the loss scale fell below {LEAST_LOSS_SCALE} at step {progress.steps}")
    return norm


@contextmanager
def evaluation_draws(run: Placed) -> Iterator[None]:
    """Draws of the block come from the spec's seed; afterwards the generators stand where they stood."""
    with torch.random.fork_rng(devices=[run.device] if run.device.type == "cuda" else []):
        torch.manual_seed(run.spec["training"]["seed"])
        yield


def add_history(run: SomeRun, work: Work[SomeRun], norm: Tensor, rate: float, evaluated: bool) -> dict:
    """Append a row to the learning curve, at an evaluation with what it found; returns the row."""
    progress = run.progress
    row = {"step": progress.steps, "lr": rate, "grad_norm": float(norm),
           "loss": progress.loss_sum / max(progress.loss_count, 1), "loss_scale": run.optimiser.scaler.get_scale()}
    if evaluated:
        found, words = work.evaluate(run)
        row |= found
        say(run, f"step {progress.steps}: loss {row['loss']:.4g}, {words}, {progress.seconds:.0f} s")
    progress.history.append(row)
    progress.loss_sum, progress.loss_count = 0.0, 0
    return row


def fit(run: SomeRun, work: Work[SomeRun], checkpoint: Path, watch: Callable[[dict], None]) -> None:
    """Train from where the run stands to its last step, with evaluations, history, whose rows `watch` gets, and checkpoints."""
    training, progress = run.spec["training"], run.progress
    steps, evaluations = training["steps"], training["num_evaluations"]
    marks = {round(steps * (index + 1) / evaluations) for index in range(evaluations)}
    interval = max(1, steps // HISTORY_ROWS)
    started = time.monotonic()
    before = progress.seconds
    for row in progress.history:  # of a resumed run
        watch(row)
    shown = tqdm(total=steps, initial=progress.steps, unit="step", disable=None if run.ranks.is_main else True)
    with checkpoints(run, checkpoint) as keep, shown as bar:
        while progress.steps < steps:
            reached, rate = progress.steps, float(run.optimiser.schedule.get_last_lr()[0])
            begun = time.monotonic()
            norm = work.step(run)
            run.step_seconds.append(time.monotonic() - begun)
            bar.update(progress.steps - reached)
            progress.seconds = before + time.monotonic() - started
            if progress.steps > reached and (progress.steps in marks or progress.steps % interval == 0):
                watch(add_history(run, work, norm, rate, progress.steps in marks))
            if run.ranks.is_main:
                keep()


def learn(run: SomeRun, work: Work[SomeRun], checkpoint: Path,
          watch: Callable[[dict], None] = lambda row: None) -> tuple[str, str]:
    """Train to the end, from the checkpoint if there is one; returns (status, message)."""
    try:
        restore_checkpoint(run, checkpoint)
        fit(run, work, checkpoint, watch)
        work.finish(run)
    except Diverged as error:
        return "diverged", str(error)
    except (RuntimeError, MemoryError) as error:
        return "oom", lack_of_memory(error)
    return "ok", ""


def lack_of_memory(error: RuntimeError | MemoryError) -> str:
    """The error in a line if it is one of memory; otherwise raises it."""
    if not is_out_of_memory(error):
        raise error
    return (str(error) or type(error).__name__).splitlines()[0]


@contextmanager
def checkpoints(run: Run, path: Path) -> Iterator[Callable[[], None]]:
    """What to call after every step, on the main rank: it saves the run when it is time, and on SIGTERM also ends it.

    The other ranks take their steps until the main one is gone.
    """
    saved = time.monotonic()

    def keep() -> None:
        nonlocal saved
        if noted.is_set() or time.monotonic() - saved >= run.spec["training"]["checkpoint_seconds"]:
            save_checkpoint(run, path)
            saved = time.monotonic()
        if noted.is_set():
            say(run, f"SIGTERM: stopped at step {run.progress.steps}; the same command goes on from there")
            raise SystemExit(128 + signal.SIGTERM)

    with sigterm_noted() as noted:
        yield keep


def save_checkpoint(run: Run, path: Path) -> None:
    """Write the complete state of the run behind the SHA-256 of it and of the file's name, atomically."""
    generators = {"cpu": torch.get_rng_state()}
    if run.device.type == "cuda":
        generators["cuda"] = torch.cuda.get_rng_state(run.device)
    state = {"model": run.models["last"].state_dict(), "optimiser": run.optimiser.state_dict(),
             "progress": asdict(run.progress), "generators": generators}
    torch.save(state, content := io.BytesIO())
    with record.atomic_path(path) as partial:
        with open(partial, "wb") as stream:
            stream.write(_checkpoint_digest(path, content.getbuffer()))
            stream.write(content.getbuffer())


def _checkpoint_digest(path: Path, content: bytes | memoryview) -> bytes:
    """Binds a checkpoint to its name, which says what it is of. Copies nothing: memory is a metric of the run."""
    digest = hashlib.sha256(path.name.encode())
    digest.update(content)
    return digest.digest()


def restore_checkpoint(run: Run, path: Path) -> None:
    """Continue from `path` if it exists and is as it was written there."""
    if not path.exists():
        return
    with open(path, "rb") as stream:
        digest, content = stream.read(32), stream.read()
    if digest != _checkpoint_digest(path, content):
        say(run, f"{path} is damaged; starting from the first step")
        return
    state = torch.load(io.BytesIO(content), map_location=run.device, weights_only=True)
    run.models["last"].load_state_dict(state["model"])
    run.optimiser.load_state_dict(state["optimiser"])
    run.progress = Progress(**state["progress"])
    torch.set_rng_state(state["generators"]["cpu"].cpu())
    if "cuda" in state["generators"]:
        torch.cuda.set_rng_state(state["generators"]["cuda"].cpu(), run.device)
    say(run, f"resumed at step {run.progress.steps} from {path}")


def provenance(spec: dict, data: Any, code: str, dtypes: list[str], num_ranks: int = 1) -> dict:
    """Where the numbers come from: data, versions, device, precision as read back, commit, digest of the code."""
    return {
        "dataset": data.provenance, "grid": data.grid and list(data.grid), "num_ranks": num_ranks,
        **machine(choose_device(spec["training"]["device"]), spec["training"]["precision"], dtypes),
        "git": git_state(), "code": code,
    }


def save_history(run: Run | None, columns: tuple[str, ...], path: Path) -> None:
    """Write the learning curve with these columns besides those of every curve, empty between evaluations."""
    with record.atomic_path(path) as partial, open(partial, "w", newline="") as stream:
        writer = csv.DictWriter(stream, HISTORY + columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(run.progress.history if run else [])


def save_weights(run: Run | None, others: dict[str, Tensor], path: Path) -> None:
    """Write the weights as they are and their average ("last/...", "ema/..."), and other tensors."""
    states = {name: model.state_dict() for name, model in run.models.items()} if run else {}
    tensors = {f"{name}/{key}": value.contiguous() for name, state in states.items() for key, value in state.items()}
    with record.atomic_path(path) as partial:
        safetensors.torch.save_file(tensors | others, partial)


def checkpoint_path(spec: dict, data: Any, code: str, run_dir: Path) -> Path:
    """The file names what the state in it is of; that is the same for any number of ranks."""
    training = {key: value for key, value in spec["training"].items() if key not in ("context_parallel", "data_parallel")}
    key = record.digest([spec | {"training": training}, data.fingerprint, torch.__version__, code])
    return run_dir / f"checkpoint-{key}.pt"


def metrics_of(run: Run) -> dict:
    """The metrics that every record has."""
    return {
        "steps": run.progress.steps, "skipped_steps": run.progress.skipped,
        "parameter_count": sum(parameter.numel() for parameter in run.models["last"].parameters()),
        "wall_time_s": run.progress.seconds, "peak_memory_mb": peak_memory_mb(run.device),
        **({"step_ms": 1e3 * statistics.median(run.step_seconds)} if run.step_seconds else {}),
    }


def run_of(spec: dict, data: Any, work: Work[SomeRun], ranks: Ranks, run_dir: Path,
           events: bool = False) -> tuple[SomeRun | None, dict]:
    """Build and train on `data`, what the dataset's file holds; returns the run, None without memory for it, and the content of
    metrics.json. The numbers of an experiment stand in it only for a run that succeeded."""
    run, metrics, dtypes = None, {"steps": 0}, []
    try:
        run = work.build()
    except (RuntimeError, MemoryError) as error:
        code, status, message = code_digest(), "oom", f"building the model: {lack_of_memory(error)}"
    else:
        code = code_digest()  # of the model too, now that it is loaded
        checkpoint = checkpoint_path(spec, data, code, run_dir)
        status, message = learn(run, work, checkpoint, *([event_writer(run_dir)] if events and ranks.is_main else []))
        metrics, dtypes = (work.metrics(run) if status == "ok" else {}) | metrics_of(run), parameter_dtypes(run.models["last"])
    origin = provenance(spec, data, code, dtypes, ranks.num_context * ranks.num_data)
    return run, {"status": status, "message": message, "metrics": metrics, "spec": spec, "provenance": origin}


def leave_record(result: dict, run_dir: Path) -> dict:
    """Write metrics.json, with which the run has ended; returns its content."""
    result = record.write_record(result, run_dir)
    for leftover in (*run_dir.glob("checkpoint-*.pt"), *run_dir.glob(".*.partial*")):
        os.unlink(leftover)
    return result
