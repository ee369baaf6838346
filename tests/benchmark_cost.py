#!/usr/bin/env python3
"""FLARE and FLARE++ against their plain forms and against the machine: python tests/benchmark_cost.py [--tokens 16384] [--latents 64]

A step is forward, mean squared error and backward of the complete model (C = 128, H = 8, FFN ratio 4, FP32, batch 1). The plain
form is the formulas with stock `scaled_dot_product_attention`, separate projections and stock layers, on the same weights. Steps of
both alternate in one process; a row shows medians, quartiles and the median of the ratios plain / ours of neighbouring steps.

The floor is what this process could reach at best: the least arithmetic, or the least traffic at the measured rate of a copy,
whichever takes longer. Arithmetic: every product of projections and attention in the time that such a product takes by itself,
into memory that is there (forward, gradients of input and weight; those of attention in the cache), and exponentials, those of
GELU included, at the rate of `exp` in the cache. Attention keeps no [M, N] matrix, so its scores are computed twice. Of two
measurements, before and after the steps, the faster counts. `--profile` says which operators our step spends its time in.
Exit code 1 when a ratio is below 0.97.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from flarepp.memory import keep_freed
from flarepp.models import build_model

CHANNELS, HEADS, RATIO, LEAST = 128, 8, 4, 0.97
MOST_TOKENS = 2**15
MIXERS = {"flare": 1, "flarepp": 2}  # encoders


# --- the plain form; p holds stock layers, and the latents, by name


def stock_layers(model: nn.Module) -> dict[str, nn.Module | nn.Parameter]:
    """A Linear or LayerNorm of PyTorch for each of the model's, on the same parameters; latents and seeds as they are."""
    layers = {}
    for name, module in model.named_modules():
        for kind, sizes in ((nn.Linear, ("in_features", "out_features")), (nn.LayerNorm, ("normalized_shape",))):
            if isinstance(module, kind):
                layers[name] = kind(*(getattr(module, size) for size in sizes))
                layers[name].weight, layers[name].bias = module.weight, module.bias
    return layers | {name: parameter for name, parameter in model.named_parameters() if name.rpartition(".")[0] not in layers}


def gelu(x):
    return F.gelu(x, approximate="tanh")


def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, scale=(CHANNELS // HEADS) ** -0.5)


def heads(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def projected(p, name, x):
    return heads(x + p[name](x))


def plain_mixer(p, name, x, dynamic):
    k, v = projected(p, f"{name}.key_proj", x), projected(p, f"{name}.value_proj", x)
    if dynamic:
        routing = p[f"{name}.routing_key_norm"](projected(p, f"{name}.routing_key_proj", x))
        seeds = p[f"{name}.seed_norm"](p[f"{name}.seeds"])[None]
        q = attention(seeds, routing, projected(p, f"{name}.routing_value_proj", x))
    else:
        q = p[f"{name}.latents"][None]
    y = attention(k, q, attention(q, k, v))
    return p[f"{name}.out_proj"](y.transpose(1, 2).flatten(2))


def plain_mlp(p, name, x, into, out_of):
    h = gelu(p[f"{name}.input"](x))
    h = h + x if into else h
    for layer in range(2):
        h = h + gelu(p[f"{name}.hidden.{layer}"](h))
    y = p[f"{name}.output"](h)
    return y + h if out_of else y


def plain_model(p, features, blocks, dynamic):
    x = plain_mlp(p, "in_proj", features, False, True)
    for block in (f"blocks.{index}" for index in range(blocks)):
        x = x + plain_mixer(p, f"{block}.mixer", p[f"{block}.norm1"](x), dynamic)
        x = x + p[f"{block}.ffn.output"](gelu(p[f"{block}.ffn.input"](p[f"{block}.norm2"](x))))
    return plain_mlp(p, "out_proj", p["out_norm"](x), True, False)


# --- steps


class Sides:
    """The model and its plain form on the same weights and tokens."""

    def __init__(self, name: str, tokens: int, latents: int, blocks: int):
        torch.manual_seed(0)
        self.model = build_model("backbone", in_dim=3, out_dim=1, mixer=name, channel_dim=CHANNELS, num_heads=HEADS,
                                 num_blocks=blocks, ffn_ratio=RATIO, norm="layernorm", num_latents=latents)
        self.layers, self.blocks, self.dynamic = stock_layers(self.model), blocks, name == "flarepp"
        self.features, self.target = torch.randn(1, tokens, 3), torch.randn(1, tokens, 1)

    def ours(self):
        return self.model(self.features)

    def plain(self):
        return plain_model(self.layers, self.features, self.blocks, self.dynamic)

    def step(self, forward) -> float:
        self.model.zero_grad(set_to_none=True)
        started = time.perf_counter()
        F.mse_loss(forward(), self.target).backward()
        return time.perf_counter() - started

    def pair(self, index: int) -> tuple[float, float]:
        """Seconds of our step and of the plain one, which goes first every other time."""
        order = [self.ours, self.plain][::-1 if index % 2 else 1]
        times = {forward.__name__: self.step(forward) for forward in order}
        return times["ours"], times["plain"]

    def check(self) -> None:
        """Both compute the same gradients."""
        grads = []
        for forward in (self.ours, self.plain):
            self.step(forward)
            grads.append([parameter.grad for parameter in self.model.parameters()])
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


def products_of(tokens: int, width: int) -> float:
    """Seconds of the three products of a projection of C channels to `width`: forward, gradients of input and of weight."""
    x, y, weight = torch.randn(tokens, CHANNELS), torch.randn(tokens, width), torch.randn(width, CHANNELS)
    return (seconds(lambda: torch.mm(x, weight.T, out=y)) + seconds(lambda: torch.mm(y, weight, out=x))
            + seconds(lambda: torch.mm(y.T, x)))


def products_of_attention(tokens: int, latents: int, part: int = 512, repeats: int = 32) -> float:
    """Seconds of the seven products of one call forward and backward, `part` tokens at a time."""
    queries, keys = torch.randn(HEADS, latents, CHANNELS // HEADS), torch.randn(HEADS, part, CHANNELS // HEADS)
    scores, rows, columns = torch.randn(HEADS, latents, part), torch.empty_like(queries), torch.empty_like(keys)
    calls = [(3, lambda: torch.bmm(queries, keys.transpose(1, 2), out=scores)),  # scores twice, G v^T
             (2, lambda: torch.bmm(scores, keys, out=rows)), (2, lambda: torch.bmm(scores.transpose(1, 2), queries, out=columns))]
    once = sum(count * seconds(lambda: [call() for _ in range(repeats)]) / repeats for count, call in calls)
    return once * tokens / part


def floor_parts(name: str, tokens: int, latents: int, blocks: int) -> dict[str, float]:
    """Seconds of a step's least arithmetic and traffic, each by itself."""
    encoders = MIXERS[name]
    square = blocks * (2 * encoders + 1) + 6  # projections of C to C channels, the 6 of the model's own input and output included
    exponentials = 2 * tokens * (blocks * ((encoders + 1) * latents * HEADS + RATIO * CHANNELS) + 6 * CHANNELS)
    kept = blocks * (2 * encoders + 3 + RATIO)  # normalised tokens, projections, mixed tokens, hidden values
    traffic = 4 * tokens * CHANNELS * (2 * kept + 4 * blocks)  # written and read; the residual stream, twice each way
    small, large = torch.randn(2**18), torch.randn(tokens, RATIO * CHANNELS)
    powers, copied = torch.empty_like(small), torch.empty_like(large)
    return {
        "projections": square * products_of(tokens, CHANNELS) + 2 * blocks * products_of(tokens, RATIO * CHANNELS),
        "attention": blocks * (encoders + 1) * products_of_attention(tokens, latents),
        "exponentials": exponentials / len(small) * seconds(lambda: [torch.exp(small, out=powers) for _ in range(32)]) / 32,
        "traffic": traffic / (2 * large.nbytes) * seconds(lambda: copied.copy_(large)),
    }


# --- the report


def compare(name: str, tokens: int, latents: int, blocks: int, repeats: int) -> tuple[float, str]:
    """(median ratio plain / ours, row of the table) of one mixer at one size."""
    sides = Sides(name, tokens, latents, blocks)
    sides.check()
    before = floor_parts(name, tokens, latents, blocks)
    count = max(repeats, MOST_TOKENS // tokens)  # as many steps as scatter asks for
    pairs = [sides.pair(index) for index in tqdm(range(count), f"{name} {tokens} {latents}", disable=None)]
    parts = {key: min(value, before[key]) for key, value in floor_parts(name, tokens, latents, blocks).items()}
    floor = max(parts["projections"] + parts["attention"] + parts["exponentials"], parts["traffic"])
    ratio, ours = statistics.median(plain / ours for ours, plain in pairs), statistics.median(ours for ours, _ in pairs)
    sizes = [f"{1e3 * statistics.median(side):.0f} ({1e3 * min(side):.0f} – {1e3 * max(side):.0f})" for side in zip(*pairs)]
    times = [f"{1e3 * part:.0f}" for part in (*parts.values(), floor)]
    return ratio, f"| {' | '.join(map(str, [name, tokens, latents, *sizes, f'{ratio:.2f}', *times, f'{ours / floor:.2f}']))} |"


HEADER = ("| mixer | N | M | ours, ms (range) | plain, ms (range) | plain / ours | projections, ms | attention, ms | exponentials, ms "
          "| traffic, ms | floor, ms | ours / floor |")


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
    parser.add_argument("--keep-freed", action="store_true", help="keep freed memory for reuse on both sides, as training does")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.keep_freed:
        keep_freed()
    print(f"{HEADER}\n|{'---|' * 12}")
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
