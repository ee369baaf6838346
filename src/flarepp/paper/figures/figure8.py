"""Figure 8: Mach number around one aerofoil, predicted by FLARE and FLARE++, and signed errors."""

from __future__ import annotations

from pathlib import Path

import pandas

from flarepp.paper.fields import draw


def build(records: pandas.DataFrame, out: Path, *, shown: str, scale: str) -> None:
    """Write out/figure8.pdf and .png; see `fields.draw`. The far field is left out: most of the domain is free stream."""
    draw(records, out, "figure8", "airfoil", shown=shown, scale=scale)
