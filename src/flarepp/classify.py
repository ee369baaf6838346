"""One run on a task of the Long Range Arena: a spec and a file of token sequences in, one record out (see `train`).

Loss is the cross-entropy, the metric the accuracy: the share of samples whose class has the largest logit. Of the weights
as they are ("last") and of their average ("ema") the record has the test accuracy at the end and the dev accuracy;
`selected` is the test accuracy of the weights "last" at that evaluation whose dev accuracy was the largest
(`dev_selected`; the first of equals). The test split selects nothing, unless it is the dev split (`dev_is_test`).

A batch is as long as its longest document; under the protocol "authors", where padding is a token, as long as the task's.
"""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import h5py
import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn
from tqdm import tqdm

from flarepp import record
from flarepp.data.lra import sequences
from flarepp.events import event_writer
from flarepp.losses import cross_entropy
from flarepp.memory import keep_freed
from flarepp.models import build_model
from flarepp.optimise import Optimiser, build_optimiser, optimiser_step
from flarepp.provenance import (
    check_sections,
    choose_device,
    code_digest,
    exclusive,
    is_out_of_memory,
    parameter_dtypes,
    peak_memory_mb,
)
from flarepp.train import (
    HISTORY_ROWS,
    LEAST_LOSS_SCALE,
    Diverged,
    Progress,
    checkpoint_path,
    checkpoints,
    evaluation_draws,
    leave_record,
    provenance,
    restore_checkpoint,
)

ACCURACIES = ("dev_last", "dev_ema", "test_last", "test_ema")
HISTORY = ("step", "lr", "loss", "grad_norm", "loss_scale", *ACCURACIES)


@dataclass
class Split:
    """One split on the device: tokens [S, D, N] uint8, lengths [S, D], labels [S]. `whole`: batches are N long."""

    tokens: Tensor
    lengths: Tensor
    labels: Tensor
    whole: bool

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor | None]:
        """Identities [B, D, n], 0 in padding, and the mask of real tokens, None where all are."""
        lengths = self.lengths[indices]
        longest = self.tokens.shape[2] if self.whole else int(lengths.max())
        mask = torch.arange(longest, device=lengths.device) < lengths[..., None]
        tokens = self.tokens[indices, :, :longest].long() + 1
        return (tokens, None) if mask.all() else (tokens.masked_fill(~mask, 0), mask)


@dataclass
class Run:
    """A run in memory. models: "last" and "ema"; predicted: by split and weights, the latest classes [S]."""

    spec: dict
    splits: dict[str, Split]  # train, dev, test; dev may be test
    models: dict[str, nn.Module]
    optimiser: Optimiser
    progress: Progress = field(default_factory=Progress)
    predicted: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    watch: Callable[[dict], None] = field(default=lambda row: None)  # called with every row of the history

    @property
    def model(self) -> nn.Module:
        return self.models["last"]

    @property
    def device(self) -> torch.device:
        return self.splits["train"].labels.device

    def say(self, text: str) -> None:
        print(text, flush=True)


def load_split(samples: sequences.Sequences, device: torch.device, whole: bool) -> Split:
    """Move a split to the device."""
    arrays = samples.tokens, samples.lengths, samples.labels
    tokens, lengths, labels = (torch.tensor(array, device=device) for array in arrays)
    return Split(tokens, lengths.long(), labels.long(), whole)


def build_run(spec: dict, task: sequences.Task) -> Run:
    """Seed, build the model, load the data. Touches torch's global generator, threads and precision."""
    training = spec["training"]
    torch.set_num_threads(training["num_threads"])
    keep_freed()
    torch.set_float32_matmul_precision("highest")  # no TF32 in a run called FP32
    torch.manual_seed(training["seed"])
    device = choose_device(training["device"])
    model = build_model(**spec["model"], in_dim=task.vocabulary, out_dim=task.num_classes, seq_len=task.max_length,
                        num_documents=task.num_documents).to(device)
    splits = {name: load_split(samples, device, model.protocol == "authors") for name, samples in task.splits.items()}
    splits.setdefault("dev", splits["test"])
    optimiser = build_optimiser(model, training)
    return Run(spec, splits, {"last": model, "ema": optimiser.average}, optimiser)


def logits_of(run: Run, model: nn.Module, split: Split, indices: Tensor) -> Tensor:
    """Logits [B, K] of some samples under the run's precision."""
    with torch.autocast(run.device.type, dtype=torch.float16, enabled=run.spec["training"]["precision"] == "fp16"):
        return model(*split.batch(indices))


def next_batch(run: Run) -> Tensor:
    """Indices [B] of the next batch: a fresh permutation each epoch from (seed, epoch), the short last batch dropped."""
    training, num_train = run.spec["training"], len(run.splits["train"])
    epoch, position = divmod(run.progress.batches, num_train // training["batch_size"])
    order = np.random.default_rng([training["seed"], epoch]).permutation(num_train)
    start = position * training["batch_size"]
    run.progress.batches += 1
    return torch.from_numpy(order[start:start + training["batch_size"]]).to(run.device)


def training_step(run: Run) -> Tensor:
    """Draw a batch and attempt one optimiser step; returns the gradient norm. Raises Diverged on a loss without a value."""
    progress, train, indices = run.progress, run.splits["train"], next_batch(run)
    run.model.train()
    loss = cross_entropy(logits_of(run, run.model, train, indices), train.labels[indices])
    norm, taken = optimiser_step(run.model, run.optimiser, loss)
    if taken:
        if not math.isfinite(value := loss.item()):
            raise Diverged(f"the loss is {value} at step {progress.steps}")
        progress.steps, progress.loss_sum, progress.loss_count = (
            progress.steps + 1, progress.loss_sum + value, progress.loss_count + 1)
    else:
        progress.skipped += 1
        if run.optimiser.scaler.get_scale() < LEAST_LOSS_SCALE:
            raise Diverged(f"the loss scale fell below {LEAST_LOSS_SCALE} at step {progress.steps}")
    return norm


@torch.no_grad()
def evaluate(run: Run, name: str) -> dict[str, float]:
    """The accuracy of every set of weights on a split, whose classes `run.predicted` then holds. Raises Diverged on logits
    that are not finite, which have no largest.

    Samples go in the order of their lengths, so that little is padding. Training's draws do not notice.
    """
    split = run.splits[name]
    order = split.lengths.amax(1).sort(stable=True).indices.split(run.spec["training"]["eval_batch_size"])
    found = {}
    for weights, model in run.models.items():
        model.eval()
        found[weights] = torch.empty_like(split.labels)
        with evaluation_draws(run):
            for indices in order:
                logits = logits_of(run, model, split, indices)
                if not logits.isfinite().all():
                    raise Diverged(f"logits on the {name} split are not finite at step {run.progress.steps}")
                found[weights][indices] = logits.argmax(1)
    run.predicted[name] = found
    return {f"{name}_{weights}": (classes == split.labels).double().mean().item() for weights, classes in found.items()}


def add_history(run: Run, norm: Tensor, rate: float, evaluated: bool) -> None:
    """Append a row to the learning curve; at an evaluation also dev accuracies, and test accuracies where the dev accuracy
    of the weights "last" is a new best or the run ends."""
    progress = run.progress
    row = {"step": progress.steps, "lr": rate, "grad_norm": float(norm),
           "loss": progress.loss_sum / max(progress.loss_count, 1), "loss_scale": run.optimiser.scaler.get_scale()}
    if evaluated:
        best = selected(progress.history)
        row |= evaluate(run, "dev")
        if best is None or row["dev_last"] > best["dev_last"] or progress.steps == run.spec["training"]["steps"]:
            row |= evaluate(run, "test")
        run.say(f"step {progress.steps}: loss {row['loss']:.4g}, dev accuracy {row['dev_last']:.2%} "
                f"(ema {row['dev_ema']:.2%}), {progress.seconds:.0f} s")
    progress.history.append(row)
    run.watch(row)
    progress.loss_sum, progress.loss_count = 0.0, 0


def selected(history: list[dict]) -> dict | None:
    """The row whose dev accuracy of the weights "last" is the largest, the first of equals; None before any evaluation."""
    return max((row for row in history if "dev_last" in row), key=lambda row: row["dev_last"], default=None)


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
    with checkpoints(run, checkpoint) as keep, tqdm(total=steps, initial=progress.steps, unit="step", disable=None) as bar:
        while progress.steps < steps:
            reached, rate = progress.steps, float(run.optimiser.schedule.get_last_lr()[0])
            norm = training_step(run)
            bar.update(progress.steps - reached)
            progress.seconds = before + time.monotonic() - started
            if progress.steps > reached and (progress.steps in marks or progress.steps % interval == 0):
                add_history(run, norm, rate, progress.steps in marks)
            keep()
    if not run.predicted:  # resumed after the last step
        evaluate(run, "test")


def learn(run: Run, checkpoint: Path) -> tuple[str, str]:
    """Train to the end, from the checkpoint if there is one; returns (status, message)."""
    try:
        restore_checkpoint(run, checkpoint)
        fit(run, checkpoint)
    except Diverged as error:
        return "diverged", str(error)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return "oom", str(error).splitlines()[0]
    return "ok", ""


def metrics_of(run: Run, succeeded: bool) -> dict:
    """The metrics of a record; accuracies only of a run that succeeded."""
    progress, accuracies = run.progress, {}
    if succeeded:
        end, best = progress.history[-1], selected(progress.history)
        assert best is not None
        accuracies = {name.removeprefix("test_"): end[name] for name in ACCURACIES}
        accuracies |= {"selected": best["test_last"], "dev_selected": best["dev_last"], "selected_step": best["step"]}
    return accuracies | {
        "steps": progress.steps, "skipped_steps": progress.skipped, "wall_time_s": progress.seconds,
        "parameter_count": sum(parameter.numel() for parameter in run.model.parameters()),
        "peak_memory_mb": peak_memory_mb(run.device)}


def leave_outputs(run: Run | None, task: sequences.Task, run_dir: Path, predicted: dict[str, Tensor]) -> None:
    """Learning curve, weights and the classes predicted on the test split, empty files for a run that could not be built."""
    with record.atomic_path(run_dir / "history.csv") as partial, open(partial, "w", newline="") as stream:
        writer = csv.DictWriter(stream, HISTORY, lineterminator="\n")
        writer.writeheader()
        writer.writerows(run.progress.history if run else [])
    states = {name: model.state_dict() for name, model in run.models.items()} if run else {}
    with record.atomic_path(run_dir / "model.safetensors") as partial:
        safetensors.torch.save_file({f"{name}/{key}": value.contiguous() for name, state in states.items()
                                     for key, value in state.items()}, partial)
    with record.atomic_path(run_dir / "predictions.h5") as partial, h5py.File(partial, "w") as file:
        file["labels"] = task.test.labels
        for name, classes in predicted.items():
            file[name] = classes.cpu().numpy().astype(np.uint8)
        file.attrs.update({"dataset": task.name, "data_source": task.card["source"]})


def run_of(spec: dict, task: sequences.Task, run_dir: Path, events: bool) -> tuple[Run | None, dict]:
    """Build and train; returns the run, None without memory for it, and the content of metrics.json."""
    run = None
    try:
        run = build_run(spec, task)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        code, status, message = code_digest(), "oom", f"building the model: {str(error).splitlines()[0]}"
    else:
        code = code_digest()  # of the model too, now that it is loaded
        if events:
            run.watch = event_writer(run_dir)
        status, message = learn(run, checkpoint_path(spec, task, code, run_dir))
    metrics = {"steps": 0} if run is None else metrics_of(run, status == "ok")
    return run, {"status": status, "message": message, "metrics": metrics, "spec": spec,
                 "provenance": provenance(spec, task, code, [] if run is None else parameter_dtypes(run.model))}


def classify(spec: dict, data: Path, run_dir: Path, events: bool = False) -> dict:
    """Run `spec` on the task's file `data` and leave the record in `run_dir`; returns its content.

    Divergence and lack of memory end the run with that status. All else raises, and no metrics.json is there then,
    nor one of an earlier attempt; ValueError for a spec that lacks a section or asks for several processes.
    `events`: leave event files for TensorBoard, too.
    """
    check_sections(spec)
    for key in ("context_parallel", "data_parallel"):
        if spec["training"].get(key, 1) != 1:
            raise ValueError(f"run spec: training.{key}: got {spec['training'][key]!r}; allowed here: 1")
    run_dir.mkdir(parents=True, exist_ok=True)
    with exclusive(run_dir / ".lock"):
        (run_dir / "metrics.json").unlink(missing_ok=True)
        task = sequences.read(data)
        run, result = run_of(spec, task, run_dir, events)
        predicted = run.predicted.get("test", {}) if run and result["status"] == "ok" else {}
        leave_outputs(run, task, run_dir, predicted)
        return leave_record(result, run_dir)
