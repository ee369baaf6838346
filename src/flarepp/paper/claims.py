"""The claims as data: claims.yaml, the rule that each one names, and the cells that it needs."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pandas

from flarepp.paper.rules import accuracy, beyond, fields, sequences, steps, sweeps
from flarepp.paper.rules.words import Outcome

RULES = (accuracy, sweeps, steps, sequences, fields, beyond)  # modules whose public functions are rules
CLAIMS = Path(__file__).with_name("claims.yaml")
AXES = {
    "dataset": "",
    "model": "",
    "num_blocks": 0,
    "precision": "",
    "num_tokens": 0,
    "num_latents": 0,
    "num_ranks": 0,
}  # and what a rule sees where a claim names no values
REQUIRED = {"id", "place", "statement", "paper", "needs"}
OPTIONAL = {"partial", "structural", "oom", "beyond", "rule", "with", "criterion"}
OF_SCALE = ("num_tokens", "num_latents", "num_ranks")  # axes whose values at other scales than paper are the scale's own
SWEPT = {"figure3": 1, "figure4": 2}  # suites whose num_blocks are too, in claims that name at least so many of them


def read(path: Path = CLAIMS) -> list[dict]:
    """The claims of a YAML file. ValueError for missing or unknown keys, or an id given twice."""
    import yaml

    claims = yaml.safe_load(path.read_text(encoding="utf-8"))
    seen: set[str] = set()
    for claim in claims:
        name = claim.get("id", claim)
        wrong = [f"{key} is missing" for key in sorted(REQUIRED - claim.keys())]
        wrong += [f"{key} is unknown" for key in sorted(claim.keys() - REQUIRED - OPTIONAL)]
        wrong += ["the id is used twice"] if name in seen else []
        if wrong:
            raise ValueError(f"{path.name}: claim {name}: {'; '.join(wrong)}")
        seen.add(name)
    return claims


def rule(claim: dict) -> Callable[[pandas.DataFrame], Outcome]:
    """The function a claim names, with the claim's parameters bound and checked."""
    known = {
        name: item
        for module in RULES
        for name, item in vars(module).items()
        if inspect.isfunction(item) and item.__module__ == module.__name__ and not name.startswith("_")
    }
    if claim["rule"] not in known:
        nearest = difflib.get_close_matches(claim["rule"], known, n=1, cutoff=0.0)[0]
        raise ValueError(f"claim {claim['id']}: no rule {claim['rule']!r}; nearest: {nearest!r}")
    function, parameters = known[claim["rule"]], claim.get("with", {})
    try:
        inspect.signature(function).bind(None, **parameters)
    except TypeError as error:
        raise ValueError(f"claim {claim['id']}: rule {claim['rule']!r}: {error}") from None
    return lambda good: function(good, **parameters)


def needs_at(suite: pandas.DataFrame, needs: dict, scale: str) -> dict:
    """What a claim needs at a scale: those sizes that the scale chooses are all that its suite has on its datasets."""
    if scale == "paper" or suite.empty:
        return needs
    least = SWEPT.get(needs["suite"])
    swept = ["num_blocks"] if least and len(needs.get("num_blocks", ())) >= least else []
    chosen = [axis for axis in (*OF_SCALE, *swept) if axis in needs]
    return needs | {axis: _own_values(suite, needs, axis) for axis in chosen}


def _own_values(suite: pandas.DataFrame, needs: dict, axis: str) -> list | dict[str, list]:
    """The values on an axis that a suite has on the datasets needed, those of the claim where it has none."""
    own = suite[suite[axis].notna()]
    if isinstance(needs[axis], dict):
        by_dataset = own.groupby("dataset")[axis].unique()
        return {name: list(by_dataset.get(name, values)) for name, values in needs[axis].items()}
    there = own[own["dataset"].isin(needs["dataset"])] if "dataset" in needs else own
    return list(there[axis].unique()) or needs[axis]


def on_axes(frame: pandas.DataFrame, needs: dict) -> pandas.DataFrame:
    """The rows with the values that `needs` lists on axes, for all datasets or for each."""
    kept = pandas.Series(True, index=frame.index)
    for axis in AXES:
        values = needs.get(axis)
        if isinstance(values, dict):
            places = zip(frame["dataset"], frame[axis])
            kept &= pandas.Series([value in values.get(name, ()) for name, value in places], index=frame.index, dtype=bool)
        elif axis in needs:
            kept &= frame[axis].isin(values)
    return frame[kept]


def wanted(needs: dict) -> dict[tuple, None]:
    """All cells that `needs` asks for, as values on its axes, in order."""
    axes = [axis for axis in AXES if axis in needs]
    found: dict[tuple, None] = {}
    for name in needs.get("dataset", [""]):
        of_dataset = needs | ({"dataset": [name]} if "dataset" in needs else {})
        lists = [of_dataset[axis].get(name, []) if isinstance(of_dataset[axis], dict) else of_dataset[axis] for axis in axes]
        found |= dict.fromkeys(product(*lists))
    return found
