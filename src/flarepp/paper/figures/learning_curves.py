"""Supplementary figure: test error against the step of every run of Table 1, a panel per dataset, a line per model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import pandas

from flarepp.paper import style, supplement
from flarepp.record import read_history

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS, WIDTH, HEIGHT = 3, 7.2, 2.3  # panels a row, inches of the figure and of a row
MAIN = ("flare", "flarepp")
THICK = {"linewidth": 1.5, "markersize": 4.0, "zorder": 4}
THIN = {"linewidth": 0.7, "markersize": 3.0, "markeredgewidth": 0.6, "zorder": 3}
WEIGHTS = {"last": "weights of that step", "ema": "averaged (EMA) weights of that step"}


def build(records: pandas.DataFrame, out: Path, *, shown: str, scale: str) -> None:
    """Write out/learning_curves.pdf and .png from suite "table1" and the histories of its runs.

    shown: "last", "ema" or "best_test", whose evaluations are those of "last". ValueError for records of another scale,
    FileNotFoundError when a run lost its history.
    """
    errors, weights, stamp = supplement.read(records, shown, scale)
    headings = supplement.headings(errors)
    columns = min(COLUMNS, len(headings) + 1)
    rows = math.ceil((len(headings) + 1) / columns)  # one panel more, for the legend
    size = (WIDTH, HEIGHT * rows + 0.3)
    with style.figure(out, "learning_curves", size, stamp, _foot(errors, weights)) as drawing:
        axes = drawing.subplots(rows, columns, squeeze=False).ravel()
        for axis, (dataset, heading) in zip(axes, headings.items()):
            axis.set_title(heading)
            _panel(axis, errors[errors["dataset"] == dataset], weights)
        for axis in axes[len(headings) :]:
            axis.axis("off")
        for axis in axes[: len(headings) : columns]:
            axis.set_ylabel("relative L2 error (%)")
        for axis in axes[max(0, len(headings) - columns) : len(headings)]:
            axis.set_xlabel("step")
        axes[len(headings)].legend(handles=_handles(errors), loc="center", frameon=False, fontsize=7, handlelength=3.2)


def _foot(errors: pandas.DataFrame, weights: str) -> str:
    """Which error is drawn, what the bands are, and the runs that have no curve or whose curve ends early."""
    count = supplement.seeds(errors)
    seeds = f"; mean over n = {count} seeds, bands from the lowest to the highest" if count > 1 else ""
    missing = supplement.missing(errors)
    return f"test error of the {WEIGHTS[weights]}, at every evaluation{seeds}" + (
        f"\nno curve, or one that ends early: {missing}" if missing else "")  # fmt: skip


def _line(model: str) -> dict:
    return style.LOOKS.get(model, style.OTHER).line() | (THICK if model in MAIN else THIN)


def _handles(errors: pandas.DataFrame) -> list:
    """The legend: a line per model, and the constant predictor."""
    from matplotlib.lines import Line2D

    names = errors[errors["role"] != "trivial"].drop_duplicates("model").set_index("model")["label"]
    constant = errors.loc[errors["model"] == supplement.CONSTANT, "label"].unique()
    handles = [Line2D([], [], label=name, **_line(model)) for model, name in names.items()]
    return handles + [Line2D([], [], label=name, **supplement.LINE) for name in constant]


def _panel(axis: Axes, errors: pandas.DataFrame, weights: str) -> None:
    """The curves of one dataset."""
    from matplotlib.ticker import MaxNLocator

    axis.grid(True, which="major", color="#e4e4e4", linewidth=0.5)
    supplement.constant(axis, errors, axis.axhline)
    for row in errors[errors["role"] != "trivial"].itertuples():
        if row.runs:
            _curve(axis, [read_history(Path(run)) for run in row.runs], f"test_{weights}", _line(row.model))
    if not axis.lines:
        axis.text(0.5, 0.5, "no run has a curve", ha="center", va="center", transform=axis.transAxes)
        axis.set(xticks=[], yticks=[])
        return
    axis.set_yscale("log")
    supplement.set_log_ticks(axis.yaxis, 4)
    axis.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.set_xlim(left=0)


def _curve(axis: Axes, histories: list[pandas.DataFrame], column: str, look: dict) -> None:
    """The mean over seeds in %, as far as every seed came, and the band between the lowest and the highest."""
    seeds = pandas.concat([100 * history.set_index("step")[column] for history in histories], axis=1, sort=True).dropna()
    if seeds.empty:
        return
    axis.plot(seeds.index, seeds.mean(axis=1), **look)
    if len(histories) > 1:
        band = {"color": look["color"], "alpha": 0.15, "linewidth": 0, "zorder": 2}
        axis.fill_between(seeds.index, seeds.min(axis=1), seeds.max(axis=1), **band)
