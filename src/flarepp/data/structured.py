"""What datasets on structured meshes share: coordinate files X and Y [N, n1, n2] beside fields Q [N, channels, n1, n2], the
sample axis first, and the thinning of their points.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from flarepp.data import published


def thinned(origin: str, nodes: tuple[int, int], stride: list[int]) -> tuple[int, int]:
    """Points of each axis that a stride leaves, both ends among them; ValueError, naming `origin`, where it misses an end."""
    if min(stride) < 1 or any((count - 1) % step for count, step in zip(nodes, stride, strict=True)):
        raise ValueError(
            f"{origin}: {nodes[0]} x {nodes[1]} points cannot be thinned by the stride {list(stride)}; "
            f"expected divisors of {nodes[0] - 1} and {nodes[1] - 1}"
        )
    return tuple((count - 1) // step + 1 for count, step in zip(nodes, stride, strict=True))


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
