"""Draw the surface points of DrivAerML-40K from the full public data (Hugging Face neashton/drivaerml, CC BY-SA 4.0).

The published points of run i are those that NumPy's legacy generator, seeded with i, chooses without replacement among
the cells of its surface; they are these cells if the authors kept the order of run_i/boundary_i.vtp. The choice is the
beginning of one permutation: a smaller sample of a run is the beginning of a larger one. Nothing documents the published
split but the folders of the published archive, so here it is given.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from flarepp.data import published
from flarepp.data.vtp import Surface
from flarepp.record import atomic_path, read_json, write_json

MARK = "presampled.json"  # beside the folders: these points were not published, but drawn here
SPLITS = ("train", "test")
PRESSURE, SHEAR = "pMeanTrim", "wallShearStressMeanTrim"
EXTRACTED = ("points", "p", "tau")  # run_i/boundary_i_{}.npy: cell centres [N, 3], pressure [N] and shear stress [N, 3]


def presample(full: Path, out: Path, split: dict[str, list[int]], size: int = 40_000) -> None:
    """Write out/{train,test}/run_{i}.npz with `size` cells of each run of the split, float32.

    full: folder of the runs, run_i/boundary_i.vtp or, already extracted, run_i/boundary_i_{points,p,tau}.npy. Files
    that `out` has are kept, so that a killed call goes on where it was. ValueError for a run that is twice in the split,
    FileNotFoundError for one without data, before anything is read; ValueError naming the file for damaged data or too
    few cells.
    """
    check_split(Path(full), split)
    runs = [(run, Path(out) / side / f"run_{run}.npz") for side in SPLITS for run in split[side]]
    for run, path in tqdm(runs, desc="presample", disable=None):
        if not path.exists():
            arrays: dict[str, Any] = sample_run(Path(full) / f"run_{run}", run, size)
            with atomic_path(path) as partial:
                np.savez(partial, **arrays)
    write_json({"split": split, "points": size}, Path(out) / MARK)


def read_split(path: Path) -> dict[str, list[int]]:
    """{"train": [numbers of runs], "test": [...]} of a JSON file. ValueError for anything else."""
    split = read_json(path)
    if split.keys() != set(SPLITS) or not all(
            isinstance(runs, list) and runs and all(type(run) is int and run >= 0 for run in runs)
            for runs in split.values()):
        raise ValueError(f'{path}: expected {{"train": [numbers of runs], "test": [numbers of runs]}} and nothing else')
    return split


def check_split(full: Path, split: dict[str, list[int]]) -> None:
    """ValueError for a run that is twice in the split, FileNotFoundError for one whose data are not below `full`."""
    runs = [run for side in SPLITS for run in split[side]]
    if twice := sorted({run for run in runs if runs.count(run) > 1}):
        raise ValueError(f"split: run {twice[0]} is there twice, expected once in train or test")
    for run in runs:
        _data_files(full / f"run_{run}", run)


def _data_files(folder: Path, run: int) -> list[Path]:
    """The .npy files of a run if they are all there, else its .vtp file."""
    extracted = [folder / f"boundary_{run}_{name}.npy" for name in EXTRACTED]
    surface = folder / f"boundary_{run}.vtp"
    if all(path.is_file() for path in extracted):
        return extracted
    if not surface.is_file():
        raise FileNotFoundError(f"{surface}: no such file, nor boundary_{run}_{{{','.join(EXTRACTED)}}}.npy beside it")
    return [surface]


def sample_run(folder: Path, run: int, size: int) -> dict[str, np.ndarray]:
    """{"surface_mesh_centers": [size, 3], "surface_fields": [size, 4] pressure and shear stress} of one run, float32."""
    files = _data_files(folder, run)
    if files[0].suffix == ".vtp":
        surface = Surface(files[0])
        cells = choose(run, surface.num_cells, size, files[0])
        centres = surface.centres(cells)
        pressure, shear = surface.values(PRESSURE, 1)[cells], surface.values(SHEAR, 3)[cells]
    else:
        centres, pressure, shear = (published.load_npy(path) for path in files)
        pressure = pressure.reshape(-1, 1)
        for path, array, columns in zip(files, (centres, pressure, shear), (3, 1, 3)):
            if array.shape != (len(centres), columns):
                raise ValueError(f"{path}: shape {array.shape}, expected {(len(centres), columns)}")
        cells = choose(run, len(centres), size, files[0])
        centres, pressure, shear = centres[cells], pressure[cells], shear[cells]
    return {
        "surface_mesh_centers": centres.astype(np.float32),
        "surface_fields": np.concatenate([pressure, shear], axis=1).astype(np.float32),
    }


def choose(run: int, num_cells: int, size: int, path: Path) -> np.ndarray:
    """The cells [size] of a run that the published recipe chooses. ValueError naming the file for too few of them."""
    if num_cells < size:
        raise ValueError(f"{path}: {num_cells} cells, expected at least {size}")
    return np.random.RandomState(run).choice(num_cells, size, replace=False)
