"""The conda environments have what pyproject.toml asks for, and `--sdm conda` uses the one that config.yaml names; citation and
catalogue files hold what their readers need."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib

import pytest
import yaml

from conftest import PROJECT

CONDA_NAMES = {"torch": {"cpu": "pytorch-cpu", "cuda": "pytorch-gpu"}, "snakemake": "snakemake-minimal", "matplotlib": "matplotlib-base",
               "seaborn": "seaborn-base"}  # fmt: skip  without what draws windows
CONDA = """#!/bin/sh
case "$1" in
  info) echo '{"conda_prefix": "/opt/conda", "channels": [], "platform": "linux-64"}' ;;
  --version) echo "conda 24.9.0" ;;
  config) echo '{"get": {"channel_priority": "strict"}}' ;;
esac
"""


def read(name: str):
    return yaml.safe_load((PROJECT / name).read_text(encoding="utf-8"))


def requirement(text: str) -> tuple[str, str]:
    """(name, range) of "numpy>=1.26" or "numpy >=1.26"."""
    return re.fullmatch(r"([\w.-]+)\s*(.*)", text).groups()


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_environments_have_the_dependencies_in_the_same_ranges(kind):
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = {}
    for name, version in map(requirement, project["dependencies"]):
        named = CONDA_NAMES.get(name, name)
        wanted[named if isinstance(named, str) else named[kind]] = version
    environment = read(f"envs/{kind}.yaml")
    given = dict(map(requirement, environment["dependencies"]))
    assert given.pop("python") == project["requires-python"]
    assert given.pop("cuda-version", None) == (">=12.4,<13" if kind == "cuda" else None)
    assert given == wanted and environment["channels"] == ["conda-forge", "bioconda", "nodefaults"]


@pytest.mark.parametrize("scale, kind", [("smoke", "cpu"), ("paper", "cuda")])
def test_the_option_takes_the_environment_of_the_scale(tmp_path, scale, kind):
    """By a dry run beside a conda that answers questions."""
    (tmp_path / "conda").write_text(CONDA)
    (tmp_path / "conda").chmod(0o755)
    words = [sys.executable, "-m", "snakemake", "-n", "table3", "--config", f"scale={scale}", "--sdm", "conda"]
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    answer = subprocess.run(words, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=240)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert f"Conda environment envs/{kind}.yaml will be created" in answer.stdout + answer.stderr


def test_citation_and_catalogue():
    citation, version = read("CITATION.cff"), tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["version"]
    assert citation["cff-version"] == "1.2.0" and citation["version"] == version and citation["license"] == "MIT"
    assert citation["authors"] == [{"name": "The flarepp developers"}] and citation["title"] == "flarepp" and citation["message"]
    usage = read(".snakemake-workflow-catalog.yml")["usage"]
    assert usage["software-stack-deployment"] == {"conda": True} and usage["report"] is True and usage["mandatory-flags"]["flags"] == ""
    assert "## [Unreleased]" in (PROJECT / "CHANGELOG.md").read_text(encoding="utf-8")
