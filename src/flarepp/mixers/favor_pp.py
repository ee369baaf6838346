"""FAVOR++: the optimal positive random features of softmax attention (Likhosherstov et al., arXiv 2205.15317).

    phi(x) = exp(A |w|^2 + sqrt(1 - 4 A) w^T x' - |x'|^2 / 2)  for each row w of W [M, D],  x' = D^(-1/4) x
    y_n = phi(q_n)^T (sum_j phi(k_j) v_j^T) / (phi(q_n)^T sum_j phi(k_j))      [q | k | v] = W x + b,  out = W_out y + b_out
    A = (1 - u) / 8,  u = (D + 2 f + sqrt((D + 2 f)^2 + 8 D f)) / (2 D),  f = mean_ij |q'_i + k'_j|^2

A minimises the variance of phi(q)^T phi(k); A = 0 is FAVOR+. It is computed for every sample and head from its real tokens,
without a gradient. W as in `performer`; the factor M^(-1/2) (1 - 4 A)^(D/4) of phi cancels, as does what is subtracted
before exp, one number a query and one a head of keys.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from flarepp.kernels import (
    KernelAttention,
    RandomFeatures,
    by_head,
    exponential_features,
    kernel_sums,
    orthogonal_features,
    product,
    ratio,
)
from flarepp.layers import zero_padding


def token_mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over the real tokens, [B, H, N, D] -> [B, H, 1, D]; 0 without any."""
    if mask is None:
        return x.mean(-2, keepdim=True)
    return zero_padding(x, by_head(mask)).sum(-2, keepdim=True) / mask.sum(1).clamp(min=1)[:, None, None, None]


@torch.no_grad()
def optimal_coefficient(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """A [B, H, 1, 1] of scaled queries and keys [B, H, N, D]."""
    head_dim = q.shape[-1]
    square = sum(token_mean(x.square().sum(-1, keepdim=True), mask) for x in (q, k))  # [B, H, 1, 1]
    f = square + 2 * (token_mean(q, mask) * token_mean(k, mask)).sum(-1, keepdim=True)
    u = (head_dim + 2 * f + torch.sqrt((head_dim + 2 * f)**2 + 8 * head_dim * f)) / (2 * head_dim)
    return (1 - u) / 8


def log_features(x: Tensor, projection: Tensor, coefficient: Tensor) -> Tensor:
    """log phi of scaled queries or keys, [B, H, N, D] -> [B, H, N, M]."""
    scores = torch.sqrt(1 - 4 * coefficient) * product(x, projection.mT)
    return coefficient * projection.square().sum(-1) + scores - x.square().sum(-1, keepdim=True) / 2


class Mixer(KernelAttention):
    """x [B, N, C] -> [B, N, C] with `num_features` M random features."""

    operations = "4 C^2 + 4 M C + H M"  # multiply-adds a token, forward

    def __init__(self, channel_dim: int, num_heads: int, norm: str, num_features: int, *,
                 redraw_interval: int | None = 1000) -> None:
        super().__init__(channel_dim, num_heads)
        self.random_features = RandomFeatures(partial(orthogonal_features, num_features, self.head_dim), redraw_interval)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        q, k = (self.head_dim**-0.25 * x for x in (q, k))
        coefficient, projection = optimal_coefficient(q, k, mask), self.random_features()
        logs = [log_features(x, projection, coefficient) for x in (q, k)]
        q, k = exponential_features(logs[0], logs[1], mask)  # [B, H, N, M]
        return ratio(*kernel_sums(q, k, v))
