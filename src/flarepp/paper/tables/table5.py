"""Table 5: settings that follow the dataset, as the accuracy runs were made, beside the paper's."""

from __future__ import annotations

from pathlib import Path

import pandas

from flarepp.paper import deviations, quoted, settings
from flarepp.paper.cells import check_scale
from flarepp.paper.typeset import Block, Cell, Notes, Table, plain, write
from flarepp.record import read_predictions

WORDS = {"generate": "our solvers", "path": "published files"}


def build(records: pandas.DataFrame, out: Path, *, shown: str, compared: str, scale: str) -> None:
    """Write out/table5.tex, .csv and .md from the specs of the runs of suite "table1" (`shown` and `compared`
    change nothing here).

    The token count is read from the predictions of a run. FileNotFoundError when a run folder of the records
    is gone.
    """
    check_scale(records, scale)
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
    differing = deviations.words(deviations.find(records, "table1", scale).values())
    stamp = quoted.stamp(scale, (run.data_source for run in runs), differing)
    header = ["setting", *datasets, *(f"{dataset}_paper" for dataset in datasets)]
    data = pandas.DataFrame([[cell.text for cell in row] for row in rows], columns=header)
    write(Table(caption, columns, [Block(rows)], stamp, notes.items()), data, out, "table5")


def _row(key: str, datasets: dict, runs: list[settings.Run], notes: Notes) -> list[Cell]:
    return [Cell(settings.name(key)), *_ours(key, datasets, runs, notes), *_paper_cells(key, datasets)]


def _ours(key: str, datasets: dict, runs: list[settings.Run], notes: Notes) -> list[Cell]:
    """A cell per dataset: the value most models share, footnotes on the others, `--` without any."""
    row = []
    for dataset in datasets:
        having = [run for run in runs if run.dataset == dataset and key in run.settings]
        if not having:
            row.append(Cell("--"))
            continue
        value, others = settings.usual(having, key)
        marks = [notes.mark(f"{who}: {_words(other)}") for who, other in others.items()]
        row.append(Cell(_words(value), marks=tuple(marks)))
    return row


def _words(value: object) -> str:
    return WORDS.get(value, value) if isinstance(value, str) else plain(value)


def _tokens(dataset: str, runs: list[settings.Run], notes: Notes) -> Cell:
    """Points per sample, from the first run that left predictions; `--` with a footnote when none did."""
    for run in runs:
        if run.dataset == dataset and (Path(run.folder) / "predictions.h5").exists():
            return Cell(plain(read_predictions(Path(run.folder), "last")["points"].shape[1]))
    return Cell("--", marks=(notes.mark("no run left predictions"),))


def _paper_cells(key: str, datasets: dict) -> list[Cell]:
    """The paper's value for each dataset; empty where it states none."""
    texts = [settings.paper_value(key, dataset) if key in settings.PUBLISHED else "" for dataset in datasets]
    return [Cell(plain(float(text)) if "e" in text else text) for text in texts]
