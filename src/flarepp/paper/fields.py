"""What the figures of fields share: how a benchmark is shown, and Figures 6 to 9, the reference field, two predictions and
their signed errors on one test case.

The case is the one at the median error of FLARE++ (never the best), the same for both models. The three
fields share one colour scale and the two errors another, so a smaller error is an emptier panel and not a
rescaled one; where a panel shows a part of the domain, the scales are those of that part.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from textwrap import fill as fill_text
from typing import TYPE_CHECKING, Any

import numpy
import pandas

from flarepp.paper import deviations, quoted, style
from flarepp.paper.cells import WORDS, check_scale
from flarepp.record import read_predictions

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.tri import Triangulation

    Mesh = Triangulation | tuple[numpy.ndarray, ...]

MODELS = {"flare": "FLARE", "flarepp": "FLARE++"}
NO_DATA = "#c8c8c8"
WIDTH = 7.2  # inches
CROPPED = "drawn: a part of the domain;\nboth colour scales are of this part,\nthe errors above of the whole"
VOID_FACTOR = (
    2.75  # over 300 voids of the generator's mesh no void triangle is narrower than 3.07 median circumradii
)


@dataclass(frozen=True)
class View:
    """How a two-dimensional benchmark is shown.

    quantity, coefficient: the target and an input field, with units. crop: lower left and upper right corner of
    the part shown, None for all of it.
    """

    quantity: str
    coefficient: str = ""
    crop: tuple[tuple[float, float], tuple[float, float]] | None = None


VIEWS = {
    "elasticity": View("von Mises stress (data units)"),  # the published files state none
    "darcy": View("pressure u (dimensionless)", "permeability a (dimensionless)"),
    "airfoil": View("Mach number", crop=((-0.5, -0.8), (1.7, 0.8))),  # chord from 0 to 1; shocks and the near wake
    "pipe": View("streamwise velocity (dimensionless)"),
}


@dataclass(frozen=True)
class Panel:
    """One model on the chosen case: name, prediction [N], signed error [N], relative error; or why none."""

    name: str
    prediction: numpy.ndarray = field(default_factory=lambda: numpy.empty(0))
    difference: numpy.ndarray = field(default_factory=lambda: numpy.empty(0))
    error: float = numpy.nan
    reason: str = ""


def draw(records: pandas.DataFrame, out: Path, name: str, dataset: str, *, shown: str, scale: str) -> None:
    """Write out/<name>.pdf and .png: the fields of `dataset`, as VIEWS has it, from the first seed of FLARE and
    FLARE++ in suite "table1".

    shown: "last" or "ema" weights; "best_test" keeps no predictions, so the last weights are drawn. Without
    predictions of FLARE++ the figure only says why. FileNotFoundError when a run that ended well lost its
    predictions.
    """
    check_scale(records, scale, "table1")
    weights = "ema" if shown == "ema" else "last"
    records = records[(records["suite"] == "table1") & (records["dataset"] == dataset)]
    runs = {model: first_run(records, model) for model in MODELS}
    drawn = records[records["run"].isin([str(run) for run, _ in runs.values()])]
    found = {model: read_predictions(run, weights) for model, (run, _) in runs.items() if run is not None}
    differing = deviations.words(deviations.find(drawn, "table1", scale).values())
    stamp = quoted.stamp(scale, {each["data_source"] for each in found.values()}, differing)
    if "flarepp" not in found:
        label = next(iter(records["dataset_label"]), quoted.paper_name("dataset", dataset))
        with style.figure(out, name, (WIDTH, 4.9), stamp, layout="compressed") as drawing:
            drawing.text(0.5, 0.5, f"no case was chosen: FLARE++ on {label} {runs['flarepp'][1]}", ha="center")
        return
    case, view = median_case(found["flarepp"]["error"]), VIEWS[dataset]
    panels = [_panel(model, found.get(model), case, runs[model][1]) for model in MODELS]
    words = [f"test case {case} (0 to {len(found['flarepp']['error']) - 1})\nat the median error of FLARE++",
             "relative L2 error\n" + "\n".join(f"{panel.name}: {_percent(panel)}" for panel in panels),
             *([CROPPED] if view.crop else []),
             quoted.weights_words(weights) + _seed_words(records)]  # fmt: skip
    width, height = shown_extent(found["flarepp"]["points"][case], view)
    flat = height < width / 2  # then the words do not fit beside panels and stand below them
    size = (10.0, 6.0 * height / width + 1.2) if flat else (WIDTH, float(numpy.clip(4.1 * height / width + 0.8, 3, 7)))
    foot = "; ".join(", ".join(text.splitlines()) for text in words) if flat else ""
    with style.figure(out, name, size, stamp, foot, layout="compressed") as drawing:
        axes = drawing.subplots(2, 3)
        axes[1, 0].axis("off")
        if not flat:
            place = {"ha": "center", "va": "center", "transform": axes[1, 0].transAxes}
            axes[1, 0].text(0.5, 0.5, "\n\n".join(words), fontsize=7.5, wrap=True, **place)
        top, bottom = _compose((list(axes[0]), list(axes[1, 1:])), found["flarepp"], case, panels, view)
        for image, row, label in ((top, axes[0], view.quantity), (bottom, axes[1, 1:], f"error: {view.quantity}")):
            bar = drawing.colorbar(image, ax=list(row), aspect=16 if not flat else 6, pad=0.02, extend=("neither", "both")[image is bottom])
            if flat:  # lower than its label is long
                bar.ax.set_ylabel(fill_text(label, 16), rotation=0, ha="left", va="center")
            else:
                bar.set_label(label)


def median_case(errors: numpy.ndarray) -> int:
    """Index of the sample at the lower median of `errors` [S]; the lowest index among equal errors."""
    middle = numpy.sort(errors)[(len(errors) - 1) // 2]
    return int(numpy.flatnonzero(errors == middle)[0])


def error_limit(differences: list[numpy.ndarray]) -> float:
    """Half-width of the error scale: the larger of the models' 99.5th percentiles of the absolute error."""
    return max(float(numpy.percentile(numpy.abs(difference), 99.5)) for difference in differences)


def circles(points: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
    """Delaunay triangles [T, 3] of points [N, 2] with the centres [T, 2] and radii [T] of their circumcircles."""
    from scipy.spatial import Delaunay

    triangles = Delaunay(points).simplices
    corners = points[triangles]  # [T, 3, 2]
    opposite = ((numpy.roll(corners, -1, axis=1) - numpy.roll(corners, -2, axis=1)) ** 2).sum(axis=2)  # [T, 3]
    weights = opposite * (opposite.sum(axis=1, keepdims=True) - 2 * opposite)
    first, second = corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]
    area = numpy.abs(first[:, 0] * second[:, 1] - first[:, 1] * second[:, 0]) / 2
    centres = (weights[..., None] * corners).sum(axis=1) / numpy.maximum(16 * area**2, 1e-300)[:, None]
    return triangles, centres, numpy.sqrt(opposite.prod(axis=1)) / numpy.maximum(4 * area, 1e-300)


def triangulate(points: numpy.ndarray) -> Triangulation:
    """Triangulation of points [N, 2] that leaves out voids, found from the points alone (matplotlib
    Triangulation).

    A Delaunay triangle in a void has a circumcircle as wide as the void; one in the material is as wide as
    the spacing of the points. Triangles wider than VOID_FACTOR medians are dropped, with them slivers along a
    straight outer edge. This needs a spacing that varies little over the domain.
    """
    from matplotlib.tri import Triangulation

    triangles, _, radius = circles(points)
    return Triangulation(points[:, 0], points[:, 1], triangles[radius <= VOID_FACTOR * numpy.median(radius)])


def first_run(records: pandas.DataFrame, model: str) -> tuple[Path | None, str]:
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
    prediction, target = found["prediction"][case][:, 0], found["target"][case][:, 0]  # [N]
    return Panel(MODELS[model], prediction, prediction - target, float(found["error"][case]))


def _percent(panel: Panel) -> str:
    return panel.reason or f"{100 * panel.error:.3g} %"


def shown_extent(points: numpy.ndarray, view: View) -> numpy.ndarray:
    """Width and height of the part of the domain that is shown, of points [N, 2]."""
    low, high = view.crop or (points.min(axis=0), points.max(axis=0))
    return numpy.subtract(high, low)


def _compose(axes: tuple[list, list], found: dict, case: int, panels: list[Panel], view: View) -> tuple:
    """Reference and predictions on one colour scale, signed errors on another, both scaled to what is shown; returns an image of
    either scale."""
    points, target = found["points"][case], found["target"][case][:, 0]  # [N, 2], [N]
    (first, *tops), bottoms = axes
    there, seen = [panel for panel in panels if not panel.reason], inside(points, view.crop)
    lowest, highest = span([target, *(panel.prediction for panel in there)], seen)
    limit = error_limit([panel.difference[seen] for panel in there])
    mesh = mesh_of(points, found["grid"])
    top, bottom = fill(first, mesh, target, "viridis", lowest, highest), None
    first.set_title("reference")
    for above, below, panel in zip(tops, bottoms, panels, strict=True):
        above.set_title(panel.name)
        below.set_title(f"{panel.name} − reference")
        if panel.reason:
            for axis in (above, below):
                axis.text(0.5, 0.5, panel.reason, ha="center", va="center", transform=axis.transAxes)
            continue
        fill(above, mesh, panel.prediction, "viridis", lowest, highest)
        bottom = fill(below, mesh, panel.difference, "RdBu_r", -limit, limit)
    for axis in (first, *tops, *bottoms):
        frame(axis, view.crop)
    return top, bottom


def inside(points: numpy.ndarray, crop: tuple | None) -> numpy.ndarray:
    """Which of the points [N, 2] lie in the part that is shown, [N] bool; all of them where none does."""
    if crop is None:
        return numpy.ones(len(points), bool)
    seen = ((points >= crop[0]) & (points <= crop[1])).all(axis=1)
    return seen if seen.any() else ~seen


def span(fields: list[numpy.ndarray], seen: numpy.ndarray) -> tuple[float, float]:
    """Lowest and highest value of several fields [N] at the points that are seen."""
    return min(field[seen].min() for field in fields), max(field[seen].max() for field in fields)


def mesh_of(points: numpy.ndarray, grid: tuple[int, ...] | None) -> Mesh:
    """The points [N, 2] as coordinate arrays [n1, n2] of a structured grid, or as a triangulation."""
    if grid is None:
        return triangulate(points)
    return points[:, 0].reshape(grid), points[:, 1].reshape(grid)


def fill(axis: Axes, mesh: Mesh, values: numpy.ndarray, colours: str | Colormap, lowest: float, highest: float,
         shading: str = "gouraud") -> Any:  # fmt: skip
    """Colour a mesh by its point values [N], interpolated between them; grey stays where there are none. shading "nearest" does
    not interpolate, for a field that jumps."""
    style_of: dict[str, Any] = {"cmap": colours, "vmin": lowest, "vmax": highest, "shading": shading, "rasterized": True}
    if isinstance(mesh, tuple):
        return axis.pcolormesh(*mesh, values.reshape(mesh[0].shape), **style_of)
    return axis.tripcolor(mesh, values, **style_of)


def frame(axis: Axes, crop: tuple | None) -> None:
    """True aspect ratio, no ticks, grey where there are no data, and the part that is shown."""
    axis.margins(0.01)
    axis.set(xticks=[], yticks=[], aspect="equal", facecolor=NO_DATA)
    if crop:
        axis.set(xlim=(crop[0][0], crop[1][0]), ylim=(crop[0][1], crop[1][1]))
