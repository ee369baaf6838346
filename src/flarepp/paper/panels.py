"""What the figures of sweeps share: axes for sizes that double and for errors, lines of errors over a size, marks for what
has no value on the axis, and the text below."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy
import pandas

from flarepp.paper import quoted, style
from flarepp.paper.cells import describe

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OUTLIER = 8.0  # a value this many times the median of its column leaves the axis and is written at its edge
LOG_FROM, LOG_TO = 5.0, 200.0  # ratio of largest to smallest value between which a logarithmic axis reads better
EDGE = 0.085  # height of one line's marks and words at the top edge, as a share of the panel
GREY = "#555555"
OPEN, FILLED = 7.0, 4.0  # sizes of markers, so that an open one shows around a filled one at the same place
RING: dict[str, Any] = {"marker": "o", "markersize": 10, "markerfacecolor": "none", "color": GREY, "linestyle": ""}


def look(model: str) -> style.Look:
    return style.LOOKS.get(model, style.OTHER)


def line(look: style.Look) -> dict:
    """How a line is drawn; an open marker is empty and on top, so that neither of two at the same place hides the other."""
    on_top = {"markersize": OPEN, "markerfacecolor": "none", "zorder": 3.5}
    return look.line() | ({"markersize": FILLED} if look.filled else on_top)


def foot(errors: pandas.DataFrame, shown: str, describe: Callable = describe) -> str:
    """What is shown, how many seeds and what the bars are, and every value that some seeds are missing from."""
    counts = sorted(errors.loc[errors["n"] > 0, "n"].unique())
    seeds = " to ".join(str(count) for count in dict.fromkeys([*counts[:1], *counts[-1:]]))
    lines = [f"shown: {quoted.weights_words(shown)}"]
    if counts and counts[-1] > 1:
        lines[0] += f"; n = {seeds} seeds, mean ± standard deviation (n − 1)"
    marked = errors[errors["failed"] != ""]
    lines += ["; ".join(f"{describe(row)}: {row['failed']}" for _, row in marked.iterrows())]
    return "\n".join(lines)


def marks(errors: pandas.DataFrame) -> list:
    """What the legend says of the marks that occur."""
    from matplotlib.lines import Line2D

    handles = []
    if (errors["n"] == 0).any():
        handles.append(Line2D([], [], label="no value (reason beside)", color=GREY, marker="x", linestyle=""))
    if (errors["failed"] != "").any():
        handles.append(Line2D([], [], label="not all seeds (see below)", **RING))
    return handles


def set_errors(axis: Axes, part: pandas.DataFrame, panel: list[str], line: list[str], log_from: float = LOG_FROM) -> float:
    """Set scale and limits of a vertical axis of errors, leaving a strip for what goes to the edge; return the value above
    which points leave it.

    panel, line: the keys that tell the panels and the lines of `part` apart. log_from: in place of LOG_FROM.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    if part["mean"].isna().all():
        axis.set_yticks([])
        return numpy.inf
    limit = OUTLIER * part["mean"].median()
    inside, outside = part[part["mean"] <= limit], part[~(part["mean"] <= limit)]
    free = 1 - EDGE * outside.drop_duplicates([*panel, *line]).groupby(panel).size().max() if len(outside) else 1.0
    bars = inside["std"].fillna(0)
    top, lowest = (inside["mean"] + bars).max(), inside["mean"].min()
    ratio = top / max(lowest, 1e-12)
    if log_from < ratio <= LOG_TO:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if ratio > 10 else (1, 1.5, 2, 3, 5, 7)))
        axis.yaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter("{x:g}")
        bottom, top = max((inside["mean"] - bars).min(), lowest / 2) / 1.25, top * 1.3
        axis.set_ylim(bottom, bottom * (top / bottom) ** (1 / free))
    else:
        axis.set_ylim(0, top * 1.12 / free)
    return limit


def set_sizes(axis: Axes, sizes: pandas.Series) -> None:
    """Sizes double, so the axis is logarithmic; its ticks are those that were asked for."""
    from matplotlib.ticker import NullLocator

    ticks = sorted(sizes.dropna().unique())
    axis.set_xscale("log", base=2)
    axis.set_xlim(min(ticks, default=1) / 1.3, max(ticks, default=1) * 1.3)
    axis.set_xticks(ticks, [f"{tick:.0f}" for tick in ticks])
    axis.xaxis.set_minor_locator(NullLocator())


def grid(axis: Axes) -> None:
    axis.grid(True, which="major", color="#e4e4e4", linewidth=0.5)
    axis.set_axisbelow(True)


def draw(axis: Axes, points: pandas.DataFrame, size: str, limit: float, line: dict) -> None:
    """One line of errors over `size`, broken where it has no value on the axis; line: how it looks."""
    sizes = axis.get_xticks()
    inside = points[points["mean"] <= limit].set_index(size).reindex(sizes)
    spread = inside["std"] if inside["std"].notna().any() else None
    axis.errorbar(sizes, inside["mean"], yerr=spread, capsize=2, **{"zorder": 3} | line)
    marked = inside[inside["failed"].fillna("") != ""]
    if len(marked):
        axis.plot(marked.index, marked["mean"], zorder=4, **RING)


def at_edge(axis: Axes, points: pandas.DataFrame, size: str, edges: int, look: style.Look, name: str = "") -> None:
    """Mark one line's points without a value, or beyond the axis, at the top below `edges` other lines, and write once what
    they are.

    name: what comes before these words.
    """
    place, height = axis.get_xaxis_transform(), 1 - EDGE * (edges + 0.55)
    for _, row in points.iterrows():
        marker = "^" if row["n"] else "x"
        axis.plot(row[size], height, marker=marker, color=look.colour, transform=place, zorder=4)
    beyond = points.loc[points["n"] > 0, "mean"].agg(["min", "max"]).dropna()
    values = " to ".join(dict.fromkeys(f"{value:.3g}" for value in beyond))
    reasons = dict.fromkeys(points.loc[points["n"] == 0, "status"])
    first, low, high = points[size].min(), *axis.get_xlim()
    last = first * first > low * high  # right of the middle: no room on the right
    axis.annotate(
        name + ", ".join([*([f"{values} %"] if values else []), *reasons]),
        (first, height),
        xycoords=place,
        xytext=(-5 if last else 5, 0),
        textcoords="offset points",
        ha="right" if last else "left",
        va="center",
        fontsize=6,
        color=look.colour,
    )
