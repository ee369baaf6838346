"""Figure 9: streamwise velocity in one pipe, predicted by FLARE and FLARE++, and signed errors."""

from __future__ import annotations

from pathlib import Path

import pandas

from flarepp.paper.fields import draw


def build(records: pandas.DataFrame, out: Path, *, shown: str, scale: str) -> None:
    """Write out/figure9.pdf and .png; see `fields.draw`. The pipe is ten widths long, so its panels lie below each other."""
    draw(records, out, "figure9", "pipe", shown=shown, scale=scale)
