"""What a run leaves behind, and how it is read back. No torch here: the paper layer imports this module alone.

A run folder holds
    spec.json        what was asked for, complete
    metrics.json     status, metrics, provenance; written last, so that its presence means the run ended
    history.csv      the learning curve
    predictions.h5   test set: points, target and the predictions of the last and of the averaged (EMA) weights
    model.safetensors
of which a trivial predictor, a scaling run and a cell of a cost curve have the first two. `records` turns many run folders
into one tidy table: a row per run and metric.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

COLUMNS = ("suite", "run", "scale", "dataset", "dataset_label", "model", "label", "role", "num_blocks", "num_latents",
           "num_tokens", "num_ranks", "precision", "seed", "status", "data_source", "metric", "value")
STATUSES = ("ok", "diverged", "oom", "not run", "not affordable")


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary neighbour of `path` with the same suffix; it replaces `path` only if the block succeeds.

    A reader therefore sees the old file, the new file or none, never a part of one.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.partial{path.suffix}")
    try:
        yield partial
        with open(partial, "rb") as written:
            os.fsync(written.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest(value: object) -> str:
    """Twelve hex digits that name a JSON value, whatever the order of its keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def write_json(value: object, path: Path) -> None:
    """Write `value` as indented JSON; a NaN or an infinity is refused (ValueError), since JSON has neither."""
    with atomic_path(path) as partial:
        partial.write_text(json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict:
    """Read one JSON object; ValueError names the file when it is not one."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def read_run(run_dir: Path) -> tuple[dict, dict]:
    """Return (spec, metrics) of a finished run. FileNotFoundError when metrics.json is missing."""
    metrics = read_json(Path(run_dir) / "metrics.json")
    return metrics["spec"], metrics


def write_predictions(run_dir: Path, *, points, target, predictions: dict, errors: dict, attributes: dict, sizes=None) -> None:
    """Write predictions.h5: points [S, N, d], target [S, N, c], per weights name a prediction [S, N, c] and errors [S].

    sizes [S]: points of each sample where they differ, the rest of N is padding.
    """
    import h5py

    with atomic_path(Path(run_dir) / "predictions.h5") as partial:
        with h5py.File(partial, "w") as file:
            file["points"], file["target"] = points, target
            if sizes is not None:
                file["sizes"] = sizes
            for name, prediction in predictions.items():
                file[name] = prediction
                file[f"error_{name}"] = errors[name]
            file.attrs.update(attributes)


def read_predictions(run_dir: Path, weights: str) -> dict:
    """Read the test predictions of one run.

    weights: "last" or "ema". Returns points [S, N, d], target and prediction [S, N, c] (lists of S arrays [N_i, .] where
    samples differ in size), error [S] (relative L2), grid (tuple or None), dataset and data_source.
    """
    import h5py

    path = Path(run_dir) / "predictions.h5"
    if not path.exists():
        raise FileNotFoundError(f"{path}: the run's predictions are missing; `snakemake {path}` makes them again")
    with h5py.File(path, "r") as file:
        if weights not in file:
            raise ValueError(f"{path}: no predictions of the weights {weights!r}; it has {sorted(file)}")
        grid = file.attrs.get("grid")
        arrays = {key: file[name][:] for key, name in (("points", "points"), ("target", "target"), ("prediction", weights))}
        if "sizes" in file:
            arrays = {key: [sample[:size] for sample, size in zip(array, file["sizes"][:])] for key, array in arrays.items()}
        return {
            **arrays, "error": file[f"error_{weights}"][:],
            "grid": None if grid is None else tuple(int(extent) for extent in grid),
            "dataset": file.attrs["dataset"], "data_source": file.attrs["data_source"],
        }


def read_case(path: Path, case: int) -> dict:
    """Read one test case of a dataset file.

    Returns features [N, c_in] and target [N, c_out] in physical units, grid (tuple or None), name, and card (the dataset
    card). FileNotFoundError without the file, ValueError for one that is not a finished dataset file or lacks the case.
    """
    import h5py

    if not Path(path).exists():
        raise FileNotFoundError(f"{path}: the dataset file is missing; `snakemake {path}` makes it")
    try:
        with h5py.File(path, "r") as file:
            if not file.attrs.get("complete", False):
                raise ValueError(f"{path}: the file is incomplete; delete it and run again")
            test, grid = file["test"], file.attrs.get("grid")
            starts = test["offsets"][:] if "offsets" in test else range(len(test["target"]) + 1)
            if not 0 <= case < len(starts) - 1:
                raise ValueError(f"{path}: there is no test case {case}, only 0 to {len(starts) - 2}")
            part = slice(starts[case], starts[case + 1]) if "offsets" in test else case
            return {
                "features": test["features"][part], "target": test["target"][part],
                "grid": None if grid is None else tuple(int(extent) for extent in grid),
                "name": file.attrs["name"], "card": json.loads(file.attrs["card"]),
            }
    except OSError as error:
        raise ValueError(f"{path}: cannot be read as HDF5 ({error}); delete it and run again") from None


def records(plan: dict):
    """Turn a suite's plan into the tidy table of records (pandas.DataFrame with COLUMNS).

    plan: {"suite", "scale", "entries": [{"run", "dataset", "dataset_label", "model", "label", "role", "num_blocks",
    "num_latents", "precision", "seed", "absent"}]}, those of scaling runs and cost cells also "num_tokens" and
    "num_ranks"; an entry with `absent` (a reason) has no run folder.
    """
    import pandas

    rows = []
    for entry in plan["entries"]:
        entry = dict(entry)
        row = {"suite": plan["suite"], "scale": plan["scale"]} | {k: entry.get(k) for k in COLUMNS if k in entry}
        if entry.get("absent"):
            rows.append(row | {"run": "", "status": entry["absent"], "metric": "status"})
            continue
        spec, result = read_run(entry["run"])
        if spec != read_json(Path(entry["run"]) / "spec.json"):
            raise ValueError(f"{entry['run']}: metrics.json is the record of another spec than spec.json; delete it and run again")
        row |= {"status": result["status"], "data_source": result["provenance"]["dataset"]["source"]}
        values = {name: value for name, value in result["metrics"].items() if value is not None}
        rows += [row | {"metric": name, "value": value} for name, value in (values or {"status": None}).items()]
    return pandas.DataFrame(rows, columns=list(COLUMNS))


def read_records(path: Path):
    """Read a records table (CSV) into a pandas.DataFrame; ValueError names missing columns."""
    import pandas

    try:
        frame = pandas.read_csv(path, dtype={"run": str})
    except (pandas.errors.EmptyDataError, pandas.errors.ParserError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a records table ({error})") from None
    missing = [name for name in COLUMNS if name not in frame.columns]
    if missing:
        raise ValueError(f"{path}: columns {missing} are missing")
    return frame
