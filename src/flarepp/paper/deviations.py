"""Where runs differ from the paper's settings: specs as they ran against the published Tables 3, 4 and 5.

Numbers of the paper's scale pass as the paper's experiment only if nothing differs. Left out: what a suite
varies by design (VARIED), seeds, and whatever the published tables leave empty (threads, device, checkpoints,
evaluation batch).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import pandas

from flarepp.paper import settings
from flarepp.paper.typeset import plain

VARIED = {"figure4": ("model.num_blocks", "training.precision")}
LEFT_OUT = ("training.seed", "derived.head_dim")  # the latter follows from width and heads
NORMS = {"fp32": "layernorm", "fp16": "rmsnorm"}
# What no table of the paper prints: the mixers as it defines them, Darcy's gradient term (FLARE study).
MIXER_OPTIONS = {"model.seed_norm": True, "model.qk_norm": False}
GRADIENT_WEIGHT = {"darcy": 0.1}
NAMED = 8  # differences that are spelled out; the rest is counted


def find(records: pandas.DataFrame, suite: str, scale: str) -> dict[str, list[str]]:
    """What differs in every run of a suite, {run folder: ["width C 16 (128)", …]}, trivial predictors left
    out.

    Empty at other scales than "paper", which differ by their name. FileNotFoundError when a run folder named
    in the records has lost its metrics.json.
    """
    if scale != "paper":
        return {}
    return {run.folder: _differences(run, suite) for run in settings.read(records, suite)}


def words(differences: Iterable[list[str]]) -> str:
    """The differences of several runs as a short list, each once; empty when there are none."""
    texts = list(dict.fromkeys(text for each in differences for text in each))
    more = [f"{len(texts) - NAMED} more"] if len(texts) > NAMED else []
    return ", ".join(texts[:NAMED] + more)


def _differences(run: settings.Run, suite: str) -> list[str]:
    """ "setting ours (the paper's)" for every published setting that the run has another value of."""
    ours = dict(run.settings)
    if "dataset.resolution" in ours:  # where there is none, the reader of the published files counts the points
        ours["tokens"] = ours["dataset.resolution"] ** 2
    found = []
    for key in settings.published_keys():
        paper = settings.paper_value(key, run.dataset)
        if suite in VARIED and key == "model.norm":
            paper = NORMS[ours["training.precision"]]
        absent = key not in ours and key.startswith(("model.", "tokens"))  # not every model has all
        if key in LEFT_OUT or key in VARIED.get(suite, ()) or not paper or absent:
            continue
        if not _same(ours.get(key), paper):
            name = re.sub(r" \(.*\)$", "", settings.name(key))
            found.append(f"{name} {plain(ours.get(key))} ({paper})")
    return found + _unprinted(run)


def _unprinted(run: settings.Run) -> list[str]:
    """Differences in what is known of the paper's runs without being in its tables; a row runs the mixer of its name."""
    expected = MIXER_OPTIONS | {"training.gradient_weight": GRADIENT_WEIGHT.get(run.dataset, 0), "model.mixer": run.model}
    return [f"{key.split('.')[1].replace('_', ' ')} {plain(run.settings[key])} ({plain(value)})"
            for key, value in expected.items() if key in run.settings and run.settings[key] != value]


def _same(value: object, text: str) -> bool:
    """Whether a value of a spec is the one printed, as numbers where both are."""
    try:
        return math.isclose(float(value), float(text), rel_tol=1e-9)
    except (TypeError, ValueError):
        return str(value).strip("[]") == text
