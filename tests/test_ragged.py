"""Samples of different sizes: kept with offsets, batched with masks; a batch of two equals the two alone."""

from dataclasses import replace

import h5py
import numpy as np
import pytest
import torch

from flarepp import predictors, record
from flarepp import spec as planning
from flarepp import train as training
from flarepp.data import store

SIZES = ([5, 40, 23, 60, 31, 17], [44, 9, 27])


def field(points):
    return np.sin(6 * points[:, :1]) + points[:, 1:] + 0.5


@pytest.fixture
def ragged(benchmark) -> store.Benchmark:
    """Six training and three test samples with their own numbers of scattered points."""
    generator = np.random.default_rng(5)

    def samples(sizes):
        points = [generator.random((size, 2)).astype(np.float32) for size in sizes]
        return store.Samples.ragged(points, [field(sample).astype(np.float32) for sample in points])

    train, test = map(samples, SIZES)
    norm = store.Affine.fit(train.features[train.mask])  # moves 0 elsewhere: encoded padding has to be zeroed again
    return replace(benchmark, train=train, test=test, points_correspond=False, feature_norm=norm,
                   target_norm=store.Affine.fit(train.target[train.mask]))


@pytest.fixture
def specs(config) -> dict:
    """The smoke run of every model of Table 1, by name."""
    config["scale"] = "smoke"
    runs = planning.expand(config).runs
    return {path.split("/")[5]: run.spec for path, run in runs.items() if "table1/elasticity/" in path}


MODELS = ("full", "perceiver_io", "set_transformer", "gnot", "lno", "transolver", "transolverpp", "transolver3", "flare",
          "flarepp", "flarepp_shared", "flarepp_anchored")


def test_all_models_are_looked_at(specs):
    assert set(MODELS) == set(specs)


def test_the_file_holds_points_and_offsets_without_padding(ragged, tmp_path):
    store.write(ragged, tmp_path / "ragged.h5")
    with h5py.File(tmp_path / "ragged.h5") as file:
        assert file["train/features"].shape == (sum(SIZES[0]), 2) and file["test/target"].shape == (sum(SIZES[1]), 1)
        assert file["train/offsets"][:].tolist() == [0, *np.cumsum(SIZES[0])]
    back = store.read(tmp_path / "ragged.h5")
    for name in ("train", "test"):
        ours, theirs = getattr(back, name), getattr(ragged, name)
        assert np.array_equal(ours.features, theirs.features) and np.array_equal(ours.target, theirs.target)
        assert np.array_equal(ours.sizes, theirs.sizes) and np.array_equal(ours.mask, theirs.mask)
    assert back.fingerprint == ragged.fingerprint


def test_the_sizes_are_part_of_the_fingerprint(ragged):
    cut = [sample[:size] for sample, size in zip(ragged.test.features, SIZES[1])]
    moved = [np.concatenate(cut[:2]), np.empty((0, 2), np.float32), cut[2]]  # the same bytes, divided otherwise
    targets = [field(sample).astype(np.float32) for sample in moved]
    other = replace(ragged, test=store.Samples.ragged(moved, targets))
    assert np.array_equal(other.test.arrays["features"], ragged.test.arrays["features"])
    assert other.fingerprint != ragged.fingerprint


def test_padding_that_is_not_zero_is_refused(ragged):
    features = ragged.test.features.copy()
    features[1, -1] = 3
    with pytest.raises(AssertionError, match="padding"):
        store.Samples(features, ragged.test.target, ragged.test.sizes)


def alone(samples, index):
    """One sample as a set of its own, without padding."""
    size = samples.sizes[index]
    return store.Samples(samples.features[index:index + 1, :size], samples.target[index:index + 1, :size])


@pytest.mark.parametrize("damage", [
    lambda file: file["test/offsets"].write_direct(file["test/offsets"][:] + 7),
    lambda file: file["test/offsets"].write_direct(file["test/offsets"][:][::-1].copy()),
    lambda file: replace_array(file, "test/offsets", np.array([0.0, 44, 53, 80])),
    lambda file: replace_array(file, "train/offsets", np.zeros((2, 2), int)),
    lambda file: replace_array(file, "test/offsets", None),
    lambda file: replace_array(file, "train/target", None),
    lambda file: replace_array(file, "norm/target", None),
    lambda file: replace_array(file, "test", None),
    lambda file: file.attrs.modify("card", "{"),
    lambda file: file.attrs.__delitem__("name"),
])
def test_a_damaged_file_is_one_clear_error(ragged, tmp_path, damage):
    store.write(ragged, path := tmp_path / "ragged.h5")
    with h5py.File(path, "r+") as file:
        damage(file)
    with pytest.raises(ValueError, match="ragged.h5: .*delete it and run again"):
        store.read(path)


def replace_array(file, name: str, values) -> None:
    del file[name]
    if values is not None:
        file[name] = values


def test_a_region_without_points_is_refused_before_training(specs, ragged, tmp_path):
    nowhere = replace(ragged, card=ragged.card | {"regions": {"far": {"lower": [5, 5], "upper": [6, 6]}}})
    store.write(nowhere, tmp_path / "far.h5")
    for run in (lambda: training.train(specs["flare"], tmp_path / "far.h5", tmp_path / "run"),
                lambda: predictors.run({"model": {"name": "constant"}}, tmp_path / "far.h5", tmp_path / "run")):
        with pytest.raises(ValueError, match="test sample 0 has no point in the region 'far'"):
            run()
    assert not (tmp_path / "run" / "metrics.json").exists()


@pytest.mark.parametrize("model", MODELS)
def test_a_batch_of_two_equals_the_two_alone(model, specs, ragged):
    """Loss, gradients and test predictions: those of the padded batch are the means, or the rows, of the samples alone."""
    spec = specs[model]
    run = training.build_run(spec, ragged)
    torch.manual_seed(3)
    for parameter in run.model.parameters():
        parameter.data = parameter.data + 0.1 * torch.randn_like(parameter)
    pair = torch.tensor([0, 3])

    def losses(split, indices):
        run.model.eval()  # Transolver++ draws noise in training, which padding would shift
        features, target, mask = split.batch(indices)
        prediction = training.predict(run, run.model, features, mask)
        return training.training_loss(prediction, target, gradient_weight=0, grid=None), prediction

    def gradients(loss):
        run.model.zero_grad()
        loss.backward()
        return [parameter.grad.clone() for parameter in run.model.parameters() if parameter.grad is not None]

    split = training.load_split(ragged.train, ragged.feature_norm, run.device, "train")
    loss, prediction = losses(split, pair)
    together = gradients(loss)
    singles = [training.load_split(alone(ragged.train, index), ragged.feature_norm, run.device, "train") for index in pair]
    first, second = (losses(single, torch.tensor([0])) for single in singles)
    apart = gradients((first[0] + second[0]) / 2)
    assert loss.item() == pytest.approx((first[0] + second[0]).item() / 2, rel=1e-5)
    assert len(together) == len(apart) > 5
    largest = max(gradient.abs().max() for gradient in apart)
    for ours, theirs in zip(together, apart):
        assert (ours - theirs).abs().max() <= 1e-5 * largest
    for row, (_, expected) in enumerate((first, second)):
        size = expected.shape[1]
        assert torch.allclose(prediction[row, :size], expected[0], rtol=1e-5, atol=1e-6)
        assert not prediction[row, size:].any()


@pytest.mark.parametrize("model", MODELS)
def test_the_error_does_not_depend_on_the_evaluation_batch(model, specs, ragged):
    found = []
    for size in (1, 2, 3):
        spec = specs[model] | {"training": specs[model]["training"] | {"eval_batch_size": size}}
        run = training.build_run(spec, ragged)
        training.evaluate(run)
        found.append(run.evaluated["last"][1])
    assert torch.allclose(found[0], found[1], rtol=1e-5) and torch.allclose(found[0], found[2], rtol=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_run_on_ragged_data_leaves_predictions_of_each_size(precision, specs, ragged, tmp_path):
    store.write(ragged, tmp_path / "ragged.h5")
    spec = specs["flarepp"] | {"training": specs["flarepp"]["training"] | {"precision": precision, "batch_size": 3}}
    result = training.train(spec, tmp_path / "ragged.h5", tmp_path / "run")
    assert result["status"] == "ok"
    read = record.read_predictions(tmp_path / "run", "last")
    assert [len(sample) for sample in read["prediction"]] == SIZES[1] == [len(sample) for sample in read["points"]]
    for index, size in enumerate(SIZES[1]):
        assert np.array_equal(read["target"][index], ragged.test.target[index, :size])
        error = np.linalg.norm(read["prediction"][index] - read["target"][index]) / np.linalg.norm(read["target"][index])
        assert read["error"][index] == pytest.approx(error, rel=1e-5)
    assert result["metrics"]["last"] == pytest.approx(read["error"].mean(), rel=1e-6)


@pytest.mark.parametrize("name", predictors.PREDICTORS)
def test_trivial_predictors_see_points_alone(name, ragged):
    """Padding stays 0, and shuffling what a padded sample is padded to changes nothing."""
    prediction = predictors.predict(ragged, name)
    assert prediction.shape == ragged.test.target.shape and not prediction[~ragged.test.mask].any()
    everything = ragged.train.target[ragged.train.mask].astype(float)
    if name == "constant":
        assert prediction[ragged.test.mask] == pytest.approx(everything.mean())
    for index, size in enumerate(SIZES[1]):  # the origin, where padding lies, is nobody's nearest point
        single = predictors.predict(replace(ragged, test=alone(ragged.test, index)), name)
        assert single[0] == pytest.approx(prediction[index, :size], rel=1e-6)
    longer = replace(ragged, test=padded_further(ragged.test))
    assert predictors.predict(longer, name)[:, :prediction.shape[1]] == pytest.approx(prediction, rel=1e-6)


def padded_further(samples):
    wide = [np.pad(array, ((0, 0), (0, 7), (0, 0))) for array in (samples.features, samples.target)]
    return store.Samples(*wide, samples.sizes)


def test_a_region_is_judged_by_its_points_alone(specs, ragged, tmp_path):
    """The error over a box of the card: points in it, of each sample, and no padding (which lies at the origin)."""
    box = {"lower": [-0.1, -0.1], "upper": [0.5, 0.6]}
    near = replace(ragged, card=ragged.card | {"regions": {"near": box}})
    store.write(near, tmp_path / "near.h5")
    metrics = training.train(specs["flare"], tmp_path / "near.h5", tmp_path / "run")["metrics"]
    read = record.read_predictions(tmp_path / "run", "last")
    expected = []
    for points, prediction, target in zip(read["points"], read["prediction"], read["target"]):
        inside = (points[:, 0] <= 0.5) & (points[:, 1] <= 0.6)
        assert 0 < inside.sum() < len(points)
        expected.append(np.linalg.norm(prediction[inside] - target[inside]) / np.linalg.norm(target[inside]))
    assert metrics["last_near"] == pytest.approx(np.mean(expected), rel=1e-5) != metrics["last"]
    spec = {"model": {"name": "constant"}}
    found = predictors.run(spec, tmp_path / "near.h5", tmp_path / "constant")["metrics"]
    constant = predictors.predict(near, "constant")
    inside = near.regions()["near"]
    assert found["last_near"] == pytest.approx(predictors.relative_l2(constant * inside, near.test.target * inside).mean())
