"""Figure 4: error against depth in FP32 (top) and FP16 (bottom), a column per dataset, a line per mixer."""

from __future__ import annotations

from pathlib import Path

import numpy
import pandas

from flarepp.paper import quoted, style
from flarepp.paper.cells import cells

PRECISIONS = ("fp32", "fp16")
OUTLIER = 8.0  # a value this many times the median of its column leaves the axis and is written at its edge
LOG_FROM, LOG_TO = (
    5.0,
    200.0,
)  # ratio of largest to smallest value between which a logarithmic axis reads better


def build(records: pandas.DataFrame, out: Path, *, shown: str, scale: str) -> None:
    """Write out/figure4.pdf and .png from the runs of suite "figure4".

    shown: "last", "ema" or "best_test". Diverged runs are marked at the top edge, outliers written there with
    their value.
    """
    from matplotlib.lines import Line2D

    errors = cells(records, "figure4", shown)
    datasets = errors.drop_duplicates("dataset").set_index("dataset")["dataset_label"]
    columns = max(1, len(datasets))
    stamp = quoted.stamp(scale, [source for source in errors["data_source"].unique() if source])
    foot = f"shown: {quoted.weights_words(shown)}"
    with style.figure(out, "figure4", (1.2 + 2.7 * columns, 4.7), stamp, foot) as drawing:
        axes = drawing.subplots(2, columns, sharex="col", sharey="col", squeeze=False)
        for column, (dataset, label) in enumerate(datasets.items()):
            part = errors[errors["dataset"] == dataset]
            limit = _set_vertical(axes[0, column], part.dropna(subset="mean"))
            for axis, precision in zip(axes[:, column], PRECISIONS):
                axis.set_title(f"{label}, {precision.upper()}")
                _panel(axis, part[part["precision"] == precision], limit)
            _set_depths(axes[1, column], part["num_blocks"])
            axes[1, column].set_xlabel("number of blocks B")
        for axis in axes[:, 0]:
            axis.set_ylabel("relative L2 error (%)")
        names = errors.drop_duplicates("model").set_index("model")["label"]
        handles = [Line2D([], [], label=name, **_look(model).line()) for model, name in names.items()]
        if (errors["n"] == 0).any():
            handles.append(
                Line2D([], [], label="no value (reason beside)", color="#555555", marker="x", linestyle="")
            )
        drawing.legend(handles=handles, loc="outside upper center", ncols=5, frameon=False)


def _look(model: str) -> style.Look:
    return style.LOOKS.get(model, style.OTHER)


def _set_vertical(axis, part: pandas.DataFrame) -> float:
    """Set scale and limits of a column's vertical axis; return the value above which points leave it."""
    from matplotlib.ticker import LogLocator, NullLocator

    if part.empty:
        axis.set_yticks([])
        return numpy.inf
    limit = OUTLIER * part["mean"].median()
    inside = part[part["mean"] <= limit]
    bars = inside["std"].fillna(0)
    top, lowest = (inside["mean"] + bars).max(), inside["mean"].min()
    if LOG_FROM < top / max(lowest, 1e-12) <= LOG_TO:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_ylim(max((inside["mean"] - bars).min(), lowest / 2) / 1.25, top * 1.6)
    else:
        axis.set_ylim(0, top * 1.2)
    return limit


def _set_depths(axis, depths: pandas.Series) -> None:
    """Depths double, so the axis is logarithmic; its ticks are the depths that were asked for."""
    from matplotlib.ticker import NullLocator

    ticks = sorted(depths.dropna().unique())
    axis.set_xscale("log", base=2)
    axis.set_xlim(min(ticks, default=1) / 1.3, max(ticks, default=1) * 1.3)
    axis.set_xticks(ticks, [f"{tick:.0f}" for tick in ticks])
    axis.xaxis.set_minor_locator(NullLocator())


def _panel(axis, part: pandas.DataFrame, limit: float) -> None:
    """Draw the lines of one dataset and precision."""
    axis.grid(True, which="major", color="#e4e4e4", linewidth=0.5)
    axis.set_axisbelow(True)
    for order, (model, line) in enumerate(part.sort_values("num_blocks").groupby("model", sort=False)):
        look, inside = _look(model), line[line["mean"] <= limit]
        spread = inside["std"] if inside["std"].notna().any() else None
        axis.errorbar(inside["num_blocks"], inside["mean"], yerr=spread, capsize=2, zorder=3, **look.line())
        for _, row in line[~(line["mean"] <= limit)].iterrows():
            _at_edge(axis, row, look, order)


def _at_edge(axis, row: pandas.Series, look: style.Look, order: int) -> None:
    """Mark a point without a value, or beyond the axis, at the top edge; each line has its own height."""
    text, marker = (f"{row['mean']:.3g} %", "^") if row["n"] else (row["status"], "x")
    height = 0.95 - 0.075 * order
    place = axis.get_xaxis_transform()
    axis.plot(
        row["num_blocks"], height, marker=marker, color=look.colour, transform=place, clip_on=False, zorder=4
    )
    last = row["num_blocks"] > axis.get_xlim()[1] / 2  # no room on the right
    axis.annotate(
        text,
        (row["num_blocks"], height),
        xycoords=place,
        xytext=(-5 if last else 5, 0),
        textcoords="offset points",
        ha="right" if last else "left",
        va="center",
        fontsize=6,
        color=look.colour,
    )
