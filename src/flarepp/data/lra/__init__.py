"""The tasks of the Long Range Arena (arXiv 2011.04006), one file each; `sequences` keeps one in an HDF5 file.

A task's file has
    OPTIONS            the keys it takes from the configuration beside name, source, root and seed; where it draws
                       samples also num_train and num_test
    PUBLISHED_FILES    paths below the data root, possibly none, which
    read_published(paths, spec) -> Task    reads
    LABEL, LICENCE
and, where samples can be drawn,
    generate(spec, *, num_workers) -> Task
and SOURCES, where the published files can be fetched from (see `download`). A task whose published files are not there may
come from those that public studies share instead, see `processed`.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import numpy as np

from flarepp.data.lra import processed, sequences
from flarepp.errors import unknown
from flarepp.record import write_with_digest


def task_names() -> tuple[str, ...]:
    """The tasks there is a file for, sorted."""
    return tuple(sorted(path.stem for path in Path(__file__).parent.glob("*.py") if "\nOPTIONS = " in path.read_text()))


def task_module(name: str) -> ModuleType:
    """The file of a task; ValueError for an unknown name."""
    if name not in task_names():
        raise ValueError(unknown("task", name, task_names()))
    return importlib.import_module(f"flarepp.data.lra.{name}")


def prepare(spec: dict, path: Path, card: Path, lock: Path, num_workers: int) -> None:
    """Make the task's file `path` and its card (JSON) from a dataset spec.

    source "generate": draw the samples; "path": the files below spec["root"]; "download": fetch there what is missing,
    under the lock file `lock`. ValueError or OSError for what cannot be.
    """
    if missing := [key for key in ("name", "source", "seed") if key not in spec]:
        raise ValueError(f"dataset spec: the key {missing[0]!r} is missing")
    module, seen = task_module(spec["name"]), {}
    drawn = ("num_train", "num_test") if spec["source"] == "generate" else ()
    if missing := [key for key in (*module.OPTIONS, *drawn) if key not in spec]:
        raise ValueError(f"dataset spec: the key {missing[0]!r} is missing")
    if spec["source"] == "generate":
        if not hasattr(module, "generate"):
            raise ValueError(f"{spec['name']}: its samples cannot be drawn; set its source to 'download' or 'path'")
        task = module.generate(spec, num_workers=num_workers)
    else:
        from flarepp.data import download, published  # its HTTP client and readers: not for those who only read a store

        root = Path(spec["root"])
        if spec["source"] == "download":
            download.fetch(spec["name"], module, root, lock)
        files, task = read_published(module, root, spec)
        task.card["files"] = published.describe_files(root, files)
        digests = {entry["name"]: entry["sha256"] for entry in task.card["files"]}
        download.require_locked(root, lock, digests)
        stats = {name: (root / name).stat() for name in digests}
        seen = {"published": {name: {"sha256": digest, "size_and_time": [stats[name].st_size, stats[name].st_mtime_ns]}
                              for name, digest in digests.items()}}
    sequences.check(task)
    sequences.write(task, path)
    write_with_digest(task.card | _shape(task) | seen | {"fingerprint": task.fingerprint}, card)


def listing(root: Path, lock: Path, generated: Path) -> str:
    """A table of the tasks that have published files: sources, licence, size, state; see `download.listing`."""
    from flarepp.data import download

    modules = {name: task_module(name) for name in task_names()}
    return download.listing({name: module for name, module in modules.items() if module.PUBLISHED_FILES}, root, lock, generated)


def read_published(module: ModuleType, root: Path, spec: dict) -> tuple[list[Path], sequences.Task]:
    """The files a task was read from and the task: the published files, or those that studies share."""
    own = [root / path for path in module.PUBLISHED_FILES]
    if own and all(file.is_file() for file in own):
        return own, module.read_published(own, spec)
    shared = processed.files(root, spec["name"])
    if all(file.is_file() for file in shared):
        return shared, processed.read(shared, spec)
    expected = " or ".join(", ".join(map(str, files)) for files in (own, shared) if files)
    raise FileNotFoundError(f"{spec['name']}: the published files are not there; expected {expected}")


def _shape(task: sequences.Task) -> dict:
    """What the arrays tell of themselves: samples, tokens and classes."""
    lengths = task.train.lengths
    classes = np.bincount(task.test.labels, minlength=task.num_classes) / len(task.test)
    return {"counts": {name: len(getattr(task, name)) for name in ("train", "dev", "test")}, "dev_is_test": task.dev_is_test,
            "documents": task.num_documents, "symbols": task.num_symbols, "max_length": task.max_length,
            "length": {"min": int(lengths.min()), "median": float(np.median(lengths)),
                       "mean": round(float(lengths.mean()), 1), "max": int(lengths.max())},
            "class_frequencies": [round(float(share), 4) for share in classes]}
