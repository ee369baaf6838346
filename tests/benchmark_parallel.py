#!/usr/bin/env python3
"""What context parallelism costs: python tests/benchmark_parallel.py [--tokens 131072] [--ranks 2] [--repeats 5] [--steps 3]

One step (forward, loss, backward, gradient sum) of FLARE and FLARE++ with batch 1, 2 blocks, C = 128, H = 8, M = 64 and
feed-forward ratio 4 in FP32, on one process with one thread and on R such processes that share the tokens. Each repetition
measures one process, R processes, and the machine's own limit: R processes that at the same time do one process's work on
N / R tokens each and never communicate. Time efficiency is T1 / (R TR), memory efficiency P1 / (R PR), with P the peak
resident set above the idle process. A row shows medians over the repetitions and their range.
Exit code 1 when a median is below 0.90. It takes R idle cores: anything else on the machine shows.
"""

from __future__ import annotations

import argparse
import statistics
import sys

import torch
from tqdm import tqdm

from flarepp.parallel import Ranks, join, launch
from flarepp.scaling import ShardedStep, measurement, run_rank
from flarepp.step import configure, idle_memory_mb, small

LEAST = 0.90
MODEL = {"name": "backbone", "channel_dim": 128, "num_heads": 8, "num_blocks": 2, "num_latents": 64, "ffn_ratio": 4,
         "norm": "layernorm"}


def spec_of(mixer: str, num_ranks: int, arguments: argparse.Namespace) -> dict:
    """A run spec of the scaling experiment."""
    return {"model": MODEL | {"mixer": mixer}, "scaling": {
        "num_tokens": arguments.tokens, "num_ranks": num_ranks, "batch_size": 1, "precision": "fp32", "warmup_steps": 1,
        "timed_steps": arguments.steps, "num_threads": 1, "device": "cpu", "seed": 0}}


def run_alone(spec: dict) -> dict:
    """One of the ranks, with its share of the tokens as if that were the sample: the same work without communication."""
    settings = spec["scaling"]
    share = spec | {"scaling": settings | {"num_tokens": settings["num_tokens"] // settings["num_ranks"]}}
    configure(settings)
    with join(settings["num_ranks"], 1, "cpu") as ranks:
        device = torch.device("cpu")
        ShardedStep(small(share, "scaling"), Ranks(), device)()
        idle = idle_memory_mb(device)
        return {"metrics": measurement(ShardedStep(share, Ranks(), device), ranks, settings, idle)}


def repetition(mixer: str, arguments: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """(milliseconds, MiB) of one process, of R that share the tokens, and of R that know nothing of each other."""
    one, several = (spec_of(mixer, ranks, arguments) for ranks in (1, arguments.ranks))
    found = {"one": launch(run_rank, (one,), 1), "shared": launch(run_rank, (several,), arguments.ranks),
             "alone": launch(run_alone, (several,), arguments.ranks)}
    return {name: (result["metrics"]["step_ms"], result["metrics"]["peak_memory_mb"]) for name, result in found.items()}


def spread(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} – {max(values):.{digits}f})"


def compare(mixer: str, arguments: argparse.Namespace) -> tuple[dict[str, float], str]:
    """Median efficiencies of one mixer, and its row of the table."""
    found = [repetition(mixer, arguments) for _ in tqdm(range(arguments.repeats), mixer, disable=None)]
    cells, medians = [], {}
    for what, index, digits in (("time", 0, 0), ("memory", 1, 0)):
        cells += [spread([each[name][index] for each in found], digits) for name in ("one", "shared")]
        for name in ("shared", "alone"):
            ratios = [each["one"][index] / (arguments.ranks * each[name][index]) for each in found]
            cells.append(spread(ratios, 3))
            medians[what, name] = statistics.median(ratios)
    return {what: medians[what, "shared"] for what in ("time", "memory")}, f"| {mixer} | {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131_072, help="N of the sample")
    parser.add_argument("--ranks", type=int, default=2, help="R processes, one thread each")
    parser.add_argument("--repeats", type=int, default=5, help="repetitions of the three measurements")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a measurement, after one that warms up")
    parser.add_argument("--mixers", nargs="+", default=["flare", "flarepp"], help="mixers that can share tokens")
    arguments = parser.parse_args()
    print("| mixer | T1, ms | TR, ms | time efficiency | its limit | P1, MiB | PR, MiB | memory efficiency | its limit |\n"
          "|---|---|---|---|---|---|---|---|---|")
    failed = []
    for mixer in arguments.mixers:
        efficiencies, row = compare(mixer, arguments)
        print(row, flush=True)
        low = {what: value for what, value in efficiencies.items() if value < LEAST}
        failed += [f"{mixer}: {what} efficiency {value:.3f} < {LEAST}" for what, value in low.items()]
    print("\n".join(failed) or f"no efficiency is below {LEAST}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
