"""What a record says of where its numbers come from (code, machine, commit), and what every experiment does around a run."""

from __future__ import annotations

import fcntl
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import nn

from flarepp import record


def check_sections(spec: dict, sections: tuple[str, ...] = ("dataset", "model", "training")) -> None:
    """ValueError names a section that a run's spec lacks."""
    if missing := [key for key in sections if not isinstance(spec.get(key), dict)]:
        raise ValueError(f"run spec: the section {missing[0]!r} is missing")


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold a lock file: a process orphaned by a killed scheduler may still be writing in its folder."""
    with open(path, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that works in {path.parent}", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def choose_device(wanted: str) -> torch.device:
    """"auto" is the first CUDA device if there is one, else the CPU. ValueError when CUDA is asked for and absent."""
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ValueError("device is 'cuda' but no CUDA device is visible; allowed here: 'cpu', 'auto'")
    return torch.device("cuda" if available and wanted != "cpu" else "cpu")


def is_out_of_memory(error: BaseException) -> bool:
    """PyTorch's CPU allocator, CUDA outside its allocator and NCCL raise a plain RuntimeError; the rest has its own type."""
    texts = ("can't allocate memory", "out of memory", "alloc_failed", "bad_alloc")
    return isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(text in str(error).lower() for text in texts))


def peak_memory_mb(device: torch.device) -> float:
    """Peak allocated device memory, on the CPU the peak resident set of the process, in MiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def code_digest(without: tuple[str, ...] = ()) -> str:
    """Twelve hex digits over the sources of this package that are loaded: what a checkpoint is only valid for.

    without: modules that have no part in the numbers, loaded or not.
    """
    sources = {name: record.sha256(Path(file)) for name, module in sorted(sys.modules.items())
               if name.startswith("flarepp.") and name not in without and (file := getattr(module, "__file__", None))}
    return record.digest(sources)


def machine(device: torch.device, precision: str, dtypes: list[str]) -> dict:
    """Versions and device, and threads and precision as read back in this process."""
    return {
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "device_memory_mb": device_memory_mb(device), "device_type": device.type, "num_threads": torch.get_num_threads(),
        "precision": {"autocast": precision == "fp16", "float32_matmul": torch.get_float32_matmul_precision(),
                      "parameters": dtypes},
    }


def device_memory_mb(device: torch.device) -> float | None:
    """All memory of a CUDA device in MiB, None for the CPU."""
    return torch.cuda.get_device_properties(device).total_memory / 2**20 if device.type == "cuda" else None


def num_cores(device_type: str) -> int:
    """CPU cores that this process may use, or CUDA devices that it sees."""
    if device_type == "cuda":
        return torch.cuda.device_count()
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """Model and vector instructions of the CPU: the last bits of a sum depend on them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()  # of Linux
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{(models or [platform.processor() or 'cpu'])[0]}, {torch.backends.cpu.get_cpu_capability()}"


def parameter_dtypes(model: nn.Module) -> list[str]:
    return sorted({str(parameter.dtype) for parameter in model.parameters()})


def git_state() -> dict:
    """Commit and dirty flag of the source tree; both None outside a repository."""
    def ask(*words: str) -> str | None:
        try:
            answer = subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return answer.stdout.strip() if answer.returncode == 0 else None

    commit, changes = ask("rev-parse", "HEAD"), ask("status", "--porcelain", "--", ".")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}
