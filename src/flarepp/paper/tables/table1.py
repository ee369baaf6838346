"""Table 1: relative L2 error of models on datasets; the paper's values in a column group of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import pandas

from flarepp.paper import deviations, forms, quoted, settings
from flarepp.paper.cells import ABSURD, cells, check_beside, check_scale, data_words, describe, signed
from flarepp.paper.typeset import Block, Cell, Notes, Table, spread, three_digits, write

COMPARED = {"last": "last weights", "ema": "averaged weights", "best_test": "best of the evaluations"}
REGION = "^(?:last|ema)_(.+)$"  # metrics over a part of the domain
REGION_WORDS = {"near_field": "|x − 0.5| < 1.2 and |y| < 1.2 in chords"}  # as the dataset's card has it
BLOCKS = {
    ("ranked", "reference"): "",
    ("beyond",): "beyond the paper, not ranked",
    ("trivial",): "trivial predictors, not ranked",
}
RANKED = "Best ranked value bold, second underlined; values that agree in the digits shown are ranked equal."
PAPERS, DIFFERENCE = "paper, published data", "difference to the paper (%)"  # what columns are called
PAPERS_ALONE = "the paper's own numbers, none of this project"
Regions = dict[tuple[str, str], pandas.DataFrame]  # (dataset, region): mean and std by model


@dataclass(frozen=True)
class Look:
    """What is shown: the names that `build` is given."""

    shown: str
    compared: str
    beside: str
    scale: str
Columns = list[tuple[str, str, Callable[[dict], Cell]]]  # group, heading, what makes a row's cell


def build(records: pandas.DataFrame, out: Path, *, shown: str, compared: str, scale: str, beside: str = "both") -> None:
    """Write out/table1.tex, .csv and .md.

    records: the tidy table (suite "table1" is used). shown: "last", "ema" or "best_test", ranked. compared: the
    error that stands beside the paper's, in columns of its own when it is another one. scale: name of the scale.
    beside: "both", "ours", "paper", or "difference" to the paper's in % in place of its numbers; the CSV has all.
    ValueError for an unknown error, records of another scale, or when one model has two configurations on one dataset;
    FileNotFoundError when a run folder named in the records is gone.
    """
    check_scale(records, scale, "table1")
    look = Look(shown, compared, check_beside(beside), scale)
    runs, regions = settings.read(records, "table1"), _regions(records, shown)
    errors = _errors(records, runs, look)
    differing = deviations.words(deviations.find(records, "table1", scale).values())
    stamp = quoted.stamp(scale, (source for source in errors["data_source"] if source), differing)
    rows = {model: forms.of_row([run for run in runs if run.model == model]) for model in errors["model"]}
    write(_table(errors, regions, rows, look, stamp), _data(errors, regions, look), out, "table1")


def _errors(records: pandas.DataFrame, runs: list[settings.Run], look: Look) -> pandas.DataFrame:
    """A row per model and dataset: `cells` of the error shown, the one compared, and the paper's."""
    errors, compared = (cells(records, "table1", name) for name in (look.shown, look.compared))
    twice = errors[errors.duplicated(["model", "dataset"])]
    if len(twice):
        raise ValueError(f"table1: more than one configuration of {describe(twice.iloc[0])}")
    errors["compared"], errors["compared_std"] = compared["mean"], compared["std"]
    errors["shown"] = [three_digits(mean) if n else "" for mean, n in zip(errors["mean"], errors["n"])]
    ranked = errors["role"] == "ranked"
    # A model of which a seed failed is not ranked: its mean leaves out the runs that went worst. Nor is an absurd one.
    errors["rank"] = _ranks(errors[ranked & (errors["n"] > 0) & (errors["failed"] == "")], "shown", errors.index)
    form = {(run.model, run.dataset): forms.of_run(run) for run in runs}
    keys = list(zip(errors["model"], errors["dataset"]))
    errors["form"] = [form.get(key, "") for key in keys]
    errors["paper"] = pandas.Series([quoted.table1(*key) for key in keys], index=errors.index, dtype=object)
    errors["paper_value"] = pandas.to_numeric(errors["paper"], errors="coerce").astype(float)
    errors["paper_rank"] = _ranks(errors[ranked & errors["paper_value"].notna()], "paper_value", errors.index)
    errors["difference"] = 100 * (errors["compared"] / errors["paper_value"] - 1)
    return errors


def _ranks(candidates: pandas.DataFrame, column: str, index: pandas.Index) -> pandas.Series:
    """1 for the best, 2 for the next, … of a dataset's candidates by the numbers of a column as they are printed, equal
    where those are equal; NA in the rest of `index`."""
    return candidates[column].astype(float).groupby(candidates["dataset"]).rank("dense").reindex(index).astype("Int64")


def _regions(records: pandas.DataFrame, shown: str) -> Regions:
    """Errors in % over parts of the domain, of the runs that have them.

    The evaluations of a run keep none, so where their best is shown these are of the last weights.
    """
    suite = records[records["suite"] == "table1"]
    suite = suite.assign(region=suite["metric"].str.extract(REGION, expand=False))
    found = {}
    for (dataset, region), rows in suite.dropna(subset=["region"]).groupby(["dataset", "region"], sort=False):
        errors = cells(suite[suite["run"].isin(rows["run"])], "table1", _weights(shown), region)
        found[dataset, region] = errors.set_index("model")[["mean", "std"]]
    return found


def _weights(shown: str) -> str:
    return "last" if shown == "best_test" else shown


def _table(errors: pandas.DataFrame, regions: Regions, form: dict[str, str], look: Look, stamp: str) -> Table:
    """One row per model. form: the footnote of a row."""
    notes, blocks = Notes(), []
    columns = _columns(errors, regions, form, look, notes)
    shown = errors[errors["paper"].notna()] if look.beside == "paper" else errors
    for roles, title in BLOCKS.items():
        part = shown[shown["role"].isin(roles)]
        rows = [_row(group, columns, notes) for _, group in part.groupby("model", sort=False)]
        blocks += [Block(rows, title)] if rows else []
    heads = [("", "model", "l"), *((group, heading, "r") for group, heading, _ in columns)]
    caption = _caption(errors, regions, look)
    return Table(caption, heads, blocks, PAPERS_ALONE if look.beside == "paper" else stamp, notes.items())


def _columns(
    errors: pandas.DataFrame, regions: Regions, form: dict[str, str], look: Look, notes: Notes
) -> Columns:
    """Group, heading, and the cell of a model from its rows by dataset: our datasets, parts of their domains, then the same
    datasets in other errors."""
    labels = _labels(errors)
    sources = errors[errors["data_source"] != ""].drop_duplicates("dataset").set_index("dataset")["data_source"]
    ours = {dataset: quoted.heading(label, sources.get(dataset, "")) for dataset, label in labels.items()}
    seeds, own = _seeds(errors), "this project" + (f", scale {look.scale}" if look.scale != "paper" else "")
    columns: Columns = []
    emphasis = look.beside == "paper"
    if look.beside != "paper":
        columns += [(own, "parameters", partial(_parameters, form, notes))]
        columns += [(own, ours[dataset], partial(_ours, dataset, seeds, notes)) for dataset in labels]
        columns += [(own, _part(labels, *key), partial(_region, key[0], means)) for key, means in regions.items()]
    if look.beside in ("both", "difference") and look.compared != look.shown:
        columns += [(COMPARED[look.compared], ours[dataset], partial(_compared, dataset)) for dataset in labels]
    if look.beside in ("both", "paper"):
        columns += [(PAPERS, label, partial(_papers, dataset, emphasis, notes)) for dataset, label in labels.items()]
    if look.beside == "difference":
        columns += [(DIFFERENCE, ours[dataset], partial(_difference, dataset, notes)) for dataset in labels]
    return columns


def _labels(errors: pandas.DataFrame) -> dict[str, str]:
    return dict(errors.drop_duplicates("dataset")[["dataset", "dataset_label"]].itertuples(index=False))


def _part(labels: dict[str, str], dataset: str, region: str) -> str:
    return f"{labels[dataset]} ({region.replace('_', ' ')})"


def _seeds(errors: pandas.DataFrame) -> int:
    return int(errors["n"].max()) if len(errors) else 0


def _caption(errors: pandas.DataFrame, regions: Regions, look: Look) -> str:
    if look.beside == "paper":
        return f"Relative L2 error in % on the test set of the published data, as the paper prints it. {RANKED}"
    seeds, weights = _seeds(errors), quoted.weights_words(look.compared)
    caption = (
        f"Relative L2 error in % on the test set. Scale: {look.scale}. Data: {data_words(errors)}. Shown:"
        f" {quoted.weights_words(look.shown)} (trivial predictors have no weights); {_seed_words(seeds)}."
        f" {RANKED}{_region_words(errors, regions, look.shown)}"
    )
    if look.beside == "ours":
        return caption
    beside = f" Beside the paper's numbers, not ranked: {weights}." if look.compared != look.shown else ""
    if look.beside == "both":
        return f"{caption}{beside} The last columns are the paper's own numbers on the published data."
    what = f"the error of these ({weights}, not ranked)" if look.compared != look.shown else "our error"
    return f"{caption} The last columns say by how many percent {what} lies above the paper's own on the published data."


def _region_words(errors: pandas.DataFrame, regions: Regions, shown: str) -> str:
    """What the columns over a part of the domain are."""
    if not regions:
        return ""
    weights = f", of the {quoted.weights_words('last')}" if _weights(shown) != shown else ""
    parts = [(_part(_labels(errors), *key), REGION_WORDS.get(key[1], "")) for key in regions]
    named = ", ".join(f"{name}{': ' if words else ''}{words}" for name, words in parts)
    return f" {named}: the error over that part of the domain alone{weights}; not ranked."


def _seed_words(seeds: int) -> str:
    return f"n = {seeds} seed{'' if seeds == 1 else 's'}" + (", mean ± standard deviation" if seeds > 1 else "")


def _row(group: pandas.DataFrame, columns: list[tuple], notes: Notes) -> list[Cell]:
    """The cells of one model."""
    first, by_dataset = group.iloc[0], {row["dataset"]: row for _, row in group.iterrows()}
    marks = (notes.mark("reference, not ranked"),) if first["role"] == "reference" else ()
    return [Cell(first["label"], marks=marks), *(make(by_dataset) for _, _, make in columns)]


def _number(mean: float, std: float) -> str:
    """A mean with its standard deviation, where there is one."""
    text = three_digits(mean)
    return text if pandas.isna(std) else f"{text} ± {spread(std, text)}"


def _ours(dataset: str, seeds: int, notes: Notes, rows: dict) -> Cell:
    """A measured error with its emphasis, or `--` with the reason as a footnote."""
    row = rows.get(dataset)
    if row is None:
        return Cell("--", marks=(notes.mark("not run"),))
    if not row["n"]:
        return Cell("--", marks=(notes.mark(row["status"]),), runs=row["runs"])
    few = row["n"] != seeds and row["role"] != "trivial" and not row["failed"]
    reasons = [f"n = {row['n']}"] if few else []
    if row["failed"]:
        rest = "" if row["mean"] >= ABSURD else f": mean of the other {row['n']}"
        reasons.append(f"{row['failed']}{rest}, not ranked")
    marks = tuple(notes.mark(reason) for reason in reasons)
    return Cell(_number(row["mean"], row["std"]), *_emphasis(row["rank"]), marks, row["runs"])


def _emphasis(rank: int | None) -> tuple[bool, bool]:
    """Whether a number is bold, and whether it is underlined."""
    return (False, False) if pandas.isna(rank) else (rank == 1, rank == 2)


def _region(dataset: str, means: pandas.DataFrame, rows: dict) -> Cell:
    """The error over a part of the domain; `--` where the one over all of it has the reason, or a run has none."""
    row = rows.get(dataset)
    if row is None or row["model"] not in means.index or pandas.isna(means.loc[row["model"], "mean"]):
        return Cell("--")
    return Cell(_number(*means.loc[row["model"]]), runs=row["runs"])


def _compared(dataset: str, rows: dict) -> Cell:
    """The error that is compared with the paper's; `--` where the shown one has the reason."""
    row = rows.get(dataset)
    if row is None or not row["n"]:
        return Cell("--")
    return Cell("") if row["role"] == "trivial" else Cell(_number(row["compared"], row["compared_std"]), runs=row["runs"])


def _papers(dataset: str, emphasis: bool, notes: Notes, rows: dict) -> Cell:
    """The paper's number, `--` with its reason, or nothing where it has no such row or column."""
    value = quoted.table1(next(iter(rows.values()))["model"], dataset)
    if isinstance(value, str):
        return Cell("--", marks=(notes.mark(f"{value} (paper)"),))
    rank = rows[dataset]["paper_rank"] if emphasis and dataset in rows else pandas.NA
    return Cell("" if value is None else f"{value:.2f}", *_emphasis(rank))


def _difference(dataset: str, notes: Notes, rows: dict) -> Cell:
    """By how many percent the compared error lies above the paper's; `--` where one of the two is missing."""
    theirs, row = _papers(dataset, False, notes, rows), rows.get(dataset)
    if theirs.text in ("", "--"):
        return theirs
    return Cell("--") if row is None or not row["n"] else Cell(signed(row["difference"]), runs=row["runs"])


def _parameters(form: dict[str, str], notes: Notes, rows: dict) -> Cell:
    """Trainable parameters in thousands or millions; a range when datasets differ; empty without any."""
    own = form[next(iter(rows.values()))["model"]]
    marks = (notes.mark(own),) if own else ()  # of our runs, so beside our numbers
    counts = [row["parameters"] for row in rows.values() if not pandas.isna(row["parameters"])]
    if not counts:
        return Cell("", marks=marks)
    unit, name = (1e6, "M") if max(counts) >= 1e6 else (1e3, "k")
    texts = dict.fromkeys(three_digits(count / unit) for count in (min(counts), max(counts)))
    return Cell(f"{' – '.join(texts)} {name}", marks=marks, runs=tuple(chain(*(row["runs"] for row in rows.values()))))


def _data(errors: pandas.DataFrame, regions: Regions, look: Look) -> pandas.DataFrame:
    """The tidy table: a row per model and dataset, our numbers at full precision beside the paper's."""
    tidy = errors[["model", "label", "role", "dataset", "status", "failed", "n", "rank", "form", "data_source"]].copy()
    tidy.insert(4, "error_percent", errors["mean"])
    tidy.insert(5, "std_percent", errors["std"])
    tidy["parameters"] = errors["parameters"].astype("Int64")
    tidy["shown"] = ["last" if role == "trivial" else look.shown for role in errors["role"]]
    tidy["compared"] = look.compared
    tidy["compared_error_percent"], tidy["compared_std_percent"] = errors["compared"], errors["compared_std"]
    for (dataset, region), means in regions.items():
        here, column = errors["dataset"] == dataset, f"{region}_error_percent"
        tidy.loc[here, column] = errors.loc[here, "model"].map(means["mean"])
    tidy["scale"] = look.scale
    tidy["paper_error_percent_published_data"] = ["" if value is None else value for value in errors["paper"]]
    tidy["difference_percent"] = errors["difference"]
    tidy["runs"] = [";".join(runs) for runs in errors["runs"]]
    return tidy
