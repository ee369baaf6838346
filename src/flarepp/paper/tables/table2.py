"""Table 2: step time, peak memory and efficiency when R ranks share the tokens of a sample; the paper's values beside."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pandas

from flarepp.paper import deviations, measured, quoted, scaling
from flarepp.paper.cells import check_beside, check_scale, signed
from flarepp.paper.typeset import Block, Cell, Notes, Table, write

PAPERS_GPU = "H100"
PAPERS_ALONE = f"the paper's own numbers, on four {PAPERS_GPU} GPUs, none of this project"
COSTS, EFFICIENCIES, TRAFFIC = ("step (ms)", "peak (MiB)"), ("time", "memory"), ("collectives", "KiB")
PAPERS = {"both": "the paper's", "paper": "the paper's", "difference": "to the paper's (%)"}  # what its columns are called
TOPIC = "Context parallelism: R ranks share the N tokens of a sample; M latents."
EFFICIENCY = "Efficiency: T(1) / (R T(R)) in time and P(1) / (R P(R)) in memory, against the same row with R = 1 (ref.)."
KIB = 2**10


def build(records: pandas.DataFrame, out: Path, *, scale: str, beside: str = "both") -> None:
    """Write out/table2.tex, .csv and .md.

    records: the tidy table (suite "table2" is used). scale: name of the scale. beside: "both", "ours", "paper", or
    "difference" to the paper's in % in place of its numbers; the CSV has all of our rows. ValueError for records of another
    scale or for what `scaling.efficiencies` refuses; FileNotFoundError when a run folder named in the records is gone.
    """
    check_scale(records, scale, scaling.SUITE)
    check_beside(beside)
    rows, notes = _with_papers(scaling.efficiencies(records)), Notes()
    differing = [*deviations.find(records, scaling.SUITE, scale).values(), _other_gpus(rows, scale)]
    stamp = quoted.stamp(scale, (source for source in rows["data_source"] if source), deviations.words(differing))
    caption, blocks = _caption(rows, scale, beside), _blocks(rows, beside, notes)
    stamp = PAPERS_ALONE if beside == "paper" else stamp
    write(Table(caption, _columns(beside, scale), blocks, stamp, notes.items()), _data(rows, scale), out, "table2")


def _with_papers(rows: pandas.DataFrame) -> pandas.DataFrame:
    """The rows with the paper's efficiencies as printed, and by how many percent ours lie above them."""
    paper = [quoted.table2(*keys) or ("", "") for keys in rows[scaling.KEYS].itertuples(index=False, name=None)]
    for position, name in enumerate(scaling.EFFICIENCIES):
        texts = pandas.Series([pair[position] for pair in paper], index=rows.index, dtype=object)
        differences = 100 * (rows[name].astype(float) / pandas.to_numeric(texts, errors="coerce") - 1)
        rows = rows.assign(**{f"paper_{name}": texts, f"{name}_difference_percent": differences})
    return rows


def _columns(beside: str, scale: str) -> list[tuple[str, str, str]]:
    own = "this project" + (f", scale {scale}" if scale != "paper" else "")
    ours, traffic = {own: COSTS, "efficiency": EFFICIENCIES}, {"of one rank in a step": TRAFFIC}
    theirs = {PAPERS[beside]: EFFICIENCIES} if beside in PAPERS else {}
    groups = theirs if beside == "paper" else ours | theirs | traffic
    columns = [("", "model", "l"), *(("", symbol, "r") for symbol in "NMR")]
    return columns + [(group, heading, "r") for group, headings in groups.items() for heading in headings]


def _blocks(rows: pandas.DataFrame, beside: str, notes: Notes) -> list[Block]:
    """Our runs by model and N, and what the paper has beside."""
    if beside == "paper":
        return _papers_blocks()
    groups = rows.groupby(["model", "num_tokens"], sort=False)
    blocks = [Block([_row(row, rows, beside, notes) for _, row in group.iterrows()]) for _, group in groups]
    rest = _papers_rest(rows) if beside == "both" else []
    return blocks + ([Block(rest, "rows of the paper that were not run here")] if rest else [])


def _papers_blocks() -> list[Block]:
    """The paper's rows alone."""
    groups = scaling.printed().groupby(["model", "num_tokens"], sort=False)
    return [Block([_papers_row(row) for _, row in group.iterrows()]) for _, group in groups]


def _papers_row(row: pandas.Series, *filling: Cell) -> list[Cell]:
    """One row that the paper prints; filling stands before its efficiencies."""
    sizes = [Cell(f"{row[key]:,}") for key in scaling.KEYS[1:]]
    return [Cell(row["label"]), *sizes, *filling, *map(Cell, quoted.table2(*row[scaling.KEYS]) or ())]


def _papers_rest(rows: pandas.DataFrame) -> list[list[Cell]]:
    """The paper's rows that have no row of ours beside them."""
    known = set(rows[scaling.KEYS].itertuples(index=False, name=None))
    rest = [row for _, row in scaling.printed().iterrows() if tuple(row[scaling.KEYS]) not in known]
    empty = Cell("")
    return [[*_papers_row(row, *[empty] * len(COSTS + EFFICIENCIES)), *[empty] * len(TRAFFIC)] for row in rest]


def _row(row: pandas.Series, rows: pandas.DataFrame, beside: str, notes: Notes) -> list[Cell]:
    """One run; what it has no number of is `--` with the reason as a footnote."""
    cores = f"{row['cores']:.0f} CPU core{'s' if row['cores'] > 1 else ''}"
    shared = f"the ranks had {cores} for all their threads: efficiency there says nothing about the method"
    marks = (notes.mark(shared),) if row["shared_cores"] else ()
    sizes = [Cell(f"{row[key]:,.0f}") for key in ("num_tokens", "num_latents")]
    sizes.append(Cell(f"{row['num_ranks']:.0f}", marks=marks))
    runs = row["runs"]
    if row["n"]:
        ours = [Cell(measured.step(row), runs=runs), Cell(measured.number(row["peak_memory_mb"]), runs=runs)]
        ours += [_efficiency(row, name, rows, notes) for name in scaling.EFFICIENCIES]
        texts = [f"{row['forward_collectives']:.0f} / {row['backward_collectives']:.0f}"]
        texts.append(f"{measured.number(row['forward_bytes'] / KIB)} / {measured.number(row['backward_bytes'] / KIB)}")
        traffic = [Cell(text, runs=runs) for text in texts]
    else:
        ours = [Cell("--", marks=(notes.mark(row["reason"]),), runs=runs), *[Cell("--")] * (len(COSTS + EFFICIENCIES) - 1)]
        traffic = [Cell("--")] * len(TRAFFIC)
    return [Cell(row["label"]), *sizes, *ours, *_theirs(row, beside), *traffic]


def _theirs(row: pandas.Series, beside: str) -> list[Cell]:
    """The paper's efficiencies beside a run, or by how many percent ours lie above them; empty where it has no such row."""
    if beside == "ours":
        return []
    found = []
    for name in scaling.EFFICIENCIES:
        text, difference = row[f"paper_{name}"], row[f"{name}_difference_percent"]
        if beside == "difference" and text:
            found.append(Cell("--") if pandas.isna(difference) else Cell(signed(difference), runs=row["runs"]))
        else:
            found.append(Cell(text))
    return found


def _efficiency(row: pandas.Series, name: str, rows: pandas.DataFrame, notes: Notes) -> Cell:
    """An efficiency, `ref.` on one rank, or `--` with what it lacks."""
    if row["num_ranks"] == 1:
        return Cell("ref.")
    same = (rows[scaling.KEYS[:-1]] == row[scaling.KEYS[:-1]]).all(axis=1)
    single = rows[same & (rows["num_ranks"] == 1)]
    if not pandas.isna(row[name]):
        return Cell(f"{row[name]:.2f}", runs=row["runs"] + single.iloc[0]["runs"])
    if single.empty or not single.iloc[0]["n"]:
        reason = "not run" if single.empty else single.iloc[0]["reason"]
        return Cell("--", marks=(notes.mark(f"nothing to compare with, on one rank: {reason}"),))
    return Cell("--", marks=(notes.mark("too little to be measured"),))


def _caption(rows: pandas.DataFrame, scale: str, beside: str) -> str:
    papers = (
        f"The paper, on four {PAPERS_GPU} GPUs, prints M = {quoted.TABLE2_LATENTS} alone; its batch and FFN ratio are not"
        " stated, and taken to be those of its cost study, 1 and 4."
    )
    if beside == "paper":
        return f"{TOPIC} {EFFICIENCY} {papers}"
    good = rows[rows["n"] > 0]
    text = (
        f"{TOPIC} Scale: {scale}. {_how(good) if len(good) else 'No run ended well. '}{EFFICIENCY}"
        " Collectives and KiB: what the mixers of all blocks exchange, as one rank hands it in, forward / backward."
    )
    if beside == "difference":
        text += " To the paper's: by how many percent our efficiency lies above the one that it prints."
    return text if beside == "ours" else f"{text} {papers}"


def _how(good: pandas.DataFrame) -> str:
    """How the runs that ended well were made."""
    extra = good[good["num_ranks"] > 1]
    others = (
        f" Apart from those shown, a step has {measured.values(extra, 'loss_collectives')} collectives of the loss and"
        f" {measured.values(extra, 'gradient_collectives')} of the parameter gradients."
    )
    return (
        "A step is a forward and a backward pass on random tokens, with the loss and the sum of the gradients and without an"
        f" optimiser; its time is the median (quartiles) of the slowest rank over {measured.values(good, 'steps')} steps"
        f" after a warm-up, on {', '.join(good['device'].unique())}. {measured.sizes(good)},"
        f" CPU threads a rank: {measured.values(good, 'num_threads')}."
        f" Peak memory: the largest of the ranks, {measured.memory(good)}.{others if len(extra) else ''} "
    )


def _other_gpus(rows: pandas.DataFrame, scale: str) -> list[str]:
    """GPUs that are not the paper's."""
    names: Iterable[str] = rows[(rows["n"] > 0) & (rows["device_type"] == "cuda")]["device"].unique()
    return [f"device {name} ({PAPERS_GPU})" for name in names if scale == "paper" and PAPERS_GPU not in name]


def _data(rows: pandas.DataFrame, scale: str) -> pandas.DataFrame:
    """The tidy table: all numbers at full precision beside the paper's."""
    tidy = rows.drop(columns=["dataset", "dataset_label", "failed", "n", "runs"]).assign(scale=scale)
    return tidy.assign(runs=[";".join(runs) for runs in rows["runs"]])
