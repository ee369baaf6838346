"""The settings of the runs that are there, read from their specs, and the published ones: what Tables 4 and 5 share.

A setting of the matched backbone belongs to Table 5 when it follows the dataset (the paper's per-dataset
settings, or a value on which all models of a dataset agree while datasets differ), else to Table 4. Whatever a
spec holds lands in one of the two. Complete architectures ran with settings of their own: what sets one apart
from the matched backbone stands in a block of its own, in the same two tables.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas

from flarepp.paper import quoted
from flarepp.paper.typeset import plain
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
    "model.name": "model",
    "model.num_inducing": "inducing points",
    "model.num_experts": "experts",
    "model.init_std": "standard deviation of the first linear weights",
    "model.num_modes": "modes",
    "model.num_layers": "hidden layers of the MLPs",
    "model.as_published": "as published (input through gates only)",
    "model.reference_grid": "reference points a side (as published)",
    "model.eval_noise": "noise in evaluation",
    "model.tile": "points a tile",
    "dataset.seed": "seed of the data",
    "dataset.source": "data made by",
    "dataset.mesh": "elements or cells of the solved mesh",
    "dataset.stride": "stride of the points seen",
    "dataset.resolution": "points a side",
    "dataset.solver_resolution": "points a side of the solved grid",
    "dataset.panels": "panels around, along",
    "dataset.num_points": "points drawn",
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
BENCHMARK = ("dataset.num_train", "dataset.num_test", "tokens")  # what all models of a dataset share
BACKBONE = "backbone"  # the model that takes any mixer; every other model is a complete architecture
# Of comparisons: the head width follows from width and heads, and several processes compute what one does.
LEFT_OUT = ("training.seed", "derived.head_dim", "training.context_parallel", "training.data_parallel")
ON_PURPOSE = {"model.as_published": "differs on purpose: the published form hides the input from all but the expert gates"}
MATCHED = "matched backbone"
WORDS = {
    "fp32": "FP32",
    "fp16": "FP16",
    "layernorm": "LayerNorm",
    "rmsnorm": "RMSNorm",
    "True": "yes",
    "False": "no",
    "published": "published files",
    "presampled": "our points of the full data",
    "generated": "our solvers",
    "stand-in": "a stand-in of ours",
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
            _settings(read_run(Path(row.run))[0]) | {"dataset.source": row.data_source},  # asked for "path", it may be generated
        )
        for row in rows.drop_duplicates("run").itertuples()
    ]


def _settings(spec: dict) -> dict:
    """Flatten a spec and add what follows from it: head width from C and H, epochs from given steps."""
    flat = {
        f"{part}.{key}": value
        for part in ("model", "training", "dataset", "scaling", "cost")
        for key, value in spec.get(part, {}).items()
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


def published_keys(model: str) -> list[str]:
    """Keys of the settings that published tables can state of a model."""
    return list(dict.fromkeys([*(key for _, key in quoted.baseline(model)), *common(), *PUBLISHED]))


def published(key: str, dataset: str, model: str) -> tuple[str, str]:
    """The published value of a setting as printed, and its source; empty texts where none is stated.

    A complete architecture has the settings of baselines.csv, and only the benchmark in common with the others.
    """
    own = quoted.baseline(model)
    if own and key not in BENCHMARK:
        return own.get((dataset, key)) or own.get(("default", key), ("", ""))
    if key not in PUBLISHED:
        row = common().get(key, {})
        return row.get("paper", ""), row.get("source", "")
    table, column, name_ = PUBLISHED[key]
    return quoted.dataset_row(table, column, dataset).get(name_, ""), "paper"


def words(value: object) -> str:
    """A value of a spec, or a printed one, as the tables spell it."""
    if not isinstance(value, str):
        return plain(value)
    try:
        return plain(float(value))
    except ValueError:
        return WORDS.get(value, value)


def same(value: Any, text: str) -> bool:
    """Whether a value of a spec (or another printed one) is the one printed, as numbers where both are."""
    try:
        return math.isclose(float(value), float(text), rel_tol=1e-9)
    except (TypeError, ValueError):
        return str(value).strip("[]") == text


def matched(runs: list[Run]) -> list[Run]:
    """The runs of the matched backbone."""
    return [run for run in runs if run.settings["model.name"] == BACKBONE]


def complete(runs: list[Run]) -> list[list[Run]]:
    """The runs of every complete architecture, one list a model."""
    others: dict[str, list[Run]] = {}
    for run in runs:
        if run.settings["model.name"] != BACKBONE:
            others.setdefault(run.model, []).append(run)
    return list(others.values())


def own_keys(runs: list[Run], suite: list[Run]) -> list[str]:
    """Keys in which the runs of one complete architecture, or their sources, differ from the matched backbone's."""
    present = _keys(runs)
    ordered = [key for key in published_keys(runs[0].model) if key in present]
    return [key for key in dict.fromkeys([*ordered, *present])
            if key not in LEFT_OUT and any(_differs(run, key, suite) for run in runs if key in run.settings)]


def _differs(run: Run, key: str, suite: list[Run]) -> bool:
    peers = [peer for peer in suite if peer.dataset == run.dataset and key in peer.settings]
    if not peers or repr(run.settings[key]) != repr(usual(peers, key)[0]):
        return True
    text, theirs = published(key, run.dataset, run.model)[0], published(key, run.dataset, peers[0].model)[0]
    return bool(text) and not same(text, theirs)


def owns_dataset_row(runs: list[Run], key: str) -> bool:
    """Whether a setting of one complete architecture belongs to Table 5: it, or its published value, follows the dataset."""
    texts = {published(key, run.dataset, run.model)[0] for run in runs}
    return len(texts) > 1 or follows_dataset(runs, key)


def on_purpose(runs: list[Run], key: str) -> list[str]:
    """Why runs deliberately have another value than the published one; empty when they have that one, or without a reason."""
    texts = [(run.settings[key], published(key, run.dataset, run.model)[0]) for run in runs if key in ON_PURPOSE]
    return [ON_PURPOSE[key]] if any(text and not same(value, text) for value, text in texts) else []


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


def folders(runs: list[Run]) -> tuple[str, ...]:
    """The run folders that a value was read from."""
    return tuple(run.folder for run in runs)
