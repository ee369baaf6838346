"""Norm attention: linear attention with a norm in the place of its denominator (Qin et al., arXiv 2210.10340, TransNormer).

    phi(x) = 1 + elu(x)        z_n = phi(q_n)^T sum_j phi(k_j) v_j^T per head        out = W_out (g * z / rms(z)) + b_out

[q | k | v] = W x + b; rms over the C channels of all heads, in the root 1e-6, gain g. In every layer, without the block
attention that TransNormer has in its first half and without its rotation of q and k.

`as_flare_study`, the row of arXiv 2508.12594: q, k, v = x + W x + b, phi(x) = x / (|x| + 1e-6), sums divided by the number
of tokens, the backbone's norm over the C channels.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from flarepp.kernels import KernelAttention, by_head, product
from flarepp.layers import make_norm, merge_heads, split_heads, zero_padding

EPS = 1e-6


class Mixer(KernelAttention):
    """x [B, N, C] -> [B, N, C]; rank D a head before the norm."""

    operations = "4 C^2 + 2 C D"  # multiply-adds a token, forward

    def __init__(self, channel_dim: int, num_heads: int, norm: str, *, as_flare_study: bool = False) -> None:
        super().__init__(channel_dim, num_heads)
        self.as_flare_study = as_flare_study
        self.mix_norm = make_norm(norm if as_flare_study else "rmsnorm", channel_dim)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        parts = super().project(x)
        return tuple(x + part for part in parts) if self.as_flare_study else parts

    def features(self, x: Tensor) -> Tensor:
        """phi(x), [B, H, N, D]"""
        return x / (x.norm(dim=-1, keepdim=True) + EPS) if self.as_flare_study else 1 + F.elu(x)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        k = zero_padding(self.features(k), by_head(mask))
        if self.as_flare_study:
            count = k.shape[2] if mask is None else mask.sum(1).clamp(min=1)[:, None, None, None]
            k = k / count
        z = product(self.features(q), product(k.mT, v))  # [B, H, N, D]
        return split_heads(self.mix_norm(merge_heads(z)), self.num_heads)
