"""A run shared by several ranks: what one process computes, on any number of them, and an end when one of them fails."""

from __future__ import annotations

import csv
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._dynamo  # AdamW loads it at its first step; forks of this process then need not

from flarepp import evaluate, loop, parallel, record
from flarepp import train as training
from flarepp.data import store
from flarepp.models import build_model

SIZES = [5, 40, 23, 60, 31, 17, 58, 9]
STEPS = 30


def on(spec: dict, num_context: int, num_data: int = 1, **changes) -> dict:
    """The spec on R x P ranks, on the CPU."""
    ranks = {"context_parallel": num_context, "data_parallel": num_data, "device": "cpu"}
    return spec | {"training": spec["training"] | {"steps": STEPS, "num_evaluations": 3} | ranks | changes}


def with_mixer(spec: dict, mixer: str, **options) -> dict:
    kept = ("name", "channel_dim", "num_heads", "num_blocks", "ffn_ratio", "norm", "num_latents")
    return spec | {"model": {key: spec["model"][key] for key in kept} | {"mixer": mixer} | options}


@pytest.fixture
def data(benchmark, tmp_path) -> dict[str, Path]:
    """Dataset files of 60 points, scattered, on a grid, and of samples of different sizes; and of 2 points."""
    train = benchmark.train
    parts = [[array[index % 16, :size] for index, size in enumerate(SIZES * 2)] for array in (train.features, train.target)]
    ragged = replace(benchmark, points_correspond=False, train=store.Samples.ragged(*parts),
                     test=store.Samples.ragged(*(part[4:10] for part in parts)))
    two = replace(benchmark, **{name: store.Samples(part.features[:, :2], part.target[:, :2])
                                for name, part in (("train", train), ("test", benchmark.test))})
    made = {"scattered": benchmark, "grid": replace(benchmark, grid=(6, 10)), "ragged": ragged, "two": two}
    for name, each in made.items():
        store.write(each, tmp_path / f"{name}.h5")
    return {name: tmp_path / f"{name}.h5" for name in made}


@pytest.fixture
def double(monkeypatch):
    """Every run computes in FP64, from the weights it has in FP32."""
    build = training.build_run

    def doubled(*arguments):
        run = build(*arguments)
        for model in run.models.values():
            model.double()
        for split in (run.train, run.test):
            split.features, split.target = split.features.double(), split.target.double()
        run.target_mean, run.target_std = run.target_mean.double(), run.target_std.double()
        return run

    monkeypatch.setattr(training, "build_run", doubled)


def curve(folder: Path) -> np.ndarray:
    """Loss, gradient norm and test errors of every step; 0 where there was no evaluation."""
    rows = csv.DictReader((folder / "history.csv").read_text().splitlines())
    return np.array([[float(row[key] or 0) for key in ("loss", "grad_norm", "test_last", "test_ema")] for row in rows])


def assert_same_run(folder: Path, other: Path, tolerance: float = 1e-9) -> None:
    """Equal learning curves and recorded errors, relative to each number."""
    ours, theirs = curve(folder), curve(other)
    assert len(ours) == len(theirs) == STEPS and (theirs[:, :2] > 0).all()
    np.testing.assert_allclose(ours, theirs, rtol=tolerance)
    found = [record.read_json(path / "metrics.json")["metrics"] for path in (folder, other)]
    for key in ("last", "ema", "best_test"):
        assert found[0][key] == pytest.approx(found[1][key], rel=tolerance)


# The same numbers


CASES = {  # mixer (None: FLARE++), its options, R, P, dataset, changes of the training section
    "FLARE++ on 3": (None, {}, 3, 1, "scattered", {}),
    "FLARE++ on 3, samples of different sizes": (None, {}, 3, 1, "ragged", {}),
    "FLARE with the gradient term on 3": ("flare", {}, 3, 1, "grid", {"gradient_weight": 0.1}),
    "FLARE++ on 2 x 2, samples of different sizes": (None, {}, 2, 2, "ragged", {}),
    "FLARE++ with the gradient term on 2 replicas": (None, {}, 1, 2, "grid", {"gradient_weight": 0.1}),
    "FLARE++ (anchored) on 3, a rank without points": ("flarepp_anchored", {}, 3, 1, "two", {}),
    "Transolver++ on 2": ("transolverpp", {}, 2, 1, "scattered", {}),
    "Transolver++ with noise in evaluation on 2 x 2": ("transolverpp", {"eval_noise": True}, 2, 2, "ragged", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_thirty_steps_follow_one_process(run_spec, data, tmp_path, double, case):
    mixer, options, num_context, num_data, dataset, changes = CASES[case]
    spec = run_spec if mixer is None else with_mixer(run_spec, mixer, **options)
    training.train(on(spec, 1, **changes), data[dataset], tmp_path / "one")
    result = training.train_on_ranks(on(spec, num_context, num_data, **changes), data[dataset], tmp_path / "many")
    assert result == record.read_json(tmp_path / "many" / "metrics.json") and result["status"] == "ok"
    assert result["provenance"]["num_ranks"] == num_context * num_data
    assert_same_run(tmp_path / "many", tmp_path / "one")
    for weights in ("last", "ema"):
        one, many = (record.read_predictions(tmp_path / name, weights) for name in ("one", "many"))
        ours, theirs = (np.concatenate(each["prediction"]) for each in (many, one))
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)


def test_averaged_gradients_are_another_run(run_spec, data, tmp_path, double, monkeypatch):
    """AdamW hardly sees a factor of all gradients; their norm, which is clipped, does."""
    summed = parallel.Ranks.sync_gradients

    def averaged(ranks, model):
        summed(ranks, model)
        for parameter in model.parameters():
            parameter.grad /= ranks.num_context

    training.train(on(run_spec, 1), data["scattered"], tmp_path / "one")
    monkeypatch.setattr(parallel.Ranks, "sync_gradients", averaged)
    training.train_on_ranks(on(run_spec, 2), data["scattered"], tmp_path / "many")
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_same_run(tmp_path / "many", tmp_path / "one")
    ratio = curve(tmp_path / "one")[0, 1] / curve(tmp_path / "many")[0, 1]
    assert ratio == pytest.approx(2, rel=1e-9)


def test_a_checkpoint_resumes_on_any_number_of_ranks(run_spec, data, tmp_path, double, monkeypatch, capfd):
    """Written by 2 ranks after step 12 of 30. The noise of Transolver++ shows that the generators go on where they stood."""
    spec, step = with_mixer(run_spec, "transolverpp"), training.training_step

    def stop(run):
        if run.progress.steps == 12:
            raise RuntimeError("stopped here")
        return step(run)

    training.train(on(spec, 1), data["ragged"], tmp_path / "one")
    with monkeypatch.context() as patch, pytest.raises(parallel.RankFailed, match="stopped here"):
        patch.setattr(training, "training_step", stop)
        training.train_on_ranks(on(spec, 2, checkpoint_seconds=0), data["ragged"], tmp_path / "stopped")
    assert len(list((tmp_path / "stopped").glob("checkpoint-*.pt"))) == 1
    for num_context, num_data in ((3, 1), (1, 1), (2, 2)):
        folder = tmp_path / f"{num_context}x{num_data}"
        shutil.copytree(tmp_path / "stopped", folder)
        training.train_on_ranks(on(spec, num_context, num_data, checkpoint_seconds=0), data["ragged"], folder)
        assert capfd.readouterr().out.count("resumed at step 12") == 1  # the main rank alone says so
        assert_same_run(folder, tmp_path / "one")
        assert not list(folder.glob("checkpoint-*"))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_all_ranks_hold_the_same_bits(run_spec, data, tmp_path, monkeypatch, precision):
    """Weights, their average, the moments and the loss scale of 2 x 2 ranks; one process finds the recorded errors again."""
    metrics_of = training.metrics_of

    def noting(run, *rest):
        torch.save([run.model.state_dict(), run.optimiser.state_dict()], stream := io.BytesIO())  # a file holds its own name
        (tmp_path / f"{run.ranks.context_rank}{run.ranks.data_rank}.state").write_bytes(stream.getvalue())
        return metrics_of(run, *rest)

    monkeypatch.setattr(training, "metrics_of", noting)
    spec = run_spec | {"model": run_spec["model"] | {"norm": "rmsnorm" if precision == "fp16" else "layernorm"}}
    result = training.train_on_ranks(on(spec, 2, 2, precision=precision), data["ragged"], tmp_path / "run")
    first, *others = (path.read_bytes() for path in sorted(tmp_path.glob("*.state")))
    assert len(others) == 3 and all(other == first for other in others)
    (tmp_path / "run" / "spec.json").write_text(json.dumps(result["spec"]))
    found = evaluate.evaluate(tmp_path / "run", data["ragged"], tmp_path / "evaluation")
    assert found["record"]["follows"] and found["record"]["compared"]


# A rank that fails


@pytest.mark.parametrize("ranks, precision, words", [((2, 1), "fp16", "loss scale"), ((1, 2), "fp32", "the loss is nan")])
def test_all_ranks_find_that_a_run_diverges(run_spec, data, tmp_path, monkeypatch, ranks, precision, words):
    """What one rank's loss does to all of them ends the run on all of them."""
    loss, own = training.training_loss, parallel.Ranks.replica
    seen = []

    def replica(self, x):
        seen.append(self.context_rank + self.data_rank)
        return own(self, x)

    def broken(*arguments, **options):
        return loss(*arguments, **options) * (float("nan") if seen[-1] else 1)

    monkeypatch.setattr(parallel.Ranks, "replica", replica)
    monkeypatch.setattr(training, "training_loss", broken)
    spec = run_spec | {"model": run_spec["model"] | {"norm": "rmsnorm"}}
    result = training.train_on_ranks(on(spec, *ranks, precision=precision), data["scattered"], tmp_path / "run")
    assert result["status"] == "diverged" and words in result["message"]


def failing(error: Exception, ranks: tuple[int, ...], step: int = 5):
    """A training step that fails on some context ranks, after `step` steps."""
    attempt = training.training_step

    def fail(run):
        if run.progress.steps == step and run.ranks.context_rank in ranks:
            raise error
        return attempt(run)

    return fail


def test_an_exception_names_its_rank_and_leaves_no_record(run_spec, data, tmp_path, monkeypatch):
    """Not even that of an earlier attempt."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.json").write_text("{}")
    monkeypatch.setattr(training, "training_step", failing(IndexError("a shape that does not fit"), (1,)))
    with pytest.raises(parallel.RankFailed) as caught:
        training.train_on_ranks(on(run_spec, 3), data["scattered"], tmp_path / "run")
    for words in ("rank 1 ", "Traceback", "in fail", "IndexError: a shape that does not fit"):
        assert words in str(caught.value)
    assert not (tmp_path / "run" / "metrics.json").exists()


def test_a_rank_that_fails_at_the_very_end_takes_the_record_with_it(run_spec, data, tmp_path, monkeypatch):
    leave_record = loop.leave_record

    def fail(*arguments):
        leave_record(*arguments)
        raise IndexError("after the record")

    monkeypatch.setattr(loop, "leave_record", fail)
    with pytest.raises(parallel.RankFailed, match="rank 0 (.|\n)*after the record"):
        training.train_on_ranks(on(run_spec, 2), data["scattered"], tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.json").exists()


@pytest.mark.parametrize("ranks", [(1,), (0,), (0, 1)])
def test_lack_of_memory_on_a_rank_is_a_result(run_spec, data, tmp_path, monkeypatch, ranks):
    monkeypatch.setattr(training, "training_step", failing(torch.cuda.OutOfMemoryError("CUDA out of memory"), ranks))
    result = training.train_on_ranks(on(run_spec, 2), data["scattered"], tmp_path / "run")
    assert result == record.read_json(tmp_path / "run" / "metrics.json")
    assert (result["status"], result["message"], result["metrics"]["steps"]) == ("oom", "CUDA out of memory", 5)
    assert len(curve(tmp_path / "run")) == 5
    assert {"predictions.h5", "model.safetensors"} <= {path.name for path in (tmp_path / "run").iterdir()}


def test_lack_of_memory_for_the_model_is_a_result(run_spec, data, tmp_path):
    spec = run_spec | {"model": run_spec["model"] | {"channel_dim": 4_000_000}}
    result = training.train_on_ranks(on(spec, 2), data["scattered"], tmp_path / "run")
    assert result["status"] == "oom" and result["message"].startswith("building the model")


def ranks_of(process: subprocess.Popen) -> list[int]:
    """The processes that a process started; none when it is gone."""
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [int(child) for child in children]


def kill_ranks(spec: dict, dataset: Path, folder: Path, count: int, first: int = 0) -> list[float]:
    """Start an endless run on several ranks `count` times and kill one of them at a random moment.

    Asserts that the job ends with an error that names the rank and without a record; returns the seconds that it took.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spec.json").write_text(json.dumps(spec))
    command = [sys.executable, "-m", "flarepp", "train", str(folder / "spec.json"), "--data", str(dataset)]
    num_ranks, seconds = spec["training"]["context_parallel"] * spec["training"]["data_parallel"], []
    for kill in range(first, first + count):
        draw = random.Random(kill)
        (folder / "metrics.json").write_text("{}")  # of an earlier attempt
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                                   env=os.environ | {"OMP_NUM_THREADS": "1"})
        deadline = time.monotonic() + 60
        while len(ranks := ranks_of(process)) < num_ranks:
            assert time.monotonic() < deadline and process.poll() is None, process.communicate()[1]
            time.sleep(0.01)
        time.sleep(draw.choice([draw.uniform(0, 1), draw.uniform(1, 6)]))
        os.kill(draw.choice(ranks), signal.SIGKILL)
        killed = time.monotonic()
        _, said = process.communicate(timeout=300)
        seconds.append(time.monotonic() - killed)
        assert process.returncode == 1 and "SIGKILL" in said and "rank " in said, said
        assert not (folder / "metrics.json").exists()
        assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
    return seconds


def test_a_killed_rank_ends_the_job_without_a_record(run_spec, data, tmp_path):
    spec = on(run_spec, 2, steps=10**6, checkpoint_seconds=0)
    assert max(kill_ranks(spec, data["scattered"], tmp_path / "run", 2)) < 60


# Starting the ranks


def test_under_torchrun_a_run_joins(run_spec, data, tmp_path):
    (tmp_path / "spec.json").write_text(json.dumps(on(run_spec, 2)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               "-m", "flarepp", "train", str(tmp_path / "spec.json"), "--data", str(data["scattered"])]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("ok ") == 1 and answer.stdout.count(f"step {STEPS}:") == 1
    training.train_on_ranks(on(run_spec, 2), data["scattered"], tmp_path / "launched")
    assert (tmp_path / "history.csv").read_text() == (tmp_path / "launched" / "history.csv").read_text()


def test_full_attention_is_refused_by_context_parallel(run_spec):
    model = with_mixer(run_spec, "full")["model"]
    model.pop("num_latents")
    with pytest.raises(ValueError, match="full.* cannot be split"):
        parallel.context_parallel(build_model(**model, in_dim=2, out_dim=1), None)
