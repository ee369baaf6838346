"""A finished run again, from what it exported: predictions and errors of model.safetensors and spec.json, without training.

On the run's own data the errors are compared with the record: they are the same bits on the same device, number of threads
and version of PyTorch, and agree within TOLERANCE elsewhere; otherwise the record does not follow from these weights. (A
model that draws noise in evaluation draws other noise on another type of device.) It runs in one process, also where
several trained. Other data are seen through the run's normalisers and compared with nothing. Nothing is unpickled, and the
run's own files are only read.
"""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from flarepp import record
from flarepp.data import store
from flarepp.loop import provenance
from flarepp.provenance import check_sections, code_digest, is_out_of_memory, parameter_dtypes
from flarepp.train import Inference, build_inference, mean_error, save_predictions
from flarepp.train import evaluate as evaluate_weights

NAMES = ("last", "ema")
FINISHED = ("ok", "diverged", "oom")
TOLERANCE = 1e-5  # relative, between the mean errors of two machines


@dataclass
class Record:
    """What metrics.json says about the run."""

    status: str
    message: str
    errors: dict[str, float]  # of "last" and "ema"; empty unless the run is "ok"
    fingerprint: str  # of the data
    grid: list[int] | None
    environment: dict

    def __str__(self) -> str:
        return f"the run has the status {self.status!r}" + (f" ({self.message})" if self.message else "")


def environment(origin: dict) -> dict:
    """What may change the last bits of an error, out of a record's provenance."""
    return {key: origin.get(key) for key in ("device", "device_type", "num_threads")} | {
        "num_ranks": origin.get("num_ranks", 1), "torch": origin.get("versions", {}).get("torch")}


def read_record(run_dir: Path) -> tuple[dict, Record]:
    """Spec and record of a finished run; ValueError when they are not a run's or not each other's."""
    path = run_dir / "metrics.json"
    spec, result = record.read_json(run_dir / "spec.json"), record.read_json(path)
    check_sections(spec)
    if result.get("spec") != spec:
        raise ValueError(f"{path}: the record of another spec than spec.json beside it")
    try:
        status, origin = result["status"], result["provenance"]
        errors = {name: result["metrics"][name] for name in NAMES} if status == "ok" else {}
        found = Record(status, result["message"], errors, origin["dataset"]["fingerprint"], origin.get("grid"),
                       environment(origin))
        sound = status in FINISHED and all(math.isfinite(error) for error in errors.values())
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{path}: not the record of a run ({error!r})") from None
    if not sound:
        raise ValueError(f"{path}: not the record of a run: status {status!r}, errors {errors}")
    return spec, found


def read_weights(path: Path, run: Record) -> dict[str, Tensor]:
    """All tensors of the run's weights file. ValueError when it is damaged or the run left no weights."""
    try:
        tensors = safetensors.torch.load_file(path)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path}: cannot be read as safetensors ({error})") from None
    if run.status == "oom" and not any(key.startswith("last/") for key in tensors):
        raise ValueError(f"{path}: no weights; {run}")
    return tensors


def normaliser(path: Path, tensors: dict[str, Tensor], name: str) -> store.Affine:
    """The run's normaliser of "features" or "target", taken out of `tensors`."""
    value = tensors.pop(f"norm/{name}", None)
    if value is None:
        raise ValueError(f"{path}: the normaliser norm/{name} is missing; these are not the weights of a run")
    if (value.ndim != 2 or len(value) != 2 or value.dtype != torch.float64
            or not value.isfinite().all() or not (value[1] > 0).all()):
        raise ValueError(f"{path}: norm/{name} is no normaliser; got {value.dtype} {list(value.shape)}, "
                         "allowed: mean and positive standard deviation, float64 [2, channels]")
    return store.Affine(*value.numpy())


def read_data(path: Path) -> store.Benchmark:
    """A dataset file; ValueError when it is something else."""
    try:
        return store.read(path)
    except (KeyError, TypeError, AssertionError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not a dataset file ({error!r})") from None


def check_data(path: Path, benchmark: store.Benchmark, spec: dict, norms: dict[str, store.Affine]) -> None:
    """ValueError when the dataset is another one than the run's, or cannot be what its model maps."""
    if benchmark.name != spec["dataset"].get("name"):
        raise ValueError(f"{path}: holds the dataset {benchmark.name!r}, the run is one of {spec['dataset'].get('name')!r}")
    num_samples, num_points, _ = benchmark.test.features.shape
    for name, norm in norms.items():
        channels = getattr(benchmark.test, name).shape[-1]
        if channels != len(norm.mean):
            raise ValueError(f"{path}: {name} have {channels} channels, the run's model {len(norm.mean)}")
    if not num_samples * num_points:
        raise ValueError(f"{path}: {num_samples} test samples of {num_points} points; there is nothing to evaluate")
    if benchmark.grid is not None and math.prod(benchmark.grid) != num_points:
        raise ValueError(f"{path}: the grid {benchmark.grid} does not have the samples' {num_points} points")


def check_weights(path: Path, tensors: dict[str, Tensor], model: nn.Module, grid: tuple[int, ...] | None, run: Record) -> None:
    """ValueError unless `tensors` are exactly two sets of weights of the model, finite unless the run diverged."""
    expected = {f"{name}/{key}": value for name in NAMES for key, value in model.state_dict().items()}
    for what, keys in (("lacks", expected.keys() - tensors.keys()), ("has the foreign", tensors.keys() - expected.keys())):
        if keys:
            raise ValueError(f"{path}: {what} {min(keys)} ({len(keys)} such tensors); it does not fit the model of spec.json")
    there = grid and list(grid)
    grids = f"; the run has the grid {run.grid}, the data {there}" if run.grid != there else ""
    for key, value in expected.items():
        got, wanted = (f"{tensor.dtype} {list(tensor.shape)}" for tensor in (tensors[key], value))
        if got != wanted:
            raise ValueError(f"{path}: {key} is {got}, the model of spec.json has {wanted} there{grids}")
        if run.status != "diverged" and not tensors[key].isfinite().all():
            raise ValueError(f"{path}: {key} holds numbers that are not finite, but {run}")


def build(spec: dict, benchmark: store.Benchmark, path: Path, tensors: dict[str, Tensor], run: Record) -> Inference:
    """The run's models with the weights `tensors` of the file `path`, ready to be evaluated on `benchmark`."""
    inference = build_inference(spec, benchmark)
    check_weights(path, tensors, inference.models["last"], inference.grid, run)
    inference.models["ema"] = copy.deepcopy(inference.models["last"])
    for name, model in inference.models.items():
        model.load_state_dict({key: tensors[f"{name}/{key}"] for key in model.state_dict()})
    return inference


def compare(errors: dict[str, float], run: Record, origin: dict) -> dict:
    """Compare mean errors, of provenance `origin`, with the record: verdict, whether the record follows, differences."""
    result = {"status": run.status, "message": run.message, "compared": False, "follows": True}
    if origin["dataset"]["fingerprint"] != run.fingerprint:
        return result | {"verdict": "other data than the run's, nothing is compared with the record"}
    if run.status != "ok":
        return result | {"verdict": f"{run}, its record has no errors: nothing is compared"}
    here = environment(origin)
    elsewhere = [f"{key} {here[key]} instead of {run.environment[key]}" for key in here if here[key] != run.environment[key]]
    differences = {name: relative_difference(errors[name], error) for name, error in run.errors.items()}
    result |= {"compared": True, "recorded": run.errors, "relative_difference": differences, "environment": elsewhere}
    if errors == run.errors:
        return result | {"verdict": "equal to the record"}
    shown = ", ".join(f"{name} {errors[name]!r} instead of {error!r} (relative difference {differences[name]})"
                      for name, error in run.errors.items() if errors[name] != error)
    shown += f"; with {', '.join(elsewhere)}" if elsewhere else ""
    if elsewhere and all(value is not None and value <= TOLERANCE for value in differences.values()):
        return result | {"verdict": f"equal to the record within {TOLERANCE:g}: {shown}"}
    return result | {"follows": False, "verdict": f"the record does not follow from these weights: {shown}"}


def relative_difference(error: float, recorded: float) -> float | None:
    """|error - recorded| / recorded; None when it is no finite number."""
    if error == recorded:
        return 0.0
    value = abs(error - recorded) / abs(recorded) if recorded else math.inf
    return value if math.isfinite(value) else None


def check_out(out: Path) -> None:
    """ValueError when `out` is no folder of its own: the files of a run are never replaced."""
    if taken := [name for name in ("spec.json", "model.safetensors") if (out / name).exists()]:
        raise ValueError(f"{out}: holds {taken[0]}, it is the folder of a run; give --out another folder")
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out}: not a folder")


def evaluate(run_dir: Path, data: Path, out: Path) -> dict:
    """Evaluate the run in `run_dir` on the dataset file `data`; leaves predictions.h5 and metrics.json in `out`.

    Returns metrics.json's content. ValueError or OSError, before anything is written, for files that are not as they should.
    """
    check_out(out)
    spec, run = read_record(run_dir)
    if spec["model"].get("name") == "lra":
        raise ValueError(f"{run_dir}: a run of the Long Range Arena; this verb predicts fields, the classes of that run stand in "
                         "its predictions.h5")
    path = run_dir / "model.safetensors"
    tensors, weights = read_weights(path, run), record.sha256(path)
    norms = {name: normaliser(path, tensors, name) for name in ("features", "target")}
    benchmark = read_data(data)
    check_data(data, benchmark, spec, norms)
    seen = replace(benchmark, feature_norm=norms["features"], target_norm=norms["target"])
    try:
        inference = build(spec, seen, path, tensors, run)
        evaluate_weights(inference)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise ValueError(f"{run_dir}: the evaluation ran out of memory: {str(error).splitlines()[0]}") from None
    errors = {name: mean_error(inference, name) for name in NAMES}
    finite = [name for name in NAMES if math.isfinite(errors[name])]
    origin = provenance(spec, benchmark, code_digest(), parameter_dtypes(inference.models["last"]))
    result = {"status": "ok" if len(finite) == len(NAMES) else "diverged",
              "message": ", ".join(f"the test error of {name} is {errors[name]}" for name in NAMES if name not in finite),
              "metrics": {name: errors[name] for name in finite}, "num_samples": len(benchmark.test.features), "spec": spec,
              "provenance": origin, "weights": weights, "record": compare(errors, run, origin)}
    return write(result, benchmark, {name: inference.evaluated[name] for name in finite}, out)


def write(result: dict, benchmark: store.Benchmark, evaluated: dict, out: Path) -> dict:
    """Predictions first, metrics.json last: its presence means that both are of one evaluation."""
    (out / "metrics.json").unlink(missing_ok=True)
    save_predictions(benchmark, out, evaluated)
    return record.write_record(result, out)
