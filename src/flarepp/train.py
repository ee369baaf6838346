"""One run: a spec and a dataset in, one record out (metrics.json, history.csv, predictions.h5, model.safetensors).

The run is a function of (spec, data): every draw comes from the spec's seed, the thread count from the spec. The loop, its
checkpoints and its ends are those of `loop`.

Several processes (ranks) train one run together: they hold the same weights, optimiser and generators, each computes its
tokens of its samples, and the main one writes and prints. What ends a run is decided from numbers that all of them hold.
Only lack of memory strikes one alone: it leaves the record and fails, so that whoever started the ranks ends the others.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from flarepp import loop, parallel, record
from flarepp.data import store
from flarepp.events import require
from flarepp.losses import relative_l2, training_loss
from flarepp.models import build_model
from flarepp.optimise import Optimiser, build_optimiser
from flarepp.provenance import check_sections, choose_device, exclusive

TEST_ERRORS = ("test_last", "test_ema")  # columns of the learning curve


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


@dataclass
class Run(Inference):
    """A run in memory: what `train` builds, steps, evaluates, saves and restores."""

    train: Split
    optimiser: Optimiser
    progress: loop.Progress
    step_seconds: list[float] = field(default_factory=list)  # of every step that this process took

    @property
    def model(self) -> nn.Module:
        return self.models["last"]

    @property
    def num_train(self) -> int:
        return len(self.train.features)


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
    device = loop.prepare(spec["training"])
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
    return Run(**vars(inference) | {"ranks": ranks}, train=train, optimiser=optimiser, progress=loop.Progress())


def predict(run: Inference, model: nn.Module, features: Tensor, mask: Tensor | None) -> Tensor:
    """Decoded prediction [B, N, c_out] in FP32, 0 where mask [B, N] is False; the model under the run's precision."""
    with loop.precision(run):
        encoded = model(features, mask)
    prediction = encoded.to(run.target_std.dtype) * run.target_std + run.target_mean
    return prediction if mask is None else prediction.masked_fill(~mask[..., None], 0)


def training_step(run: Run) -> Tensor:
    """Draw a batch and attempt one optimiser step; returns the gradient norm. Raises loop.Diverged."""
    ranks, batch = run.ranks, run.train.batch(loop.next_batch(run))
    features, target = (ranks.shard(ranks.replica(part)) for part in batch[:2])
    mask = None if batch[2] is None else ranks.shard(ranks.replica(batch[2]))
    run.model.train()
    prediction = predict(run, run.model, features, mask)
    num_tokens = batch[0].shape[1]
    loss = training_loss(prediction, target, gradient_weight=run.spec["training"]["gradient_weight"], grid=run.grid,
                         norms=ranks.norms, whole=lambda part: ranks.whole(part, num_tokens))
    return loop.attempt_step(run, loss)


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
        with loop.evaluation_draws(run):
            for indices in batches:
                features, _, mask = run.test.batch(indices)
                num_tokens = features.shape[1]
                part = predict(run, model, run.ranks.shard(features), None if mask is None else run.ranks.shard(mask))
                prediction[indices, :num_tokens] = run.ranks.whole(part, num_tokens)
        run.evaluated[name] = prediction, relative_l2(prediction, run.test.target)


def mean_error(run: Inference, name: str) -> float:
    """Mean over the test samples of the latest evaluation's errors."""
    return run.evaluated[name][1].double().mean().item()


def errors_on_test_set(run: Run) -> tuple[dict[str, float], str]:
    """Mean errors on the test set, a row's, and a line for people. Raises loop.Diverged if one is not finite."""
    evaluate(run)
    last, ema = mean_error(run, "last"), mean_error(run, "ema")
    if not math.isfinite(last + ema):
        raise loop.Diverged(f"the test error is {last} at step {run.progress.steps}")
    run.progress.best_test = min(run.progress.best_test, last)
    return dict(zip(TEST_ERRORS, (last, ema))), f"test {last:.4g} (ema {ema:.4g})"


def finish(run: Run) -> None:
    """Evaluate where a run was resumed after its last step."""
    if not run.evaluated:
        evaluate(run)


def metrics_of(run: Run, regions: dict[str, np.ndarray]) -> dict[str, float]:
    """Errors at the end, also over the regions [S, N, 1] alone, and the best of the evaluations."""
    errors = {name: mean_error(run, name) for name in run.evaluated} | {"best_test": run.progress.best_test}
    for region, inside in regions.items():
        mask = torch.from_numpy(inside).to(run.device)
        for name, (prediction, _) in run.evaluated.items():
            error = relative_l2(prediction * mask, run.test.target * mask)
            errors[f"{name}_{region}"] = error.double().mean().item()
    return errors


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


def leave_outputs(benchmark: store.Benchmark, run: Run | None, run_dir: Path) -> None:
    """Learning curve, weights with the normalisers [2, c] they learned with, and predictions of a run; empty files for one that
    could not be built."""
    loop.save_history(run, TEST_ERRORS, run_dir / "history.csv")
    norms = (("features", benchmark.feature_norm), ("target", benchmark.target_norm))
    loop.save_weights(run, {f"norm/{name}": torch.tensor(np.stack([norm.mean, norm.std])) for name, norm in norms},
                      run_dir / "model.safetensors")
    save_predictions(benchmark, run_dir, run.evaluated if run else {})


def run_of(spec: dict, benchmark: store.Benchmark, ranks: parallel.Ranks, run_dir: Path,
           events: bool = False) -> tuple[Run | None, dict]:
    """`loop.run_of` on a benchmark; a run that failed holds no predictions."""
    regions = benchmark.regions()
    work = loop.Work(partial(build_run, spec, benchmark, ranks), training_step, errors_on_test_set, finish,
                     lambda run: metrics_of(run, regions))
    run, result = loop.run_of(spec, benchmark, work, ranks, run_dir, events)
    if run and result["status"] != "ok":
        run.evaluated.clear()
    return run, result


def fail_without_memory(benchmark: store.Benchmark, run: Run | None, result: dict, run_dir: Path) -> None:
    """The record of a run of several ranks, from the first that lacks memory. The others wait for this one: MemoryError."""
    with exclusive(run_dir / ".oom.lock"):
        if not (run_dir / "metrics.json").exists():
            leave_outputs(benchmark, run, run_dir)
            loop.leave_record(result, run_dir)
    raise MemoryError(result["message"])


def train(spec: dict, data: Path, run_dir: Path, *, locked: bool = False, events: bool = False) -> dict | None:
    """Run `spec` on the dataset file `data` and leave the record in `run_dir`; returns metrics.json's content.

    A run of several ranks calls it on each of them; only the main one returns the record. Divergence and lack of memory end
    the run with that status; lack of memory on one of several ranks leaves the record and raises MemoryError. All else
    raises, and no metrics.json is there then, nor one of an earlier attempt; ValueError for a spec that lacks a section.
    `locked`: the process that started this one holds the folder's lock. `events`: leave event files for TensorBoard, too.
    """
    check_sections(spec)
    if events:
        require()
    training = spec["training"]
    run_dir.mkdir(parents=True, exist_ok=True)
    device_type = choose_device(training["device"]).type
    with (parallel.join(training["context_parallel"], training["data_parallel"], device_type) as ranks,
          exclusive(run_dir / ".lock") if ranks.is_main and not locked else nullcontext()):
        benchmark = store.read(data)  # what is refused leaves a finished run as it is
        if ranks.is_main:
            (run_dir / "metrics.json").unlink(missing_ok=True)
        ranks.barrier()
        run, result = run_of(spec, benchmark, ranks, run_dir, events)
        if result["status"] == "oom" and result["provenance"]["num_ranks"] > 1:
            fail_without_memory(benchmark, run, result, run_dir)
        if ranks.is_main:
            leave_outputs(benchmark, run, run_dir)
        ranks.barrier()
        if ranks.is_main:
            return loop.leave_record(result, run_dir)
        return None


def train_on_ranks(spec: dict, data: Path, run_dir: Path, events: bool = False) -> dict | None:
    """`train` on the processes that the spec asks for: this one, which may be one of torchrun's, or as many forks of it.

    Raises parallel.RankFailed when a fork fails; no metrics.json is there then. Lack of memory on one of them is a result.
    """
    check_sections(spec)
    num_ranks = check_ranks(spec["training"])
    if num_ranks == 1 or parallel.launched():
        return train(spec, data, run_dir, events=events)
    if events:
        require()
    store.read(data)  # what is refused leaves a finished run as it is
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
