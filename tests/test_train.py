"""Training: losses, optimiser, one run as a record, the same bits after kills, and runs that fail as results."""

from __future__ import annotations

import copy
import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace

import h5py
import numpy as np
import pytest
import safetensors.torch
import torch

from flarepp import classify, loop, optimise, predictors, record
from flarepp import train as training
from flarepp.data import store
from flarepp.losses import relative_l2, training_loss


def bits(run_dir) -> dict:
    """What "the same bits" means: errors, losses, predictions, weights; not times, memory or provenance."""
    metrics = record.read_json(run_dir / "metrics.json")["metrics"]
    kept = {key: value for key, value in metrics.items() if key not in ("wall_time_s", "step_ms", "peak_memory_mb")}
    with h5py.File(run_dir / "predictions.h5") as file:
        arrays = {key: file[key][:].tobytes() for key in file}
    weights = {key: value.numpy().tobytes() for key, value in
               safetensors.torch.load_file(run_dir / "model.safetensors").items()}
    return {"metrics": kept, "history": (run_dir / "history.csv").read_text(), "arrays": arrays, "weights": weights}


def history(run_dir) -> list[dict]:
    return list(csv.DictReader((run_dir / "history.csv").read_text().splitlines()))


def write_spec(folder, spec):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "spec.json"
    path.write_text(json.dumps(spec))
    return path


# Losses and metric


def test_error_is_the_mean_of_the_samples_errors():
    target = torch.tensor([[[1.0], [0.0]], [[2.0], [0.0]], [[4.0], [0.0]]])
    prediction = target + torch.tensor([[[3.0], [0.0]], [[2.0], [0.0]], [[0.0], [8.0]]])
    assert relative_l2(prediction, target).tolist() == [3, 1, 2]


def test_error_does_not_overflow_in_half_precision():
    target = torch.full((1, 100, 1), 300.0, dtype=torch.float16)  # its sum of squares is 9e6, beyond 65504
    error = relative_l2(1.5 * target, target)
    assert error.dtype == torch.float32 and error.item() == pytest.approx(0.5)


def test_gradient_term_by_hand():
    """Central differences with zeros beyond the edge, the prediction's ring set to 0, the truth's kept."""
    generator = np.random.default_rng(0)
    prediction, target = generator.random((2, 1, 5, 4))
    inner = np.zeros((5, 4))
    inner[1:-1, 1:-1] = prediction[0, 1:-1, 1:-1]

    def slopes(field):
        padded = np.pad(field, 1)
        return padded[1:-1, 2:] - padded[1:-1, :-2], padded[2:, 1:-1] - padded[:-2, 1:-1]

    def error(a, b):
        return np.linalg.norm(a - b) / np.linalg.norm(b)

    expected = error(prediction, target) + 0.1 * sum(error(a, b) for a, b in zip(slopes(inner), slopes(target[0])))
    loss = training_loss(torch.tensor(prediction).reshape(1, 20, 1), torch.tensor(target).reshape(1, 20, 1),
                         gradient_weight=0.1, grid=(5, 4))
    assert loss.item() == pytest.approx(expected, rel=1e-12)


def test_gradient_term_needs_a_grid():
    with pytest.raises(ValueError, match="grid None"):
        training_loss(torch.ones(1, 4, 1), torch.ones(1, 4, 1), gradient_weight=0.1, grid=None)


def test_a_target_of_zeros_is_refused_by_name(benchmark):
    benchmark.test.target[3] = 0
    with pytest.raises(ValueError, match="test sample 3"):
        training.load_split(benchmark.test, benchmark.feature_norm, torch.device("cpu"), "elasticity test")


# Optimiser


def optimiser_for(model, spec, **changes):
    return optimise.build_optimiser(model, spec["training"] | changes)


def test_groups_spare_biases_norms_and_optionally_latents(run_spec):
    model = training.build_model(**run_spec["model"], in_dim=2, out_dim=1)
    names = {parameter: name for name, parameter in model.named_parameters()}
    for decay_latents in (True, False):
        decayed, kept = (({names[p] for p in group["params"]}) for group in
                         optimise.parameter_groups(model, 0.1, decay_latents))
        assert not decayed & kept and decayed | kept == set(names.values())
        assert all(name.endswith("bias") or "norm" in name or "seeds" in name for name in kept)
        assert not any("norm" in name or name.endswith("bias") for name in decayed)
        assert any("seeds" in name for name in decayed) == decay_latents


def test_a_skipped_step_changes_nothing_but_the_scale(run_spec):
    model = torch.nn.Linear(3, 1)
    optimiser = optimiser_for(model, run_spec, precision="fp16")
    before = copy.deepcopy((model.state_dict(), optimiser.average.state_dict(), optimiser.schedule.last_epoch))
    scale = optimiser.scaler.get_scale()
    norm, taken = optimise.optimiser_step(model, optimiser, model(torch.full((1, 3), 1e38)).sum() * 1e5)
    assert not taken and not torch.isfinite(norm)
    assert optimiser.scaler.get_scale() == scale / 2 and optimiser.schedule.last_epoch == before[2]
    for old, new in zip(before[:2], (model.state_dict(), optimiser.average.state_dict())):
        assert all(torch.equal(old[key], new[key]) for key in old)
    _, taken = optimise.optimiser_step(model, optimiser, model(torch.ones(1, 3)).sum())
    assert taken and optimiser.schedule.last_epoch == before[2] + 1


def test_adamw_is_built_from_the_spec(run_spec):
    optimiser = optimiser_for(torch.nn.Linear(1, 1), run_spec, eps=1e-3, weight_decay=0.3, betas=[0, 0.5])
    group = optimiser.adamw.param_groups[0]
    assert (group["eps"], group["weight_decay"], group["betas"][1]) == (1e-3, 0.3, 0.5)


def test_clipping_bounds_the_global_norm(run_spec):
    model = torch.nn.Linear(4, 1, bias=False)
    optimiser = optimiser_for(model, run_spec, clip_norm=1.0)
    seen = []
    optimiser.adamw.register_step_pre_hook(lambda *_: seen.append(model.weight.grad.norm().item()))
    norm, _ = optimise.optimiser_step(model, optimiser, 100 * model(torch.ones(1, 4)).sum())
    assert norm.item() == pytest.approx(200) and seen == [pytest.approx(1.0, rel=1e-4)]


def test_average_starts_from_the_initial_weights_and_copies_buffers():
    model = torch.nn.BatchNorm1d(2)
    average = copy.deepcopy(model)
    with torch.no_grad():
        model.weight.fill_(3.0)
        model.running_mean.fill_(7.0)
    optimise.update_average(average, model, 0.9)
    assert torch.allclose(average.weight, torch.full((2,), 0.9 * 1 + 0.1 * 3))
    assert torch.equal(average.running_mean, model.running_mean)


# A run


def test_a_run_leaves_a_complete_record(run_spec, dataset, tmp_path, benchmark):
    result = training.train(run_spec, dataset, tmp_path / "run")
    assert result == record.read_json(tmp_path / "run" / "metrics.json")
    assert result["status"] == "ok" and result["spec"] == run_spec
    metrics, provenance = result["metrics"], result["provenance"]
    assert metrics["steps"] == 24 and metrics["skipped_steps"] == 0 and metrics["wall_time_s"] > 0
    assert provenance["dataset"]["fingerprint"] == benchmark.fingerprint
    assert provenance["precision"] == {"autocast": False, "float32_matmul": "highest", "parameters": ["torch.float32"]}
    rows = history(tmp_path / "run")
    evaluated = [float(row["test_last"]) for row in rows if row["test_last"]]
    assert len(rows) == 24 and len(evaluated) == 10 and int(rows[-1]["step"]) == 24
    assert metrics["best_test"] == min(evaluated) and metrics["last"] == evaluated[-1]
    assert not list((tmp_path / "run").glob("checkpoint*")) and not list((tmp_path / "run").glob(".*partial*"))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_run_learns(run_spec, dataset, tmp_path, benchmark, precision):
    """Below half of the error of the constant predictor in 300 steps."""
    run_spec["training"] |= {"precision": precision, "steps": 300}
    run_spec["model"]["norm"] = "rmsnorm" if precision == "fp16" else "layernorm"
    result = training.train(run_spec, dataset, tmp_path / "run")
    constant = predictors.relative_l2(predictors.predict(benchmark, "constant"), benchmark.test.target).mean()
    assert result["metrics"]["last"] < 0.5 * constant


def test_recorded_errors_are_those_of_the_predictions(run_spec, dataset, tmp_path, benchmark):
    result = training.train(run_spec, dataset, tmp_path / "run")
    for weights in ("last", "ema"):
        read = record.read_predictions(tmp_path / "run", weights)
        assert np.array_equal(read["target"], benchmark.test.target)
        assert np.array_equal(read["points"], benchmark.test.features)
        difference = (read["prediction"].astype(float) - read["target"]).reshape(6, -1)
        errors = np.linalg.norm(difference, axis=1) / np.linalg.norm(read["target"].astype(float).reshape(6, -1), axis=1)
        assert read["error"] == pytest.approx(errors, rel=1e-5)
        assert result["metrics"][weights] == pytest.approx(errors.mean(), rel=1e-5)


def test_errors_are_those_of_the_saved_weights(run_spec, dataset, tmp_path, benchmark):
    """The weights of the file, last and averaged, give the recorded errors on encoded features and decoded fields."""
    run_spec["training"] |= {"steps": 100, "ema_decay": 0.98}
    benchmark = replace(benchmark, feature_norm=store.Affine(np.array([0.4, 0.1]), np.array([2.0, 0.5])))
    store.write(benchmark, dataset)
    metrics = training.train(run_spec, dataset, tmp_path / "run")["metrics"]
    tensors = safetensors.torch.load_file(tmp_path / "run" / "model.safetensors")
    model = training.build_model(**run_spec["model"], in_dim=2, out_dim=1).eval()
    features = torch.from_numpy(((benchmark.test.features - [0.4, 0.1]) / [2.0, 0.5]).astype(np.float32))
    for weights in ("last", "ema"):
        model.load_state_dict({key.split("/")[1]: value for key, value in tensors.items() if key.startswith(f"{weights}/")})
        with torch.no_grad():
            field = model(features) * benchmark.target_norm.std[0] + benchmark.target_norm.mean[0]
        errors = relative_l2(field, torch.from_numpy(benchmark.test.target))
        assert metrics[weights] == pytest.approx(errors.double().mean().item(), rel=1e-4)
    assert metrics["last"] != pytest.approx(metrics["ema"], rel=1e-3)


def test_a_run_minimises_the_gradient_term_of_its_spec(run_spec, dataset, tmp_path, benchmark):
    store.write(replace(benchmark, grid=(6, 10)), dataset)
    losses = []
    for weight in (0.0, 0.1):
        run_spec["training"]["gradient_weight"] = weight
        training.train(run_spec, dataset, tmp_path / str(weight))
        losses.append(float(history(tmp_path / str(weight))[0]["loss"]))
    assert losses[1] > losses[0] + 0.05


def test_threads_and_order_of_samples_come_from_the_spec(run_spec, dataset):
    orders = []
    for seed in (0, 1):
        run_spec["training"] |= {"seed": seed, "num_threads": 2}
        run = training.build_run(run_spec, store.read(dataset))
        orders.append(loop.next_batch(run).tolist())
        assert torch.get_num_threads() == 2
    assert orders[0] != orders[1]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_same_seed_same_bits_and_another_seed_others(run_spec, dataset, tmp_path, precision):
    run_spec["training"]["precision"] = precision
    run_spec["model"]["norm"] = "rmsnorm" if precision == "fp16" else "layernorm"
    for name in ("first", "second"):
        training.train(run_spec, dataset, tmp_path / name)
    run_spec["training"]["seed"] = 1
    training.train(run_spec, dataset, tmp_path / "other")
    assert bits(tmp_path / "first") == bits(tmp_path / "second")
    assert bits(tmp_path / "first")["weights"] != bits(tmp_path / "other")["weights"]
    assert record.read_json(tmp_path / "first" / "metrics.json")["provenance"]["precision"]["autocast"] == (precision == "fp16")


def test_errors_do_not_depend_on_the_evaluation_batch(run_spec, dataset, tmp_path):
    found = []
    for size in (1, 4, 100):
        run_spec["training"]["eval_batch_size"] = size
        found.append(training.train(run_spec, dataset, tmp_path / str(size))["metrics"]["last"])
    assert found == pytest.approx([found[0]] * 3, rel=1e-6)


def test_every_epoch_is_a_fresh_permutation_without_the_short_batch(run_spec, dataset):
    run_spec["training"]["batch_size"] = 5  # of 16: three batches an epoch
    run = training.build_run(run_spec, store.read(dataset))
    epochs = [torch.cat([loop.next_batch(run) for _ in range(3)]).tolist() for _ in range(4)]
    assert all(len(set(epoch)) == 15 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_learning_rate_of_the_history_is_the_schedules(run_spec, dataset, tmp_path):
    training.train(run_spec, dataset, tmp_path / "run")
    rates = [float(row["lr"]) for row in history(tmp_path / "run")]
    peak = run_spec["training"]["lr"]
    assert rates[0] == pytest.approx(peak / 1e4) and rates[-1] == pytest.approx(peak / 1e4 / 1e4)
    assert 0.99 * peak < max(rates) <= peak and rates.index(max(rates)) == 2  # the peak lies at step 0.1 * 24 - 1


# Runs that fail are results


def test_divergence_is_a_result(run_spec, dataset, tmp_path):
    run_spec["training"] |= {"lr": 1e30, "clip_norm": 1e30, "div_factor": 1.0}
    result = training.train(run_spec, dataset, tmp_path / "run")
    assert result["status"] == "diverged" and "step" in result["message"]
    assert not {"last", "ema", "best_test"} & set(result["metrics"])
    with pytest.raises(ValueError, match="no predictions"):
        record.read_predictions(tmp_path / "run", "last")


def test_a_collapsing_loss_scale_is_divergence(run_spec, dataset, tmp_path, monkeypatch):
    run_spec["training"]["precision"], run_spec["model"]["norm"] = "fp16", "rmsnorm"
    monkeypatch.setattr(training, "training_loss", lambda prediction, *_, **__: prediction.sum() * float("inf"))
    result = training.train(run_spec, dataset, tmp_path / "run")
    assert result["status"] == "diverged" and "loss scale" in result["message"]
    assert result["metrics"]["skipped_steps"] > 10 and result["metrics"]["steps"] == 0


@pytest.mark.parametrize("error", [
    torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB"), MemoryError("no memory"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")])
def test_lack_of_memory_is_a_result(run_spec, dataset, tmp_path, monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(training, "training_step", fail)
    result = training.train(run_spec, dataset, tmp_path / "run")
    assert result["status"] == "oom" and "memory" in result["message"]


def test_lack_of_memory_for_the_model_is_a_result(run_spec, dataset, tmp_path):
    run_spec["model"]["channel_dim"] = 4_000_000
    result = training.train(run_spec, dataset, tmp_path / "run")
    assert result["status"] == "oom" and result["message"].startswith("building the model")
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {
        "metrics.json", "history.csv", "predictions.h5", "model.safetensors"}


def test_a_bug_crashes_and_leaves_no_metrics(run_spec, dataset, tmp_path, monkeypatch):
    """Not even those of an earlier attempt."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.json").write_text("{}")

    def fail(*_, **__):
        raise RuntimeError("a shape that does not fit")

    monkeypatch.setattr(training, "training_step", fail)
    with pytest.raises(RuntimeError, match="does not fit"):
        training.train(run_spec, dataset, tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.json").exists()


def test_a_run_loads_neither_the_compiler_nor_the_downloads(run_spec, dataset, tmp_path):
    """They take as long as all else that a short run loads."""
    write_spec(tmp_path / "run", run_spec)
    code = f"""if True:
        import sys
        from flarepp import __main__
        sys.argv = ["flarepp", "train", {str(tmp_path / "run/spec.json")!r}, "--data", {str(dataset)!r}]
        code = __main__.main()
        assert code == 0 and "torch.optim" in sys.modules
        assert not {{"torch._dynamo", "requests", "scipy.io", "matplotlib", "pandas"}} & {{*sys.modules}}
    """
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert answer.returncode == 0 and (tmp_path / "run/metrics.json").exists(), answer.stderr


def test_what_is_refused_leaves_a_finished_run(run_spec, dataset, tmp_path, monkeypatch):
    training.train(run_spec, dataset, tmp_path / "run")
    kept = (tmp_path / "run/metrics.json").read_bytes()
    other = tmp_path / "other.h5"
    other.write_bytes(b"no store")
    several = run_spec | {"training": run_spec["training"] | {"context_parallel": 2}}
    for spec, words in ((run_spec, {}), (several, {}), (run_spec, {"events": True})):
        if words:
            monkeypatch.setattr(training, "require", lambda: (_ for _ in ()).throw(ValueError("not installed")))
        with pytest.raises(ValueError):
            training.train_on_ranks(spec, dataset if words else other, tmp_path / "run", **words)
        assert (tmp_path / "run/metrics.json").read_bytes() == kept
    with pytest.raises(ValueError):
        classify.classify(run_spec, dataset, tmp_path / "run")
    assert (tmp_path / "run/metrics.json").read_bytes() == kept


# Kills


def start(spec_path, dataset) -> subprocess.Popen:
    command = [sys.executable, "-m", "flarepp", "train", str(spec_path), "--data", str(dataset)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            env=os.environ | {"OMP_NUM_THREADS": "1"})


def kill_in_training(process, folder, wait) -> str:
    """SIGKILL once the process has written a checkpoint of its own, `wait` seconds later; returns what it printed."""
    begin, deadline = time.time(), time.monotonic() + 60
    while not any(path.stat().st_mtime > begin for path in folder.glob("checkpoint-*.pt")):
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    time.sleep(wait)
    process.send_signal(signal.SIGKILL)
    output = process.communicate()[0]
    assert process.returncode == -signal.SIGKILL, "the run ended before it was killed"
    return output


@pytest.mark.parametrize("precision, kills", [("fp32", 5), ("fp16", 2)])
def test_killed_at_random_moments_the_run_ends_with_the_same_bits(run_spec, dataset, tmp_path, precision, kills):
    """A checkpoint follows every step, so that some kills fall into the writing of one."""
    run_spec["training"] |= {"precision": precision, "steps": 400, "checkpoint_seconds": 0}
    run_spec["model"]["norm"] = "rmsnorm" if precision == "fp16" else "layernorm"
    training.train(run_spec, dataset, tmp_path / "undisturbed")
    spec_path = write_spec(tmp_path / "killed", run_spec)
    for kill in range(kills):
        wait = random.Random(kill).uniform(0, 0.3)
        output = kill_in_training(start(spec_path, dataset), tmp_path / "killed", wait)
        assert kill == 0 or "resumed at step" in output
    process = start(spec_path, dataset)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0 and "resumed at step" in output, output
    assert bits(tmp_path / "killed") == bits(tmp_path / "undisturbed")
    assert not list((tmp_path / "killed").glob("*.pt")) and not list((tmp_path / "killed").glob(".*partial*"))


def test_a_checkpoint_of_another_spec_is_not_used(run_spec, dataset, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(training, "leave_outputs", lambda *_: (_ for _ in ()).throw(RuntimeError("stop here")))
        run_spec["training"]["checkpoint_seconds"] = 0
        with pytest.raises(RuntimeError, match="stop here"):
            training.train(run_spec, dataset, folder)
    assert len(list(folder.glob("checkpoint-*.pt"))) == 1
    run_spec["training"]["lr"] = 5e-4
    training.train(run_spec, dataset, folder)
    training.train(run_spec, dataset, tmp_path / "fresh")
    assert bits(folder) == bits(tmp_path / "fresh")


def test_a_damaged_checkpoint_is_not_the_end_of_a_run(run_spec, dataset, tmp_path, capsys):
    run = training.build_run(run_spec, store.read(dataset))
    loop.save_checkpoint(run, tmp_path / "checkpoint.pt")
    os.truncate(tmp_path / "checkpoint.pt", 2000)
    loop.restore_checkpoint(run, tmp_path / "checkpoint.pt")
    assert "damaged" in capsys.readouterr().out and run.progress.steps == 0


def test_lack_of_memory_is_no_damage(run_spec, dataset, tmp_path, monkeypatch):
    """A sound checkpoint that does not fit makes the run `oom`; it is not started over."""
    run = training.build_run(run_spec, store.read(dataset))
    loop.save_checkpoint(run, tmp_path / "checkpoint.pt")

    def fail(*_, **__):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        loop.restore_checkpoint(run, tmp_path / "checkpoint.pt")


# Evaluation draws nothing from training's stream


class Noisy(torch.nn.Module):
    """Draws random numbers in training and in evaluation, as a mixer with `eval_noise` does."""

    def __init__(self, **_):
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)

    def forward(self, features, mask):
        return self.linear(features) + torch.rand(features.shape[:2])[..., None]


def test_evaluation_is_a_function_of_weights_and_data(run_spec, dataset, monkeypatch):
    monkeypatch.setattr(training, "build_model", Noisy)
    run = training.build_run(run_spec, store.read(dataset))
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        training.evaluate(run)
        assert torch.equal(torch.get_rng_state(), state)
        found.append({name: prediction for name, (prediction, _) in run.evaluated.items()})
    assert all(torch.equal(found[0][name], found[1][name]) for name in ("last", "ema"))
    assert torch.equal(found[0]["last"], found[0]["ema"])  # equal weights, equal draws
    run.spec["training"]["seed"] += 1
    training.evaluate(run)
    assert not torch.equal(run.evaluated["last"][0], found[0]["last"])


def test_the_number_of_evaluations_does_not_change_training(run_spec, dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "build_model", Noisy)
    found = []
    for number in (1, 24):
        run_spec["training"]["num_evaluations"] = number
        training.train(run_spec, dataset, tmp_path / str(number))
        found.append(bits(tmp_path / str(number)))
    assert found[0]["weights"] == found[1]["weights"] and found[0]["arrays"] == found[1]["arrays"]


def test_resumed_after_the_last_step_a_noisy_model_ends_with_the_same_bits(run_spec, dataset, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(training, "build_model", Noisy)
    run_spec["training"]["checkpoint_seconds"] = 0
    training.train(run_spec, dataset, tmp_path / "undisturbed")
    with monkeypatch.context() as patch:
        patch.setattr(training, "leave_outputs", lambda *_: (_ for _ in ()).throw(RuntimeError("killed")))
        with pytest.raises(RuntimeError, match="killed"):
            training.train(run_spec, dataset, tmp_path / "killed")
    training.train(run_spec, dataset, tmp_path / "killed")
    assert "resumed at step 24" in capsys.readouterr().out
    assert bits(tmp_path / "killed") == bits(tmp_path / "undisturbed")


# The command line


@pytest.mark.parametrize("words", [(), ("train",), ("evaluate",), ("data",), ("records",), ("table",), ("figure",), ("ledger",),
                                   ("predictor",)])
def test_every_verb_explains_itself(flarepp, words):
    answer = flarepp(*words, "--help")
    assert answer.returncode == 0 and "usage: python -m flarepp" in answer.stdout


@pytest.mark.parametrize("content, words", [
    (None, ": not there"), ("{", "not valid JSON"), ("[1]", "expected a JSON object"),
    ("{}", "the section 'dataset' is missing")])
def test_a_bad_spec_file_is_one_clear_error(flarepp, tmp_path, content, words):
    path = tmp_path / "spec.json"
    if content is not None:
        path.write_text(content)
    answer = flarepp("train", path, "--data", tmp_path / "x.h5")
    assert answer.returncode == 2 and "Traceback" not in answer.stderr
    assert any(word in answer.stderr for word in words.split("|")) and len(answer.stderr.splitlines()) == 1


@pytest.mark.parametrize("damage", ["missing", "truncated", "not HDF5", "incomplete", "altered"])
def test_a_damaged_store_is_one_clear_error(flarepp, run_spec, dataset, tmp_path, damage):
    if damage == "missing":
        dataset.unlink()
    elif damage == "truncated":
        dataset.write_bytes(dataset.read_bytes()[:3000])
    elif damage == "not HDF5":
        dataset.write_text("<html>404</html>")
    else:
        with h5py.File(dataset, "r+") as file:
            if damage == "incomplete":
                del file.attrs["complete"]
            else:
                file["train/target"][0, 0, 0] += 1
    answer = flarepp("train", write_spec(tmp_path / "run", run_spec), "--data", dataset)
    assert answer.returncode == 2 and "Traceback" not in answer.stderr and "elasticity.h5" in answer.stderr
    assert not (tmp_path / "run" / "metrics.json").exists()
