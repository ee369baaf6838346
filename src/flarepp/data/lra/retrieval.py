"""Retrieval of the Long Range Arena: does one paper cite the other, both byte by byte (ACL Anthology Network, 2013).

new_aan_pairs.{train,eval,test}.tsv, no header: label (0.0 or 1.0), two identifiers, two texts. The first `max_length`
bytes of each text are read. The texts may not be passed on.
"""

from __future__ import annotations

from pathlib import Path

from flarepp.data.lra.sequences import Sequences, Task, check_counts

OPTIONS = ("max_length",)
PUBLISHED_FILES = ("LRA/retrieval/new_aan_pairs.train.tsv", "LRA/retrieval/new_aan_pairs.eval.tsv",
                   "LRA/retrieval/new_aan_pairs.test.tsv")
SOURCES = ({"hub": "OpenNLPLab/lra", "folder": "data/aan"},)
LICENCE = "texts of the ACL Anthology Network, not redistributable; the repository on the hub is tagged Apache-2.0"
LABEL, NUM_CLASSES, NUM_SYMBOLS = "Retrieval", 2, 256
PUBLISHED = 147_086, 18_090, 17_437  # pairs of the published files
COLUMNS = ("label", "first identifier", "second identifier", "first text", "second text")


def read_published(paths: list[Path], spec: dict) -> Task:
    """The task from its three files."""
    splits = [_read(path, spec["max_length"]) for path in paths]
    check_counts(paths, splits, PUBLISHED)
    train, dev, test = splits
    return Task("retrieval", train, dev, test, NUM_SYMBOLS, NUM_CLASSES,
                {"label": LABEL, "split": "as published", "source": "published"})


def _read(path: Path, max_length: int) -> Sequences:
    pairs, labels = [], []
    with open(path, "rb") as stream:
        for row, line in enumerate(stream, 1):
            fields = line.rstrip(b"\r\n").split(b"\t")
            try:
                label, _, _, *texts = fields
                labels.append({0.0: 0, 1.0: 1}[float(label)])
                first, second = texts
            except (ValueError, KeyError):
                raise ValueError(f"{path}: row {row}: {len(fields)} fields, the first {fields[0][:20]!r}; expected "
                                 f"{', '.join(COLUMNS)}, the label 0.0 or 1.0") from None
            pairs.append((first[:max_length], second[:max_length]))
    return Sequences.of_bytes(pairs, labels, max_length)
