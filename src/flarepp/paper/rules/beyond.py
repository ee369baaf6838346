"""What is measured beyond the paper. No rule here judges: the second value of an outcome is always None."""

from __future__ import annotations

import pandas

from flarepp.paper.rules.words import Outcome, change_against, count_of, labels, signed


def mean_change(cells: pandas.DataFrame, model: str, against: str) -> Outcome:
    """By how much the error of `model` differs from that of `against`, on every dataset and on average."""
    change = change_against(cells, model, against)
    if change.empty:
        return None
    parts = [f"{name} {signed(value, 1)} %" for name, value in zip(labels(cells, change), change)]
    return f"error {signed(change.mean(), 1)} % on average: {', '.join(parts)}", None


def seed_spread(cells: pandas.DataFrame) -> Outcome:
    """The standard deviations over seeds in percent of the mean error, of trained models that have one."""
    several = cells[cells["std"].notna() & (cells["role"] != "trivial")]
    if several.empty:
        return None
    share = 100 * several["std"] / several["mean"]
    widest = several.loc[share.idxmax()]
    seeds = " to ".join(dict.fromkeys(str(count) for count in (several["n"].min(), several["n"].max())))
    measured = f"± {share.median():.1f} % of the error (median of {count_of(len(share), 'cell')}, {seeds} seeds), at most"
    return f"{measured} {share.max():.1f} % ({widest['label']} on {widest['dataset_label']})", None


def selection_gain(cells: pandas.DataFrame) -> Outcome:
    """By how much the error of `best_test` is below those at the end of the same runs."""
    there = cells.dropna(subset=["best_test", "last", "ema"])
    if there.empty:
        return None
    gains = {name: 100 * (1 - there["best_test"] / there[name]) for name in ("last", "ema")}
    words = {"last": "last", "ema": "averaged"}
    texts = [f"{each.mean():.1f} % below the {words[name]} weights' ({each.min():.1f} to {each.max():.1f})"
             for name, each in gains.items()]  # fmt: skip
    return f"{', '.join(texts)}, over {count_of(len(there), 'configuration')}", None


def half_the_blocks(cells: pandas.DataFrame) -> Outcome:
    """Error and time of FLARE++ over those of FLARE with twice the blocks."""
    if cells.empty:
        return None
    texts = []
    for (name, blocks), rows in cells.groupby(["dataset_label", "num_blocks"], sort=False):
        time = f", time a step {signed(rows['time'].mean())} %" if rows["time"].notna().any() else ""
        latents = ", ".join(f"{each:.0f}" for each in rows["num_latents"])
        error = f"error {signed(rows['change'].mean(), 1)} %"
        texts.append(f"{name} B = {blocks / 2:.0f} against {blocks:.0f} (M = {latents}): {error}{time}")
    devices = ", ".join(dict.fromkeys(device for device in cells["device"] if device)) or "an unknown device"
    return f"{'; '.join(texts)}; on {devices}", None
