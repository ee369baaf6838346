"""Table 4: the settings that the accuracy runs share, as those runs were really made, beside the paper's.

The matched backbone first; then a block for every complete architecture with what sets it apart.
"""

from __future__ import annotations

from pathlib import Path

import pandas

from flarepp.paper import deviations, quoted, settings
from flarepp.paper.cells import check_scale
from flarepp.paper.typeset import Block, Cell, Notes, Table, plain, write


def build(records: pandas.DataFrame, out: Path, *, shown: str, compared: str, scale: str) -> None:
    """Write out/table4.tex, .csv and .md from the specs of the runs of suite "table1" (`shown` and `compared`
    change nothing here).

    FileNotFoundError when a run folder named in the records is gone.
    """
    check_scale(records, scale, "table1")
    runs, notes = settings.read(records), Notes()
    suite, others = settings.matched(runs), settings.complete(runs)
    parts = [(settings.MATCHED, suite, _ordered(suite))]
    parts += [(other[0].label, other, _own(other, suite)) for other in others]
    rows = {title: [_row(part, key, notes) for key in keys] for title, part, keys in parts if keys}
    columns = [("", "setting", "l"), ("", "these runs", "l"), ("", "paper, or the source in brackets", "l")]
    caption = (
        f"Settings shared by the runs of Table 1 ({settings.labels(suite) or 'no runs'}), read from the runs."
        f" Scale: {scale}. An empty cell in the last column: not stated."
        + (" Below, the complete architectures: what sets each apart from the matched backbone." if others else "")
    )
    differing = deviations.words(deviations.find(records, "table1", scale).values())
    stamp = quoted.stamp(scale, (run.data_source for run in runs), differing)
    texts = dict(notes.items())
    data = pandas.DataFrame(
        [[title, key, *(cell.text for cell in row), "; ".join(texts[mark] for mark in row[1].marks), ";".join(row[1].runs)]
         for title, _, keys in parts for key, row in zip(keys, rows.get(title, []))],
        columns=["model", "key", "setting", "ours", "paper", "footnotes", "runs"],
    )  # fmt: skip
    blocks = [Block(block, title if others else "") for title, block in rows.items()]
    write(Table(caption, columns, blocks, stamp, notes.items()), data, out, "table4")


def _ordered(runs: list[settings.Run]) -> list[str]:
    """Keys of the matched backbone, in the paper's order, then further ones."""
    published, keys = settings.common(), settings.common_keys(runs)
    return [key for key in published if key in keys] + [key for key in keys if key not in published]


def _own(runs: list[settings.Run], suite: list[settings.Run]) -> list[str]:
    """Keys of the block of a complete architecture; what follows the dataset is in Table 5."""
    return [key for key in settings.own_keys(runs, suite) if not settings.owns_dataset_row(runs, key)]


def _row(runs: list[settings.Run], key: str, notes: Notes) -> list[Cell]:
    """Name, our and the published value of a setting; footnotes name runs that deviate or lack it."""
    name, published = settings.name(key), settings.published(key, runs[0].dataset, runs[0].model)
    if key == "training.seed":
        seeds = sorted({run.settings[key] for run in runs})
        return [Cell(name), Cell(plain(seeds), runs=settings.folders(runs)), Cell(_paper(*published))]
    value, others = settings.usual(runs, key)
    marks = [notes.mark(f"{who}: {settings.words(other)}") for who, other in others.items()]
    having = [run for run in runs if key in run.settings]
    lacking = {run.label for run in runs} - {run.label for run in having}
    if lacking:
        marks.append(notes.mark(f"only {settings.labels(having)}"))
    marks += [notes.mark(reason) for reason in settings.on_purpose(having, key)]
    ours = Cell(settings.words(value), marks=tuple(marks), runs=settings.folders(having))
    return [Cell(name), ours, Cell(_paper(*published))]


def _paper(text: str, source: str) -> str:
    """The published value in our spelling, with its source when that is not the paper itself."""
    text = settings.words(text)
    return text if source in ("paper", "") else f"{text} ({source})"
