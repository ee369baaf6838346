"""Pipe flow in the layout of Geo-FNO (Li et al., arXiv 2207.05209): mesh points in, velocity along x out.

Geo-FNO/pipe/Pipe_{X,Y,Q}.npy, float64 [N, n1, n2] and Q [N, 3, n1, n2] = velocity along x, along y, pressure; axis n1 runs
downstream, n2 from the lower wall to the upper one. In the published files n1 = n2 = 129 and N = 2,310. Training samples
are the first of the files, test samples those that follow. Every stride-th point of each axis is used.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from flarepp.data import published, structured
from flarepp.data.store import Affine, Benchmark
from flarepp.solvers import pipe

OPTIONS = ("mesh", "stride")  # keys of the configuration beside counts and seed
MULTIPLES = {"mesh": (4, 1), "stride": (1, 1)}  # what the numbers of a list are multiples of: the centre line is four cubics
PUBLISHED_FILES = ("Geo-FNO/pipe/Pipe_X.npy", "Geo-FNO/pipe/Pipe_Y.npy", "Geo-FNO/pipe/Pipe_Q.npy")
LICENCE = "none stated by the authors; the archive on the hub is tagged MIT"
SOURCES = (
    {"hub": "vedantpuri/PDESurrogates", "archive": "Geo-FNO.tar.gz"},
    {"hub": "OneScience-Group/cfd_benchmark", "folder": "data/pipe"},
)
FOLDER = Path("Geo-FNO/pipe")
FILES = {name: Path(f"Pipe_{name}.npy") for name in ("X", "Y", "Q")}
PUBLISHED_POINTS = (129, 129)
LENGTH, WIDTH, LARGEST_PEAK = 10.0, 1.0, 2.0  # of pipe, inlet and inlet velocity; the peak here is 0.25
TOLERANCE = 0.01  # of slip at the walls, against the largest velocity


def write_published(folder: Path, spec: dict, *, num_workers: int = 1) -> None:
    """Solve `num_train` + `num_test` samples on `mesh` = [streamwise, transverse] elements below `folder`.

    ValueError for an impossible mesh, a stride that does not divide it, too many rejected samples, or a folder that holds
    other files.
    """
    mesh, count = tuple(spec["mesh"]), spec["num_train"] + spec["num_test"]
    pipe.pipe_space(mesh)  # a mesh that cannot be is an error before anything is solved
    structured.thinned(f"mesh {list(mesh)}", _nodes(mesh), spec["stride"])
    parameters = {key: spec[key] for key in ("num_train", "num_test", "mesh", "seed")} | pipe.SETTINGS
    structured.write(
        Path(folder) / FOLDER,
        FILES,
        parameters,
        solve=partial(pipe.sample, mesh=mesh),
        count=count,
        bench_id=pipe.BENCH_ID,
        seed=spec["seed"],
        num_workers=num_workers,
        label="pipe",
    )


def read_published(folder: Path, spec: dict) -> Benchmark:
    """Read the first `num_train` samples and the `num_test` that follow.

    features [S, N, 2] = positions; target [S, N, 1] = velocity along x; N points in row-major order of the strided grid.
    FileNotFoundError, or ValueError that names file, sample, value and what was expected.
    """
    folder, num_train, num_test = Path(folder) / FOLDER, spec["num_train"], spec["num_test"]
    provenance = published.read_provenance(folder)
    nodes = PUBLISHED_POINTS if provenance is None else _nodes(spec["mesh"])
    grid = structured.thinned(str(folder), nodes, spec["stride"])
    paths = {name: folder / file for name, file in FILES.items()}
    arrays = structured.open_arrays(paths, 3, nodes, num_train + num_test)
    train, test = structured.read(arrays, spec, 0, partial(_check, paths))
    card = {
        "label": "Pipe",
        "split": f"[:{num_train}] / [{num_train}:{num_train + num_test}]",
        "channels": {"features": ["x", "y"], "target": ["velocity along x"]},
        "units": "dimensionless",
        "normalisation": {
            "features": "each coordinate mean 0, standard deviation 1 on the training set",
            "target": "mean 0 and standard deviation 1 on the training set",
        },
    } | published.source_card(folder, provenance, list(paths.values()))
    return Benchmark(
        name="pipe",
        train=train,
        test=test,
        feature_norm=Affine.fit(train.features),
        target_norm=Affine.fit(train.target),
        grid=grid,
        points_correspond=True,
        card=card,
    )


def _nodes(mesh: tuple[int, int]) -> tuple[int, int]:
    """Points of each axis of a mesh of biquadratic elements."""
    return 2 * mesh[0] + 1, 2 * mesh[1] + 1


def _check(paths: dict[str, Path], sample: int, x: np.ndarray, y: np.ndarray, fields: np.ndarray) -> None:
    """ValueError for a sample [n1, n2], fields [3, n1, n2], that is no flow through a pipe."""
    _check_positions(paths, sample, x, y)
    _check_velocity(paths["Q"], sample, fields[0])


def _check_positions(paths: dict[str, Path], sample: int, x: np.ndarray, y: np.ndarray) -> None:
    """x [n1, n2] grows downstream along the first axis, y [n1, n2] from wall to wall along the second."""
    for name, position, axis, course in (("X", x, 0, "downstream"), ("Y", y, 1, "from the lower wall to the upper one")):
        published.require_finite(paths[name], name, sample, position)
        step = np.diff(position, axis=axis).min()
        if not step > 0:
            raise ValueError(
                f"{paths[name]}: sample {sample}: {name} changes by {step:.3g} from one point to the next along axis "
                f"{axis + 1}, expected to grow {course}"
            )
    for name, extent, expected in (("X", x[-1, 0] - x[0, 0], LENGTH), ("Y", y[0, -1] - y[0, 0], WIDTH)):
        if not 0.5 * expected < extent < 2 * expected:
            raise ValueError(f"{paths[name]}: sample {sample}: {name} extends over {extent:.3g}, expected about {expected:g}")


def _check_velocity(path: Path, sample: int, velocity: np.ndarray) -> None:
    """velocity [n1, n2] along x: none at the walls, a parabola at the inlet."""
    published.require_finite(path, "velocity along x", sample, velocity)
    largest = np.abs(velocity).max()
    # The corners of the outlet belong to walls and outlet: published solvers differ in what they hold there.
    slip = np.abs(velocity[:-1, [0, -1]]).max()
    if not slip <= TOLERANCE * largest:
        raise ValueError(
            f"{path}: sample {sample}: velocity {slip:.3g} at the walls (first and last point of axis 2), "
            f"expected 0 there; the largest is {largest:.3g}"
        )
    inlet = velocity[0]
    t = np.linspace(0, 1, len(inlet))
    peak = inlet[len(inlet) // 2]
    error = np.abs(inlet - 4 * peak * t * (1 - t)).max()
    if not (0 < peak < LARGEST_PEAK and error < 0.1 * peak):
        raise ValueError(
            f"{path}: sample {sample}: velocity at the inlet (axis 1, first point) is off by {error:.3g} from a parabola "
            f"that is zero at the walls with the peak {peak:.3g}; expected a parabola with a peak between 0 and {LARGEST_PEAK:g}"
        )
