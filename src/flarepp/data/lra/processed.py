"""The tasks as public studies share them: LRA/processed/lra-<task>.{train,dev,test}.pickle, lists of dictionaries with
`input_ids_0`, in Retrieval `input_ids_1`, and `label`.

Pickles are programs. Here none is run: what is not a list, a dictionary, text, a number or a NumPy array of whole numbers is
refused, and NumPy's own functions are never called with what a file says; stand-ins of ours note it. Identities of text start
at 1 and end with zeros, which are padding; pixels are pixels.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from flarepp.data.lra.sequences import Sequences, Task

STEMS = {"pathfinder": "lra-pathfinder32-curv_contour_length_14"} | {
    name: f"lra-{name}" for name in ("listops", "text", "retrieval", "image")}
PIXELS = ("pathfinder", "image")
SPLITS = ("train", "dev", "test")
# Samples of each split, of which the files may lack a few; the dev split of Text is its test split.
COUNTS = {"listops": (96_000, 2_000, 2_000), "text": (25_000, 25_000, 25_000), "retrieval": (147_086, 18_090, 17_437),
          "image": (45_000, 5_000, 10_000), "pathfinder": (160_000, 20_000, 20_000)}  # fmt: skip
SLACK = 0.01


class _DType:
    """Stands in for numpy.dtype: whole numbers of one to eight bytes in either byte order."""

    def __init__(self, code: str, *_: object) -> None:
        if not isinstance(code, str) or not re.fullmatch("[iu][1248]", code):
            raise pickle.UnpicklingError("it has arrays of something other than whole numbers")
        self.dtype = np.dtype(code)

    def __setstate__(self, state: tuple) -> None:
        if not isinstance(state, tuple) or state[:2] not in ((3, "<"), (3, ">"), (3, "|")) or any(state[2:5]):
            raise pickle.UnpicklingError("it has arrays of an unknown layout")
        self.dtype = self.dtype.newbyteorder(state[1])


class _Array:
    """Stands in for numpy.ndarray; `values` are the numbers once they are known."""

    values: np.ndarray | None = None

    def __setstate__(self, state: tuple) -> None:
        _, shape, dtype, by_columns, content = state
        self.values = np.frombuffer(content, dtype.dtype).reshape(shape, order="F" if by_columns else "C")


def _frombuffer(content: bytes, dtype: _DType, shape: tuple, order: str) -> _Array:
    array = _Array()
    array.__setstate__((1, shape, dtype, order == "F", content))
    return array


def _scalar(dtype: _DType, content: bytes) -> _Array:
    return _frombuffer(content, dtype, (), "C")


# What a pickled NumPy array or number is made with, under its names before and since NumPy 2, and what stands in for it.
STAND_INS: dict[tuple[str, str], Callable] = {("numpy", "ndarray"): _Array, ("numpy", "dtype"): _DType} | {
    (f"numpy.{core}.{module}", name): own for core in ("core", "_core") for module, name, own in (
        ("multiarray", "_reconstruct", lambda *_: _Array()), ("multiarray", "scalar", _scalar),
        ("numeric", "_frombuffer", _frombuffer))}  # fmt: skip


class _Arrays(pickle.Unpickler):
    """Refuses every class and function but the stand-ins."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in STAND_INS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is refused")
        return STAND_INS[module, name]

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("it asks for an object of its own, which is refused")


def files(root: Path, name: str) -> list[Path]:
    """Where the task's files are expected."""
    return [root / "LRA" / "processed" / f"{STEMS[name]}.{split}.pickle" for split in SPLITS]


def read(paths: list[Path], spec: dict) -> Task:
    """The task from its three files; the symbols and classes that occur count. Text is cut to spec["max_length"].

    A dev split that mostly consists of test samples counts as the test split; of another one the card says how many of its
    samples are test samples too. ValueError for files that are no such task.
    """
    name = spec["name"]
    found = [_read(path, name in PIXELS, spec.get("max_length")) for path in paths]
    for path, split, count in zip(paths, found, COUNTS[name]):
        if abs(len(split) - count) > SLACK * count:
            raise ValueError(f"{path}: {len(split):,} samples, expected about {count:,}")
    longest = max(split.tokens.shape[2] for split in found)
    train, dev, test = (Sequences(np.pad(split.tokens, ((0, 0), (0, 0), (0, longest - split.tokens.shape[2]))), split.lengths,
                                  split.labels) for split in found)
    shown = set(map(bytes, test.tokens))
    shared = sum(bytes(tokens) in shown for tokens in dev.tokens)
    dev = test if 2 * shared > len(dev) else dev
    num_symbols = 256 if name in PIXELS else 1 + max(int(split.tokens.max()) for split in (train, dev, test))
    num_classes = 1 + max(int(split.labels.max()) for split in (train, dev, test))
    said = ", dev is test" if dev is test else f", {shared} of {len(dev)} dev samples are test samples too" if shared else ""
    card = {"label": name.title(), "split": f"as in the processed files{said}", "source": "published"}
    return Task(name, train, dev, test, num_symbols, num_classes, card)


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
        raise ValueError(f"{path}: expected a list of samples, got {'an empty one' if rows == [] else type(rows).__name__}")
    return rows


def _read(path: Path, pixels: bool, max_length: int | None) -> Sequences:
    texts, labels = [], []
    for row, sample in enumerate(load(path)):
        try:
            label = _numbers(sample["label"])
            if label.ndim or not 0 <= label < 256:
                raise ValueError("the label is no class")
            keys = [key for key in ("input_ids_0", "input_ids_1") if key in sample]
            texts.append([_document(_numbers(sample[key]), pixels)[:max_length] for key in keys])
            labels.append(int(label))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ValueError(f"{path}: sample {row}: {error}; expected input_ids_0 and label, whole numbers") from None
    if len(found := set(map(len, texts))) > 1 or found == {0}:
        raise ValueError(f"{path}: samples of {sorted(found)} documents; expected one, or two, in all")
    return Sequences.of_bytes(texts, labels, max(len(text) for sample in texts for text in sample))


def _numbers(value: object) -> np.ndarray:
    """Whole numbers from what a pickle holds: an array, a list of numbers, a number. ValueError for anything else."""
    array = value.values if isinstance(value, _Array) else np.asarray(value)
    if array is None or array.dtype.kind not in "iu":
        raise ValueError(f"{'nothing' if array is None else array.dtype} where whole numbers are expected")
    return array


def _document(ids: np.ndarray, pixels: bool) -> bytes:
    """Symbols of one document, without the zeros at its end."""
    if ids.ndim != 1:
        raise ValueError(f"identities of shape {ids.shape}")
    symbols = ids.astype(np.int64) if pixels else np.trim_zeros(ids.astype(np.int64), "b") - 1
    if symbols.size and not (0 <= symbols.min() and symbols.max() < 256):
        raise ValueError("identities beyond 256, or padding inside")
    return symbols.astype(np.uint8).tobytes()
