"""What a run leaves behind, and how it is read back. No torch here: the paper layer imports this module alone.

A run folder holds
    spec.json        what was asked for, complete
    metrics.json     status, metrics, provenance, digests; written last, so that its presence means the run ended
    history.csv      the learning curve
    predictions.h5   test set: points, target and the predictions of the last and of the averaged (EMA) weights
    model.safetensors
of which a trivial predictor, a scaling run and a cell of a cost curve have the first two. `records` turns many run folders
into one tidy table: a row per run and metric.

A record carries the digest of itself and of the files beside it, a table of records has its digest beside it, the card of
a dataset its own and that of the arrays, and whoever reads one checks it: what was changed afterwards is refused. A record
made up with its digest is found by `python -m flarepp evaluate`, which computes the errors again from the weights.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import h5py
    import numpy as np
    import pandas

COLUMNS = ("suite", "run", "scale", "dataset", "dataset_label", "model", "label", "role", "num_blocks", "num_latents",
           "num_tokens", "num_ranks", "precision", "seed", "status", "data_source", "metric", "value")
STATUSES = ("ok", "diverged", "oom", "not run", "not affordable", "no data")
OUTPUTS = ("history.csv", "predictions.h5", "model.safetensors")
# What reading a damaged HDF5 file raises besides OSError, in h5py or in what takes its arrays.
DAMAGE = (ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)
SOUND = {  # what the parts of a record are
    "status": lambda value: value in STATUSES,
    "message": lambda value: isinstance(value, str),
    "metrics": lambda value: isinstance(value, dict) and all(number is None or _is_finite(number) for number in value.values()),
    "files": lambda value: isinstance(value, dict) and value.keys() <= set(OUTPUTS),
    "spec": lambda value: isinstance(value, dict) and isinstance(value.get("model"), dict) and "name" in value["model"],
    "provenance": lambda value: isinstance(value, dict) and isinstance(value.get("dataset"), dict) and "source" in value["dataset"],
}
IMPORTED = "imported.json"  # in the folder of a run that another machine made: the archive it came in, and the record it brought


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


def held(lock: Path) -> bool:
    """Whether a process holds a lock file, see provenance.exclusive."""
    if not lock.exists():
        return False
    with open(lock) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest(value: object) -> str:
    """Twelve hex digits that name a JSON value, whatever the order of its keys."""
    return _sha256_of(value)[:12]


def _sha256_of(value: object) -> str:
    """Hex digest of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _is_finite(number: object) -> bool:
    return isinstance(number, (int, float)) and abs(number) <= sys.float_info.max  # also of integers that no float holds


def _without_digest(result: dict) -> dict:
    """All of a record or a card that its digest is of."""
    return {key: value for key, value in result.items() if key != "sha256"}


def fingerprint(arrays: Iterable) -> str:
    """sha256 over shapes and values of NumPy arrays, in their order and a fixed byte order."""
    state = hashlib.sha256()
    for array in arrays:
        state.update(str(array.shape).encode())
        state.update(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
    return state.hexdigest()


def write_json(value: object, path: Path) -> None:
    """Write `value` as indented JSON; a NaN or an infinity is refused (ValueError), since JSON has neither."""
    with atomic_path(path) as partial:
        partial.write_text(json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict:
    """Read one JSON object; ValueError names the file when it is not one, or has a NaN or an infinity, which JSON has not."""
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"it has the number {constant}")

    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=refuse)
    except (ValueError, RecursionError) as error:  # of them also what is no JSON or no UTF-8
        raise ValueError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def write_record(result: dict, run_dir: Path) -> dict:
    """Write metrics.json of a run whose other files are there; returns it as it reads back.

    result: status, message, metrics, spec, provenance. Added are "files", the digests of OUTPUTS, and "sha256", that of all
    else. A NaN or an infinity is refused (ValueError), since JSON has neither. What was imported before is so no longer.
    """
    files = {name: sha256(path) for name in OUTPUTS if (path := Path(run_dir) / name).exists()}
    (Path(run_dir) / IMPORTED).unlink(missing_ok=True)
    return write_with_digest(result | {"files": files}, Path(run_dir) / "metrics.json")


def write_with_digest(value: dict, path: Path) -> dict:
    """Write a JSON object with the digest of itself, "sha256"; returns it as it reads back."""
    value = json.loads(json.dumps(_without_digest(value), allow_nan=False))
    value["sha256"] = _sha256_of(value)
    write_json(value, path)
    return value


def read_card(path: Path) -> dict:
    """Read a dataset card. FileNotFoundError without it, ValueError when it is not as it was written."""
    if not Path(path).exists():
        raise FileNotFoundError(f"{path}: the dataset card is missing; `snakemake {path}` makes it again")
    return _read_with_digest(path, "a dataset card", "it was made")


def check_card(path: Path, found: str) -> None:
    """ValueError when a card stands beside the dataset file `path` that is of other arrays than those of fingerprint `found`."""
    card = Path(path).with_suffix(".json")
    if card.exists() and read_card(card).get("fingerprint") != found:
        raise ValueError(f"{path}: the arrays are not those of its card; delete both and run again")


def _read_with_digest(path: Path, kind: str, event: str) -> dict:
    """Read what `write_with_digest` wrote; ValueError when it was changed since that event."""
    value = read_json(path)
    if "sha256" not in value:
        raise ValueError(f"{path}: has no digest of itself, as {kind} has; delete it and run again")
    if value["sha256"] != _sha256_of(_without_digest(value)):
        raise ValueError(f"{path}: was changed after {event}; delete it and run again")
    return value


def read_run(run_dir: Path) -> tuple[dict, dict]:
    """Return (spec, metrics) of a finished run. FileNotFoundError when metrics.json is missing, ValueError when it is not as
    the run left it."""
    path = Path(run_dir) / "metrics.json"
    if not path.exists():
        raise FileNotFoundError(f"{path}: the run's record is missing; `snakemake {path}` makes it again")
    metrics = _read_with_digest(path, "the record of a run", "the run ended")
    return metrics.get("spec", {}), metrics


def imported_from(run_dir: Path, result: dict) -> str | None:
    """The archive that brought a run's record, in words; None for a run that was made here."""
    path = Path(run_dir) / IMPORTED
    if not path.exists():
        return None
    origin = _read_with_digest(path, "the note on an import", "the run was imported")
    return f"{origin['archive']}, sha256 {origin['archive_sha256']}" if origin["record"] == result["sha256"] else None


def read_whole_run(run_dir: Path) -> tuple[dict, dict]:
    """`read_run` of a record that a run can leave, with spec.json and those of OUTPUTS that are there its own; else ValueError."""
    spec, metrics = read_run(run_dir)
    if wrong := [name for name, is_sound in SOUND.items() if not is_sound(metrics.get(name))]:
        raise ValueError(f"{run_dir}/metrics.json: {wrong[0]}: got {metrics.get(wrong[0])!r}, which no run leaves; delete it and "
                         "run again")
    if spec != read_json(Path(run_dir) / "spec.json"):
        raise ValueError(f"{run_dir}: its record is of another spec than its spec.json; delete it and run again")
    for name in OUTPUTS:
        if (Path(run_dir) / name).exists():
            read_output(run_dir, name)
    return spec, metrics


def read_output(run_dir: Path, name: str) -> Path:
    """The path of one of a run's OUTPUTS. FileNotFoundError without it, ValueError when it is not as the run left it."""
    path = Path(run_dir) / name
    if not path.exists():
        raise FileNotFoundError(f"{path}: the file is missing; `snakemake {path}` makes it again")
    if read_run(run_dir)[1]["files"].get(name) != sha256(path):
        raise ValueError(f"{path}: was changed after the run ended; delete it and run again")
    return path


def read_history(run_dir: Path) -> pandas.DataFrame:
    """Read the learning curve of a run at its evaluations: a pandas.DataFrame with step, test_last and test_ema."""
    import pandas

    history = pandas.read_csv(read_output(run_dir, "history.csv"))
    return history.dropna(subset=["test_last"])[["step", "test_last", "test_ema"]]


def write_predictions(run_dir: Path, *, points: np.ndarray, target: np.ndarray, predictions: dict, errors: dict,
                      attributes: dict, sizes: np.ndarray | None = None) -> None:
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
    samples differ in size), error [S] (relative L2), grid (tuple or None), dataset and data_source. FileNotFoundError and
    ValueError as `read_output`.
    """
    import h5py

    path = read_output(run_dir, "predictions.h5")
    with h5py.File(path, "r") as file:
        errors = _errors(file, weights)
        grid = file.attrs.get("grid")
        arrays = {key: file[name][:] for key, name in (("points", "points"), ("target", "target"), ("prediction", weights))}
        if "sizes" in file:
            arrays = {key: [sample[:size] for sample, size in zip(array, file["sizes"][:])] for key, array in arrays.items()}
        return {
            **arrays, "error": errors,
            "grid": None if grid is None else tuple(int(extent) for extent in grid),
            "dataset": file.attrs["dataset"], "data_source": file.attrs["data_source"],
        }


def read_errors(run_dir: Path, weights: str) -> np.ndarray:
    """Read the error of every test case alone, [S], of the weights "last" or "ema"; raises as `read_predictions`."""
    import h5py

    with h5py.File(read_output(run_dir, "predictions.h5"), "r") as file:
        return _errors(file, weights)


def _errors(file: h5py.File, weights: str) -> np.ndarray:
    """The errors [S] in an open predictions.h5; ValueError without those of `weights`."""
    if weights not in file:
        raise ValueError(f"{file.filename}: no predictions of the weights {weights!r}; it has {sorted(file)}")
    return file[f"error_{weights}"][:]


def read_case(path: Path, case: int) -> dict:
    """Read one test case of a dataset file.

    Returns features [N, c_in] and target [N, c_out] in physical units, grid (tuple or None), name, and card, the dataset
    card that stands beside it. FileNotFoundError without either, ValueError for a file that is not a finished dataset file,
    whose arrays are not those of the card, or that lacks the case.
    """
    import h5py

    if not Path(path).exists():
        raise FileNotFoundError(f"{path}: the dataset file is missing; `snakemake {path}` makes it")
    card = read_card(Path(path).with_suffix(".json"))
    try:
        with h5py.File(path, "r") as file:
            if not file.attrs.get("complete", False):
                raise ValueError(f"{path}: the file is incomplete; delete it and run again")
            check_card(path, fingerprint(_arrays(file)))
            test, grid = file["test"], card["grid"]
            starts = test["offsets"][:] if "offsets" in test else range(len(test["target"]) + 1)
            if not 0 <= case < len(starts) - 1:
                raise ValueError(f"{path}: there is no test case {case}, only 0 to {len(starts) - 2}")
            part = slice(starts[case], starts[case + 1]) if "offsets" in test else case
            return {
                "features": test["features"][part], "target": test["target"][part],
                "grid": grid and tuple(grid), "name": Path(path).stem, "card": card,
            }
    except (OSError, *DAMAGE) as error:
        if str(error).startswith(str(path)):  # in words of ours
            raise
        raise ValueError(f"{path}: cannot be read as HDF5 ({error}); delete it and run again") from None


def _arrays(file: h5py.File) -> Iterator:
    """The arrays of an open dataset file that its fingerprint is of, in its order."""
    for split in ("train", "test"):
        yield from (file[split][name][:] for name in ("features", "target", "offsets") if name in file[split])
    for name in ("features", "target"):
        yield from file["norm"][name][:]  # mean, standard deviation


def records(plan: dict) -> pandas.DataFrame:
    """Turn a suite's plan into the tidy table of records (pandas.DataFrame with COLUMNS).

    plan: {"suite", "scale", "entries": [{"run", "spec", "dataset", "dataset_label", "model", "label", "role", "num_blocks",
    "num_latents", "precision", "seed", "absent"}]}, those of scaling runs and cost cells also "num_tokens" and
    "num_ranks"; "spec" is the `digest` of the run's; an entry with `absent` (a reason) has no run folder.
    ValueError for a folder that holds another run than the planned one, or files that are not as the run left them.
    """
    import pandas

    rows = []
    for entry in plan["entries"]:
        entry = dict(entry)
        row = {"suite": plan["suite"], "scale": plan["scale"]} | {k: entry.get(k) for k in COLUMNS if k in entry}
        if entry.get("absent"):
            rows.append(row | {"run": "", "status": entry["absent"], "metric": "status"})
            continue
        result = _run_of(entry)
        row |= {"status": result["status"], "data_source": result["provenance"]["dataset"]["source"]}
        rows += [row | {"metric": name, "value": value} for name, value in _values(result).items()]
    return pandas.DataFrame(rows, columns=list(COLUMNS))


def _run_of(entry: dict) -> dict:
    """The record of a plan's entry, with all that stands beside it as the run left it."""
    spec, result = read_whole_run(entry["run"])
    if digest(spec) != entry["spec"]:
        raise ValueError(f"{entry['run']}: holds another run than the planned one ({_words(spec)}); delete it and run again")
    return result


def _words(spec: dict) -> str:
    """What a spec is of: "mixer flare, dataset darcy, num_blocks 2"."""
    return ", ".join(f"{key} {value}" for key, value in ({"mixer": _mixer(spec)} | _stated(spec)).items())


def _mixer(spec: dict) -> str:
    """The mixer of a spec, or the model that has none."""
    return spec["model"].get("mixer", spec["model"]["name"])


def _stated(spec: dict) -> dict:
    """What a spec says of the COLUMNS of its rows."""
    flat = {"scale": spec.get("scale"), "dataset": spec.get("dataset", {}).get("name")}
    for section in ("model", "training", "scaling", "cost"):
        flat |= {key: value for key, value in spec.get(section, {}).items() if key in COLUMNS}
    return {key: value for key, value in flat.items() if value is not None}


def _values(result: dict) -> dict:
    """The value of every row that stands for a record."""
    return {name: value for name, value in result["metrics"].items() if value is not None} or {"status": None}


def write_records(frame: pandas.DataFrame, path: Path) -> None:
    """Write a records table as CSV, and beside it <path>.sha256, its digest as `sha256sum` writes it."""
    _write_table(frame.to_csv(index=False, lineterminator="\n"), path)


def join_records(paths: list[Path], out: Path) -> None:
    """Write the rows of several records tables as one; each is read with its checks."""
    for path in paths:
        read_records(path)
    tables = [Path(path).read_text(encoding="utf-8").splitlines(keepends=True) for path in paths]
    _write_table("".join([tables[0][0], *(line for table in tables for line in table[1:])]), out)


def _write_table(text: str, path: Path) -> None:
    with atomic_path(path) as partial:
        partial.write_text(text, encoding="utf-8")
    with atomic_path(_digest_of(path)) as partial:
        partial.write_text(f"{sha256(path)}  {Path(path).name}\n", encoding="utf-8")


def _digest_of(path: Path) -> Path:
    """The file with the digest of a records table."""
    return Path(f"{path}.sha256")


def _read_table(path: Path) -> bytes:
    """The content of a records table. ValueError when it is not as it was collected."""
    content = Path(path).read_bytes()
    if not _digest_of(path).exists():
        raise ValueError(f"{path}: has no digest, {_digest_of(path).name}; delete it and run again")
    if _digest_of(path).read_bytes().split()[:1] != [hashlib.sha256(content).hexdigest().encode()]:
        raise ValueError(f"{path}: was changed after it was collected; delete it and run again")
    return content


def read_records(path: Path) -> pandas.DataFrame:
    """Read a records table (CSV) into a pandas.DataFrame.

    ValueError when it is not as it was collected, has columns missing, or rows that are not those of the run they name;
    FileNotFoundError for a run that is gone.
    """
    import pandas

    try:
        frame = pandas.read_csv(io.BytesIO(_read_table(path)), dtype={"run": str})
    except (pandas.errors.EmptyDataError, pandas.errors.ParserError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a records table ({error})") from None
    missing = [name for name in COLUMNS if name not in frame.columns]
    if missing:
        raise ValueError(f"{path}: columns {missing} are missing")
    _check_rows(path, frame[frame["run"].notna()].to_dict("records"))
    return frame


def _check_rows(path: Path, rows: list[dict]) -> None:
    """ValueError unless the rows of every run of a table are exactly those of its record."""
    runs: dict[tuple[str, str], list[dict]] = {}
    mixers: dict[str, str] = {}
    for row in rows:
        runs.setdefault((row["suite"], row["run"]), []).append(row)
    for (_, run), found in runs.items():
        spec, result = read_run(Path(run))
        mixers[run] = _mixer(spec)
        stated = _stated(spec) | {"status": result["status"], "data_source": result["provenance"]["dataset"]["source"]}
        for row in found:
            for name, value in stated.items():
                _check_equal(path, run, name, row[name], value)
        recorded, shown = _values(result), {row["metric"]: row["value"] for row in found}
        if len(shown) < len(found):
            raise ValueError(f"{path}: {run}: a metric stands there more than once")
        for name in recorded | shown:
            _check_equal(path, run, name, shown.get(name, "no row"), recorded.get(name, "no such metric"))
    for row in rows:  # a model may have any name but that of another one's mixer
        if row["model"] in mixers.values():
            _check_equal(path, row["run"], "model", row["model"], mixers[row["run"]])


def _check_equal(path: Path, run: str, name: str, shown: object, recorded: object) -> None:
    """ValueError names what a table shows and a record does not say; what is empty here (NaN) is lacking there (None)."""
    if isinstance(shown, int | float) and isinstance(recorded, int | float):
        same = math.isclose(shown, recorded, rel_tol=1e-12)
    else:
        same = shown == recorded or (recorded is None and shown != shown)
    if not same:
        raise ValueError(f"{path}: {run}: {name}: got {shown!r}, its record has {recorded!r}; delete {path} and run again")
