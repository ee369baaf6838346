"""Elasticity in the layout of Geo-FNO (Li et al., arXiv 2207.05209): points around a void in, stress out.

Geo-FNO/elasticity/Meshes/Random_UnitCell_{XY,sigma,rr,theta}_10.npy with the sample axis LAST
in XY [P, 2, N], sigma [P, N] and rr [42, N], and first in theta [N, 10]; in the published files P = 972 and
N = 2,000.
Training samples are the first of the file, test samples the last. rr and theta, which describe the void,
are not read.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from flarepp.data import published
from flarepp.data.store import Affine, Benchmark, Samples
from flarepp.solvers import elasticity, sampling

OPTIONS = ("mesh",)  # keys of the configuration beside counts and seed
MULTIPLES = {"mesh": (4, 1)}  # what the numbers of a list are multiples of: corners of the square are nodes
PUBLISHED_FILES = (
    "Geo-FNO/elasticity/Meshes/Random_UnitCell_XY_10.npy",
    "Geo-FNO/elasticity/Meshes/Random_UnitCell_sigma_10.npy",
)
LICENCE = "none stated by the Geo-FNO authors; the repack on the hub says MIT"
SOURCES = (
    {"hub": "vedantpuri/PDESurrogates", "archive": "Geo-FNO.tar.gz"},
    {"hub": "OneScience-Group/cfd_benchmark", "folder": "data/elasticity"},
)
FOLDER = Path("Geo-FNO/elasticity")
FILES = {name: Path(f"Meshes/Random_UnitCell_{name}_10.npy") for name in ("XY", "sigma", "rr", "theta")}
PUBLISHED_POINTS = 972
POINTS_PER_ELEMENT = 9
MEAN_STRESS = (50.0, 1000.0)  # of a sample; published ones are said to lie between 150 and 260


def write_published(folder: Path, spec: dict, *, num_workers: int = 1) -> None:
    """Solve `num_train` + `num_test` samples on `mesh` = [angular, radial] elements below `folder`.

    ValueError for an impossible mesh, too many rejected samples, or a folder that holds other files.
    """
    mesh, count = tuple(spec["mesh"]), spec["num_train"] + spec["num_test"]
    elasticity.topology(mesh)  # a mesh that cannot be is an error before anything is solved
    parameters = {key: spec[key] for key in ("num_train", "num_test", "mesh", "seed")} | elasticity.SETTINGS
    rejected: list[dict] = []
    with published.generated_folder(Path(folder) / FOLDER, parameters, rejected) as (partial_folder, cache):
        drawn = sampling.draw(
            partial(elasticity.sample, mesh=mesh),
            count,
            bench_id=elasticity.BENCH_ID,
            seed=spec["seed"],
            num_workers=num_workers,
            cache=cache,
            label="elasticity",
        )
        rejected += drawn.rejected
        (partial_folder / FILES["XY"]).parent.mkdir()
        for name, file in FILES.items():
            array = drawn.arrays[name]  # [N, ...]
            last = array if name == "theta" else np.moveaxis(array, 0, -1)  # [..., N]
            np.save(partial_folder / file, np.ascontiguousarray(last), allow_pickle=False)


def read_published(folder: Path, spec: dict) -> Benchmark:
    """Read the first `num_train` and the last `num_test` samples.

    features [S, P, 2] = undeformed positions; target [S, P, 1] = stress. FileNotFoundError, or ValueError
    that names file, sample, value and what was expected.
    """
    folder, num_train, num_test = Path(folder) / FOLDER, spec["num_train"], spec["num_test"]
    provenance = published.read_provenance(folder)
    num_points = PUBLISHED_POINTS if provenance is None else POINTS_PER_ELEMENT * int(np.prod(spec["mesh"]))
    paths = {name: folder / FILES[name] for name in ("XY", "sigma")}
    positions, stress = _read_arrays(paths, num_points, num_train + num_test)  # [P, 2, N], [P, N]
    total = stress.shape[1]
    train = _select(paths, positions, stress, range(num_train))
    test = _select(paths, positions, stress, range(total - num_test, total))
    card = {
        "label": "Elasticity",
        "split": f"first {num_train} / last {num_test} of {total}",
        "counts": {"train": num_train, "test": num_test, "points": num_points},
        "channels": {"features": ["x", "y"], "target": ["stress"]},
        "units": "dimensionless",
        "normalisation": {
            "features": "unchanged",
            "target": "mean 0 and standard deviation 1 on the training set",
        },
    } | published.source_card(folder, provenance, list(paths.values()))
    # The generated O-grid has the same topology for every void; the published meshes have one each.
    return Benchmark(
        name="elasticity",
        train=train,
        test=test,
        feature_norm=Affine.identity(2),
        target_norm=Affine.fit(train.target),
        grid=None,
        points_correspond=provenance is not None,
        card=card,
    )


def _read_arrays(paths: dict[str, Path], num_points: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    positions, stress = published.load_npy(paths["XY"]), published.load_npy(paths["sigma"])
    if stress.ndim != 2 or stress.shape[0] != num_points:
        raise ValueError(f"{paths['sigma']}: shape {stress.shape}, expected [{num_points} points, samples]")
    total = stress.shape[1]
    if positions.shape != (num_points, 2, total):
        raise ValueError(
            f"{paths['XY']}: shape {positions.shape}, expected {(num_points, 2, total)}, "
            "that is points, coordinates, and the samples of sigma"
        )
    if total < count:
        raise ValueError(
            f"{paths['sigma']}: {total} samples, expected at least {count} for training and test"
        )
    return positions, stress


def _select(paths: dict[str, Path], positions: np.ndarray, stress: np.ndarray, samples: range) -> Samples:
    """The checked samples [S, P, c], float32, of positions [P, 2, N] and stress [P, N]."""
    for sample in samples:
        _check_sample(paths, sample, positions[..., sample], stress[:, sample])
    chosen = slice(samples.start, samples.stop)
    return Samples(
        np.ascontiguousarray(np.moveaxis(positions[..., chosen], -1, 0), np.float32),
        np.ascontiguousarray(stress[:, chosen].T[..., None], np.float32),
    )


def _check_sample(paths: dict[str, Path], sample: int, positions: np.ndarray, stress: np.ndarray) -> None:
    published.require_finite(paths["XY"], "XY", sample, positions)
    published.require_finite(paths["sigma"], "sigma", sample, stress)
    outside = positions[(positions < -1e-6) | (positions > 1 + 1e-6)]
    if outside.size:
        raise ValueError(f"{paths['XY']}: sample {sample}: coordinate {outside[0]:.6g}, expected 0 to 1")
    extent = np.ptp(positions, axis=0).min()
    if not extent > 0.5:
        raise ValueError(f"{paths['XY']}: sample {sample}: points extend over {extent:.3g}, expected the unit square")
    if not (stress.std() > 0 and MEAN_STRESS[0] < stress.mean() < MEAN_STRESS[1]):
        raise ValueError(
            f"{paths['sigma']}: sample {sample}: stress of mean {stress.mean():.6g} and standard deviation {stress.std():.6g}, "
            f"expected a mean between {MEAN_STRESS[0]:g} and {MEAN_STRESS[1]:g} and some deviation"
        )
    negative = stress[stress < 0]
    if negative.size > 0.01 * stress.size:
        raise ValueError(
            f"{paths['sigma']}: sample {sample}: {negative.size} of {stress.size} stresses are negative, "
            f"the lowest is {negative.min():.6g}; expected at most one in a hundred"
        )
