"""DrivAerML-40K: pressure at 40,000 random points of each car's surface (Ashton et al., arXiv 2408.11969).

DrivAerML/drivaerml_surface_presampled_40k/{train,test}/run_{i}.npz, one file a car, with surface_mesh_centers [P, 3]
in metres and surface_fields [P, 4], the mean pressure over the density and the mean wall shear stress, in m^2/s^2.
P = 40,000 in the published files. The two folders are the split, and nothing else documents it (387 / 97 cars); runs
are taken in the order of their numbers. Points are in random order, so the first of them are a random choice. Only the
pressure is learned.

Generated files hold another level of physics, see solvers/drivaerml.py: a stand-in with another pressure distribution, whose
normaliser is therefore fitted to its training set. presample.py makes the published layout from the full public data.
"""

from __future__ import annotations

import hashlib
import re
import zipfile
from functools import partial
from pathlib import Path

import numpy as np

from flarepp.data import presample, published
from flarepp.data.store import Affine, Benchmark, Samples
from flarepp.record import digest
from flarepp.solvers import drivaerml, sampling

OPTIONS = ("panels", "num_points")  # keys of the configuration beside counts and seed
MULTIPLES = {"panels": (1, 1)}  # around and along half a car: two numbers
PUBLISHED_FILES = (
    "DrivAerML/drivaerml_surface_presampled_40k/train/run_*.npz",
    "DrivAerML/drivaerml_surface_presampled_40k/test/run_*.npz",
)
LICENCE = "CC BY-SA 4.0 (DrivAerML); the repository of the sampled points says MIT"
SOURCES = (
    {"hub": "vedantpuri/PDESurrogates", "archive": "drivaerml_surface_presampled_40k.tar.gz", "below": "DrivAerML"},
)
FOLDER = Path("DrivAerML/drivaerml_surface_presampled_40k")
SPLITS = ("train", "test")
COLUMNS = {"surface_mesh_centers": 3, "surface_fields": 4}
PUBLISHED_POINTS = 40_000
PUBLISHED_NORM = Affine(np.array([-229.845718]), np.array([269.598572]))
BOX_MIN, BOX_MAX = (np.array(drivaerml.SETTINGS[key]) for key in ("box_min", "box_max"))
BOX_TOLERANCE = 0.05  # m, by which a car may leave the box of the published normalisation
MEAN_PRESSURE = {"published": (-290.0, -170.0), "stand-in": (-320.0, -60.0)}  # of a run, m^2/s^2
FEWEST_PANELS = (4, 8)
STAND_IN = ("Inviscid potential flow past smooth car bodies without wheels, solved by a panel method: no boundary layer, "
            "separation or wake, wall shear 0. Not comparable with DrivAerML's scale-resolving simulations.")


def write_published(folder: Path, spec: dict, *, num_workers: int = 1) -> None:
    """Solve `num_train` + `num_test` cars on `panels` = [around, along] panels of a half; write them below `folder`.

    Runs 1 to num_train are the training set, the next num_test the test set. ValueError, before anything is solved, for
    fewer than 4 x 8 panels; then for too many rejected samples, or a folder that holds other files.
    """
    panel_counts = tuple(spec["panels"])
    if any(count < fewest for count, fewest in zip(panel_counts, FEWEST_PANELS, strict=True)):
        raise ValueError(
            f"panels {list(panel_counts)}: expected at least {list(FEWEST_PANELS)}, around and along half a car")
    parameters = {key: spec[key] for key in ("num_train", "num_test", *OPTIONS, "seed")} | drivaerml.SETTINGS
    rejected: list[dict] = []
    with published.generated_folder(Path(folder) / FOLDER, parameters, rejected) as (partial_folder, cache):
        drawn = sampling.draw(
            partial(drivaerml.sample, panel_counts=panel_counts, num_points=spec["num_points"]),
            spec["num_train"] + spec["num_test"],
            bench_id=drivaerml.BENCH_ID,
            seed=spec["seed"],
            num_workers=num_workers,
            cache=cache,
            label="drivaerml",
        )
        rejected += drawn.rejected
        for split in SPLITS:
            (partial_folder / split).mkdir()
        for index in range(len(drawn.indices)):
            split = "train" if index < spec["num_train"] else "test"
            arrays = {name: drawn.arrays[name][index] for name in COLUMNS}
            np.savez(partial_folder / split / f"run_{index + 1}.npz", **arrays)


def read_published(folder: Path, spec: dict) -> Benchmark:
    """Read the first `num_train` and `num_test` runs of the two folders, the first `num_points` rows of each.

    features [S, N, 3] = positions; target [S, N, 1] = pressure. FileNotFoundError, or ValueError that names file, value and
    what was expected.
    """
    folder = Path(folder) / FOLDER
    provenance = published.read_provenance(folder)
    source = "published" if provenance is None else "stand-in"
    runs = {split: find_runs(folder / split) for split in SPLITS}
    if both := sorted(runs["train"].keys() & runs["test"].keys()):
        raise ValueError(f"{runs['train'][both[0]]}: run {both[0]} is in both folders, expected in one of them")
    counts = {"train": spec["num_train"], "test": spec["num_test"]}
    chosen = {split: dict(list(runs[split].items())[:counts[split]]) for split in SPLITS}
    for split in SPLITS:
        if len(chosen[split]) < counts[split]:
            raise ValueError(f"{folder / split}: {len(chosen[split])} runs, expected at least {counts[split]}")
    train, test = (_read_split(list(chosen[split].values()), spec["num_points"], source) for split in SPLITS)
    card = _card(folder, provenance, runs, chosen, spec["num_points"])
    return Benchmark(
        name="drivaerml",
        train=train,
        test=test,
        feature_norm=Affine(BOX_MIN, BOX_MAX - BOX_MIN),
        target_norm=PUBLISHED_NORM if provenance is None else Affine.fit(train.target),
        grid=None,
        points_correspond=False,
        card=card,
    )


def find_runs(folder: Path) -> dict[int, Path]:
    """Files run_{i}.npz of a folder by the run's number, in its order; FileNotFoundError when there is none."""
    names = {path: re.fullmatch(r"run_(0|[1-9]\d*)\.npz", path.name, re.ASCII) for path in folder.glob("run_*.npz")}
    runs = {int(match[1]): path for path, match in names.items() if match}
    if not runs:
        raise FileNotFoundError(f"{folder}: no files run_<number>.npz; download the dataset or generate it")
    return dict(sorted(runs.items()))


def _card(folder: Path, provenance: dict | None, runs: dict, chosen: dict, num_points: int) -> dict:
    paths = {split: list(chosen[split].values()) for split in SPLITS}
    source = published.source_card(folder, provenance, [*paths["train"], *paths["test"]])
    described = {split: [entry for entry in source["files"] if entry["name"].startswith(f"{split}/")] for split in SPLITS}
    files = [  # one entry for each folder, not for each of hundreds of files: the digest of their digests
        {"name": f"{split}/run_*.npz", "count": len(entries), "bytes": sum(entry["bytes"] for entry in entries),
         "sha256": hashlib.sha256("".join(entry["sha256"] for entry in entries).encode()).hexdigest()}
        for split, entries in described.items()
    ]
    split = " / ".join(f"{len(chosen[name])} of {len(runs[name])} {name}" for name in SPLITS)
    ids = {name: list(chosen[name]) for name in SPLITS}
    fitted = "mean 0 and standard deviation 1 on the training set, which the stand-in needs"
    documented = "documented mean -229.845718, standard deviation 269.598572"
    card = {
        "label": "DrivAerML-40K",
        "split": f"folders: {split}",
        "split_hash": digest(ids),
        "counts": {name: len(ids[name]) for name in SPLITS} | {"points": num_points},
        "channels": {"features": ["x", "y", "z"], "target": ["pressure"]},
        "units": "m; pressure over density, m^2/s^2",
        "normalisation": {
            "features": "0 to 1 over the documented box of the published data",
            "target": documented if provenance is None else fitted,
        },
    } | source | {"files": files}
    if provenance is not None:
        return card | {"source": "stand-in", "stand_in": STAND_IN}
    return card | {"source": "presampled"} if (folder / presample.MARK).exists() else card


def _read_split(paths: list[Path], num_points: int, source: str) -> Samples:
    rows = PUBLISHED_POINTS if source == "published" else num_points
    if num_points > rows:
        raise ValueError(f"num_points {num_points}: the published files hold {rows} points")
    features = np.empty((len(paths), num_points, 3), np.float32)
    target = np.empty((len(paths), num_points, 1), np.float32)
    for sample, path in enumerate(paths):
        centres, fields = load_run(path, rows)
        _check_run(path, sample, centres, fields, MEAN_PRESSURE[source])
        features[sample], target[sample] = centres[:num_points], fields[:num_points, :1]
    return Samples(features, target)


def load_run(path: Path, rows: int) -> list[np.ndarray]:
    """surface_mesh_centers [rows, 3] and surface_fields [rows, 4] of a file, never unpickled.

    ValueError for anything else than a whole .npz file with these two arrays; shapes are compared before memory is taken.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            present = set(archive.namelist())
            shapes = {name: _read_header(archive, name) for name in COLUMNS if f"{name}.npy" in present}
    except Exception as error:  # a damaged archive raises what its parsers raise
        raise ValueError(f"{path}: damaged or cut short ({type(error).__name__}: {error})") from None
    for name, columns in COLUMNS.items():
        if name not in shapes:
            raise ValueError(f"{path}: no array {name}; it has {', '.join(sorted(present)) or 'none'}")
        shape, dtype = shapes[name]
        if shape != (rows, columns):
            raise ValueError(f"{path}: {name} has the shape {shape}, expected {(rows, columns)}")
        if not np.issubdtype(dtype, np.floating):
            raise ValueError(f"{path}: {name} has the dtype {dtype}, expected floating-point numbers")
    try:
        with zipfile.ZipFile(path) as archive:
            return [_read_array(archive, name) for name in COLUMNS]
    except Exception as error:
        raise ValueError(f"{path}: damaged or cut short ({type(error).__name__}: {error})") from None


def _read_header(archive: zipfile.ZipFile, name: str) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype that an array of the archive claims. ValueError for a version of the format beyond the first, which
    sets no limit to the header.
    """
    with archive.open(f"{name}.npy") as stream:
        if (version := np.lib.format.read_magic(stream)) != (1, 0):
            raise ValueError(f"{name} in version {version} of NumPy's format, expected (1, 0)")
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    return shape, dtype


def _read_array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    with archive.open(f"{name}.npy") as stream:
        return np.lib.format.read_array(stream, allow_pickle=False)


def _check_run(path: Path, sample: int, centres: np.ndarray, fields: np.ndarray, mean_range: tuple[float, float]) -> None:
    """centres [P, 3] inside the box; fields [P, 4] whose mean pressure is that of a car."""
    published.require_finite(path, "surface_mesh_centers", sample, centres)
    published.require_finite(path, "surface_fields", sample, fields)
    outside = ((centres < BOX_MIN - BOX_TOLERANCE) | (centres > BOX_MAX + BOX_TOLERANCE)).any(axis=1)
    if outside.any():
        raise ValueError(f"{path}: sample {sample}: the point {centres[outside][0].tolist()} is outside the box from "
                         f"{BOX_MIN.tolist()} to {BOX_MAX.tolist()} m, tolerance {BOX_TOLERANCE:g}")
    mean = fields[:, 0].mean(dtype=np.float64)
    if not mean_range[0] <= mean <= mean_range[1]:
        raise ValueError(f"{path}: sample {sample}: the mean pressure is {mean:.6g}, expected from {mean_range[0]:g} to "
                         f"{mean_range[1]:g}")
