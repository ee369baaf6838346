"""Trivial predictors: what a model must beat to have learned anything. They see the model's own training set.

constant     the mean of the training targets, one number a channel
mean_field   the mean training field
pca_ridge    principal components of input and field, ridge regression between them; number of components and penalty are
             chosen on a quarter of the training samples held out, then refitted on all
Where points do not correspond across samples the last two work on one training sample's points after nearest-neighbour
resampling, and are evaluated on the original points.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import numpy as np
from scipy.spatial import cKDTree

from flarepp import record
from flarepp.data import store

COMPONENTS = (4, 8, 16, 24, 32, 48)
PENALTIES = tuple(10.0**exponent for exponent in range(-6, 3))


def relative_l2(prediction: np.ndarray, target: np.ndarray) -> np.ndarray:
    """||p - t|| / ||t|| of each sample, [S], from [S, N, c], in FP64."""
    difference = (prediction.astype(np.float64) - target).reshape(len(target), -1)
    return np.linalg.norm(difference, axis=1) / np.linalg.norm(target.astype(np.float64).reshape(len(target), -1), axis=1)


def constant(train: store.Samples, features: np.ndarray, varying: list[int]) -> np.ndarray:
    """[S, N, c]: the training mean everywhere."""
    mean = train.target.mean(axis=(0, 1), dtype=np.float64)
    return np.broadcast_to(mean, (*features.shape[:2], mean.size))


def mean_field(train: store.Samples, features: np.ndarray, varying: list[int]) -> np.ndarray:
    """[S, N, c]: the mean training field."""
    mean = train.target.mean(axis=0, dtype=np.float64)
    return np.broadcast_to(mean, (len(features), *mean.shape))


def pca_ridge(train: store.Samples, features: np.ndarray, varying: list[int]) -> np.ndarray:
    """[S, N, c]: ridge regression from the components of the varying feature channels to those of the field."""
    inputs = train.features[..., varying].reshape(len(train.features), -1).astype(np.float64)  # [S, N * c_in]
    fields = train.target.reshape(len(train.target), -1).astype(np.float64)  # [S, N * c]
    fitted = len(inputs) - max(1, len(inputs) // 4)
    held_out = train.target[fitted:]

    def error(choice: tuple[int, float]) -> float:
        guess = _ridge(inputs[:fitted], fields[:fitted], inputs[fitted:], *choice)
        return relative_l2(guess.reshape(held_out.shape), held_out).mean()

    choices = [choice for choice in itertools.product(COMPONENTS, PENALTIES) if choice[0] < fitted]
    best = min(choices, key=error) if choices else (1, PENALTIES[-1])
    wanted = features[..., varying].reshape(len(features), -1)
    return _ridge(inputs, fields, wanted, *best).reshape(len(features), *train.target.shape[1:])


def _ridge(inputs: np.ndarray, fields: np.ndarray, wanted: np.ndarray, num_components: int, penalty: float) -> np.ndarray:
    """Fit components of `inputs` [S, P] to components of `fields` [S, Q], predict fields [T, Q] for `wanted` [T, P]."""
    input_mean, field_mean = inputs.mean(0), fields.mean(0)
    basis_in, basis_out = (_components(values - mean, num_components)
                           for values, mean in ((inputs, input_mean), (fields, field_mean)))
    scores = (inputs - input_mean) @ basis_in.T  # [S, k]
    scale = scores.std(0) + 1e-12
    scores = scores / scale
    gram = scores.T @ scores + penalty * len(scores) * np.eye(scores.shape[1])
    weights = np.linalg.solve(gram, scores.T @ ((fields - field_mean) @ basis_out.T))  # [k, k]
    return field_mean + ((wanted - input_mean) @ basis_in.T / scale) @ weights @ basis_out


def _components(centred: np.ndarray, number: int) -> np.ndarray:
    """Leading right singular vectors [number, P] of centred [S, P], from the small Gram matrix of the samples."""
    values, vectors = np.linalg.eigh(centred @ centred.T)
    order = np.argsort(values)[::-1][:number]
    kept = order[values[order] > 1e-12 * values[-1]]
    return (vectors[:, kept] / np.sqrt(values[kept])).T @ centred


PREDICTORS = {"constant": constant, "mean_field": mean_field, "pca_ridge": pca_ridge}


def predict(benchmark: store.Benchmark, name: str) -> np.ndarray:
    """Predictions [S, N, c] of one trivial predictor on the test set, physical units, 0 in padding."""
    points = list(range(benchmark.num_coordinates))
    varying = list(range(len(points), benchmark.train.features.shape[-1])) or points
    train, test = benchmark.train, benchmark.test
    if benchmark.points_correspond and train.sizes is None:
        return PREDICTORS[name](train, test.features, varying)
    if name == "constant":
        mean = train.target[train.mask].mean(axis=0, dtype=np.float64)
        return mean * test.mask[..., None]
    reference = train.features[0][train.mask[0]][:, points]
    resampled = store.Samples(*(np.stack(array) for array in zip(*(
        (features[nearest], target[nearest]) for features, target, mask in zip(train.features, train.target, train.mask)
        for nearest in [_nearest(features[mask][:, points], reference)]))))
    wanted = np.stack([features[_nearest(features[mask][:, points], reference)]
                       for features, mask in zip(test.features, test.mask)])
    fields = PREDICTORS[name](resampled, wanted, varying)  # on the reference points
    prediction = np.stack([field[_nearest(reference, features[:, points])] for field, features in zip(fields, test.features)])
    return prediction * test.mask[..., None]


def _nearest(points: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Index into `points` of the point nearest to each wanted one."""
    return cKDTree(points).query(wanted)[1]


def run(spec: dict, data: Path, run_dir: Path) -> dict:
    """Evaluate the predictor spec["model"]["name"] and leave its metrics.json in `run_dir`."""
    started = time.monotonic()
    benchmark = store.read(data)
    prediction, target = predict(benchmark, spec["model"]["name"]), benchmark.test.target
    parts = {"last": True} | {f"last_{region}": inside for region, inside in benchmark.regions().items()}
    errors = {name: float(relative_l2(prediction * part, target * part).mean()) for name, part in parts.items()}
    result = {"status": "ok", "message": "", "spec": spec,
              "metrics": errors | {"wall_time_s": time.monotonic() - started},
              "provenance": {"dataset": benchmark.provenance}}
    return record.write_record(result, run_dir)
