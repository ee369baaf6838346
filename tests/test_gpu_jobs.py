"""Devices of a job's own, on a machine that has none: the names in CUDA_VISIBLE_DEVICES stand for four."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import time

import pytest
import yaml

from clone import clone
from conftest import PROJECT
from flarepp import devices

WRAPPER = [sys.executable, "-m", "flarepp.devices"]
# A job claims each of its devices as a folder, which fails where another job has it, and holds it a while.
JOB = """
import json, os, pathlib, sys, time
folder, number = pathlib.Path(sys.argv[1]), int(sys.argv[2])
mine = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
for name in mine:
    (folder / name).mkdir()
time.sleep(0.2)
for name in mine:
    (folder / name).rmdir()
assert len(set(mine)) == number
print(json.dumps(mine))
"""
WORKFLOW = """
NUMBERS = {{str(index): (1, 2, 4)[index % 3] for index in range(30)}}

rule all:
    input: expand("out/{{job}}.json", job=NUMBERS)

rule job:
    output: "out/{{job}}.json"
    log: "log/{{job}}.txt"
    resources: gpu=lambda wildcards: NUMBERS[wildcards.job]
    params: number=lambda wildcards: NUMBERS[wildcards.job]
    shell:
        "exec {python} -m flarepp.devices {{params.number}} "
        "{python} job.py held {{params.number}} > {{output}} 2> {{log}}"
"""


@pytest.fixture(autouse=True)
def locks(tmp_path, monkeypatch):
    """Lock files in a folder of the test's own, four devices, the package of the project."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("PYTHONPATH", str(PROJECT / "src"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


def call(*words, **environment) -> subprocess.CompletedProcess:
    command = [*WRAPPER, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | environment)


def start(number: int, seconds: float, **environment) -> subprocess.Popen:
    """A command that prints its devices and holds them."""
    command = f'echo "$CUDA_VISIBLE_DEVICES"; exec sleep {seconds}'
    return subprocess.Popen([*WRAPPER, str(number), "bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, env=os.environ | environment)


def test_thirty_jobs_share_no_device_and_wait_for_none(tmp_path):
    (tmp_path / "held").mkdir()
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "Snakefile").write_text(WORKFLOW.format(python=shlex.quote(sys.executable)))
    profile = PROJECT / "workflow" / "profiles" / "gpu4"
    answer = subprocess.run([sys.executable, "-m", "snakemake", "--profile", str(profile), "--cores", "8"], cwd=tmp_path,
                            capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    found = [json.loads(path.read_text()) for path in (tmp_path / "out").iterdir()]
    assert sorted(map(len, found)) == [1] * 10 + [2] * 10 + [4] * 10
    assert {name for names in found for name in names} == {"0", "1", "2", "3"}
    assert len(list((tmp_path / "log").iterdir())) == 30
    assert "".join(path.read_text() for path in (tmp_path / "log").iterdir()) == ""  # who waits says so


def test_without_a_count_they_wait_for_each_other_and_end(tmp_path):
    """Twelve at once, several of which need several: nothing is shared and nobody waits for ever."""
    (tmp_path / "held").mkdir()
    (tmp_path / "job.py").write_text(JOB)
    job = [sys.executable, str(tmp_path / "job.py"), str(tmp_path / "held")]
    jobs = [subprocess.Popen([*WRAPPER, number, *job, number], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            for number in "4321" * 3]
    said = [job.communicate(timeout=60)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [0] * 12, said
    assert "waiting for devices: " in "".join(said)


def test_a_device_is_free_again_when_its_command_is_killed():
    first = start(3, 60)
    assert first.stdout.readline() == "0,1,2\n"
    second = start(2, 0)
    assert second.stderr.readline() == "waiting for devices: 1 of 2 taken, the others are in use\n"
    first.send_signal(signal.SIGKILL)
    assert second.communicate(timeout=20)[0] in ("0,3\n", "1,3\n", "2,3\n") and second.returncode == 0
    first.communicate()


def test_a_device_is_held_until_the_forks_of_its_command_are_gone():
    """As ranks whose launcher was killed may still compute."""
    forks = 'sleep 2 & echo "$CUDA_VISIBLE_DEVICES"'
    subprocess.run([*WRAPPER, "4", "bash", "-c", forks], stdout=subprocess.DEVNULL, check=True, timeout=20)
    started = time.monotonic()
    assert call(1, "true").returncode == 0 and time.monotonic() - started > 1


@pytest.mark.parametrize("pool, devices", [("2,3", "2,3"), (" 1 , 0", "1,0"), ("GPU-1a-2b,MIG-9f", "GPU-1a-2b,MIG-9f"),
                                           ("0,5,-1,2", "0,5")])
def test_an_outer_choice_of_devices_is_the_pool(pool, devices):
    assert call(2, "bash", "-c", "echo $CUDA_VISIBLE_DEVICES", CUDA_VISIBLE_DEVICES=pool).stdout == devices + "\n"


@pytest.mark.parametrize("words, code, said", [
    (("-1", "true"), 2, "error: devices: -1 asked for; allowed: 0 and more\n"), (("--up-to", "-2", "true"), 2, "-2 asked for"),
    (("1", "no-such-command"), 127, "error: no-such-command: No such file or directory\n")])
def test_what_cannot_be_run_is_one_line(words, code, said):
    answer = call(*words, CUDA_VISIBLE_DEVICES="0,1")
    assert answer.returncode == code and said in answer.stderr and len(answer.stderr.splitlines()) == 1


@pytest.mark.parametrize("pool, there", [("0,1,2", 3), ("", 0), ("-1", 0), ("NoDevFiles", 0), ("0,0,0,0", 1)])
def test_more_than_there_are_is_refused(pool, there):
    answer = call(4, "echo", "started", CUDA_VISIBLE_DEVICES=pool)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr == f"error: devices: 4 asked for; CUDA_VISIBLE_DEVICES has {there}\n"


@pytest.mark.parametrize("pool, devices", [("7", "7"), ("", ""), ("1,2,3,4,5", "1,2,3,4")])
def test_up_to_a_number_is_content_with_fewer(pool, devices):
    assert call("--up-to", 4, "bash", "-c", "echo $CUDA_VISIBLE_DEVICES", CUDA_VISIBLE_DEVICES=pool).stdout == devices + "\n"


def test_without_a_choice_the_devices_are_the_drivers(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    listing = ("GPU 0: NVIDIA H200 (UUID: GPU-aa-0)", "  MIG 1g.18gb     Device  0: (UUID: MIG-cc-0)",
               "GPU 1: NVIDIA H200 (UUID: GPU-bb-1)")
    (tmp_path / "bin").mkdir()
    driver = tmp_path / "bin" / "nvidia-smi"
    driver.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in listing))
    driver.chmod(driver.stat().st_mode | stat.S_IXUSR)
    echo = ("bash", "-c", "echo $CUDA_VISIBLE_DEVICES")
    assert call(2, *echo, PATH=f"{driver.parent}:{os.environ['PATH']}").stdout == "GPU-aa-0,GPU-bb-1\n"
    answer = call(3, *echo, PATH=f"{driver.parent}:{os.environ['PATH']}")
    assert answer.returncode == 2 and "nvidia-smi lists 2" in answer.stderr


def test_a_driver_that_hangs_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\nexec sleep 60\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(devices, "LISTING_SECONDS", 0.2)
    monkeypatch.setattr(sys, "argv", ["devices", "--up-to", "1", "false"])
    assert devices.main() == 2
    said = "error: devices: nvidia-smi -L did not answer in 0.2 s; CUDA_VISIBLE_DEVICES can name them\n"
    assert capsys.readouterr().err == said


def test_what_stands_in_the_place_of_the_locks_is_named(tmp_path):
    place = tmp_path / "tmp" / f"flarepp-devices-{os.getuid()}"
    place.write_text("")
    answer = call(1, "echo", "started")
    assert (answer.returncode, answer.stdout) == (2, "") and f"error: devices: [Errno 17] File exists: '{place}'" in answer.stderr


def test_without_a_command_the_usage_is_said():
    answer = call(1)
    assert answer.returncode == 2 and "the following arguments are required: COMMAND" in answer.stderr


def test_in_an_allocation_its_jobs_pass_or_share_it():
    """A job with an allocation of its own has all its devices, numbered from 0 like those of others; jobs of one choose."""
    first = start(1, 60, SLURM_JOB_ID="11", CUDA_VISIBLE_DEVICES="0")
    assert first.stdout.readline() == "0\n"
    assert call(1, "echo", "started", SLURM_JOB_ID="12", CUDA_VISIBLE_DEVICES="0").stdout == "started\n"
    shared = [start(1, 60, SLURM_JOB_ID="13") for _ in range(2)]
    assert sorted(job.stdout.readline() for job in shared) == ["0\n", "1\n"]
    for job in (first, *shared):
        job.kill()
        job.communicate()


# What the pipeline's rules ask for


OVERLAY = {
    "scale": "smoke", "scaling": {"device": "cuda"}, "cost": {"device": "cuda"},
    "models": {"flarepp": {"training": {"device": "cuda", "context_parallel": 2, "data_parallel": 2}},
               "flare": {"training": {"device": "cuda"}}, "transolver": {"training": {"device": "cpu"}}},
}
ASKED = {  # folder of a run or measurement -> what stands before its command
    "table1/darcy/flarepp/B1-M8-fp32-s0": "python -m flarepp.devices 4 ",
    "table1/darcy/flare/B1-M8-fp32-s0": "python -m flarepp.devices 1 ",
    "table1/darcy/transolver3/B1-M8-fp32-s0": "python -m flarepp.devices --up-to 1 ",  # auto
    "table1/darcy/transolver/B1-M8-fp32-s0": "",
    "table2/flare/N256-M8-R2-fp32": "python -m flarepp.devices --up-to 2 ",
    "figure5/full/fp32": "python -m flarepp.devices --up-to 1 ",
}


def test_runs_ask_for_a_device_a_process(tmp_path):
    folder = clone(tmp_path / "copy")
    (folder / "overlay.yaml").write_text(yaml.safe_dump(OVERLAY))
    targets = [f"results/smoke/runs/{run}/{'N128/' * ('figure5' in run)}metrics.json" for run in ASKED]
    words = ["-n", "-p", "--profile", "workflow/profiles/gpu4", "--configfile", "overlay.yaml"]
    words += ["--set-resources", "train:runtime=7", "--", *targets]
    answer = subprocess.run([sys.executable, "-m", "snakemake", *words], cwd=folder, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    command = r"> results/smoke/runs/(\S+)/spec.json && exec (.*?)python -m flarepp (?:train|cost|parallel) "
    found = re.findall(command, answer.stdout + answer.stderr)
    assert dict(found) == ASKED
    assert (answer.stdout + answer.stderr).count(" --minutes 7 ") == 4
