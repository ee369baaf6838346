"""Context parallelism: from records of suite "table2" to efficiencies, the one place that computes them.

    time efficiency T_1 / (R T_R)        memory efficiency P_1 / (R P_R)

with T_R the step time and P_R the peak memory of a rank on R ranks, both against the same model, N and M on one rank.
"""

from __future__ import annotations

import numpy
import pandas

from flarepp.paper import measured, quoted

SUITE = "table2"
KEYS = ["model", "num_tokens", "num_latents", "num_ranks"]
METRICS = [
    "step_ms",  # median over the timed steps of the slowest rank's step
    "step_ms_low",
    "step_ms_high",
    "steps",
    "peak_memory_mb",  # MiB, the largest over the ranks
    "parameter_count",
    "forward_collectives",  # from here on one rank's, in one step, by the mixers of all blocks
    "forward_bytes",
    "backward_collectives",
    "backward_bytes",
    "loss_collectives",
    "gradient_collectives",
    "cores",
]
EFFICIENCIES = {"time_efficiency": "step_ms", "memory_efficiency": "peak_memory_mb"}
SETTINGS = {  # what the spec of a run says: our column: (section, key)
    "blocks": ("model", "num_blocks"),
    "channel_dim": ("model", "channel_dim"),
    "num_heads": ("model", "num_heads"),
    "ffn_ratio": ("model", "ffn_ratio"),
    "batch_size": ("scaling", "batch_size"),
    "num_threads": ("scaling", "num_threads"),
}
COLUMNS = [
    *KEYS, *measured.COLUMNS, *measured.OF_MACHINE, *SETTINGS, "latent_rows", "head_dim", *METRICS, "shared_cores",
    *EFFICIENCIES,
]  # fmt: skip


def efficiencies(records: pandas.DataFrame) -> pandas.DataFrame:
    """One row per model, N, M and R in record order, with COLUMNS.

    What `measured.rows` says of a run; latent_rows, the latents of all heads, samples and blocks; head_dim; shared_cores,
    whether the ranks had fewer CPU cores than threads; time_efficiency and memory_efficiency, NaN on one rank, and where
    this run or the one on one rank has no such number. ValueError and FileNotFoundError as there.
    """
    frame = measured.rows(records, SUITE, KEYS, METRICS, SETTINGS)
    if frame.empty:
        return pandas.DataFrame(columns=COLUMNS)
    frame["latent_rows"] = frame["blocks"] * frame["batch_size"] * frame["num_heads"] * frame["num_latents"]
    frame["head_dim"] = frame["channel_dim"] // frame["num_heads"]
    on_cpu = (frame["n"] == 1) & (frame["device_type"] == "cpu")
    frame["shared_cores"] = on_cpu & (frame["num_ranks"] * frame["num_threads"] > frame["cores"])
    for name, metric in EFFICIENCIES.items():
        frame[name] = _against_one_rank(frame, metric)
    return frame[COLUMNS]


def _against_one_rank(frame: pandas.DataFrame, metric: str) -> list[float]:
    """X_1 / (R X_R) of every row; what is not above zero was too small to be measured."""
    values = frame[metric].where(frame[metric] > 0)
    rows = [tuple(row) for row in frame[KEYS[:-1]].itertuples(index=False)]
    single = {row: value for row, ranks, value in zip(rows, frame["num_ranks"], values) if ranks == 1}
    return [numpy.nan if ranks == 1 else single.get(row, numpy.nan) / (ranks * value)
            for row, ranks, value in zip(rows, frame["num_ranks"], values)]


def printed() -> pandas.DataFrame:
    """The paper's own Table 2 in the same shape, so that the rules can be applied to what it prints."""
    names = {row["paper"]: row["name"] for row in quoted.rows("names") if row["kind"] == "model"}
    rows = [
        {
            "model": names[row["model"]],
            "label": row["model"],
            "num_tokens": int(row["num_tokens"]),
            "num_latents": quoted.TABLE2_LATENTS,
            "num_ranks": int(row["num_ranks"]),
            "shared_cores": False,
        }
        | {name: float(row[name]) for name in EFFICIENCIES}
        for row in quoted.rows("table2")
    ]
    return pandas.DataFrame(rows, columns=COLUMNS)
