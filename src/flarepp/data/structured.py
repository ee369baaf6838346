"""What datasets on structured meshes share: coordinate files X and Y [N, n1, n2] beside fields Q [N, channels, n1, n2], the
sample axis first; training samples are the first of the files, test samples those that follow.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from flarepp.data import published
from flarepp.data.store import Samples
from flarepp.solvers import sampling


def thinned(origin: str, nodes: tuple[int, int], stride: list[int]) -> tuple[int, int]:
    """Points of each axis that a stride leaves, both ends among them; ValueError, naming `origin`, where it misses an end."""
    if not (isinstance(stride, list) and len(stride) == len(nodes) and all(type(step) is int and step > 0 for step in stride)):
        raise ValueError(f"{origin}: stride {stride!r}, expected {len(nodes)} whole numbers from 1 on")
    if any((count - 1) % step for count, step in zip(nodes, stride, strict=True)):
        raise ValueError(
            f"{origin}: {nodes[0]} x {nodes[1]} points cannot be thinned by the stride {stride}; "
            f"expected divisors of {nodes[0] - 1} and {nodes[1] - 1}"
        )
    first, second = ((count - 1) // step + 1 for count, step in zip(nodes, stride, strict=True))
    return first, second


def open_arrays(paths: dict[str, Path], channels: int, nodes: tuple[int, int], count: int) -> dict[str, np.ndarray]:
    """The arrays X, Y and Q of `paths`, mapped rather than read; ValueError unless they fit together and hold `count` samples."""
    arrays = {name: published.load_npy(path) for name, path in paths.items()}
    for name, inner in (("X", nodes), ("Y", nodes), ("Q", (channels, *nodes))):
        shape = arrays[name].shape
        if shape[1:] != inner:
            raise ValueError(f"{paths[name]}: shape {shape}, expected [samples, {', '.join(map(str, inner))}]")
        if shape[0] != len(arrays["X"]):
            raise ValueError(f"{paths[name]}: {shape[0]} samples, but {paths['X'].name} has {len(arrays['X'])}")
    if len(arrays["X"]) < count:
        raise ValueError(f"{paths['X']}: {len(arrays['X'])} samples, expected at least {count} for training and test")
    return arrays


def write(folder: Path, files: dict[str, Path], parameters: dict, **drawing: Any) -> None:
    """Draw samples (`drawing`: what `sampling.draw` takes but its cache) and write the arrays `files` names below `folder`."""
    rejected: list[dict] = []
    with published.generated_folder(folder, parameters, rejected) as (partial_folder, cache):
        drawn = sampling.draw(**drawing, cache=cache)
        rejected += drawn.rejected
        for name, file in files.items():
            np.save(partial_folder / file, drawn.arrays[name], allow_pickle=False)


def read(arrays: dict[str, np.ndarray], spec: dict, channel: int, check: Callable) -> tuple[Samples, Samples]:
    """Training and test samples: features x, y and target Q[:, channel] at every stride-th point, [S, N, c] float32.

    check(sample, x [n1, n2], y [n1, n2], fields [channels, n1, n2]) raises ValueError for a sample that cannot be.
    """
    thin = tuple(slice(None, None, step) for step in spec["stride"])
    features, target = [], []
    for sample in range(spec["num_train"] + spec["num_test"]):
        x, y, fields = (arrays[name][sample] for name in ("X", "Y", "Q"))
        check(sample, x, y, fields)
        features.append(np.stack([x[thin], y[thin]], axis=-1).astype(np.float32).reshape(-1, 2))
        target.append(fields[channel][thin].astype(np.float32).reshape(-1, 1))
    cut = spec["num_train"]
    train, test = (Samples(np.stack(features[part]), np.stack(target[part])) for part in (slice(cut), slice(cut, None)))
    return train, test
