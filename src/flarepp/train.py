"""One run: a spec and a dataset in, one record out (metrics.json, history.csv, predictions.h5, model.safetensors).

The run is a function of (spec, data): every draw comes from the spec's seed, the thread count from the spec. A checkpoint is
written atomically every `checkpoint_seconds`, and on SIGTERM, with which the run then ends: started again it resumes, and
ends with the same bits on CPU. A run that diverges or runs out of memory is a result and is recorded as one.

Several processes (ranks) train one run together: they hold the same weights, optimiser and generators, each computes its
tokens of its samples, and the main one writes and prints. What ends a run is decided from numbers that all of them hold.
Only lack of memory strikes one alone: it leaves the record and fails, so that whoever started the ranks ends the others.
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
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn
from tqdm import tqdm

from flarepp import parallel, record
from flarepp.data import store
from flarepp.events import event_writer
from flarepp.losses import relative_l2, training_loss
from flarepp.memory import keep_freed
from flarepp.models import build_model
from flarepp.optimise import Optimiser, build_optimiser, optimiser_step
from flarepp.processes import sigterm_noted
from flarepp.provenance import (
    check_sections,
    choose_device,
    code_digest,
    exclusive,
    git_state,
    is_out_of_memory,
    machine,
    parameter_dtypes,
    peak_memory_mb,
)

HISTORY = ("step", "lr", "loss", "grad_norm", "loss_scale", "test_last", "test_ema")
HISTORY_ROWS = 500  # rows of the learning curve besides the evaluations
LEAST_LOSS_SCALE = 1.0  # a scaler that shrinks below this finds no finite gradients any more


class Diverged(Exception):
    """Training produced numbers that are not finite; the message says what and at which step."""


@dataclass
class Split:
    """One split on the device: features [S, N, c_in] encoded, target [S, N, c_out] decoded, both in the run's dtype; sizes [S]
    where samples differ in their points (padding is 0), else None."""

    features: Tensor
    target: Tensor
    sizes: Tensor | None

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """features [B, N, c_in], target [B, N, c_out] and mask [B, N] of some samples, N that of the longest of them."""
        if self.sizes is None:
            return self.features[indices], self.target[indices], None
        sizes = self.sizes[indices]
        longest = int(sizes.max())
        mask = torch.arange(longest, device=sizes.device) < sizes[:, None]
        return self.features[indices, :longest], self.target[indices, :longest], mask


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


@dataclass
class Inference:
    """What predicts and is evaluated: one model a set of weights, the test set, the spec they run under."""

    spec: dict
    grid: tuple[int, ...] | None
    test: Split
    target_mean: Tensor
    target_std: Tensor
    models: dict[str, nn.Module]  # "last": the weights as they are, "ema": their average
    evaluated: dict = field(default_factory=dict, kw_only=True)  # weights name -> latest (predictions, errors)
    ranks: parallel.Ranks = field(default=parallel.Ranks(), kw_only=True)

    @property
    def device(self) -> torch.device:
        return self.test.features.device

    def say(self, text: str) -> None:
        """Print on the main rank."""
        if self.ranks.is_main:
            print(text, flush=True)


@dataclass
class Run(Inference):
    """A run in memory: what `train` builds, steps, evaluates, saves and restores."""

    train: Split
    optimiser: Optimiser
    progress: Progress
    step_seconds: list[float] = field(default_factory=list)  # of every step that this process took
    watch: Callable[[dict], None] = field(default=lambda row: None)  # called with every row of the history

    @property
    def model(self) -> nn.Module:
        return self.models["last"]


def load_split(samples: store.Samples, norm: store.Affine, device: torch.device, name: str) -> Split:
    """Encode features and move a split to the device. ValueError names a sample whose target is zero everywhere."""
    empty = np.flatnonzero(~samples.target.any(axis=(1, 2)))
    if empty.size:
        raise ValueError(f"{name} sample {empty[0]}: the target is zero everywhere, its relative error is undefined")
    features = norm.encode(samples.features).astype(np.float32)
    features[~samples.mask] = 0
    sizes = None if samples.sizes is None else torch.tensor(samples.sizes, device=device)
    return Split(torch.tensor(features, device=device), torch.tensor(samples.target, device=device), sizes)  # aligned by torch


def build_inference(spec: dict, benchmark: store.Benchmark) -> Inference:
    """Seed, build the model, load the test set. Touches torch's global generator, threads and precision."""
    training = spec["training"]
    torch.set_num_threads(training["num_threads"])
    keep_freed()
    torch.set_float32_matmul_precision("highest")  # no TF32 in a run called FP32
    torch.manual_seed(training["seed"])
    device = choose_device(training["device"])
    model = build_model(**spec["model"], in_dim=len(benchmark.feature_norm.mean), out_dim=len(benchmark.target_norm.mean),
                        grid=benchmark.grid).to(device)
    mean, std = (torch.tensor(value, dtype=torch.float32, device=device)
                 for value in (benchmark.target_norm.mean, benchmark.target_norm.std))
    test = load_split(benchmark.test, benchmark.feature_norm, device, f"{benchmark.name} test")
    return Inference(spec, benchmark.grid, test, mean, std, {"last": model})


def build_run(spec: dict, benchmark: store.Benchmark, ranks: parallel.Ranks = parallel.Ranks()) -> Run:
    """An `Inference` with what training adds: optimiser, averaged weights, training set, the other ranks."""
    inference = build_inference(spec, benchmark)
    train = load_split(benchmark.train, benchmark.feature_norm, inference.device, f"{benchmark.name} train")
    optimiser = build_optimiser(inference.models["last"], spec["training"])
    inference.models["ema"] = optimiser.average
    inference.models = {name: ranks.prepare(model) for name, model in inference.models.items()}
    return Run(**vars(inference) | {"ranks": ranks}, train=train, optimiser=optimiser, progress=Progress())


def predict(run: Inference, model: nn.Module, features: Tensor, mask: Tensor | None) -> Tensor:
    """Decoded prediction [B, N, c_out] in FP32, 0 where mask [B, N] is False; the model under the run's precision."""
    with torch.autocast(run.device.type, dtype=torch.float16, enabled=run.spec["training"]["precision"] == "fp16"):
        encoded = model(features, mask)
    prediction = encoded.to(run.target_std.dtype) * run.target_std + run.target_mean
    return prediction if mask is None else prediction.masked_fill(~mask[..., None], 0)


def next_batch(run: Run) -> Tensor:
    """Indices [B] of the next batch: a fresh permutation each epoch from (seed, epoch), the short last batch dropped."""
    training, num_train = run.spec["training"], len(run.train.features)
    epoch, position = divmod(run.progress.batches, num_train // training["batch_size"])
    order = np.random.default_rng([training["seed"], epoch]).permutation(num_train)
    start = position * training["batch_size"]
    run.progress.batches += 1
    return torch.from_numpy(order[start:start + training["batch_size"]]).to(run.device)


def training_step(run: Run) -> Tensor:
    """Draw a batch and attempt one optimiser step; returns the gradient norm. Raises Diverged on collapse of the scale."""
    progress, ranks, batch = run.progress, run.ranks, run.train.batch(next_batch(run))
    features, target = (ranks.shard(ranks.replica(part)) for part in batch[:2])
    mask = None if batch[2] is None else ranks.shard(ranks.replica(batch[2]))
    run.model.train()
    prediction = predict(run, run.model, features, mask)
    num_tokens = batch[0].shape[1]
    loss = training_loss(prediction, target, gradient_weight=run.spec["training"]["gradient_weight"], grid=run.grid,
                         norms=ranks.norms, whole=lambda part: ranks.whole(part, num_tokens))
    norm, taken = optimiser_step(run.model, run.optimiser, loss, ranks.sync_gradients)
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
def evaluation_draws(run: Any) -> Iterator[None]:
    """Draws of the block come from the spec's seed; afterwards the generators stand where they stood."""
    with torch.random.fork_rng(devices=[run.device] if run.device.type == "cuda" else []):
        torch.manual_seed(run.spec["training"]["seed"])
        yield


@torch.no_grad()
def evaluate(run: Inference) -> None:
    """Predictions [S, N, c_out] and relative L2 errors [S] of every set of weights on the test set.

    A function of weights, data and spec, also of a model that draws in evaluation; training's draws do not notice. Every
    data rank evaluates the whole test set.
    """
    batches = torch.arange(len(run.test.target), device=run.device).split(run.spec["training"]["eval_batch_size"])
    for name, model in run.models.items():
        model.eval()
        prediction = torch.zeros_like(run.test.target)
        with evaluation_draws(run):
            for indices in batches:
                features, _, mask = run.test.batch(indices)
                num_tokens = features.shape[1]
                part = predict(run, model, run.ranks.shard(features), None if mask is None else run.ranks.shard(mask))
                prediction[indices, :num_tokens] = run.ranks.whole(part, num_tokens)
        run.evaluated[name] = prediction, relative_l2(prediction, run.test.target)


def mean_error(run: Inference, name: str) -> float:
    """Mean over the test samples of the latest evaluation's errors."""
    return run.evaluated[name][1].double().mean().item()


def add_history(run: Run, norm: Tensor, rate: float, evaluated: bool) -> None:
    """Append a row to the learning curve; at an evaluation also the test errors. Raises Diverged if one is not finite."""
    progress, optimiser = run.progress, run.optimiser
    row = {"step": progress.steps, "lr": rate, "grad_norm": float(norm),
           "loss": progress.loss_sum / max(progress.loss_count, 1), "loss_scale": optimiser.scaler.get_scale()}
    if evaluated:
        evaluate(run)
        row |= {f"test_{name}": mean_error(run, name) for name in run.evaluated}
        if not math.isfinite(row["test_last"] + row["test_ema"]):
            raise Diverged(f"the test error is {row['test_last']} at step {progress.steps}")
        progress.best_test = min(progress.best_test, row["test_last"])
        run.say(f"step {progress.steps}: loss {row['loss']:.4g}, test {row['test_last']:.4g} "
                f"(ema {row['test_ema']:.4g}), {progress.seconds:.0f} s")
    progress.history.append(row)
    run.watch(row)
    progress.loss_sum, progress.loss_count = 0.0, 0


def fit(run: Run, checkpoint: Path) -> None:
    """Train from where the run stands to its last step, with evaluations, history and checkpoints."""
    training, progress = run.spec["training"], run.progress
    steps, evaluations = training["steps"], training["num_evaluations"]
    marks = {round(steps * (index + 1) / evaluations) for index in range(evaluations)}
    interval = max(1, steps // HISTORY_ROWS)
    started = time.monotonic()
    before = progress.seconds
    for row in progress.history:  # of a resumed run
        run.watch(row)
    shown = tqdm(total=steps, initial=progress.steps, unit="step", disable=None if run.ranks.is_main else True)
    with checkpoints(run, checkpoint) as keep, shown as bar:
        while progress.steps < steps:
            reached, rate = progress.steps, float(run.optimiser.schedule.get_last_lr()[0])
            begun = time.monotonic()
            norm = training_step(run)
            run.step_seconds.append(time.monotonic() - begun)
            bar.update(progress.steps - reached)
            progress.seconds = before + time.monotonic() - started
            if progress.steps > reached and (progress.steps in marks or progress.steps % interval == 0):
                add_history(run, norm, rate, progress.steps in marks)
            if run.ranks.is_main:
                keep()


@contextmanager
def checkpoints(run: Any, path: Path) -> Iterator[Callable[[], None]]:
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
            run.say(f"SIGTERM: stopped at step {run.progress.steps}; the same command goes on from there")
            raise SystemExit(128 + signal.SIGTERM)

    with sigterm_noted() as noted:
        yield keep


def save_checkpoint(run: Run, path: Path) -> None:
    """Write the complete state of the run behind the SHA-256 of it and of the file's name, atomically."""
    generators = {"cpu": torch.get_rng_state()}
    if run.device.type == "cuda":
        generators["cuda"] = torch.cuda.get_rng_state(run.device)
    state = {"model": run.model.state_dict(), "optimiser": run.optimiser.state_dict(),
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


def restore_checkpoint(run: Any, path: Path) -> None:
    """Continue from `path` if it exists and is as it was written there."""
    if not path.exists():
        return
    with open(path, "rb") as stream:
        digest, content = stream.read(32), stream.read()
    if digest != _checkpoint_digest(path, content):
        run.say(f"{path} is damaged; starting from the first step")
        return
    state = torch.load(io.BytesIO(content), map_location=run.device, weights_only=True)
    run.model.load_state_dict(state["model"])
    run.optimiser.load_state_dict(state["optimiser"])
    run.progress = Progress(**state["progress"])
    torch.set_rng_state(state["generators"]["cpu"].cpu())
    if "cuda" in state["generators"]:
        torch.cuda.set_rng_state(state["generators"]["cuda"].cpu(), run.device)
    run.say(f"resumed at step {run.progress.steps} from {path}")


def provenance(spec: dict, benchmark: Any, code: str, dtypes: list[str], num_ranks: int = 1) -> dict:
    """Where the numbers come from: data, versions, device, precision as read back, commit, digest of the code."""
    return {
        "dataset": benchmark.provenance, "grid": benchmark.grid and list(benchmark.grid), "num_ranks": num_ranks,
        **machine(choose_device(spec["training"]["device"]), spec["training"]["precision"], dtypes),
        "git": git_state(), "code": code,
    }


def save_history(history: list[dict], path: Path) -> None:
    """Write the learning curve; test columns are empty between evaluations."""
    with record.atomic_path(path) as partial, open(partial, "w", newline="") as stream:
        writer = csv.DictWriter(stream, HISTORY, lineterminator="\n")
        writer.writeheader()
        writer.writerows(history)


def save_weights(benchmark: store.Benchmark, weights: dict, path: Path) -> None:
    """Write weights ({"last": state dict, "ema": ...}) and the normalisers they learned with, [2, c] FP64 as in the store."""
    tensors = {f"{name}/{key}": value.contiguous() for name, state in weights.items() for key, value in state.items()}
    for name, norm in (("features", benchmark.feature_norm), ("target", benchmark.target_norm)):
        tensors[f"norm/{name}"] = torch.tensor(np.stack([norm.mean, norm.std]))
    with record.atomic_path(path) as partial:
        safetensors.torch.save_file(tensors, partial)


def save_predictions(benchmark: store.Benchmark, folder: Path, evaluated: dict) -> None:
    """Write the test set and what `evaluate` found on it, possibly nothing."""
    attributes = {"dataset": benchmark.name, "data_source": benchmark.card["source"]}
    if benchmark.grid is not None:
        attributes["grid"] = benchmark.grid
    record.write_predictions(
        folder, points=benchmark.test.features[..., :benchmark.num_coordinates], target=benchmark.test.target,
        sizes=benchmark.test.sizes,
        predictions={name: prediction.cpu().numpy() for name, (prediction, _) in evaluated.items()},
        errors={name: errors.cpu().numpy() for name, (_, errors) in evaluated.items()}, attributes=attributes)


def save_outputs(benchmark: store.Benchmark, run_dir: Path, history: list[dict], weights: dict, evaluated: dict) -> None:
    """Write learning curve, weights and test predictions, each of them possibly empty."""
    save_history(history, run_dir / "history.csv")
    save_weights(benchmark, weights, run_dir / "model.safetensors")
    save_predictions(benchmark, run_dir, evaluated)


def metrics_of(run: Run, regions: dict[str, np.ndarray], succeeded: bool) -> dict:
    """The metrics of a record; errors, also those over the regions [S, N, 1] alone, only of a run that succeeded."""
    errors = {name: mean_error(run, name) for name in run.evaluated} | {"best_test": run.progress.best_test}
    for region, inside in regions.items():
        mask = torch.from_numpy(inside).to(run.device)
        for name, (prediction, _) in run.evaluated.items():
            error = relative_l2(prediction * mask, run.test.target * mask)
            errors[f"{name}_{region}"] = error.double().mean().item()
    return {
        **(errors if succeeded else {}), "steps": run.progress.steps, "skipped_steps": run.progress.skipped,
        "parameter_count": sum(parameter.numel() for parameter in run.model.parameters()),
        "wall_time_s": run.progress.seconds, "peak_memory_mb": peak_memory_mb(run.device),
        **({"step_ms": 1e3 * statistics.median(run.step_seconds)} if run.step_seconds else {}),
    }


def learn(run: Run, checkpoint: Path) -> tuple[str, str]:
    """Train to the end, from the checkpoint if there is one; returns (status, message)."""
    try:
        restore_checkpoint(run, checkpoint)
        fit(run, checkpoint)
        if not run.evaluated:  # resumed after the last step
            evaluate(run)
    except Diverged as error:
        return "diverged", str(error)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return "oom", str(error).splitlines()[0]
    return "ok", ""


def checkpoint_path(spec: dict, benchmark: Any, code: str, run_dir: Path) -> Path:
    """The file names what the state in it is of; that is the same for any number of ranks."""
    training = {key: value for key, value in spec["training"].items() if key not in ("context_parallel", "data_parallel")}
    key = record.digest([spec | {"training": training}, benchmark.fingerprint, torch.__version__, code])
    return run_dir / f"checkpoint-{key}.pt"


def leave_outputs(benchmark: store.Benchmark, run: Run | None, run_dir: Path) -> None:
    """Learning curve, weights and predictions of a run, empty files for one that could not be built."""
    if run is None:
        save_outputs(benchmark, run_dir, [], {}, {})
    else:
        weights = {name: model.state_dict() for name, model in run.models.items()}
        save_outputs(benchmark, run_dir, run.progress.history, weights, run.evaluated)


def leave_record(result: dict, run_dir: Path) -> dict:
    """Write metrics.json, with which the run has ended; returns its content."""
    result = record.write_record(result, run_dir)
    for leftover in (*run_dir.glob("checkpoint-*.pt"), *run_dir.glob(".*.partial*")):
        os.unlink(leftover)
    return result


def run_of(spec: dict, benchmark: store.Benchmark, ranks: parallel.Ranks, run_dir: Path,
           events: bool = False) -> tuple[Run | None, dict]:
    """Build and train; returns the run, None without memory for it, and the content of metrics.json."""
    regions, num_ranks, run = benchmark.regions(), ranks.num_context * ranks.num_data, None
    try:
        run = build_run(spec, benchmark, ranks)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        code, status, message = code_digest(), "oom", f"building the model: {str(error).splitlines()[0]}"
    else:
        code = code_digest()  # of the model too, now that it is loaded
        if events and ranks.is_main:
            run.watch = event_writer(run_dir)
        status, message = learn(run, checkpoint_path(spec, benchmark, code, run_dir))
        if status != "ok":
            run.evaluated.clear()
    metrics = {"steps": 0} if run is None else metrics_of(run, regions, status == "ok")
    origin = provenance(spec, benchmark, code, [] if run is None else parameter_dtypes(run.model), num_ranks)
    return run, {"status": status, "message": message, "metrics": metrics, "spec": spec, "provenance": origin}


def fail_without_memory(benchmark: store.Benchmark, run: Run | None, result: dict, run_dir: Path) -> None:
    """The record of a run of several ranks, from the first that lacks memory. The others wait for this one: MemoryError."""
    with exclusive(run_dir / ".oom.lock"):
        if not (run_dir / "metrics.json").exists():
            leave_outputs(benchmark, run, run_dir)
            leave_record(result, run_dir)
    raise MemoryError(result["message"])


def train(spec: dict, data: Path, run_dir: Path, *, locked: bool = False, events: bool = False) -> dict | None:
    """Run `spec` on the dataset file `data` and leave the record in `run_dir`; returns metrics.json's content.

    A run of several ranks calls it on each of them; only the main one returns the record. Divergence and lack of memory end
    the run with that status; lack of memory on one of several ranks leaves the record and raises MemoryError. All else
    raises, and no metrics.json is there then, nor one of an earlier attempt; ValueError for a spec that lacks a section.
    `locked`: the process that started this one holds the folder's lock. `events`: leave event files for TensorBoard, too.
    """
    check_sections(spec)
    training = spec["training"]
    run_dir.mkdir(parents=True, exist_ok=True)
    device_type = choose_device(training["device"]).type
    with (parallel.join(training["context_parallel"], training["data_parallel"], device_type) as ranks,
          exclusive(run_dir / ".lock") if ranks.is_main and not locked else nullcontext()):
        if ranks.is_main:
            (run_dir / "metrics.json").unlink(missing_ok=True)
        ranks.barrier()
        benchmark = store.read(data)
        run, result = run_of(spec, benchmark, ranks, run_dir, events)
        if result["status"] == "oom" and result["provenance"]["num_ranks"] > 1:
            fail_without_memory(benchmark, run, result, run_dir)
        if ranks.is_main:
            leave_outputs(benchmark, run, run_dir)
        ranks.barrier()
        if ranks.is_main:
            return leave_record(result, run_dir)
        return None


def train_on_ranks(spec: dict, data: Path, run_dir: Path, events: bool = False) -> dict | None:
    """`train` on the processes that the spec asks for: this one, which may be one of torchrun's, or as many forks of it.

    Raises parallel.RankFailed when a fork fails; no metrics.json is there then. Lack of memory on one of them is a result.
    """
    check_sections(spec)
    num_ranks = check_ranks(spec["training"])
    if num_ranks == 1 or parallel.launched():
        return train(spec, data, run_dir, events=events)
    import torch._dynamo  # noqa: F401  the optimiser imports it: once here for all the forks, more than a second each

    path = run_dir / "metrics.json"
    run_dir.mkdir(parents=True, exist_ok=True)
    with exclusive(run_dir / ".lock"):  # before there are ranks: while they wait for the main one, time runs out
        path.unlink(missing_ok=True)
        try:
            return parallel.launch(partial(train, locked=True, events=events), (spec, data, run_dir), num_ranks)
        except parallel.RankFailed:
            if path.exists() and (result := record.read_json(path))["status"] == "oom":
                return result
            path.unlink(missing_ok=True)
            raise


def check_ranks(training: dict) -> int:
    """The number of processes R x P of a run; ValueError for numbers that cannot be."""
    for key in ("context_parallel", "data_parallel"):
        value = training.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"run spec: training.{key}: got {value!r}; allowed: a whole number from 1 on")
    batch, replicas = training["batch_size"], training["data_parallel"]
    if batch % replicas:
        raise ValueError(f"run spec: training.data_parallel: got {replicas}; batch_size {batch} must be divisible by it")
    return training["context_parallel"] * replicas
