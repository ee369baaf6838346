"""Accuracies of the Long Range Arena: from records of suite "table6" to cells, the one place that says which one counts.

Protocol strict: of the weights at the evaluation with the best dev accuracy, the accuracy on the test split. Protocol
authors, as the public code has it: the best dev accuracy itself.
"""

from __future__ import annotations

import pandas

from flarepp.paper import settings
from flarepp.paper.cells import COLUMNS, cells

SUITE = "table6"
SHOWN = {"strict": "selected", "authors": "dev_selected"}  # the metric of a record that a protocol shows
WORDS = {
    "strict": "strict: padding is neither attended nor pooled; test accuracy at the evaluation with the best dev accuracy",
    "authors": "authors, as their public code has it: positions again before every block, padding attended and pooled; the"
    " best dev accuracy itself",
}


def protocol(records: pandas.DataFrame) -> str:
    """The protocol of all runs. ValueError where they do not share one, FileNotFoundError for a run that is gone."""
    found = sorted({run.settings["model.protocol"] for run in settings.read(records, SUITE)})
    if len(found) > 1:
        raise ValueError(f"{SUITE}: runs of the protocols {' and '.join(found)}; a table shows one of them")
    return found[0] if found else "strict"


def frame(records: pandas.DataFrame) -> pandas.DataFrame:
    """One row per mixer or baseline and task in record order: the columns of `cells`, where `mean` and `std` are of the
    accuracy in %, and `protocol`. ValueError and FileNotFoundError as `cells` and `protocol`."""
    if records[records["suite"] == SUITE].empty:
        return pandas.DataFrame(columns=[*COLUMNS, "protocol"])
    found = protocol(records)
    return cells(records, SUITE, SHOWN[found]).assign(protocol=found)

