#!/usr/bin/env python3
"""Step time of every mixer against its twin: python tests/benchmark_mixers.py [--tokens 972 7225] [--blocks 8] [--repeats 7]

Both sides are the matched backbone with the paper's C = 128, H = 8, M = 128 and 8 blocks in FP32, and a step is complete: forward,
backward, clipping, AdamW, EMA. The twin is `tests/reference.py`: the mixer's formulas with einsum and softmax, nothing fused or
reassociated. Repetitions of the two alternate in one process; a row shows both medians, their spread and the median of the ratios
twin / ours of neighbouring repetitions. Batch 2; full attention one sample and one block, since its twin holds [H, N, N].
Exit code 1 when a ratio is below 0.97, or at 7,225 tokens FLARE's below 1.6 or FLARE++'s below 2.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time

import torch
from torch import nn
from tqdm import tqdm

from flarepp.losses import training_loss
from flarepp.models import build_model
from flarepp.optimise import build_optimiser, optimiser_step
from reference import TWINS

CHANNELS, HEADS, LATENTS, LEAST = 128, 8, 128, 0.97
WANTED = {("flare", 7225): 1.6, ("flarepp", 7225): 2.0}
TRAINING = {"lr": 1e-3, "weight_decay": 1e-5, "decay_latents": True, "betas": [0.9, 0.999], "eps": 1e-8, "steps": 1000,
            "pct_start": 0.1, "div_factor": 1e4, "final_div_factor": 1e4, "clip_norm": 1.0, "ema_decay": 0.999, "precision": "fp32"}


class Twin(nn.Module):
    """A mixer's parameters under its twin's formulas."""

    def __init__(self, mixer: nn.Module, name: str):
        super().__init__()
        self.mixer, self.name = mixer, name

    def forward(self, x, mask=None):
        return TWINS[self.name](dict(self.mixer.named_parameters()), x, num_heads=HEADS, norm="layernorm")


class Side:
    """One of the two models with its optimiser; `step` returns seconds."""

    def __init__(self, name: str, blocks: int, twin: bool):
        torch.manual_seed(0)
        latents = {} if name == "full" else {"num_latents": LATENTS}
        self.model = build_model("backbone", in_dim=2, out_dim=1, mixer=name, channel_dim=CHANNELS, num_heads=HEADS,
                                 num_blocks=blocks, ffn_ratio=2, norm="layernorm", **latents)
        self.model.eval()  # Transolver++ without its noise, which both sides would have to draw alike
        for block in self.model.blocks if twin else ():
            block.mixer = Twin(block.mixer, name)
        self.optimiser = build_optimiser(self.model, TRAINING)

    def step(self, features: torch.Tensor, target: torch.Tensor) -> float:
        started = time.perf_counter()
        optimiser_step(self.model, self.optimiser, training_loss(self.model(features), target, gradient_weight=0, grid=None))
        return time.perf_counter() - started


def compare(name: str, tokens: int, blocks: int, repeats: int) -> tuple[float, str]:
    """(median ratio twin / ours, row of the table) of one mixer at one size."""
    batch, blocks = (1, 1) if name == "full" else (2, blocks)
    features, target = torch.randn(batch, tokens, 2), torch.randn(batch, tokens, 1)
    ours, twin = Side(name, blocks, twin=False), Side(name, blocks, twin=True)
    assert torch.allclose(ours.model(features), twin.model(features), atol=1e-4), f"{name} and its twin differ"
    pairs = [(ours.step(features, target), twin.step(features, target)) for _ in tqdm(range(repeats + 1), name, disable=None)][1:]
    gc.collect()
    ratio = statistics.median(slow / fast for fast, slow in pairs)
    cells = [f"{1e3 * statistics.median(side):.1f} ({1e3 * min(side):.1f} – {1e3 * max(side):.1f})" for side in zip(*pairs)]
    return ratio, f"| {name} | {tokens} | {batch} | {blocks} | {' | '.join(cells)} | {ratio:.2f} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[972, 7225])
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--mixers", nargs="+", default=list(TWINS), choices=list(TWINS))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print("| mixer | tokens | batch | blocks | ours, ms (range) | twin, ms (range) | twin / ours |\n|---|---|---|---|---|---|---|")
    failed = []
    for tokens in arguments.tokens:
        for name in arguments.mixers:
            ratio, row = compare(name, tokens, arguments.blocks, arguments.repeats)
            print(row, flush=True)
            wanted = WANTED.get((name, tokens), LEAST)
            failed += [f"{name} at {tokens}: {ratio:.2f} < {wanted}"] if ratio < wanted else []
    print("\n".join(failed) or "no mixer is slower than its twin", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
