"""What rules share: tables of errors, changes, and numbers in words."""

from __future__ import annotations

import pandas

Outcome = tuple[str, bool | None] | None
PLACE = ["dataset", "num_blocks", "precision"]


def by(cells: pandas.DataFrame, axis: str) -> pandas.DataFrame:
    """Errors with `axis` as columns and the other axes as rows, in record order."""
    rows = [key for key in [*PLACE, "model"] if key != axis]
    return cells.pivot_table(index=rows, columns=axis, values="mean", sort=False)


def change_against(cells: pandas.DataFrame, model: str, against: str) -> pandas.Series:
    """Relative change in % of `model` against another wherever both have a value."""
    table = by(cells, "model")
    if not {model, against} <= set(table):
        return pandas.Series(dtype=float)
    return (100 * (table[model] / table[against] - 1)).dropna()


def signed(value: float, digits: int = 0) -> str:
    """A change with its sign, to one more decimal where it rounds to zero; what is zero even then has none."""
    digits += not round(value, digits)
    rounded = round(value, digits)
    return f"{rounded:+.{digits}f}" if rounded else "0"


def changes(values: pandas.Series) -> str:
    """The range of changes of an error, "error -53 to -21 %", or how close all are."""
    if values.abs().max() < 0.05:
        return "errors within 0.1 % of each other"
    return f"error {' to '.join(dict.fromkeys(map(signed, (values.min(), values.max()))))} %"


def labels(cells: pandas.DataFrame, table: pandas.DataFrame) -> list[str]:
    labels = cells.drop_duplicates("dataset").set_index("dataset")["dataset_label"]
    return [labels[dataset] for dataset in table.index.get_level_values("dataset")]


def names_of(cells: pandas.DataFrame, table: pandas.DataFrame) -> str:
    return ", ".join(dict.fromkeys(labels(cells, table)))


def named(cells: pandas.DataFrame, model: str, against: str) -> str:
    """ "FLARE++ over FLARE", by the labels of two models."""
    labels = cells.drop_duplicates("model").set_index("model")["label"]
    return f"{labels[model]} over {labels[against]}"


def span(values: pandas.Series) -> str:
    return " to ".join(dict.fromkeys(f"{value:.2f}" for value in (values.min(), values.max())))


def count_of(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or f'{one}s'}"
