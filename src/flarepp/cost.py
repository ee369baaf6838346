"""Time and memory of a step of complete models against the number of tokens N (FLARE++, Figure 5).

A curve is one model over all its N. One N of it is a cell, measured in a process of its own so that what one allocates never
shows in the next: steps that warm up, then steps that are timed. The median time is reported, and the peak memory above the
idle process. A step that would take too long, predicted from the last one measured and the ratio of the operations, is not
made. That, lack of memory and a loss that is not finite are results.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from flarepp import record
from flarepp.attention import KERNELS
from flarepp.memory import freed_at_once, touch
from flarepp.models import build_model
from flarepp.operations import mixer_multiply_adds, model_multiply_adds
from flarepp.processes import end_with
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
from flarepp.step import IN_DIM, OUT_DIM, Step, configure, idle_memory_mb, sample_origin, small

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

REUSE = 1.8  # of the live peak: what a process takes that keeps freed memory, fragments included
ASKED = re.compile(r"allocate ([\d.]+) (bytes|[KMGT]iB)")  # in the words of PyTorch's allocators, and of NumPy's
MEBIBYTES = {"bytes": 2**-20, "KiB": 2**-10, "MiB": 1, "GiB": 2**10, "TiB": 2**20}
LEAST_STEPS = 3  # that a cell takes: the first, one that warms up, one that is timed
KILLED = "the system killed the process (SIGKILL) for want of memory"
NEEDED = ("num_tokens", "batch_size", "precision", "warmup_steps", "timed_steps", "max_seconds", "max_step_seconds", "num_threads",
          "device", "compile", "seed")


# --- a process of its own


class ChildFailed(RuntimeError):
    """A child process ended without a result; the message says whose, and its traceback or how it ended."""

    def __init__(self, message: str, exitcode: int | None = None) -> None:
        super().__init__(message)
        self.exitcode = exitcode


FORKING = threading.Lock()  # one thread at a time: a fork that holds another's end of the pipe would hide that child's death


def in_child(folder: Path, function: Callable, spec: dict, fork: bool = torch.version.cuda is None) -> dict:
    """function(spec) in a fresh process that does not outlive this one, by default a fork of it unless PyTorch is built for CUDA.

    ChildFailed, which names `folder`, when the child raises or is killed. For the sake of its forks this process must not
    compute.
    """
    context: Any = multiprocessing.get_context("fork" if fork else "spawn")
    with FORKING:
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_answer, args=(sender, os.getpid(), function, spec))
        child.start()
        sender.close()
    try:
        succeeded, answer = receiver.recv()
    except EOFError:
        child.join()
        raise ChildFailed(f"{folder}: the process ended with exit code {child.exitcode}", child.exitcode) from None
    finally:
        child.kill()
        child.join()
    if not succeeded:
        raise ChildFailed(f"{folder}: {answer}")
    return answer


def _answer(sender: Connection, parent: int, function: Callable, spec: dict) -> None:
    end_with(parent)
    with suppress(OSError):  # of Linux: where memory runs out, end this process first
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        answer = True, function(spec)
    except Exception:
        answer = False, traceback.format_exc()
    sender.send(answer)


def kills_for_memory() -> int:
    """How many processes this machine's kernel has ended for want of memory; 0 where it does not say."""
    with suppress(OSError):  # of Linux
        counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(counts.get("oom_kill", 0))
    return 0


# --- what a child measures


@contextmanager
def watched_kernels(seen: set[str]) -> Iterator[None]:
    """Note in `seen` the name of every attention kernel that is called."""
    kept = dict(KERNELS)

    def watched(name: str, forward: Callable) -> Callable:
        def noted(*arguments: Any) -> Any:
            seen.add(name)
            return forward(*arguments)

        return noted

    KERNELS.update({name: (watched(name, forward), backward) for name, (forward, backward) in kept.items()})
    try:
        yield
    finally:
        KERNELS.update(kept)


def timed(step: Step) -> tuple[float, Tensor]:
    """Milliseconds of one step by the device's own clock, and its loss."""
    if step.device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        loss = step()
        end.record()
        torch.cuda.synchronize(step.device)
        return start.elapsed_time(end), loss
    started = time.perf_counter()
    loss = step()
    return 1e3 * (time.perf_counter() - started), loss


def repeated(step: Step, count: int, seconds: float) -> list[tuple[float, Tensor]]:
    """`timed` as often as `count` says, less often where `seconds` are over, but once if at all."""
    found: list[tuple[float, Tensor]] = []
    started = time.monotonic()
    while len(found) < count and (not found or time.monotonic() - started < seconds):
        found.append(timed(step))
    return found


def measurement(step: Step, settings: dict, idle: float) -> dict[str, float]:
    """Metrics of one cell; the peak is that of the first step on the CPU, of the timed steps on CUDA."""
    with freed_at_once():
        first, _ = timed(step)
    peak = peak_memory_mb(step.device) - idle
    if step.device.type == "cuda":
        repeated(step, settings["warmup_steps"] - 1, settings["max_seconds"])
        torch.cuda.reset_peak_memory_stats(step.device)  # what compiling took does not count
    else:
        touch(REUSE * peak)  # the memory that later steps reuse
        repeated(step, settings["warmup_steps"] - 1, settings["max_seconds"])
    times, losses = zip(*repeated(step, settings["timed_steps"], settings["max_seconds"]))
    peak = peak_memory_mb(step.device) if step.device.type == "cuda" else peak
    low, median, high = np.percentile(times, [25, 50, 75]).tolist()
    return {"step_ms": median, "step_ms_low": low, "step_ms_high": high, "steps": len(times), "first_step_ms": first,
            "peak_memory_mb": peak, "loss": float(losses[-1])}


def compile_model(model: nn.Module) -> None:
    """Compile what can be compiled, in place and for one size; the rest runs as it is."""
    import torch._dynamo

    torch._dynamo.config.suppress_errors = True
    model.compile(dynamic=False)


def run_cell(spec: dict) -> dict:
    """What a child measures: status, message, metrics and the attention kernels that ran."""
    settings, kernels = spec["cost"], set[str]()
    configure(settings)
    device = choose_device(settings["device"])
    status, message = "ok", ""
    try:
        with watched_kernels(kernels):
            Step(small(spec, "cost"), "cost", device)()
        idle = idle_memory_mb(device)
        step = Step(spec, "cost", device)
        if settings["compile"]:
            compile_model(step.model)
        with nullcontext() if settings["compile"] else watched_kernels(kernels):
            metrics = measurement(step, settings, idle)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        asked = ASKED.search(str(error))
        metrics = {"asked_mb": float(asked[1]) * MEBIBYTES[asked[2]]} if asked else {}
        status, message = "oom", (str(error).splitlines() or ["out of memory"])[0]
    else:
        assert kernels and "unfused" not in kernels, f"attention ran in {sorted(kernels) or 'no kernel'}"
        if not math.isfinite(metrics["loss"]):
            status, message, metrics = "diverged", f"the loss is {metrics['loss']}", {}
    return {"status": status, "message": message, "metrics": metrics, "attention": sorted(kernels)}


def facts_of(spec: dict) -> dict:
    """What is known of a curve without a step: code, machine, the mixer's formula, sizes, and for each N the operations."""
    settings = spec["cost"]
    configure(settings)
    device = choose_device("auto" if settings["device"] == "cuda" else "cpu")
    model = build_model(**spec["model"], in_dim=IN_DIM, out_dim=OUT_DIM)
    mixer, width = model.get_submodule("blocks.0.mixer"), spec["model"]["channel_dim"]
    sizes = {"parameter_count": sum(parameter.numel() for parameter in model.parameters()), "cores": num_cores(device.type)}
    metrics = {tokens: sizes | {"mixer_multiply_adds": mixer_multiply_adds(mixer, tokens, width) / tokens,
                                "model_multiply_adds": settings["batch_size"] * model_multiply_adds(model, tokens, IN_DIM)}
               for tokens in settings["num_tokens"]}
    return {"metrics": metrics, "origin": {
        "num_ranks": 1, **machine(device, settings["precision"], parameter_dtypes(model)), "git": git_state(),
        "code": code_digest(without=("flarepp.spec",)), "operations": getattr(mixer, "operations", None)}}


# --- the records


def cell_of(spec: dict, num_tokens: int) -> dict:
    """The spec of one cell of a curve."""
    return spec | {"cost": spec["cost"] | {"num_tokens": num_tokens}}


def found(run_dir: Path, cell: dict) -> dict | None:
    """The record that a folder holds of this cell, if it does."""
    with suppress(OSError, ValueError):  # a damaged record is none
        spec, result = record.read_run(run_dir)
        return result if spec == cell else None
    return None


def attempt(cell: dict, run_dir: Path, origin: dict, predicted: float | None) -> dict:
    """What `run_cell` found, or why it was not called or found nothing. ChildFailed for a bug."""
    limit: float = cell["cost"]["max_step_seconds"]
    nothing: dict = {"metrics": {}, "attention": []}
    if origin["device_type"] != cell["cost"]["device"]:
        return {"status": "not run", "message": "needs a CUDA device, none is visible"} | nothing
    if predicted is not None and predicted > 1e3 * limit:
        message = f"predicted {predicted / 1e3:.3g} s a step, above max_step_seconds {limit:g}"
        return {"status": "not run", "message": message} | nothing
    before = kills_for_memory()
    try:
        return in_child(run_dir, run_cell, cell)
    except ChildFailed as error:
        if error.exitcode != -signal.SIGKILL or kills_for_memory() == before:
            raise
        return {"status": "oom", "message": KILLED} | nothing


def measure_cell(cell: dict, run_dir: Path, facts: dict, predicted: float | None) -> dict:
    """Leave the record of one cell in its folder; returns it."""
    settings, started = cell["cost"], time.monotonic()
    (run_dir / "metrics.json").unlink(missing_ok=True)
    record.write_json(cell, run_dir / "spec.json")
    outcome = attempt(cell, run_dir, facts["origin"], predicted)
    metrics = facts["metrics"][settings["num_tokens"]] | outcome["metrics"] | {"wall_time_s": time.monotonic() - started}
    metrics |= {} if predicted is None else {"predicted_ms": predicted}
    origin = {"dataset": sample_origin(settings), **facts["origin"], "attention": outcome["attention"]}
    result = {"status": outcome["status"], "message": outcome["message"], "metrics": metrics, "spec": cell,
              "provenance": origin}
    return record.write_record(result, run_dir)


def line(result: dict, kept: bool) -> str:
    """One cell in words."""
    metrics = result["metrics"]
    words = [f"N {result['spec']['cost']['num_tokens']}: {result['status']}", result["message"]]
    if "step_ms" in metrics:
        words.append(f"{metrics['step_ms']:.4g} ms a step ({metrics['steps']}), {metrics['peak_memory_mb']:.4g} MiB")
    return ", ".join([*filter(None, words), *(["kept: measured before, same spec and code"] if kept else [])])


def measure(spec: dict, folder: Path, deadline: float = math.inf) -> None:
    """Measure a curve: leave the record of every cell in `folder`/N<tokens>.

    No cell starts after `deadline`, a time of the monotonic clock. A cell of the same spec and code that was measured before
    is kept. ChildFailed, which names the cell, for any end that is no result; what was measured until then stays. ValueError
    for a spec that lacks a section or a key.
    """
    check_sections(spec, ("model", "cost"))
    if missing := [key for key in NEEDED if key not in spec["cost"]]:
        raise ValueError(f"cost.{missing[0]}: the key is missing in the spec of a curve")
    if not isinstance(spec["cost"]["num_tokens"], list):
        raise ValueError(f"cost.num_tokens: got {spec['cost']['num_tokens']!r}; a curve has a list, its cells one number each")
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder / ".lock"):
        facts, pace = in_child(folder, facts_of, spec), None  # pace: the least time of a step over its operations
        for tokens in spec["cost"]["num_tokens"]:
            cell, run_dir = cell_of(spec, tokens), folder / f"N{tokens}"
            operations = facts["metrics"][tokens]["model_multiply_adds"]
            result = found(run_dir, cell)
            kept = result is not None and result["status"] != "not run" and all(
                result["provenance"].get(key) == facts["origin"][key] for key in ("code", "device"))
            predicted = pace and pace * operations
            if not kept and time.monotonic() + LEAST_STEPS * (predicted or 0) / 1e3 >= deadline:
                return
            if result is None or not kept:
                result = measure_cell(cell, run_dir, facts, predicted)
            print(line(result, kept), flush=True)
            if result["status"] == "ok":
                pace = min([result["metrics"][key] / operations for key in ("first_step_ms", "step_ms")] + [pace or math.inf])


def reference_folder(device_type: str) -> Path:
    """Where the records of this device are kept for others."""
    name = machine(torch.device(device_type), "fp32", [])["device"]
    return Path("results/reference") / re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def sweep(curves: dict[str, dict], entries: list[dict], suite: dict, out: Path, minutes: float) -> None:
    """Measure curves (folder: spec) one after the other until time is over; out/suite.json is the plan of `records` all along.

    entries: those of every cell that the plan names; one without a record says "not run". Called again it goes on. A curve
    that fails does not keep the next ones: ChildFailed at the end names the first. ValueError as in `measure`.
    """
    deadline, failed = time.monotonic() + 60 * minutes, []
    write_plan(entries, suite, out)
    for path, spec in curves.items():
        if time.monotonic() < deadline:
            print(path, flush=True)
            try:
                measure(spec, Path(path), deadline)
            except ChildFailed as error:
                print(error, flush=True)
                failed.append(error)
            write_plan(entries, suite, out)
    there = write_plan(entries, suite, out)
    rest = "" if there == len(entries) else "; the same command goes on"
    print(f"{out / 'suite.json'}: {there} of {len(entries)} cells{rest}", flush=True)
    if failed:
        raise failed[0]


def write_plan(entries: list[dict], suite: dict, out: Path) -> int:
    """Write out/suite.json; returns how many of its cells have a record."""
    there = [readable(Path(entry["run"])) for entry in entries]
    planned = [entry if known else entry | {"run": "", "absent": "not run"} for entry, known in zip(entries, there)]
    record.write_json(suite | {"entries": planned}, out / "suite.json")
    return sum(there)


def readable(run_dir: Path) -> bool:
    """Whether a folder holds the record of its spec."""
    with suppress(OSError, ValueError):
        return found(run_dir, record.read_json(run_dir / "spec.json")) is not None
    return False
