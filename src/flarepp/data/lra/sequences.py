"""One classification task of the Long Range Arena (arXiv 2011.04006) as one HDF5 file: token sequences and their labels.

A sample has D documents (two in Retrieval, else one) of at most N symbols 0 .. num_symbols - 1 and a class. Layout:
{train,dev,test}/tokens [S, D, N] uint8, 0 behind a document's end; /lengths [S, D] int32; /labels [S] uint8; attributes
name, num_symbols, num_classes, dev_is_test, card (JSON), fingerprint, digest (of these), complete. Where the public data have no dev split
it is the test split, written once. Models see identities: symbol s is s + 1, and 0 is padding, in every task, so that
black pixels are no padding.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from flarepp.record import DAMAGE, atomic_path, check_card, digest

DTYPES = {"tokens": np.uint8, "lengths": np.int32, "labels": np.uint8}


@dataclass(frozen=True)
class Sequences:
    """tokens [S, D, N] uint8, 0 behind a document's end; lengths [S, D] int32; labels [S] uint8."""

    tokens: np.ndarray
    lengths: np.ndarray
    labels: np.ndarray

    def __post_init__(self) -> None:
        for name, dtype in DTYPES.items():
            assert getattr(self, name).dtype == dtype, (name, getattr(self, name).dtype)
        assert self.tokens.ndim == 3 and self.lengths.shape == self.tokens.shape[:2]
        assert self.labels.shape == self.tokens.shape[:1]
        assert (self.lengths <= self.tokens.shape[2]).all()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: slice | np.ndarray) -> Sequences:
        """The samples of a slice or an array of indices."""
        return Sequences(self.tokens[index], self.lengths[index], self.labels[index])

    @classmethod
    def of_one_length(cls, tokens: np.ndarray, labels: np.ndarray) -> Sequences:
        """From one document a sample, [S, N], of which every position is real: pixels, row by row."""
        tokens = np.ascontiguousarray(tokens, np.uint8)[:, None]
        return cls(tokens, np.full(tokens.shape[:2], tokens.shape[2], np.int32), np.asarray(labels, np.uint8))

    @classmethod
    def of_bytes(cls, documents: Sequence[Sequence[bytes]], labels: Sequence[int], max_length: int) -> Sequences:
        """From the documents of each sample, of which the first `max_length` bytes are kept."""
        lengths = np.array([[min(len(text), max_length) for text in sample] for sample in documents], np.int32)
        tokens = np.zeros((*lengths.shape, max_length), np.uint8)
        for row, sample in zip(tokens, documents):
            for place, text in zip(row, sample):
                place[:len(text)] = np.frombuffer(text[:max_length], np.uint8)
        return cls(tokens, lengths, np.asarray(labels, np.uint8))


@dataclass(frozen=True)
class Task:
    """A task ready to learn from. num_symbols: padding is not one."""

    name: str
    train: Sequences
    dev: Sequences
    test: Sequences
    num_symbols: int
    num_classes: int
    card: dict

    grid = None  # a sequence: models see the order of its tokens only

    @property
    def vocabulary(self) -> int:
        """Identities: the symbols and padding."""
        return self.num_symbols + 1

    @property
    def num_documents(self) -> int:
        return self.train.tokens.shape[1]

    @property
    def max_length(self) -> int:
        """N, the most tokens of a document."""
        return self.train.tokens.shape[2]

    @property
    def dev_is_test(self) -> bool:
        return self.dev is self.test

    @property
    def splits(self) -> dict[str, Sequences]:
        """The splits that are written; no dev where that is the test split."""
        return {name: getattr(self, name) for name in ("train", "dev", "test") if name != "dev" or not self.dev_is_test}

    @property
    def provenance(self) -> dict:
        """What a record says about its data."""
        return {"name": self.name, "source": self.card["source"], "split": self.card["split"],
                "dev_is_test": self.dev_is_test, "num_dev": len(self.dev), "num_test": len(self.test),
                "fingerprint": self.fingerprint}

    @functools.cached_property
    def fingerprint(self) -> str:
        """sha256 over every array, in a fixed order and byte order."""
        state = hashlib.sha256()
        for name, split in self.splits.items():
            for key, dtype in DTYPES.items():
                array = getattr(split, key)
                state.update(f"{name}/{key} {array.shape}".encode())
                state.update(np.ascontiguousarray(array, np.dtype(dtype).newbyteorder("<")).data)
        return state.hexdigest()

    @property
    def digest(self) -> str:
        """Names all that the file says, its arrays by their fingerprint."""
        return digest([self.name, self.num_symbols, self.num_classes, self.dev_is_test, self.card, self.fingerprint])


def divided(samples: Sequences, spec: dict) -> tuple[Sequences, Sequences, Sequences]:
    """spec["num_train"] samples to train on, the num_dev behind them, and the rest to test on; with num_dev 0 that is dev."""
    train, dev = spec["num_train"], spec["num_train"] + spec["num_dev"]
    test = samples[dev:]
    return samples[:train], samples[train:dev] if spec["num_dev"] else test, test


def check_counts(paths: Sequence[Path], splits: Sequence[Sequences], expected: Sequence[int]) -> None:
    """ValueError for a published file that has other than the `expected` number of samples: cut short, or another one."""
    for path, split, count in zip(paths, splits, expected):
        if len(split) != count:
            raise ValueError(f"{path}: {len(split):,} samples, expected {count:,}")


def check(task: Task) -> None:
    """ValueError for a task whose numbers cannot be: symbols or classes out of range, an empty document, a class that
    the training samples lack."""
    for name, split in task.splits.items():
        where = f"{task.name}, {name}"
        if not len(split):
            raise ValueError(f"{where}: there is no sample")
        if (symbol := split.tokens.max()) >= task.num_symbols:
            raise ValueError(f"{where}: the symbol {symbol}; there are {task.num_symbols}, from 0 on")
        if (label := split.labels.max()) >= task.num_classes:
            raise ValueError(f"{where}: the class {label}; there are {task.num_classes}, from 0 on")
        if (empty := np.flatnonzero(split.lengths.min(1) < 1)).size:
            raise ValueError(f"{where}: a document of sample {empty[0]} is empty")
    if missing := sorted(set(range(task.num_classes)) - set(np.unique(task.train.labels).tolist())):
        raise ValueError(f"{task.name}, train: no sample of the class {missing[0]}")


def write(task: Task, path: Path) -> None:
    """Write atomically; the completion mark is set last."""
    with atomic_path(Path(path)) as partial:
        with h5py.File(partial, "w") as file:
            for name, split in task.splits.items():
                for key in DTYPES:
                    file[f"{name}/{key}"] = getattr(split, key)
            file.attrs.update({"name": task.name, "num_symbols": task.num_symbols, "num_classes": task.num_classes,
                               "dev_is_test": task.dev_is_test, "card": json.dumps(task.card),
                               "fingerprint": task.fingerprint, "digest": task.digest})
            file.attrs["complete"] = True


def read(path: Path) -> Task:
    """Read a task. ValueError when it is incomplete, not HDF5, or arrays or attributes are not as they were written, or not those of
    the card beside it."""
    try:
        with h5py.File(path, "r") as file:
            attributes = dict(file.attrs)
            if not attributes.get("complete", False):
                raise ValueError("the file is incomplete")
            names = ("train", "test") if attributes["dev_is_test"] else ("train", "dev", "test")
            splits = {name: Sequences(**{key: file[f"{name}/{key}"][:] for key in DTYPES}) for name in names}
        splits.setdefault("dev", splits["test"])
        task = Task(str(attributes["name"]), **splits, num_symbols=int(attributes["num_symbols"]),
                    num_classes=int(attributes["num_classes"]), card=json.loads(attributes["card"]))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path}: cannot be read as HDF5 ({error}); delete it and run again") from None
    except DAMAGE as error:
        raise ValueError(f"{path}: not a whole file of token sequences ({error}); delete it and run again") from None
    if task.fingerprint != str(attributes.get("fingerprint")):
        raise ValueError(f"{path}: the arrays do not match their fingerprint; delete it and run again")
    if task.digest != str(attributes.get("digest")):
        raise ValueError(f"{path}: the attributes do not match their digest; delete it and run again")
    check_card(path, task.fingerprint)
    return task
