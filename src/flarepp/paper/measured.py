"""One row a run for the suites that measure steps on random tokens: its metrics, its settings, and why it has none.

What Table 2 (scaling.py) and the cost study (cost.py) share; neither has seeds to average.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy
import pandas

from flarepp.paper import settings as specs
from flarepp.paper.cells import WORDS, metrics_of
from flarepp.paper.typeset import plain, three_digits
from flarepp.record import read_run

OF_MACHINE = ("device", "device_type")  # of the provenance of every run
COLUMNS = (
    "dataset",
    "dataset_label",
    "label",
    "role",
    "precision",
    "status",
    "reason",
    "failed",
    "n",
    "data_source",
    "runs",
)
MEMORY = {
    "cpu": "the peak resident set above the idle process in a first step, while freed memory returns to the system at once",
    "cuda": "the peak allocated memory of the device",
}


def rows(
    records: pandas.DataFrame, suite: str, keys: list[str], metrics: list[str], settings: dict, known: Iterable[str] = (),
    provenance: Iterable[str] = ()
) -> pandas.DataFrame:
    """One row per run of `suite` in record order: `keys`, COLUMNS, metrics, settings, and what stands in its provenance.

    metrics: what a run that ended well must have, NaN of any other. known: metrics of any run that has them. settings: of
    the spec, {our column: (section, key)}. provenance: names of it besides OF_MACHINE. status is "ok" or what an empty cell
    is called, reason the same with the run's own words; n is 1 for a run that ended well, else 0; failed is always "": there
    is one run a row; runs is the tuple of its folder.
    ValueError for two runs of one row, or a run that ended well and lacks a metric; FileNotFoundError when a run folder
    named in the records is gone.
    """
    chosen = records[records["suite"] == suite]
    columns = list(dict.fromkeys([*keys, *COLUMNS, *metrics, *known, *settings, *OF_MACHINE, *provenance]))
    found = []
    for values, group in chosen.groupby(keys, sort=False, dropna=False):
        row = _of_records(suite, dict(zip(keys, values)), group, metrics, known)
        found.append(row | _of_folder(row, settings, (*OF_MACHINE, *provenance)))
    return pandas.DataFrame(found, columns=columns)


def _of_records(suite: str, keys: dict, rows: pandas.DataFrame, metrics: list[str], known: Iterable[str]) -> dict:
    """What the records hold of one run."""
    first, where = rows.iloc[0], ", ".join(f"{key} {value}" for key, value in keys.items())
    if rows["run"].nunique(dropna=False) > 1:
        raise ValueError(f"{suite}: more than one run of {where}: {', '.join(map(str, rows['run'].unique()))}")
    values = metrics_of(rows)
    good = first["status"] == "ok"
    if good and (missing := [name for name in metrics if name not in values]):
        raise ValueError(f"{first['run']}: status ok, but no metric {missing}; it has {sorted(values.index)}")
    run = "" if pandas.isna(first["run"]) else first["run"]
    status = WORDS.get(first["status"], first["status"])
    row = keys | {name: float(values[name]) if good else numpy.nan for name in metrics}
    row |= {name: float(values.get(name, numpy.nan)) for name in known}
    row |= {"dataset": "", "dataset_label": ""} | {name: first[name] for name in ("label", "role", "precision")}
    row |= {"status": status, "reason": status, "failed": "", "n": int(good), "runs": (run,) if run else ()}
    return row | {"data_source": "" if pandas.isna(first["data_source"]) else first["data_source"]}


def _of_folder(row: dict, settings: dict, names: tuple[str, ...]) -> dict:
    """What the records do not hold of a run: settings, machine, why it did not run."""
    if not row["runs"]:
        return dict.fromkeys(settings, numpy.nan) | dict.fromkeys(names, "")
    spec, result = read_run(Path(row["runs"][0]))
    found = {name: spec[section][key] for name, (section, key) in settings.items()}
    found |= {name: result.get("provenance", {}).get(name, "") for name in names}
    if row["status"] == "not run" and result.get("message"):
        found["reason"] = f"not run: {result['message'].rstrip('.')}"
    return found


def number(value: float) -> str:
    """Three significant digits, and all digits before the point."""
    return f"{value:,.0f}" if value >= 999.5 else three_digits(value)


def step(row: pandas.Series) -> str:
    """The median step time with its quartiles, to the same decimals; a single step has none."""
    median = number(row["step_ms"])
    if row["steps"] == 1:
        return median
    decimals = len(median.partition(".")[2])
    low, high = (f"{row[key]:,.{decimals}f}" for key in ("step_ms_low", "step_ms_high"))
    return f"{median} ({low}–{high})"


def values(rows: pandas.DataFrame, name: str) -> str:
    """The values of a column, each once."""
    return " or ".join(plain(float(value)) for value in rows[name].unique())


def sizes(rows: pandas.DataFrame) -> str:
    """What all runs have in common: "Batch 1, blocks 8, C = 128, H = 8, FFN ratio 4, FP16"."""
    precisions = ", ".join(map(specs.words, rows["precision"].unique()))
    return (
        f"Batch {values(rows, 'batch_size')}, blocks {values(rows, 'blocks')}, C = {values(rows, 'channel_dim')},"
        f" H = {values(rows, 'num_heads')}, FFN ratio {values(rows, 'ffn_ratio')}, {precisions}"
    )


def memory(rows: pandas.DataFrame) -> str:
    """How the peaks were taken."""
    return "; ".join(MEMORY.get(kind, kind) for kind in rows["device_type"].unique())
