"""What becomes of freed memory on the CPU: kept by the process, which is fast, or returned at once, which shows what is live.

glibc returns blocks of 32 MiB and more to the system as they are freed. Touching them anew costs as much as arithmetic: a step
at 131,072 tokens takes a third longer. Where the C library is not glibc nothing here has an effect.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
LEAST, MOST = 2**16, 2**31 - 1  # bytes


def _from_now_on(mmap_threshold: int, trim_threshold: int) -> None:
    """Blocks from `mmap_threshold` bytes on are returned as they are freed, smaller ones when so many bytes are free."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, mmap_threshold)
        mallopt(M_TRIM_THRESHOLD, trim_threshold)


def keep_freed() -> None:
    """Keep what is freed for what is allocated next, for as long as this process lives."""
    _from_now_on(MOST, MOST)


def touch(mebibytes: float) -> None:
    """Take so much memory from the system and free it, so that what `keep_freed` keeps is there from the start."""
    blocks = [torch.zeros(2**18, 64).fill_(1) for _ in range(int(mebibytes) // 64)]  # of 64 MiB
    del blocks


@contextmanager
def freed_at_once() -> Iterator[None]:
    """Within it freed memory returns to the system, so that the peak resident set is that of live tensors; then `keep_freed`."""
    _from_now_on(LEAST, LEAST)
    try:
        yield
    finally:
        keep_freed()
