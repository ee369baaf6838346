"""Figure 2: one test case of every two-dimensional benchmark, what a model is given above, what it has to predict below."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from flarepp.paper import quoted, style
from flarepp.paper.fields import VIEWS, View, fill, frame, inside, mesh_of, shown_extent, span
from flarepp.record import read_case

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from flarepp.paper.fields import Mesh

CASE = 0
PHASES = 4  # values up to which a field is taken to be piecewise constant
LINES = 40  # lines of a mesh, in either direction, up to which they can be told apart
HEIGHT, WIDEST = 1.6, 2.8  # of a panel: inches, and the largest width in heights
BAR: dict[str, Any] = {"location": "bottom", "pad": 0.03}


def build(stores: list[Path], out: Path, *, scale: str) -> None:
    """Write out/figure2.pdf and .png.

    stores: dataset files; those whose card says that they are not two-dimensional are left out. FileNotFoundError
    or ValueError for a file that is missing or damaged.
    """
    cases = [case for case in (read_case(path, CASE) for path in stores) if case["card"]["dimension"] == "2D"]
    views = [_view(case) for case in cases]
    ratios = [_ratio(case, view) for case, view in zip(cases, views)]
    sources = {case["card"]["label"]: case["card"]["source"] for case in cases}
    stamp = quoted.stamp(scale, sources.values())
    cropped = [f"; of {label} a part of the domain" for label, view in zip(sources, views) if view.crop]
    foot = f"test case {CASE} of each benchmark{''.join(cropped)}; data: {quoted.data_words(sources)}"
    size = (max(4.0, sum(HEIGHT * ratio + 0.12 for ratio in ratios) + 0.3), 2 * HEIGHT + 1.9)
    with style.figure(out, "figure2", size, stamp, foot) as drawing:
        if not cases:
            drawing.text(0.5, 0.5, "no two-dimensional benchmark", ha="center")
            return
        axes = drawing.subplots(2, len(cases), squeeze=False, width_ratios=ratios)
        for (above, below), case, view in zip(axes.T, cases, views):
            _draw_input(drawing, above, case, view)
            _draw_field(drawing, below, case, view, case["target"][:, 0], view.quantity)
            above.set_anchor("S")
            above.set_title(quoted.heading(case["card"]["label"], case["card"]["source"]))
        axes[0, 0].set_ylabel("input")
        axes[1, 0].set_ylabel("target")


def _view(case: dict) -> View:
    """How the benchmark is shown; one that the paper does not have by the names and the unit on its card."""
    channels, unit = case["card"]["channels"], case["card"].get("units", "data units")
    quantity, coefficient = (f"{name} ({unit})" for name in (channels["target"][0], channels["features"][-1]))
    return VIEWS.get(case["name"], View(quantity, coefficient))


def _ratio(case: dict, view: View) -> float:
    """Width of the part shown in its heights, within what makes a readable panel."""
    width, height = shown_extent(case["features"][:, :2], view)
    return float(numpy.clip(width / height, 0.6, WIDEST))


def _draw_input(drawing: Figure, axis: Axes, case: dict, view: View) -> None:
    """The field that enters beside the coordinates; where none does, the mesh or the cloud of points."""
    features, grid = case["features"], case["grid"]
    if features.shape[1] > 2:
        _draw_field(drawing, axis, case, view, features[:, -1], view.coefficient)
        return
    if grid is None:
        axis.plot(*features.T, ".", color="black", markersize=1.5, markeredgewidth=0)
        axis.set_xlabel(f"{len(features)} points")
    else:
        drawn = _draw_mesh(axis, mesh_of(features, grid), inside(features, view.crop).reshape(grid))
        some = f"\n({drawn[0]} × {drawn[1]} lines drawn)" if drawn != list(grid) else ""
        axis.set_xlabel(f"mesh of {grid[0]} × {grid[1]} points{some}")
    frame(axis, view.crop)
    if grid is None:
        axis.set_facecolor("white")


def _draw_field(drawing: Figure, axis: Axes, case: dict, view: View, values: numpy.ndarray, label: str) -> None:
    from matplotlib.ticker import FixedLocator, MaxNLocator

    points = case["features"][:, :2]
    lowest, highest = span([values], inside(points, view.crop))
    phases = numpy.unique(values)
    jumps = len(phases) <= PHASES and case["grid"] is not None
    image = fill(axis, mesh_of(points, case["grid"]), values, "viridis", lowest, highest, "nearest" if jumps else "gouraud")
    frame(axis, view.crop)
    bar = drawing.colorbar(image, ax=axis, label=label.replace(" (", "\n("), aspect=14 * _ratio(case, view), **BAR)
    bar.locator = FixedLocator(phases.tolist()) if jumps else MaxNLocator(4, steps=[1, 2, 5, 10])


def _draw_mesh(axis: Axes, mesh: Mesh, seen: numpy.ndarray) -> list[int]:
    """Draw a mesh [n1, n2] on white, leaving out lines where all would be a blot; how many are drawn in either direction."""
    from matplotlib.collections import LineCollection
    from matplotlib.colors import ListedColormap

    assert isinstance(mesh, tuple)  # of a grid
    fill(axis, mesh, numpy.zeros(mesh[0].size), ListedColormap(["white"]), 0, 1)
    points, drawn = numpy.stack(mesh, axis=-1), []  # [n1, n2, 2]
    for direction, number in enumerate(seen.shape):
        step = max(1, -(-int(seen.any(axis=1 - direction).sum()) // LINES))
        chosen = numpy.unique([*range(0, number, step), number - 1])
        lines = numpy.moveaxis(points, direction, 0)[chosen]  # [lines, points of a line, 2]
        axis.add_collection(LineCollection(lines, colors="black", linewidths=0.25), autolim=False)
        drawn.append(len(chosen))
    return drawn
