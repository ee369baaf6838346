"""The settings of the runs that are there, read from their specs, and the paper's: what Tables 4 and 5 share.

A setting belongs to Table 5 when it follows the dataset (the paper's per-dataset settings, or a value on
which all models of a dataset agree while datasets differ), else to Table 4. Whatever a spec holds lands in
one of the two.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pandas

from flarepp.paper import quoted
from flarepp.record import read_run

PER_DATASET = (
    "model.num_blocks",
    "model.num_latents",
    "training.batch_size",
    "training.weight_decay",
    "training.steps",
    "training.epochs",
    "dataset.num_train",
    "dataset.num_test",
)
NAMES = {
    "model.num_blocks": "blocks",
    "model.num_latents": "latents (slices)",
    "training.batch_size": "batch size",
    "training.weight_decay": "weight decay",
    "training.steps": "optimiser steps",
    "training.epochs": "epochs",
    "dataset.num_train": "training samples",
    "dataset.num_test": "test samples",
    "dataset.seed": "seed of the data",
    "dataset.source": "data made by",
    "dataset.mesh": "elements around, across",
    "dataset.resolution": "points a side",
    "dataset.solver_resolution": "points a side of the solved grid",
}
PUBLISHED = {  # our key: (table, column naming the dataset, column)
    "model.num_blocks": ("table5", "dataset", "num_blocks"),
    "model.num_latents": ("table5", "dataset", "num_latents"),
    "training.batch_size": ("table5", "dataset", "batch_size"),
    "training.weight_decay": ("table5", "dataset", "weight_decay"),
    "training.epochs": ("table5", "dataset", "epochs"),
    "dataset.num_train": ("table3", "benchmark", "train_cases"),
    "dataset.num_test": ("table3", "benchmark", "test_cases"),
    "tokens": ("table3", "benchmark", "points"),
}
LENGTHS = ("training.steps", "training.epochs")
UNSEEN = (
    "model.name",
    "model.mixer",
    "dataset.name",
    "dataset.root",
)  # the rows and columns themselves, and a path


@dataclass(frozen=True)
class Run:
    """One run of a suite; `settings` is its flattened spec, {"section.key": value}."""

    folder: str
    model: str
    label: str
    dataset: str
    dataset_label: str
    data_source: str
    settings: dict


def read(records: pandas.DataFrame, suite: str = "table1") -> list[Run]:
    """The runs of a suite that left a folder, trivial predictors excluded, in record order.

    FileNotFoundError when a folder named in the records has lost its metrics.json.
    """
    rows = records[
        (records["suite"] == suite) & (records["role"] != "trivial") & (records["run"].fillna("") != "")
    ]
    return [
        Run(
            row.run,
            row.model,
            row.label,
            row.dataset,
            row.dataset_label,
            row.data_source,
            _settings(read_run(Path(row.run))[0]),
        )
        for row in rows.drop_duplicates("run").itertuples()
    ]


def _settings(spec: dict) -> dict:
    """Flatten a spec and add what follows from it: head width from C and H, epochs from given steps."""
    flat = {
        f"{part}.{key}": value
        for part in ("model", "training", "dataset")
        for key, value in spec[part].items()
    }
    flat = {key: value for key, value in flat.items() if key not in LENGTHS or value is not None}
    if {"model.channel_dim", "model.num_heads"} <= flat.keys():
        flat["derived.head_dim"] = flat["model.channel_dim"] // flat["model.num_heads"]
    if (
        "training.epochs" not in flat
        and {"training.steps", "training.batch_size", "dataset.num_train"} <= flat.keys()
    ):
        seen = flat["training.steps"] * flat["training.batch_size"]
        flat["training.epochs"] = round(seen / flat["dataset.num_train"], 1)
    return flat


def common() -> dict[str, dict[str, str]]:
    """The rows of the paper's Table 4 by our key."""
    return {row["key"]: row for row in quoted.rows("table4")}


def published_keys() -> list[str]:
    """Keys of the settings that published tables can state."""
    return [*common(), *PUBLISHED]


def paper_value(key: str, dataset: str) -> str:
    """The paper's value of a setting as printed; empty where it states none."""
    if key not in PUBLISHED:
        return common().get(key, {}).get("paper", "")
    table, column, name_ = PUBLISHED[key]
    return quoted.dataset_row(table, column, dataset).get(name_, "")


def name(key: str) -> str:
    """A setting in words."""
    return NAMES.get(key) or common().get(key, {}).get("setting") or key.split(".")[-1].replace("_", " ")


def common_keys(runs: list[Run]) -> list[str]:
    """Keys of Table 4, in order of first appearance."""
    return [key for key in _keys(runs) if not follows_dataset(runs, key)]


def dataset_keys(runs: list[Run]) -> list[str]:
    """Keys of Table 5: the paper's, in its order, then further ones that follow the dataset."""
    present = _keys(runs)
    return [
        key
        for key in dict.fromkeys([*PER_DATASET, *present])
        if key in present and follows_dataset(runs, key)
    ]


def _keys(runs: list[Run]) -> dict[str, None]:
    return dict.fromkeys(key for run in runs for key in run.settings if key not in UNSEEN)


def follows_dataset(runs: list[Run], key: str) -> bool:
    """True for per-dataset settings, those of the data, and keys constant within each dataset only."""
    if key in PER_DATASET or key.startswith("dataset."):
        return True
    within: dict[str, set] = {}
    for run in runs:
        if key in run.settings:
            within.setdefault(run.dataset, set()).add(repr(run.settings[key]))
    return all(len(values) == 1 for values in within.values()) and len(set().union(*within.values())) > 1


def usual(runs: list[Run], key: str) -> tuple[object, dict[str, object]]:
    """The value of `key` that most of the runs holding it share (the first such), and the others' as {who:
    value}.

    Who is a model's label, or "label on dataset" where the model deviates on some of its datasets only.
    """
    having = [run for run in runs if key in run.settings]
    most = Counter(repr(run.settings[key]) for run in having).most_common(1)[0][0]
    value = next(run.settings[key] for run in having if repr(run.settings[key]) == most)
    others: dict[str, object] = {}
    for run in having:
        if repr(run.settings[key]) != most:
            same = {repr(other.settings[key]) for other in having if other.label == run.label}
            others[run.label if len(same) == 1 else f"{run.label} on {run.dataset_label}"] = run.settings[key]
    return value, others


def labels(runs: list[Run]) -> str:
    """The model labels of runs, each once."""
    return ", ".join(dict.fromkeys(run.label for run in runs))
