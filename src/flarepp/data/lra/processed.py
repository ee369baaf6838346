"""The tasks as public studies share them: LRA/processed/lra-<task>.{train,dev,test}.pickle, lists of dictionaries with
`input_ids_0`, in Retrieval `input_ids_1`, and `label`.

Pickles are programs. Here none is run: what is not a list, a dictionary, text, a number or a NumPy array of numbers is
refused. Identities of text start at 1 and end with zeros, which are padding; pixels are pixels.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np

from flarepp.data.lra.sequences import Sequences, Task

STEMS = {"pathfinder": "lra-pathfinder32-curv_contour_length_14"} | {
    name: f"lra-{name}" for name in ("listops", "text", "retrieval", "image")}
PIXELS = ("pathfinder", "image")
SPLITS = ("train", "dev", "test")
# What a pickled NumPy array or scalar is made with, under its names before and since NumPy 2.
HARMLESS = {("numpy", "ndarray"), ("numpy", "dtype")} | {
    (f"numpy.{core}.{module}", name) for core in ("core", "_core")
    for module, name in (("multiarray", "_reconstruct"), ("multiarray", "scalar"), ("numeric", "_frombuffer"))}


class _Arrays(pickle.Unpickler):
    """Refuses every class and function but those of NumPy arrays."""

    def find_class(self, module: str, name: str):
        if (module, name) not in HARMLESS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is refused")
        return super().find_class(module, name)

    def persistent_load(self, pid):
        raise pickle.UnpicklingError("it asks for an object of its own, which is refused")


def files(root: Path, name: str) -> list[Path]:
    """Where the task's files are expected."""
    return [root / "LRA" / "processed" / f"{STEMS[name]}.{split}.pickle" for split in SPLITS]


def read(paths: list[Path], spec: dict) -> Task:
    """The task from its three files; the symbols and classes that occur count."""
    name = spec["name"]
    found = [_read(path, name in PIXELS) for path in paths]
    longest = max(split.tokens.shape[2] for split in found)
    splits = [Sequences(np.pad(split.tokens, ((0, 0), (0, 0), (0, longest - split.tokens.shape[2]))), split.lengths,
                        split.labels) for split in found]
    num_symbols = 256 if name in PIXELS else 1 + max(int(split.tokens.max()) for split in splits)
    card = {"label": name.title(), "split": "as in the processed files", "source": "published"}
    return Task(name, *splits, num_symbols, 1 + max(int(split.labels.max()) for split in splits), card)


def load(path: Path) -> list:
    """The rows of a file; ValueError for one that is damaged, or wants more than arrays."""
    try:
        with open(path, "rb") as stream:
            rows = _Arrays(stream).load()
    except FileNotFoundError:
        raise
    except Exception as error:  # a damaged pickle raises whatever its parser raises
        raise ValueError(f"{path}: not a pickle of arrays ({type(error).__name__}: {error})") from None
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{path}: expected a list of samples, got {type(rows).__name__}")
    return rows


def _read(path: Path, pixels: bool) -> Sequences:
    texts, labels = [], []
    for row, sample in enumerate(load(path)):
        try:
            keys = [key for key in ("input_ids_0", "input_ids_1") if key in sample]
            documents = [np.asarray(sample[key]) for key in keys]
            label = np.asarray(sample["label"])
            assert label.dtype.kind in "iu" and label.ndim == 0 and 0 <= label < 256, f"label {sample['label']!r}"
            assert keys, "no identities"
            texts.append([_document(ids, pixels) for ids in documents])
            labels.append(int(label))
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: sample {row}: {error}; expected input_ids_0 and label, whole numbers") from None
    return Sequences.of_bytes(texts, labels, max(len(text) for sample in texts for text in sample))


def _document(ids: np.ndarray, pixels: bool) -> bytes:
    """Symbols of one document, without the zeros at its end."""
    assert ids.ndim == 1 and ids.dtype.kind in "iu", f"identities {ids.dtype} {ids.shape}"
    symbols = ids if pixels else np.trim_zeros(ids, "b") - 1
    assert not symbols.size or (0 <= symbols.min() and symbols.max() < 256), "identities beyond 256, or padding inside"
    return symbols.astype(np.uint8).tobytes()
