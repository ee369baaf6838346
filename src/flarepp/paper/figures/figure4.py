"""Figure 4: error against depth in FP32 (top) and FP16 (bottom), a column per dataset, a line per mixer."""

from __future__ import annotations

from pathlib import Path

import numpy
import pandas

from flarepp.paper import deviations, quoted, style
from flarepp.paper.cells import cells, check_scale, describe

PRECISIONS = ("fp32", "fp16")
OUTLIER = 8.0  # a value this many times the median of its column leaves the axis and is written at its edge
LOG_FROM, LOG_TO = (
    5.0,
    200.0,
)  # ratio of largest to smallest value between which a logarithmic axis reads better
EDGE = 0.085  # height of one line's marks and words at the top edge, as a share of the panel
GREY = "#555555"
RING = {"marker": "o", "markersize": 10, "markerfacecolor": "none", "color": GREY, "linestyle": ""}


def build(records: pandas.DataFrame, out: Path, *, shown: str, scale: str) -> None:
    """Write out/figure4.pdf and .png from the runs of suite "figure4".

    shown: "last", "ema" or "best_test". Diverged runs are marked at the top edge, outliers written there with
    their value; a value that some seeds are missing from is ringed and named below. ValueError for records of
    another scale.
    """
    check_scale(records, scale)
    errors = cells(records, "figure4", shown)
    datasets = errors.drop_duplicates("dataset").set_index("dataset")["dataset_label"]
    columns = max(1, len(datasets))
    differing = deviations.words(deviations.find(records, "figure4", scale).values())
    stamp = quoted.stamp(scale, [source for source in errors["data_source"].unique() if source], differing)
    width = max(5.5, 1.2 + 2.7 * columns)
    with style.figure(out, "figure4", (width, 4.9), stamp, _foot(errors, shown)) as drawing:
        axes = drawing.subplots(2, columns, sharex="col", sharey="col", squeeze=False)
        for column, (dataset, label) in enumerate(datasets.items()):
            part = errors[errors["dataset"] == dataset]
            limit = _set_vertical(axes[0, column], part)
            _set_depths(axes[1, column], part["num_blocks"])
            for axis, precision in zip(axes[:, column], PRECISIONS):
                axis.set_title(f"{label}, {precision.upper()}")
                _panel(axis, part[part["precision"] == precision], limit)
            axes[1, column].set_xlabel("number of blocks B")
        for axis in axes[:, 0]:
            axis.set_ylabel("relative L2 error (%)")
        drawing.legend(
            handles=_handles(errors), loc="outside upper center", ncols=int(width / 2.2), frameon=False
        )


def _foot(errors: pandas.DataFrame, shown: str) -> str:
    """What is shown, how many seeds and what the bars are, and every value that some seeds are missing from."""
    counts = sorted(errors.loc[errors["n"] > 0, "n"].unique())
    seeds = " to ".join(str(count) for count in dict.fromkeys([*counts[:1], *counts[-1:]]))
    lines = [f"shown: {quoted.weights_words(shown)}"]
    if counts and counts[-1] > 1:
        lines[0] += f"; n = {seeds} seeds, mean ± standard deviation (n − 1)"
    marked = errors[errors["failed"] != ""]
    lines += ["; ".join(f"{describe(row)}: {row['failed']}" for _, row in marked.iterrows())]
    return "\n".join(lines)


def _handles(errors: pandas.DataFrame) -> list:
    """What the legend explains: a line per mixer and the marks that occur."""
    from matplotlib.lines import Line2D

    names = errors.drop_duplicates("model").set_index("model")["label"]
    handles = [Line2D([], [], label=name, **_look(model).line()) for model, name in names.items()]
    if (errors["n"] == 0).any():
        handles.append(Line2D([], [], label="no value (reason beside)", color=GREY, marker="x", linestyle=""))
    if (errors["failed"] != "").any():
        handles.append(Line2D([], [], label="not all seeds (see below)", **RING))
    return handles


def _look(model: str) -> style.Look:
    return style.LOOKS.get(model, style.OTHER)


def _set_vertical(axis, part: pandas.DataFrame) -> float:
    """Set scale and limits of a column's vertical axis, leaving a strip for what goes to the edge; return the
    value above which points leave it."""
    from matplotlib.ticker import LogLocator, NullLocator

    if part["mean"].isna().all():
        axis.set_yticks([])
        return numpy.inf
    limit = OUTLIER * part["mean"].median()
    inside, outside = part[part["mean"] <= limit], part[~(part["mean"] <= limit)]
    free = 1 - EDGE * outside.groupby("precision")["model"].nunique().max() if len(outside) else 1.0
    bars = inside["std"].fillna(0)
    top, lowest = (inside["mean"] + bars).max(), inside["mean"].min()
    if LOG_FROM < top / max(lowest, 1e-12) <= LOG_TO:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter("{x:g}")
        bottom, top = max((inside["mean"] - bars).min(), lowest / 2) / 1.25, top * 1.3
        axis.set_ylim(bottom, bottom * (top / bottom) ** (1 / free))
    else:
        axis.set_ylim(0, top * 1.12 / free)
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
    """Draw the lines of one dataset and precision, each broken where a depth has no value on the axis."""
    axis.grid(True, which="major", color="#e4e4e4", linewidth=0.5)
    axis.set_axisbelow(True)
    depths, edges = axis.get_xticks(), 0
    for model, line in part.sort_values("num_blocks").groupby("model", sort=False):
        outside = line[~(line["mean"] <= limit)]
        inside = line[line["mean"] <= limit].set_index("num_blocks").reindex(depths)
        spread = inside["std"] if inside["std"].notna().any() else None
        axis.errorbar(depths, inside["mean"], yerr=spread, capsize=2, zorder=3, **_look(model).line())
        marked = inside[inside["failed"].fillna("") != ""]
        if len(marked):
            axis.plot(marked.index, marked["mean"], zorder=4, **RING)
        if len(outside):
            _at_edge(axis, outside, _look(model), 1 - EDGE * (edges + 0.55))
            edges += 1


def _at_edge(axis, points: pandas.DataFrame, look: style.Look, height: float) -> None:
    """Mark one line's points without a value, or beyond the axis, at the top, and write once what they are."""
    place = axis.get_xaxis_transform()
    for _, row in points.iterrows():
        marker = "^" if row["n"] else "x"
        axis.plot(row["num_blocks"], height, marker=marker, color=look.colour, transform=place, zorder=4)
    beyond = points.loc[points["n"] > 0, "mean"].agg(["min", "max"]).dropna()
    values = " to ".join(dict.fromkeys(f"{value:.3g}" for value in beyond))
    reasons = dict.fromkeys(points.loc[points["n"] == 0, "status"])
    first, low, high = points["num_blocks"].min(), *axis.get_xlim()
    last = first * first > low * high  # right of the middle: no room on the right
    axis.annotate(
        ", ".join([*([f"{values} %"] if values else []), *reasons]),
        (first, height),
        xycoords=place,
        xytext=(-5 if last else 5, 0),
        textcoords="offset points",
        ha="right" if last else "left",
        va="center",
        fontsize=6,
        color=look.colour,
    )
