"""Claims about the errors of Table 1."""

from __future__ import annotations

import pandas

from flarepp.paper.rules.words import Outcome, by, change_against, labels, named, names_of, signed


def lowest_everywhere(cells: pandas.DataFrame, model: str) -> Outcome:
    """`model` has the lowest error on every dataset where it has a rival; ties do not count."""
    table = by(cells, "model")
    table = table[table[model].notna() & (table.notna().sum(axis=1) > 1)] if model in table else table[:0]
    if table.empty:
        return None
    first = table[model] < table.drop(columns=model).min(axis=1)
    counts = table.notna().sum(axis=1) - 1
    rivals = " to ".join(dict.fromkeys(str(count) for count in (counts.min(), counts.max())))
    rivals += " other model" if counts.max() == 1 else " other models"
    measured = f"lowest on {first.sum()} of {len(first)} ({names_of(cells, table)}) against {rivals}"
    return measured, bool(first.all())


def mean_reduction(
    cells: pandas.DataFrame, model: str, against: str, percent: float, tolerance: float
) -> Outcome:
    """The mean over datasets of `model`'s error reduction is within `tolerance` points of `percent`."""
    reduction = -change_against(cells, model, against)
    if reduction.empty:
        return None
    mean = reduction.mean()
    span = f" ({reduction.min():z.0f} to {reduction.max():z.0f})" if len(reduction) > 1 else ""
    measured = f"{named(cells, model, against)}: error lower by {mean:z.1f} %{span} over {names_of(cells, reduction)}"
    return measured, bool(abs(mean - percent) <= tolerance)


def better_on(cells: pandas.DataFrame, model: str, against: str, datasets: list[str]) -> Outcome:
    """`model` has the lower error on the listed datasets and the higher one on all others, among those there."""
    change = change_against(cells, model, against)
    if change.empty:
        return None
    expected = change.index.get_level_values("dataset").isin(datasets)
    parts = [f"{name} {signed(value)} %" for name, value in zip(labels(cells, change), change)]
    return f"error of {named(cells, model, against)}: {', '.join(parts)}", bool((change.where(expected, -change) < 0).all())


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
    change = change_against(cells, model, against)
    if change.empty:
        return None
    leads, lags = -change[change < 0].round(), change[change > 0].round()
    holds = (
        (len(leads), len(lags)) == (ahead, behind)
        and leads.max() <= lead_percent
        and lags.between(*lag_percent).all()
    )
    parts = [f"{name} {signed(value, 1)} %" for name, value in zip(labels(cells, change), change)]
    measured = f"{len(leads)} ahead, {len(lags)} behind; error of {named(cells, model, against)}: {', '.join(parts)}"
    return measured, bool(holds)


def strongest_other(
    cells: pandas.DataFrame, model: str, apart_from: list[str], count: int, leads: list[str], leads_on: str
) -> Outcome:
    """`model` is strictly best apart from `apart_from` on `count` datasets, and ahead of all `leads` on `leads_on`."""
    table = by(cells[~cells["model"].isin(apart_from)], "model")
    table = table[table[model].notna() & (table.notna().sum(axis=1) > 1)] if model in table else table[:0]
    if table.empty:
        return None
    best = int((table[model] < table.drop(columns=model).min(axis=1)).sum())
    largest = table[table.index.get_level_values("dataset") == leads_on]
    measured = f"strongest on {best} of {len(table)} ({names_of(cells, table)})"
    if largest.empty or not set(leads) <= set(table) or largest[leads].isna().any(axis=None):
        return measured, False
    front = bool((largest[model] < largest[leads].min(axis=1)).all())
    return (
        f"{measured}; {'ahead' if front else 'not ahead'} on {names_of(cells, largest)}",
        best == count and front,
    )


def trail_by_factor(
    cells: pandas.DataFrame, models: list[str], behind: str, factor: float, tolerance: float
) -> Outcome:
    """All `models` have a higher error than `behind` everywhere, the largest ratio being about `factor`."""
    table = by(cells, "model")
    present = [model for model in models if model in table]
    if behind not in table or not present:
        return None
    ratios = table[present].div(table[behind], axis=0).stack().dropna()
    if ratios.empty:
        return None
    holds = (ratios > 1).all() and abs(ratios.max() - factor) <= tolerance
    label = cells.loc[cells["model"] == behind, "label"].iloc[0]
    errors = f"errors are {ratios.min():.2f} to {ratios.max():.2f} times that of {label}"
    return f"{(ratios > 1).sum()} of {len(ratios)} trail; {errors}", bool(holds)
