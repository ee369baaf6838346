"""Draw many random PDE samples, each from its own random generator, on one or several processes.

Sample i of a stream is made from `np.random.default_rng([bench_id, seed, i, stream])` alone, so it is the
same whatever the number of samples, of processes or their order. NumPy pads a seed sequence with zeros up
to four words: stream 0 is therefore the same generator as `[bench_id, seed, i]`, and other streams never
meet it.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
from tqdm import tqdm

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
    solve: Callable[[np.random.Generator], dict[str, np.ndarray]],
    count: int,
    *,
    bench_id: int,
    seed: int,
    stream: int = 0,
    num_workers: int = 1,
    label: str = "samples",
) -> Draw:
    """Draw `count` accepted samples.

    solve: generator -> arrays by name, the same shapes each time; a module-level function or a
    `functools.partial` of one, since worker processes receive it by pickling. A sample for which it raises
    RejectedSample is skipped, recorded and replaced by the next index. ValueError when more than max(8,
    count / 10) samples are rejected.
    """
    if count < 1 or num_workers < 1:
        raise ValueError(f"{label}: count and num_workers must be at least 1, got {count} and {num_workers}")
    attempt = partial(_attempt, solve, bench_id, seed, stream)
    arrays: dict[str, np.ndarray] = {}
    indices, rejected, start = [], [], 0
    with _mapper(min(num_workers, count)) as mapper, tqdm(total=count, desc=label, disable=None) as progress:
        while len(indices) < count:
            stop = start + count - len(indices)  # never more than is missing, so that nothing is thrown away
            for index, (sample, reason) in enumerate(mapper(attempt, range(start, stop)), start):
                if sample is None:
                    rejected.append({"index": index, "reason": reason})
                    _check_rejections(rejected, count, label)
                    continue
                for name, array in sample.items():
                    if name not in arrays:
                        arrays[name] = np.empty((count, *array.shape), array.dtype)
                    arrays[name][len(indices)] = array
                indices.append(index)
                progress.update()
            start = stop
    return Draw(arrays, np.array(indices), rejected)


def _attempt(solve, bench_id: int, seed: int, stream: int, index: int) -> tuple[dict | None, str]:
    try:
        return solve(generator(bench_id, seed, index, stream)), ""
    except RejectedSample as reason:
        return None, str(reason)


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
    """Yield an ordered `map`: the built-in one, or that of a pool of spawned processes of one thread each."""
    if num_workers == 1:
        yield map
        return
    # Numerical libraries read these variables once, when a child imports them: set them before it starts.
    before = {name: os.environ.get(name) for name in THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))
    try:
        # When a worker is killed, this executor raises; multiprocessing.Pool would wait for ever.
        with ProcessPoolExecutor(num_workers, mp_context=multiprocessing.get_context("spawn")) as pool:
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
