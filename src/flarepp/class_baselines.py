"""Accuracies that need no learning: what a classifier of the Long Range Arena must beat to have learned anything.

    majority         the most frequent class of the training samples
    first_token      the most frequent class among the training samples that begin with the same token; in ListOps that
                     token is the root operator, and many published accuracies are this one
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from flarepp import record
from flarepp.data.lra import sequences


def majority(train: sequences.Sequences, test: sequences.Sequences) -> np.ndarray:
    """The class [S] predicted for each test sample."""
    return np.full(len(test), np.bincount(train.labels).argmax())


def first_token(train: sequences.Sequences, test: sequences.Sequences) -> np.ndarray:
    """The class [S] predicted for each test sample; a token that begins no training sample gets the majority's."""
    best = np.full(256, np.bincount(train.labels).argmax())
    begins = train.tokens[:, 0, 0]
    for token in np.unique(begins):
        best[token] = np.bincount(train.labels[begins == token]).argmax()
    return best[test.tokens[:, 0, 0]]


PREDICTORS = {"majority": majority, "first_token": first_token}


def run(spec: dict, data: Path, run_dir: Path) -> dict:
    """Evaluate the baseline spec["model"]["name"] and leave its metrics.json in `run_dir`."""
    started, task = time.monotonic(), sequences.read(data)
    predict = PREDICTORS[spec["model"]["name"]]
    accuracies = {name: float((predict(task.train, split) == split.labels).mean()) for name, split in
                  (("last", task.test), ("dev_last", task.dev))}
    result = {"status": "ok", "message": "", "spec": spec, "provenance": {"dataset": task.provenance},
              "metrics": accuracies | {"wall_time_s": time.monotonic() - started}}
    return record.write_record(result, run_dir)
