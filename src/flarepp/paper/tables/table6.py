"""Table 6: accuracies of mixers on the Long Range Arena; the paper's values in a column group of their own."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path

import pandas

from flarepp.paper import deviations, quoted, sequences
from flarepp.paper.cells import check_beside, check_scale, signed
from flarepp.paper.typeset import Block, Cell, Notes, Table, spread, write

AVERAGE = "average"
BLOCKS = {("ranked", "reference"): "", ("beyond",): "beyond the paper, not ranked", ("trivial",): "no learning, not ranked"}
PAPERS, DIFFERENCE = "paper", "difference to the paper (points)"
PAPERS_ALONE = "the paper's own numbers, none of this project"
QUOTED = "the paper quotes this row from other studies, it did not train it in its backbone"
Columns = list[tuple[str, str, Callable]]
BASELINE = "majority"  # what a mixer must beat to have learned anything,
MARGIN = 2  # by that many standard errors of the choice of samples
NOTHING_LEARNED = f"not above the majority class by {MARGIN} standard errors on any task"
RANKED = (
    " Best ranked value bold, second underlined; values that agree in the digits shown are ranked equal. The average is that of"
    " rows with a value on every task."
)
SOURCES = {"published": "the published files", "generated": "drawn by our own code"}
Rows = dict[str, pandas.Series]  # of one mixer, by task


def build(records: pandas.DataFrame, out: Path, *, scale: str, beside: str = "both") -> None:
    """Write out/table6.tex, .csv, .md and .html.

    records: the tidy table (suite "table6" is used). scale: name of the scale. beside: "both", "ours", "paper", or
    "difference" to the paper's in points in place of its numbers; the CSV has all. ValueError for records of another scale,
    of two protocols, or for what `cells` refuses; FileNotFoundError when a run folder named in the records is gone.
    """
    check_scale(records, scale, "table6")
    check_beside(beside)
    frame, notes = _frame(records), Notes()
    differing = deviations.words(deviations.find(records, sequences.SUITE, scale).values())
    stamp = quoted.stamp(scale, (source for source in frame["data_source"] if source), differing)
    columns = _columns(frame, beside, scale, notes)
    shown = frame[frame["paper"] != ""] if beside == "paper" else frame
    blocks = [Block(_rows(shown[shown["role"].isin(roles)], columns, notes), title) for roles, title in BLOCKS.items()]
    heads = [("", "mixer", "l"), *((group, heading, "r") for group, heading, _ in columns)]
    caption = _caption(frame, beside, scale)
    table = Table(caption, heads, [block for block in blocks if block.rows], PAPERS_ALONE if beside == "paper" else stamp,
                  notes.items())  # fmt: skip
    write(table, _data(frame, scale), out, sequences.SUITE)


def _frame(records: pandas.DataFrame) -> pandas.DataFrame:
    """A row per mixer and task and one for its average: accuracies in %, the paper's as printed, ranks of both."""
    found = sequences.frame(records)
    tasks = list(dict.fromkeys(found["dataset"]))
    groups = [group for _, group in found.groupby("model", sort=False)]
    rows = [row for group in groups for row in [*group.to_dict("records"), _average(group, tasks)]]
    frame = pandas.DataFrame(rows, columns=found.columns)
    quotes = [("", "") if key[1] == AVERAGE and not _all_of_the_papers(tasks) else quoted.table6(*key)
              for key in frame[["model", "dataset"]].itertuples(index=False, name=None)]  # fmt: skip
    frame["paper"], frame["paper_source"] = ([quote[part] for quote in quotes] for part in (0, 1))
    frame["paper_value"] = pandas.to_numeric(frame["paper"], errors="coerce").astype(float)
    frame["difference"] = frame["mean"] - frame["paper_value"]
    baseline = frame[(frame["model"] == BASELINE) & (frame["dataset"] != AVERAGE)].dropna(subset="mean")
    least = {task: mean + MARGIN * _standard_error(mean, samples)
             for task, mean, samples in zip(baseline["dataset"], baseline["mean"], baseline["num_samples"])}  # fmt: skip
    above = pandas.Series([value > least.get(task, -math.inf) for value, task in zip(frame["mean"], frame["dataset"])], dtype=bool)
    anywhere = above[frame["dataset"] != AVERAGE].groupby(frame["model"]).any()
    frame["above_majority"] = above.where(frame["dataset"] != AVERAGE, frame["model"].map(anywhere)).astype(bool)
    good = (frame["role"] == "ranked") & frame["above_majority"] & (frame["failed"] == "")
    for column, rank in (("mean", "rank"), ("paper_value", "paper_rank")):
        candidates = frame[(good if column == "mean" else frame["role"] == "ranked") & frame[column].notna()]
        ranks = candidates[column].astype(float).round(2).groupby(candidates["dataset"]).rank("dense", ascending=False)
        frame[rank] = ranks.reindex(frame.index).astype("Int64")
    return frame


def _all_of_the_papers(tasks: list[str]) -> bool:
    """Whether these are the tasks that the paper averages over."""
    return {(quoted.paper_name("dataset", task) or task).lower() for task in tasks} == set(quoted.table6_tasks())


def _standard_error(percent: float, samples: float) -> float:
    """Of an accuracy in %, from the choice of samples, in points."""
    return math.sqrt(percent * (100 - percent) / samples)


def _average(group: pandas.DataFrame, tasks: list[str]) -> dict:
    """The average of a mixer that has a value on all tasks, NaN of another."""
    good = group[(group["n"] > 0) & (group["failed"] == "")]
    complete = set(good["dataset"]) == set(tasks)
    return group.iloc[0].to_dict() | {
        "dataset": AVERAGE, "dataset_label": AVERAGE, "mean": good["mean"].mean() if complete else math.nan, "std": math.nan,
        "n": int(good["n"].min()) if complete else 0, "status": "ok" if complete else "incomplete", "failed": "",
        "data_source": "", "parameters": math.nan, "dev_is_test": None, "num_samples": math.nan,
        "runs": tuple(chain(*good["runs"])) if complete else (),
    }  # fmt: skip


def _columns(frame: pandas.DataFrame, beside: str, scale: str, notes: Notes) -> Columns:
    """Group, heading, and the function that makes the cell of a mixer from its rows by task."""
    labels = dict(frame.drop_duplicates("dataset")[["dataset", "dataset_label"]].itertuples(index=False))
    labels.pop(AVERAGE, None)
    whole = _all_of_the_papers(list(labels))
    labels |= {AVERAGE: AVERAGE if whole else f"average of these {len(labels)}"} if labels else {}
    own = "this project" + (f", scale {scale}" if scale != "paper" else "")
    ours: Columns = [(own, label, partial(_ours, task, notes)) for task, label in labels.items()]
    quotable = {task: label for task, label in labels.items() if whole or task != AVERAGE}
    theirs: Columns = [(PAPERS, label, partial(_papers, task, beside == "paper", notes)) for task, label in quotable.items()]
    differences: Columns = [(DIFFERENCE, label, partial(_difference, task)) for task, label in quotable.items()]
    return {"both": ours + theirs, "ours": ours, "paper": theirs, "difference": ours + differences}[beside]


def _rows(frame: pandas.DataFrame, columns: Columns, notes: Notes) -> list[list[Cell]]:
    rows = []
    for _, group in frame.groupby("model", sort=False):
        by_task = {row["dataset"]: row for _, row in group.iterrows()}
        rows.append([_label(group, notes), *(make(by_task) for _, _, make in columns)])
    return rows


def _label(group: pandas.DataFrame, notes: Notes) -> Cell:
    """The name of a row with what is to be known of it as footnotes."""
    first, tried = group.iloc[0], group[(group["dataset"] != AVERAGE) & (group["n"] > 0)]
    said = ["reference, not ranked"] if first["role"] == "reference" else []
    said += [QUOTED] if first["paper_source"] == "quoted" else []
    learned = first["role"] == "trivial" or tried.empty or tried["above_majority"].any()
    said += [] if learned else [NOTHING_LEARNED]
    return Cell(first["label"], marks=tuple(sorted(map(notes.mark, said))))


def _emphasis(rank: int | None) -> tuple[bool, bool]:
    """Whether a number is bold, and whether it is underlined."""
    return (False, False) if pandas.isna(rank) else (rank == 1, rank == 2)


def _ours(task: str, notes: Notes, rows: Rows) -> Cell:
    """A measured accuracy with its emphasis, or `--` with the reason as a footnote."""
    row = rows.get(task)
    if row is None:
        return Cell("")
    if task == AVERAGE and not row["n"]:
        return Cell("--")
    if not row["n"]:
        return Cell("--", marks=(notes.mark(row["status"]),), runs=row["runs"])
    marks = (notes.mark(f"{row['failed']}: mean of the other {row['n']}, not ranked"),) if row["failed"] else ()
    text = f"{row['mean']:.2f}"
    text += "" if pandas.isna(row["std"]) else f" ± {spread(row['std'], text)}"
    return Cell(text, *_emphasis(row["rank"]), marks, row["runs"])


def _papers(task: str, emphasis: bool, notes: Notes, rows: Rows) -> Cell:
    """The paper's number; of an average that its own numbers do not give a footnote says so."""
    row = rows.get(task)
    if row is None or not row["paper"]:
        return Cell("")
    marks: tuple[str, ...] = ()
    own = [each["paper_value"] for name, each in rows.items() if name != AVERAGE]
    if task == AVERAGE and own and not any(map(math.isnan, own)) and abs(sum(own) / len(own) - row["paper_value"]) > 0.01:
        marks = (notes.mark(f"as printed; the mean of its numbers is {sum(own) / len(own):.2f}"),)
    return Cell(row["paper"], *(_emphasis(row["paper_rank"]) if emphasis else (False, False)), marks)


def _difference(task: str, rows: Rows) -> Cell:
    """By how many points our accuracy lies above the paper's; `--` where one of the two is missing."""
    row = rows.get(task)
    if row is None or not row["paper"]:
        return Cell("")
    return Cell("--") if pandas.isna(row["difference"]) else Cell(signed(row["difference"]), runs=row["runs"])


def _caption(frame: pandas.DataFrame, beside: str, scale: str) -> str:
    text = "Accuracy in % on the Long Range Arena."
    if beside == "paper":
        return f"{text} As the paper prints it.{RANKED}"
    of_tasks = frame[frame["dataset"] != AVERAGE]
    seeds = int(of_tasks["n"].max()) if len(of_tasks) else 0
    protocols = "; ".join(f"Protocol {sequences.WORDS[name]}." for name in frame["protocol"].unique())
    text += f" Scale: {scale}. Data: {_data_words(of_tasks)}. {protocols} n = {seeds} seed{'' if seeds == 1 else 's'}"
    text += f"{', mean ± standard deviation' if seeds > 1 else ''}.{RANKED}"
    text += f" What does not beat the majority class by {MARGIN} standard errors is not ranked."
    ran = of_tasks[(of_tasks["role"] != "trivial") & (of_tasks["n"] > 0)]
    shared = ran.loc[ran["dev_is_test"].eq(True), "dataset_label"].unique()
    text += f" On {' and '.join(shared)} the dev split is the test split." if len(shared) else ""
    means = ran.groupby("dataset_label", sort=False).agg({"mean": "mean", "num_samples": "first"})
    spreads = [f"{_standard_error(mean, number):.1f} on {label} (n = {number:,.0f})" for label, mean, number in means.itertuples()]
    text += f" One standard error of the choice of samples, in points: {', '.join(spreads)}." if spreads else ""
    tail = {"both": " The last columns are the paper's own numbers.", "ours": ""}
    return text + tail.get(beside, " The last columns say by how many points our accuracy lies above the paper's own.")


def _data_words(of_tasks: pandas.DataFrame) -> str:
    known = of_tasks[of_tasks["data_source"] != ""]
    return quoted.data_words(dict(zip(known["dataset_label"], known["data_source"])), SOURCES)


def _data(frame: pandas.DataFrame, scale: str) -> pandas.DataFrame:
    """The tidy table: a row per mixer and task, our numbers at full precision beside the paper's."""
    tidy = frame[["model", "label", "role", "dataset", "dataset_label", "status", "failed", "n", "rank", "above_majority",
                  "protocol", "data_source"]].copy()  # fmt: skip
    tidy.insert(5, "accuracy_percent", frame["mean"])
    tidy.insert(6, "std_percent", frame["std"])
    tidy["parameters"] = pandas.to_numeric(frame["parameters"]).astype("Int64")
    tidy["scale"] = scale
    tidy["paper_accuracy_percent"], tidy["paper_source"] = frame["paper"], frame["paper_source"]
    tidy["difference_points"] = frame["difference"]
    tidy["runs"] = [";".join(runs) for runs in frame["runs"]]
    return tidy
