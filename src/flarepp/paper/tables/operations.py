"""The operation counts of the mixers: our formulas, what is counted on the modules, and the paper's formulas beside them."""

from __future__ import annotations

from pathlib import Path

import pandas

from flarepp.paper import cost, deviations, quoted
from flarepp.paper.cells import check_scale
from flarepp.paper.typeset import Block, Cell, Notes, Table, plain, write

COUNTED = "mixer_multiply_adds"
DATA = [
    "model", "label", "operations", "num_latents", "num_tokens", "channel_dim", "num_heads", COUNTED, "over_flare",
    "paper_formula", "paper_value", "paper_over_flare",
]  # fmt: skip
OURS, PAPERS = "this project", "the paper's"


def build(records: pandas.DataFrame, out: Path, *, scale: str) -> None:
    """Write out/operations.tex, .csv and .md.

    records: the tidy table (suite "figure5" is used). scale: name of the scale. ValueError for records of another scale or
    for what `cost.cells` refuses; FileNotFoundError when a run folder named in the records is gone.
    """
    check_scale(records, scale, cost.SUITE)
    rows, notes = _counts(cost.cells(records)), Notes()
    blocks = [Block([_row(row, notes) for _, row in group.iterrows()]) for _, group in rows.groupby("model", sort=False)]
    columns = [("", "mixer", "l"), ("", "M", "r"), ("", "N", "r"), (OURS, "formula", "l"), (OURS, "counted", "r")]
    columns += [(OURS, "over FLARE", "r"), (PAPERS, "formula", "l"), (PAPERS, "value", "r"), (PAPERS, "over FLARE", "r")]
    differing = deviations.words(deviations.find(records, cost.SUITE, scale).values())
    stamp = quoted.stamp(scale, (source for source in rows["data_source"] if source), differing)
    table = Table(_caption(rows, scale), columns, blocks, stamp, notes.items())
    data = rows[DATA].assign(scale=scale, runs=[";".join(runs) for runs in rows["runs"]])
    write(table, data, out, "operations")


def _counts(cells: pandas.DataFrame) -> pandas.DataFrame:
    """One row a mixer and M, its count at the largest N that has one, beside the paper's."""
    largest = [rows.loc[rows[COUNTED].last_valid_index()] if rows[COUNTED].notna().any() else rows.iloc[-1]
               for _, rows in cost.lines(cells)]  # fmt: skip
    frame = pandas.DataFrame(largest, columns=cells.columns).reset_index(drop=True)
    alone = frame[frame["model"] == cost.REFERENCE].set_index("num_latents")
    frame["over_flare"] = frame[COUNTED] / frame["num_latents"].map(alone[COUNTED])
    theirs = dict(zip(alone.index, alone["runs"]))
    frame["runs_over_flare"] = [runs + theirs.get(latents, ()) for runs, latents in zip(frame["runs"], frame["num_latents"])]
    papers = [
        quoted.operations(*sizes) or ("", None)
        for sizes in frame[["model", "channel_dim", "num_latents"]].itertuples(index=False)
    ]
    frame["paper_formula"], frame["paper_value"] = ([pair[place] for pair in papers] for place in (0, 1))
    frame["paper_value"] = frame["paper_value"].astype(float)
    alone = [(quoted.operations(cost.REFERENCE, *sizes) or ("", None))[1]
             for sizes in frame[["channel_dim", "num_latents"]].itertuples(index=False)]  # fmt: skip
    frame["paper_over_flare"] = frame["paper_value"] / pandas.Series(alone, index=frame.index, dtype=float)
    return frame


def _row(row: pandas.Series, notes: Notes) -> list[Cell]:
    """One mixer at one M; a count that could not be made says why."""
    uncounted, runs = pandas.isna(row[COUNTED]), row["runs"]
    marks = (notes.mark(row["reason"]),) if uncounted else ()
    counted = Cell("--" if uncounted else f"{row[COUNTED]:,.0f}", marks=marks, runs=runs)
    formula = row["operations"].replace("^2", "²")
    return [
        Cell(row["label"]), _number(row["num_latents"], ",.0f"), Cell("" if uncounted else f"{row['num_tokens']:,}"),
        Cell(formula or "--"), counted, _number(row["over_flare"], ".2f", row["runs_over_flare"]),
        Cell(row["paper_formula"]), _number(row["paper_value"], ",.0f"), _number(row["paper_over_flare"], ".2f"),
    ]  # fmt: skip


def _number(value: float, form: str, runs: tuple[str, ...] = ()) -> Cell:
    return Cell("") if pandas.isna(value) else Cell(format(value, form), runs=runs)


def _caption(rows: pandas.DataFrame, scale: str) -> str:
    sizes = [f"{symbol} = {' or '.join(plain(float(value)) for value in rows[name].dropna().unique())}"
             for symbol, name in (("C", "channel_dim"), ("H", "num_heads")) if rows[name].notna().any()]  # fmt: skip
    return (
        f"Multiply-adds of the mixers, forward, per token and block. {', '.join(['Scale: ' + scale, *sizes])}. Formulas"
        " leave out what does not grow with N; counted is all that the module does at that N, over N. The paper counts M C for an"
        " attention call of M latents, which is 2 M C multiply-adds: scores, and their sum over the values."
    )
