"""Claims about what steps take: Table 2, Figure 5, operation counts."""

from __future__ import annotations

import pandas

from flarepp.paper import cost
from flarepp.paper.rules.words import Outcome, count_of, named, span

EXACT = 1e-3  # relative; work that does not grow with N is a part of a count that a formula leaves out
BYTES = 4  # of a number that ranks exchange: FP32, whatever the precision


def efficiency_within(cells: pandas.DataFrame, kind: str, low: float, high: float = float("inf")) -> Outcome:
    """Every "time" or "memory" efficiency on two ranks or more, rounded to two digits, is at least `low`, at most `high`."""
    name = f"{kind}_efficiency"
    rows = cells[(cells["num_ranks"] > 1) & cells[name].notna()]
    if rows.empty:
        return None
    rounded = rows[name].map("{:.2f}".format).astype(float)
    shared = int(rows["shared_cores"].astype(bool).sum())
    among = f", {shared} of them on shared cores" if shared else ""
    return f"{span(rounded)} over {count_of(len(rows), 'row')}{among}", bool(rounded.between(low, high).all())


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
    return f"at most {' and '.join(texts)}, over {count_of(len(several), 'setting')}", bool(holds)


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
    texts = [f"{right.sum()} of {count_of(len(rows), 'row')} as the formula says"]
    texts.append(f"the same at every N in {same.sum()} of {count_of(len(same), 'setting')}" if len(same) else "at one N only")
    if len(ratios):
        span = " to ".join(dict.fromkeys(f"{ratio:.4g}" for ratio in (ratios.min(), ratios.max())))
        texts.append(f"{named(rows, model, against)} {span}")
    holds = bool(right.all() and same.all() and twice.all())
    return ", ".join(texts), (None if holds and not (len(same) and len(twice)) else holds)


def above_one(cells: pandas.DataFrame, count: int) -> Outcome:
    """`count` of the efficiencies, of time and of memory, exceed unity."""
    found = [
        f"{row['label']}, N = {row['num_tokens']:,}, R = {row['num_ranks']}: {row[name]:.2f} in {name.split('_')[0]}"
        for name in ("time_efficiency", "memory_efficiency")
        for _, row in cells[cells[name] > 1].iterrows()
    ]
    return f"{count_of(len(found), 'entry', 'entries')}{': ' if found else ''}{'; '.join(found)}", len(found) == count


def arithmetic_ratio(
    cells: pandas.DataFrame, model: str, against: str, formulas: dict[str, list[int]], ratio: float, tolerance: float
) -> Outcome:
    """The multiply-adds counted in the mixers of two models are a C² + b M C with their [a, b] of `formulas`, and their
    ratios within `tolerance` of `ratio`."""
    ratios = cost.over(cells, "mixer_multiply_adds", model, against)
    if ratios.empty:
        return None
    squares, calls = (cells["model"].map({name: pair[place] for name, pair in formulas.items()}) for place in (0, 1))
    width = cells["channel_dim"]
    stated = squares * width**2 + calls * cells["num_latents"] * width
    right = (cells["mixer_multiply_adds"] / stated - 1).abs() < EXACT
    measured = f"{right.sum()} of {count_of(len(cells), 'count')} as the formula says"
    measured += f", {named(cells, model, against)} {span(ratios)}"
    return measured, bool(right.all() and (ratios - ratio).abs().max() <= tolerance)


def steady_ratio(
    cells: pandas.DataFrame, model: str, against: str, low: float, high: float, beyond: int, flat_percent: float
) -> Outcome:
    """From N = `beyond` on, the ratios of two models' step times lie, rounded to one digit, from `low` to `high`, change by
    at most `flat_percent` along N, are largest at the smallest M on average, and below those of their multiply-adds."""
    ratios = cost.over(cells, "step_ms", model, against).unstack()
    if ratios.empty:
        return None
    far = ratios[ratios.index >= beyond]
    if far.empty:
        return f"{span(ratios.stack())} over {count_of(ratios.count().sum(), 'cell')}, none of N ≥ {beyond:,}", None
    counted = cost.over(cells, "mixer_multiply_adds", model, against).unstack().reindex_like(far)
    below, changes = (far < counted)[far.notna()].stack(), (100 * (far.max() / far.min() - 1))[far.count() > 1]
    first = far.mean().idxmax() == far.columns.min()
    flat = f"changing by at most {changes.max():.1f} % along N" if len(changes) else "at one N"
    order = f"largest at M = {far.mean().idxmax():.0f}" if far.shape[1] > 1 else "at one M"
    within = far.stack().round(1).between(low, high).all() and (changes <= flat_percent).all()
    holds = bool(within and first and below.all())
    measured = f"{span(far.stack())} over {count_of(len(below), 'cell')} of N ≥ {beyond:,}, {flat}, {order}"
    measured += f", below the arithmetic ratio in {below.sum():.0f}"
    return measured, (None if holds and (changes.empty or far.shape[1] == 1) else holds)


def times_slower(cells: pandas.DataFrame, model: str, against: str, low: float, high: float) -> Outcome:
    """A step of `model` takes from `low` to `high` times as long as one of `against` at every M of the largest N of both."""
    ratios = _at_largest(cost.over(cells, "step_ms", model, against))
    if ratios.empty:
        return None
    factors = " to ".join(dict.fromkeys(f"{value:.3g}" for value in (ratios.min(), ratios.max())))
    return f"{factors} times, {_places(ratios)}", bool(ratios.between(low, high).all())


def less_memory_and_linear(cells: pandas.DataFrame, model: str, against: str, percent: float) -> Outcome:
    """`model` needs less memory than `against` at every M of the largest N of both, and no peak of any line lies more than
    `percent` of the line's largest beside a straight line in N."""
    ratios = _at_largest(cost.over(cells, "peak_memory_mb", model, against))
    if ratios.empty:
        return None
    fits = [found for _, rows in cost.lines(cells.drop_duplicates("runs")) if (found := cost.fit(rows)) is not None]
    beside = max((found[2].abs().max() for found in fits), default=0.0)
    holds = bool((ratios < 1).all() and beside <= percent)
    linear = f"{count_of(len(fits), 'line')} in N straight to {beside:.1f} %" if fits else "too few N for a line"
    measured = f"{named(cells, model, against)} {span(ratios)}, {_places(ratios)}; {linear}"
    return measured, (None if holds and not fits else holds)


def ratio_about(cells: pandas.DataFrame, metric: str, model: str, against: str, value: float, tolerance: float) -> Outcome:
    """Every ratio of a metric of two models is within `tolerance` of `value`."""
    ratios = cost.over(cells, metric, model, against)
    if ratios.empty:
        return None
    return f"{span(ratios)} over {count_of(len(ratios), 'cell')}", bool((ratios - value).abs().max() <= tolerance)


def ratio_by_latents(
    cells: pandas.DataFrame, metric: str, model: str, against: str, values: dict[int, float], percent: float
) -> Outcome:
    """At the largest N of both, the ratio of a metric of two models is within `percent` of the value stated for each M."""
    ratios = _at_largest(cost.over(cells, metric, model, against))
    if ratios.empty:
        return None
    ratios = ratios.droplevel("num_tokens")
    shares = [abs(ratios[each] / value - 1) for each, value in values.items() if each in ratios]
    holds = all(100 * share <= percent for share in shares)
    found = ", ".join(f"{value:.2f} at M = {each:.0f}" for each, value in ratios.items())
    tokens = _at_largest(cost.over(cells, metric, model, against)).index[0][0]
    return f"{found} (N = {tokens:,.0f})", (None if holds and len(shares) < len(values) else holds)


def same_at_every_latents(cells: pandas.DataFrame, metric: str, percent: float) -> Outcome:
    """A metric of a model differs by at most `percent` between the M of every N."""
    several = [rows for _, rows in cells[cells[metric] > 0].groupby(["model", "num_tokens"])[metric] if len(rows) > 1]
    if not several:
        return None
    largest = max(100 * (rows.max() / rows.min() - 1) for rows in several)
    return f"at most {largest:.1f} % apart at {count_of(len(several), 'number')} of tokens", bool(largest <= percent)


def beyond_device(cells: pandas.DataFrame, device_mb: float) -> Outcome:
    """The largest cell takes more than `device_mb`: it ran out of memory where there is as much, or its peak is higher."""
    if cells.empty:
        return None
    cell = cells.sort_values(["num_tokens", "num_latents"]).iloc[-1]
    where = f"at N = {cell['num_tokens']:,.0f}, M = {cell['num_latents']:.0f}"
    if cell["status"] == "ok":
        return f"{cost.mebibytes(cell['peak_memory_mb'])} {where}", bool(cell["peak_memory_mb"] > device_mb)
    there = cell["device_memory_mb"]
    size = "an unknown size" if pandas.isna(there) else cost.mebibytes(there)
    return f"out of memory {where}, of {size}", (True if there >= device_mb else None)


def same_harness(cells: pandas.DataFrame, memory: dict[str, float], memory_percent: float, time_percent: float) -> Outcome:
    """The peak on one rank over that of the cost study is within `memory_percent` of what `memory` states of each model, and
    the step time within `time_percent` of the same, compared where the threads are equal."""
    if cells.empty:  # without the columns of Table 2 then
        return None
    there = (cells[["peak_memory_mb", "peak_memory_mb_alone"]] > 0).all(axis=1)
    peaks = (cells["peak_memory_mb_alone"] / cells["peak_memory_mb"])[there]
    equal = (cells["num_threads"] == cells["num_threads_alone"]) | (cells["device_type"] == "cuda")
    times = (cells["step_ms_alone"] / cells["step_ms"])[equal]
    texts = []
    for _, rows in cells.groupby("model", sort=False):
        found = {"memory": peaks[peaks.index.isin(rows.index)], "time": times[times.index.isin(rows.index)]}
        parts = [f"{span(values)} in {name}" for name, values in found.items() if len(values)]
        texts += [f"{rows.iloc[0]['label']} {' and '.join(parts)}"] if parts else []
    if not texts:
        return None
    stated = cells["model"].map(memory)[peaks.index]
    holds = (100 * (peaks / stated - 1).abs() <= memory_percent).all() and (100 * (times - 1).abs() <= time_percent).all()
    complete = len(peaks) == len(times) == len(cells)
    return f"{', '.join(texts)}, over {count_of(len(cells), 'pair')}", (None if holds and not complete else bool(holds))


def _at_largest(ratios: pandas.Series) -> pandas.Series:
    """The part of a series by (N, M) at the largest N."""
    return ratios[ratios.index.get_level_values("num_tokens") == ratios.index.get_level_values("num_tokens").max()]


def _places(ratios: pandas.Series) -> str:
    """Where ratios at one N were taken: "N = 500,000, M = 64, 128"."""
    latents = ", ".join(f"{each:.0f}" for each in ratios.index.get_level_values("num_latents"))
    return f"N = {ratios.index[0][0]:,.0f}, M = {latents}"
