"""The scaling experiment: time and memory of a step whose tokens R ranks share (FLARE++, Section 3.3 and Table 2).

One step is forward, loss and backward of the model that is trained, and the sum of the parameter gradients over the ranks; no
optimiser. Its time is that of the slowest rank, of which the median over the steps is reported; its memory is the peak of the
largest rank. A rank draws its own tokens of one random sample, which is the same for every R. One measurement is one process
that forks its ranks; what does not fit in memory, or lacks a CUDA device a rank, is recorded as such.
"""

from __future__ import annotations

import math
import re
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flarepp import record
from flarepp.memory import freed_at_once
from flarepp.parallel import RankFailed, Ranks, Traffic, join, launch
from flarepp.provenance import (
    check_sections,
    choose_device,
    code_digest,
    exclusive,
    git_state,
    is_out_of_memory,
    machine,
    num_cores,
    parameter_dtypes,
    peak_memory_mb,
)
from flarepp.step import Step, configure, idle_memory_mb, sample_origin, small

PROGRESS = 10  # timed steps between two lines of progress


class OutOfMemory(RuntimeError):
    """A rank ran out of memory; what the launching process looks for in the traceback of a rank that failed."""


# --- one step


def span_of(num_tokens: int, ranks: Ranks) -> tuple[int, int]:
    """First and last + 1 of this rank's tokens."""
    own = ranks.shard(torch.arange(num_tokens), dim=0)
    return (int(own[0]), int(own[-1]) + 1) if len(own) else (0, 0)


class ShardedStep(Step):
    """A step on this rank's tokens of the sample; the parameter gradients are those of all ranks together."""

    def __init__(self, spec: dict, ranks: Ranks, device: torch.device) -> None:
        super().__init__(spec, "scaling", device, span_of(spec["scaling"]["num_tokens"], ranks))
        self.ranks = ranks
        ranks.prepare(self.model)

    def __call__(self) -> Tensor:
        loss = super().__call__()
        self.ranks.sync_gradients(self.model)
        return loss

    def traffic(self) -> dict[str, int]:
        """Collectives of one more step by their cause, and the bytes that this rank hands to those of the model."""
        self.model.zero_grad(set_to_none=True)
        with Traffic() as forward:
            prediction = self.forward()
        with Traffic() as of_loss:
            loss = self.loss(prediction)
        with Traffic() as backward:
            loss.backward()
        with Traffic() as gradients:
            self.ranks.sync_gradients(self.model)
        return {"forward_collectives": forward.count, "forward_bytes": forward.bytes,
                "backward_collectives": backward.count, "backward_bytes": backward.bytes,
                "loss_collectives": of_loss.count, "gradient_collectives": gradients.count}


# --- what one rank measures


def synchronise(ranks: Ranks, device: torch.device) -> None:
    """Wait for the device and for all ranks."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    ranks.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(step: ShardedStep, ranks: Ranks, settings: dict) -> tuple[list[float], float]:
    """Milliseconds of every timed step on this rank, and its part of the loss in the last one; warms up first."""
    times, device = [], step.device
    for index in range(-settings["warmup_steps"], settings["timed_steps"]):
        synchronise(ranks, device)
        started = time.perf_counter()
        loss = step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(1e3 * (time.perf_counter() - started))
        synchronise(ranks, device)
        if ranks.is_main and index > 0 and (index + 1) % PROGRESS == 0:
            print(f"{index + 1} of {settings['timed_steps']} steps, the last took {times[-1]:.1f} ms", flush=True)
    return times[settings["warmup_steps"]:], float(loss)


def of_all_ranks(ranks: Ranks, values: list[float], device: torch.device) -> np.ndarray:
    """A list of numbers of every rank, [R, n], on every rank."""
    own = torch.tensor(values, dtype=torch.float64, device=device)[None, None]  # [1, 1, n]
    return ranks.whole(own, ranks.num_context)[0].cpu().numpy()


def measurement(step: ShardedStep, ranks: Ranks, settings: dict, idle: float) -> dict[str, float]:
    """Metrics of all ranks together: time of the slowest in each step, memory of the largest, loss of the whole sample.

    The memory is that of a first step, as in the cost curves."""
    with freed_at_once():
        step()
    peak = peak_memory_mb(step.device) - idle
    times, loss = timed(step, ranks, settings)
    everywhere = of_all_ranks(ranks, [*times, loss, peak], step.device)
    slowest = everywhere[:, :-2].max(0)
    low, median, high = np.percentile(slowest, [25, 50, 75]).tolist()
    return {"step_ms": median, "step_ms_low": low, "step_ms_high": high, "steps": len(times),
            "peak_memory_mb": everywhere[:, -1].max().item(), "loss": everywhere[:, -2].sum().item()}


def run_rank(spec: dict) -> dict:
    """One of the ranks that `launch` started: metrics, and code and machine as they are there. OutOfMemory for lack of it."""
    settings = spec["scaling"]
    configure(settings)
    with join(settings["num_ranks"], 1, settings["device"]) as ranks:
        device = choose_device(settings["device"])
        try:
            ShardedStep(small(spec, "scaling"), ranks, device)()
            idle = idle_memory_mb(device)
            step = ShardedStep(spec, ranks, device)
            metrics = measurement(step, ranks, settings, idle) | step.traffic()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory(f"rank {ranks.context_rank}: {str(error).splitlines()[0]}") from None
        metrics |= {"parameter_count": sum(parameter.numel() for parameter in step.model.parameters()),
                    "cores": num_cores(device.type)}
        return {"metrics": metrics, "code": code_digest(),
                "machine": machine(device, settings["precision"], parameter_dtypes(step.model))}


# --- the record


def attempt(spec: dict) -> tuple[str, str, dict]:
    """(status, message, what rank 0 found) of one measurement; RankFailed when a rank ends for any reason but memory."""
    settings = spec["scaling"]
    wanted = settings["num_ranks"]
    if settings["device"] == "cuda" and (visible := launch(torch.cuda.device_count, (), 1)) < wanted:
        return "not run", (f"needs {wanted} CUDA device{'s' if wanted > 1 else ''}, "
                           f"{visible} {'is' if visible == 1 else 'are'} visible"), {}
    try:
        found = launch(run_rank, (spec,), wanted)
    except RankFailed as error:
        lack = re.search(rf"^[\w.]*{OutOfMemory.__name__}: (.*)$", str(error), re.MULTILINE)
        if lack is None:
            raise
        return "oom", lack[1], {}
    if not math.isfinite(found["metrics"]["loss"]):
        return "diverged", f"the loss is {found['metrics']['loss']}", {key: found[key] for key in ("code", "machine")}
    return "ok", "", found


def measure(spec: dict, run_dir: Path) -> dict:
    """Make one measurement and leave its record, metrics.json, in `run_dir`; returns the record.

    Lack of memory, of CUDA devices or of a finite loss are results. RankFailed for any other end of a rank, ValueError for a
    spec that lacks a section. This process must not have computed before, since it forks.
    """
    check_sections(spec, ("model", "scaling"))
    run_dir.mkdir(parents=True, exist_ok=True)
    with exclusive(run_dir / ".lock"):
        (run_dir / "metrics.json").unlink(missing_ok=True)
        started, settings = time.monotonic(), spec["scaling"]
        status, message, found = attempt(spec)
        if not found:  # from here on nothing is forked
            configure(settings)
            device = choose_device("auto" if settings["device"] == "cuda" else "cpu")
            found = {"code": code_digest(), "machine": machine(device, settings["precision"], [])}
        metrics = found.get("metrics", {})
        if metrics:
            metrics["wall_time_s"] = time.monotonic() - started
        result = {"status": status, "message": message, "metrics": metrics, "spec": spec, "provenance": {
            "dataset": sample_origin(settings), "num_ranks": settings["num_ranks"],
            **found["machine"], "git": git_state(), "code": found["code"]}}
        return record.write_record(result, run_dir)
