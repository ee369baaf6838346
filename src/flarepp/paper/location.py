"""Where errors sit (Figures 6 to 9): whether FLARE and FLARE++ err at the same points, and at those of a named feature.

The errors of a model in a test case sit at the TOP share of its points with the largest absolute errors. Two models that err
independently share TOP of these points, and a share as large as a feature's share of all points lies on the feature. The
features are found from the points and the reference alone, since nothing else stands beside predictions.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy
import pandas

from flarepp.paper.fields import MODELS, VOID_FACTOR, circles, first_run, median_case
from flarepp.record import read_predictions

SUITE = "fields"  # what claims call these cells
SOURCE = "table1"  # the suite whose runs they are of
TOP = 0.05
PERMEABILITIES = (3.0, 12.0)  # of the two phases of Darcy
KINK = 0.04  # by how much -Δu leaves what these allow: of points that do, 85 % touch a jump at 29 x 29 points
NEAR = 0.1  # chords beside the wake's centre line, and the share of the pipe's width at either wall
WAKE = (1.0, 2.0)  # chords from the leading edge
COLUMNS = [
    "dataset", "dataset_label", "model", "label", "num_blocks", "precision", "feature", "case", "overlap_case", "overlap",
    "share", *MODELS, "std", "n", "status", "failed", "data_source", "runs",
]  # fmt: skip


def frame(records: pandas.DataFrame, shown: str) -> pandas.DataFrame:
    """One row per dataset of FEATURES on which the first seeds of both models have predictions, with COLUMNS.

    shown: what Figures 6 to 9 show, "ema" weights or else the last ones. case is the one at the median error of FLARE++; overlap
    (overlap_case) is the share of FLARE's points TOP that are FLARE++'s too, over all test cases (in that case); share is
    the feature's of all points, and under a model's name that of its points TOP on the feature. A run that ended badly
    leaves its status alone.
    """
    chosen = records[(records["suite"] == SOURCE) & records["dataset"].isin(list(FEATURES))]
    rows = [_row(rows, name, shown) for name, rows in chosen.groupby("dataset", sort=False)]
    return pandas.DataFrame([row for row in rows if row], columns=COLUMNS)


def top(differences: numpy.ndarray) -> numpy.ndarray:
    """Which TOP of the points of every case have the largest absolute difference, [S, N] bool; ties go to the first."""
    size, count = differences.shape
    order = numpy.argsort(-numpy.abs(differences), axis=1, kind="stable")[:, : max(1, round(TOP * count))]
    chosen = numpy.zeros((size, count), bool)
    numpy.put_along_axis(chosen, order, True, axis=1)
    return chosen


def _row(records: pandas.DataFrame, dataset: str, shown: str) -> dict | None:
    """The row of one dataset; None where a model did not run or its predictions are not there."""
    runs = {model: first_run(records, model) for model in MODELS}
    if any(reason == "not run" for _, reason in runs.values()):
        return None
    row = dict.fromkeys(COLUMNS, numpy.nan) | {"dataset": dataset, "dataset_label": records.iloc[0]["dataset_label"]}
    row |= {"model": "", "n": 0, "status": "ok", "failed": "", "data_source": ""}
    row |= {"runs": tuple(str(run) for run, _ in runs.values() if run)}
    bad = {MODELS[model]: reason for model, (_, reason) in runs.items() if reason}
    if bad:
        return row | {"label": " and ".join(bad), "status": next(iter(bad.values()))}
    if not all((run / "predictions.h5").exists() for run, _ in runs.values() if run):
        return None
    found = {model: read_predictions(run, "ema" if shown == "ema" else "last") for model, (run, _) in runs.items() if run}
    row |= {"label": " and ".join(MODELS.values()), "n": 1, "data_source": found["flarepp"]["data_source"]}
    return row | _measured(found, dataset)


def _measured(found: dict[str, dict], dataset: str) -> dict:
    """The numbers of one dataset from the predictions of both models."""
    own, (feature, points_on) = found["flarepp"], FEATURES[dataset]
    case, target = median_case(own["error"]), own["target"][..., 0]  # [S, N]
    tops = {model: top(each["prediction"][..., 0] - each["target"][..., 0]) for model, each in found.items()}
    both = (tops["flare"] & tops["flarepp"]).sum(axis=1) / tops["flare"].sum(axis=1)  # [S]
    on = points_on(own["points"], target, own["grid"])
    row = {"feature": feature, "case": case, "overlap_case": both[case], "overlap": both.mean(), "share": on.mean()}
    return row | {model: (mask & on).sum() / mask.sum() for model, mask in tops.items()}


def at_void(points: numpy.ndarray, target: numpy.ndarray, grid: tuple[int, ...] | None) -> numpy.ndarray:
    """Points [S, N, 2] that bound a void, [S, N] bool: corners of Delaunay triangles that span one (`fields.triangulate`).

    Slivers along the outer edge are as wide, but the centres of their circumcircles lie outside.
    """
    on = numpy.zeros(points.shape[:2], bool)
    for marks, cloud in zip(on, points):
        triangles, centres, radii = circles(cloud)
        within = ((centres > cloud.min(axis=0)) & (centres < cloud.max(axis=0))).all(axis=1)
        marks[triangles[within & (radii > VOID_FACTOR * numpy.median(radii))]] = True
    return on


def at_interface(points: numpy.ndarray, target: numpy.ndarray, grid: tuple[int, ...]) -> numpy.ndarray:
    """Points of a square grid at which the pressure [S, N] has a kink, [S, N] bool.

    Away from jumps of the permeability a, -Δu is 1 / a; where the five-point Laplacian leaves what PERMEABILITIES allow by
    KINK, there is one. Points on the boundary have none.
    """
    u = target.reshape(-1, *grid)
    spacing = numpy.ptp(points[0, :, 0]) / (grid[0] - 1)
    inner = u[:, 2:, 1:-1] + u[:, :-2, 1:-1] + u[:, 1:-1, 2:] + u[:, 1:-1, :-2] - 4 * u[:, 1:-1, 1:-1]
    curvature = -inner / spacing**2
    on = numpy.zeros(u.shape, bool)
    on[:, 1:-1, 1:-1] = (curvature < 1 / max(PERMEABILITIES) - KINK) | (curvature > 1 / min(PERMEABILITIES) + KINK)
    return on.reshape(target.shape)


def at_peak_or_wake(points: numpy.ndarray, target: numpy.ndarray, grid: tuple[int, ...]) -> numpy.ndarray:
    """Points of a C-mesh with the TOP highest Mach numbers of their case, or in the near wake, [S, N] bool.

    The wake lies within NEAR of the mesh's cut behind the trailing edge, which is its first line along axis 0.
    """
    mesh = points.reshape(-1, *grid, 2)
    behind = (mesh[..., 0] > WAKE[0]) & (mesh[..., 0] <= WAKE[1])
    wake = behind & (numpy.abs(mesh[..., 1] - mesh[:, :, :1, 1]) <= NEAR)
    return wake.reshape(target.shape) | (target >= numpy.quantile(target, 1 - TOP, axis=1, keepdims=True))


def at_wall(points: numpy.ndarray, target: numpy.ndarray, grid: tuple[int, ...]) -> numpy.ndarray:
    """Points of a pipe's mesh within NEAR of its width from a wall, and the first line beside either, [S, N] bool."""
    line = numpy.arange(grid[1])
    depth = numpy.minimum(line, line[::-1])  # lines from a wall
    near = depth <= max(1, NEAR * (grid[1] - 1))
    return numpy.broadcast_to(numpy.tile(near, grid[0]), target.shape)


FEATURES: dict[str, tuple[str, Callable[..., numpy.ndarray]]] = {
    "elasticity": ("void boundary", at_void),
    "darcy": ("permeability interfaces", at_interface),
    "airfoil": ("suction peak and wake", at_peak_or_wake),
    "pipe": ("near wall", at_wall),
}
