"""Accuracies of the Long Range Arena: from records of suite "table6" to cells, the one place that says which one counts.

Protocol strict: of the weights at the evaluation with the best dev accuracy, the accuracy on the test split. Protocol
authors, as the public code has it: the best dev accuracy itself.
"""

from __future__ import annotations

from pathlib import Path

import pandas

from flarepp.paper import settings
from flarepp.paper.cells import COLUMNS, cells
from flarepp.record import read_run

SUITE = "table6"
SHOWN = {"strict": "selected", "authors": "dev_selected"}  # the metric of a record that a protocol shows
SAMPLES = {"strict": "num_test", "authors": "num_dev"}  # how many samples that accuracy is of
OF_DATA = ("dev_is_test", "num_samples")
WORDS = {
    "strict": "strict: padding is neither attended nor pooled; test accuracy at the evaluation with the best dev accuracy, of the"
    " weights themselves, not their average",
    "authors": "authors, after their public code: positions again before every block, padding attended and pooled; the best dev"
    " accuracy itself, of the weights themselves, not their average",
}


def protocol(records: pandas.DataFrame) -> str:
    """The protocol of all runs. ValueError where they do not share one, FileNotFoundError for a run that is gone."""
    found = sorted({run.settings["model.protocol"] for run in settings.read(records, SUITE)})
    if len(found) > 1:
        raise ValueError(f"{SUITE}: runs of the protocols {' and '.join(found)}; a table shows one of them")
    return found[0] if found else "strict"


def frame(records: pandas.DataFrame) -> pandas.DataFrame:
    """One row per mixer or baseline and task in record order: the columns of `cells`, where `mean` and `std` are of the
    accuracy in %; `protocol`; and of the task's data `dev_is_test`, and `num_samples`, those behind the accuracy (NaN
    where nothing ran). ValueError and FileNotFoundError as `cells` and `protocol`."""
    if records[records["suite"] == SUITE].empty:
        return pandas.DataFrame(columns=[*COLUMNS, "protocol", *OF_DATA])
    found = protocol(records)
    shown = _baselines_on_dev(records) if found == "authors" else records
    frame = cells(shown, SUITE, SHOWN[found]).assign(protocol=found)
    data = [read_run(Path(runs[0]))[1]["provenance"]["dataset"] if runs else {} for runs in frame["runs"]]
    keys = zip(OF_DATA, ("dev_is_test", SAMPLES[found]))
    return frame.assign(**{name: [each.get(key) for each in data] for name, key in keys})


def _baselines_on_dev(records: pandas.DataFrame) -> pandas.DataFrame:
    """The accuracies of what learns nothing on the dev split in place of those on the test split."""
    trivial = records["role"] == "trivial"
    kept = records[~trivial | (records["metric"] != "last")]
    return kept.assign(metric=kept["metric"].mask(trivial & (kept["metric"] == "dev_last"), "last"))
