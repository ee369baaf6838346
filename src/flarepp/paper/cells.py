"""From records (a row per run and metric) to cells (a row per number that a table, figure or claim shows).

The one place that decides how seeds are averaged and what a failed run leaves in a cell.
"""

from __future__ import annotations

import numpy
import pandas

from flarepp.paper import quoted
from flarepp.paper.typeset import three_digits

KEYS = ["dataset", "model", "num_blocks", "num_latents", "precision"]
COLUMNS = [
    *KEYS, "dataset_label", "label", "role", "mean", "std", "n", "status", "failed", "parameters", "data_source", "runs",
]  # fmt: skip
WORDS = {"oom": "out of memory"}
SYMBOLS = {"num_blocks": "B", "num_tokens": "N", "num_latents": "M", "num_ranks": "R"}
ABSURD = 1000.0  # a relative error in % from which a value is no result
BESIDE = ("both", "ours", "paper", "difference")  # whose numbers a table shows


def check_scale(records: pandas.DataFrame, scale: str, suite: str = "") -> None:
    """ValueError unless all records are of `scale`, so that none is stamped or judged as another, and some of `suite`, which
    else would look as if nothing of it had run."""
    found = [str(value) for value in records["scale"].unique()]
    if found not in ([], [scale]):
        raise ValueError(f"scale {scale!r} was asked for, but the records are of scale {', '.join(map(repr, found))}")
    suites = [str(value) for value in records["suite"].unique()]
    if suite and suites and suite not in suites:
        raise ValueError(f"records of suite {suite!r} are wanted, but these are of {', '.join(map(repr, suites))}")


def check_beside(beside: str) -> str:
    """`beside`; ValueError unless it is one of BESIDE."""
    if beside not in BESIDE:
        raise ValueError(f"beside = {beside!r} is unknown; allowed: {', '.join(BESIDE)}")
    return beside


def cells(records: pandas.DataFrame, suite: str, shown: str, region: str = "") -> pandas.DataFrame:
    """Average the error over the seeds of every configuration of one suite.

    records: the tidy table of `flarepp.record`. shown: the metric of trained models; trivial predictors have
    only `last`. region: a part of the domain, whose error is the metric "<shown>_<region>".
    Returns one row per configuration in record order: KEYS, dataset_label, label, role, mean and std of the
    error in % (std with n - 1; NaN for n < 2), n (seeds that ended well), status ("ok" or the reason for an
    empty cell), failed (what happened to other seeds, or that the mean is ABSURD, else ""), parameters,
    data_source, runs (tuple of run folders, seed order). ValueError when a run that ended well lacks the
    metric, or has it twice.
    """
    chosen = records[records["suite"] == suite]
    seeds = [_one_run(group, shown, region) for _, group in chosen.groupby([*KEYS, "seed"], sort=False, dropna=False)]
    if not seeds:
        return pandas.DataFrame(columns=COLUMNS)
    merged = [_over_seeds(group) for _, group in pandas.DataFrame(seeds).groupby(KEYS, sort=False, dropna=False)]
    return pandas.DataFrame(merged, columns=COLUMNS)


def metrics_of(rows: pandas.DataFrame) -> pandas.Series:
    """The metrics of one run by their names; ValueError when the records hold one twice."""
    metrics = rows.dropna(subset=["value"]).groupby("metric")["value"]
    if repeated := metrics.size()[lambda size: size > 1].index.tolist():
        raise ValueError(f"{rows.iloc[0]['run']}: the records hold {repeated} more than once")
    return metrics.first()


def _one_run(rows: pandas.DataFrame, shown: str, region: str) -> dict:
    """The error (a fraction, NaN unless the run ended well) and the parameter count of one run."""
    first, values = rows.iloc[0].to_dict(), metrics_of(rows)
    metric = "_".join(filter(None, ["last" if first["role"] == "trivial" else shown, region]))
    if first["status"] == "ok" and metric not in values:
        raise ValueError(f"{first['run']}: status ok, but no metric {metric!r}; it has {sorted(values.index)}")
    error = values[metric] if first["status"] == "ok" else numpy.nan
    return first | {"error": float(error), "parameters": values.get("parameter_count", numpy.nan)}


def _over_seeds(runs: pandas.DataFrame) -> dict:
    """One cell from the runs of one configuration that differ in their seed."""
    runs = runs.sort_values("seed", kind="stable")
    good, bad = runs[runs["status"] == "ok"], runs[runs["status"] != "ok"]
    percent = 100 * good["error"]
    reasons = bad["status"].replace(WORDS)
    failed = ", ".join(f"{count} of {len(runs)} seeds {reason}" for reason, count in reasons.value_counts().items())
    if not failed and percent.mean() >= ABSURD:
        failed = f"above {ABSURD:g} %, counted as failed"
    sources = runs["data_source"].dropna().unique()
    return runs.iloc[0][[*KEYS, "dataset_label", "label", "role"]].to_dict() | {
        "mean": percent.mean(),
        "std": percent.std(ddof=1),
        "n": len(good),
        "status": "ok" if len(good) else reasons.iloc[0],
        "failed": failed if len(good) else "",
        "parameters": runs["parameters"].max(),
        "data_source": " and ".join(sources),
        "runs": tuple(run for run in runs["run"].fillna("") if run),
    }


def signed(percent: float) -> str:
    """A difference in percent with its sign: "+5.3", "−40.6", and "+1.23e+4" where decimals would tell nothing."""
    text = f"{abs(percent):.1f}" if abs(percent) < 999.95 else three_digits(abs(percent))
    return ("−" if percent < 0 and float(text) else "+") + text


def describe(row: pandas.Series) -> str:
    """Name a cell in words: "FLARE++ on Darcy, B = 8, fp16", or of a step "FLARE++, N = 500,000, M = 64, R = 2"."""
    if "num_tokens" in row:
        own = ["num_tokens", *(["num_latents"] if row.get("has_latents", True) else []), "num_ranks"]
        return ", ".join([row["label"], *(f"{SYMBOLS[key]} = {row[key]:,.0f}" for key in own if key in row)])
    depth = "" if pandas.isna(row["num_blocks"]) else f", B = {row['num_blocks']:.0f}"
    precision = "" if pandas.isna(row["precision"]) else f", {row['precision']}"
    return f"{row['label']} on {row['dataset_label']}{depth}{precision}"


def data_words(frame: pandas.DataFrame) -> str:
    """Where the data of every dataset of these cells came from."""
    known = frame[frame["data_source"] != ""].drop_duplicates("dataset_label")
    return quoted.data_words(dict(zip(known["dataset_label"], known["data_source"])))
