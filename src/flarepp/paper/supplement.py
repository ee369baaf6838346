"""What the supplementary figures share: the cells of Table 1, which weights they are of, and what to say of missing runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pandas

from flarepp.paper import deviations, quoted
from flarepp.paper.cells import cells, check_scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

SUITE = "table1"
CONSTANT = "constant"  # the trivial predictor that a reader measures the others by
STEPS = ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7))  # round numbers of a decade
LINE: dict[str, Any] = {"color": "#777777", "linestyle": ":", "linewidth": 1.0}


def read(records: pandas.DataFrame, shown: str, scale: str) -> tuple[pandas.DataFrame, str, str]:
    """Cells of Table 1 with `good` (folders of the runs that ended well), the weights "last" or "ema", and the stamp.

    shown: "best_test" keeps neither curve nor predictions of its own: then "last". ValueError for records of another scale.
    """
    check_scale(records, scale, SUITE)
    errors, good = cells(records, SUITE, shown), set(records.loc[records["status"] == "ok", "run"])
    errors["good"] = [tuple(run for run in runs if run in good) for runs in errors["runs"]]
    differing = deviations.words(deviations.find(records, SUITE, scale).values())
    stamp = quoted.stamp(scale, [source for source in errors["data_source"].unique() if source], differing)
    return errors, "ema" if shown == "ema" else "last", stamp


def headings(errors: pandas.DataFrame) -> dict[str, str]:
    """The name above every dataset's panel, in record order."""
    sources = errors[errors["data_source"] != ""].drop_duplicates("dataset").set_index("dataset")["data_source"]
    return {row.dataset: quoted.heading(row.dataset_label, sources.get(row.dataset, ""))
            for row in errors.drop_duplicates("dataset").itertuples()}  # fmt: skip


def constant(axis: Axes, errors: pandas.DataFrame, line: Callable[..., object]) -> None:
    """Draw the error of the constant predictor in a dataset's panel by `line`, axis.axhline or axis.axvline."""
    for value in errors.loc[(errors["model"] == CONSTANT) & (errors["n"] > 0), "mean"]:
        line(value, zorder=1, **LINE)


def set_log_ticks(axis: Axis, least: int) -> None:
    """Give a logarithmic XAxis or YAxis `least` round ticks or some more, whatever part of a decade it spans."""
    from matplotlib.ticker import MaxNLocator, NullLocator

    low, high = axis.get_view_interval()
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
    for steps in STEPS:
        ticks = [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high]
        if len(ticks) >= least:
            break
    else:
        ticks = [tick for tick in MaxNLocator(least).tick_values(low, high) if low <= tick <= high]
    axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_minor_locator(NullLocator())


def missing(errors: pandas.DataFrame) -> str:
    """Every run without a value and seed that is left out: "LNO on Pipe: not affordable; GNOT on Darcy: diverged"."""
    rows = errors[(errors["n"] == 0) | (errors["failed"] != "")]
    return "; ".join(f"{row.label} on {row.dataset_label}: {row.failed or row.status}" for row in rows.itertuples())


def seeds(errors: pandas.DataFrame) -> int:
    """How many seeds there are at most."""
    return int(errors["n"].max()) if len(errors) else 0
