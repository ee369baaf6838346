"""Slices: soft groups of tokens, their means, attention among them and the way back (Transolver, arXiv 2402.02366).

    z_n = A u_n + a per head        w_n = softmax_M((z_n + noise_n) / tau_n)        sums_m = (sum_n w_nm f_n, sum_n w_nm)
    o = mix(sums)  per slice        y_n = sum_m w_nm o_m

`slice_mix` does it in one of two ways. In half precision, under autocast and on other devices than the CPU each line is an
operator, which autocast casts and a compiler fuses; so it is where all weights fit the cache. On the CPU, where a larger new
[B, H, N, M] costs more than the arithmetic that fills it, tokens are taken in tiles that fit the cache, forward and backward,
and the weights are the one such array.

B batch, H heads, N tokens, M slices, D head width. Padded tokens are in no slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from flarepp.attention import attend
from flarepp.layers import in_half_precision, split_heads, widened, zero_padding

SLICE_EPS = 1e-5  # added to the mass of a slice
TILE = 2**18  # slice weights that are computed together on the CPU: 1 MiB in FP32
NOISE_EPS = 1e-8


class SliceAttention(nn.Module):
    """Self-attention among the M slice tokens of each head, [B, H, M, D] -> [B, H, M, D]; the heads share its maps."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.scale = head_dim**-0.5
        self.query_proj, self.key_proj, self.value_proj = (nn.Linear(head_dim, head_dim, bias=False) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        return attend(self.query_proj(tokens), self.key_proj(tokens), self.value_proj(tokens), scale=self.scale)


def slice_means(sums: Tensor) -> Tensor:
    """Means [..., M, D] from `slice_sums`: sum_n w v / (sum_n w + 1e-5); 0, with small gradients, without any token."""
    mass = sums[..., -1:]  # [..., M, 1]
    return sums[..., :-1] / torch.where(mass == 0, 1, mass + SLICE_EPS)


# --- each line an operator


def slice_softmax(logits: Tensor) -> Tensor:
    """Slice weights [..., M] of a token: softmax over the slices, in FP32 or better."""
    return torch.softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))


def gumbel(uniform: Tensor) -> Tensor:
    """-log(-log(U + 1e-8) + 1e-8), in place of U."""
    return uniform.add_(NOISE_EPS).log_().neg_().add_(NOISE_EPS).log_().neg_()


def slice_sums(weights: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Weighted sum and mass of every slice (Transolver, arXiv 2402.02366, eq. 2).

    weights [..., N, M], values [..., N, D], mask None or broadcastable to [..., N]; padded tokens count nowhere. Returns
    [..., M, D + 1]: sum_n w v, and in the last channel sum_n w. In FP32 or better, backward too: half precision overflows in
    a sum over 10^5 tokens, and in the gradient of a slice that has hardly any mass.
    """
    return _TokenSums.apply(zero_padding(widened(weights), mask), widened(values))


class _TokenSums(torch.autograd.Function):
    """weights^T [values, 1] over the tokens; autocast is off in the backward pass too, wherever that is called."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, values: Tensor) -> Tensor:
        ctx.save_for_backward(weights, values)
        with torch.autocast(weights.device.type, enabled=False):
            return torch.cat([weights.mT @ values, weights.sum(-2)[..., None]], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights, values = ctx.saved_tensors
        with torch.autocast(grad.device.type, enabled=False):
            return F.pad(values, (0, 1), value=1) @ grad.mT, weights @ grad[..., :-1]


# --- in tiles


def in_tiles(x: Tensor, numbers: int) -> bool:
    """Whether what x becomes, `numbers` of them, fills more than a tile on the CPU, in FP32 or better."""
    return numbers > TILE and x.device.type == "cpu" and not in_half_precision(x)


def spans(count: int, length: int) -> list[slice]:
    """0 … count in pieces of `length`, the last of which may be shorter."""
    return [slice(start, min(start + length, count)) for start in range(0, count, length)]


class _Tiles:
    """Which rows are taken together, and what the backward pass of the outputs leaves for that of the sums.

    A tile is a sample and either several heads with all their tokens or a part of one head's: contiguous in [B, H, N, M].
    """

    def __init__(self, batch: int, num_heads: int, num_tokens: int, num_slices: int) -> None:
        heads = max(1, TILE // max(1, num_tokens * num_slices))
        self.heads, self.tokens = spans(num_heads, heads), spans(num_tokens, max(1, TILE // num_slices))
        self.batch = batch
        self.outputs: tuple[Tensor, Tensor] | None = None

    def __iter__(self) -> Iterator[tuple[int, slice, slice]]:
        return ((sample, heads, tokens) for sample in range(self.batch) for heads in self.heads for tokens in self.tokens)

    def room(self, like: Tensor, width: int) -> Callable[[slice, slice], Tensor]:
        """Memory for [h, n, width] of one tile after the other: of the heads and tokens that are asked for."""
        lengths = [[span.stop - span.start for span in side] for side in (self.heads, self.tokens)]
        flat = like.new_empty(*(max(side, default=0) for side in lengths), width).view(-1, width)

        def of(heads: slice, tokens: slice) -> Tensor:
            shape = heads.stop - heads.start, tokens.stop - tokens.start
            return flat[:shape[0] * shape[1]].view(*shape, width)

        return of


class _Sums(torch.autograd.Function):
    """(sums [B, H, M, D + 1], weights [B, H, N, M]); its backward pass does that of `_Outputs` for the weights as well."""

    @staticmethod
    def forward(ctx: Any, tiles: _Tiles, tokens: Tensor, matrix: Tensor, bias: Tensor, mask: Tensor | None,
                temperature: Tensor | None, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """Arguments of `slice_mix`; the weights replace `noise`."""
        (u, values), slices = _u_and_values(tokens, matrix), matrix.shape[1]
        weights = u.new_empty(*u.shape[:3], slices) if noise is None else noise.detach()
        sums, mass = u.new_zeros(*u.shape[:2], u.shape[3], slices), u.new_zeros(*u.shape[:2], 1, slices)
        transposed, room = matrix.mT.contiguous(), tiles.room(u, slices)
        for sample, heads, span in tiles:
            tile, own = (sample, heads, span), weights[sample, heads, span]
            logits = torch.baddbmm(bias[heads, None], u[tile], transposed[heads], out=room(heads, span))
            if noise is not None:
                logits += gumbel(own)
            if temperature is not None:
                logits /= temperature[tile]
            torch.softmax(logits, -1, out=own)
            if mask is not None:
                own.masked_fill_(~mask[sample, span, None], 0)
            sums[sample, heads].baddbmm_(values[tile].mT, own)
            mass[sample, heads] += own.sum(1, keepdim=True)
        ctx.tiles = tiles
        ctx.save_for_backward(tokens, matrix, temperature, weights)
        ctx.mark_non_differentiable(weights)
        ctx.set_materialize_grads(False)
        return torch.cat([sums, mass], 2).mT.contiguous(), weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_sums: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        (tokens, matrix, temperature, weights), (mixed, grad_y) = ctx.saved_tensors, ctx.tiles.outputs
        ctx.tiles.outputs = None
        grad_tokens, by_value = tokens.new_empty(tokens.shape), grad_sums[..., :-1].contiguous()
        (u, values), (grad_u, grad_values) = _u_and_values(tokens, matrix), _u_and_values(grad_tokens, matrix)
        grad_matrix, grad_bias = matrix.new_zeros(matrix.mT.shape), matrix.new_zeros(matrix.shape[0], 1, matrix.shape[1])
        grad_temperature = None if temperature is None else torch.empty_like(temperature)
        by_channel, one = torch.cat([mixed, grad_sums], -1).mT.contiguous(), u.new_ones(1).expand(*u.shape[:3], 1)
        both = tokens.shape[-1] == u.shape[1] * u.shape[3]  # tokens are u and values at once
        room, scratch = (ctx.tiles.room(u, matrix.shape[1]) for _ in range(2))
        inputs = ctx.tiles.room(u, by_channel.shape[2])
        for sample, heads, span in ctx.tiles:
            tile, own = (sample, heads, span), weights[sample, heads, span]
            channels = torch.cat([grad_y[tile], values[tile], one[tile]], -1, out=inputs(heads, span))
            grad = torch.bmm(channels, by_channel[sample, heads], out=room(heads, span))  # [h, n, M]
            torch._softmax_backward_data(grad, own, -1, own.dtype, grad_input=grad)
            if temperature is not None and grad_temperature is not None:  # sum_m grad_m z_m = sum_m grad_m log w_m, as the grad_m sum to 0
                logs = torch.clamp_min(own, torch.finfo(own.dtype).tiny, out=scratch(heads, span)).log_()
                grad_temperature[tile] = logs.mul_(grad).sum(-1, keepdim=True).neg_().div_(temperature[tile])
                grad /= temperature[tile]
            torch.bmm(own, by_value[sample, heads], out=grad_values[tile])
            grad_u[tile].baddbmm_(grad, matrix[heads], beta=int(both))
            grad_matrix[heads].baddbmm_(u[tile].mT, grad)
            grad_bias[heads] += grad.sum(1, keepdim=True)
        return None, grad_tokens, grad_matrix.mT, grad_bias[:, 0], None, grad_temperature, None


def _u_and_values(tokens: Tensor, matrix: Tensor) -> list[Tensor]:
    """The first and the last C = H D channels of tokens [B, N, 2 C or C], each as [B, H, N, D]."""
    num_heads, _, head_dim = matrix.shape
    width = num_heads * head_dim
    return [split_heads(part, num_heads) for part in (tokens[..., :width], tokens[..., -width:])]


class _Outputs(torch.autograd.Function):
    """y [B, H, N, D], in memory [B, N, H, D], of weights [B, H, N, M] and what each slice hands out, mixed [B, H, M, D]."""

    @staticmethod
    def forward(ctx: Any, tiles: _Tiles, weights: Tensor, mixed: Tensor) -> Tensor:
        batch, num_heads, num_tokens, _ = weights.shape
        y = mixed.new_empty(batch, num_tokens, num_heads, mixed.shape[3]).transpose(1, 2)
        for tile in tiles:
            torch.bmm(weights[tile], mixed[tile[:2]], out=y[tile])
        ctx.tiles = tiles
        ctx.save_for_backward(weights, mixed)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        weights, mixed = ctx.saved_tensors
        grad_mixed = torch.zeros_like(mixed.mT, memory_format=torch.contiguous_format)  # [B, H, D, M]
        for tile in ctx.tiles:
            grad_mixed[tile[:2]].baddbmm_(grad_y[tile].mT, weights[tile])
        ctx.tiles.outputs = mixed.detach(), grad_y  # its graph would hold tiles in a cycle
        return None, None, grad_mixed.mT


class _Rows(torch.autograd.Function):
    """A function of rows [..., D] -> [..., 1], some rows at a time; the backward pass computes what is in between again."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], length: int, rows: Tensor, *parameters: Tensor) -> Tensor:
        ctx.function, ctx.length = function, length
        ctx.save_for_backward(rows, *parameters)
        return torch.cat([function(rows[span]) for span in spans(len(rows), length)] or [rows[:, :1] * 1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, *parameters = ctx.saved_tensors
        grads = [torch.empty_like(rows), *(torch.zeros_like(parameter) for parameter in parameters)]
        for span in spans(len(rows), ctx.length):
            with torch.enable_grad():
                leaf = rows[span].detach().requires_grad_()
                out = ctx.function(leaf)
            wanted = [parameter for parameter in parameters if parameter.requires_grad]
            grads[0][span], *others = torch.autograd.grad(out, [leaf, *wanted], grad[span])
            for total, other in zip((t for t, p in zip(grads[1:], parameters) if p.requires_grad), others):
                total += other
        return None, None, *grads


def rowwise(function: Callable[[Tensor], Tensor], width: int, x: Tensor, parameters: Iterable[Tensor]) -> Tensor:
    """function(x) [..., 1] of x [..., D], row by row, with `width` numbers a row in between and the `parameters` it uses."""
    if not in_tiles(x, x[..., 0].numel() * width):
        return function(x)
    return _Rows.apply(function, max(1, TILE // width), x.reshape(-1, x.shape[-1]), *parameters).view(*x.shape[:-1], 1)


def slice_mix(tokens: Tensor, matrix: Tensor, bias: Tensor, mask: Tensor | None, mix: Callable[[Tensor], Tensor],
              temperature: Tensor | None = None, noise: Tensor | None = None) -> Tensor:
    """y [B, H, N, D], by the formulas above, of tokens [B, N, 2 C], u and then f, or [B, N, C], both at once; C = H D.

    matrix A [H, M, D], bias a [H, M], mask None or [B, N], temperature [B, H, N, 1]; noise: numbers on [0, 1) [B, H, N, M],
    used up, that become Gumbel noise. `mix` maps the sums [B, H, M, D + 1] of `slice_sums` to o [B, H, M, D].
    """
    if in_tiles(tokens, tokens.shape[:2].numel() * bias.numel()):
        tiles = _Tiles(len(tokens), len(matrix), tokens.shape[1], matrix.shape[1])
        sums, weights = _Sums.apply(tiles, tokens, matrix, bias, mask, temperature, noise)
        return _Outputs.apply(tiles, weights, mix(sums))
    u, values = _u_and_values(tokens, matrix)
    logits = u @ matrix.mT
    logits = logits + bias[:, None].to(logits.dtype)
    logits = logits if noise is None else logits + gumbel(noise)
    weights = slice_softmax(logits if temperature is None else logits / temperature)
    sums = slice_sums(weights, values, None if mask is None else mask[:, None])
    return weights @ mix(sums).to(weights.dtype)
