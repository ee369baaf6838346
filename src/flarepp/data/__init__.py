"""Benchmarks: one file each, from the published layout to arrays; `store` keeps them in one HDF5 file.

A benchmark's file names the keys it takes from the configuration (OPTIONS) and has
    write_published(folder, spec, *, num_workers)    solve the equations, write the arrays in the published layout
    read_published(folder, spec) -> Benchmark        read that layout, published or generated, with checks
"""

from __future__ import annotations

import importlib
from pathlib import Path

from flarepp.data import store
from flarepp.errors import unknown
from flarepp.record import sha256, write_json


def prepare(spec: dict, path: Path, card: Path, generated: Path, num_workers: int) -> None:
    """Make the dataset file `path` and its card (JSON) from a dataset spec.

    source "generate": solve into the folder `generated` first; "path": the published files below spec["root"].
    """
    if missing := [key for key in ("name", "source") if key not in spec]:
        raise ValueError(f"dataset spec: the key {missing[0]!r} is missing")
    names = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if "\nOPTIONS = " in path.read_text())
    if spec["name"] not in names:
        raise ValueError(unknown("benchmark", spec["name"], names))
    module = importlib.import_module(f"flarepp.data.{spec['name']}")
    if spec["source"] == "generate":
        module.write_published(generated, spec, num_workers=num_workers)
        benchmark = module.read_published(generated, spec)
    else:
        root = Path(spec["root"])
        if not root.is_dir():
            raise FileNotFoundError(f"data.root: the folder {str(root)!r} is not there; put the published files of "
                                    f"{spec['name']} there, or set data.source to 'generate'")
        benchmark = module.read_published(root, spec)
    store.write(benchmark, path)
    published = {} if spec["source"] == "generate" else {"published": _seen(module, Path(spec["root"]))}
    write_json(benchmark.card | published | {"fingerprint": benchmark.fingerprint}, card)


def _seen(module, root: Path) -> dict:
    """What tells whether the published files are still those that were read: digest, size and time of each."""
    stats = {file: (root / file).stat() for file in module.PUBLISHED_FILES}
    return {file: {"sha256": sha256(root / file), "size_and_time": [stat.st_size, stat.st_mtime_ns]}
            for file, stat in stats.items()}
