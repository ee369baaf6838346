"""Published layouts on disk: write a folder whole or not at all, read with checks, tell generated data apart.

A generated dataset folder holds provenance.json beside its arrays; a published one does not. Every
complaint is one FileNotFoundError or ValueError that names the file.
"""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock
import h5py
import numpy as np
from scipy.io import loadmat, whosmat

from flarepp import __version__
from flarepp.record import digest, read_json, sha256, write_json

PROVENANCE = "provenance.json"
MATLAB = "a MATLAB file (v5 or v7.3)"


@contextmanager
def generated_folder(path: Path, parameters: dict, rejected: list[dict]) -> Iterator[tuple[Path, Path]]:
    """Yield an empty temporary neighbour to write arrays in, which with provenance added then replaces `path`, and a folder
    for solved samples, which outlives a killed process as long as parameters and solvers stay the same.

    parameters: what the arrays were made with (JSON); rejected: samples left out, may be filled inside the
    block. Of two processes one waits. ValueError when `path` holds files that were not generated: they are never overwritten.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(path.with_name(f".{path.name}.lock")):
        yield from _replace_when_whole(path, parameters, rejected)


def _replace_when_whole(path: Path, parameters: dict, rejected: list[dict]) -> Iterator[tuple[Path, Path]]:
    if not (path / PROVENANCE).exists() and any(file.is_file() for file in path.rglob("*")):
        raise ValueError(
            f"{path}: holds files without {PROVENANCE}, perhaps published data; generate into another folder"
        )
    partial, old = path.with_name(f".{path.name}.partial"), path.with_name(f".{path.name}.old")
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)
    cache = path.with_name(f".{path.name}.samples") / digest([parameters, __version__, _solver_sources()])
    for leftover in cache.parent.glob("*"):
        if leftover != cache:
            shutil.rmtree(leftover)
    partial.mkdir(parents=True)
    cache.mkdir(parents=True, exist_ok=True)
    try:
        yield partial, cache
        files = sorted(file for file in partial.rglob("*") if file.is_file())
        write_json(
            {
                "synthetic": True,
                "generator": f"flarepp {__version__}",
                "parameters": parameters,
                "rejected": rejected,
                "files": describe_files(partial, files),
            },
            partial / PROVENANCE,
        )
        if path.exists():
            os.rename(path, old)
        os.rename(partial, path)
        shutil.rmtree(cache.parent)
    finally:
        for leftover in (partial, old):
            shutil.rmtree(leftover, ignore_errors=True)


def _solver_sources() -> list[str]:
    """Digests of the loaded solvers: samples that other code solved are not taken for this one's."""
    loaded = [module.__file__ for name, module in sys.modules.items() if name.startswith("flarepp.solvers.")]
    return [sha256(Path(file)) for file in sorted(filter(None, loaded))]


def describe_files(root: Path, files: list[Path]) -> list[dict]:
    """[{"name" relative to root, "sha256", "bytes"}] in the order given."""
    return [
        {"name": file.relative_to(root).as_posix(), "sha256": sha256(file), "bytes": file.stat().st_size}
        for file in files
    ]


def read_provenance(path: Path) -> dict | None:
    """Provenance of dataset folder `path`, None when it holds published data; ValueError if it is damaged."""
    file = path / PROVENANCE
    if not file.exists():
        return None
    provenance = read_json(file)
    missing = {"generator", "parameters", "rejected", "files"} - provenance.keys()
    if provenance.get("synthetic") is not True or missing:
        raise ValueError(
            f'{file}: expected "synthetic": true and generator, parameters, rejected, files; '
            f"got the keys {sorted(provenance)}"
        )
    return provenance


def source_card(path: Path, provenance: dict | None, files: list[Path]) -> dict:
    """The part of a card that says where arrays come from: source, generator, solver, rejected, files.

    ValueError when a file is not the one its provenance describes.
    """
    described = describe_files(path, files)
    if provenance is None:
        return {
            "source": "published",
            "generator": None,
            "solver": None,
            "rejected": None,
            "files": described,
        }
    expected = {entry["name"]: entry["sha256"] for entry in provenance["files"]}
    for entry in described:
        if entry["sha256"] != expected.get(entry["name"]):
            raise ValueError(
                f"{path / entry['name']}: sha256 {entry['sha256']}, but {PROVENANCE} says "
                f"{expected.get(entry['name'])}: the file was replaced. If generated, delete {path} and "
                f"generate again; if published, delete {PROVENANCE}"
            )
    return {
        "source": "generated",
        "generator": provenance["generator"],
        "solver": provenance["parameters"],
        "rejected": len(provenance["rejected"]),
        "files": described,
    }


def require_data(path: Path, suffix: str) -> None:
    """ValueError unless a file begins as those that end in `suffix` do and, where its beginning tells, is whole."""
    head = _head(path)
    if suffix == ".npy":
        load_npy(path)
    elif suffix == ".mat":
        _require_signature(path, head, MATLAB, _is_matlab(path, head))
    elif suffix == ".npz":
        _require_signature(path, head, "a whole archive of NumPy arrays", zipfile.is_zipfile(path))
    elif not head:
        raise ValueError(f"{path}: empty")


def load_npy(path: Path) -> np.ndarray:
    """One floating-point array of a .npy file, never unpickled."""
    _require_signature(path, head := _head(path), "a NumPy array", head.startswith(b"\x93NUMPY"))
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)  # large files are read where they are used
    except Exception as error:  # NumPy has no common error either: a damaged header raises what its parser raises
        raise ValueError(f"{path}: damaged or cut short ({type(error).__name__}: {error})") from None
    return _require_float(path, "array", array)


def load_mat(path: Path, names: tuple[str, ...]) -> list[np.ndarray]:
    """The named floating-point variables of a MATLAB file, v5 or v7.3, with the axes that MATLAB shows."""
    head = _head(path)
    _require_signature(path, head, MATLAB, _is_matlab(path, head))
    load = _load_hdf5 if h5py.is_hdf5(path) else _load_mat5
    try:
        present, arrays = load(path, names)
    except Exception as error:  # SciPy has no common error: a damaged file raises nearly anything
        raise ValueError(f"{path}: damaged or cut short ({type(error).__name__}: {error})") from None
    missing = [name for name in names if name not in present]
    if missing:
        listed = ", ".join(sorted(present)) or "none"
        raise ValueError(f"{path}: no variable {', '.join(missing)}; it has {listed}")
    return [_require_float(path, name, arrays[name]) for name in names]


def _is_matlab(path: Path, head: bytes) -> bool:
    """v7.3 is HDF5 behind a MATLAB header."""
    return h5py.is_hdf5(path) or head[126:128] in (b"IM", b"MI")


def _load_mat5(path: Path, names: tuple[str, ...]) -> tuple[list[str], dict[str, np.ndarray]]:
    """Names of all variables, and those asked for."""
    return [variable[0] for variable in whosmat(path)], loadmat(path, variable_names=names)


def _load_hdf5(path: Path, names: tuple[str, ...]) -> tuple[list[str], dict[str, np.ndarray]]:
    with h5py.File(path, "r") as file:
        present = [name for name in file if isinstance(file[name], h5py.Dataset)]
        # HDF5 is row-major and MATLAB column-major, so the axes come in reverse.
        return present, {name: file[name][()].T for name in names if name in present}


def _head(path: Path) -> bytes:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; download the dataset or generate it")
    with open(path, "rb") as stream:
        return stream.read(128)


def _require_signature(path: Path, head: bytes, expected: str, matches: bool) -> None:
    if not matches:
        guess = ", it looks like a web page" if head.lstrip().startswith(b"<") else ""
        raise ValueError(f"{path}: expected {expected}, but it starts with {head[:16]!r}{guess}")


def _require_float(path: Path, name: str, array: np.ndarray) -> np.ndarray:
    if not np.issubdtype(array.dtype, np.floating):
        raise ValueError(f"{path}: {name} has the dtype {array.dtype}, expected floating-point numbers")
    return array


def require_finite(path: Path, name: str, sample: int, values: np.ndarray) -> None:
    """ValueError for a value of a sample that FP32 cannot hold: NaN, an infinity, or beyond 3.4e38."""
    finite = np.abs(values) <= np.finfo(np.float32).max
    if not finite.all():
        raise ValueError(
            f"{path}: sample {sample}: {name} has {np.count_nonzero(~finite)} values that FP32 cannot hold, "
            f"the first is {values[~finite].flat[0]}; expected none"
        )
