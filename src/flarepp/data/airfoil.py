"""Airfoil in the layout of Geo-FNO (Li et al., arXiv 2207.05209): points of a C-mesh in, Mach number out.

Geo-FNO/airfoil/naca/NACA_Cylinder_{X,Y,Q}.npy, X and Y [N, n1, n2] and Q [N, 5, n1, n2] = density, velocity along x and y,
pressure, Mach number; axis n1 runs along the C, from the outflow above the wake around the aerofoil to the outflow below, n2
from the aerofoil and the wake's cut to the far boundary. In the published files n1 x n2 = 221 x 51 and N = 2,490. Training
samples are the first of the files, test samples those that follow. Every stride-th point of each axis is used.

Most points lie far from the aerofoil, where the flow is nearly uniform; the card therefore names the near field.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from flarepp.data import published, structured
from flarepp.data.store import Affine, Benchmark
from flarepp.solvers import airfoil, airfoil_mesh

OPTIONS = ("mesh", "stride")  # keys of the configuration beside counts and seed
MULTIPLES = {"mesh": (1, 8, 1), "stride": (1, 1)}  # cells of the wake, of the aerofoil (coarsened three times), away from it
PUBLISHED_FILES = (
    "Geo-FNO/airfoil/naca/NACA_Cylinder_X.npy",
    "Geo-FNO/airfoil/naca/NACA_Cylinder_Y.npy",
    "Geo-FNO/airfoil/naca/NACA_Cylinder_Q.npy",
)
LICENCE = "none stated by the Geo-FNO authors; the repack on the hub says MIT"
SOURCES = (
    {"hub": "vedantpuri/PDESurrogates", "archive": "Geo-FNO.tar.gz"},
    {"hub": "OneScience-Group/cfd_benchmark", "folder": "data/airfoil"},
)
FOLDER = Path("Geo-FNO/airfoil/naca")
FILES = {name: Path(f"NACA_Cylinder_{name}.npy") for name in ("X", "Y", "Q")}
PUBLISHED_POINTS = (221, 51)
CHANNELS = ("density", "velocity along x", "velocity along y", "pressure", "Mach number")  # of Q
LARGEST_MACH = 3.0
LARGEST_LEAK = 0.1  # ours have at most 0.02; fields of another sample typically 0.06, reversed ones 0.17
FARTHEST = 100.0  # chords
MACH_TOLERANCE = 0.02  # of the Mach number against that of the other fields, on average
FREE_STREAM, FREE_STREAM_TOLERANCE = 0.8, 0.05  # of the Mach number at the far boundary
NEAR_FIELD = {"lower": [-0.7, -1.2], "upper": [1.7, 1.2]}  # |x - 0.5| < 1.2, |y| < 1.2


def write_published(folder: Path, spec: dict, *, num_workers: int = 1) -> None:
    """Solve `num_train` + `num_test` samples on `mesh` = [wake, aerofoil, normal] cells below `folder`.

    ValueError for an impossible mesh, a stride that does not divide it, too many rejected samples, or a folder that holds
    other files.
    """
    mesh, count = tuple(spec["mesh"]), spec["num_train"] + spec["num_test"]
    airfoil_mesh.check(mesh)
    structured.thinned(f"mesh {list(mesh)}", _nodes(mesh), spec["stride"])
    parameters = {key: spec[key] for key in ("num_train", "num_test", "mesh", "seed")} | airfoil.SETTINGS
    structured.write(
        Path(folder) / FOLDER,
        FILES,
        parameters,
        solve=partial(airfoil.samples, mesh=mesh),
        count=count,
        bench_id=airfoil.BENCH_ID,
        seed=spec["seed"],
        num_workers=num_workers,
        batch_size=airfoil.SETTINGS["batch_size"],
        label="airfoil",
    )


def read_published(folder: Path, spec: dict) -> Benchmark:
    """Read the first `num_train` samples and the `num_test` that follow.

    features [S, N, 2] = positions; target [S, N, 1] = Mach number; N points in row-major order of the strided grid.
    FileNotFoundError, or ValueError that names file, sample, value and what was expected.
    """
    folder, num_train, num_test = Path(folder) / FOLDER, spec["num_train"], spec["num_test"]
    provenance = published.read_provenance(folder)
    nodes = PUBLISHED_POINTS if provenance is None else _nodes(spec["mesh"])
    grid = structured.thinned(str(folder), nodes, spec["stride"])
    paths = {name: folder / file for name, file in FILES.items()}
    arrays = structured.open_arrays(paths, len(CHANNELS), nodes, num_train + num_test)
    train, test = structured.read(arrays, spec, CHANNELS.index("Mach number"), partial(_check, paths))
    card = {
        "label": "Airfoil",
        "split": f"[:{num_train}] / [{num_train}:{num_train + num_test}]",
        "channels": {"features": ["x", "y"], "target": ["Mach number"]},
        "units": "dimensionless; the chord is 1",
        "normalisation": {
            "features": "unchanged",
            "target": "mean 0 and standard deviation 1 on the training set",
        },
        "regions": {"near_field": NEAR_FIELD},
    } | published.source_card(folder, provenance, list(paths.values()))
    return Benchmark(
        name="airfoil",
        train=train,
        test=test,
        feature_norm=Affine.identity(2),
        target_norm=Affine.fit(train.target),
        grid=grid,
        points_correspond=True,
        card=card,
    )


def _nodes(mesh: tuple[int, int, int]) -> tuple[int, int]:
    """Points along the C and away from the aerofoil."""
    wake, aerofoil, normal = mesh
    return 2 * wake + aerofoil + 1, normal + 1


def _check(paths: dict[str, Path], sample: int, x: np.ndarray, y: np.ndarray, fields: np.ndarray) -> None:
    """ValueError for a sample [n1, n2], fields [5, n1, n2], that is no flow around an aerofoil."""
    fields = fields.astype(np.float64)
    _check_mesh(paths, sample, x, y)
    _check_gas(paths["Q"], sample, fields)
    _check_mach(paths["Q"], sample, fields[-1])
    _check_slip(paths["Q"], sample, x, y, fields)


def _check_slip(path: Path, sample: int, x: np.ndarray, y: np.ndarray, fields: np.ndarray) -> None:
    """The gas slips along the aerofoil: on the first line between the two copies of the cut, velocity follows the wall."""
    x, y, u, v = (values[:, 0] for values in (x, y, fields[1], fields[2]))  # [n1]
    wall = np.hypot(x - x[::-1], y - y[::-1]) > 1e-6  # elsewhere a point stands twice
    along = np.stack([np.gradient(x), np.gradient(y)])
    normal = np.abs(u * along[1] - v * along[0]) / np.hypot(*along)
    share = np.median(normal[wall]) / (FREE_STREAM * np.sqrt(airfoil.GAMMA))
    if not share < LARGEST_LEAK:
        raise ValueError(
            f"{path}: sample {sample}: the velocity through the aerofoil is {share:.3g} of the free stream in the median, "
            f"expected below {LARGEST_LEAK:g}; fields and mesh may be of different samples, or one of them reversed"
        )


def _check_mesh(paths: dict[str, Path], sample: int, x: np.ndarray, y: np.ndarray) -> None:
    """x, y [n1, n2]: on the first line (n2 = 0) aerofoil and cut, whose two ends are one point; the far boundary is far."""
    for name, position in (("X", x), ("Y", y)):
        published.require_finite(paths[name], name, sample, position)
        if not np.abs(position).max() < FARTHEST:
            raise ValueError(f"{paths[name]}: sample {sample}: {name} up to {np.abs(position).max():.3g}, expected below {FARTHEST:g}")
        for index in range(len(position) // 10 + 1):  # at least the beginning of the wake
            first, last = position[index, 0], position[-1 - index, 0]
            if not abs(first - last) <= 1e-3:
                raise ValueError(
                    f"{paths[name]}: sample {sample}: the two copies of the cut behind the aerofoil (points {index} of axis 1 "
                    f"from both ends, first of axis 2) are {first:.6g} and {last:.6g}, expected one point"
                )
    inner, outer = (np.hypot(x[:, line] - 0.5, y[:, line]).min() for line in (0, -1))
    if not outer > 5 > inner:
        raise ValueError(
            f"{paths['X']}: sample {sample}: the first line of axis 2 comes as near as {inner:.3g} to the middle of the "
            f"aerofoil (0.5, 0), the last as {outer:.3g}; expected the aerofoil first and the far boundary last"
        )
    height = np.abs(y[:, 0]).max()
    if not height < 0.5:
        raise ValueError(
            f"{paths['Y']}: sample {sample}: Y up to {height:.3g} on the aerofoil and the cut behind it (first line of axis "
            "2), expected below 0.5; X and Y may be exchanged"
        )


def _check_gas(path: Path, sample: int, fields: np.ndarray) -> None:
    """fields [5, n1, n2]: positive density and pressure, from which and the velocity the Mach number follows."""
    for name, values in zip(CHANNELS, fields, strict=True):
        published.require_finite(path, name, sample, values)
    density, u, v, pressure, mach = fields
    for name, values in (("density", density), ("pressure", pressure)):
        if not values.min() > 0:
            raise ValueError(f"{path}: sample {sample}: {name} goes down to {values.min():.3g}, expected above 0")
    distance = np.abs(mach - np.hypot(u, v) / np.sqrt(airfoil.GAMMA * pressure / density)).mean()
    if not distance < MACH_TOLERANCE:
        raise ValueError(
            f"{path}: sample {sample}: the Mach number is off by {distance:.3g} on average from that of density, velocity "
            f"and pressure, expected below {MACH_TOLERANCE:g}; the channels are {', '.join(CHANNELS)}"
        )


def _check_mach(path: Path, sample: int, mach: np.ndarray) -> None:
    """mach [n1, n2]: not negative, bounded, the free stream's at the far boundary."""
    lowest, largest = mach.min(), mach.max()
    if not (lowest >= 0 and largest <= LARGEST_MACH):
        raise ValueError(
            f"{path}: sample {sample}: Mach number from {lowest:.3g} to {largest:.3g}, expected 0 to {LARGEST_MACH:g}"
        )
    deviation = np.median(np.abs(mach[:, -1] - FREE_STREAM))
    if not deviation <= FREE_STREAM_TOLERANCE:
        raise ValueError(
            f"{path}: sample {sample}: the Mach number at the far boundary (last line of axis 2) is off the free stream's "
            f"{FREE_STREAM:g} by {deviation:.3g} in the median, expected at most {FREE_STREAM_TOLERANCE:g}"
        )
