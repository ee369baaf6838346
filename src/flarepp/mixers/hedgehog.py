"""Hedgehog: linear attention with learned exponential features (Zhang et al., arXiv 2402.04347).

    phi(x) = [exp(W x + b), exp(-W x - b)],  W and b for each head, for queries and keys apart
    y_n = phi(q_n)^T (sum_j phi(k_j) v_j^T) / (phi(q_n)^T sum_j phi(k_j))      [q | k | v] = W x + b,  out = W_out y + b_out

W starts as the identity, b as 0. Of the forms in use this is the paper's, exp without a softmax over the features; what is
subtracted before exp, one number a query and one a head of keys, cancels in y. Trained from scratch, nothing is distilled;
q and k are not scaled.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flarepp.kernels import KernelAttention, exponential_features, kernel_sums, product, ratio


class HeadMap(nn.Module):
    """[W x + b, -W x - b] a head, [B, H, N, D] -> [B, H, N, 2 D]."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(head_dim).repeat(num_heads, 1, 1))
        self.bias = nn.Parameter(torch.zeros(num_heads, 1, head_dim))

    def forward(self, x: Tensor) -> Tensor:
        x = product(x, self.weight.mT) + self.bias
        return torch.cat([x, -x], -1)


class Mixer(KernelAttention):
    """x [B, N, C] -> [B, N, C]; rank 2 D a head."""

    operations = "4 C^2 + 6 C D + 2 C"  # multiply-adds a token, forward

    def __init__(self, channel_dim: int, num_heads: int, norm: str) -> None:
        super().__init__(channel_dim, num_heads)
        self.query_map = HeadMap(num_heads, self.head_dim)
        self.key_map = HeadMap(num_heads, self.head_dim)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        q, k = exponential_features(self.query_map(q), self.key_map(k), mask)  # [B, H, N, 2 D]
        return ratio(*kernel_sums(q, k, v))
