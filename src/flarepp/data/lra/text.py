"""Text of the Long Range Arena: is a film review good or bad, byte by byte (IMDB, Maas et al. 2011).

aclImdb_v1.tar.gz holds 12,500 reviews of each class in aclImdb/train and in aclImdb/test. The first `max_length` bytes
are read. There is no dev split: `num_dev` training reviews, drawn with `seed`, are held out; with num_dev 0 the test
split is the dev split, as it was in the published studies.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from flarepp.data.lra.archives import members
from flarepp.data.lra.sequences import Sequences, Task

OPTIONS = ("num_dev", "max_length")
PUBLISHED_FILES = ("LRA/text/aclImdb_v1.tar.gz",)
SOURCES = ({"url": "https://ai.stanford.edu/~amaas/data/sentiment/{name}"},)
LICENCE = "none stated; research use, cite Maas et al. 2011"
LABEL, NUM_CLASSES, NUM_SYMBOLS = "Text", 2, 256
MEMBER = r"aclImdb/(train|test)/(neg|pos)/(\d+)_\d+\.txt"
REVIEWS = 12_500  # of each class in each half


def read_published(paths: list[Path], spec: dict) -> Task:
    """The task from the archive; ValueError for one with other numbers of reviews."""
    (path,) = paths
    found: dict[str, list] = {"train": [], "test": []}
    for name, text in members(path, MEMBER).items():
        half, kind, number = re.findall(MEMBER, name)[0]
        found[half].append((kind == "pos", int(number), text))
    for half, reviews in found.items():
        counts = len(reviews) - sum(good for good, _, _ in reviews), sum(good for good, _, _ in reviews)
        if counts != (REVIEWS, REVIEWS):
            raise ValueError(f"{path}: aclImdb/{half} has {counts[0]} bad and {counts[1]} good reviews, expected "
                             f"{REVIEWS} of each")
    train, test = (Sequences.of_bytes([[text] for _, _, text in sorted(reviews)], [good for good, _, _ in sorted(reviews)],
                                      spec["max_length"]) for reviews in found.values())
    order, num_dev = np.random.default_rng(spec["seed"]).permutation(len(train)), spec["num_dev"]
    dev = train[np.sort(order[:num_dev])] if num_dev else test
    split = f"published halves, {num_dev} of the training half held out" if num_dev else "published halves, dev is test"
    return Task("text", train[np.sort(order[num_dev:])], dev, test, NUM_SYMBOLS, NUM_CLASSES,
                {"label": LABEL, "split": split, "source": "published"})
