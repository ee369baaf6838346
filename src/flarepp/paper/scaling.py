"""Context parallelism: from records of suite "table2" to efficiencies, the one place that computes them.

    time efficiency T_1 / (R T_R)        memory efficiency P_1 / (R P_R)

with T_R the step time and P_R the peak memory of a rank on R ranks, both against the same model, N and M on one rank.
"""

from __future__ import annotations

from pathlib import Path

import numpy
import pandas

from flarepp.paper import quoted
from flarepp.paper.cells import WORDS, metrics_of
from flarepp.record import read_run

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
    *KEYS, "dataset", "dataset_label", "label", "role", "precision", "status", "reason", "failed", "n", "data_source",
    "runs", "device", "device_type", *SETTINGS, "latent_rows", "head_dim", *METRICS, "shared_cores", *EFFICIENCIES,
]  # fmt: skip


def efficiencies(records: pandas.DataFrame) -> pandas.DataFrame:
    """One row per model, N, M and R in record order, with COLUMNS.

    KEYS, label and role; status ("ok" or what an empty cell is called) and reason (the same with the run's own words);
    n (1 for a run that ended well, else 0), failed (always "": there is one run a row), runs (tuple of its folder);
    METRICS (NaN unless the run ended well); SETTINGS, device and device_type from the run's folder; latent_rows, the
    latents of all heads, samples and blocks; head_dim; shared_cores, whether the ranks had fewer CPU cores than threads;
    time_efficiency and memory_efficiency, NaN on one rank, and where this run or the one on one rank has no such number.
    ValueError for two runs of one row, or a run that ended well and lacks a metric; FileNotFoundError when a run folder
    named in the records is gone.
    """
    chosen = records[records["suite"] == SUITE]
    if chosen.empty:
        return pandas.DataFrame(columns=COLUMNS)
    rows = [_row(dict(zip(KEYS, keys)), group) for keys, group in chosen.groupby(KEYS, sort=False, dropna=False)]
    frame = pandas.DataFrame(rows)
    for name, metric in EFFICIENCIES.items():
        frame[name] = _against_one_rank(frame, metric)
    return frame[COLUMNS]


def _row(keys: dict, rows: pandas.DataFrame) -> dict:
    """One run as a row, without its efficiencies."""
    first, where = rows.iloc[0], ", ".join(f"{key} {value}" for key, value in keys.items())
    if rows["run"].nunique(dropna=False) > 1:
        raise ValueError(f"table2: more than one run of {where}: {', '.join(map(str, rows['run'].unique()))}")
    values = metrics_of(rows)
    good = first["status"] == "ok"
    if good and (missing := [name for name in METRICS if name not in values]):
        raise ValueError(f"{first['run']}: status ok, but no metric {missing}; it has {sorted(values.index)}")
    run = "" if pandas.isna(first["run"]) else first["run"]
    status = WORDS.get(first["status"], first["status"])
    row = keys | {name: float(values[name]) if good else numpy.nan for name in METRICS}
    row |= {"dataset": "", "dataset_label": ""} | {name: first[name] for name in ("label", "role", "precision")}
    row |= {"status": status, "reason": status, "failed": "", "n": int(good), "runs": (run,) if run else ()}
    row |= {"data_source": "" if pandas.isna(first["data_source"]) else first["data_source"]}
    return row | _from_folder(run, row)


def _from_folder(run: str, row: dict) -> dict:
    """What the records do not hold of a run: settings, device, why it did not run, and what follows from them."""
    empty = dict.fromkeys([*SETTINGS, "latent_rows", "head_dim"], numpy.nan)
    if not run:
        return empty | {"device": "", "device_type": "", "shared_cores": False}
    spec, result = read_run(Path(run))
    found = {name: spec[section][key] for name, (section, key) in SETTINGS.items()}
    found["latent_rows"] = found["blocks"] * found["batch_size"] * found["num_heads"] * row["num_latents"]
    found["head_dim"] = found["channel_dim"] // found["num_heads"]
    provenance = result.get("provenance", {})
    found |= {name: provenance.get(name, "") for name in ("device", "device_type")}
    on_cpu = row["n"] == 1 and found["device_type"] == "cpu"
    found["shared_cores"] = on_cpu and row["num_ranks"] * found["num_threads"] > row["cores"]
    if row["status"] == "not run" and result.get("message"):
        found["reason"] = f"not run: {result['message'].rstrip('.')}"
    return found


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
