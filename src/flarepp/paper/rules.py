"""The rules that decide claims: every public function here can be named as `rule` in claims.yaml.

A rule gets the cells a claim needs (a DataFrame with dataset, model, num_blocks, precision, dataset_label and
mean, the error in %; only cells with a value; one constant on axes the claim does not name) and the claim's
parameters; of suite table2 the rows of `scaling.efficiencies`. It returns (what was measured, whether the claim
holds, None where nothing speaks against it but too little was compared), or None when too few cells are there to
say anything. It knows nothing of scales, data sources or missing runs.
"""

from __future__ import annotations

import pandas

Outcome = tuple[str, bool | None] | None
PLACE = ["dataset", "num_blocks", "precision"]
BYTES = 4  # of a number that ranks exchange: FP32, whatever the precision


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


def efficiency_within(cells: pandas.DataFrame, kind: str, low: float, high: float = float("inf")) -> Outcome:
    """Every "time" or "memory" efficiency on two ranks or more, rounded to two digits, is at least `low`, at most `high`."""
    name = f"{kind}_efficiency"
    rows = cells[(cells["num_ranks"] > 1) & cells[name].notna()]
    if rows.empty:
        return None
    rounded = rows[name].map("{:.2f}".format).astype(float)
    shared = int(rows["shared_cores"].astype(bool).sum())
    among = f", {shared} of them on shared cores" if shared else ""
    return f"{_span(rounded)} over {_count(len(rows), 'row')}{among}", bool(rounded.between(low, high).all())


def latents_agree(cells: pandas.DataFrame, time_percent: float, memory_percent: float) -> Outcome:
    """Efficiencies of runs that differ in their latents alone differ by at most these percent of the smaller one."""
    shares = {"time": time_percent, "memory": memory_percent}
    groups = cells[cells["num_ranks"] > 1].groupby(["model", "num_tokens", "num_ranks"], sort=False)
    texts, holds = [], True
    for kind, percent in shares.items():
        several = [values for _, values in groups[f"{kind}_efficiency"] if len(values.dropna()) > 1]
        if not several:
            return None
        largest = max(100 * (values.max() / values.min() - 1) for values in several)
        texts.append(f"{largest:.1f} % in {kind}")
        holds = holds and largest <= percent
    return f"at most {' and '.join(texts)}, over {_count(len(several), 'setting')}", bool(holds)


def payload(
    cells: pandas.DataFrame, encoders: dict[str, int], model: str, against: str, forward: dict, backward: dict
) -> Outcome:
    """A rank hands in what the encoders of its blocks exchange and nothing else, the same at every N, and for `model` as
    many times `against`'s as it has `encoders`.

    forward, backward: `collectives` of one encoder, and the `scalars` that travel with the D numbers of a latent.
    """
    rows = cells[(cells["num_ranks"] > 1) & cells["forward_bytes"].notna()]
    if rows.empty:
        return None
    count, right = rows["model"].map(encoders), pandas.Series(True, index=rows.index)
    for name, each in {"forward": forward, "backward": backward}.items():
        right &= rows[f"{name}_collectives"] == count * rows["blocks"] * each["collectives"]
        right &= rows[f"{name}_bytes"] == count * rows["latent_rows"] * (rows["head_dim"] + each["scalars"]) * BYTES
    sent = rows.assign(bytes=rows["forward_bytes"] + rows["backward_bytes"])
    sizes = sent.groupby(["model", "num_latents", "num_ranks"], sort=False)["bytes"].agg(["nunique", "size"])
    sizes = sizes[sizes["size"] > 1]
    table = sent.pivot(index=["num_tokens", "num_latents", "num_ranks"], columns="model", values="bytes")
    ratios = (table[model] / table[against]).dropna() if {model, against} <= set(table) else pandas.Series(dtype=float)
    same, twice = sizes["nunique"] == 1, ratios == encoders[model] / encoders[against]
    texts = [f"{right.sum()} of {_count(len(rows), 'row')} as the formula says"]
    texts.append(f"the same at every N in {same.sum()} of {_count(len(same), 'setting')}" if len(same) else "at one N only")
    if len(ratios):
        labels = rows.set_index("model")["label"]
        span = " to ".join(dict.fromkeys(f"{ratio:.4g}" for ratio in (ratios.min(), ratios.max())))
        texts.append(f"{labels[[model]].iloc[0]} over {labels[[against]].iloc[0]} {span}")
    holds = bool(right.all() and same.all() and twice.all())
    return ", ".join(texts), (None if holds and not (len(same) and len(twice)) else holds)


def above_one(cells: pandas.DataFrame, count: int) -> Outcome:
    """`count` of the efficiencies, of time and of memory, exceed unity."""
    found = [
        f"{row['label']}, N = {row['num_tokens']:,}, R = {row['num_ranks']}: {row[name]:.2f} in {name.split('_')[0]}"
        for name in ("time_efficiency", "memory_efficiency")
        for _, row in cells[cells[name] > 1].iterrows()
    ]
    return f"{_count(len(found), 'entry', 'entries')}{': ' if found else ''}{'; '.join(found)}", len(found) == count


def _span(values: pandas.Series) -> str:
    return " to ".join(dict.fromkeys(f"{value:.2f}" for value in (values.min(), values.max())))


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or f'{one}s'}"


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
