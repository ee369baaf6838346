"""Claims about the sweeps of Figures 3 and 4: depth, latent budget, precision."""

from __future__ import annotations

import pandas

from flarepp.paper.rules.words import Outcome, by, change_against, signed


def order_at_every_depth(cells: pandas.DataFrame, model: str, against: str) -> Outcome:
    """`model` has the lower error than `against` in every cell of depth and precision."""
    change = change_against(cells, model, against)
    if change.empty:
        return None
    worse = [f"B = {depth:.0f} {precision}" for (_, depth, precision), value in change.items() if value >= 0]
    where = f"; not at {', '.join(worse)}" if worse else ""
    span = f"change {signed(change.min())} to {signed(change.max())} %"
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
    return f"{signed(change.iloc[0])} %", bool(abs(change.iloc[0] - percent) <= tolerance)


def _precision_change(cells: pandas.DataFrame) -> pandas.Series:
    """Relative change in % from FP32 to FP16 wherever both have a value."""
    table = by(cells, "precision")
    if not {"fp32", "fp16"} <= set(table):
        return pandas.Series(dtype=float)
    return (100 * (table["fp16"] / table["fp32"] - 1)).dropna()
