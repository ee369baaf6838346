"""Table 5: settings that follow the dataset, as the accuracy runs were made, beside the paper's."""

from __future__ import annotations

from pathlib import Path

import pandas

from flarepp.paper import quoted, settings
from flarepp.paper.typeset import Block, Cell, Notes, Table, plain, write
from flarepp.record import read_predictions

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


def build(records: pandas.DataFrame, out: Path, *, shown: str, compared: str, scale: str) -> None:
    """Write out/table5.tex, .csv and .md from the specs of the runs of suite "table1" (`shown` and `compared`
    change nothing here).

    The token count is read from the predictions of a run. FileNotFoundError when a run folder of the records
    is gone.
    """
    runs = settings.read(records)
    datasets = dict.fromkeys(run.dataset for run in runs)
    labels = {run.dataset: run.dataset_label for run in runs}
    notes = Notes()
    rows = [_row(key, datasets, runs, notes) for key in settings.dataset_keys(runs)]
    tokens = [_tokens(dataset, runs, notes) for dataset in datasets]
    rows.append([Cell("tokens"), *tokens, *_paper_cells("tokens", datasets)])
    columns = [("", "setting", "l"), *(("these runs", labels[dataset], "r") for dataset in datasets)]
    columns += [("paper, published data", labels[dataset], "r") for dataset in datasets]
    caption = f"Settings of the runs of Table 1 that follow the dataset, read from the runs. Scale: {scale}."
    stamp = quoted.stamp(scale, (run.data_source for run in runs))
    header = ["setting", *datasets, *(f"{dataset}_paper" for dataset in datasets)]
    data = pandas.DataFrame([[cell.text for cell in row] for row in rows], columns=header)
    write(Table(caption, columns, [Block(rows)], stamp, notes.items()), data, out, "table5")


def _row(key: str, datasets: dict, runs: list[settings.Run], notes: Notes) -> list[Cell]:
    name = NAMES.get(key, key.split(".")[1].replace("_", " "))
    return [Cell(name), *_ours(key, datasets, runs, notes), *_paper_cells(key, datasets)]


def _ours(key: str, datasets: dict, runs: list[settings.Run], notes: Notes) -> list[Cell]:
    """A cell per dataset: the value most models share, footnotes on the others, `--` without any."""
    row = []
    for dataset in datasets:
        having = [run for run in runs if run.dataset == dataset and key in run.settings]
        if not having:
            row.append(Cell("--"))
            continue
        value, others = settings.usual(having, key)
        marks = [notes.mark(f"{who}: {plain(other)}") for who, other in others.items()]
        row.append(Cell(plain(value), marks=tuple(marks)))
    return row


def _tokens(dataset: str, runs: list[settings.Run], notes: Notes) -> Cell:
    """Points per sample, from the first run that left predictions; `--` with a footnote when none did."""
    for run in runs:
        if run.dataset == dataset and (Path(run.folder) / "predictions.h5").exists():
            return Cell(plain(read_predictions(Path(run.folder), "last")["points"].shape[1]))
    return Cell("--", marks=(notes.mark("no run left predictions"),))


def _paper_cells(key: str, datasets: dict) -> list[Cell]:
    """The paper's value for each dataset; empty where it states none."""
    table, column, name = PUBLISHED.get(key, ("table5", "dataset", key))
    texts = [quoted.dataset_row(table, column, dataset).get(name, "") for dataset in datasets]
    return [Cell(plain(float(text)) if "e" in text else text) for text in texts]
