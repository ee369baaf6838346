"""Figure 7: pressure of one Darcy case, predicted by FLARE and FLARE++, and signed errors."""

from __future__ import annotations

from pathlib import Path

import pandas

from flarepp.paper.fields import draw


def build(records: pandas.DataFrame, out: Path, *, shown: str, scale: str) -> None:
    """Write out/figure7.pdf and .png; see `fields.draw`. The Darcy problem is stated without units."""
    draw(records, out, "figure7", "darcy", shown=shown, scale=scale)
