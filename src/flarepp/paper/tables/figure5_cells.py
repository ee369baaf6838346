"""The cells of Figure 5 as a table: every step time, peak and ratio that it draws, and why a cell has none."""

from __future__ import annotations

from pathlib import Path

import pandas

from flarepp.paper import cost, deviations, measured, quoted
from flarepp.paper.cells import check_scale
from flarepp.paper.typeset import Block, Cell, Notes, Table, latex, markdown, write_texts

NAME = "figure5_cells"
TIME, MEMORY = "time of a step", "peak memory"
COLUMNS = [
    ("", "N", "r"),
    (TIME, "ms", "r"),
    (TIME, "over FLARE", "r"),
    (TIME, "steps", "r"),
    (TIME, "first step (ms)", "r"),
    (MEMORY, "MiB", "r"),
    (MEMORY, "over FLARE", "r"),
    (MEMORY, "off the line (%)", "r"),
]
RATIOS = {"time_over_flare": "step_ms", "memory_over_flare": "peak_memory_mb"}


def build(records: pandas.DataFrame, out: Path, *, scale: str) -> None:
    """Write out/figure5_cells.tex (a table a model), .csv and .md.

    records: the tidy table (suite "figure5" is used). scale: name of the scale. ValueError for records of another scale or
    for what `cost.cells` refuses; FileNotFoundError when a run folder named in the records is gone.
    """
    check_scale(records, scale)
    rows = cost.cells(records)
    for name, metric in RATIOS.items():
        rows[name] = cost.ratios(rows, metric)
    rows["memory_off_line"] = _off_lines(rows)
    differing = deviations.words(deviations.find(records, cost.SUITE, scale).values())
    stamp = quoted.stamp(scale, (source for source in rows["data_source"] if source), differing)
    parts = {model: _table(part, scale, stamp) for model, part in rows.groupby("model", sort=False)}
    tex = "\n".join(latex(table, f"{NAME}_{model}") for model, table in parts.items())
    tidy = rows.drop(columns=["dataset", "dataset_label", "failed", "n"]).assign(scale=scale)
    tidy["runs"] = [";".join(runs) for runs in rows["runs"]]
    write_texts(tex, markdown(_table(rows, scale, stamp)), tidy, out, NAME)


def _off_lines(rows: pandas.DataFrame) -> pandas.Series:
    """By how many percent of the largest of its line each peak lies beside the straight line in N."""
    found = pandas.Series(float("nan"), index=rows.index)
    for _, line in cost.lines(rows):
        if fitted := cost.fit(line):
            found.update(fitted[2])
    return found


def _table(rows: pandas.DataFrame, scale: str, stamp: str) -> Table:
    notes = Notes()
    blocks = [Block([_row(row, notes) for _, row in line.iterrows()], _title(line)) for _, line in cost.lines(rows)]
    return Table(_caption(rows, scale), COLUMNS, blocks, stamp, notes.items())


def _title(line: pandas.DataFrame) -> str:
    """A line's name, and the straight line through its peaks."""
    name, fitted = cost.line_name(line), cost.fit(line)
    if not fitted:
        return name
    start, slope, beside = fitted
    return f"{name}: peak ≈ {start:.3g} MiB + {1024 * slope:.3g} KiB × N, off by at most {beside.abs().max():.1f} %"


def _row(row: pandas.Series, notes: Notes) -> list[Cell]:
    """One cell; what it has no number of is `--` with the reason as a footnote."""
    tokens = Cell(f"{row['num_tokens']:,}")
    if not row["n"]:
        return [tokens, Cell("--", marks=(notes.mark(row["reason"]),)), *[Cell("--")] * (len(COLUMNS) - 2)]
    peak = Cell(measured.number(row["peak_memory_mb"]))
    if row["peak_memory_mb"] <= 0:
        peak = Cell("--", marks=(notes.mark("too little to be measured"),))
    return [
        tokens, Cell(measured.step(row)), _ratio(row["time_over_flare"]), Cell(f"{row['steps']:.0f}"),
        Cell(measured.number(row["first_step_ms"])), peak, _ratio(row["memory_over_flare"]),
        Cell("" if pandas.isna(row["memory_off_line"]) else f"{row['memory_off_line']:+z.1f}"),
    ]  # fmt: skip


def _ratio(value: float) -> Cell:
    return Cell("" if pandas.isna(value) else f"{value:.2f}")


def _caption(rows: pandas.DataFrame, scale: str) -> str:
    return (
        f"The cells of Figure 5. Scale: {scale}. {cost.how(rows)} First step: on a GPU with what is compiled, on a CPU the one whose memory is measured. Over"
        " FLARE: at the same N and M. Off the line: distance of a peak from the straight line in N, in percent of the largest peak."
    )
