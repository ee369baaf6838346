"""The cost study: from records of suite "figure5" to its cells, the ratios and fits that tables, figure and claims share.

A cell is one model at N tokens and M latents: time and peak memory of a step. Ratios are between models at the same N and M,
and a line is one model at one M over all N.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy
import pandas

from flarepp.paper import measured, quoted, scaling

SUITE = "figure5"
HARNESS = "harness"  # the cells of SUITE beside those of Table 2 on one rank
PARTS = {HARNESS: (SUITE, scaling.SUITE)}
REFERENCE = "flare"  # what other models are compared with
KEYS = ["model", "num_tokens", "num_latents"]  # num_latents is NaN for a model that has none
METRICS = [
    "step_ms",  # median over the timed steps
    "step_ms_low",
    "step_ms_high",
    "steps",
    "first_step_ms",  # the first call, with what is compiled there
    "peak_memory_mb",  # MiB above the idle process
    "parameter_count",
    "cores",
    "mixer_multiply_adds",  # of a block and token, counted at this N
    "model_multiply_adds",  # of one forward pass
]
KNOWN = ["mixer_multiply_adds", "model_multiply_adds", "predicted_ms", "asked_mb"]  # of cells without a result too
SIZES = {  # what two measurements share that differ in nothing but how they were made: our column: (section, key)
    "blocks": ("model", "num_blocks"),
    "channel_dim": ("model", "channel_dim"),
    "num_heads": ("model", "num_heads"),
    "ffn_ratio": ("model", "ffn_ratio"),
    "batch_size": ("cost", "batch_size"),
}
SETTINGS = SIZES | {
    "num_threads": ("cost", "num_threads"),
    "warmup_steps": ("cost", "warmup_steps"),
    "compile": ("cost", "compile"),
}
OF_RUN = ("operations", "attention", "device_memory_mb")  # of the provenance of a cell
FEWEST = 3  # points that a straight line is fitted to


def cells(records: pandas.DataFrame) -> pandas.DataFrame:
    """One row per cell in record order, as `measured.rows` describes it, with KEYS, METRICS, KNOWN, SETTINGS and OF_RUN.

    operations is the formula of the mixer's multiply-adds per block and token as text, "" without one; reason says how much
    memory was asked for, where that is known.
    """
    frame = measured.rows(records, SUITE, KEYS, METRICS, SETTINGS, KNOWN, OF_RUN)
    frame["operations"] = frame["operations"].fillna("")
    frame["device_memory_mb"] = pandas.to_numeric(frame["device_memory_mb"], errors="coerce")
    asked = [f" (asked for {mebibytes(size)})" if size > 0 else "" for size in frame["asked_mb"]]
    frame["reason"] += pandas.Series(asked, index=frame.index, dtype=object).where(frame["n"] == 0, "")
    return frame


def lines(frame: pandas.DataFrame) -> Iterator[tuple[tuple, pandas.DataFrame]]:
    """Yield ((model, M), its cells by N) of every line in order of appearance; M is NaN for a model without latents."""
    for keys, rows in frame.groupby(["model", "num_latents"], sort=False, dropna=False):
        yield keys, rows.sort_values("num_tokens")


def line_name(rows: pandas.DataFrame) -> str:
    """A line in words: "FLARE, M = 64"."""
    first = rows.iloc[0]
    return first["label"] if pandas.isna(first["num_latents"]) else f"{first['label']}, M = {first['num_latents']:.0f}"


def over(frame: pandas.DataFrame, metric: str, model: str, against: str = REFERENCE) -> pandas.Series:
    """`metric` of a model over that of another by (N, M), where both were measured, in ascending order.

    What is not above zero was too small to be measured.
    """
    values = frame.assign(value=frame[metric].where(frame[metric] > 0)).dropna(subset=["value", "num_latents"])
    of = {name: rows.set_index(KEYS[1:])["value"] for name, rows in values.groupby("model")}
    if not {model, against} <= of.keys():
        index = pandas.MultiIndex.from_tuples([], names=KEYS[1:])
        return pandas.Series(index=index, dtype=float)
    return (of[model] / of[against]).dropna().sort_index()


def ratios(frame: pandas.DataFrame, metric: str) -> pandas.Series:
    """`metric` of every cell over REFERENCE's at the same N and M; NaN where there is no such pair."""
    found: dict[tuple, float] = {}
    for model in frame["model"].unique():
        found |= {(model, *place): value for place, value in over(frame, metric, model).items()}
    places = frame[KEYS].itertuples(index=False, name=None)
    return pandas.Series([found.get(tuple(place), numpy.nan) for place in places], index=frame.index, dtype=float)


def fit(rows: pandas.DataFrame) -> tuple[float, float, pandas.Series] | None:
    """The straight line a + b N through the peak memory of a line's cells by least squares: a (MiB), b (MiB a token), and
    by how many percent of its largest cell each lies beside it. None for fewer than FEWEST cells."""
    there = rows[rows["peak_memory_mb"] > 0]
    if len(there) < FEWEST:
        return None
    slope, start = numpy.polyfit(there["num_tokens"], there["peak_memory_mb"], 1)
    beside = there["peak_memory_mb"] - (start + slope * there["num_tokens"])
    return float(start), float(slope), 100 * beside / there["peak_memory_mb"].max()


def at_every_latents(frame: pandas.DataFrame) -> pandas.DataFrame:
    """The cells as claims compare them: those of a model without latents at every M of the others.

    has_latents tells which M is the model's own.
    """
    own = frame["num_latents"].notna()
    frame = frame.assign(has_latents=own)
    latents = frame.loc[own, "num_latents"].unique() if own.any() else [0]
    return pandas.concat([frame[own], *(frame[~own].assign(num_latents=each) for each in latents)])


def harness(records: pandas.DataFrame) -> pandas.DataFrame:
    """The cells that Table 2 has on one rank too, at the same sizes, precision and device: cells with Table 2's columns
    "<name>_alone" beside theirs. A pair is what the worse of the two is."""
    ours, alone = cells(records), scaling.efficiencies(records)
    if ours.empty or alone.empty:
        return ours.iloc[:0]
    same = [*KEYS, *SIZES, "precision", *measured.OF_MACHINE]
    pairs = ours.merge(alone[alone["num_ranks"] == 1], on=same, suffixes=("", "_alone"))
    worse = pairs["n"] > pairs["n_alone"]
    for name in ("n", "status", "reason"):
        pairs[name] = pairs[name].mask(worse, pairs[f"{name}_alone"])
    pairs["runs"] = [ours + theirs for ours, theirs in zip(pairs["runs"], pairs["runs_alone"])]
    return pairs


def printed(width: int = 128, latents: Iterable[int] = (64, 128, 256)) -> pandas.DataFrame:
    """The paper's own operation counts as cells, so that the rules can be applied to what it prints."""
    names = {row["paper"]: row["name"] for row in quoted.rows("names") if row["kind"] == "model"}
    rows = [
        {"model": names[row["model"]], "label": row["model"], "num_tokens": 0, "num_latents": each, "channel_dim": width}
        | {"mixer_multiply_adds": counted[1]}
        for row in quoted.rows("operations")
        for each in latents
        if (counted := quoted.operations(names[row["model"]], width, each))
    ]
    return pandas.DataFrame(rows)


def mebibytes(size: float) -> str:
    """A size in MiB in words: "512 MiB", "9.54 GiB"."""
    return f"{size:.3g} MiB" if size < 999.5 else f"{size / 1024:.3g} GiB"


def seconds(milliseconds: float) -> str:
    """A time in words: "8.3 ms", "83 s"."""
    return f"{milliseconds:.3g} ms" if milliseconds < 999.5 else f"{milliseconds / 1000:.3g} s"


def how(frame: pandas.DataFrame) -> str:
    """How the cells that ended well were made, in words."""
    good = frame[frame["n"] > 0]
    if good.empty:
        return "No cell was measured."
    steps = " to ".join(dict.fromkeys(f"{count:.0f}" for count in (good["steps"].min(), good["steps"].max())))
    on_cpu = (good["device_type"] == "cpu").any()
    threads = f", CPU threads: {measured.values(good, 'num_threads')}" if on_cpu else ""
    devices = ", ".join(good["device"].unique())
    compiled = ", compiled" if good["compile"].astype(bool).all() else ""
    return (
        "A step is a forward and a backward pass on random tokens with the loss and without an optimiser; its time is the"
        f" median{' (quartiles)' if steps != '1' else ''} over {steps} step{'s' if steps != '1' else ''} after a warm-up, on {devices}."
        f" {measured.sizes(good)}{threads}{compiled}. Peak memory: {measured.memory(good)}."
    )
