"""`evaluate`: the record's bits from the exported weights, other data through the run's normalisers, broken files."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import safetensors.torch
import torch

from flarepp import __main__ as command
from flarepp import evaluate as evaluation
from flarepp import record
from flarepp import train as training
from flarepp.data import store
from flarepp.losses import relative_l2

OTHER_NORM = store.Affine(np.array([0.4, 0.1]), np.array([2.0, 0.5]))


@pytest.fixture
def run_dir(run_spec, dataset, tmp_path, benchmark):
    """A trained run as the pipeline leaves it, results/runs/toy beside results/data; its features are normalised."""
    store.write(replace(benchmark, feature_norm=OTHER_NORM), dataset)
    folder = tmp_path / "runs" / "toy"
    leave(folder, run_spec, dataset)
    return folder


@pytest.fixture
def main(monkeypatch, capsys):
    """`python -m flarepp ...` in this process, which spares a test the start of another."""
    def call(*words) -> SimpleNamespace:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["flarepp", *map(str, words)])
        returncode = command.main()
        return SimpleNamespace(returncode=returncode, **capsys.readouterr()._asdict())
    return call


def leave(folder, spec, dataset):
    record.write_json(spec, folder / "spec.json")
    return training.train(spec, dataset, folder)


def files(folder):
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir() if path.is_file()}


def rewrite_weights(folder, change):
    """Load the weights file, let `change` edit the dictionary, write it back."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    change(tensors)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")


def rewrite_record(folder, change, name="metrics.json"):
    value = record.read_json(folder / name)
    change(value)
    (folder / name).write_text(json.dumps(value))


def assert_refused(answer, folder, *words):
    """One line that says why, exit code 2, nothing written."""
    assert answer.returncode == 2 and answer.err.startswith("error: "), answer.err
    assert len(answer.err.splitlines()) == 1 and answer.out == ""
    assert all(word in answer.err for word in words), answer.err
    assert not (folder / "evaluation").exists()


# The run's own data


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_weights_give_the_bits_of_the_record(flarepp, run_spec, dataset, tmp_path, precision):
    run_spec["training"] |= {"precision": precision, "steps": 60, "ema_decay": 0.95, "eval_batch_size": 4}
    run_spec["model"]["norm"] = "rmsnorm" if precision == "fp16" else "layernorm"
    run_dir = tmp_path / "runs" / "toy"
    trained = tmp_path / "runs" / "toy" / "spec.json"
    record.write_json(run_spec, trained)
    assert flarepp("train", trained).returncode == 0
    before = files(run_dir)
    answer = flarepp("evaluate", run_dir)
    assert answer.returncode == 0 and answer.stderr == "", answer.stderr
    assert files(run_dir) == before
    assert {path.name for path in (run_dir / "evaluation").iterdir()} == {"metrics.json", "predictions.h5"}
    ours, theirs = (record.read_json(folder / "metrics.json") for folder in (run_dir / "evaluation", run_dir))
    assert ours["metrics"] == {name: theirs["metrics"][name] for name in ("last", "ema")}
    assert ours["metrics"]["last"] != ours["metrics"]["ema"]
    with h5py.File(run_dir / "predictions.h5") as old, h5py.File(run_dir / "evaluation" / "predictions.h5") as new:
        assert old.keys() == new.keys() and all(old[key][:].tobytes() == new[key][:].tobytes() for key in old)
        assert dict(old.attrs) == dict(new.attrs)
    assert ours["status"] == "ok" and ours["spec"] == run_spec
    assert ours["weights"] == record.sha256(run_dir / "model.safetensors")
    assert ours["provenance"] | {"code": ""} == theirs["provenance"] | {"code": ""}
    lines = answer.stdout.splitlines()
    assert len(lines) == 3 and "equal to the record" in lines[2]
    for name, line in zip(("last", "ema"), lines):
        assert line == f"{name}: mean error {ours['metrics'][name]}, 6 samples"


def test_a_model_with_noise_in_evaluation_gives_the_bits_of_the_record(run_spec, dataset, tmp_path):
    run_spec["model"] |= {"mixer": "transolverpp", "eval_noise": True}
    for option in ("seed_norm", "qk_norm"):
        run_spec["model"].pop(option, None)
    result = leave(tmp_path / "runs" / "toy", run_spec, dataset)
    torch.manual_seed(12345)
    ours = evaluation.evaluate(tmp_path / "runs" / "toy", dataset, tmp_path / "out")
    assert ours["metrics"] == {name: result["metrics"][name] for name in ("last", "ema")}


def test_the_weights_file_holds_the_normalisers(run_dir, benchmark):
    tensors = safetensors.torch.load_file(run_dir / "model.safetensors")
    for name, norm in (("features", OTHER_NORM), ("target", benchmark.target_norm)):
        assert tensors[f"norm/{name}"].dtype == torch.float64
        assert np.array_equal(tensors[f"norm/{name}"].numpy(), np.stack([norm.mean, norm.std]))


@pytest.mark.parametrize("factor, elsewhere, follows", [
    (1 + 1e-7, False, False), (1 + 1e-7, True, True), (1 + 1e-3, True, False), (1, True, True)])
def test_a_record_follows_to_the_bit_or_elsewhere_within_a_tolerance(main, run_dir, factor, elsewhere, follows):
    def change(result):
        result["metrics"]["ema"] *= factor
        if elsewhere:
            result["provenance"]["versions"]["torch"] = "1.0"

    rewrite_record(run_dir, change)
    answer = main("evaluate", run_dir)
    verdict = record.read_json(run_dir / "evaluation" / "metrics.json")["record"]
    assert answer.returncode == (0 if follows else 1) and verdict["follows"] == follows and verdict["compared"]
    text = answer.out if follows else answer.err
    assert ("equal to the record" if follows else "the record does not follow from these weights") in text
    assert factor == 1 or "ema" in text.splitlines()[-1] and verdict["relative_difference"]["ema"] > 0
    assert ("torch" in str(verdict["environment"])) == elsewhere


@pytest.mark.parametrize("key", ["last/blocks.0.ffn.output.weight", "ema/out_proj.output.bias", "norm/features", "norm/target"])
def test_changed_weights_contradict_the_record(main, run_dir, key):
    def change(tensors):
        name = key if key in tensors else next(name for name in sorted(tensors) if name.startswith(key.split("/")[0]))
        tensors[name].flatten()[0].add_(0.01)

    rewrite_weights(run_dir, change)
    answer = main("evaluate", run_dir)
    assert answer.returncode == 1 and "the record does not follow from these weights" in answer.err


# Other data


def other_data(benchmark, path, **changes):
    """Eight samples on 45 points of which the store's own normalisers know other numbers than the run."""
    points = np.random.default_rng(5).random((8, 45, 2)).astype(np.float32)
    samples = store.Samples(points, np.cos(points[..., :1]) + 2)
    norm = store.Affine(np.array([9.0]), np.array([3.0]))
    store.write(replace(benchmark, **{"train": samples, "test": samples, "target_norm": norm} | changes), path)
    return samples


def test_other_data_are_seen_through_the_runs_normalisers(main, run_dir, run_spec, benchmark, tmp_path):
    samples = other_data(benchmark, tmp_path / "other.h5")
    answer = main("evaluate", run_dir, "--data", tmp_path / "other.h5", "--out", tmp_path / "out")
    assert answer.returncode == 0 and "nothing is compared" in answer.out and "8 samples" in answer.out
    result = record.read_json(tmp_path / "out" / "metrics.json")
    assert not result["record"]["compared"]
    assert result["provenance"]["dataset"]["fingerprint"] == store.read(tmp_path / "other.h5").fingerprint
    model = training.build_model(**run_spec["model"], in_dim=2, out_dim=1).eval()
    tensors = safetensors.torch.load_file(run_dir / "model.safetensors")
    features = torch.from_numpy(((samples.features - OTHER_NORM.mean) / OTHER_NORM.std).astype(np.float32))
    for name in ("last", "ema"):
        model.load_state_dict({key.split("/")[1]: value for key, value in tensors.items() if key.startswith(f"{name}/")})
        with torch.no_grad():
            field = model(features) * benchmark.target_norm.std[0] + benchmark.target_norm.mean[0]
        read = record.read_predictions(tmp_path / "out", name)
        assert read["prediction"] == pytest.approx(field.numpy(), rel=1e-4)
        assert np.array_equal(read["points"], samples.features)
        expected = relative_l2(field, torch.from_numpy(samples.target)).double().mean().item()
        assert result["metrics"][name] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("changes, words", [
    ({"name": "darcy"}, ("'darcy'", "'elasticity'")),
    ({"test": store.Samples(np.ones((2, 5, 3), "f4"), np.ones((2, 5, 1), "f4"))}, ("features", "3 channels", "model 2")),
    ({"test": store.Samples(np.ones((2, 5, 2), "f4"), np.ones((2, 5, 4), "f4"))}, ("target", "4 channels", "model 1")),
    ({"test": store.Samples(np.ones((0, 5, 2), "f4"), np.ones((0, 5, 1), "f4"))}, ("0 test samples",)),
    ({"test": store.Samples(np.ones((2, 5, 2), "f4"), np.zeros((2, 5, 1), "f4"))}, ("zero everywhere",)),
    ({"grid": (9, 9)}, ("(9, 9)", "45 points"))])
def test_data_that_do_not_fit_are_refused(main, run_dir, benchmark, tmp_path, changes, words):
    other_data(benchmark, tmp_path / "other.h5", **changes)
    assert_refused(main("evaluate", run_dir, "--data", tmp_path / "other.h5"), run_dir, *words)


def test_a_model_that_needs_its_grid_is_refused_others(main, run_spec, benchmark, dataset, tmp_path):
    """GNOT as published sees distances to a lattice on the grid in place of the features."""
    run_spec["model"] = {"name": "gnot", "channel_dim": 8, "num_heads": 2, "num_blocks": 1, "num_experts": 2, "ffn_ratio": 2.0,
                         "as_published": True, "reference_grid": 3}
    store.write(replace(benchmark, grid=(6, 10)), dataset)
    run_dir = tmp_path / "runs" / "toy"
    leave(run_dir, run_spec, dataset)
    other_data(benchmark, tmp_path / "scattered.h5")
    assert_refused(main("evaluate", run_dir, "--data", tmp_path / "scattered.h5"), run_dir, "the grid [6, 10]", "the data None")
    other_data(benchmark, tmp_path / "finer.h5", grid=(5, 9))
    assert main("evaluate", run_dir, "--data", tmp_path / "finer.h5").returncode == 0


@pytest.mark.parametrize("content", ["text", "foreign", "empty", "missing", "folder"])
def test_what_is_no_store_is_refused(main, run_dir, tmp_path, content):
    path = tmp_path / "other.h5"
    if content == "text":
        path.write_text("<html>404</html>")
    elif content == "folder":
        path.mkdir()
    elif content != "missing":
        with h5py.File(path, "w") as file:
            file.attrs["complete"] = content == "empty"
    assert_refused(main("evaluate", run_dir, "--data", path), run_dir, "other.h5")


# Runs that failed


def diverged_run(folder, run_spec, dataset):
    run_spec["training"] |= {"lr": 1e30, "clip_norm": 1e30, "div_factor": 1.0}
    assert leave(folder, run_spec, dataset)["status"] == "diverged"


def test_a_diverged_run_is_said_to_have_diverged(main, run_spec, dataset, tmp_path):
    run_dir = tmp_path / "runs" / "toy"
    diverged_run(run_dir, run_spec, dataset)
    rewrite_weights(run_dir, lambda tensors: tensors["last/out_norm.weight"].fill_(float("nan")))
    answer = main("evaluate", run_dir)
    assert answer.returncode == 0 and "the run has the status 'diverged'" in answer.out
    text = (run_dir / "evaluation" / "metrics.json").read_text()
    result = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    assert result["status"] == "diverged" and "last" not in result["metrics"] and "last" in result["message"]
    assert "last: diverged" in answer.out and not result["record"]["compared"]
    with h5py.File(run_dir / "evaluation" / "predictions.h5") as file:
        assert "last" not in file and set(result["metrics"]) == file.keys() & {"last", "ema"}


def test_weights_of_a_run_without_memory_to_train_are_evaluated(run_spec, dataset, tmp_path, monkeypatch):
    def fail(_):
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(training, "training_step", fail)
        leave(tmp_path / "runs" / "toy", run_spec, dataset)
    result = evaluation.evaluate(tmp_path / "runs" / "toy", dataset, tmp_path / "out")
    assert result["status"] == "ok" and "'oom' (no memory)" in result["record"]["verdict"]


def test_a_run_without_memory_for_the_model_has_no_weights(main, run_spec, dataset, tmp_path):
    run_spec["model"]["channel_dim"] = 4_000_000
    run_dir = tmp_path / "runs" / "toy"
    leave(run_dir, run_spec, dataset)
    assert_refused(main("evaluate", run_dir), run_dir, "no weights", "'oom' (building the model")


def test_lack_of_memory_in_the_evaluation_is_one_clear_error(run_dir, dataset, tmp_path, monkeypatch):
    def fail(*_):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(training, "predict", fail)
    with pytest.raises(ValueError, match="ran out of memory: CUDA"):
        evaluation.evaluate(run_dir, dataset, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Files that are broken or tampered with


@pytest.mark.parametrize("name", ["spec.json", "metrics.json", "model.safetensors"])
def test_every_file_of_the_run_is_needed(main, run_dir, name):
    (run_dir / name).unlink()
    assert_refused(main("evaluate", run_dir), run_dir, name)


def test_a_folder_that_does_not_exist_is_refused(main, tmp_path):
    assert_refused(main("evaluate", tmp_path / "none"), tmp_path, "no such run folder")


@pytest.mark.parametrize("change, words", [
    (lambda t: t.pop("last/out_norm.weight"), "lacks last/out_norm.weight (1 "),
    (lambda t: t.update({"ema/foreign": torch.ones(1)}), "has the foreign ema/foreign (1 "),
    (lambda t: t.update({"foreign": torch.ones(1).to(torch.float8_e5m2)}), "has the foreign foreign"),
    (lambda t: t.update({"last/out_norm.weight": torch.ones(3)}), "last/out_norm.weight is torch.float32 [3]"),
    (lambda t: t.update({"last/out_norm.weight": t["last/out_norm.weight"].half()}), "is torch.float16"),
    (lambda t: t["ema/out_norm.weight"].fill_(float("nan")), "ema/out_norm.weight holds numbers that are not finite"),
    (lambda t: t["norm/target"].fill_(float("nan")), "norm/target is no normaliser"),
    (lambda t: t["norm/target"].zero_(), "norm/target is no normaliser"),
    (lambda t: t.update({"norm/features": torch.ones(())}), "norm/features is no normaliser"),
    (lambda t: t.update({"norm/features": torch.ones(2, 3, dtype=torch.float64)}), "2 channels, the run's model 3"),
    (lambda t: [t.pop(key) for key in list(t)], "norm/features is missing")])
def test_weights_that_do_not_fit_are_refused(main, run_dir, change, words):
    rewrite_weights(run_dir, change)
    assert_refused(main("evaluate", run_dir), run_dir, words)


@pytest.mark.parametrize("content", ["truncated", "text", "pickle", "folder"])
def test_what_is_no_safetensors_is_refused(main, run_dir, content):
    path = run_dir / "model.safetensors"
    if content == "truncated":
        os.truncate(path, path.stat().st_size // 2)
    elif content == "text":
        path.write_text("<html>404</html>")
    elif content == "pickle":
        torch.save(safetensors.torch.load_file(path), path)
    else:
        path.unlink()
        path.mkdir()
    assert_refused(main("evaluate", run_dir), run_dir)


def test_a_spec_edited_after_training_is_refused(main, run_dir):
    def wider(spec):
        spec["model"]["channel_dim"] *= 2

    rewrite_record(run_dir, wider, "spec.json")
    assert_refused(main("evaluate", run_dir), run_dir, "another spec than spec.json")
    rewrite_record(run_dir, lambda result: wider(result["spec"]))
    assert_refused(main("evaluate", run_dir), run_dir, "the model of spec.json has torch.float32")


@pytest.mark.parametrize("change, words", [
    (lambda r: r.pop("status"), "not the record of a run"),
    (lambda r: r.update(status="fine"), "not the record of a run"),
    (lambda r: r["metrics"].pop("ema"), "not the record of a run"),
    (lambda r: r["metrics"].update(last="0.5"), "not the record of a run"),
    (lambda r: r["metrics"].update(last=float("nan")), "it has the number NaN"),
    (lambda r: r.update(provenance=None), "not the record of a run"),
    (lambda r: r["provenance"].update(versions="2.0"), "not the record of a run"),
    (lambda r: r["spec"].pop("training"), "another spec")])
def test_a_broken_record_is_refused(main, run_dir, change, words):
    rewrite_record(run_dir, change)
    assert_refused(main("evaluate", run_dir), run_dir, "metrics.json", words)


@pytest.mark.parametrize("content, words", [("{", "not valid JSON"), ("[]", "JSON object"), ("{}", "'dataset'"),
                                            ('{"dataset": 3}', "'dataset'"),
                                            ('{"dataset": {"name": "elasticity"}}', "'model'")])
def test_a_broken_spec_is_refused(main, run_dir, content, words):
    (run_dir / "spec.json").write_text(content)
    assert_refused(main("evaluate", run_dir), run_dir, words)


@pytest.mark.parametrize("place", ["run", "file"])
def test_files_of_a_run_are_never_replaced(main, run_dir, tmp_path, place):
    out = run_dir if place == "run" else tmp_path / "file"
    (tmp_path / "file").write_text("kept")
    before = files(run_dir)
    assert_refused(main("evaluate", run_dir, "--out", out), run_dir, str(out))
    assert files(run_dir) == before and (tmp_path / "file").read_text() == "kept"
