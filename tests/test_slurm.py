"""A part of the DAG on a real Slurm of one machine with four fake GPUs: what its jobs ask for, and the bits they leave."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from clone import clone, variables
from flarepp.record import read_json
from one_machine_slurm import Unavailable, slurm
from test_train import bits

RUNS = "results/smoke/runs"
ONE, TWO = f"{RUNS}/table1/darcy/flare/B1-M8-fp32-s0", f"{RUNS}/table1/darcy/flarepp/B1-M8-fp32-s0"
CELL = f"{RUNS}/table2/flarepp/N256-M8-R2-fp32"
OVERLAY = """
scale: smoke
models: {flarepp: {training: {context_parallel: 2}}}
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """The environment in which commands find a Slurm that runs; without the programs of one nothing here is tested."""
    with ExitStack() as stack:
        try:
            environment = stack.enter_context(slurm())
        except Unavailable as error:
            pytest.skip(f"Slurm: {error}")
        yield environment


@pytest.fixture(scope="module")
def copies(tmp_path_factory) -> dict[str, Path]:
    """The project twice, under a path with a space."""
    folders = {name: tmp_path_factory.mktemp("a path") / f"with {name}" for name in ("local", "slurm")}
    for folder in folders.values():
        (clone(folder) / "cluster.yaml").write_text(OVERLAY)
    return folders


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> str:
    """This interpreter by a path without a space: the plugin writes it unquoted into what it submits."""
    link = tmp_path_factory.mktemp("environment") / "venv"
    link.symlink_to(sys.prefix)
    return str(link / Path(sys.executable).relative_to(sys.prefix))


def snakemake(python: str, folder: Path, profile: str, *words: str, **environment: str) -> str:
    """Make the runs with one of the profiles; returns what was said."""
    command = [python, "-m", "snakemake", "--profile", f"workflow/profiles/{profile}", *words]
    command += ["--configfile", "cluster.yaml", "--", *(f"{run}/metrics.json" for run in (ONE, TWO, CELL))]
    found = variables(folder, python, **environment)
    answer = subprocess.run(command, cwd=folder, env=found, capture_output=True, text=True, timeout=600)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout + answer.stderr


def jobs_of(environment: dict[str, str]) -> dict[str, dict[str, str]]:
    """What squeue says of every job, ended ones too, by rule and run."""
    columns = "Comment,State,tres-alloc,tres-per-job,TimeLimit,Requeue"
    widths = ",".join(f"{column}:400" for column in columns.split(","))
    command = ["squeue", "--noheader", "--states=all", f"--Format={widths}"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.splitlines()
    rows = [dict(zip(columns.split(","), re.split(r"\s{2,}", line.strip()), strict=True)) for line in lines]
    return {row["Comment"]: row for row in rows}


ASKED = {  # by rule and run: cores, memory, GPUs of the job, time limit
    "rule_dataset_wildcards_darcy": ("cpu=8,mem=4000M", "N/A", "4:00:00"),
    f"rule_train_wildcards_{ONE}": ("cpu=1,mem=4000M", "gres:gpu:1", "4:00:00"),
    f"rule_train_wildcards_{TWO}": ("cpu=2,mem=8000M", "gres:gpu:2", "4:00:00"),
    f"rule_scaling_wildcards_{CELL}": ("cpu=8,mem=8000M", "N/A", "1:00:00"),  # the node to itself
}


def test_jobs_ask_for_what_they_need_and_leave_the_bits_of_a_local_run(cluster, copies, python):
    words = ["--slurm-init-seconds-before-status-checks", "2", "--latency-wait", "10"]
    said = snakemake(python, copies["slurm"], "slurm", *words, **cluster)
    jobs = jobs_of(cluster)
    snakemake(python, copies["local"], "local", "--cores", "2")
    print(json.dumps(jobs, indent=1))
    assert sorted(re.findall(r"has been submitted with SLURM jobid (\d+)", said)) == ["1", "2", "3", "4"]
    assert {row["State"] for row in jobs.values()} == {"COMPLETED"} and {row["Requeue"] for row in jobs.values()} == {"1"}
    found = {name: (row["tres-alloc"].partition(",node")[0], row["tres-per-job"], row["TimeLimit"])
             for name, row in jobs.items()}
    assert found == {name.replace("/", "_"): asked for name, asked in ASKED.items()}
    for run in (ONE, TWO):
        assert bits(copies["slurm"] / run) == bits(copies["local"] / run)
    assert read_json(copies["slurm"] / TWO / "metrics.json")["provenance"]["num_ranks"] == 2
    losses = [read_json(folder / CELL / "metrics.json")["metrics"]["loss"] for folder in copies.values()]
    assert losses[0] == losses[1]
