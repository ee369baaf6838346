"""The rules that decide claims: every public function here can be named as `rule` in claims.yaml.

A rule gets the cells a claim needs (a DataFrame with dataset, model, num_blocks, precision, dataset_label and
mean, the error in %; only cells with a value; one constant on axes the claim does not name) and the claim's
parameters. It returns (what was measured, whether the claim holds), or None when too few cells are there to
say anything. It knows nothing of scales, data sources or missing runs.
"""

from __future__ import annotations

import pandas

Outcome = tuple[str, bool] | None
PLACE = ["dataset", "num_blocks", "precision"]


def lowest_everywhere(cells: pandas.DataFrame, model: str) -> Outcome:
    """`model` has the lowest error on every dataset where it has a rival; ties do not count."""
    table = _by(cells, "model")
    table = table[table[model].notna() & (table.notna().sum(axis=1) > 1)] if model in table else table[:0]
    if table.empty:
        return None
    first = table[model] < table.drop(columns=model).min(axis=1)
    counts = table.notna().sum(axis=1) - 1
    rivals = " to ".join(dict.fromkeys(str(count) for count in (counts.min(), counts.max())))
    rivals += " other model" if counts.max() == 1 else " other models"
    measured = f"lowest on {first.sum()} of {len(first)} ({_names(cells, table)}) against {rivals}"
    return measured, bool(first.all())


def mean_reduction(
    cells: pandas.DataFrame, model: str, against: str, percent: float, tolerance: float
) -> Outcome:
    """The mean over datasets of `model`'s error reduction is within `tolerance` points of `percent`."""
    reduction = -_change(cells, model, against)
    if reduction.empty:
        return None
    mean = reduction.mean()
    span = f" ({reduction.min():z.0f} to {reduction.max():z.0f})" if len(reduction) > 1 else ""
    return f"{mean:z.1f} %{span} over {_names(cells, reduction)}", bool(abs(mean - percent) <= tolerance)


def better_on(cells: pandas.DataFrame, model: str, against: str, datasets: list[str]) -> Outcome:
    """`model` has the lower error on the listed datasets and the higher one on all others, among those there."""
    change = _change(cells, model, against)
    if change.empty:
        return None
    expected = change.index.get_level_values("dataset").isin(datasets)
    parts = [f"{name} {_signed(value)} %" for name, value in zip(_labels(cells, change), change)]
    return ", ".join(parts), bool((change.where(expected, -change) < 0).all())


def split_of_leads(
    cells: pandas.DataFrame,
    model: str,
    against: str,
    ahead: int,
    lead_percent: float,
    behind: int,
    lag_percent: list[float],
) -> Outcome:
    """`model` leads on `ahead` datasets by at most `lead_percent`, trails on `behind` within a range."""
    change = _change(cells, model, against)
    if change.empty:
        return None
    leads, lags = -change[change < 0].round(), change[change > 0].round()
    holds = (
        (len(leads), len(lags)) == (ahead, behind)
        and leads.max() <= lead_percent
        and lags.between(*lag_percent).all()
    )
    parts = [f"{name} {_signed(value, 1)} %" for name, value in zip(_labels(cells, change), change)]
    return f"{len(leads)} ahead, {len(lags)} behind: " + ", ".join(parts), bool(holds)


def strongest_other(
    cells: pandas.DataFrame, model: str, apart_from: list[str], count: int, leads: list[str], leads_on: str
) -> Outcome:
    """`model` is strictly best apart from `apart_from` on `count` datasets, and ahead of all `leads` on `leads_on`."""
    table = _by(cells[~cells["model"].isin(apart_from)], "model")
    table = table[table[model].notna() & (table.notna().sum(axis=1) > 1)] if model in table else table[:0]
    if table.empty:
        return None
    best = int((table[model] < table.drop(columns=model).min(axis=1)).sum())
    largest = table[table.index.get_level_values("dataset") == leads_on]
    measured = f"strongest on {best} of {len(table)} ({_names(cells, table)})"
    if largest.empty or not set(leads) <= set(table) or largest[leads].isna().any(axis=None):
        return measured, False
    front = bool((largest[model] < largest[leads].min(axis=1)).all())
    return (
        f"{measured}; {'ahead' if front else 'not ahead'} on {_names(cells, largest)}",
        best == count and front,
    )


def trail_by_factor(
    cells: pandas.DataFrame, models: list[str], behind: str, factor: float, tolerance: float
) -> Outcome:
    """All `models` have a higher error than `behind` everywhere, the largest ratio being about `factor`."""
    table = _by(cells, "model")
    present = [model for model in models if model in table]
    if behind not in table or not present:
        return None
    ratios = table[present].div(table[behind], axis=0).stack().dropna()
    if ratios.empty:
        return None
    holds = (ratios > 1).all() and abs(ratios.max() - factor) <= tolerance
    return f"{(ratios > 1).sum()} of {len(ratios)} trail, by {ratios.min():.2f} to {ratios.max():.2f}", bool(
        holds
    )


def order_at_every_depth(cells: pandas.DataFrame, model: str, against: str) -> Outcome:
    """`model` has the lower error than `against` in every cell of depth and precision."""
    change = _change(cells, model, against)
    if change.empty:
        return None
    worse = [f"B = {depth:.0f} {precision}" for (_, depth, precision), value in change.items() if value >= 0]
    where = f"; not at {', '.join(worse)}" if worse else ""
    span = f"change {_signed(change.min())} to {_signed(change.max())} %"
    return f"lower in {(change < 0).sum()} of {len(change)} cells, {span}{where}", not worse


def precision_band(cells: pandas.DataFrame, percent: float) -> Outcome:
    """More than half of the cells change by at most `percent` from FP32 to FP16."""
    change = _precision_change(cells).abs()
    if change.empty:
        return None
    inside = int((change <= percent).sum())
    return (
        f"{inside} of {len(change)} cells within {percent:g} %, the largest {change.max():.0f} %",
        inside > len(change) / 2,
    )


def precision_change(cells: pandas.DataFrame, percent: float, tolerance: float) -> Outcome:
    """The change from FP32 to FP16 of the one cell needed is within `tolerance` points of `percent`."""
    change = _precision_change(cells)
    if change.empty:
        return None
    return f"{_signed(change.iloc[0])} %", bool(abs(change.iloc[0] - percent) <= tolerance)


def _by(cells: pandas.DataFrame, axis: str) -> pandas.DataFrame:
    """Errors with `axis` as columns and the other axes as rows, in record order."""
    rows = [key for key in [*PLACE, "model"] if key != axis]
    return cells.pivot_table(index=rows, columns=axis, values="mean", sort=False)


def _change(cells: pandas.DataFrame, model: str, against: str) -> pandas.Series:
    """Relative change in % of `model` against another wherever both have a value."""
    table = _by(cells, "model")
    if not {model, against} <= set(table):
        return pandas.Series(dtype=float)
    return (100 * (table[model] / table[against] - 1)).dropna()


def _precision_change(cells: pandas.DataFrame) -> pandas.Series:
    """Relative change in % from FP32 to FP16 wherever both have a value."""
    table = _by(cells, "precision")
    if not {"fp32", "fp16"} <= set(table):
        return pandas.Series(dtype=float)
    return (100 * (table["fp16"] / table["fp32"] - 1)).dropna()


def _signed(value: float, digits: int = 0) -> str:
    """A change with its sign; what rounds to zero has none."""
    rounded = round(value, digits)
    return f"{rounded:+.{digits}f}" if rounded else "0"


def _labels(cells: pandas.DataFrame, table) -> list[str]:
    labels = cells.drop_duplicates("dataset").set_index("dataset")["dataset_label"]
    return [labels[dataset] for dataset in table.index.get_level_values("dataset")]


def _names(cells: pandas.DataFrame, table) -> str:
    return ", ".join(dict.fromkeys(_labels(cells, table)))
