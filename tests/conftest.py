"""Shared by the tests: the project's folder, its configuration, a small dataset and a small run spec."""

from __future__ import annotations

import copy
import functools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from flarepp.data.store import Affine, Benchmark, Samples, write
from flarepp.spec import expand

PROJECT = Path(__file__).parents[1]
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # where CUDA was used in a backward pass, forks of the process cannot make one


def changed(change):
    """Damage that replaces the array of a file by change(array)."""
    return lambda path: np.save(path, change(np.load(path)))


def put(index, value):
    """Damage that sets elements of the array of a file."""

    def change(array):
        array[index] = value
        return array

    return changed(change)


@functools.cache
def configuration() -> dict:
    return yaml.safe_load((PROJECT / "config.yaml").read_text(encoding="utf-8"))


@pytest.fixture
def config() -> dict:
    """config.yaml as Snakemake would hand it over."""
    return copy.deepcopy(configuration())


@pytest.fixture
def run_spec(config) -> dict:
    """The smoke run of FLARE++ on Elasticity, 24 steps."""
    config["scale"] = "smoke"
    config["defaults"]["training"]["steps"] = 24
    plan = expand(config)
    path = next(path for path in plan.runs if "table1/elasticity/flarepp/" in path)
    return copy.deepcopy(plan.runs[path].spec)


@pytest.fixture
def benchmark() -> Benchmark:
    """Sixteen training and six test samples of a smooth field on 60 scattered points."""
    generator = np.random.default_rng(0)
    points = generator.random((22, 60, 2))
    target = np.sin(6 * points[..., :1]) + points[..., 1:]
    train, test = (Samples(points[part].astype(np.float32), target[part].astype(np.float32))
                   for part in (slice(16), slice(16, None)))
    card = {"source": "generated", "split": "toy", "channels": {"features": ["x", "y"], "target": ["stress"]}}
    return Benchmark("elasticity", train, test, Affine.identity(2), Affine.fit(train.target), None, True, card)


@pytest.fixture
def dataset(tmp_path, benchmark) -> Path:
    """The benchmark as a store on disk."""
    path = tmp_path / "data" / "elasticity.h5"
    write(benchmark, path)
    return path


@pytest.fixture
def saved_figure(monkeypatch):
    """Call what draws a figure; returns the matplotlib Figure that it saves, which is not rendered."""
    from matplotlib.figure import Figure

    saved = []

    def savefig(self, path, **options):
        Path(path).touch()
        saved.append(self)

    def drawn(build, *words, **options):
        with monkeypatch.context() as patched:
            patched.setattr(Figure, "savefig", savefig)
            build(*words, **options)
        return saved[-1]

    return drawn


@pytest.fixture
def flarepp():
    """Run `python -m flarepp ...` as a user would; returns the finished process with its output as text."""
    def call(*words, **options) -> subprocess.CompletedProcess:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.run([sys.executable, "-m", "flarepp", *map(str, words)], capture_output=True, text=True,
                              env=environment, timeout=300, **options)
    return call
