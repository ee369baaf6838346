#!/usr/bin/env python3
"""FLARE and FLARE++ against their plain forms and against the machine: python tests/benchmark_cost.py [--tokens 16384] [--latents 64]

A step is forward, mean squared error and backward of the complete model (C = 128, H = 8, FFN ratio 4, FP32, batch 1). The plain
form is the formulas with stock `scaled_dot_product_attention`, separate projections and stock layers, on the same weights. Steps of
both alternate in one process; a row shows medians, quartiles and the median of the ratios plain / ours of neighbouring steps.

The floor is what this process could reach at best: the least arithmetic (matrix products at the measured rate of the model's own
feed-forward product, and exponentials, those of GELU included, at the measured rate of `exp` in the cache; attention keeps no
[M, N] matrix, so its scores are computed twice), or the least traffic at the measured rate of a copy, whichever takes longer.
`--profile` says which operators our step spends its time in. Exit code 1 when a ratio is below 0.97.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from tqdm import tqdm

from flarepp.models import build_model

CHANNELS, HEADS, RATIO, LEAST = 128, 8, 4, 0.97
MIXERS = {"flare": 1, "flarepp": 2}  # encoders


# --- the plain form; p holds the parameters by name


def linear(p, name, x):
    return F.linear(x, p[f"{name}.weight"], p[f"{name}.bias"])


def norm(p, name, x):
    return F.layer_norm(x, x.shape[-1:], p[f"{name}.weight"], p[f"{name}.bias"])


def gelu(x):
    return F.gelu(x, approximate="tanh")


def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, scale=(CHANNELS // HEADS) ** -0.5)


def heads(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def projected(p, name, x):
    return heads(x + linear(p, name, x))


def plain_mixer(p, name, x, dynamic):
    k, v = projected(p, f"{name}.key_proj", x), projected(p, f"{name}.value_proj", x)
    if dynamic:
        routing = norm(p, f"{name}.routing_key_norm", projected(p, f"{name}.routing_key_proj", x))
        seeds = norm(p, f"{name}.seed_norm", p[f"{name}.seeds"])[None]
        q = attention(seeds, routing, projected(p, f"{name}.routing_value_proj", x))
    else:
        q = p[f"{name}.latents"][None]
    y = attention(k, q, attention(q, k, v))
    return linear(p, f"{name}.out_proj", y.transpose(1, 2).flatten(2))


def plain_mlp(p, name, x, into, out_of):
    h = gelu(linear(p, f"{name}.input", x))
    h = h + x if into else h
    for layer in range(2):
        h = h + gelu(linear(p, f"{name}.hidden.{layer}", h))
    y = linear(p, f"{name}.output", h)
    return y + h if out_of else y


def plain_model(p, features, blocks, dynamic):
    x = plain_mlp(p, "in_proj", features, False, True)
    for block in (f"blocks.{index}" for index in range(blocks)):
        x = x + plain_mixer(p, f"{block}.mixer", norm(p, f"{block}.norm1", x), dynamic)
        x = x + linear(p, f"{block}.ffn.output", gelu(linear(p, f"{block}.ffn.input", norm(p, f"{block}.norm2", x))))
    return plain_mlp(p, "out_proj", norm(p, "out_norm", x), True, False)


# --- steps


class Sides:
    """The model and its plain form on the same weights and tokens."""

    def __init__(self, name: str, tokens: int, latents: int, blocks: int):
        torch.manual_seed(0)
        self.model = build_model("backbone", in_dim=3, out_dim=1, mixer=name, channel_dim=CHANNELS, num_heads=HEADS,
                                 num_blocks=blocks, ffn_ratio=RATIO, norm="layernorm", num_latents=latents)
        self.parameters, self.blocks, self.dynamic = dict(self.model.named_parameters()), blocks, name == "flarepp"
        self.features, self.target = torch.randn(1, tokens, 3), torch.randn(1, tokens, 1)

    def ours(self):
        return self.model(self.features)

    def plain(self):
        return plain_model(self.parameters, self.features, self.blocks, self.dynamic)

    def step(self, forward) -> float:
        self.model.zero_grad(set_to_none=True)
        started = time.perf_counter()
        F.mse_loss(forward(), self.target).backward()
        return time.perf_counter() - started

    def check(self) -> None:
        """Both compute the same gradients."""
        grads = []
        for forward in (self.ours, self.plain):
            self.step(forward)
            grads.append([parameter.grad for parameter in self.parameters.values()])
        largest = max(grad.abs().max() for grad in grads[1])
        assert all((a - b).abs().max() < 1e-4 * largest for a, b in zip(*grads)), "the plain form computes something else"


# --- the floor


def seconds(function, repeats: int = 7) -> float:
    """Median time of a call, after one that warms up."""
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def ceilings(tokens: int) -> dict[str, float]:
    """What this process reaches, per second: multiply-adds of a product, exponentials, bytes read or written by a copy."""
    x, weight, hidden = torch.randn(tokens, CHANNELS), torch.randn(RATIO * CHANNELS, CHANNELS), torch.empty(tokens, RATIO * CHANNELS)
    small = torch.zeros(2**18)
    return {
        "products": hidden.numel() * CHANNELS / seconds(lambda: torch.mm(x, weight.T, out=hidden)),
        "exponentials": 16 * small.numel() / seconds(lambda: [torch.exp(small, out=small).zero_() for _ in range(16)]),
        "bytes": 2 * hidden.nbytes / seconds(lambda other=torch.empty_like(hidden): other.copy_(hidden)),
    }


def least(name: str, tokens: int, latents: int, blocks: int) -> dict[str, float]:
    """Multiply-adds, exponentials and bytes that a step cannot do without."""
    calls, width = MIXERS[name] + 1, CHANNELS
    linear_weights = blocks * (2 * MIXERS[name] + 1 + 2 * RATIO) * width**2 + 6 * width**2 + 4 * width
    products = 3 * linear_weights + blocks * calls * 7 * latents * width  # attention: 2 forward, 5 backward
    exponentials = 2 * (blocks * (calls * latents * HEADS + RATIO * width) + 6 * width)
    kept = blocks * (2 * MIXERS[name] + 3 + RATIO)  # normalised tokens, projections, mixed tokens, hidden values
    return {"products": tokens * products, "exponentials": tokens * exponentials,
            "bytes": 4 * tokens * width * (2 * kept + 4 * blocks)}  # written and read; the residual stream, twice each way


def floor(needed: dict, best: dict) -> tuple[float, float, float]:
    """Seconds of the products, of the exponentials, of the traffic."""
    return tuple(needed[key] / best[key] for key in ("products", "exponentials", "bytes"))


# --- the report


def compare(name: str, tokens: int, latents: int, blocks: int, repeats: int) -> tuple[float, str]:
    sides = Sides(name, tokens, latents, blocks)
    sides.check()
    before = ceilings(tokens)
    pairs = [(sides.step(sides.ours), sides.step(sides.plain)) for _ in tqdm(range(repeats), f"{name} {tokens} {latents}", disable=None)]
    best = {key: max(value, before[key]) for key, value in ceilings(tokens).items()}
    needed = least(name, tokens, latents, blocks)
    products, exponentials, traffic = floor(needed, best)
    lowest = max(products + exponentials, traffic)
    ratio = statistics.median(plain / ours for ours, plain in pairs)
    ours = statistics.median(pair[0] for pair in pairs)
    cells = [f"{1e3 * statistics.median(side):.0f} ({1e3 * min(side):.0f} – {1e3 * max(side):.0f})" for side in zip(*pairs)]
    rates = f"{2e-9 * best['products']:.0f} | {1e-9 * best['exponentials']:.2f} | {1e-9 * best['bytes']:.1f}"
    parts = " | ".join(f"{1e3 * part:.0f}" for part in (products, exponentials, traffic, lowest))
    return ratio, (f"| {name} | {tokens} | {latents} | {' | '.join(cells)} | {ratio:.2f} | {2e-9 * needed['products']:.0f} "
                   f"| {1e-9 * needed['bytes']:.1f} | {rates} | {parts} | {ours / lowest:.2f} |")


HEADER = ("| mixer | N | M | ours, ms (range) | plain, ms (range) | plain / ours | least GFLOP | least GB | GFLOP/s | Gexp/s | GB/s "
          "| products, ms | exponentials, ms | traffic, ms | floor, ms | ours / floor |")


def profiled(name: str, tokens: int, latents: int, blocks: int) -> str:
    """Operators of one of our steps by their own time."""
    sides = Sides(name, tokens, latents, blocks)
    sides.step(sides.ours)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        sides.step(sides.ours)
    return profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=20, max_name_column_width=60)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384, 65536])
    parser.add_argument("--latents", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--mixers", nargs="+", default=list(MIXERS), choices=list(MIXERS))
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{HEADER}\n|{'---|' * 16}")
    failed = []
    for tokens in arguments.tokens:
        for latents in arguments.latents:
            for name in arguments.mixers:
                ratio, row = compare(name, tokens, latents, arguments.blocks, arguments.repeats)
                print(row, flush=True)
                failed += [f"{name}, N = {tokens}, M = {latents}: {ratio:.2f} < {LEAST}"] if ratio < LEAST else []
                if arguments.profile:
                    print(profiled(name, tokens, latents, arguments.blocks))
    print("\n".join(failed) or "never slower than the plain form", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
