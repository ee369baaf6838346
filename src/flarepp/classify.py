"""One run on a task of the Long Range Arena: a spec and a file of token sequences in, one record out (see `train`).

Loss is the cross-entropy, the metric the accuracy: the share of samples whose class has the largest logit. Of the weights
as they are ("last") and of their average ("ema") the record has the test accuracy at the end and the dev accuracy;
`selected` is the test accuracy of the weights "last" at that evaluation whose dev accuracy was the largest
(`dev_selected`; the first of equals). The test split selects nothing, unless it is the dev split (`dev_is_test`).

A batch is as long as its longest document; under the protocol "authors", where padding is a token, as long as the task's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import torch
from torch import Tensor, nn

from flarepp import loop, record
from flarepp.data.lra import sequences
from flarepp.events import require
from flarepp.losses import cross_entropy
from flarepp.models import build_model
from flarepp.optimise import Optimiser, build_optimiser
from flarepp.parallel import Ranks
from flarepp.provenance import check_sections, exclusive

ACCURACIES = ("dev_last", "dev_ema", "test_last", "test_ema")  # columns of the learning curve


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
    progress: loop.Progress = field(default_factory=loop.Progress)
    ranks: Ranks = field(default=Ranks())  # one process
    step_seconds: list[float] = field(default_factory=list)  # of every step that this process took
    predicted: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    @property
    def model(self) -> nn.Module:
        return self.models["last"]

    @property
    def device(self) -> torch.device:
        return self.splits["train"].labels.device

    @property
    def num_train(self) -> int:
        return len(self.splits["train"])


def load_split(samples: sequences.Sequences, device: torch.device, whole: bool) -> Split:
    """Move a split to the device."""
    arrays = samples.tokens, samples.lengths, samples.labels
    tokens, lengths, labels = (torch.tensor(array, device=device) for array in arrays)
    return Split(tokens, lengths.long(), labels.long(), whole)


def build_run(spec: dict, task: sequences.Task) -> Run:
    """Seed, build the model, load the data. Touches torch's global generator, threads and precision."""
    training = spec["training"]
    device = loop.prepare(training)
    model = build_model(**spec["model"], in_dim=task.vocabulary, out_dim=task.num_classes, seq_len=task.max_length,
                        num_documents=task.num_documents).to(device)
    splits = {name: load_split(samples, device, model.protocol == "authors") for name, samples in task.splits.items()}
    splits.setdefault("dev", splits["test"])
    optimiser = build_optimiser(model, training)
    return Run(spec, splits, {"last": model, "ema": optimiser.average}, optimiser)


def logits_of(run: Run, model: nn.Module, split: Split, indices: Tensor) -> Tensor:
    """Logits [B, K] of some samples under the run's precision."""
    with loop.precision(run):
        return model(*split.batch(indices))


def training_step(run: Run) -> Tensor:
    """Draw a batch and attempt one optimiser step; returns the gradient norm. Raises loop.Diverged."""
    train, indices = run.splits["train"], loop.next_batch(run)
    run.model.train()
    return loop.attempt_step(run, cross_entropy(logits_of(run, run.model, train, indices), train.labels[indices]))


@torch.no_grad()
def evaluate(run: Run, name: str) -> dict[str, float]:
    """The accuracy of every set of weights on a split, whose classes `run.predicted` then holds. Raises loop.Diverged on logits
    that are not finite, which have no largest.

    Samples go in the order of their lengths, so that little is padding. Training's draws do not notice.
    """
    split = run.splits[name]
    order = split.lengths.amax(1).sort(stable=True).indices.split(run.spec["training"]["eval_batch_size"])
    found = {}
    for weights, model in run.models.items():
        model.eval()
        found[weights] = torch.empty_like(split.labels)
        with loop.evaluation_draws(run):
            for indices in order:
                logits = logits_of(run, model, split, indices)
                if not logits.isfinite().all():
                    raise loop.Diverged(f"logits on the {name} split are not finite at step {run.progress.steps}")
                found[weights][indices] = logits.argmax(1)
    run.predicted[name] = found
    return {f"{name}_{weights}": (classes == split.labels).double().mean().item() for weights, classes in found.items()}


def dev_accuracies(run: Run) -> tuple[dict[str, float], str]:
    """Dev accuracies, a row's, and test accuracies where the dev accuracy of the weights "last" is a new best or the run ends;
    and a line for people."""
    best, found = selected(run.progress.history), evaluate(run, "dev")
    words = f"dev accuracy {found['dev_last']:.2%} (ema {found['dev_ema']:.2%})"
    if best is None or found["dev_last"] > best["dev_last"] or run.progress.steps == run.spec["training"]["steps"]:
        found |= evaluate(run, "test")
    return found, words


def selected(history: list[dict]) -> dict | None:
    """The row whose dev accuracy of the weights "last" is the largest, the first of equals; None before any evaluation."""
    return max((row for row in history if "dev_last" in row), key=lambda row: row["dev_last"], default=None)


def finish(run: Run) -> None:
    """Evaluate where a run was resumed after its last step."""
    if not run.predicted:
        evaluate(run, "test")


def metrics_of(run: Run) -> dict:
    """Accuracies at the end, and at the evaluation that the dev split selects."""
    end, best = run.progress.history[-1], selected(run.progress.history)
    assert best is not None
    return {name.removeprefix("test_"): end[name] for name in ACCURACIES} | {
        "selected": best["test_last"], "dev_selected": best["dev_last"], "selected_step": best["step"]}


def leave_outputs(run: Run | None, task: sequences.Task, run_dir: Path, predicted: dict[str, Tensor]) -> None:
    """Learning curve, weights and the classes predicted on the test split, empty files for a run that could not be built."""
    loop.save_history(run, ACCURACIES, run_dir / "history.csv")
    loop.save_weights(run, {}, run_dir / "model.safetensors")
    with record.atomic_path(run_dir / "predictions.h5") as partial, h5py.File(partial, "w") as file:
        file["labels"] = task.test.labels
        for name, classes in predicted.items():
            file[name] = classes.cpu().numpy().astype(np.uint8)
        file.attrs.update({"dataset": task.name, "data_source": task.card["source"]})


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
    if events:
        require()
    run_dir.mkdir(parents=True, exist_ok=True)
    with exclusive(run_dir / ".lock"):
        task = sequences.read(data)  # what is refused leaves a finished run as it is
        (run_dir / "metrics.json").unlink(missing_ok=True)
        work = loop.Work(partial(build_run, spec, task), training_step, dev_accuracies, finish, metrics_of)
        run, result = loop.run_of(spec, task, work, Ranks(), run_dir, events)
        predicted = run.predicted.get("test", {}) if run and result["status"] == "ok" else {}
        leave_outputs(run, task, run_dir, predicted)
        return loop.leave_record(result, run_dir)
