"""What the paper printed (published/*.csv), and the words that keep our numbers apart from it."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "published"
WEIGHTS = {
    "last": "weights of the last step",
    "ema": "averaged (EMA) weights at the end",
    "best_test": "lowest test error over the evaluations of a run (selected on the test set)",
}


@cache
def rows(table: str) -> tuple[dict[str, str], ...]:
    """The rows of published/<table>.csv as dictionaries of strings."""
    with open(FOLDER / f"{table}.csv", newline="", encoding="utf-8") as stream:
        return tuple(csv.DictReader(stream))


def paper_name(kind: str, name: str) -> str | None:
    """What the paper calls our model or dataset `name`; None when the paper does not have it."""
    return next((row["paper"] for row in rows("names") if (row["kind"], row["name"]) == (kind, name)), None)


def table1(model: str, dataset: str) -> float | str | None:
    """The paper's error in % of a cell of Table 1, its reason for an empty one, or None without one."""
    row = next((row for row in rows("table1") if row["model"] == paper_name("model", model)), {})
    text = row.get((paper_name("dataset", dataset) or "").lower().replace("-", "_"))
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


def dataset_row(table: str, column: str, dataset: str) -> dict[str, str]:
    """The row of a published table whose `column` names `dataset`; empty when the paper has none."""
    return next((row for row in rows(table) if row[column] == paper_name("dataset", dataset)), {})


@cache
def baseline(model: str) -> dict[tuple[str, str], tuple[str, str]]:
    """Settings of a complete architecture, {(dataset or "default", key): (value, source)}; empty for the matched backbone."""
    return {(row["dataset"], row["key"]): (row["value"], row["source"]) for row in rows("baselines") if row["model"] == model}


def weights_words(shown: str) -> str:
    """What the error called `shown` was computed from, in words. ValueError for an unknown name."""
    if shown not in WEIGHTS:
        raise ValueError(f"shown = {shown!r} is unknown; allowed: {', '.join(WEIGHTS)}")
    return WEIGHTS[shown]


def stamp(scale: str, data_sources: Iterable[str], differing: str = "") -> str:
    """The mark on all that is not the paper's experiment; empty for published data at scale `paper` under the
    paper's settings.

    differing: which settings are not the paper's, from `deviations.words`.
    """
    sources, parts = sorted(set(data_sources)), []
    if scale != "paper" or sources not in (["published"], []):
        parts.append(f"scale {scale}, {' and '.join(sources) or 'no'} data: not the paper's numbers")
    if differing:
        parts.append(f"settings differ from the paper's: {differing}")
    return "; ".join(parts)
