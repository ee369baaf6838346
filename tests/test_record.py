"""Records, the store's fingerprint and the trivial predictors: what later steps take on trust."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flarepp import predictors, record
from flarepp.data import store

SPEC = {"scale": "quick", "dataset": {"name": "darcy"}, "model": {"name": "any"}}


def leave_run(folder, status="ok", source="generated", **metrics):
    record.write_record({"status": status, "message": "", "metrics": metrics, "spec": SPEC,
                         "provenance": {"dataset": {"source": source}}}, folder)
    record.write_json(SPEC, folder / "spec.json")
    return str(folder)


def entry(run, **changes):
    return {"run": run, "spec": record.digest(SPEC), "dataset": "darcy", "dataset_label": "Darcy",
            "model": "flare", "label": "FLARE", "role": "ranked", "num_blocks": 2, "num_latents": 16,
            "precision": "fp32", "seed": 0, "absent": None} | changes


def test_records_keep_status_source_and_every_metric(tmp_path):
    plan = {"suite": "table1", "scale": "quick", "entries": [
        entry(leave_run(tmp_path / "a", last=0.5, ema=0.25)),
        entry(leave_run(tmp_path / "b", source="published", last=0.125), model="flarepp"),
        entry(leave_run(tmp_path / "c", status="diverged", steps=3), model="full"),
        entry("", model="lno", absent="not affordable")]}
    path = tmp_path / "records.csv"
    record.write_records(record.records(plan), path)
    columns = ["model", "status", "data_source", "metric", "value"]
    found = [tuple("" if value != value else value for value in row)  # NaN is an empty cell
             for row in record.read_records(path)[columns].itertuples(index=False)]
    assert found == [("flare", "ok", "generated", "ema", 0.25), ("flare", "ok", "generated", "last", 0.5),
                     ("flarepp", "ok", "published", "last", 0.125), ("full", "diverged", "generated", "steps", 3.0),
                     ("lno", "not affordable", "", "status", "")]


def test_a_record_of_another_spec_is_refused(tmp_path):
    run = leave_run(tmp_path / "a", last=0.5)
    record.write_json(SPEC | {"scale": "smoke"}, tmp_path / "a" / "spec.json")
    with pytest.raises(ValueError, match="another spec"):
        record.records({"suite": "table1", "scale": "quick", "entries": [entry(run)]})


def test_a_run_that_is_missing_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="metrics.json"):
        record.records({"suite": "table1", "scale": "quick", "entries": [entry(str(tmp_path / "none"))]})


def test_a_record_returns_as_it_reads_back_with_digests_of_what_lies_beside_it(tmp_path):
    (tmp_path / "history.csv").write_text("step\n")
    result = record.write_record({"metrics": {"last": 0.1 + 0.2}, "spec": {"grid": (3, 4)}}, tmp_path)
    assert (result["spec"], result) == record.read_run(tmp_path) and result["spec"] == {"grid": [3, 4]}
    assert result["files"] == {"history.csv": record.sha256(tmp_path / "history.csv")}
    assert record.write_record(result, tmp_path) == result  # written again it is the same
    with pytest.raises(ValueError, match="JSON"):
        record.write_record({"metrics": {"last": float("nan")}}, tmp_path)


def test_the_learning_curve_is_read_at_its_evaluations(tmp_path):
    (tmp_path / "history.csv").write_text("step,loss,test_last,test_ema\n1,0.5,,\n2,0.4,0.3,0.35\n3,0.3,,\n4,0.2,0.1,0.15\n")
    record.write_record({"spec": {}}, tmp_path)
    assert record.read_history(tmp_path).to_dict("list") == {
        "step": [2, 4], "test_last": [0.3, 0.1], "test_ema": [0.35, 0.15]}


@pytest.mark.parametrize("content", ["", "not a table\nat,all", "\x00"])
def test_what_is_no_records_table_is_refused_by_name(tmp_path, content):
    record._write_table(content, tmp_path / "records.csv")
    with pytest.raises(ValueError, match="records.csv"):
        record.read_records(tmp_path / "records.csv")


def test_atomic_path_leaves_the_old_file_when_the_block_fails(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(RuntimeError), record.atomic_path(path) as partial:
        partial.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old" and [item.name for item in tmp_path.iterdir()] == ["file.txt"]


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("array", ["features", "target"])
def test_the_fingerprint_is_of_every_array(benchmark, split, array):
    samples = getattr(benchmark, split)
    other = getattr(samples, array).copy()
    other[-1, -1, -1] = np.nextafter(other[-1, -1, -1], np.float32(9))
    changed = replace(benchmark, **{split: replace(samples, **{array: other})})
    assert changed.fingerprint != benchmark.fingerprint
    assert replace(benchmark).fingerprint == benchmark.fingerprint


def test_the_store_round_trips(benchmark, dataset):
    found = store.read(dataset)
    assert found.fingerprint == benchmark.fingerprint and found.card == benchmark.card and found.grid is None
    target = found.test.target.astype(float)
    assert found.target_norm.decode(found.target_norm.encode(target)) == pytest.approx(target, rel=1e-15)


def test_normalisers_accumulate_in_fp64():
    """A running sum of 3e7 copies of -229.8 in FP32 drifts by tens; the unbiased deviation of two values is known."""
    values = np.full((2, 3_000_000, 1), -229.845718, np.float32)
    assert store.Affine.fit(values).mean[0] == pytest.approx(values[0, 0, 0], rel=1e-12)
    pair = store.Affine.fit(np.array([[[1.0]], [[4.0]]], np.float32))
    assert pair.std[0] == pytest.approx(np.sqrt(4.5) + 1e-8, rel=1e-14)


def shuffled(benchmark, seed=3):
    """The same samples with every sample's points in an order of its own: points no longer correspond."""
    generator = np.random.default_rng(seed)

    def mix(samples):
        orders = [generator.permutation(samples.target.shape[1]) for _ in samples.target]
        return store.Samples(*(np.stack([array[order] for array, order in zip(part, orders)])
                               for part in (samples.features, samples.target)))

    return replace(benchmark, train=mix(benchmark.train), test=mix(benchmark.test), points_correspond=False)


@pytest.fixture
def fixed_points(benchmark):
    """One set of points for all samples; the field is a random combination of two modes that the third channel carries."""
    generator = np.random.default_rng(1)
    points = np.broadcast_to(generator.random((60, 2)), (22, 60, 2))
    weights = generator.normal(size=(22, 1, 1))
    target = 3 + weights * points[..., :1] + points[..., 1:]
    features = np.concatenate([points, np.broadcast_to(weights, (22, 60, 1))], axis=-1)
    train, test = (store.Samples(features[part].astype(np.float32), target[part].astype(np.float32))
                   for part in (slice(16), slice(16, None)))
    card = benchmark.card | {"channels": {"features": ["x", "y", "weight"], "target": ["u"]}}
    return replace(benchmark, train=train, test=test, card=card)


def test_constant_and_mean_field_are_means_of_the_training_set(fixed_points):
    train = fixed_points.train.target.astype(float)
    assert predictors.predict(fixed_points, "constant") == pytest.approx(np.full((6, 60, 1), train.mean()))
    assert predictors.predict(fixed_points, "mean_field") == pytest.approx(np.broadcast_to(train.mean(0), (6, 60, 1)))


def test_pca_ridge_finds_a_linear_map(fixed_points):
    error = predictors.relative_l2(predictors.predict(fixed_points, "pca_ridge"), fixed_points.test.target)
    assert error.max() < 1e-4


def test_pca_ridge_chooses_on_held_out_samples(monkeypatch, fixed_points):
    """The last quarter of the training samples is predicted from the others, for every choice, then all are refitted."""
    seen, fit = [], predictors._ridge

    def spy(inputs, fields, wanted, *choice):
        seen.append((len(inputs), len(wanted), np.array_equal(wanted[:1], inputs[:1])))
        return fit(inputs, fields, wanted, *choice)

    monkeypatch.setattr(predictors, "_ridge", spy)
    predictors.predict(fixed_points, "pca_ridge")
    assert set(seen[:-1]) == {(12, 4, False)} and seen[-1] == (16, 6, False)


@pytest.mark.parametrize("name", ["mean_field", "pca_ridge"])
def test_points_that_do_not_correspond_are_resampled_there_and_back(fixed_points, name):
    """On shuffled copies of one point set nearest neighbours are exact, so that the errors are those of the ordered set."""
    mixed = shuffled(fixed_points)
    expected = predictors.relative_l2(predictors.predict(fixed_points, name), fixed_points.test.target)
    found = predictors.relative_l2(predictors.predict(mixed, name), mixed.test.target)
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)
