"""Darcy flow in the layout of the FNO authors (Li et al., arXiv 2010.08895): coefficient in, pressure out.

FNO/darcy/piececonst_r421_N1024_smooth1.mat (training) and ..._smooth2.mat (test), variables `coeff` and
`sol`, both float64 [N, K, K] with K = 421 in the published files. Generated files keep these names at any
K, so that there is one reader. Every stride-th point is used, stride = (K - 1) / (resolution - 1). As in
the published benchmark, the position channels run from 0 to 1 although the values belong to cell centres,
and the first of them varies fastest (along axis 1 of a field).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from scipy.io import savemat

from flarepp.data import published
from flarepp.data.store import Affine, Benchmark, Samples
from flarepp.solvers import darcy, sampling

OPTIONS = ("resolution", "solver_resolution")  # keys of the configuration beside counts and seed
PUBLISHED_FILES = ("FNO/darcy/piececonst_r421_N1024_smooth1.mat", "FNO/darcy/piececonst_r421_N1024_smooth2.mat")
LICENCE = "none stated by the FNO authors; the repack on the hub says MIT"
SOURCES = (
    {"hub": "vedantpuri/PDESurrogates", "archive": "FNO.tar.gz"},
    {"hub": "OneScience-Group/cfd_benchmark", "folder": "data/darcy"},
    {"url": "https://pde-xd.s3.amazonaws.com/{name}"},
    {"url": "https://hkzdata.s3.us-west-2.amazonaws.com/PINO/{name}"},
)
FOLDER = Path("FNO/darcy")
TRAIN_FILE, TEST_FILE = (Path(file).name for file in PUBLISHED_FILES)
HEADER = b"MATLAB 5.0 MAT-file".ljust(116)
PHASES = (3.0, 12.0)
MAXIMUM = (0.005, 0.03)  # of a solution: that of the lower phase alone is 0.0246, that of the upper one 0.0061
MAX_MAT_BYTES = 2**31 - 1  # of one variable in a MATLAB v5 file


def write_published(folder: Path, spec: dict, *, num_workers: int = 1) -> None:
    """Solve `num_train` + `num_test` samples on `solver_resolution` points a side; write them below `folder`.

    The two files come from two random streams. ValueError, before anything is solved, for a resolution that
    the points do not allow and for files beyond the limits of their format.
    """
    num_points = spec["solver_resolution"]
    _stride(f"solver_resolution {num_points}", num_points, spec["resolution"])
    if max(spec["num_train"], spec["num_test"]) * num_points**2 * 8 > MAX_MAT_BYTES:
        raise ValueError(
            f"num_train {spec['num_train']}, num_test {spec['num_test']}: a MATLAB v5 file holds at most "
            f"{MAX_MAT_BYTES // (8 * num_points**2)} samples of {num_points} x {num_points} points"
        )
    keys = ("num_train", "num_test", "solver_resolution", "seed")
    parameters = {key: spec[key] for key in keys} | darcy.SETTINGS
    counts = {TRAIN_FILE: spec["num_train"], TEST_FILE: spec["num_test"]}
    rejected: list[dict] = []
    with published.generated_folder(Path(folder) / FOLDER, parameters, rejected) as (partial_folder, cache):
        for stream, (name, count) in enumerate(counts.items()):
            drawn = sampling.draw(
                partial(darcy.sample, resolution=num_points),
                count,
                bench_id=darcy.BENCH_ID,
                seed=spec["seed"],
                stream=stream,
                num_workers=num_workers,
                cache=cache,
                label=f"darcy {name}",
            )
            savemat(partial_folder / name, drawn.arrays)
            with open(partial_folder / name, "r+b") as file:
                file.write(HEADER)  # SciPy's holds the time: equal samples would be other bytes
            rejected += [{"file": name} | entry for entry in drawn.rejected]


def read_published(folder: Path, spec: dict) -> Benchmark:
    """Read the first `num_train` samples of the training file and the first `num_test` of the test file.

    features [S, N, 3] = position along axis 1 and along axis 0, coefficient; target [S, N, 1] = solution; N
    = resolution^2 points in row-major order. FileNotFoundError, or ValueError that names file, sample,
    value and what was expected.
    """
    folder, resolution = Path(folder) / FOLDER, spec["resolution"]
    provenance = published.read_provenance(folder)
    train = _read_split(folder / TRAIN_FILE, spec["num_train"], resolution)
    test = _read_split(folder / TEST_FILE, spec["num_test"], resolution)
    if np.array_equal(train.target[: len(test.target)], test.target):
        raise ValueError(f"{folder / TEST_FILE}: its samples are those of {TRAIN_FILE}; one file was copied over the other")
    coefficient_norm = Affine.fit(train.features[..., 2:])
    card = {
        "label": "Darcy",
        "split": f"smooth1[:{spec['num_train']}] / smooth2[:{spec['num_test']}]",
        "counts": {"train": spec["num_train"], "test": spec["num_test"], "points": resolution**2},
        "channels": {"features": ["x", "y", "coefficient"], "target": ["solution"]},
        "units": "dimensionless",
        "normalisation": {
            "features": "positions unchanged; coefficient mean 0, standard deviation 1 on the training set",
            "target": "mean 0 and standard deviation 1 on the training set",
        },
    } | published.source_card(folder, provenance, [folder / TRAIN_FILE, folder / TEST_FILE])
    return Benchmark(
        name="darcy",
        train=train,
        test=test,
        feature_norm=Affine(
            np.append(np.zeros(2), coefficient_norm.mean), np.append(np.ones(2), coefficient_norm.std)
        ),
        target_norm=Affine.fit(train.target),
        grid=(resolution, resolution),
        points_correspond=True,
        card=card,
    )


def _read_split(path: Path, count: int, resolution: int) -> Samples:
    coefficient, solution = published.load_mat(path, ("coeff", "sol"))
    shape = coefficient.shape
    if len(shape) != 3 or shape[1] != shape[2]:
        raise ValueError(f"{path}: coeff has the shape {shape}, expected [samples, K, K]")
    if solution.shape != shape:
        raise ValueError(f"{path}: sol has the shape {solution.shape}, expected that of coeff, {shape}")
    if shape[0] < count:
        raise ValueError(f"{path}: {shape[0]} samples, expected at least {count}")
    stride = _stride(str(path), shape[1], resolution)
    for sample in range(count):
        _check_sample(path, sample, coefficient[sample], solution[sample])
    position = np.linspace(0, 1, resolution)
    features = np.empty((count, resolution, resolution, 3), np.float32)
    features[..., 0], features[..., 1] = np.meshgrid(position, position)
    features[..., 2] = coefficient[:count, ::stride, ::stride]
    target = solution[:count, ::stride, ::stride].astype(np.float32)
    return Samples(features.reshape(count, -1, 3), target.reshape(count, -1, 1))  # [S, R, R, c] -> [S, N, c]


def _stride(origin: str, num_points: int, resolution: int) -> int:
    if resolution < 2 or (num_points - 1) % (resolution - 1) or resolution > num_points:
        allowed = [
            (num_points - 1) // step + 1 for step in range(1, num_points) if (num_points - 1) % step == 0
        ]
        raise ValueError(
            f"{origin}: {num_points} points a side cannot be thinned to resolution {resolution}; "
            f"allowed: {', '.join(map(str, allowed))}"
        )
    return (num_points - 1) // (resolution - 1)


def _check_sample(path: Path, sample: int, coefficient: np.ndarray, solution: np.ndarray) -> None:
    """coefficient and solution [K, K]: two phases; a pressure that is positive inside and near zero on the
    outer ring.
    """
    published.require_finite(path, "coeff", sample, coefficient)
    published.require_finite(path, "sol", sample, solution)
    foreign = coefficient[~np.isin(coefficient, PHASES)]
    if foreign.size:
        raise ValueError(
            f"{path}: sample {sample}: coeff {foreign[0]}, expected only {PHASES[0]:g} and {PHASES[1]:g}"
        )
    lowest, largest = solution.min(), solution.max()
    if not MAXIMUM[0] < largest < MAXIMUM[1]:
        raise ValueError(f"{path}: sample {sample}: sol up to {largest:.3g}, expected a maximum between {MAXIMUM[0]} and {MAXIMUM[1]}")
    # The spline from nodes to cell centres may dip a little below zero in a corner.
    if not lowest > -0.5 / len(solution) * largest:
        raise ValueError(
            f"{path}: sample {sample}: sol goes down to {lowest:.3g} and up to {largest:.3g}, expected >= 0"
        )
    ring = np.concatenate([solution[0], solution[-1], solution[:, 0], solution[:, -1]]).max()
    # The outer ring lies half a cell inside the boundary, where the solution is 0.
    if ring > largest * min(0.9, 25 / len(solution)):
        raise ValueError(
            f"{path}: sample {sample}: sol is {ring:.3g} on its outer ring and {largest:.3g} at most, "
            "expected nearly zero on the ring"
        )
