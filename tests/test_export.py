"""A run as a folder for the hub: what is in it, and that it loads back to the bits of the record."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
import yaml

from flarepp import export, record
from flarepp import train as training


@pytest.fixture
def run_dir(run_spec, dataset, tmp_path, benchmark):
    """A trained run as the pipeline leaves it, results/runs/toy beside results/data and its card."""
    folder = tmp_path / "runs" / "toy"
    record.write_json(run_spec, folder / "spec.json")
    card = benchmark.card | {"fingerprint": benchmark.fingerprint}
    record.write_with_digest(card, tmp_path / "data" / "elasticity.json")
    training.train(run_spec, dataset, folder)
    return folder


@pytest.fixture
def folder(run_dir, tmp_path):
    export.export(run_dir, tmp_path / "elasticity-flarepp", "ema")
    return tmp_path / "elasticity-flarepp"


def test_the_folder_is_ready_for_the_hub(folder, run_dir, run_spec):
    names = {"README.md", "config.json", "metrics.json", "model.safetensors", "spec.json"}
    assert {path.name for path in folder.iterdir()} == names
    _, start, text = (folder / "README.md").read_text().split("---\n", 2)
    hub, metrics = yaml.safe_load(start), record.read_run(run_dir)[1]["metrics"]
    assert (hub["license"], hub["library_name"], hub["model-index"][0]["name"]) == ("mit", "flarepp", "elasticity-flarepp")
    found = hub["model-index"][0]["results"][0]["metrics"]
    assert [entry["value"] for entry in found] == [metrics["last"], metrics["ema"]]
    assert "**Scale `smoke`.** It was trained for a few steps" in text and "Its numbers mean nothing" in text
    assert "maps x, y to stress on unstructured points" in text and "data: made by this project's solvers, split toy" in text
    assert f"| ema | {metrics['ema']:.6g} |" in text and "licence of the weights: MIT" in text
    config = record.read_json(folder / "config.json")
    assert (config["in_dim"], config["out_dim"], config["grid"], config["weights"]) == (2, 1, None, "ema")
    assert config["model"] == run_spec["model"]


def test_the_hub_is_told_of_the_licence_of_the_data():
    for source, licence in (("generated", "mit"), ("stand-in", "mit"), ("published", "other")):
        head = export.for_hub({"name": "darcy", "source": source}, "paper", {"last": 0.5, "ema": 0.25}, "darcy-flarepp")
        assert head["license"] == licence and ("license_name" in head) == (licence == "other")


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_it_loads_back_to_the_predictions_of_the_run(run_spec, dataset, tmp_path, benchmark, precision):
    run_spec["training"] |= {"precision": precision, "ema_decay": 0.9}
    record.write_json(run_spec, tmp_path / "runs" / "toy" / "spec.json")
    training.train(run_spec, dataset, tmp_path / "runs" / "toy")
    export.export(tmp_path / "runs" / "toy", tmp_path / "out", "last")
    with h5py.File(tmp_path / "runs" / "toy" / "predictions.h5") as file:
        kept = {name: file[name][:] for name in ("last", "ema")}
    size = run_spec["training"]["eval_batch_size"]
    for given, name in ((None, "last"), ("ema", "ema")):
        model = export.load(tmp_path / "out", given)
        parts = [model(benchmark.test.features[start:start + size]) for start in range(0, 6, size)]
        assert np.concatenate(parts).tobytes() == kept[name].tobytes()
    assert kept["last"].tobytes() != kept["ema"].tobytes()


def test_evaluate_gives_the_error_of_the_record(flarepp, folder, dataset):
    answer = flarepp("evaluate", folder, "--data", dataset)
    assert answer.returncode == 0 and "equal to the record" in answer.stdout, answer.stderr
    assert f"ema: mean error {record.read_run(folder)[1]['metrics']['ema']}, 6 samples" in answer.stdout


def test_samples_of_their_own_sizes_are_masked(folder, benchmark):
    model, features = export.load(folder), benchmark.test.features
    sizes = np.array([60, 41, 7, 60, 60, 60])
    mask = np.arange(60) < sizes[:, None]
    padded = np.where(mask[..., None], features, np.nan)
    fields = model(padded, mask)
    assert fields.shape == (6, 60, 1) and np.isfinite(fields).all() and not fields[~mask].any()
    for index, size in ((1, 41), (2, 7)):
        assert fields[index, :size] == pytest.approx(model(features[[index], :size])[0], abs=1e-5)


def test_what_cannot_be_loaded_is_named(folder, benchmark):
    with pytest.raises(ValueError, match=r"weights 'emma' is unknown; did you mean 'ema'"):
        export.load(folder, "emma")
    with pytest.raises(ValueError, match=r"features: got \[6, 60, 3\]; expected \[samples, points, 2\]"):
        export.load(folder)(np.zeros((6, 60, 3), np.float32))
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\1")
    with pytest.raises(ValueError, match="model.safetensors: was changed after the run ended"):
        export.load(folder)
    (folder / "metrics.json").unlink()
    with pytest.raises(FileNotFoundError, match="metrics.json"):
        export.load(folder)


def test_only_finished_runs_on_fields_are_exported_to_a_new_folder(run_dir, folder, tmp_path):
    with pytest.raises(ValueError, match="elasticity-flarepp: is there already; name a new folder"):
        export.export(run_dir, folder, "last")
    spec, result = record.read_run(run_dir)
    others = spec | {"model": {"name": "lra"}}, {"model": {"name": "constant"}}
    for changes in ({"status": "oom"}, *({"spec": other} for other in others)):
        changed = record.write_record(result | changes, run_dir)
        record.write_json(changed["spec"], run_dir / "spec.json")
        with pytest.raises(ValueError, match="exported are finished runs on the benchmarks of fields, status 'ok'"):
            export.export(run_dir, tmp_path / "other", "last")
    assert not (tmp_path / "other").exists()
