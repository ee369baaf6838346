"""Transolver-3: Transolver with its matrix products reassociated (Transolver-3; FLARE++, Section 4).

    A_h = W_s W_x,h / tau_h,  a_h = (W_s b_x,h + b_s) / tau_h        w_n = softmax_M(A_h x_n + a_h)        (tau not clamped)
    r_m = sum_n w_nm x_n / (sum_n w_nm + 1e-5)        t_m = W_f,h r_m + b_f,h        o: slice attention as in `transolver`
    out_n = sum_h sum_m w_nm (W_out,h o_m) + b_out

Plain, it holds the slice weights [B, N, H, M] of all tokens. With `tile` tokens at a time it holds those of one tile and
computes them again in the second pass over the tokens and in the backward pass. Same weights, `tile` set: exactly
Transolver's function, t = (W_f sum w x + b_f sum w) / (sum w + 1e-5). The plain form adds b_f unweighted, so its t exceeds
Transolver's by 1e-5 b_f / (sum_n w_nm + 1e-5).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from flarepp.layers import head_width, init_linears, zero_padding
from flarepp.slices import TILE, SliceAttention, in_tiles, slice_means, slice_softmax, slice_sums, spans

FIRST_TEMPERATURE = 0.5


class Mixer(nn.Module):
    """x [B, N, C] -> [B, N, C] with `num_latents` M slices, all tokens at once or `tile` of them at a time."""

    sum_over_tokens = staticmethod(lambda sums: sums)  # context parallelism replaces it

    def __init__(self, channel_dim: int, num_heads: int, norm: str, num_latents: int, *, tile: int | None = None) -> None:
        super().__init__()
        head_dim = head_width(channel_dim, num_heads)
        if tile is not None and tile < 1:
            raise ValueError(f"tile: got {tile}; allowed: a number of tokens from 1 on, or none")
        self.num_heads, self.tile = num_heads, tile
        self.operations = "3 H M C" if tile is None else "4 H M C"  # its weights are computed twice
        self.token_proj, self.routing_proj = nn.Linear(channel_dim, channel_dim), nn.Linear(channel_dim, channel_dim)
        self.slice_proj = nn.Linear(head_dim, num_latents)
        self.temperature = nn.Parameter(torch.full((num_heads, 1, 1), FIRST_TEMPERATURE))
        self.slice_attention = SliceAttention(head_dim)
        self.out_proj = nn.Linear(channel_dim, channel_dim)
        init_linears(self)
        nn.init.orthogonal_(self.slice_proj.weight)

    def by_head(self, matrix: Tensor) -> Tensor:
        """[C, ...] -> [H, D, ...]"""
        return matrix.unflatten(0, (self.num_heads, -1))

    def logit_map(self) -> tuple[Tensor, Tensor]:
        """A [H M, C] and a [H M]: from tokens straight to the logits of their slices."""
        weight = self.slice_proj.weight @ self.by_head(self.routing_proj.weight) / self.temperature  # [H, M, C]
        bias = F.linear(self.by_head(self.routing_proj.bias), self.slice_proj.weight, self.slice_proj.bias)  # [H, M]
        return weight.flatten(0, 1), (bias / self.temperature[..., 0]).flatten()

    def slice_values(self, sums: Tensor) -> Tensor:
        """What each slice hands to its tokens, [B, H M, C], from the sums [B, H M, C + 1] over all tokens."""
        sums = self.sum_over_tokens(sums).unflatten(1, (self.num_heads, -1))  # [B, H, M, C + 1]
        share = 1 if self.tile is None else slice_means(sums[..., -1:].expand(*sums.shape[:-1], 2))  # mass / (mass + 1e-5)
        tokens = slice_means(sums) @ self.by_head(self.token_proj.weight).transpose(1, 2)  # [B, H, M, D]
        tokens = tokens + share * self.by_head(self.token_proj.bias)[:, None]
        mixed = self.slice_attention(tokens)  # [B, H, M, D]
        return (mixed @ self.by_head(self.out_proj.weight.T).to(mixed.dtype)).flatten(1, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.tile is not None or in_tiles(x, x.shape[:2].numel() * self.num_heads * self.slice_proj.out_features):
            return self.tiled(x, mask)
        x = zero_padding(x, mask)
        logits = F.linear(x, *self.logit_map()).unflatten(-1, (self.num_heads, -1))  # [B, N, H, M]
        weights = slice_softmax(logits).flatten(2)  # [B, N, H M]
        values = self.slice_values(slice_sums(weights, x, mask))  # [B, H M, C]
        return zero_padding(weights @ values.to(weights.dtype) + self.out_proj.bias, mask)

    def tiled(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """The same in tiles, on the CPU plain too: one pass over the tokens for the sums, one for the outputs."""
        weight, bias = self.logit_map()
        tiles = _Tiles(x, mask, self.num_heads, self.tile or max(1, TILE // (len(weight) * max(1, len(x)))))
        sums, weights = _TiledSums.apply(tiles, x, weight.to(tiles.dtype), bias.to(tiles.dtype), self.tile is None)
        values = self.slice_values(sums).to(tiles.dtype)  # [B, H M, C]
        return _TiledOutputs.apply(tiles, weights, values, self.out_proj.bias.to(tiles.dtype))


class _Tiles:
    """The tokens in tiles, their slice weights on demand, what the backward pass of the outputs leaves for that of the sums.

    All of it runs in FP32 or better, under autocast too. Whatever is as large as a tile's slice weights [B, T, H M] goes
    into buffers that each pass allocates once. Weights that are kept, [B N, H M], lie tile after tile.
    """

    def __init__(self, x: Tensor, mask: Tensor | None, num_heads: int, tile: int) -> None:
        self.weight: Tensor  # [H M, C] and
        self.bias: Tensor  # [H M] of the pass over the sums
        self.values: Tensor  # [B, H M, C] and
        self.grad_out: Tensor  # [B, N, C] of the pass over the outputs
        self.dtype = torch.promote_types(x.dtype, torch.float32)
        self.x, self.mask, self.num_heads = x.detach(), mask, num_heads
        self.spans = spans(x.shape[1], tile) or [slice(0, 0)]

    def buffers(self, count: int) -> list[Tensor]:
        rows = self.x[:, self.spans[0]].shape[:2].numel()
        return [self.x.new_empty(rows, len(self.weight), dtype=self.dtype) for _ in range(count)]

    def shaped(self, buffer: Tensor, span: slice, start: int = 0) -> Tensor:
        """A part of a buffer as [B, T, H M]; the last tile may be shorter."""
        shape = self.x[:, span].shape[:2]
        return buffer[start:start + shape.numel()].view(*shape, buffer.shape[1])

    def kept(self, weights: Tensor, span: slice) -> Tensor:
        return self.shaped(weights, span, len(self.x) * span.start)

    def by_head(self, weights: Tensor) -> Tensor:
        return weights.unflatten(-1, (self.num_heads, -1))  # [B, T, H, M]

    def mask_of(self, span: slice) -> Tensor | None:
        return None if self.mask is None else self.mask[:, span]

    def tokens(self, span: slice) -> Tensor:
        """x [B, T, C] of one tile, padding zeroed."""
        return zero_padding(self.x[:, span].to(self.dtype), self.mask_of(span))

    def compute(self, span: slice, logits: Tensor, weights: Tensor) -> Tensor:
        """Slice weights [B, T, H M] of a tile, written there; `logits` is a buffer."""
        logits = self.shaped(logits, span)
        torch.matmul(self.tokens(span), self.weight.T, out=logits).add_(self.bias)
        torch.softmax(self.by_head(logits), -1, out=self.by_head(weights))
        return weights

    def weights(self, span: slice, logits: Tensor, weights: Tensor, kept: Tensor | None) -> Tensor:
        """Slice weights [B, T, H M] of a tile: those kept, or computed in the second of two buffers."""
        return self.compute(span, logits, self.shaped(weights, span)) if kept is None else self.kept(kept, span)


class _TiledSums(torch.autograd.Function):
    """`slice_sums` [B, H M, C + 1] of all tokens, and the weights if they are to be kept.

    Its backward pass does that of `_TiledOutputs` for x, A, a as well.
    """

    @staticmethod
    def forward(ctx: Any, tiles: _Tiles, x: Tensor, weight: Tensor, bias: Tensor, keep: bool) -> tuple[Tensor, Tensor | None]:
        tiles.weight, tiles.bias = weight.detach(), bias.detach()
        logits, buffer = tiles.buffers(2)
        kept = x.new_empty(x.shape[:2].numel(), len(weight)) if keep else None
        sums = x.new_zeros((), dtype=tiles.dtype)
        with torch.autocast(x.device.type, enabled=False):
            for span in tiles.spans:
                weights = tiles.compute(span, logits, tiles.shaped(buffer, span) if kept is None else tiles.kept(kept, span))
                sums = sums + slice_sums(weights, tiles.tokens(span), tiles.mask_of(span))
        ctx.tiles = tiles
        ctx.save_for_backward(x, kept)  # x is read again below, so that a change of it in between is an error
        ctx.set_materialize_grads(False)
        if keep:
            ctx.mark_non_differentiable(kept)
        return sums, kept

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_sums: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        (x, kept), tiles = ctx.saved_tensors, ctx.tiles
        grad_x = torch.empty_like(x)
        grad_weight, grad_bias = torch.zeros_like(tiles.weight), torch.zeros_like(tiles.bias)
        buffers = tiles.buffers(3)
        with torch.autocast(grad_x.device.type, enabled=False):
            for span in tiles.spans:
                _tile_backward(tiles, span, buffers, kept, grad_sums, grad_x, grad_weight, grad_bias)
        return None, grad_x, grad_weight, grad_bias, None


def _tile_backward(tiles: _Tiles, span: slice, buffers: list[Tensor], kept: Tensor | None, grad_sums: Tensor,
                   grad_x: Tensor, grad_weight: Tensor, grad_bias: Tensor) -> None:
    """Fill one tile of the gradient of x, add to those of A and a."""
    tokens, mask = tiles.tokens(span), tiles.mask_of(span)
    weights = tiles.weights(span, buffers[0], buffers[1], kept)  # [B, T, H M]
    grads, grad_logits = tiles.shaped(buffers[0], span), tiles.shaped(buffers[2], span)
    torch.matmul(tiles.grad_out[:, span], tiles.values.transpose(1, 2), out=grads)
    grads.baddbmm_(zero_padding(F.pad(tokens, (0, 1), value=1), mask), grad_sums.transpose(1, 2))
    torch.ops.aten._softmax_backward_data.out(tiles.by_head(grads), tiles.by_head(weights), -1, tiles.dtype,
                                              grad_input=tiles.by_head(grad_logits))
    grad_x[:, span] = zero_padding((weights @ grad_sums[..., :-1]).baddbmm_(
        grad_logits, tiles.weight.expand(len(tokens), -1, -1)), mask)
    grad_weight += grad_logits.flatten(0, 1).T @ tokens.flatten(0, 1)
    grad_bias += grad_logits.sum((0, 1))


class _TiledOutputs(torch.autograd.Function):
    """out [B, N, C] = slice weights, kept or not, x values [B, H M, C] + bias [C]."""

    @staticmethod
    def forward(ctx: Any, tiles: _Tiles, kept: Tensor | None, values: Tensor, bias: Tensor) -> Tensor:
        ctx.tiles, tiles.values = tiles, values.detach()  # its graph would hold tiles in a cycle
        ctx.save_for_backward(kept)
        out = tiles.x.new_empty(*tiles.x.shape[:2], bias.shape[0], dtype=tiles.dtype)
        buffers = tiles.buffers(2)
        with torch.autocast(out.device.type, enabled=False):
            for span in tiles.spans:
                weights = tiles.weights(span, buffers[0], buffers[1], kept)
                out[:, span] = zero_padding((weights @ tiles.values).add_(bias), tiles.mask_of(span))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        tiles, (kept,) = ctx.tiles, ctx.saved_tensors
        tiles.grad_out, buffers = zero_padding(grad_out, tiles.mask), tiles.buffers(2)
        with torch.autocast(grad_out.device.type, enabled=False):
            grad_values = sum(tiles.weights(span, buffers[0], buffers[1], kept).transpose(1, 2) @ tiles.grad_out[:, span]
                              for span in tiles.spans)
        return None, None, grad_values, tiles.grad_out.sum((0, 1))
