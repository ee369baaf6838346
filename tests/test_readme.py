"""What the README shows works: the example mixer, added to a copy as a file and an entry, becomes runs and trains."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import yaml

from conftest import PROJECT
from flarepp.record import read_json

README = (PROJECT / "README.md").read_text(encoding="utf-8")
EXPAND = """
import sys, yaml
from flarepp.spec import expand
runs = expand(yaml.safe_load(open("config.yaml"))).runs
print(next(run.json for path, run in runs.items() if "/luna/" in path and "/elasticity/" in path))
"""
DATASET = """
import json, yaml
from flarepp.spec import expand
plan = expand(yaml.safe_load(open("config.yaml")))
runs = {path.split("/")[5]: run.spec for path, run in plan.runs.items() if "/table1/rods/" in path}
predictors = [path.split("/")[5] for path in plan.predictors if "/rods/" in path]
print(json.dumps({"data": plan.datasets["rods"], "models": list(runs), "predictors": predictors, "spec": runs["flarepp"]}))
"""


@pytest.fixture
def copy(tmp_path):
    """A copy of package and schema with the README's mixer file."""
    folder = tmp_path / "copy"
    for name in ("src", "workflow"):
        shutil.copytree(PROJECT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name, code in zip(("mixers/luna.py", "data/rods.py"), re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL), strict=True):
        assert len(code.splitlines()) <= 40
        (folder / "src/flarepp" / name).write_text(code)
    return folder


def call(folder, *words):
    environment = os.environ | {"PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"}
    answer = subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def test_the_example_mixer_becomes_runs_and_trains(copy, config, dataset, tmp_path):
    entry = re.search(r"`luna: (\{.*?\})`", README).group(1)
    config["models"]["luna"] = yaml.safe_load(entry)
    config["suites"]["table1"]["models"].append("luna")
    (copy / "config.yaml").write_text(yaml.safe_dump(config | {"scale": "smoke"}))
    spec = json.loads(call(copy, "-c", EXPAND))
    assert spec["model"]["mixer"] == "luna" and spec["model"]["num_latents"] == 8
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "spec.json").write_text(json.dumps(spec))
    call(copy, "-m", "flarepp", "train", str(tmp_path / "run" / "spec.json"), "--data", str(dataset))
    assert read_json(tmp_path / "run" / "metrics.json")["status"] == "ok"


def test_the_example_dataset_is_made_and_every_model_runs_on_it(copy, config):
    """One line of configuration: the dataset's file and card, a run of each model of Table 1 and each trivial predictor."""
    entry = re.search(r"`rods: (\{.*?\}\})`", README).group(1)
    config["datasets"]["rods"] = yaml.safe_load(entry)
    (copy / "config.yaml").write_text(yaml.safe_dump(config | {"scale": "smoke"}))
    plan = json.loads(call(copy, "-c", DATASET))
    assert plan["models"] == config["suites"]["table1"]["models"] and plan["predictors"] == list(config["predictors"])
    words = ["--store", "rods.h5", "--card", "rods.json", "--generated", "generated"]
    call(copy, "-m", "flarepp", "data", json.dumps(plan["data"]), *words)
    card = read_json(copy / "rods.json")
    assert card["counts"] == {"train": 64, "test": 16, "points": 41} and card["dimension"] == "1D" and card["grid"] == [41]
    assert card["source"] == "generated"
    (copy / "run").mkdir()
    (copy / "run" / "spec.json").write_text(json.dumps(plan["spec"]))
    call(copy, "-m", "flarepp", "train", "run/spec.json", "--data", "rods.h5")
    assert read_json(copy / "run" / "metrics.json")["status"] == "ok"


def test_the_readme_names_every_target():
    folders = (PROJECT / "src/flarepp/paper" / kind for kind in ("tables", "figures"))
    artefacts = {path.stem for folder in folders for path in folder.glob("*.py")} - {"__init__"}
    named = re.search(r"one artefact: ([a-z0-9_, ]+)", README).group(1).strip().split(", ")
    assert sorted(named) == sorted({*artefacts, "ledger", "paper_pdf"})
    for name in artefacts - {"figure7", "figure8"}:  # "figure6.pdf to figure9.pdf"
        assert f"{name}." in README, name


def test_every_named_target_and_file_exists():
    snakefiles = "".join(path.read_text() for path in (PROJECT / "workflow/rules").glob("*.smk"))
    for target in re.search(r"one artefact: ([a-z0-9_, ]+)", README).group(1).strip().split(", "):
        assert f'"{target}"' in snakefiles or f"rule {target}:" in snakefiles, target
    for name in set(re.findall(r"`((?:src|tests|workflow)/[\w/.]+)`", README)) - {"src/flarepp/mixers/luna.py", "src/flarepp/data/rods.py"}:
        assert (PROJECT / name).exists(), name
