"""Cells of what is measured beyond the paper: what selection on the test set is worth, and half the depth."""

from __future__ import annotations

from pathlib import Path

import numpy
import pandas

from flarepp.paper.cells import KEYS, cells
from flarepp.record import read_run

SELECTION, HALF_DEPTH = "selection", "half_depth"  # what claims call these cells
SOURCES = {SELECTION: "table1", HALF_DEPTH: "figure3"}  # the suites whose runs they are of
ERRORS = ("best_test", "last", "ema")


def selection(records: pandas.DataFrame) -> pandas.DataFrame:
    """The cells of Table 1's trained models with the mean of each of ERRORS over their runs, NaN where the runs lack it."""
    found = cells(records, SOURCES[SELECTION], "last")
    found = found[found["role"] != "trivial"].copy()
    there = records[records["run"].notna()].drop_duplicates(["run", "metric"])
    values = there.pivot(index="run", columns="metric", values="value")
    for name in ERRORS:
        column = values[name] if name in values else pandas.Series(dtype=float)
        found[name] = [column.reindex(runs).mean() for runs in found["runs"]]
    return found


def half_depth(records: pandas.DataFrame, shown: str) -> pandas.DataFrame:
    """Pairs of FLARE at B and FLARE++ at B / 2 of Figure 3, a row each, at the same dataset and latents.

    num_blocks is B; change and time are by how many percent the error of FLARE++ and the time of its steps (the run's
    median, on `device`) differ from FLARE's, NaN time on different devices.
    """
    grid = cells(records, SOURCES[HALF_DEPTH], shown)
    grid = grid[grid["n"] > 0]
    deep, half = grid[grid["model"] == "flare"], grid[grid["model"] == "flarepp"]
    half = half.assign(num_blocks=2 * half["num_blocks"])
    same = [key for key in KEYS if key != "model"]
    pairs = deep.merge(half[[*same, "mean", "n", "runs"]], on=same, suffixes=("", "_half"))
    pairs["change"] = 100 * (pairs["mean_half"] / pairs["mean"] - 1)
    steps = {run: _step(run) for runs in (*pairs["runs"], *pairs["runs_half"]) for run in runs}
    known = [_compared([steps[run] for run in one], [steps[run] for run in other])
             for one, other in zip(pairs["runs_half"], pairs["runs"])]  # fmt: skip
    pairs["time"], pairs["device"] = [time for time, _ in known], [device for _, device in known]
    pairs["n"] = pairs[["n", "n_half"]].min(axis=1)
    pairs["runs"] = pairs["runs"] + pairs["runs_half"]
    return pairs


def _step(run: str) -> tuple[float, str]:
    """Milliseconds a step and the device of a run; NaN and "" where its record does not say."""
    result = read_run(Path(run))[1]
    return result["metrics"].get("step_ms", numpy.nan), result.get("provenance", {}).get("device", "")


def _compared(ours: list[tuple[float, str]], theirs: list[tuple[float, str]]) -> tuple[float, str]:
    """By how many percent our steps take longer than theirs, and the one device; NaN where there are several."""
    devices = {device for _, device in [*ours, *theirs]}
    if len(devices) > 1:
        return numpy.nan, " and ".join(sorted(devices))
    means = [float(numpy.mean([time for time, _ in each])) for each in (ours, theirs)]
    return 100 * (means[0] / means[1] - 1), devices.pop()
