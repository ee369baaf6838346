"""Kernel attention: what the mixers share that put a kernel of features, or a kernel matrix, in the place of the softmax.

    y_n = phi(q_n)^T (sum_j phi(k_j) v_j^T) / (phi(q_n)^T sum_j phi(k_j))        (Katharopoulos et al., arXiv 2006.16236)

The sum over the tokens j comes first, so that work is linear in N; padding has phi(k_j) = 0. All of it runs in FP32 or
better, under autocast too. Besides: orthogonal random features (Choromanski et al., arXiv 2009.14794), the iterative inverse
of the Nystrom mixers (Xiong et al., arXiv 2102.03902).
B batch, H heads, N tokens, D head width, F features a head, M random features or landmarks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from flarepp.layers import head_width, init_linears, merge_heads, split_heads, widened, zero_padding

INVERSE_STEPS = 6


class KernelAttention(nn.Module):
    """Projections around `mix`, which each mixer defines: x [B, N, C] -> [B, N, C]."""

    def __init__(self, channel_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_width(channel_dim, num_heads)
        self.qkv_proj = nn.Linear(channel_dim, 3 * channel_dim)
        self.out_proj = nn.Linear(channel_dim, channel_dim)
        init_linears(self)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k, v [B, N, C] each."""
        return self.qkv_proj(x).chunk(3, dim=-1)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """y [B, H, N, D] of q, k, v [B, H, N, D] in FP32 or better; those of padding hold anything finite."""
        raise NotImplementedError

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        parts = self.project(zero_padding(x, mask))
        q, k, v = (split_heads(widened(part), self.num_heads) for part in parts)  # [B, H, N, D]
        with torch.autocast(x.device.type, enabled=False):
            y = self.mix(q, k, v, mask)  # [B, H, N, D]
        return zero_padding(self.out_proj(merge_heads(y).to(parts[2].dtype)), mask)


# --- sums over the tokens


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in their own precision, forward and backward, wherever autocast is on."""
    return _Product.apply(a, b)


class _Product(torch.autograd.Function):
    """Plain products, though their forward pass has autocast off, run in half precision if the backward pass has it on."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        with torch.autocast(a.device.type, enabled=False):
            return a @ b

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        with torch.autocast(grad.device.type, enabled=False):
            return ((grad @ b.mT).sum_to_size(a.shape) if ctx.needs_input_grad[0] else None,
                    (a.mT @ grad).sum_to_size(b.shape) if ctx.needs_input_grad[1] else None)


def by_head(mask: Tensor | None) -> Tensor | None:
    """[B, N] -> [B, 1, N]"""
    return None if mask is None else mask[:, None]


def kernel_sums(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Numerator [B, H, N, D] and denominator [B, H, N, 1] of the formula above, for features q, k [B, H, N, F]."""
    return product(q, product(k.mT, v)), product(q, k.sum(-2)[..., None])


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Their quotient, and the numerator where the denominator is 0: the features of a sample without real tokens are 0."""
    return numerator / torch.where(denominator == 0, 1, denominator)


def largest_of_token(logits: Tensor) -> Tensor:
    """The shift that keeps exp of a query's logits [B, H, N, F] in range, [B, H, N, 1]; the quotient does not see it."""
    return logits.detach().amax(-1, keepdim=True)


def largest_of_head(logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """The same for keys [B, H, N, F]: one for all real tokens of a head, [B, H, 1, 1]. One a token would weigh the keys."""
    peak = logits.detach()
    peak = (peak if mask is None else peak.masked_fill(~mask[:, None, :, None], -math.inf)).amax((-2, -1), keepdim=True)
    return torch.where(peak == -math.inf, 0, peak)


def exponential_features(q: Tensor, k: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """exp of the logits q, k [B, H, N, F], shifted so that the largest feature is 1; those of padded keys are 0."""
    k = k if mask is None else k.masked_fill(~mask[:, None, :, None], -math.inf)
    return torch.exp(q - largest_of_token(q)), torch.exp(k - largest_of_head(k))


# --- random features


def orthogonal_features(num_features: int, head_dim: int) -> Tensor:
    """W [M, D] on the CPU, each row N(0, I), those of a block of D orthogonal (arXiv 2009.14794).

    QR with its signs corrected: without that the rotation is not uniform and the estimator is biased.
    """
    blocks = -(-num_features // head_dim)
    rotations, triangles = torch.linalg.qr(torch.randn(blocks, head_dim, head_dim))
    rotations = rotations * triangles.diagonal(dim1=-2, dim2=-1).sign()[:, None]
    lengths = torch.randn(num_features, head_dim).norm(dim=-1, keepdim=True)
    return rotations.flatten(0, 1)[:num_features] * lengths


class RandomFeatures(nn.Module):
    """Random features that `draw` makes, kept with the weights; every `interval` training passes they are drawn again."""

    def __init__(self, draw: Callable[[], Tensor], interval: int | None) -> None:
        super().__init__()
        if interval is not None and interval < 1:
            raise ValueError(f"redraw_interval: got {interval}; allowed: a number of training passes from 1 on, or none")
        self.draw, self.interval, self.passes = draw, interval, 0
        self.projection: Tensor
        self.register_buffer("projection", draw())

    def forward(self) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self.passes += 1
            if self.interval is not None and self.passes % self.interval == 0:
                self.projection = self.draw().to(self.projection)  # a new tensor: an earlier pass may still need the old one
        return self.projection

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.passes)  # on the CPU, so that no pass waits for a device

    def set_extra_state(self, state: Tensor) -> None:
        self.passes = int(state)


# --- landmarks


def real_tokens(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Positions of tokens x [B, N, ...], real ones first and otherwise in order, [B, N]; number of real ones [B, 1]."""
    batch, num_tokens = x.shape[:2]
    if mask is None:
        positions = torch.arange(num_tokens, device=x.device).expand(batch, -1)
        return positions, torch.full((batch, 1), num_tokens, device=x.device)
    return torch.argsort((~mask).byte(), dim=1, stable=True), mask.sum(1, keepdim=True)


def gather_tokens(x: Tensor, positions: Tensor) -> Tensor:
    """x [B, N, C] at positions [B, M]: [B, M, C]"""
    return x.gather(1, positions[..., None].expand(-1, -1, x.shape[-1]))


def iterative_inverse(a: Tensor, steps: int = INVERSE_STEPS) -> Tensor:
    """Approximate inverse of matrices a [..., M, M], in their dtype: third order, each from a start of its own.

    Z <- Z (13 I - AZ (15 I - AZ (7 I - AZ))) / 4  from  Z = A^T / (|A|_1 |A|_inf). A row and column of zeros stays zero. The
    public codes divide by one scalar of the whole batch instead, by which samples see each other.
    """
    size = a.abs().sum(-2).amax(-1) * a.abs().sum(-1).amax(-1)  # [...]
    z = ratio(a.mT, size[..., None, None])
    one = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    for _ in range(steps):
        az = product(a, z)
        z = product(z, 13 * one - product(az, 15 * one - product(az, 7 * one - az))) / 4
    return z
