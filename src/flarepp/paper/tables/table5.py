"""Table 5: settings that follow the dataset, as the accuracy runs were made, beside the paper's.

The matched backbone first; then a block for every complete architecture with what sets it apart.
"""

from __future__ import annotations

from pathlib import Path

import pandas

from flarepp.paper import deviations, quoted, settings
from flarepp.paper.cells import check_scale
from flarepp.paper.typeset import Block, Cell, Notes, Table, plain, write
from flarepp.record import read_predictions


def build(records: pandas.DataFrame, out: Path, *, shown: str, compared: str, scale: str) -> None:
    """Write out/table5.tex, .csv and .md from the specs of the runs of suite "table1" (`shown` and `compared`
    change nothing here).

    The token count is read from the predictions of a run. FileNotFoundError when a run folder of the records
    is gone.
    """
    check_scale(records, scale, "table1")
    runs = settings.read(records)
    datasets = dict.fromkeys(run.dataset for run in runs)
    labels = {run.dataset: run.dataset_label for run in runs}
    headings = {run.dataset: quoted.heading(run.dataset_label, run.data_source) for run in runs}
    notes, suite, others = Notes(), settings.matched(runs), settings.complete(runs)
    rows = {settings.MATCHED: [_row(key, datasets, suite, notes) for key in settings.dataset_keys(suite)]}
    tokens = [_tokens(dataset, runs, notes) for dataset in datasets]
    rows[settings.MATCHED].append([Cell("tokens"), *tokens, *_paper_cells("tokens", datasets, "")])
    for other in others:
        keys = [key for key in settings.own_keys(other, suite) if settings.owns_dataset_row(other, key)]
        rows |= {other[0].label: [_row(key, datasets, other, notes) for key in keys]} if keys else {}
    columns = [("", "setting", "l"), *(("these runs", headings[dataset], "r") for dataset in datasets)]
    columns += [("paper, published data", labels[dataset], "r") for dataset in datasets]
    caption = f"Settings of the runs of Table 1 that follow the dataset, read from the runs. Scale: {scale}."
    caption += " Below, the complete architectures: what sets each apart from the matched backbone." if others else ""
    differing = deviations.words(deviations.find(records, "table1", scale).values())
    stamp = quoted.stamp(scale, (run.data_source for run in runs), differing)
    data = pandas.DataFrame(
        [[title, *(cell.text for cell in row), _footnotes(row, notes), ";".join(run for cell in row for run in cell.runs)]
         for title, block in rows.items() for row in block],
        columns=["model", "setting", *datasets, *(f"{dataset}_paper" for dataset in datasets), "footnotes", "runs"],
    )  # fmt: skip
    blocks = [Block(block, title if others else "") for title, block in rows.items()]
    write(Table(caption, columns, blocks, stamp, notes.items()), data, out, "table5")


def _footnotes(row: list[Cell], notes: Notes) -> str:
    texts = dict(notes.items())
    return "; ".join(dict.fromkeys(texts[mark] for cell in row for mark in cell.marks))


def _row(key: str, datasets: dict, runs: list[settings.Run], notes: Notes) -> list[Cell]:
    """Name, our and the published values of a setting; the name carries the source of what the paper does not print."""
    having = [run for run in runs if key in run.settings]
    sources = [settings.published(key, run.dataset, run.model)[1] for run in having if settings.complete([run])]
    marks = [notes.mark(f"on the right: {source}") for source in dict.fromkeys(sources) if source not in ("paper", "")]
    ours = _ours(key, datasets, having, notes)
    return [Cell(settings.name(key), marks=tuple(marks)), *ours, *_paper_cells(key, datasets, runs[0].model)]


def _ours(key: str, datasets: dict, runs: list[settings.Run], notes: Notes) -> list[Cell]:
    """A cell per dataset: the value most models share, footnotes on the others, `--` without any."""
    row = []
    for dataset in datasets:
        having = [run for run in runs if run.dataset == dataset]
        if not having:
            row.append(Cell("--"))
            continue
        value, others = settings.usual(having, key)
        marks = [notes.mark(f"{who}: {settings.words(other)}") for who, other in others.items()]
        marks += [notes.mark(reason) for reason in settings.on_purpose(having, key)]
        row.append(Cell(settings.words(value), marks=tuple(marks), runs=settings.folders(having)))
    return row


def _tokens(dataset: str, runs: list[settings.Run], notes: Notes) -> Cell:
    """Points per test sample, from the first run that left predictions; `--` with a footnote when none did."""
    for run in runs:
        if run.dataset == dataset and (Path(run.folder) / "predictions.h5").exists():
            counts = [len(points) for points in read_predictions(Path(run.folder), "last")["points"]]
            text = " to ".join(dict.fromkeys(plain(count) for count in (min(counts), max(counts))))
            return Cell(text, runs=(run.folder,))
    return Cell("--", marks=(notes.mark("no run left predictions"),))


def _paper_cells(key: str, datasets: dict, model: str) -> list[Cell]:
    """The published value for each dataset; empty where none is stated."""
    return [Cell(settings.words(settings.published(key, dataset, model)[0])) for dataset in datasets]
