"""One benchmark as one HDF5 file: raw training and test samples, the normalisers fitted on the training samples, a card.

Layout: {train,test}/features [S, N, c_in] and /target [S, N, c_out] float32 in physical units; norm/{features,target} as
[2, c] float64 (mean, standard deviation); attributes name, grid, points_correspond, card (JSON), fingerprint, digest (of these
attributes), complete.
Samples of different sizes lie one behind the other, features [P, c_in] and target [P, c_out], with {train,test}/offsets [S + 1];
in memory they are padded with zeros to the longest.
The fingerprint is the sha256 of the arrays' bytes, so it names the numbers and not the file.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from flarepp.record import DAMAGE, atomic_path, check_card, digest, fingerprint


@dataclass(frozen=True)
class Samples:
    """features [S, N, c_in] and target [S, N, c_out], float32, physical units. sizes [S]: points of each sample where they
    differ; what lies behind a sample's last point is 0."""

    features: np.ndarray
    target: np.ndarray
    sizes: np.ndarray | None = None

    def __post_init__(self) -> None:
        assert self.features.ndim == self.target.ndim == 3, (self.features.shape, self.target.shape)
        assert self.features.shape[:2] == self.target.shape[:2], (self.features.shape, self.target.shape)
        if self.sizes is not None:
            assert len(self.sizes) == len(self.features) and self.sizes.max(initial=0) <= self.features.shape[1]
            assert not self.features[~self.mask].any() and not self.target[~self.mask].any(), "padding that is not zero"

    @classmethod
    def ragged(cls, features: list[np.ndarray], target: list[np.ndarray]) -> Samples:
        """From samples of their own sizes, each [N_i, c_in] and [N_i, c_out]."""
        sizes = np.array([len(sample) for sample in features])
        assert sizes.tolist() == [len(sample) for sample in target]
        return cls(_padded(np.concatenate(features), sizes), _padded(np.concatenate(target), sizes), sizes)

    @property
    def mask(self) -> np.ndarray:
        """[S, N] bool, True for a point, False for padding."""
        num_samples, longest, _ = self.features.shape
        sizes = np.full(num_samples, longest) if self.sizes is None else self.sizes
        return np.arange(longest) < sizes[:, None]

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays of the file: without padding, one sample behind the other, where sizes differ."""
        if self.sizes is None:
            return {"features": self.features, "target": self.target}
        offsets = np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)
        return {"features": self.features[self.mask], "target": self.target[self.mask], "offsets": offsets}

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray]) -> Samples:
        """The inverse of `arrays`; ValueError for offsets that do not divide them."""
        if "offsets" not in arrays:
            return cls(arrays["features"], arrays["target"])
        offsets, count = arrays["offsets"], len(arrays["features"])
        if offsets.ndim != 1 or offsets.dtype.kind != "i" or (np.diff(offsets) < 0).any() or (offsets[0], offsets[-1]) != (0, count):
            raise ValueError(f"offsets of samples: got {offsets.dtype} {offsets.shape}, expected whole numbers from 0 up to {count}")
        sizes = np.diff(offsets)
        return cls(_padded(arrays["features"], sizes), _padded(arrays["target"], sizes), sizes)


def _padded(flat: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """[P, c] of samples one behind the other -> [S, N, c], zeros behind each sample's last point."""
    values = np.zeros((len(sizes), sizes.max(initial=0), flat.shape[-1]), np.float32)
    values[np.arange(values.shape[1]) < sizes[:, None]] = flat
    return values


@dataclass(frozen=True)
class Affine:
    """Per-channel normaliser: encode(x) = (x - mean) / std, decode its inverse. mean, std: [c] float64."""

    mean: np.ndarray
    std: np.ndarray

    @classmethod
    def fit(cls, values: np.ndarray) -> Affine:
        """Mean and unbiased standard deviation (+ 1e-8) over all but the last axis of [..., c], accumulated in FP64.

        Of ragged samples only the points count: `fit(samples.target[samples.mask])`.
        """
        flat = values.reshape(-1, values.shape[-1]).astype(np.float64)  # [P, c]
        return cls(flat.mean(axis=0), flat.std(axis=0, ddof=1) + 1e-8)

    @classmethod
    def identity(cls, num_channels: int) -> Affine:
        return cls(np.zeros(num_channels), np.ones(num_channels))

    def encode(self, values: np.ndarray) -> np.ndarray:
        return (values - self.mean) / self.std

    def decode(self, values: np.ndarray) -> np.ndarray:
        return values * self.std + self.mean


@dataclass(frozen=True)
class Benchmark:
    """A dataset ready to learn from. `points_correspond`: point n is the same material or grid point in every sample."""

    name: str
    train: Samples
    test: Samples
    feature_norm: Affine
    target_norm: Affine
    grid: tuple[int, ...] | None
    points_correspond: bool
    card: dict

    @property
    def num_coordinates(self) -> int:
        """Leading feature channels that are the points' coordinates."""
        return sum(channel in ("x", "y", "z") for channel in self.card["channels"]["features"])

    def regions(self) -> dict[str, np.ndarray]:
        """The parts of the domain that the card names, boxes of points: [S, N, 1] bool over the test points.

        ValueError for a test sample that has no point there: its error is undefined.
        """
        points, found = self.test.features[..., :self.num_coordinates], {}
        for name, box in self.card.get("regions", {}).items():
            inside = ((points >= box["lower"]) & (points <= box["upper"])).all(-1, keepdims=True) & self.test.mask[..., None]
            if not (some := inside.any(axis=(1, 2))).all():
                raise ValueError(f"{self.name}: test sample {np.flatnonzero(~some)[0]} has no point in the region {name!r}, {box}")
            found[name] = inside
        return found

    @property
    def provenance(self) -> dict:
        """What a record says about its data."""
        return {"name": self.name, "source": self.card["source"], "split": self.card["split"],
                "fingerprint": self.fingerprint}

    @functools.cached_property
    def fingerprint(self) -> str:
        """sha256 over every array, in a fixed order and byte order."""
        return fingerprint([*self.train.arrays.values(), *self.test.arrays.values(), self.feature_norm.mean,
                            self.feature_norm.std, self.target_norm.mean, self.target_norm.std])

    @property
    def digest(self) -> str:
        """Names all that the file says, its arrays by their fingerprint."""
        grid = self.grid and [int(extent) for extent in self.grid]
        return digest([self.name, grid, self.points_correspond, self.card, self.fingerprint])


def write(benchmark: Benchmark, path: Path) -> None:
    """Write atomically; the completion mark is set last."""
    with atomic_path(Path(path)) as partial:
        with h5py.File(partial, "w") as file:
            for split in ("train", "test"):
                for name, array in getattr(benchmark, split).arrays.items():
                    file[f"{split}/{name}"] = array
            for name, norm in (("features", benchmark.feature_norm), ("target", benchmark.target_norm)):
                file[f"norm/{name}"] = np.stack([norm.mean, norm.std])
            file.attrs["name"] = benchmark.name
            file.attrs["points_correspond"] = benchmark.points_correspond
            if benchmark.grid is not None:
                file.attrs["grid"] = benchmark.grid
            file.attrs["card"] = json.dumps(benchmark.card)
            file.attrs["fingerprint"] = benchmark.fingerprint
            file.attrs["digest"] = benchmark.digest
            file.attrs["complete"] = True


def read(path: Path) -> Benchmark:
    """Read a store. ValueError when it is incomplete, not HDF5, or arrays or attributes are not as they were written, or not those of
    the card beside it."""
    try:
        with h5py.File(path, "r") as file:
            if not file.attrs.get("complete", False):
                raise ValueError("the file is incomplete")
            split = {name: Samples.from_arrays({key: array[:] for key, array in file[name].items()}) for name in ("train", "test")}
            norm = {name: Affine(*file[f"norm/{name}"][:]) for name in ("features", "target")}
            attributes = dict(file.attrs)
        grid = attributes.get("grid")
        benchmark = Benchmark(
            name=str(attributes["name"]), train=split["train"], test=split["test"],
            feature_norm=norm["features"], target_norm=norm["target"],
            grid=None if grid is None else tuple(int(extent) for extent in grid),
            points_correspond=bool(attributes["points_correspond"]), card=json.loads(attributes["card"]))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path}: cannot be read as HDF5 ({error}); delete it and run again") from None
    except DAMAGE as error:
        raise ValueError(f"{path}: not a whole dataset file ({error}); delete it and run again") from None
    if benchmark.fingerprint != str(attributes.get("fingerprint")):
        raise ValueError(f"{path}: the arrays do not match their fingerprint; delete it and run again")
    if benchmark.digest != str(attributes.get("digest")):
        raise ValueError(f"{path}: the attributes do not match their digest; delete it and run again")
    check_card(path, benchmark.fingerprint)
    return benchmark
