"""Table 4: the settings that the accuracy runs share, as those runs were really made, beside the paper's."""

from __future__ import annotations

from pathlib import Path

import pandas

from flarepp.paper import deviations, quoted, settings
from flarepp.paper.cells import check_scale
from flarepp.paper.typeset import Block, Cell, Notes, Table, plain, write

WORDS = {"fp32": "FP32", "fp16": "FP16", "layernorm": "LayerNorm", "rmsnorm": "RMSNorm", "True": "yes"}


def build(records: pandas.DataFrame, out: Path, *, shown: str, compared: str, scale: str) -> None:
    """Write out/table4.tex, .csv and .md from the specs of the runs of suite "table1" (`shown` and `compared`
    change nothing here).

    FileNotFoundError when a run folder named in the records is gone.
    """
    check_scale(records, scale)
    runs, published = settings.read(records), settings.common()
    keys = settings.common_keys(runs)
    ordered = [key for key in published if key in keys] + [key for key in keys if key not in published]
    notes = Notes()
    rows = [_row(runs, key, published.get(key, {}), notes) for key in ordered]
    columns = [("", "setting", "l"), ("", "these runs", "l"), ("", "paper", "l")]
    caption = (
        f"Settings shared by the runs of Table 1 ({settings.labels(runs) or 'no runs'}), read from the runs."
        f" Scale: {scale}. An empty cell in the last column: the paper does not state it."
    )
    differing = deviations.words(deviations.find(records, "table1", scale).values())
    stamp = quoted.stamp(scale, (run.data_source for run in runs), differing)
    data = pandas.DataFrame(
        [[key, *(cell.text for cell in row)] for key, row in zip(ordered, rows)],
        columns=["key", "setting", "runs", "paper"],
    )
    data["footnotes"] = ["; ".join(dict(notes.items())[mark] for mark in row[1].marks) for row in rows]
    write(Table(caption, columns, [Block(rows)], stamp, notes.items()), data, out, "table4")


def _row(runs: list[settings.Run], key: str, published: dict, notes: Notes) -> list[Cell]:
    """Name, our and the paper's value of a setting; footnotes name runs that deviate or lack it."""
    name = settings.name(key)
    if key == "training.seed":
        seeds = sorted({run.settings[key] for run in runs})
        return [Cell(name), Cell(plain(seeds)), Cell(_paper(published))]
    value, others = settings.usual(runs, key)
    marks = [notes.mark(f"{who}: {_words(other)}") for who, other in others.items()]
    having = [run for run in runs if key in run.settings]
    lacking = {run.label for run in runs} - {run.label for run in having}
    if lacking:
        marks.append(notes.mark(f"only {settings.labels(having)}"))
    return [Cell(name), Cell(_words(value), marks=tuple(marks)), Cell(_paper(published))]


def _words(value: object) -> str:
    return WORDS.get(value, value) if isinstance(value, str) else plain(value)


def _paper(published: dict) -> str:
    """The paper's value in our spelling, with its source when that is not the paper itself."""
    text = published.get("paper", "")
    try:
        text = plain(float(text))
    except ValueError:
        text = WORDS.get(text, text)
    return text if published.get("source", "") in ("paper", "") else f"{text} ({published['source']})"
