"""The numbers of Figure 3: its two small tables, then every cell of latents and depth, the paper's values beside ours."""

from __future__ import annotations

from pathlib import Path

import pandas

from flarepp.paper import deviations, quoted
from flarepp.paper.cells import cells, check_scale, data_words
from flarepp.paper.typeset import Block, Cell, Notes, Table, spread, three_digits, write

NAME, SUITE = "figure3_cells", "figure3"
PAIR = ("flare", "flarepp")
AT_ONE = {"darcy": 128}  # datasets whose small table is of one M, that of Table 1, and the paper's; others' is of means
COLUMNS = [("", "B", "l"), ("", "M", "l")]
GROUP = ["FLARE", "FLARE++", "reduction (%)"]


def build(records: pandas.DataFrame, out: Path, *, shown: str, scale: str) -> None:
    """Write out/figure3_cells.tex, .csv, .md and .html.

    records: the tidy table (suite "figure3" is used). shown: "last", "ema" or "best_test". scale: name of the scale.
    ValueError for an unknown error or records of another scale.
    """
    check_scale(records, scale, SUITE)
    errors = cells(records, SUITE, shown)
    errors = errors[errors["model"].isin(PAIR)].copy()
    errors["shown"] = [three_digits(mean) if n else "" for mean, n in zip(errors["mean"], errors["n"])]
    errors["latents"] = [f"{latents:.0f}" for latents in errors["num_latents"]]
    errors["note"] = [_note(row) for _, row in errors.iterrows()]
    errors["theirs"] = errors["num_latents"]
    small = pandas.concat([_small(part) for _, part in errors.groupby("dataset", sort=False)] or [errors.assign(title="")])
    every = errors.assign(title=errors["dataset_label"] + ": every cell")
    rows = pandas.concat([small, every.sort_values(["num_blocks", "num_latents"], kind="stable")])
    rows["paper"] = [_paper(row) for _, row in rows.iterrows()]
    differing = deviations.words(deviations.find(records, SUITE, scale).values())
    stamp = quoted.stamp(scale, (source for source in errors["data_source"] if source), differing)
    write(_table(rows, shown, scale, stamp), _data(rows, shown, scale), out, NAME)


def _note(row: pandas.Series) -> str:
    """Why a cell has no value, or what its value leaves out."""
    if not row["n"]:
        return row["status"]
    return row["failed"] and f"{row['failed']}: mean of the other {row['n']}"


def _small(part: pandas.DataFrame) -> pandas.DataFrame:
    """The rows of one dataset's small table: those of Table 1's M, or of the means over M."""
    label, theirs = part["dataset_label"].iloc[0], AT_ONE.get(part["dataset"].iloc[0])
    if theirs is None:
        means = [mean for _, depth in part.groupby("num_blocks") for mean in _means(depth)]
        return pandas.DataFrame(means).assign(title=f"{label}: mean over M")
    ours = sorted(part["num_latents"].unique())[-2:][0]
    title = f"{label}: M = {ours:.0f}" + (f", in the paper {theirs}" if ours != theirs else "")
    return part[part["num_latents"] == ours].assign(title=title, theirs=theirs).sort_values("num_blocks", kind="stable")


def _means(depth: pandas.DataFrame) -> list[dict]:
    """The mean of each model at one depth over the M where both have a value; what is missing from it is noted."""
    good = depth[depth["n"] > 0]
    common = good[good.groupby("num_latents")["model"].transform("nunique") == len(PAIR)].sort_values("num_latents")
    note = "; ".join(f"{row['label']} at M = {row['latents']}: {row['note']}" for _, row in depth.iterrows() if row["note"])
    found = []
    for model, own in depth.groupby("model", sort=False):
        rows = common[common["model"] == model]
        mean = rows["mean"].mean()
        values = {"mean": mean, "std": float("nan"), "n": int(rows["n"].min()) if len(rows) else 0}
        values |= {"shown": three_digits(mean) if len(rows) else "", "note": note or ("" if len(rows) else "not run")}
        values |= {"latents": f"mean of {' '.join(rows['latents'])}".strip(), "num_latents": 0.0, "theirs": 0.0}
        found.append(own.iloc[0].to_dict() | values | {"runs": tuple(run for runs in own["runs"] for run in runs)})
    return found


def _paper(row: pandas.Series) -> float:
    """What the paper prints of a cell, NaN where it prints nothing."""
    return quoted.figure3().get((row["dataset"], row["model"], row["num_blocks"], row["theirs"]), float("nan"))


def _table(rows: pandas.DataFrame, shown: str, scale: str, stamp: str) -> Table:
    """A row per depth and number of latents: FLARE, FLARE++, how far the latter lies below; ours, then the paper's."""
    notes = Notes()
    blocks = [
        Block([_row(pair, notes) for _, pair in block.groupby(["num_blocks", "num_latents"], sort=False)], title)
        for title, block in rows.groupby("title", sort=False)
    ]
    groups = ("this project" + (f", scale {scale}" if scale != "paper" else ""), "paper, published data")
    columns = COLUMNS + [(group, heading, "r") for group in groups for heading in GROUP]
    seeds = int(rows["n"].max()) if len(rows) else 0
    several = ", mean ± standard deviation (of single cells)" if seeds > 1 else ""
    caption = (
        f"Latent budget and depth: relative L2 error in % on the test set. Scale: {scale}. Data: {data_words(rows)}. Shown:"
        f" {quoted.weights_words(shown)}; n = {seeds} seed{'' if seeds == 1 else 's'}{several}. The lower error of a pair is"
        " bold. Reduction: by how many percent FLARE++ lies below FLARE. The paper's own numbers are those that its text"
        " prints, their reductions computed from them; its means are over M = 32, 64, 128."
    )
    return Table(caption, columns, blocks, stamp, notes.items())


def _row(pair: pandas.DataFrame, notes: Notes) -> list[Cell]:
    by_model = {row["model"]: row for _, row in pair.iterrows()}
    flare, flarepp = (by_model.get(model) for model in PAIR)
    first = pair.iloc[0]
    ours = [float("nan") if row is None else row["mean"] for row in (flare, flarepp)]
    theirs = [row["paper"] if row is not None else float("nan") for row in (flare, flarepp)]
    paper = [Cell("--" if pandas.isna(value) else f"{value:.2f}") for value in theirs]
    latents = " or ".join(dict.fromkeys(row["latents"] for row in by_model.values()))
    return [
        Cell(f"{first['num_blocks']:.0f}"),
        Cell(latents),
        _error(flare, flarepp, notes),
        _error(flarepp, flare, notes),
        _reduction(ours[0], ours[1], digits=1),
        *paper,
        _reduction(theirs[0], theirs[1], digits=0),
    ]


def _error(row: pandas.Series, other: pandas.Series, notes: Notes) -> Cell:
    """A measured error, bold where the other one is no lower in the digits shown, or `--` with the reason."""
    if row is None or not row["n"]:
        return Cell("--", marks=(notes.mark("not run" if row is None else row["note"]),))
    text = row["shown"] + ("" if pandas.isna(row["std"]) else f" ± {spread(row['std'], row['shown'])}")
    complete = other is not None and other["n"] and not (row["note"] or other["note"])
    bold = bool(complete and float(row["shown"]) <= float(other["shown"]))
    return Cell(text, bold, marks=(notes.mark(row["note"]),) if row["note"] else (), runs=row["runs"])


def _reduction(flare: float, flarepp: float, digits: int) -> Cell:
    value = 100 * (1 - flarepp / flare)
    return Cell("--" if pandas.isna(value) else f"{value:z.{digits}f}")


def _data(rows: pandas.DataFrame, shown: str, scale: str) -> pandas.DataFrame:
    """The tidy table: a row per model and cell, means over M included, our numbers at full precision beside the paper's."""
    tidy = rows[["dataset", "model", "label", "num_blocks", "n", "status", "note", "data_source"]].copy()
    tidy.insert(4, "num_latents", rows["latents"])
    tidy.insert(5, "error_percent", rows["mean"])
    tidy.insert(6, "std_percent", rows["std"])
    tidy["paper_error_percent_published_data"] = rows["paper"]
    tidy["shown"], tidy["scale"] = shown, scale
    tidy["runs"] = [";".join(runs) for runs in rows["runs"]]
    return tidy
