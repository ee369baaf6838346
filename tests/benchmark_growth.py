#!/usr/bin/env python3
"""How time and memory of every mixer of Table 6 grow with the tokens: python tests/benchmark_growth.py

One mixer, forward and backward, at 1,024 to 8,192 tokens: batch 1, FP32, one thread, no padding, the sizes of scale desk
(C = 64, H = 4, 64 latents, features or landmarks, blocks of 32, chunks of 64), whatever N is. Steps of all lengths alternate;
a row shows the medians of their CPU time and, of a process of its own for each length, the peak memory above what was there before the
step. An exponent is the slope of a least-squares line through the logarithms from 2,048 tokens on. Time is to grow as the
multiply-adds that the mixer states (`operations`), memory linearly, since no matrix of pairs is ever kept. Exit code 1 when
an exponent is more than 0.25 above that; below it may be, where a linear term is slower arithmetic than a quadratic one.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import multiprocessing
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
import yaml
from torch import nn
from tqdm import tqdm

from flarepp import spec
from flarepp.memory import freed_at_once, keep_freed
from flarepp.mixers import build_mixer
from flarepp.operations import evaluate
from flarepp.provenance import peak_memory_mb

CONFIG = Path(__file__).parents[1] / "config.yaml"
COUNTS, FITTED, WITHIN, REPEATS = (1024, 2048, 4096, 8192), slice(1, None), 0.25, 5
BESIDE = ("flarepp_shared", "flarepp_anchored")  # variants that are no rows


def rows() -> dict[str, dict]:
    """What builds the mixer of each row: its name and options."""
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8")) | {"scale": "desk"}
    runs = spec.expand(config).classifiers.items()
    models = {path.split("/")[5]: run.spec["model"] for path, run in runs if "/table6/listops/" in path}
    models |= {name: models["flarepp"] | {"mixer": name} for name in BESIDE}
    return {row: {"name": model["mixer"]} | accepted(model) for row, model in models.items()}


def accepted(model: dict) -> dict:
    """Those of a model's options that its mixer takes."""
    taken = inspect.signature(importlib.import_module(f"flarepp.mixers.{model['mixer']}").Mixer).parameters
    return {key: value for key, value in model.items() if key in taken}


def built(options: dict) -> nn.Module:
    torch.manual_seed(0)
    return build_mixer(**options, seq_len=COUNTS[-1])


def step(mixer: nn.Module, count: int) -> float:
    """Seconds of this thread in a forward and a backward pass on so many tokens. Gradients add up: they stay where they are, so that
    no step's memory hides in what an earlier one gave back."""
    x = torch.randn(1, count, mixer.out_proj.out_features, requires_grad=True)
    started = time.thread_time()  # on the CPU backward passes run in the thread that asks for them
    y = mixer(x)
    y.backward(y.detach())
    return time.thread_time() - started


def memory(options: dict, count: int) -> float:
    """Peak of live memory of one step in MiB, above what this process had before; a process measures once."""
    mixer = built(options)
    step(mixer, 64)  # loads the code
    before = peak_memory_mb(torch.device("cpu"))
    with freed_at_once():
        step(mixer, count)
    return peak_memory_mb(torch.device("cpu")) - before


def memories(mixers: dict[str, dict]) -> dict[str, list[float]]:
    """Of every mixer at all COUNTS. Autograd must not have run in this process, which forks."""
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        return {row: [pool.apply(memory, (options, count)) for count in COUNTS]
                for row, options in tqdm(mixers.items(), "memory", disable=None)}


def times(mixer: nn.Module, row: str) -> list[float]:
    """Median seconds at all COUNTS."""
    found = [[step(mixer, count) for count in COUNTS] for _ in tqdm(range(REPEATS + 1), row, disable=None)]
    return [statistics.median(column) for column in zip(*found[1:])]


def exponent(values: list[float]) -> float:
    """p of the fitted N^p."""
    return float(np.polyfit(np.log(COUNTS[FITTED]), np.log(values[FITTED]), 1)[0])


def stated(mixer: nn.Module, options: dict) -> float:
    """The exponent of the multiply-adds that the mixer states."""
    latents = next((options[key] for key in ("num_latents", "num_features", "num_landmarks") if key in options), 0)
    width, heads = options["channel_dim"], options["num_heads"]
    sizes = {"C": width, "H": heads, "D": width // heads, "M": latents}
    return exponent([count * float(evaluate(mixer.operations, N=count, **sizes)) for count in COUNTS])


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    mixers = rows()
    peaks = memories(mixers)
    keep_freed()
    heads = [f"{count:,}" for count in COUNTS]
    print(f"| mixer | {' | '.join(f'{head}, ms' for head in heads)} | exponent | claimed "
          f"| {' | '.join(f'{head}, MiB' for head in heads)} | exponent | claimed |\n|{'---|' * 13}")
    failed = []
    for row, options in mixers.items():
        mixer = built(options)
        seconds, claimed = times(mixer, row), (stated(mixer, options), 1.0)
        found = exponent(seconds), exponent(peaks[row])
        print(f"| {row} | {' | '.join(f'{1e3 * value:.1f}' for value in seconds)} | {found[0]:.2f} | {claimed[0]:.2f} "
              f"| {' | '.join(f'{value:.1f}' for value in peaks[row])} | {found[1]:.2f} | {claimed[1]:.2f} |", flush=True)
        failed += [f"{row}: {what} grows as N^{ours:.2f}, claimed {theirs:.2f}"
                   for what, ours, theirs in zip(("time", "memory"), found, claimed) if ours > theirs + WITHIN]
    print("\n".join(failed) or f"none is more than {WITHIN} above what is claimed", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
