"""Figure 3: latent budget and depth together, a column per dataset.

Below, the error against the number of latents M, a line per mixer and depth B; above (the paper's top panels, as we read
its text, which speaks of them by reductions), by how many percent FLARE++ lies below FLARE at the same M and B.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

import pandas

from flarepp.paper import deviations, panels, quoted, style
from flarepp.paper.cells import cells, check_scale, describe

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUITE = "figure3"
MODEL, AGAINST = "flarepp", "flare"
MARKERS = "osD^v*"  # of the depths, the shallowest first
WHITE, BLACK = 0.45, -0.4  # how far the colour of the shallowest depth lies towards white, that of the deepest towards black
LOG_FROM = 2.0  # ratio of largest to smallest error from which the axis is logarithmic
FLOOR = -100.0  # a reduction below it is written at the lower edge
KEY = ["dataset", "num_blocks", "num_latents"]


def build(records: pandas.DataFrame, out: Path, *, shown: str, scale: str) -> None:
    """Write out/figure3.pdf and .png from the runs of suite "figure3".

    shown: "last", "ema" or "best_test". Diverged runs are marked at the top edge of the errors, outliers written there with
    their value; a value that some seeds are missing from is ringed and named below. ValueError for records of another
    scale.
    """
    check_scale(records, scale, SUITE)
    errors = cells(records, SUITE, shown)
    datasets = errors.drop_duplicates("dataset").set_index("dataset")["dataset_label"]
    columns = max(1, len(datasets))
    differing = deviations.words(deviations.find(records, SUITE, scale).values())
    stamp = quoted.stamp(scale, [source for source in errors["data_source"].unique() if source], differing)
    width = max(5.5, 1.2 + 2.7 * columns)
    with style.figure(out, SUITE, (width, 5.2), stamp, panels.foot(errors, shown, _describe)) as drawing:
        axes = drawing.subplots(2, columns, sharex="col", squeeze=False, height_ratios=[1, 1.9])
        marks = _marks(errors)
        for (above, below), (dataset, label) in zip(axes.T, datasets.items()):
            part = errors[errors["dataset"] == dataset]
            panels.set_sizes(below, part["num_latents"])
            _errors(below, part, marks)
            _reductions(above, part, marks)
            above.set_ylim(_limits(reductions(errors)))
            above.set_title(label)
            below.set_xlabel("number of latents M")
        axes[0, 0].set_ylabel("FLARE++ below\nFLARE by (%)")
        axes[1, 0].set_ylabel("relative L2 error (%)")
        drawing.align_ylabels(axes[:, 0])
        handles = _handles(errors, marks)
        rows = ceil(1.2 * len(handles) / width) or 1
        drawing.legend(handles=handles, loc="outside upper center", ncols=ceil(len(handles) / rows), frameon=False)


def reductions(errors: pandas.DataFrame) -> pandas.Series:
    """By how many percent the error of FLARE++ lies below FLARE's, by dataset, B and M, wherever both have one."""
    table = errors.pivot_table(index=KEY, columns="model", values="mean").reindex(columns=[MODEL, AGAINST]).dropna()
    return 100 * (1 - table[MODEL] / table[AGAINST])


def _describe(row: pandas.Series) -> str:
    return f"{describe(row)}, M = {row['num_latents']:.0f}"


def _marks(errors: pandas.DataFrame) -> dict[float, tuple[str, float]]:
    """Marker and share of white (negative: of black) of every depth."""
    depths = sorted(errors["num_blocks"].dropna().unique())
    step = (BLACK - WHITE) / max(len(depths) - 1, 1)
    return {depth: (MARKERS[rank % len(MARKERS)], WHITE + rank * step) for rank, depth in enumerate(depths)}


def _shade(colour: str, share: float) -> str:
    """A colour mixed with white, or with black for a negative share."""
    target = 255 if share > 0 else 0
    parts = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return "#" + "".join(f"{round(part + abs(share) * (target - part)):02x}" for part in parts)


def _look(look: style.Look, mark: tuple[str, float]) -> style.Look:
    return replace(look, marker=mark[0], colour=_shade(look.colour, mark[1]))


def _errors(axis: Axes, part: pandas.DataFrame, marks: dict) -> None:
    """The lines of one dataset, a line per mixer and depth."""
    panels.grid(axis)
    limit, edges = panels.set_errors(axis, part, ["dataset"], ["model", "num_blocks"], LOG_FROM), 0
    for (model, depth), line in part.sort_values("num_latents", kind="stable").groupby(["model", "num_blocks"], sort=False):
        look, outside = _look(panels.look(model), marks[depth]), line[~(line["mean"] <= limit)]
        panels.draw(axis, line, "num_latents", limit, panels.line(look))
        if len(outside):
            panels.at_edge(axis, outside, "num_latents", edges, look, f"{line['label'].iloc[0]}, B = {depth:.0f}: ")
            edges += 1


def _reductions(axis: Axes, part: pandas.DataFrame, marks: dict) -> None:
    """The reductions of one dataset, a line per depth."""
    panels.grid(axis)
    axis.axhline(0, color="black", linewidth=0.6)
    ticks = axis.get_xticks()
    for (_, depth), line in reductions(part).groupby(["dataset", "num_blocks"]):
        look = _look(style.Look(panels.GREY, "", "-", True), marks[depth])
        values = line.droplevel(["dataset", "num_blocks"]).reindex(ticks)
        axis.plot(ticks, values.mask(values < FLOOR), **look.line())
        for latents, value in values[values < FLOOR].items():
            axis.annotate(f"−{-value:.0f}", (latents, 0.03), xycoords=axis.get_xaxis_transform(), ha="center", fontsize=6)


def _limits(reductions: pandas.Series) -> tuple[float, float]:
    """Of the axis of all datasets' reductions, zero on it."""
    inside = reductions[reductions >= FLOOR]
    low, high = min([0.0, *inside]), max([0.0, *inside])
    room = 0.1 * (high - low) or 1.0
    return (low - room if low < 0 else 0.0), high + room


def _handles(errors: pandas.DataFrame, marks: dict) -> list:
    """What the legend explains: a look per mixer, a mark per depth, and the marks of what has no value."""
    from matplotlib.lines import Line2D

    names = errors.drop_duplicates("model").set_index("model")["label"]
    looks = {name: replace(panels.look(model), marker="o") for model, name in names.items()}
    handles = [Line2D([], [], label=name, **panels.line(look)) for name, look in looks.items()]
    grey = style.Look(panels.GREY, "", "-", True)
    handles += [Line2D([], [], label=f"B = {depth:.0f}", **_look(grey, mark).line()) for depth, mark in marks.items()]
    return handles + panels.marks(errors)
