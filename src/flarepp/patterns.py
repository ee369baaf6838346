"""What mixers with a pattern of attention share: blocks of tokens, attention among allowed pairs, learned positions.

    out_i = softmax_{j allowed for i}(s q_i k_j) v_j        lse_i = log sum_{j allowed for i} exp(s q_i k_j)

Tokens are cut into blocks of w places, the last of which may hang over the end of the sequence; blocks stand in the batch of
one fused call. B batch, H heads, N tokens, D head width, n blocks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from flarepp.attention import KERNELS, kernel_for, prepared


def to_blocks(x: Tensor, size: int) -> Tensor:
    """[..., N, D] -> [..., n, size, D], zeros (False) behind the last token."""
    over = -x.shape[-2] % size
    return (F.pad(x, (0, 0, 0, over)) if over else x).unflatten(-2, (-1, size))


def real_places(x: Tensor, mask: Tensor | None) -> Tensor:
    """Which of the tokens x [B, N, C] are real, [B, N] bool; without a mask all, [1, N]."""
    return torch.ones(1, x.shape[1], dtype=torch.bool, device=x.device) if mask is None else mask


def real_in_blocks(x: Tensor, mask: Tensor | None, size: int) -> Tensor | None:
    """Which places of the blocks hold real tokens, [B, n, size] bool; None where all of them do."""
    if mask is None and x.shape[1] % size == 0:
        return None
    return to_blocks(real_places(x, mask).expand(len(x), -1)[..., None], size)[..., 0]


def fold(blocks: Tensor) -> Tensor:
    """[B, H, n, w, ...] -> [B n, H, w, ...]"""
    return blocks.transpose(1, 2).flatten(0, 1)


def fold_mask(real: Tensor | None) -> Tensor | None:
    """[B, n, w] -> [B n, w]"""
    return None if real is None else real.flatten(0, 1)


def unfold(x: Tensor, batch: int, num_tokens: int) -> Tensor:
    """[B n, H, w, ...] -> [B, H, N, ...], without what hangs over."""
    return x.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3)[:, :, :num_tokens]


# --- attention among allowed pairs


class _Allowed(torch.autograd.Function):
    """(out, lse) of one fused kernel with an additive mask of pairs, differentiable in both.

    As in `flarepp.attention` a channel carries the gradient g of lse: 0 in v, -g in out and 1 in the gradient of out.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
        ctx.kernel, ctx.scale = KERNELS[kernel_for(q.device.type, q.dtype, q.shape[-1], True)], scale
        out, lse, ctx.extra = ctx.kernel[0](q, k, v, bias, scale)
        ctx.save_for_backward(q, k, v, bias, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_out is None and grad_lse is None:
            return (None,) * 5
        q, k, v, bias, out, lse = ctx.saved_tensors
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out.contiguous()
        width = q.shape[-1]
        if grad_lse is not None:
            q, k, v, out, grad_out = (F.pad(t, (0, 8 - width % 8)) for t in (q, k, v, out, grad_out))
            out[..., width], grad_out[..., width] = -grad_lse.to(out.dtype), 1
        grads = ctx.kernel[1](grad_out, q, k, v, bias, out, lse, ctx.extra, ctx.scale)
        return *(grad[..., :width] for grad in grads), None, None


def attend_where(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """Fused attention among pairs: q [B, H, M, D], k and v [B, H, N, D], allowed bool, broadcastable to [B, H, M, N].

    Returns out [B, H, M, D] and lse [B, H, M] in FP32 or better; a query without an allowed key has out = 0, lse = -inf.
    """
    width = q.shape[-1]
    q, k, v = prepared(q, k, v, None)
    empty = ~allowed.any(-1)  # [B, H, M], or what is broadcast to it
    bias = torch.zeros(allowed.shape, dtype=q.dtype, device=q.device)
    bias = bias.masked_fill(~(allowed | empty[..., None]), -math.inf)
    out, lse = _Allowed.apply(q, k, v, bias, scale)
    out = out if out.shape[-1] == width else out[..., :width]
    return out.masked_fill(empty[..., None], 0), lse.masked_fill(empty, -math.inf)


# --- what is learned or drawn for positions


def check_seq_len(seq_len: int | None) -> int:
    """The number of positions that a mixer with learned positions has; ValueError without one."""
    if seq_len is None or seq_len < 1:
        raise ValueError(f"seq_len: got {seq_len}; a mixer with weights for positions needs the most tokens it will see")
    return seq_len


def check_fits(num_tokens: int, seq_len: int) -> None:
    """ValueError for more tokens than there are learned positions."""
    if num_tokens > seq_len:
        raise ValueError(f"{num_tokens} tokens; this mixer has learned weights for seq_len {seq_len} positions")


def check_positive(**sizes: int) -> None:
    """ValueError that names the size which is below 1."""
    for key, value in sizes.items():
        if value < 1:
            raise ValueError(f"{key}: got {value}; allowed: whole numbers from 1 on")


def new_seed() -> Tensor:
    """A seed from the global generator, for a buffer: what is drawn from it stays the same in a checkpoint."""
    return torch.randint(2**31 - 1, ())


def generator_of(seed: Tensor) -> torch.Generator:
    """A CPU generator at the start of what `seed` draws."""
    return torch.Generator().manual_seed(int(seed))
