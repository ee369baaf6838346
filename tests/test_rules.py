"""The rules on a few cells by hand: each side of every bound, ties, and what does not count."""

from __future__ import annotations

import numpy
import pandas
import pytest

from flarepp.paper.rules import accuracy, beyond, fields, steps, sweeps

AXES = {"dataset": "x", "model": "a", "num_blocks": 2, "num_latents": 8, "precision": "fp32"}
PAIR = {"model": "b", "against": "a"}
SPLIT = PAIR | {"ahead": 1, "lead_percent": 6, "behind": 2, "lag_percent": [16, 22]}
STRONGEST = {"model": "s", "apart_from": [], "leads": ["t"], "leads_on": "y"}
FACTOR = {"models": ["a", "c"], "behind": "b", "factor": 4, "tolerance": 1}
DEPTHS = PAIR | {"percents": {2: 40}, "tolerance": 1}


def cells(axes: str, *rows) -> pandas.DataFrame:
    """Cells with these values of `axes` and an error; all else as in AXES."""
    frame = pandas.DataFrame([AXES | dict(zip([*axes.split(), "mean"], row)) for row in rows])
    return frame.assign(label=frame["model"].str.upper(), dataset_label=frame["dataset"].str.upper(), role="ranked")


def on_datasets(**models) -> pandas.DataFrame:
    """Errors of models on datasets x, y, z."""
    return cells("model dataset", *((model, *place) for model, values in models.items() for place in zip("xyz", values)))


def over_latents(**models) -> pandas.DataFrame:
    """Errors of models at 8, 16, 32 latents."""
    rows = [(name, latents, error) for name, errors in models.items() for latents, error in zip((8, 16, 32), errors)]
    return cells("model num_latents", *rows)


def in_precisions(*pairs) -> pandas.DataFrame:
    """Errors of one model in FP32 and FP16 at one depth after the other."""
    rows = [(2**k, name, value) for k, pair in enumerate(pairs) for name, value in zip(("fp32", "fp16"), pair)]
    return cells("num_blocks precision", *rows)


@pytest.mark.parametrize("rule, frame, more, holds", [
    # the lowest error: a tie is not the lowest, nor is being best on some
    (accuracy.lowest_everywhere, on_datasets(a=(2, 2), b=(1, 1)), {"model": "b"}, True),
    (accuracy.lowest_everywhere, on_datasets(a=(2, 1), b=(1, 1)), {"model": "b"}, False),
    (accuracy.mean_reduction, on_datasets(a=(100, 100), b=(80, 60)), PAIR | {"percent": 25, "tolerance": 5}, True),
    (accuracy.mean_reduction, on_datasets(a=(100, 100), b=(80, 60)), PAIR | {"percent": 24, "tolerance": 5}, False),
    (accuracy.better_on, on_datasets(a=(1, 1), b=(0.9, 1.1)), PAIR | {"datasets": ["x"]}, True),
    (accuracy.better_on, on_datasets(a=(1, 1), b=(0.9, 1)), PAIR | {"datasets": ["x"]}, False),
    (accuracy.better_on, on_datasets(a=(1, 1), b=(1, 1.1)), PAIR | {"datasets": ["x"]}, False),
    # leads and lags, rounded to whole percent
    (accuracy.split_of_leads, on_datasets(a=(100,) * 3, b=(93.6, 115.6, 122.4)), SPLIT, True),
    (accuracy.split_of_leads, on_datasets(a=(100,) * 3, b=(93.4, 116, 122)), SPLIT, False),
    (accuracy.split_of_leads, on_datasets(a=(100,) * 3, b=(94, 115.4, 122)), SPLIT, False),
    (accuracy.split_of_leads, on_datasets(a=(100,) * 3, b=(94, 116, 122.6)), SPLIT, False),
    (accuracy.split_of_leads, on_datasets(a=(100,) * 3, b=(94, 94, 122)), SPLIT, False),
    # the strongest of the others on exactly so many datasets
    (accuracy.strongest_other, on_datasets(s=(1, 1, 3), t=(2, 2, 2)), STRONGEST | {"count": 2}, True),
    (accuracy.strongest_other, on_datasets(s=(1, 1, 1), t=(2, 2, 2)), STRONGEST | {"count": 2}, False),
    (accuracy.strongest_other, on_datasets(s=(1, 1, 2), t=(2, 2, 2)), STRONGEST | {"count": 3}, False),
    (accuracy.strongest_other, on_datasets(s=(1, 2, 1), t=(2, 2, 2)), STRONGEST | {"count": 2}, False),
    (accuracy.trail_by_factor, on_datasets(a=(2,), b=(1,), c=(5,)), FACTOR, True),
    (accuracy.trail_by_factor, on_datasets(a=(1,), b=(1,), c=(4,)), FACTOR, False),
    (accuracy.trail_by_factor, on_datasets(a=(2,), b=(1,), c=(5.1,)), FACTOR, False),
    # of means over latents, not of medians; else at the latents before the most
    (sweeps.reduction_by_depth, over_latents(a=(100, 100, 100), b=(50, 51, 79)), DEPTHS | {"mean": True}, True),
    (sweeps.reduction_by_depth, over_latents(a=(100, 100, 100), b=(60, 60, 90)), DEPTHS | {"mean": True}, False),
    (sweeps.reduction_by_depth, over_latents(a=(100, 100, 100), b=(10, 60, 10)), DEPTHS | {"mean": False}, True),
    (sweeps.reduction_by_depth, over_latents(a=(100, 100, 100), b=(60, 10, 60)), DEPTHS | {"mean": False}, False),
    (sweeps.flattens, over_latents(a=(5, 1, 1), b=(1, 5, 5)), {"percent": 3}, True),
    (sweeps.flattens, over_latents(a=(1, 5, 1)), {"percent": 3}, False),
    (sweeps.flattens, over_latents(a=(1, 1, 0.9)), {"percent": 3}, False),
    (sweeps.lower_in_every_cell, over_latents(a=(2, 2), b=(1, 2)), PAIR, False),
    (sweeps.order_at_every_depth, in_precisions((2, 2)).pipe(lambda a: pandas.concat([a, a.assign(model="b", mean=[1, 2])])),
     PAIR, False),
    # within a band whichever way; exactly half is not more than half
    (sweeps.precision_band, in_precisions((1, 0.5), (1, 1.3), (1, 0.7)), {"percent": 31}, True),
    (sweeps.precision_band, in_precisions((1, 1.5), (1, 1.1)), {"percent": 30}, False),
    (sweeps.precision_band, in_precisions((1, 0.5), (1, 0.6), (1, 1.1)), {"percent": 30}, False),
    (sweeps.precision_change, in_precisions((1, 1.8)), {"percent": 82, "tolerance": 2.001}, True),
    (sweeps.precision_change, in_precisions((1, 1.8)), {"percent": 82, "tolerance": 1.999}, False),
])  # fmt: skip
def test_what_a_rule_about_errors_decides(rule, frame, more, holds):
    assert rule(frame, **more)[1] is holds


@pytest.mark.parametrize("values, holds", [((1.2, 0.9, 1.1), True), ((1.2, 1.0, 1.0), False), ((1.2, 1.3, 1.1), False)])
def test_efficiencies_above_one_are_counted_exactly(values, holds):
    rows = [{"label": "A", "num_tokens": 10, "num_ranks": 2, "time_efficiency": values[0], "memory_efficiency": values[1]},
            {"label": "A", "num_tokens": 20, "num_ranks": 2, "time_efficiency": 0.9, "memory_efficiency": values[2]}]
    assert steps.above_one(pandas.DataFrame(rows), count=2)[1] is holds


@pytest.mark.parametrize("count, holds", [(160, True), (145, False), (130, False)])
def test_every_ratio_lies_below_that_of_the_counts(count, holds):
    """Ratios of time 1.5 at M = 8 and 1.4 at M = 16; one of the counts' at a time is lower."""
    rows = [{"model": model, "num_tokens": tokens, "num_latents": latents, "label": model, "mixer_multiply_adds": 100.0,
             "step_ms": {("b", 8): 1.5, ("b", 16): 1.4}.get((model, latents), 1.0)}
            for model in "ab" for tokens in (10, 20) for latents in (8, 16)]  # fmt: skip
    frame = pandas.DataFrame(rows)
    own = frame["model"] == "b"
    frame.loc[own, "mixer_multiply_adds"] = 160.0
    frame.loc[own & (frame["num_tokens"] == 20) & (frame["num_latents"] == 8), "mixer_multiply_adds"] = count
    ask = PAIR | {"low": 1.3, "high": 1.5, "beyond": 10, "flat_percent": 5}
    assert steps.steady_ratio(frame, **ask)[1] is holds


@pytest.mark.parametrize("overlap, flare, flarepp, holds", [
    (0.25, 0.2, 0.2, True), (0.24, 0.2, 0.2, False), (0.25, 0.19, 0.2, False), (0.25, 0.2, 0.19, False),
    (0.25, 0.2, numpy.nan, False)])  # fmt: skip
def test_both_models_err_on_the_feature(overlap, flare, flarepp, holds):
    right = {"dataset_label": "X", "feature": "wall", "case": 0, "overlap": 0.9, "overlap_case": 0.9, "share": 0.1,
             "flare": 0.9, "flarepp": 0.9}  # fmt: skip
    frame = pandas.DataFrame([right, right | {"overlap": overlap, "flare": flare, "flarepp": flarepp}])
    assert fields.same_place(frame, overlap_percent=25, factor=2)[1] is holds


def test_the_spread_over_seeds_is_told_by_its_median():
    frame = on_datasets(a=(10, 10, 10)).assign(std=[0.1, 0.2, 0.9], n=2)
    assert beyond.seed_spread(frame)[0].startswith("± 2.0 % of the error (median of 3 cells")
