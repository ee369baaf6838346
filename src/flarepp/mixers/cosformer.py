"""cosFormer: linear attention whose weights decay with distance as a cosine (Qin et al., arXiv 2202.08791).

    y_i = sum_j s_ij v_j / max(sum_j s_ij, 1e-6)        s_ij = relu(q_i)^T relu(k_j) cos(pi/2 (i - j) / L)
    cos(a_i - a_j) = cos a_i cos a_j + sin a_i sin a_j,  a_i = pi i / (2 L),  i = 1 ... L: features of width 2 D

[q | k | v] = W x + b, out = W_out y + b_out. L is each sample's own number of real tokens and i counts only those: neither
more padding nor the other samples of a batch change a weight, and none is negative. Distance is along the sequence, also for
images.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flarepp.kernels import KernelAttention, by_head, kernel_sums
from flarepp.layers import zero_padding

EPS = 1e-6


def angles(x: Tensor, mask: Tensor | None) -> Tensor:
    """a_i [B or 1, 1, N, 1] of tokens x [B, H, N, D]."""
    mask = torch.ones_like(x[:1, 0, :, 0], dtype=torch.bool) if mask is None else mask  # [B or 1, N]
    rank = mask.cumsum(1).to(x.dtype)
    return (math.pi / 2 * rank / rank[:, -1:].clamp(min=1))[:, None, :, None]


class Mixer(KernelAttention):
    """x [B, N, C] -> [B, N, C]; rank 2 D a head."""

    operations = "4 C^2 + 4 C D + 2 C"  # multiply-adds a token, forward

    def __init__(self, channel_dim: int, num_heads: int, norm: str) -> None:
        super().__init__(channel_dim, num_heads)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        angle = angles(q, mask)
        cos, sin = torch.cos(angle), torch.sin(angle)
        q, k = torch.relu(q), zero_padding(torch.relu(k), by_head(mask))
        q, k = (torch.cat([x * cos, x * sin], -1) for x in (q, k))  # [B, H, N, 2 D]
        numerator, denominator = kernel_sums(q, k, v)
        return numerator / denominator.clamp(min=EPS)
