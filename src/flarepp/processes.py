"""Processes that work for another one, and processes that are told to end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


def end_with(parent: int) -> None:
    """Let this process end when the process `parent` does, also when that is killed and can tell nobody."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def sigterm_noted() -> Iterator[threading.Event]:
    """Within it SIGTERM only sets the event that it yields; on leaving, the signal takes its course."""
    noted = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: noted.set())
    try:
        yield noted
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)  # None: not Python's, which cannot set it again
        if noted.is_set():
            signal.raise_signal(signal.SIGTERM)


def terminate_after(minutes: float) -> None:
    """Let this process get SIGTERM in so many minutes; 0: never. ValueError for other than a number from 0 to 1e8."""
    if not 0 <= minutes <= 1e8:  # the clock counts nanoseconds in 64 bits
        raise ValueError(f"--minutes: got {minutes}; a number from 0 to 1e8")
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGTERM))
    signal.setitimer(signal.ITIMER_REAL, 60 * minutes)
