"""Draw many random PDE samples, each from its own random generator, on one or several processes.

Sample i of a stream is made from `np.random.default_rng([bench_id, seed, i, stream])` alone, so it is the
same whatever the number of samples, of processes or their order. NumPy pads a seed sequence with zeros up
to four words: stream 0 is therefore the same generator as `[bench_id, seed, i]`, and other streams never
meet it.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits
from tqdm import tqdm

from flarepp.processes import end_with

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


class RejectedSample(Exception):
    """Raised by a solver for a sample that must not be used; the message says why."""


@dataclass(frozen=True)
class Draw:
    """Accepted samples, stacked by name ([count, ...], in the order of their indices), and what was left
    out.
    """

    arrays: dict[str, np.ndarray]
    indices: np.ndarray  # [count] index of each accepted sample in its stream
    rejected: list[dict]  # {"index", "reason"}


def generator(bench_id: int, seed: int, index: int, stream: int = 0) -> np.random.Generator:
    """The random generator that sample `index` of a stream is made from. ValueError for a seed outside 0 ..
    2^32 - 1.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed: expected an integer from 0 to {2**32 - 1}, got {seed}")
    return np.random.default_rng([bench_id, seed, index, stream])


def draw(
    solve: Callable,
    count: int,
    *,
    bench_id: int,
    seed: int,
    stream: int = 0,
    num_workers: int = 1,
    label: str = "samples",
    batch_size: int | None = None,
    cache: Path | None = None,
) -> Draw:
    """Draw `count` accepted samples.

    solve: generator -> arrays by name, the same shapes each time, or RejectedSample raised; with a batch_size, that many
    generators -> a list of such arrays or of RejectedSample instances. A module-level function or a `functools.partial` of
    one, since worker processes receive it by pickling. A rejected sample is recorded and replaced by the next index.
    Batches are fixed by index, so that neither the number of samples nor of processes changes what a sample is solved with.
    cache: folder that keeps what was solved, so that a killed process goes on where it was; the caller removes it.
    ValueError when more than max(8, count / 10) samples are rejected.
    """
    if count < 1 or num_workers < 1:
        raise ValueError(f"{label}: count and num_workers must be at least 1, got {count} and {num_workers}")
    size = batch_size or 1
    attempt = partial(_solve_or_load, partial(_attempt, solve, batch_size, bench_id, seed, stream), cache, stream)
    arrays: dict[str, np.ndarray] = {}
    indices: list[int] = []
    rejected: list[dict] = []
    start = 0
    workers = min(num_workers, -(-count // size))
    interval = 0.1 if sys.stderr.isatty() else 10  # seconds; in a log a line now and then
    with _mapper(workers) as mapper, tqdm(total=count, desc=label, mininterval=interval) as progress:
        while len(indices) < count:
            stop = start + -(-(count - len(indices)) // size) * size  # no batch more than is missing
            solved = itertools.chain.from_iterable(mapper(attempt, range(start, stop, size)))
            for index, (sample, reason) in enumerate(solved, start):
                if sample is None:
                    rejected.append({"index": index, "reason": reason})
                    _check_rejections(rejected, count, label)
                elif len(indices) < count:
                    for name, array in sample.items():
                        if name not in arrays:
                            arrays[name] = np.empty((count, *array.shape), array.dtype)
                        arrays[name][len(indices)] = array
                    indices.append(index)
                    progress.update()
            start = stop
    last = indices[-1]  # of a batch's surplus nothing is reported
    return Draw(arrays, np.array(indices), [entry for entry in rejected if entry["index"] < last])


def _attempt(solve: Callable, batch_size: int | None, bench_id: int, seed: int, stream: int, start: int) -> list[tuple[dict | None, str]]:
    """(arrays, "") or (None, reason) of each sample of the batch that begins at index `start`."""
    generators = [generator(bench_id, seed, start + index, stream) for index in range(batch_size or 1)]
    try:
        found = solve(generators) if batch_size else [solve(*generators)]
    except RejectedSample as reason:
        found = [reason] * len(generators)
    assert len(found) == len(generators)
    return [(None, str(item)) if isinstance(item, RejectedSample) else (item, "") for item in found]


def _solve_or_load(attempt: Callable, cache: Path | None, stream: int, start: int) -> list[tuple[dict | None, str]]:
    """What `attempt(start)` returns, from the cache if it is there, else kept in it."""
    if cache is None:
        return attempt(start)
    path = cache / f"{stream}-{start}.npz"
    if path.exists():
        with np.load(path, allow_pickle=False) as kept:
            names, reasons = [name for name in kept.files if name != "reasons"], [str(reason) for reason in kept["reasons"]]
            rows = zip(*(kept[name] for name in names))  # one of each accepted sample
            return [(None, reason) if reason else (dict(zip(names, next(rows))), "") for reason in reasons]
    solved = attempt(start)
    accepted = [sample for sample, _ in solved if sample is not None]
    stacked: dict[str, Any] = {name: np.stack([sample[name] for sample in accepted]) for name in (accepted[0] if accepted else ())}
    unfinished = path.with_name(f".{os.getpid()}-{path.name}")
    np.savez(unfinished, reasons=np.array([reason for _, reason in solved]), **stacked)
    os.replace(unfinished, path)
    return solved


def _check_rejections(rejected: list[dict], count: int, label: str) -> None:
    allowed = max(8, count // 10)
    if len(rejected) > allowed:
        first = rejected[0]
        raise ValueError(
            f"{label}: {len(rejected)} samples rejected, allowed are {allowed} for {count} samples; "
            f"the first one, index {first['index']}: {first['reason']}"
        )


@contextmanager
def _mapper(num_workers: int) -> Iterator[Callable]:
    """Yield an ordered `map`: the built-in one, or that of a pool of spawned processes, with one thread in each process."""
    if num_workers == 1:
        with threadpool_limits(1):
            yield map
        return
    # Numerical libraries read these variables once, when a child imports them: set them before it starts.
    before = {name: os.environ.get(name) for name in THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))
    try:
        # When a worker is killed, this executor raises; multiprocessing.Pool would wait for ever.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(num_workers, context, initializer=end_with, initargs=(os.getpid(),)) as pool:
            try:
                yield pool.map
            finally:
                # After an error, do not first solve everything that still waits.
                pool.shutdown(cancel_futures=True)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
