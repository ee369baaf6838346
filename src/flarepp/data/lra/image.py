"""Image of the Long Range Arena: the class of a grey 32 x 32 picture, pixel by pixel (CIFAR-10, Krizhevsky 2009).

cifar-10-binary.tar.gz holds six files of 10,000 records: a byte of the class, 1,024 bytes each of red, green and blue,
row by row. Grey is 0.2989 R + 0.5870 G + 0.1140 B, cut to a whole number. Of the 50,000 training pictures the first nine
tenths are trained on, the rest is the dev split.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from flarepp.data.lra.archives import members
from flarepp.data.lra.sequences import Sequences, Task

OPTIONS = ()
PUBLISHED_FILES = ("LRA/image/cifar-10-binary.tar.gz",)
SOURCES = ({"url": "https://www.cs.toronto.edu/~kriz/{name}"},)
LICENCE = "none stated; cite Krizhevsky 2009"
LABEL, NUM_CLASSES, NUM_SYMBOLS = "Image", 10, 256
BATCHES = tuple(f"data_batch_{number}.bin" for number in range(1, 6)), ("test_batch.bin",)
PICTURES, PIXELS = 10_000, 1024  # of a file, of a picture
GREY = np.array([0.2989, 0.5870, 0.1140])  # of red, green, blue


def read_published(paths: list[Path], spec: dict) -> Task:
    """The task from the archive; ValueError for one with other files."""
    (path,) = paths
    found = {Path(name).name: content for name, content in members(path, r"cifar-10-batches-bin/\w+\.bin").items()}
    train, test = (_pictures(path, found, names) for names in BATCHES)
    num_train = len(train) * 9 // 10
    return Task("image", train[:num_train], train[num_train:], test, NUM_SYMBOLS, NUM_CLASSES,
                {"label": LABEL, "split": "published, the last tenth of training is dev", "source": "published"})


def _pictures(path: Path, found: dict[str, bytes], names: tuple[str, ...]) -> Sequences:
    for name in names:
        size = len(found.get(name, b""))
        if size != PICTURES * (1 + 3 * PIXELS):
            raise ValueError(f"{path}: {name} has {size} bytes, expected {PICTURES} records of {1 + 3 * PIXELS}")
    records = np.frombuffer(b"".join(found[name] for name in names), np.uint8).reshape(-1, 1 + 3 * PIXELS)
    grey = np.concatenate([GREY @ part for part in np.split(records[:, 1:].reshape(-1, 3, PIXELS), len(names))])
    return Sequences.of_one_length(grey.astype(np.uint8), records[:, 0])
