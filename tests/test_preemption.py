"""Stopped by a scheduler: SIGTERM or a budget of time leave a checkpoint; resumed, a run ends with the bits of one go."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

import kill_snakemake
from clone import clone
from flarepp import classify
from flarepp import train as training
from flarepp.data.lra import sequences
from flarepp.processes import sigterm_noted, terminate_after
from test_lra_model import SIZES, toy
from test_train import bits, write_spec

STEPS = 160


def long(spec: dict, **changes) -> dict:
    """A run of seconds that tells how far it is, and leaves no other checkpoints than that of a signal."""
    changes = {"steps": STEPS, "num_evaluations": 16, "checkpoint_seconds": 1e9, "device": "cpu"} | changes
    return spec | {"training": spec["training"] | changes}


def start(spec_path: Path, data: Path) -> subprocess.Popen:
    """A run as a job, in a session of its own, its log beside the spec."""
    command = [sys.executable, "-m", "flarepp", "train", str(spec_path), "--data", str(data)]
    with open(spec_path.with_name("log"), "w") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"})


def said(spec_path: Path) -> str:
    return spec_path.with_name("log").read_text()


def stop(process: subprocess.Popen, spec_path: Path, lines: int, everywhere: bool) -> None:
    """SIGTERM at a random moment after so many evaluations, to the process or to all of its session as Slurm does it."""
    deadline = time.monotonic() + 240
    while process.poll() is None and said(spec_path).count(": loss ") < lines:
        assert time.monotonic() < deadline, said(spec_path)
        time.sleep(0.005)
    time.sleep(random.Random(lines).uniform(0, 0.02))
    with suppress(ProcessLookupError):
        (os.killpg if everywhere else os.kill)(process.pid, signal.SIGTERM)
    process.wait(120)


def disturbed(spec_path: Path, data: Path, stops: list[tuple[int, bool]]) -> bool:
    """Run, stopped and resumed so often; False where it was at its last step before the signal."""
    for index, (lines, everywhere) in enumerate(stops):
        process = start(spec_path, data)
        stop(process, spec_path, lines, everywhere)
        if f"step {STEPS}: loss " in said(spec_path):
            return False
        assert process.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM), said(spec_path)
        assert said(spec_path).count("SIGTERM: stopped at step ") == 1
        assert said(spec_path).count("resumed at step") == (index > 0)
        assert len(list(spec_path.parent.glob("checkpoint-*.pt"))) == 1
        assert not (spec_path.parent / "metrics.json").exists() and not list(spec_path.parent.glob(".*.partial*"))
    return True


@pytest.mark.parametrize("num_ranks, stops", [(1, [(1, False)]), (2, [(1, False), (2, True)])])
def test_a_run_goes_on_where_sigterm_stopped_it(run_spec, dataset, tmp_path, num_ranks, stops):
    """Stopped after so many evaluations each time, then left alone, it has the bits of one that was left alone."""
    spec = long(run_spec, context_parallel=num_ranks)
    training.train_on_ranks(spec, dataset, tmp_path / "undisturbed")
    tries = (write_spec(tmp_path / f"stopped {number}", spec) for number in range(5))
    stopped = next(path for path in tries if disturbed(path, dataset, stops))
    assert start(stopped, dataset).wait(240) == 0 and "resumed at step" in said(stopped), said(stopped)
    assert bits(stopped.parent) == bits(tmp_path / "undisturbed")
    assert not list(stopped.parent.glob("checkpoint-*.pt"))


@pytest.fixture
def unmoved():
    """Within the test SIGTERM and SIGALRM do not end this process."""
    numbers = (signal.SIGTERM, signal.SIGALRM)
    handlers = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    yield
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


def test_a_run_on_a_task_goes_on_where_sigterm_stopped_it(run_spec, tmp_path, monkeypatch, capsys, unmoved):
    """Where whoever called the run does not let the signal end the process, an exception ends the run, without a record."""
    sequences.write(toy(), tmp_path / "toy.h5")
    model = {"name": "lra", "mixer": "flarepp", "num_latents": 4} | SIZES
    spec = long(run_spec, steps=160, batch_size=8, eval_batch_size=7) | {"dataset": {"name": "toy"}, "model": model}
    classify.classify(spec, tmp_path / "toy.h5", tmp_path / "undisturbed")
    step = classify.training_step

    def told(run):
        if run.progress.steps in (37, 95):
            signal.raise_signal(signal.SIGTERM)
        return step(run)

    monkeypatch.setattr(classify, "training_step", told)
    for reached in (38, 96):
        with pytest.raises(SystemExit, match="143"):
            classify.classify(spec, tmp_path / "toy.h5", tmp_path / "stopped")
        assert f"SIGTERM: stopped at step {reached};" in capsys.readouterr().out
        assert not (tmp_path / "stopped" / "metrics.json").exists()
    classify.classify(spec, tmp_path / "toy.h5", tmp_path / "stopped")
    assert "resumed at step 96 " in capsys.readouterr().out
    assert bits(tmp_path / "stopped") == bits(tmp_path / "undisturbed")


def test_a_budget_of_minutes_is_kept_the_same_way(run_spec, dataset, tmp_path, monkeypatch, unmoved):
    step = training.training_step

    def started(run):
        if run.progress.steps == 0:
            terminate_after(1e-3)
        return step(run)

    monkeypatch.setattr(training, "training_step", started)
    with pytest.raises(SystemExit, match="143"):
        training.train(long(run_spec, steps=10**6), dataset, tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.json").exists() and list((tmp_path / "run").glob("checkpoint-*.pt"))


@pytest.mark.parametrize("minutes", [-1.0, float("nan"), float("inf")])
def test_a_budget_that_is_none_is_refused(minutes):
    with pytest.raises(ValueError, match="--minutes: got (-1.0|nan|inf); a number from 0 to 1e8"):
        terminate_after(minutes)


def test_the_signal_takes_its_course_afterwards():
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append("handler"))
    try:
        with sigterm_noted() as noted:
            assert not noted.is_set()
            signal.raise_signal(signal.SIGTERM)
            assert noted.is_set() and heard == []
        assert heard == ["handler"]
        with sigterm_noted():
            pass
        assert heard == ["handler"]
    finally:
        signal.signal(signal.SIGTERM, before)


OVERLAY = "defaults: {training: {steps: {smoke: 200}, checkpoint_seconds: {smoke: 0}}}"  # a checkpoint every step
TARGET = "results/smoke/runs/table1/darcy/flare/B1-M8-fp32-s0/metrics.json"


def modified(path: Path) -> float:
    """When, by the clock; 0 for a file that is gone."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0


def test_snakemake_killed_twice_ends_with_the_same_bits(tmp_path):
    folders = [clone(tmp_path / name) for name in ("undisturbed", "killed once too often")]
    for folder in folders:
        (folder / "overlay.yaml").write_text(OVERLAY)
    words = ["--configfile", "overlay.yaml", "--config", "scale=smoke", "--cores", "2", "--", TARGET]
    code, said = kill_snakemake.run(folders[0], words)
    assert code == 0, said

    def in_training(started: float) -> bool:
        """Snakemake has its lock, and a checkpoint was written since, by its run or by one that the earlier left behind."""
        files = (folders[1] / TARGET).parent.glob("checkpoint-*.pt")
        return any(folders[1].glob(".snakemake/locks/*")) and any(modified(path) > started for path in files)

    assert kill_snakemake.disturb(folders[1], words, [in_training] * 2) == 2
    assert kill_snakemake.differences(*folders) == (1, [])
