"""Figure 4: error against depth in FP32 (top) and FP16 (bottom), a column per dataset, a line per mixer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pandas

from flarepp.paper import deviations, panels, quoted, style
from flarepp.paper.cells import cells, check_scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PRECISIONS = ("fp32", "fp16")


def build(records: pandas.DataFrame, out: Path, *, shown: str, scale: str) -> None:
    """Write out/figure4.pdf and .png from the runs of suite "figure4".

    shown: "last", "ema" or "best_test". Diverged runs are marked at the top edge, outliers written there with
    their value; a value that some seeds are missing from is ringed and named below. ValueError for records of
    another scale.
    """
    check_scale(records, scale, "figure4")
    errors = cells(records, "figure4", shown)
    datasets = errors.drop_duplicates("dataset").set_index("dataset")["dataset_label"]
    columns = max(1, len(datasets))
    differing = deviations.words(deviations.find(records, "figure4", scale).values())
    stamp = quoted.stamp(scale, [source for source in errors["data_source"].unique() if source], differing)
    width = max(5.5, 1.2 + 2.7 * columns)
    with style.figure(out, "figure4", (width, 4.9), stamp, panels.foot(errors, shown)) as drawing:
        axes = drawing.subplots(2, columns, sharex="col", sharey="col", squeeze=False)
        for column, (dataset, label) in enumerate(datasets.items()):
            part = errors[errors["dataset"] == dataset]
            limit = panels.set_errors(axes[0, column], part, ["precision"], ["model"])
            panels.set_sizes(axes[1, column], part["num_blocks"])
            for axis, precision in zip(axes[:, column], PRECISIONS):
                axis.set_title(f"{label}, {precision.upper()}")
                _panel(axis, part[part["precision"] == precision], limit)
            axes[1, column].set_xlabel("number of blocks B")
        for axis in axes[:, 0]:
            axis.set_ylabel("relative L2 error (%)")
        drawing.legend(handles=_handles(errors), loc="outside upper center", ncols=int(width / 2.2), frameon=False)


def _handles(errors: pandas.DataFrame) -> list:
    """What the legend explains: a line per mixer and the marks that occur."""
    from matplotlib.lines import Line2D

    names = errors.drop_duplicates("model").set_index("model")["label"]
    lines = [Line2D([], [], label=name, **panels.line(panels.look(model))) for model, name in names.items()]
    return lines + panels.marks(errors)


def _panel(axis: Axes, part: pandas.DataFrame, limit: float) -> None:
    """Draw the lines of one dataset and precision."""
    panels.grid(axis)
    edges = 0
    for model, line in part.sort_values("num_blocks").groupby("model", sort=False):
        look, outside = panels.look(model), line[~(line["mean"] <= limit)]
        panels.draw(axis, line, "num_blocks", limit, panels.line(look))
        if len(outside):
            panels.at_edge(axis, outside, "num_blocks", edges, look)
            edges += 1
