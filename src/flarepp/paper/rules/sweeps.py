"""Claims about the sweeps of Figures 3 and 4: depth, latent budget, precision.

Depths and latent budgets of Figure 3 are spoken of by their order, since every scale has its own: the deepest, the half
of a depth, the fewest latents, the most, and those before the most, which are Table 1's.
"""

from __future__ import annotations

from collections.abc import Iterable

import pandas

from flarepp.paper.rules.words import Outcome, by, change_against, changes, named, signed


def lower_in_every_cell(cells: pandas.DataFrame, model: str, against: str) -> Outcome:
    """`model` has the lower error than `against` in every cell of dataset, depth and latents."""
    grid = _pairs(cells, model, against)
    if grid.empty:
        return None
    change = 100 * (grid[model] / grid[against] - 1)
    labels = cells.drop_duplicates("dataset").set_index("dataset")["dataset_label"]
    others = change[~(change < 0)].index
    not_lower = [f"{labels[dataset]} B = {depth:.0f} M = {latents:.0f}" for dataset, depth, latents in others]
    where = f"; not at {', '.join(not_lower)}" if not_lower else ""
    return f"lower in {(change < 0).sum()} of {len(change)} cells, {changes(change)}{where}", not not_lower


def reduction_by_depth(
    cells: pandas.DataFrame, model: str, against: str, percents: dict[int, float], tolerance: float, mean: bool
) -> Outcome:
    """At every depth the error reduction of one dataset is within `tolerance` points of what `percents` states for it.

    mean: of the errors' means over all latents that both models have, else at Table 1's latents.
    """
    grid = _pairs(cells, model, against)
    if grid.empty:
        return None
    if not mean:
        grid = grid[grid.index.get_level_values("num_latents") == _latents(grid)[-2:][0]]
    errors = grid.groupby("num_blocks").mean()
    reduction = 100 * (1 - errors[model] / errors[against])
    stated = [abs(reduction[depth] - percent) for depth, percent in percents.items() if depth in reduction]
    values = ", ".join(signed(value).removeprefix("+") for value in reduction)
    where = f"at B = {_listed(reduction.index)}, {'mean over ' if mean else ''}M = {_listed(_latents(grid))}"
    measured = f"{named(cells, model, against)}: error lower by {values} % {where}"
    return measured, (bool(max(stated) <= tolerance) if stated else None)


def saturates(cells: pandas.DataFrame, model: str, against: str, percent: float) -> Outcome:
    """From the fewest latents to the most `against` rises at all depths but the deepest, where it stays, and `model` falls
    at all of them; a change by at most `percent` is none."""
    grid = _pairs(cells, model, against)
    first, last = _latents(grid)[:1], _latents(grid)[-1:]
    if first == last:
        return None
    table = grid.droplevel("dataset").unstack("num_latents")  # a row per depth
    change = {name: 100 * (table[name][last[0]] / table[name][first[0]] - 1) for name in (against, model)}
    change = pandas.DataFrame(change).dropna()
    if change.empty:
        return None
    shallow, deepest = change[against].iloc[:-1], change[against].iloc[-1]
    holds = (shallow > percent).all() and abs(deepest) <= percent and (change[model] < -percent).all()
    texts = [f"{label} " + ", ".join(f"{signed(v, 1)} %" for v in change[name]) for name, label in _names(cells, change)]
    where = f"from M = {first[0]:.0f} to {last[0]:.0f} at B = {_listed(change.index)}"
    return f"error of {'; '.join(texts)} {where}", (None if holds and shallow.empty else bool(holds))


def flattens(cells: pandas.DataFrame, percent: float) -> Outcome:
    """At the deepest depth no model changes by more than `percent` from Table 1's latents to the most."""
    deepest = cells[cells["num_blocks"] == cells["num_blocks"].max()]
    table = deepest.pivot_table(index="model", columns="num_latents", values="mean", sort=False)
    if table.shape[1] < 2:
        return None
    few, many = sorted(table)[-2:]
    change = (100 * (table[many] / table[few] - 1)).dropna()
    if change.empty:
        return None
    texts = ", ".join(f"{label} {signed(change[name], 1)} %" for name, label in _names(cells, change.index))
    depth = deepest["num_blocks"].iloc[0]
    return f"error of {texts} from M = {few:.0f} to {many:.0f} at B = {depth:.0f}", bool((change.abs() <= percent).all())


def half_depth(cells: pandas.DataFrame, model: str, against: str, shallow: int) -> Outcome:
    """`model` has the lower error than `against` of twice its depth at all latents of all datasets where the latter is the
    deepest, and at exactly `shallow` of them one depth before."""
    table = cells.pivot_table(index=["dataset", "num_latents"], columns=["model", "num_blocks"], values="mean", sort=False)
    depths = sorted(cells["num_blocks"].unique(), reverse=True)
    won = [_won(table, (model, depth / 2), (against, depth)) for depth in depths[:2]]
    texts = [
        f"B = {depth / 2:.0f} against {depth:.0f}: lower at {each.sum()} of {len(each)}"
        for depth, each in zip(depths, won)
        if len(each)
    ]
    if not texts:
        return None
    wrong = not won[0].all() or (len(won) > 1 and len(won[1]) > 0 and won[1].sum() != shallow)
    few = len(won) < 2 or not all(map(len, won))
    return f"{'; '.join(texts)} latent budgets", (False if wrong else None if few else True)


def coincides_at(cells: pandas.DataFrame, model: str, against: str, num_blocks: int, percent: float) -> Outcome:
    """The errors of two models differ by at most `percent` at depth `num_blocks`; at all other depths `model` is lower by
    more than that."""
    change = change_against(cells, model, against)
    if change.empty:
        return None
    change = change.droplevel(["dataset", "precision"])
    there = change.index == num_blocks
    holds = (change[there].abs() <= percent).all() and (change[~there] < -percent).all()
    texts = ", ".join(f"{signed(value, 1)} % at B = {depth:.0f}" for depth, value in change.items())
    return f"error of {named(cells, model, against)}: {texts}", (None if holds and (there.all() or not there.any()) else bool(holds))


def flips(cells: pandas.DataFrame, model: str, against: str) -> Outcome:
    """`model` has the lower error than `against` in FP32 and the higher one in FP16."""
    change = change_against(cells, model, against)
    if change.empty:
        return None
    change = change.droplevel(["dataset", "num_blocks"])
    lead = {"fp32": change < 0, "fp16": change > 0}
    holds = all(bool(lead[precision][precision]) for precision in change.index)
    texts = ", ".join(f"{signed(value, 1)} % in {precision.upper()}" for precision, value in change.items())
    return f"error of {named(cells, model, against)}: {texts}", (None if holds and len(change) < len(lead) else holds)


def order_at_every_depth(cells: pandas.DataFrame, model: str, against: str) -> Outcome:
    """`model` has the lower error than `against` in every cell of depth and precision."""
    change = change_against(cells, model, against)
    if change.empty:
        return None
    worse = [f"B = {depth:.0f} {precision}" for (_, depth, precision), value in change.items() if value >= 0]
    where = f"; not at {', '.join(worse)}" if worse else ""
    return f"lower in {(change < 0).sum()} of {len(change)} cells, {changes(change)}{where}", not worse


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
    return f"error {signed(change.iloc[0])} % from FP32 to FP16", bool(abs(change.iloc[0] - percent) <= tolerance)


def _pairs(cells: pandas.DataFrame, model: str, against: str) -> pandas.DataFrame:
    """The errors of two models wherever both have one, a row per dataset, depth and latents, in this order."""
    table = cells.pivot_table(index=["dataset", "num_blocks", "num_latents"], columns="model", values="mean")
    return table.reindex(columns=[against, model]).dropna()


def _latents(grid: pandas.DataFrame) -> list[float]:
    return sorted(grid.index.get_level_values("num_latents").unique())


def _listed(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.0f}" for value in values)


def _names(cells: pandas.DataFrame, models: Iterable[str]) -> list[tuple[str, str]]:
    """(model, label) of each of `models`."""
    labels = cells.drop_duplicates("model").set_index("model")["label"]
    return [(name, labels[name]) for name in models]


def _won(table: pandas.DataFrame, one: tuple, other: tuple) -> pandas.Series:
    """Whether a configuration (model, depth) has the lower error than another, wherever both have one."""
    if not {one, other} <= set(table):
        return pandas.Series(dtype=bool)
    both = table[[one, other]].dropna()
    return both[one] < both[other]


def _precision_change(cells: pandas.DataFrame) -> pandas.Series:
    """Relative change in % from FP32 to FP16 wherever both have a value."""
    table = by(cells, "precision")
    if not {"fp32", "fp16"} <= set(table):
        return pandas.Series(dtype=float)
    return (100 * (table["fp16"] / table["fp32"] - 1)).dropna()
