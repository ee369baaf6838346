"""The cells of Figure 5 as a table: every step time, peak and ratio that it draws, and why a cell has none."""

from __future__ import annotations

from pathlib import Path

import pandas

from flarepp.paper import cost, deviations, html, measured, quoted
from flarepp.paper.cells import check_scale, signed
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
    check_scale(records, scale, cost.SUITE)
    rows = cost.cells(records)
    for name, metric in RATIOS.items():
        rows[name] = cost.ratios(rows, metric)
    rows["memory_off_line"], rows["runs_over_flare"] = _off_lines(rows), _with_reference(rows)
    differing = deviations.words(deviations.find(records, cost.SUITE, scale).values())
    stamp = quoted.stamp(scale, (source for source in rows["data_source"] if source), differing)
    parts = {model: _table(part, scale, stamp) for model, part in rows.groupby("model", sort=False)}
    tex = "\n".join(latex(table, f"{NAME}_{model}") for model, table in parts.items())
    tidy = rows.drop(columns=["dataset", "dataset_label", "failed", "n", "runs", "runs_over_flare"]).assign(scale=scale)
    tidy["runs"] = [";".join(runs) for runs in rows["runs"]]
    whole = _table(rows, scale, stamp)
    write_texts(tex, markdown(whole), html.page(html.title(NAME), [("", whole)]), tidy, out, NAME)


def _off_lines(rows: pandas.DataFrame) -> pandas.Series:
    """By how many percent of the largest of its line each peak lies beside the straight line in N."""
    found = pandas.Series(float("nan"), index=rows.index)
    for _, line in cost.lines(rows):
        if fitted := cost.fit(line):
            found.update(fitted[2])
    return found


def _with_reference(rows: pandas.DataFrame) -> list[tuple[str, ...]]:
    """The runs behind the ratios of every cell: its own and that of the same N and M which it is compared with."""
    alone = rows[rows["model"] == cost.REFERENCE]
    theirs = dict(zip(alone[cost.KEYS[1:]].itertuples(index=False, name=None), alone["runs"]))
    places = rows[cost.KEYS[1:]].itertuples(index=False, name=None)
    return [runs + theirs.get(place, ()) for runs, place in zip(rows["runs"], places)]


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
    tokens, runs, both = Cell(f"{row['num_tokens']:,}"), row["runs"], row["runs_over_flare"]
    if not row["n"]:
        return [tokens, Cell("--", marks=(notes.mark(row["reason"]),), runs=runs), *[Cell("--")] * (len(COLUMNS) - 2)]
    peak = Cell(measured.number(row["peak_memory_mb"]), runs=runs)
    if row["peak_memory_mb"] <= 0:
        peak = Cell("--", marks=(notes.mark("too little to be measured"),), runs=runs)
    return [
        tokens,
        Cell(measured.step(row), runs=runs),
        _ratio(row["time_over_flare"], both),
        Cell(f"{row['steps']:.0f}", runs=runs),
        Cell(measured.number(row["first_step_ms"]), runs=runs),
        peak,
        _ratio(row["memory_over_flare"], both),
        _percent(row["memory_off_line"], runs),
    ]


def _ratio(value: float, runs: tuple[str, ...]) -> Cell:
    return Cell("") if pandas.isna(value) else Cell(f"{value:.2f}", runs=runs)


def _percent(value: float, runs: tuple[str, ...]) -> Cell:
    return Cell("") if pandas.isna(value) else Cell(signed(value), runs=runs)


def _caption(rows: pandas.DataFrame, scale: str) -> str:
    return (
        f"The cells of Figure 5. Scale: {scale}. {cost.how(rows)} First step: on a GPU with what is compiled, on a CPU the one"
        " whose memory is measured. Over FLARE: at the same N and M. Off the line: distance of a peak from the straight line in"
        " N, in percent of the largest peak."
    )
