"""Where runs differ from the paper's settings: specs as they ran against what is published of their model.

That is Tables 3, 4 and 5 for the matched backbone, Table 3 and baselines.csv for the complete architectures,
table6_settings.csv for the Long Range Arena, and table2_settings.csv and figure5_settings.csv for the runs that measure
steps, whose device is a setting too.
Numbers of the paper's scale pass as the paper's experiment only if nothing differs. Left out: what a suite
varies by design (VARIED), seeds, and whatever the published tables leave empty (threads, device, checkpoints,
evaluation batch; `tile`, which computes the same function; `eval_noise`, which the paper does not mention).
Table 1 says in a footnote which of the latter ran.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pandas

from flarepp.paper import quoted, settings
from flarepp.paper.typeset import plain
from flarepp.record import read_run

VARIED = {
    "figure3": ("model.num_blocks", "model.num_latents"),
    "figure4": ("model.num_blocks", "training.precision"),
}
NORMS = {"fp32": "layernorm", "fp16": "rmsnorm"}
# What no table of the paper prints: the mixers as it defines them, Darcy's gradient term (FLARE study).
MIXER_OPTIONS = {"model.seed_norm": True, "model.qk_norm": False}
GRADIENT_WEIGHT = {"darcy": 0.1}
OF_STEPS = {"table2": "table2_settings", "figure5": "figure5_settings"}  # suites that measure steps, and what is published
ROWS: dict[str, dict[str, object]] = {  # of Table 6, besides the mixer that a row is named after
    "linformer_kv": {"model.mixer": "linformer", "model.sharing": "kv"},
    "linformer_heads": {"model.mixer": "linformer", "model.sharing": "heads"},
    "flare": {"model.qk_norm": True},
    "flarepp": {"model.qk_norm": True},
}
SWITCH = {"True": "yes", "False": "no"}
NAMED = 8  # differences that are spelled out; the rest is counted


def find(records: pandas.DataFrame, suite: str, scale: str) -> dict[str, list[str]]:
    """What differs in every run of a suite, {run folder: ["width C 16 (128)", …]}, trivial predictors left
    out.

    Empty at other scales than "paper", which differ by their name. FileNotFoundError when a run folder named
    in the records has lost its metrics.json.
    """
    if scale != "paper":
        return {}
    by_suite = dict.fromkeys(OF_STEPS, partial(_of_steps, suite=suite)) | {"table6": _of_tasks}
    differences = by_suite.get(suite, partial(_differences, suite=suite))
    return {run.folder: differences(run) for run in settings.read(records, suite)}


def words(differences: Iterable[list[str]]) -> str:
    """The differences of several runs as a short list, each once; empty when there are none."""
    texts = list(dict.fromkeys(text for each in differences for text in each))
    more = [f"{len(texts) - NAMED} more"] if len(texts) > NAMED else []
    return ", ".join(texts[:NAMED] + more)


def _differences(run: settings.Run, suite: str) -> list[str]:
    """ "setting ours (the paper's)" for every published setting that the run has another value of."""
    ours = dict(run.settings)
    if "dataset.resolution" in ours:  # where nothing is left to choose, the reader of the published files counts the points
        ours["tokens"] = ours["dataset.resolution"] ** 2
    if "dataset.num_points" in ours:
        ours["tokens"] = ours["dataset.num_points"]
    found = []
    for key in settings.published_keys(run.model):
        paper = settings.published(key, run.dataset, run.model)[0]
        if suite in VARIED and key == "model.norm":
            paper = NORMS[ours["training.precision"]]
        absent = key not in ours and key.startswith(("model.", "tokens"))  # not every model has all
        if key in settings.LEFT_OUT or key in VARIED.get(suite, ()) or not paper or absent:
            continue
        if not settings.same(ours.get(key), paper):
            purpose = ", on purpose" if key in settings.ON_PURPOSE else ""
            found.append(f"{_name(key)} {plain(ours.get(key))} ({SWITCH.get(paper, paper)}{purpose})")
    own = f"{run.label}: " if quoted.baseline(run.model) else ""
    return [f"{own}{text}" for text in found + _unprinted(run)]


def _of_steps(run: settings.Run, suite: str) -> list[str]:
    """ "setting ours (the paper's)" of a run that measures steps, its device included unless nothing ran there."""
    found = [
        f"{row['setting']} {plain(run.settings.get(row['key']))} ({row['paper']})"
        for row in quoted.rows(OF_STEPS[suite])
        if not settings.same(run.settings.get(row["key"]), row["paper"])
    ]
    result = read_run(Path(run.folder))[1]
    device = result.get("provenance", {}).get("device_type")
    if result["status"] != "not run" and device != "cuda":
        found.append(f"device {device} (cuda)")
    return found + _unprinted(run)


def _of_tasks(run: settings.Run) -> list[str]:
    """ "setting ours (the paper's)" of a run on a task. What no run here can have the file states itself, as `ours`."""
    stated = {row["setting"]: row for place in ("default", run.dataset) for row in quoted.rows("table6_settings")
              if row["dataset"] == place}  # fmt: skip
    ours = {name: row["ours"] or run.settings.get(row["key"], row["paper"]) for name, row in stated.items()}
    found = [f"{name} {plain(ours[name])} ({row['paper']})" for name, row in stated.items()
             if row["paper"] and not settings.same(ours[name], row["paper"])]  # fmt: skip
    expected = {"model.mixer": run.model} | ROWS.get(run.model, {})
    return found + [f"{_name(key)} {plain(run.settings[key])} ({plain(value)})"
                    for key, value in expected.items() if key in run.settings and run.settings[key] != value]  # fmt: skip


def _name(key: str) -> str:
    return re.sub(r" \(.*\)$", "", settings.name(key))


def _unprinted(run: settings.Run) -> list[str]:
    """Differences in what is known of the paper's runs without being in its tables; a row runs what it is named after."""
    expected = MIXER_OPTIONS | {"training.gradient_weight": GRADIENT_WEIGHT.get(run.dataset, 0), "model.mixer": run.model}
    expected["dataset.stride"] = [1, 1]  # every point of a mesh
    expected["model.name"] = run.model if quoted.baseline(run.model) else settings.BACKBONE
    return [f"{_name(key)} {plain(run.settings[key])} ({plain(value)})"
            for key, value in expected.items() if key in run.settings and run.settings[key] != value]
