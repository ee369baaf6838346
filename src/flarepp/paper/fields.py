"""What Figures 6 and 7 share: the reference field, two predictions and their signed errors on one test case.

The case is the one at the median error of FLARE++ (never the best), the same for both models. The three
fields share one colour scale and the two errors another, so a smaller error is an emptier panel and not a
rescaled one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy
import pandas

from flarepp.paper import deviations, quoted, style
from flarepp.paper.cells import WORDS, check_scale
from flarepp.record import read_predictions

MODELS = {"flare": "FLARE", "flarepp": "FLARE++"}
NO_DATA = "#c8c8c8"
VOID_FACTOR = (
    2.75  # over 300 voids of the generator's mesh no void triangle is narrower than 3.07 median circumradii
)


@dataclass(frozen=True)
class Panel:
    """One model on the chosen case: name, prediction [N], signed error [N], relative error; or why none."""

    name: str
    prediction: numpy.ndarray | None = None
    difference: numpy.ndarray | None = None
    error: float | None = None
    reason: str = ""


def draw(
    records: pandas.DataFrame, out: Path, name: str, dataset: str, quantity: str, *, shown: str, scale: str
) -> None:
    """Write out/<name>.pdf and .png: the fields of `dataset` from the first seed of FLARE and FLARE++ in
    suite "table1".

    quantity: label of the colour bar, with its unit. shown: "last" or "ema" weights; "best_test" keeps no
    predictions, so the last weights are drawn. Without predictions of FLARE++ the figure only says why.
    FileNotFoundError when a run that ended well lost its predictions.
    """
    check_scale(records, scale)
    weights = "ema" if shown == "ema" else "last"
    records = records[(records["suite"] == "table1") & (records["dataset"] == dataset)]
    runs = {model: _first_run(records, model) for model in MODELS}
    drawn = records[records["run"].isin([str(run) for run, _ in runs.values()])]
    found = {model: read_predictions(run, weights) for model, (run, reason) in runs.items() if not reason}
    differing = deviations.words(deviations.find(drawn, "table1", scale).values())
    stamp = quoted.stamp(scale, {each["data_source"] for each in found.values()}, differing)
    with style.figure(out, name, (7.2, 4.9), stamp, layout="compressed") as drawing:
        if "flarepp" not in found:
            label = next(iter(records["dataset_label"]), quoted.paper_name("dataset", dataset))
            drawing.text(0.5, 0.5, f"no case was chosen: FLARE++ on {label} {runs['flarepp'][1]}", ha="center")
            return
        case = median_case(found["flarepp"]["error"])
        panels = [_panel(model, found.get(model), case, runs[model][1]) for model in MODELS]
        last = len(found["flarepp"]["error"]) - 1
        text = f"test case {case} (0 to {last})\nat the median error of FLARE++\n\nrelative L2 error\n"
        text += "\n".join(f"{panel.name}: {_percent(panel)}" for panel in panels)
        text += f"\n\n{quoted.weights_words(weights)}{_seed_words(records)}"
        _compose(drawing, found["flarepp"], case, panels, quantity, text)


def median_case(errors: numpy.ndarray) -> int:
    """Index of the sample at the lower median of `errors` [S]; the lowest index among equal errors."""
    middle = numpy.sort(errors)[(len(errors) - 1) // 2]
    return int(numpy.flatnonzero(errors == middle)[0])


def error_limit(differences: list[numpy.ndarray]) -> float:
    """Half-width of the error scale: the larger of the models' 99.5th percentiles of the absolute error."""
    return max(float(numpy.percentile(numpy.abs(difference), 99.5)) for difference in differences)


def triangulate(points: numpy.ndarray):
    """Triangulation of points [N, 2] that leaves out voids, found from the points alone (matplotlib
    Triangulation).

    A Delaunay triangle in a void has a circumcircle as wide as the void; one in the material is as wide as
    the spacing of the points. Triangles wider than VOID_FACTOR medians are dropped, with them slivers along a
    straight outer edge. This needs a spacing that varies little over the domain.
    """
    from matplotlib.tri import Triangulation
    from scipy.spatial import Delaunay

    triangles = Delaunay(points).simplices
    corners = points[triangles]  # [T, 3, 2]
    sides = numpy.linalg.norm(corners - numpy.roll(corners, 1, axis=1), axis=2)  # [T, 3]
    first, second = corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]
    area = numpy.abs(first[:, 0] * second[:, 1] - first[:, 1] * second[:, 0]) / 2
    radius = sides.prod(axis=1) / numpy.maximum(4 * area, 1e-300)
    return Triangulation(points[:, 0], points[:, 1], triangles[radius <= VOID_FACTOR * numpy.median(radius)])


def _first_run(records: pandas.DataFrame, model: str) -> tuple[Path | None, str]:
    """(run folder, "") of the lowest seed, or (None, why there is none)."""
    rows = records[records["model"] == model].sort_values("seed", kind="stable")
    if rows.empty:
        return None, "not run"
    first = rows.iloc[0]
    return (
        (Path(first["run"]), "")
        if first["status"] == "ok"
        else (None, WORDS.get(first["status"], first["status"]))
    )


def _seed_words(records: pandas.DataFrame) -> str:
    """Which seed is drawn, where there are several."""
    seeds = records.loc[records["model"].isin(list(MODELS)), "seed"].unique()
    return f"\nseed {min(seeds)}, the first of {len(seeds)}" if len(seeds) > 1 else ""


def _panel(model: str, found: dict | None, case: int, reason: str) -> Panel:
    if found is None:
        return Panel(MODELS[model], reason=reason)
    prediction, target = found["prediction"][case, :, 0], found["target"][case, :, 0]  # [N]
    return Panel(MODELS[model], prediction, prediction - target, float(found["error"][case]))


def _percent(panel: Panel) -> str:
    return panel.reason or f"{100 * panel.error:.3g} %"


def _compose(drawing, found: dict, case: int, panels: list[Panel], quantity: str, text: str) -> None:
    """Reference and predictions above, signed errors below, the case in words below the reference."""
    points, target = found["points"][case], found["target"][case, :, 0]  # [N, 2], [N]
    there = [panel for panel in panels if not panel.reason]
    fields = [target, *(panel.prediction for panel in there)]
    lowest, highest = min(field.min() for field in fields), max(field.max() for field in fields)
    limit = error_limit([panel.difference for panel in there])
    axes = drawing.subplots(2, 3)
    mesh = _mesh(points, found["grid"])
    top = _fill(axes[0, 0], mesh, target, "viridis", lowest, highest)
    axes[0, 0].set_title("reference")
    bottom = None
    for column, panel in enumerate(panels, start=1):
        axes[0, column].set_title(panel.name)
        axes[1, column].set_title(f"{panel.name} − reference")
        if panel.reason:
            for axis in axes[:, column]:
                axis.text(0.5, 0.5, panel.reason, ha="center", va="center", transform=axis.transAxes)
            continue
        _fill(axes[0, column], mesh, panel.prediction, "viridis", lowest, highest)
        bottom = _fill(axes[1, column], mesh, panel.difference, "RdBu_r", -limit, limit)
    for axis in axes.flat:
        axis.margins(0.01)
        axis.set(xticks=[], yticks=[], aspect="equal", facecolor=NO_DATA)
    axes[1, 0].axis("off")
    axes[1, 0].text(
        0.5, 0.5, text, ha="center", va="center", transform=axes[1, 0].transAxes, fontsize=7.5, wrap=True
    )
    drawing.colorbar(top, ax=axes[0], label=quantity, aspect=16, pad=0.02)
    drawing.colorbar(bottom, ax=axes[1], label=f"error: {quantity}", aspect=16, pad=0.02, extend="both")


def _mesh(points: numpy.ndarray, grid: tuple[int, ...] | None):
    """The points [N, 2] as coordinate arrays [n1, n2] of a structured grid, or as a triangulation."""
    if grid is None:
        return triangulate(points)
    return points[:, 0].reshape(grid), points[:, 1].reshape(grid)


def _fill(axis, mesh, values: numpy.ndarray, colours: str, lowest: float, highest: float):
    """Colour a mesh by its point values [N], interpolated between them; grey stays where there are none."""
    style_of = {"cmap": colours, "vmin": lowest, "vmax": highest, "shading": "gouraud", "rasterized": True}
    if isinstance(mesh, tuple):
        return axis.pcolormesh(*mesh, values.reshape(mesh[0].shape), **style_of)
    return axis.tripcolor(mesh, values, **style_of)
