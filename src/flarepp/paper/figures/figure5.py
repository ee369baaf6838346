"""Figure 5: step time and peak memory against the number of tokens, a line per mixer and M; below, both over FLARE's."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import pandas

from flarepp.paper import cost, deviations, quoted, style
from flarepp.paper.cells import check_scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS = {"step_ms": "time of a step (ms)", "peak_memory_mb": "peak memory (MiB)"}
RATIOS = {"step_ms": "time over FLARE's", "peak_memory_mb": "memory over FLARE's"}
COMPARED = ("flarepp", "transolver3")  # whose ratios are drawn
ARITHMETIC = "flarepp"  # whose ratio of multiply-adds is drawn too
DASHES, SIZES = ("-", "--", ":", "-."), (2.8, 5.0)  # by M: lines, and the sizes of markers from the least to the largest
MARKS = {"out of memory": "x", "diverged": "+"}  # of cells without a value; OTHER of all the rest
OTHER = "d"
EDGE = 0.06  # height of a row of such marks at the top edge, as a share of the panel
TICKS = 6  # numbers of tokens that are all written at the axis
FEW = 100  # ratio of the ends of an axis below which more than its decades are written
WIDE = 6  # entries in a row of the legend
SMALL = "too little memory to be measured"
GREY = "#555555"
GRID: dict[str, Any] = {"color": "#e4e4e4", "linewidth": 0.5}


def build(records: pandas.DataFrame, out: Path, *, scale: str) -> None:
    """Write out/figure5.pdf and .png from the cells of suite "figure5".

    Cells without a value are marked at the top edge, with the memory that was asked for or the time that was predicted, and
    named below. ValueError for records of another scale or for what `cost.cells` refuses.
    """
    check_scale(records, scale, cost.SUITE)
    cells = cost.cells(records)
    differing = deviations.words(deviations.find(records, cost.SUITE, scale).values())
    stamp = quoted.stamp(scale, (source for source in cells["data_source"] if source), differing)
    with style.figure(out, "figure5", (7.6, 6.6), stamp, _foot(cells)) as drawing:
        axes = drawing.subplots(2, 2, sharex=True, height_ratios=(3, 2))
        _set_tokens(axes[0, 0], cells["num_tokens"])
        for column, metric in enumerate(PANELS):
            _panel(axes[0, column], cells, metric)
            _ratio_panel(axes[1, column], cells, metric)
            axes[1, column].set_xlabel("number of tokens N")
        width = WIDE if cells["model"].nunique() <= WIDE else WIDE - 1
        drawing.legend(handles=_handles(cells, width), loc="outside upper center", ncols=width, frameon=False,
                       fontsize=7, columnspacing=1.2)  # fmt: skip


# --- looks


def _look(model: str) -> style.Look:
    return style.LOOKS.get(model, style.OTHER)


def _sizes(cells: pandas.DataFrame) -> dict[float, tuple[Any, float]]:
    """Dashes and marker size of every M, in ascending order."""
    latents = sorted(cells["num_latents"].dropna().unique())
    sizes = numpy.linspace(*SIZES, len(latents)) if len(latents) > 1 else [sum(SIZES) / 2]
    return {each: (DASHES[place % len(DASHES)], float(size)) for place, (each, size) in enumerate(zip(latents, sizes))}


def _line(model: str, latents: float, sizes: dict) -> dict:
    """Keyword arguments for Axes.plot: colour and marker by mixer, dashes and size of the marker by M."""
    dashes, size = sizes.get(latents, ("-", sum(SIZES) / 2))
    return _look(model).line() | {"linestyle": dashes, "markersize": size, "linewidth": 1.0, "markeredgewidth": 0.8}


def _handles(cells: pandas.DataFrame, width: int) -> list:
    """What the legend explains, mixers and in rows of their own M and the marks that occur, for `width` columns."""
    from matplotlib.lines import Line2D

    names = cells.drop_duplicates("model").set_index("model")["label"]
    mixers = [Line2D([], [], label=name, **_line(model, math.nan, {})) for model, name in names.items()]
    rest = [Line2D([], [], label=f"M = {each:.0f}", color=GREY, marker="o", markersize=size, linestyle=dashes, linewidth=1.0)
            for each, (dashes, size) in _sizes(cells).items()]  # fmt: skip
    rest += [Line2D([], [], label=status, color=GREY, marker=MARKS.get(status, OTHER), markerfacecolor="none", linestyle="")
             for status in cells.loc[cells["n"] == 0, "status"].unique()]  # fmt: skip
    rows = [part[start : start + width] for part in (mixers, rest) for start in range(0, len(part), width)]
    blank = Line2D([], [], label=" ", linestyle="", color="none")
    rows = [row + [blank] * (width - len(row)) for row in rows]
    return [handle for column in zip(*rows) for handle in column]  # matplotlib fills columns


def _set_tokens(axis: Axes, tokens: pandas.Series) -> None:
    """A logarithmic axis with the numbers of tokens that were asked for, or decades where those are many."""
    from matplotlib.ticker import NullLocator

    ticks = sorted(tokens.unique())
    axis.set_xscale("log")
    axis.set_xlim(min(ticks, default=1) / 1.25, max(ticks, default=10) * 1.25)
    if ticks and len(ticks) <= TICKS:
        axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axis.xaxis.set_minor_locator(NullLocator())


# --- panels


def _panel(axis: Axes, cells: pandas.DataFrame, metric: str) -> None:
    """Time or memory: the lines, and above them a row of marks for every mixer that has cells without a value."""
    from matplotlib.patches import Rectangle

    axis.set_ylabel(PANELS[metric])
    axis.grid(True, which="major", **GRID)
    axis.set_axisbelow(True)
    axis.set_yscale("log")
    axis.tick_params(labelbottom=False)
    sizes = _sizes(cells)
    for (model, latents), line in cost.lines(cells):
        values = line[metric].where(line[metric] > 0)
        axis.plot(line["num_tokens"], values, zorder=3, **_line(model, latents, sizes))
        if metric == "step_ms":
            spread = values.notna()
            axis.vlines(line["num_tokens"][spread], line["step_ms_low"][spread], line["step_ms_high"][spread],
                        color=_look(model).colour, linewidth=0.8, zorder=2)  # fmt: skip
    gone = [rows for _, rows in cells[cells["n"] == 0].groupby("model", sort=False)]
    height = 1.0
    for rows in gone:
        height = _at_edge(axis, rows, metric, height, sizes)
    measured = cells.loc[cells[metric] > 0, metric]
    if len(measured):
        low, high = measured.min() / 1.5, measured.max() * 1.5
        axis.set_ylim(low, low * (high / low) ** (1 / max(height, 0.2)))
        _set_ticks(axis, low, high)
    if gone:
        axis.add_patch(Rectangle((0, height), 1, 1 - height, transform=axis.transAxes, color="#f4f4f4", zorder=0))


def _set_ticks(axis: Axes, low: float, high: float) -> None:
    """Ticks of a logarithmic axis up to `high`, where the marks of missing cells begin."""
    from matplotlib.ticker import NullLocator

    exponents = range(int(numpy.floor(numpy.log10(low))), int(numpy.ceil(numpy.log10(high))) + 1)
    few = high / low < FEW
    ticks = [part * 10.0**exponent for exponent in exponents for part in ((1, 2, 5) if few else (1,))]
    ticks = [tick for tick in ticks if low <= tick <= high]
    axis.set_yticks(ticks, [f"{tick:,g}" for tick in ticks] if few else None)
    axis.yaxis.set_minor_locator(NullLocator())


def _at_edge(axis: Axes, rows: pandas.DataFrame, metric: str, top: float, sizes: dict) -> float:
    """Mark the cells of one mixer that have no value in a row below `top` and say what is known of them, beside the marks
    or, where these leave no room, below; return where the next row begins."""
    look, place, height = _look(rows.iloc[0]["model"]), axis.get_xaxis_transform(), top - EDGE / 2
    for _, row in rows.iterrows():
        size = sizes.get(row["num_latents"], ("", sum(SIZES) / 2))[1]
        axis.plot(row["num_tokens"], height, marker=MARKS.get(row["status"], OTHER), markersize=size, color=look.colour,
                  markerfacecolor="none", markeredgewidth=0.9, transform=place, zorder=4)  # fmt: skip
    low, high = axis.get_xlim()
    first, last, middle = rows["num_tokens"].min(), rows["num_tokens"].max(), numpy.sqrt(low * high)
    left, below = first > middle, first <= middle <= last
    axis.annotate(_known(rows, metric), (first if left or below else last, height - EDGE * below), xycoords=place,
                  xytext=(-6 if left else 0 if below else 6, 0), textcoords="offset points", ha="right" if left else "left",
                  va="center", fontsize=6, color=look.colour)  # fmt: skip
    return top - EDGE * (1 + below)


def _known(rows: pandas.DataFrame, metric: str) -> str:
    """What a panel says of cells without a value: the memory that was asked for, the time that was predicted, else why."""
    parts = []
    for status, group in rows.groupby("status", sort=False):
        own = {("out of memory", "peak_memory_mb"): ("asked for", "asked_mb", cost.mebibytes),
               ("not run", "step_ms"): ("predicted", "predicted_ms", cost.seconds)}  # fmt: skip
        words, name, spelled = own.get((status, metric), ("", "", str))
        numbers = group[name].dropna() if name else []
        parts.append(f"{words} {_range(numbers, spelled)}" if len(numbers) else status)
    return ", ".join(parts)


def _range(numbers: pandas.Series, spelled: Callable[[float], str]) -> str:
    return " to ".join(dict.fromkeys(map(spelled, (numbers.min(), numbers.max()))))


def _ratio_panel(axis: Axes, cells: pandas.DataFrame, metric: str) -> None:
    """Time or memory of some mixers over FLARE's at the same N and M."""
    axis.set_ylabel(RATIOS[metric])
    axis.grid(True, which="major", **GRID)
    axis.set_axisbelow(True)
    axis.axhline(1, color=GREY, linewidth=0.8)
    sizes, found = _sizes(cells), False
    for model in COMPARED:
        for latents, line in cost.over(cells, metric, model).groupby("num_latents"):
            line = line.droplevel("num_latents").reindex(sorted(cells["num_tokens"].unique()))
            axis.plot(line.index, line, zorder=3, **_line(model, latents, sizes))
            found = True
    counted = cost.over(cells, "mixer_multiply_adds", ARITHMETIC)
    if metric == "step_ms" and len(counted):
        axis.axhspan(counted.min(), counted.max(), color=_look(ARITHMETIC).colour, alpha=0.2, linewidth=0)
        name = cells.loc[cells["model"] == ARITHMETIC, "label"].iloc[0]
        axis.set_title(f"shaded: multiply-adds of {name}'s mixer over FLARE's", loc="left", fontsize=6.5, color=GREY)
    if not found:
        axis.text(0.5, 0.5, "nothing to compare", transform=axis.transAxes, ha="center", va="center", fontsize=7, color=GREY)


# --- words below


def _foot(cells: pandas.DataFrame) -> str:
    """How the cells were made, and every one that has no value."""
    gone, small = cells[cells["n"] == 0], cells[(cells["n"] > 0) & ~(cells["peak_memory_mb"] > 0)]
    why = pandas.concat([gone.assign(why=[_reason(row) for _, row in gone.iterrows()]), small.assign(why=SMALL)])
    texts = [cost.how(cells)]
    for reason, group in why.groupby("why", sort=False):
        places: dict[str, list[str]] = {}
        for _, line in cost.lines(group):
            places.setdefault(_place(line, cells), []).append(cost.line_name(line))
        every = len(list(cost.lines(cells)))
        named = [
            f"{'every line' if len(names) == every else '; '.join(names)} at {place}" for place, names in places.items()
        ]
        texts.append(f"{reason[0].upper()}{reason[1:]}: {'; '.join(named)}")
    return "\n".join(texts)


def _reason(row: pandas.Series) -> str:
    """Why a cell has no value, without the numbers that differ from cell to cell."""
    known = {"out of memory": row["asked_mb"], "not run": row["predicted_ms"]}.get(row["status"], numpy.nan)
    return row["reason"] if pandas.isna(known) else row["status"]


def _place(line: pandas.DataFrame, cells: pandas.DataFrame) -> str:
    """The N of cells of one line and what is known of them: "N = 600,000 to 1,000,000 (predicted 61 s to 170 s)"."""
    first, own = line.iloc[0], list(line["num_tokens"])
    same = (cells["model"] == first["model"]) & (cells["num_latents"].fillna(0) == line["num_latents"].fillna(0).iloc[0])
    every = sorted(cells.loc[same, "num_tokens"])
    start = every.index(own[0])
    if len(own) > 2 and own == every[start : start + len(own)]:
        place = f"N = {own[0]:,} to {own[-1]:,}"
    else:
        place = f"N = {', '.join(f'{each:,}' for each in own)}"
    if first["n"]:
        return place
    known = _known(line, {"out of memory": "peak_memory_mb", "not run": "step_ms"}.get(first["status"], ""))
    return place if known == first["status"] else f"{place} ({known})"
