"""Table 2: step time, peak memory and efficiency when R ranks share the tokens of a sample; the paper's values beside."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pandas

from flarepp.paper import deviations, measured, quoted, scaling
from flarepp.paper.cells import check_scale
from flarepp.paper.typeset import Block, Cell, Notes, Table, write

PAPERS_GPU = "H100"
COSTS, EFFICIENCIES, TRAFFIC = ("step (ms)", "peak (MiB)"), ("time", "memory"), ("collectives", "KiB")
KIB = 2**10


def build(records: pandas.DataFrame, out: Path, *, scale: str) -> None:
    """Write out/table2.tex, .csv and .md.

    records: the tidy table (suite "table2" is used). scale: name of the scale. ValueError for records of another scale or
    for what `scaling.efficiencies` refuses; FileNotFoundError when a run folder named in the records is gone.
    """
    check_scale(records, scale)
    rows, notes = scaling.efficiencies(records), Notes()
    blocks = [
        Block([_row(row, rows, notes) for _, row in group.iterrows()])
        for _, group in rows.groupby(["model", "num_tokens"], sort=False)
    ]
    rest = _papers_rest(rows)
    blocks += [Block(rest, "rows of the paper that were not run here")] if rest else []
    ours = "this project" + (f", scale {scale}" if scale != "paper" else "")
    groups = {ours: COSTS, "efficiency": EFFICIENCIES, "the paper's": EFFICIENCIES, "of one rank in a step": TRAFFIC}
    columns = [("", "model", "l"), *(("", symbol, "r") for symbol in "NMR")]
    columns += [(group, heading, "r") for group, headings in groups.items() for heading in headings]
    differing = [*deviations.find(records, scaling.SUITE, scale).values(), _other_gpus(rows, scale)]
    stamp = quoted.stamp(scale, (source for source in rows["data_source"] if source), deviations.words(differing))
    write(Table(_caption(rows, scale), columns, blocks, stamp, notes.items()), _data(rows, scale), out, "table2")


def _row(row: pandas.Series, rows: pandas.DataFrame, notes: Notes) -> list[Cell]:
    """One run; what it has no number of is `--` with the reason as a footnote."""
    cores = f"{row['cores']:.0f} CPU core{'s' if row['cores'] > 1 else ''}"
    shared = f"the ranks had {cores} for all their threads: efficiency there says nothing about the method"
    marks = (notes.mark(shared),) if row["shared_cores"] else ()
    sizes = [Cell(f"{row[key]:,.0f}") for key in ("num_tokens", "num_latents")]
    sizes.append(Cell(f"{row['num_ranks']:.0f}", marks=marks))
    theirs = quoted.table2(*row[scaling.KEYS]) or ("", "")
    if row["n"]:
        ours = [Cell(measured.step(row)), Cell(measured.number(row["peak_memory_mb"]))]
        ours += [_efficiency(row, name, rows, notes) for name in scaling.EFFICIENCIES]
        traffic = [f"{row['forward_collectives']:.0f} / {row['backward_collectives']:.0f}"]
        traffic.append(f"{measured.number(row['forward_bytes'] / KIB)} / {measured.number(row['backward_bytes'] / KIB)}")
    else:
        ours = [Cell("--", marks=(notes.mark(row["reason"]),)), *[Cell("--")] * (len(COSTS + EFFICIENCIES) - 1)]
        traffic = ["--"] * len(TRAFFIC)
    return [Cell(row["label"]), *sizes, *ours, *map(Cell, theirs), *map(Cell, traffic)]


def _efficiency(row: pandas.Series, name: str, rows: pandas.DataFrame, notes: Notes) -> Cell:
    """An efficiency, `ref.` on one rank, or `--` with what it lacks."""
    if row["num_ranks"] == 1:
        return Cell("ref.")
    if not pandas.isna(row[name]):
        return Cell(f"{row[name]:.2f}")
    same = (rows[scaling.KEYS[:-1]] == row[scaling.KEYS[:-1]]).all(axis=1)
    single = rows[same & (rows["num_ranks"] == 1)]
    if single.empty or not single.iloc[0]["n"]:
        reason = "not run" if single.empty else single.iloc[0]["reason"]
        return Cell("--", marks=(notes.mark(f"nothing to compare with, on one rank: {reason}"),))
    return Cell("--", marks=(notes.mark("too little to be measured"),))


def _papers_rest(rows: pandas.DataFrame) -> list[list[Cell]]:
    """The paper's rows that have no row of ours beside them."""
    known = set(rows[scaling.KEYS].itertuples(index=False, name=None))
    found = []
    for _, row in scaling.printed().iterrows():
        if tuple(row[scaling.KEYS]) not in known:
            sizes = [Cell(f"{row[key]:,}") for key in scaling.KEYS[1:]]
            theirs = [Cell(text) for text in quoted.table2(*row[scaling.KEYS])]
            ours = [Cell("")] * len(COSTS + EFFICIENCIES)
            found.append([Cell(row["label"]), *sizes, *ours, *theirs, *[Cell("")] * len(TRAFFIC)])
    return found


def _caption(rows: pandas.DataFrame, scale: str) -> str:
    good = rows[rows["n"] > 0]
    text = f"Context parallelism: R ranks share the N tokens of a sample; M latents. Scale: {scale}. "
    text += _how(good) if len(good) else "No run ended well. "
    return text + (
        "Efficiency: T(1) / (R T(R)) in time and P(1) / (R P(R)) in memory, against the same row with R = 1 (ref.)."
        " Collectives and KiB: what the mixers of all blocks exchange, as one rank hands it in, forward / backward."
        f" The paper, on four {PAPERS_GPU} GPUs, prints M = {quoted.TABLE2_LATENTS} alone; its batch and FFN ratio are not"
        " stated, and taken to be those of its cost study, 1 and 4."
    )


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
    paper = [quoted.table2(*keys) or ("", "") for keys in rows[scaling.KEYS].itertuples(index=False, name=None)]
    for position, name in enumerate(scaling.EFFICIENCIES):
        tidy[f"paper_{name}"] = [texts[position] for texts in paper]
    return tidy.assign(runs=[";".join(runs) for runs in rows["runs"]])
