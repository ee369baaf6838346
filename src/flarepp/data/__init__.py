"""Benchmarks: one file each, from the published layout to arrays; `store` keeps them in one HDF5 file.

A benchmark's file has
    OPTIONS            the keys it takes from the configuration beside num_train, num_test, seed
    PUBLISHED_FILES    paths below the data root, or patterns of paths
    write_published(folder, spec, *, num_workers)    solve the equations, write the arrays in the published layout
    read_published(folder, spec) -> Benchmark        read that layout, published or generated, with checks
and, where there is something to say, MULTIPLES (of what the numbers of an option are multiples), LICENCE and SOURCES (see
`download`).
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from flarepp.data import store
from flarepp.errors import unknown
from flarepp.record import digest, sha256, write_with_digest


def names() -> tuple[str, ...]:
    """The benchmarks there is a file for, sorted."""
    return tuple(sorted(path.stem for path in Path(__file__).parent.glob("*.py") if "\nOPTIONS = " in path.read_text()))


def benchmark_module(name: str) -> ModuleType:
    """The file of a benchmark; ValueError for an unknown name."""
    if name not in names():
        raise ValueError(unknown("benchmark", name, names()))
    return importlib.import_module(f"flarepp.data.{name}")


def prepare(spec: dict, path: Path, card: Path, generated: Path, lock: Path, num_workers: int) -> None:
    """Make the dataset file `path` and its card (JSON) from a dataset spec.

    source "generate": solve into the folder `generated` first; "path": the published files below spec["root"]; "download":
    fetch there what is missing, under the lock file `lock`.
    """
    if missing := [key for key in ("name", "source") if key not in spec]:
        raise ValueError(f"dataset spec: the key {missing[0]!r} is missing")
    for key in ("num_train", "num_test"):
        if not (type(spec.get(key)) is int and spec[key] > 0):
            raise ValueError(f"dataset spec: {key}: got {spec.get(key)!r}, expected a whole number from 1 on")
    module, seen = benchmark_module(spec["name"]), {}
    if spec["source"] == "generate":
        module.write_published(generated, spec, num_workers=num_workers)
        benchmark = module.read_published(generated, spec)
    else:
        from flarepp.data import download  # its HTTP client and readers: not for those who only read a store

        root = Path(spec["root"])
        if spec["source"] == "download":
            download.fetch(spec["name"], module, root, lock)
        if not root.is_dir():
            raise FileNotFoundError(f"data.root: the folder {str(root)!r} is not there; put the published files of "
                                    f"{spec['name']} there, or set data.source to 'download' or 'generate'")
        benchmark = module.read_published(root, spec)
        seen = {"published": _seen(module, root)}
        download.require_locked(root, lock, {path: entry["sha256"] for path, entry in seen["published"].items()})
    benchmark = replace(benchmark, card=_shape(benchmark) | benchmark.card)
    store.write(benchmark, path)
    write_with_digest(benchmark.card | seen | {"fingerprint": benchmark.fingerprint}, card)


def _shape(benchmark: store.Benchmark) -> dict:
    """What arrays and card tell of themselves: counts (points of the largest sample), dimension, structure, grid, a name for the
    split, the share of solved samples that were rejected."""
    train, test, card = benchmark.train, benchmark.test, benchmark.card
    counts = {"train": len(train.target), "test": len(test.target), "points": max(train.target.shape[1], test.target.shape[1])}
    rejected = card.get("rejected")
    return {"counts": counts, "dimension": f"{benchmark.num_coordinates}D", "grid": benchmark.grid and list(benchmark.grid),
            "structure": "unstructured" if benchmark.grid is None else "structured", "split_hash": digest(card["split"]),
            "rejection_rate": rejected and rejected / (rejected + counts["train"] + counts["test"])}


def _seen(module: ModuleType, root: Path) -> dict:
    """What tells whether the published files are still those that were read: digest, size and time of each."""
    files = sorted(path for pattern in module.PUBLISHED_FILES for path in root.glob(pattern))
    stats = {path: path.stat() for path in files}
    return {path.relative_to(root).as_posix(): {"sha256": sha256(path), "size_and_time": [stat.st_size, stat.st_mtime_ns]}
            for path, stat in stats.items()}


def listing(root: Path, lock: Path, generated: Path) -> str:
    """A table of all benchmarks: sources, licence, size, state; see `download.listing`."""
    from flarepp.data import download

    return download.listing({name: benchmark_module(name) for name in names()}, root, lock, generated)
