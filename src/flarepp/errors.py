"""How an error names what came, what is allowed and the nearest valid name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown(what: str, got: object, allowed: Iterable[object]) -> str:
    """A sentence for an unknown name: "mixer 'flar' is unknown; did you mean 'flare'? Allowed: flare, full"."""
    names = [str(name) for name in allowed]
    nearest = difflib.get_close_matches(str(got), names, n=1, cutoff=0.5)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
    return f"{what} {got!r} is unknown{hint} Allowed: {', '.join(names) or 'none'}"
