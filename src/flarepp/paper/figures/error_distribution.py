"""Supplementary figure: the error over the test cases of every run of Table 1, a panel per dataset, a row per model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import pandas

from flarepp.paper import quoted, style, supplement
from flarepp.record import read_errors

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LABELS, WIDTH, ROW = 1.1, 1.22, 0.24  # inches: of the models' names, of a panel, of a row
MEDIAN: dict[str, Any] = {"color": "black", "marker": "o", "markersize": 3.5, "markerfacecolor": "white", "linestyle": "", "zorder": 4}


def build(records: pandas.DataFrame, out: Path, *, shown: str, scale: str) -> None:
    """Write out/error_distribution.pdf and .png from suite "table1" and the predictions of its runs.

    shown: "last", "ema" or "best_test", which keeps no predictions: then the last weights are shown. ValueError for records
    of another scale, FileNotFoundError when a run that ended well lost its predictions.
    """
    errors, weights, stamp = supplement.read(records, shown, scale)
    headings = supplement.headings(errors)
    trained = errors[errors["role"] != "trivial"].sort_values("role", key=lambda role: role == "beyond", kind="stable")
    models = trained.drop_duplicates("model").set_index("model")["label"]  # in the order of Table 1
    size = (LABELS + WIDTH * max(3, len(headings)), ROW * len(models) + 1.3)
    with style.figure(out, "error_distribution", size, stamp, _foot(errors, weights)) as drawing:
        axes = drawing.subplots(1, max(1, len(headings)), sharey=True, squeeze=False)[0]
        axes[0].set_yticks(range(len(models)), models)
        axes[0].set_ylim(max(1, len(models)) - 0.5, -0.5)
        for axis, (dataset, heading) in zip(axes, headings.items()):
            axis.set_title(heading.replace(" (", "\n("), fontsize=8)
            supplement.constant(axis, errors[errors["dataset"] == dataset], axis.axvline)
            _panel(axis, trained[trained["dataset"] == dataset], list(models.index), weights)
            axis.tick_params(axis="y", length=0)
        axes[len(axes) // 2].set_xlabel("relative L2 error of a test case (%)")


def _foot(errors: pandas.DataFrame, weights: str) -> str:
    """What is shown, and the runs that are not."""
    count, missing = supplement.seeds(errors), supplement.missing(errors)
    seeds = f" of all n = {count} seeds" if count > 1 else ""
    dotted = "; dotted: mean of the constant predictor" if (errors["model"] == supplement.CONSTANT).any() else ""
    return f"all test cases{seeds}, {quoted.weights_words(weights)}; mark: median{dotted}" + (
        f"\nwithout a value: {missing}" if missing else "")  # fmt: skip


def _panel(axis: Axes, rows: pandas.DataFrame, models: list[str], weights: str) -> None:
    """The distributions of one dataset, in the places of `models`, and why some have none."""
    import seaborn

    axis.grid(True, axis="x", which="major", color="#e4e4e4", linewidth=0.5)
    axis.set_axisbelow(True)
    axis.set_xscale("log")
    cases = {row.model: _cases(row.good, weights) for row in rows[rows["n"] > 0].itertuples()}
    if cases:
        data = pandas.DataFrame([(models.index(model), model, value) for model, values in cases.items() for value in values],
                                columns=["place", "model", "error"])  # fmt: skip
        palette = {model: style.LOOKS.get(model, style.OTHER).colour for model in cases}
        look = {"cut": 0, "inner": None, "density_norm": "width", "width": 0.8, "linewidth": 0.4, "saturation": 1}
        seaborn.violinplot(data, x="error", y="place", hue="model", palette=palette, orient="y", native_scale=True,
                           log_scale=(True, False), dodge=False, legend=False, ax=axis, **look)  # fmt: skip
        axis.plot([numpy.median(values) for values in cases.values()], [models.index(model) for model in cases], **MEDIAN)
        supplement.set_log_ticks(axis.xaxis, 3)
    else:
        axis.set_xticks([])
        axis.set_xticks([], minor=True)
    for row in rows[rows["n"] == 0].itertuples():
        place = (0.5, models.index(row.model))
        axis.annotate(row.status, place, xycoords=axis.get_yaxis_transform(), ha="center", va="center", fontsize=6)
    axis.set(xlabel="", ylabel="")


def _cases(runs: tuple[str, ...], weights: str) -> numpy.ndarray:
    """Errors in % of all test cases and seeds."""
    return 100 * numpy.concatenate([read_errors(Path(run), weights) for run in runs])
