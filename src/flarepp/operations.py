"""Multiply-adds of a forward pass, counted on the modules themselves, and the formulas they follow (FLARE++, Section C.2).

One convention everywhere: a multiplication and the addition of its product are one operation; sums, exponentials, norms and
activations are none. An attention of M queries on N keys is 2 M N D of them a head, however the kernel is called; the paper
counts it half. What a module does is a polynomial of degree two in N, that of attention among all tokens, or less, so that
counts at three small N give that at any other; where a fourth shows that it is none, as in blocks that padding fills up, the
module is counted at N itself.

C channels, H heads, D = C / H, M latents or slices, N tokens.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from flarepp.errors import unknown

STEP, CHECK = 64, 161  # tokens between two counts, and of the one that tells whether they are of a polynomial
SYMBOLS = ("C", "M", "H", "D", "N")
FACTOR = re.compile(r"(?P<number>\d+(/[1-9]\d*)?)|(?P<symbol>[A-Za-z]\w*)(\^(?P<power>\d+))?")


# What torch's counter does not know, by shapes and two a multiply-add, as it counts: the CPU's attention, products in place.
aten = torch.ops.aten
UNCOUNTED = {
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    **dict.fromkeys((aten.addmm_, aten.addmv, aten.addmv_, aten.baddbmm_),
                    lambda total, a, b, **_: 2 * math.prod(a) * math.prod(b[len(a) - 1:])),
    **dict.fromkeys((aten.mv, aten.dot, aten.vdot), lambda a, b, **_: 2 * math.prod(a)),
}


class _Counter(TorchDispatchMode):
    """The formulas of torch's FLOP counter, without its tree of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.formulas, self.flops = FlopCounterMode(display=False, custom_mapping=UNCOUNTED).flop_registry, 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and importing the compiler takes longer than counting

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if formula := self.formulas.get(function.overloadpacket):
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        return out


def _counted(module: nn.Module, num_tokens: int, width: int) -> int:
    like = next(module.parameters())
    with torch.no_grad(), torch.random.fork_rng(devices=[]), _Counter() as counter:
        module(torch.zeros(1, num_tokens, width, dtype=like.dtype, device=like.device))
    return counter.flops // 2


def _multiply_adds(module: nn.Module, num_tokens: int, width: int) -> int:
    if num_tokens <= 3 * STEP:
        return _counted(module, num_tokens, width)
    counts = [_counted(module, tokens, width) for tokens in (STEP, 2 * STEP, 3 * STEP)]
    if _interpolated(counts, CHECK) != _counted(module, CHECK, width):
        return _counted(module, num_tokens, width)
    return int(_interpolated(counts, num_tokens))


def _interpolated(counts: list[int], num_tokens: int) -> Fraction:
    """Newton's interpolation of three counts."""
    (first, second, third), steps = counts, Fraction(num_tokens - STEP, STEP)
    return first + steps * (second - first) + steps * (steps - 1) / 2 * (third - 2 * second + first)


def mixer_multiply_adds(mixer: nn.Module, num_tokens: int, channel_dim: int) -> int:
    """Multiply-adds of one mixer, x [1, N, C] -> [1, N, C], forward, without a mask."""
    return _multiply_adds(mixer, num_tokens, channel_dim)


def model_multiply_adds(model: nn.Module, num_tokens: int, in_dim: int) -> int:
    """Multiply-adds of one complete model, features [1, N, in_dim] -> [1, N, out_dim], forward, without a mask."""
    return _multiply_adds(model, num_tokens, in_dim)


def evaluate(formula: str, **sizes: int) -> float:
    """The value of a mixer's formula such as "3 C^2 + 2/5 N C": sums of products of numbers, fractions and powers of `SYMBOLS`.

    Raises ValueError for anything else, and for a symbol without a size.
    """
    return float(sum(math.prod(_factor(factor, formula, sizes) for factor in term.split() or [""])
                     for term in formula.split("+")))


def _factor(factor: str, formula: str, sizes: dict) -> Fraction | int:
    match = FACTOR.fullmatch(factor)
    if match is None:
        raise ValueError(f"formula {formula!r}: {factor!r} is no factor; allowed: numbers, fractions as 2/5, "
                         f"{', '.join(SYMBOLS)} and powers as C^2, with spaces between factors and + between products")
    if match["number"]:
        return Fraction(match["number"])
    if match["symbol"] not in SYMBOLS:
        raise ValueError(f"formula {formula!r}: {unknown('symbol', match['symbol'], SYMBOLS)}")
    if match["symbol"] not in sizes:
        raise ValueError(f"formula {formula!r} needs the size {match['symbol']}; got {', '.join(sizes) or 'none'}")
    return sizes[match["symbol"]] ** int(match["power"] or 1)
