#!/usr/bin/env python3
"""The Transolver family against its formulas written plainly: python tests/benchmark_slices.py [--blocks 8]

A step is forward, mean squared error and backward of the complete model as it is trained (C = 128, H = 8, FFN ratio 4, FP32,
batch 1; Transolver++ draws its noise on both sides). The plain form is that of `benchmark_cost.py` around the mixers of
`reference.py`: separate projections, einsum and softmax, stock layers, on the same weights. Steps of both alternate in one
process; a row shows medians, ranges and the median of the ratios ours / plain of neighbouring steps, for the model and for
one mixer alone. `--keep-freed` keeps what is freed, as training does (`flarepp.memory`): that spares the
plain form more than ours. Exit code 1 when the ratio of a model is above 0.7.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from functools import partial

import torch
import torch.nn.functional as F
from tqdm import tqdm

from benchmark_cost import CHANNELS, HEADS, RATIO, gelu, linear, norm, plain_mlp
from flarepp.memory import keep_freed
from flarepp.mixers import build_mixer
from flarepp.models import build_model
from reference import TWINS

MIXERS, MOST = ("transolver", "transolverpp", "transolver3"), 0.7


def plain_mixer(p, name, x):
    noise = {"eval_noise": True} if name == "transolverpp" else {}
    return TWINS[name](p, x, num_heads=HEADS, norm="layernorm", **noise)


def plain_model(p, name, blocks, features):
    x = plain_mlp(p, "in_proj", features, False, True)
    for block in (f"blocks.{index}" for index in range(blocks)):
        mixer = {key.removeprefix(f"{block}.mixer."): value for key, value in p.items() if key.startswith(f"{block}.mixer.")}
        x = x + plain_mixer(mixer, name, norm(p, f"{block}.norm1", x))
        x = x + linear(p, f"{block}.ffn.output", gelu(linear(p, f"{block}.ffn.input", norm(p, f"{block}.norm2", x))))
    return plain_mlp(p, "out_proj", norm(p, "out_norm", x), True, False)


class Pair:
    """A module and its plain form on the same weights and tokens; the noise of both starts from one seed."""

    def __init__(self, module, plain, x, target):
        self.forwards, self.x, self.target = (module, plain), x, target
        self.leaves = [*module.parameters(), *([x] if x.requires_grad else [])]

    def step(self, side: int) -> float:
        for leaf in self.leaves:
            leaf.grad = None
        torch.manual_seed(0)
        started = time.perf_counter()
        F.mse_loss(self.forwards[side](self.x), self.target).backward()
        return time.perf_counter() - started

    def check(self) -> None:
        """Both compute the same gradients."""
        grads = [[leaf.grad for leaf in self.leaves] for side in range(2) if self.step(side)]
        largest = max(grad.abs().max() for grad in grads[1])
        assert all((a - b).abs().max() < 1e-3 * largest for a, b in zip(*grads)), "the plain form computes something else"

    def compare(self, repeats: int, label: str) -> tuple[float, list[str]]:
        """Median of ours / plain, and both times in words."""
        self.check()
        pairs = [(self.step(0), self.step(1)) for _ in tqdm(range(repeats), label, disable=None)]
        times = [sorted(1e3 * time for time in side) for side in zip(*pairs)]
        words = [f"{statistics.median(side):.0f} ({side[0]:.0f} – {side[-1]:.0f})" for side in times]
        return statistics.median(ours / plain for ours, plain in pairs), words


def compare(name: str, tokens: int, latents: int, blocks: int, repeats: int) -> tuple[float, str]:
    """(ratio of the complete models, row of the table) of one mixer at one size."""
    torch.manual_seed(0)
    sizes = {"channel_dim": CHANNELS, "num_heads": HEADS, "norm": "layernorm", "num_latents": latents}
    mixer = build_mixer(name, **sizes)
    alone = Pair(mixer, partial(plain_mixer, dict(mixer.named_parameters()), name),
                 torch.randn(1, tokens, CHANNELS, requires_grad=True), torch.randn(1, tokens, CHANNELS))
    model = build_model("backbone", in_dim=3, out_dim=1, mixer=name, num_blocks=blocks, ffn_ratio=RATIO, **sizes)
    whole = Pair(model, partial(plain_model, dict(model.named_parameters()), name, blocks),
                 torch.randn(1, tokens, 3), torch.randn(1, tokens, 1))
    (ratio, times), (of_mixer, _) = (pair.compare(repeats, f"{name} {latents}") for pair in (whole, alone))
    return ratio, f"| {name} | {tokens} | {latents} | {blocks} | {' | '.join(times)} | {ratio:.2f} | {of_mixer:.2f} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384])
    parser.add_argument("--latents", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--mixers", nargs="+", default=list(MIXERS), choices=list(MIXERS))
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--keep-freed", action="store_true")
    arguments = parser.parse_args()
    if arguments.keep_freed:
        keep_freed()
    torch.set_num_threads(arguments.threads)
    print(f"| mixer | N | M | blocks | ours, ms (range) | plain, ms (range) | ours / plain | of the mixer |\n|{'---|' * 8}")
    failed = []
    for tokens in arguments.tokens:
        for latents in arguments.latents:
            for name in arguments.mixers:
                ratio, row = compare(name, tokens, latents, arguments.blocks, arguments.repeats)
                print(row, flush=True)
                failed += [f"{name}, N = {tokens}, M = {latents}: {ratio:.2f} > {MOST}"] if ratio > MOST else []
    print("\n".join(failed) or f"no model takes more than {MOST} of its plain form's time", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
