"""Figure 6: von Mises stress of one Elasticity case, predicted by FLARE and FLARE++, and signed errors."""

from __future__ import annotations

from pathlib import Path

import pandas

from flarepp.paper.fields import draw


def build(records: pandas.DataFrame, out: Path, *, shown: str, scale: str) -> None:
    """Write out/figure6.pdf and .png; see `fields.draw`. The published files state no unit."""
    draw(records, out, "figure6", "elasticity", shown=shown, scale=scale)
