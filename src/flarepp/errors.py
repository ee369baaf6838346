"""How an error names what came, what is allowed and the nearest valid name."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable

LONGEST = 200  # characters of a value that an error shows


def shown(value: object) -> str:
    """A value as an error shows it: long ones are cut, so that the message stays a line."""
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} …"


def unknown(what: str, got: object, allowed: Iterable[object]) -> str:
    """A sentence for an unknown name: "mixer 'flar' is unknown; did you mean 'flare'? Allowed: flare, full"."""
    names = [str(name) for name in allowed]
    nearest = difflib.get_close_matches(str(got), names, n=1, cutoff=0.5)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
    return f"{what} {shown(got)} is unknown{hint} Allowed: {', '.join(names) or 'none'}"


def check_arguments(what: str, function: Callable, given: Iterable[str]) -> None:
    """ValueError when `function` does not take one of the keywords `given`, or needs another one."""
    given = set(given)
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
    takes_any = len(names) < len(parameters)
    for key in sorted(given - set(names)):
        if not takes_any:
            raise ValueError(f"{what}: {unknown('option', key, names)}")
    missing = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD and p.name not in given]
    if missing:
        raise ValueError(f"{what} needs {', '.join(missing)}")
