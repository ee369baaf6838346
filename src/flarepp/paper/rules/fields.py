"""Claims about where errors sit: Figures 6 to 9."""

from __future__ import annotations

import pandas

from flarepp.paper.fields import MODELS
from flarepp.paper.rules.words import Outcome


def same_place(cells: pandas.DataFrame, overlap_percent: float, factor: float) -> Outcome:
    """On every dataset the models' points of largest error overlap by at least `overlap_percent` over all test cases, and
    lie on the named feature at least `factor` times as often as all points do."""
    if cells.empty:
        return None
    on = cells[list(MODELS)].div(cells["share"], axis=0)
    holds = (100 * cells["overlap"] >= overlap_percent) & (on.fillna(0) >= factor).all(axis=1)
    texts = [
        f"{row['dataset_label']} {100 * row['overlap']:.0f} % shared"
        f" (case {row['case']:.0f}: {100 * row['overlap_case']:.0f} %),"
        f" on {row['feature']} {100 * row['flare']:.0f} % of FLARE's and {100 * row['flarepp']:.0f} % of FLARE++'s,"
        f" {100 * row['share']:.0f} % of all points"
        for _, row in cells.iterrows()
    ]
    return "; ".join(texts), bool(holds.all())
