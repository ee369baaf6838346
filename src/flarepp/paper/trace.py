"""From a number of a table, a figure or the ledger to the runs behind it: the verb `trace`."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

import pandas

from flarepp.paper import origin
from flarepp.paper.cells import SYMBOLS
from flarepp.paper.fields import MODELS
from flarepp.paper.typeset import three_digits
from flarepp.record import read_output, read_records

FOLDER = Path(__file__).parent
# The columns that words name, and those that hold what an artefact shows.
NAMES = ("id", "benchmark", "dataset", "dataset_label", "model", "label", "precision", "key", "setting")
NUMBERS = re.compile("percent|_points$|step_ms$|peak_memory_mb|efficiency|over_flare|multiply_adds|measured|verdict|^card$")
SWEEPS = ("figure3", "figure4", "figure5")  # figures of a suite of their own; the others show runs of Table 1
FIELDS = {"figure6": "elasticity", "figure7": "darcy", "figure8": "airfoil", "figure9": "pipe"}  # of FLARE and FLARE++
ERRORS, STEPS = ("last", "ema", "best_test"), ("step_ms", "peak_memory_mb")


def trace(name: str, words: list[str], results: Path) -> str:
    """What the cells of artefact `name` show that match all `words`, and the runs they are from, as lines of text.

    words: values of a cell in any order: dataset, model, precision, the id of a claim, or a size such as B8, M64, N4096, R2.
    results: the folder of a scale. ValueError for an unknown artefact or word, FileNotFoundError for one not yet made.
    """
    frame = _cells(name, results)
    found = _matching(name, frame, words)
    return "\n".join(line for _, row in frame.loc[found].iterrows() for line in _lines(name, row))


def _cells(name: str, results: Path) -> pandas.DataFrame:
    """One row a cell of the artefact, with the columns `runs` (folders with ";" between) and what it shows."""
    tables, figures = ([path.stem for path in (FOLDER / kind).glob("[!_]*.py")] for kind in ("tables", "figures"))
    if name not in (known := sorted([*tables, *figures, "ledger"])):
        raise ValueError(f"trace: there is no artefact {name!r}; nearest: {_nearest(name, known)}")
    if name == "figure2":
        raise ValueError("trace: figure2 is drawn from the datasets, not from runs; `trace table3` names their cards")
    drawn = name in figures
    if drawn:
        path = Path(results) / "records" / f"{name if name in SWEEPS else 'table1'}.csv"
    else:
        path = Path(results) / ("" if name == "ledger" else "tables") / f"{name}.csv"
    if not path.exists():
        raise FileNotFoundError(f"{path}: not there; `snakemake {name}` makes it, --results names another scale's folder")
    return _drawn(read_records(path), name) if drawn else _by_dataset(pandas.read_csv(path))


def _by_dataset(table: pandas.DataFrame) -> pandas.DataFrame:
    """A table with a column `<dataset>_paper` beside each `<dataset>` as a row per row and dataset, with the runs on it."""
    datasets = [column for column in table if f"{column}_paper" in table]
    if not datasets:
        return table
    rest = table.drop(columns=[*datasets, *(f"{name}_paper" for name in datasets), "runs"])
    runs = table["runs"].fillna("").str.split(";")
    parts = [
        rest.assign(dataset=name, ours=table[name], paper=table[f"{name}_paper"],
                    runs=[";".join(run for run in own if name in Path(run).parts) for own in runs])
        for name in datasets
    ]  # fmt: skip
    return pandas.concat(parts).sort_index(kind="stable").reset_index(drop=True)


def _drawn(records: pandas.DataFrame, name: str) -> pandas.DataFrame:
    """The cells of a figure: its runs averaged over their seeds."""
    if name in FIELDS:
        records = records[(records["dataset"] == FIELDS[name]) & records["model"].isin(MODELS)]
    keys = [key for key in [*NAMES, *SYMBOLS] if key in records]
    rows = []
    for values, group in records.groupby(keys, sort=False, dropna=False):
        means = group.groupby("metric")["value"].mean()
        row = dict(zip(keys, values)) | {"status": ", ".join(group["status"].unique())}
        row |= {f"{metric}_percent": 100 * means[metric] for metric in ERRORS if metric in means}
        row |= {metric: means[metric] for metric in STEPS if metric in means}
        rows.append(row | {"runs": ";".join(group["run"].dropna().unique())})
    return pandas.DataFrame(rows, columns=None if rows else [*keys, "runs"])


def _words(row: pandas.Series) -> dict[str, str]:
    """The words that name a cell, in small letters, as they are written."""
    words = [str(row[name]) for name in NAMES if name in row and not pandas.isna(row[name])]
    sizes = {symbol: row[name] for name, symbol in SYMBOLS.items() if name in row}
    words += [_size(symbol, size) for symbol, size in sizes.items() if not pandas.isna(size)]
    return {word.lower(): word for word in words}


def _size(symbol: str, size: object) -> str:
    """B8 for 8.0 and for "8"; words such as "mean of 8 16" as they are."""
    if not isinstance(size, str):
        return f"{symbol}{size:.0f}"
    return f"{symbol}{size}" if size.isdigit() else size


def _matching(name: str, frame: pandas.DataFrame, words: list[str]) -> list:
    """The rows that have all words; ValueError names those nearest to the first word that none of the rest has."""
    named = {index: _words(row) for index, row in frame.iterrows()}
    for place, word in enumerate(words):
        left = {index: own for index, own in named.items() if word.lower() in own}
        if not left:
            others = {small: written for own in named.values() for small, written in own.items()}
            before = f" with {', '.join(words[:place])}" if place else ""
            used = {given.lower() for given in words[:place]}
            nearest = _nearest(word.lower(), [small for small in others if small not in used], others)
            raise ValueError(f"trace {name}: no cell{before} is named {word!r}; nearest: {nearest}")
        named = left
    return list(named)


def _nearest(word: str, known: list[str], written: dict[str, str] | None = None) -> str:
    names = difflib.get_close_matches(word, known, n=3, cutoff=0.0)
    return ", ".join((written or {}).get(name, name) for name in names) or "none, it is empty"


def _lines(name: str, row: pandas.Series) -> list[str]:
    """One cell: its names, what it shows, and every run with its facts."""
    there = [column for column in row.index if not pandas.isna(row[column])]
    shown = [column for column in there if NUMBERS.search(column)]
    shown = shown or [column for column in there if column not in ("runs", "status", *NAMES, *SYMBOLS)]
    lines = [f"{name}: {', '.join(_words(row).values())}"]
    lines += [f"  {column}: {_number(row[column])}" for column in shown]
    runs = "" if pandas.isna(row.get("runs")) else row["runs"]
    if not runs and "card" not in row:
        lines.append(f"  no run{'' if pandas.isna(row.get('status')) else ': ' + row['status']}")
    return [*lines, *(line for run in filter(None, runs.split(";")) for line in _run(run))]


def _run(run: str) -> list[str]:
    """A run with its facts; its weights, if they are here, are checked against the record."""
    if (Path(run) / origin.WEIGHTS).exists():
        read_output(Path(run), origin.WEIGHTS)
    facts = origin.of_run(run)
    metrics: Any = facts.pop("metrics", {})
    pairs = metrics | facts
    return [f"  {run}", *(f"    {name}: {value}" for name, value in pairs.items())]


def _number(value: object) -> str:
    """A number as tables show it, and in full."""
    if not isinstance(value, float):
        return str(value)
    return f"{f'{value:,.0f}' if abs(value) >= 999.5 else three_digits(value)} ({value!r})"
