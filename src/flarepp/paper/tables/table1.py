"""Table 1: relative L2 error of models on datasets; the paper's values in a column group of their own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pandas

from flarepp.paper import deviations, forms, quoted, settings
from flarepp.paper.cells import ABSURD, cells, check_scale, data_words, describe
from flarepp.paper.typeset import Block, Cell, Notes, Table, spread, three_digits, write

COMPARED = {"last": "last weights", "ema": "averaged weights", "best_test": "best of the evaluations"}
REGION = "^(?:last|ema)_(.+)$"  # metrics over a part of the domain
REGION_WORDS = {"near_field": "|x − 0.5| < 1.2 and |y| < 1.2 in chords"}  # as the dataset's card has it
BLOCKS = {
    ("ranked", "reference"): "",
    ("beyond",): "beyond the paper, not ranked",
    ("trivial",): "trivial predictors, not ranked",
}


def build(records: pandas.DataFrame, out: Path, *, shown: str, compared: str, scale: str) -> None:
    """Write out/table1.tex, .csv and .md.

    records: the tidy table (suite "table1" is used). shown: "last", "ema" or "best_test", ranked. compared: the
    error that stands beside the paper's, in columns of its own when it is another one. scale: name of the scale.
    ValueError for an unknown error, records of another scale, or when one model has two configurations on one dataset;
    FileNotFoundError when a run folder named in the records is gone.
    """
    check_scale(records, scale)
    errors = cells(records, "table1", shown)
    runs = settings.read(records, "table1")
    errors["compared"] = cells(records, "table1", compared)["mean"]
    regions = _regions(records, shown)
    for (dataset, region), means in regions.items():
        errors.loc[errors["dataset"] == dataset, region] = errors["model"].map(means)
    twice = errors[errors.duplicated(["model", "dataset"])]
    if len(twice):
        raise ValueError(f"table1: more than one configuration of {describe(twice.iloc[0])}")
    errors["shown"] = [three_digits(mean) if n else "" for mean, n in zip(errors["mean"], errors["n"])]
    errors["rank"] = _ranks(errors)
    form = {(run.model, run.dataset): forms.of_run(run) for run in runs}
    errors["form"] = [form.get(key, "") for key in zip(errors["model"], errors["dataset"])]
    differing = deviations.words(deviations.find(records, "table1", scale).values())
    stamp = quoted.stamp(scale, (source for source in errors["data_source"] if source), differing)
    rows = {model: forms.of_row([run for run in runs if run.model == model]) for model in errors["model"]}
    table = _table(errors, list(regions), rows, shown, compared, scale, stamp)
    write(table, _data(errors, dict.fromkeys(region for _, region in regions), shown, compared, scale), out, "table1")


def _regions(records: pandas.DataFrame, shown: str) -> dict[tuple[str, str], dict[str, float]]:
    """Errors in % over parts of the domain, {(dataset, region): {model: mean over seeds}}, of the runs that have them.

    The evaluations of a run keep none, so where their best is shown these are of the last weights.
    """
    suite = records[records["suite"] == "table1"]
    suite = suite.assign(region=suite["metric"].str.extract(REGION, expand=False))
    found = {}
    for (dataset, region), rows in suite.dropna(subset=["region"]).groupby(["dataset", "region"], sort=False):
        errors = cells(suite[suite["run"].isin(rows["run"])], "table1", _weights(shown), region)
        found[dataset, region] = dict(zip(errors["model"], errors["mean"]))
    return found


def _weights(shown: str) -> str:
    return "last" if shown == "best_test" else shown


def _ranks(errors: pandas.DataFrame) -> pandas.Series:
    """1 for the best, 2 for the next, … among ranked models of a dataset, equal where the shown digits are
    equal.

    A model of which a seed failed is not ranked: its mean leaves out the runs that went worst. Nor is an absurd one.
    """
    candidates = errors[(errors["role"] == "ranked") & (errors["n"] > 0) & (errors["failed"] == "")]
    ranks = candidates["shown"].astype(float).groupby(candidates["dataset"]).rank("dense")
    return ranks.reindex(errors.index).astype("Int64")


def _table(
    errors: pandas.DataFrame,
    regions: list[tuple],
    form: dict[str, str],
    shown: str,
    compared: str,
    scale: str,
    stamp: str,
) -> Table:
    """One row per model: our datasets, (dataset, region)s, then the same datasets as the paper printed them. form: the
    footnote of a row."""
    datasets = errors.drop_duplicates("dataset").set_index("dataset")["dataset_label"]
    seeds = int(errors["n"].max()) if len(errors) else 0
    notes, blocks = Notes(), []
    for roles, title in BLOCKS.items():
        part = errors[errors["role"].isin(roles)]
        rows = [
            _row(group, form[model], list(datasets.index), regions, seeds, notes, compared != shown)
            for model, group in part.groupby("model", sort=False)
        ]
        blocks += [Block(rows, title)] if rows else []
    sources = errors[errors["data_source"] != ""].drop_duplicates("dataset").set_index("dataset")["data_source"]
    ours = [quoted.heading(label, sources.get(dataset, "")) for dataset, label in datasets.items()]
    parts = {f"{datasets[dataset]} ({region.replace('_', ' ')})": REGION_WORDS.get(region, "") for dataset, region in regions}
    groups = {"this project" + (f", scale {scale}" if scale != "paper" else ""): ["parameters", *ours, *parts]}
    groups |= {COMPARED[compared]: ours} if compared != shown else {}
    groups |= {"paper, published data": list(datasets)}
    columns = [("", "model", "l")]
    columns += [(group, heading, "r") for group, headings in groups.items() for heading in headings]
    caption = (
        f"Relative L2 error in % on the test set. Scale: {scale}. Data: {data_words(errors)}. Shown:"
        f" {quoted.weights_words(shown)} (trivial predictors have no weights); {_seed_words(seeds)}."
        " Best ranked value bold, second underlined; values that agree in the digits shown are ranked equal."
        f"{_region_words(parts, shown)}{_compared_words(shown, compared)}"
        " The last columns are the paper's own numbers on the published data."
    )
    return Table(caption, columns, blocks, stamp, notes.items())


def _region_words(parts: dict[str, str], shown: str) -> str:
    """What the columns over a part of the domain are."""
    if not parts:
        return ""
    weights = f", of the {quoted.weights_words('last')}" if _weights(shown) != shown else ""
    named = ", ".join(f"{name}{': ' if words else ''}{words}" for name, words in parts.items())
    return f" {named}: the error over that part of the domain alone{weights}; not ranked."


def _compared_words(shown: str, compared: str) -> str:
    if compared == shown:
        return ""
    return f" Beside the paper's numbers, not ranked: {quoted.weights_words(compared)}."


def _seed_words(seeds: int) -> str:
    return f"n = {seeds} seed{'' if seeds == 1 else 's'}" + (
        ", mean ± standard deviation" if seeds > 1 else ""
    )


def _row(
    group: pandas.DataFrame,
    form: str,
    datasets: list[str],
    regions: list[tuple],
    seeds: int,
    notes: Notes,
    with_compared: bool,
) -> list[Cell]:
    """The cells of one model."""
    first, by_dataset = group.iloc[0], {row["dataset"]: row for _, row in group.iterrows()}
    marks = (notes.mark("reference, not ranked"),) if first["role"] == "reference" else ()
    own = (notes.mark(form),) if form else ()  # of our runs, so beside our numbers
    ours = [_our_cell(by_dataset.get(dataset), seeds, notes) for dataset in datasets]
    parts = [_region_cell(by_dataset.get(dataset), region) for dataset, region in regions]
    beside = [_compared_cell(by_dataset.get(dataset)) for dataset in datasets if with_compared]
    theirs = [_paper_cell(first["model"], dataset, notes) for dataset in datasets]
    return [
        Cell(first["label"], marks=marks),
        Cell(_parameters(group["parameters"].dropna()), marks=own),
        *ours,
        *parts,
        *beside,
        *theirs,
    ]


def _our_cell(row, seeds: int, notes: Notes) -> Cell:
    """A measured error with its emphasis, or `--` with the reason as a footnote."""
    if row is None:
        return Cell("--", marks=(notes.mark("not run"),))
    if not row["n"]:
        return Cell("--", marks=(notes.mark(row["status"]),))
    text = row["shown"] + (f" ± {spread(row['std'], row['shown'])}" if row["n"] > 1 else "")
    reasons = (
        [f"n = {row['n']}"] if row["n"] != seeds and row["role"] != "trivial" and not row["failed"] else []
    )
    if row["failed"]:
        rest = "" if row["mean"] >= ABSURD else f": mean of the other {row['n']}"
        reasons.append(f"{row['failed']}{rest}, not ranked")
    rank = 0 if pandas.isna(row["rank"]) else row["rank"]
    return Cell(text, rank == 1, rank == 2, tuple(notes.mark(reason) for reason in reasons))


def _compared_cell(row) -> Cell:
    """The error that is compared with the paper's; `--` where the shown one has the reason."""
    if row is None or not row["n"]:
        return Cell("--")
    return Cell("" if row["role"] == "trivial" else three_digits(row["compared"]))


def _region_cell(row, region: str) -> Cell:
    """The error over a part of the domain; `--` where the one over all of it has the reason, or a run has none."""
    return Cell("--" if row is None or pandas.isna(row[region]) else three_digits(row[region]))


def _paper_cell(model: str, dataset: str, notes: Notes) -> Cell:
    """The paper's number, `--` with its reason, or nothing where it has no such row or column."""
    value = quoted.table1(model, dataset)
    if isinstance(value, str):
        return Cell("--", marks=(notes.mark(f"{value} (paper)"),))
    return Cell("" if value is None else f"{value:.2f}")


def _parameters(counts: pandas.Series) -> str:
    """Trainable parameters in thousands or millions; a range when datasets differ; empty without any."""
    if counts.empty:
        return ""
    unit, name = (1e6, "M") if counts.max() >= 1e6 else (1e3, "k")
    texts = [three_digits(count / unit) for count in (counts.min(), counts.max())]
    return f"{' – '.join(dict.fromkeys(texts))} {name}"


def _data(errors: pandas.DataFrame, regions: Iterable[str], shown: str, compared: str, scale: str) -> pandas.DataFrame:
    """The tidy table: a row per model and dataset, our numbers at full precision beside the paper's."""
    tidy = errors[
        ["model", "label", "role", "dataset", "status", "failed", "n", "rank", "form", "data_source"]
    ].copy()
    tidy.insert(4, "error_percent", errors["mean"])
    tidy.insert(5, "std_percent", errors["std"])
    tidy["parameters"] = errors["parameters"].astype("Int64")
    tidy["shown"] = ["last" if role == "trivial" else shown for role in errors["role"]]
    tidy["compared"] = compared
    tidy["compared_error_percent"] = errors["compared"]
    for region in regions:
        tidy[f"{region}_error_percent"] = errors[region]
    tidy["scale"] = scale
    paper = [quoted.table1(model, dataset) for model, dataset in zip(errors["model"], errors["dataset"])]
    tidy["paper_error_percent_published_data"] = ["" if value is None else value for value in paper]
    tidy["runs"] = [";".join(runs) for runs in errors["runs"]]
    return tidy
