"""Claims about the accuracies of Table 6, in %."""

from __future__ import annotations

import pandas

from flarepp.paper.rules.words import Outcome


def average_rises(cells: pandas.DataFrame, model: str, against: str, points: float, tolerance: float) -> Outcome:
    """The average over tasks is higher for `model` than for `against`, by `points` within `tolerance` points."""
    table = _tasks(cells, [against, model])
    if table.empty:
        return None
    low, high = table.mean()
    measured = f"{low:.2f} to {high:.2f} ({high - low:+.2f}) over {len(table)} task{'s' * (len(table) > 1)}{_under(cells)}"
    return measured, bool(high > low and abs(high - low - points) <= tolerance)


def best_average(cells: pandas.DataFrame, model: str) -> Outcome:
    """The average over tasks is the highest for `model`; ties do not count."""
    table = _tasks(cells, list(dict.fromkeys(cells["model"])))
    if table.empty or model not in table or len(table.columns) < 2:
        return None
    means, label = table.mean(), cells.drop_duplicates("model").set_index("model")["label"]
    best = means.drop(model).idxmax()
    first = bool(means[model] > means[best])
    place = int((means.drop(model) >= means[model]).sum()) + 1
    measured = f"{label[model]} {means[model]:.2f}, place {place} of {len(means)}"
    return f"{measured}; best other: {label[best]} {means[best]:.2f}{_under(cells)}", first


def above_everywhere(cells: pandas.DataFrame, model: str, against: str) -> Outcome:
    """`model` is more accurate than `against` on every task."""
    table = _tasks(cells, [against, model])
    if table.empty:
        return None
    gain = table[model] - table[against]
    labels = cells.drop_duplicates("dataset").set_index("dataset")["dataset_label"]
    return ", ".join(f"{labels[task]} {value:+.1f}" for task, value in gain.items()) + _under(cells), bool((gain > 0).all())


def _tasks(cells: pandas.DataFrame, models: list[str]) -> pandas.DataFrame:
    """Accuracies, a row per task that all `models` have and a column per model."""
    table = cells.pivot_table(index="dataset", columns="model", values="mean", sort=False)
    return table.reindex(columns=models).dropna()


def _under(cells: pandas.DataFrame) -> str:
    return f", protocol {cells['protocol'].iloc[0]}"
