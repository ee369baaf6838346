"""Performer: softmax attention estimated with positive orthogonal random features, FAVOR+ (arXiv 2009.14794).

    phi(x) = exp(W x' - |x'|^2 / 2 - s) + 1e-4,  x' = D^(-1/4) x,  W [M, D]: rows N(0, I), orthogonal in blocks of D
    y_n = phi(q_n)^T (sum_j phi(k_j) v_j^T) / (phi(q_n)^T sum_j phi(k_j))      [q | k | v] = W x + b,  out = W_out y + b_out

s is the largest entry of W x', a query's own and one for all real keys of a head. The heads share W, which is drawn again
every `redraw_interval` training passes and kept with the weights; the factor M^(-1/2) of phi cancels.

`as_flare_study`, the row of arXiv 2508.12594, does not estimate the softmax: the rows of W are independent of length 1, each
head has its own and none is drawn again; a key too is shifted by its own largest entry; 1e-6 is added to phi and to the
denominator.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from flarepp.kernels import (
    KernelAttention,
    RandomFeatures,
    by_head,
    kernel_sums,
    largest_of_head,
    largest_of_token,
    orthogonal_features,
    product,
    ratio,
)
from flarepp.layers import zero_padding

EPS, STUDY_EPS = 1e-4, 1e-6


def unit_features(num_heads: int, num_features: int, head_dim: int) -> Tensor:
    """W [H, M, D] of independent rows of length 1."""
    return F.normalize(torch.randn(num_heads, num_features, head_dim), dim=-1)


class Mixer(KernelAttention):
    """x [B, N, C] -> [B, N, C] with `num_features` M random features."""

    operations = "4 C^2 + 4 M C + H M"  # multiply-adds a token, forward

    def __init__(self, channel_dim: int, num_heads: int, norm: str, num_features: int, *,
                 redraw_interval: int | None = 1000, as_flare_study: bool = False) -> None:
        super().__init__(channel_dim, num_heads)
        self.as_flare_study = as_flare_study
        draw = partial(unit_features, num_heads) if as_flare_study else orthogonal_features
        self.random_features = RandomFeatures(partial(draw, num_features, self.head_dim),
                                              None if as_flare_study else redraw_interval)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        projection, eps = self.random_features().mT, STUDY_EPS if self.as_flare_study else EPS

        def features(x: Tensor, largest: Callable[[Tensor], Tensor]) -> Tensor:  # [B, H, N, M]
            x = self.head_dim**-0.25 * x
            scores = product(x, projection)
            return torch.exp(scores - x.square().sum(-1, keepdim=True) / 2 - largest(scores)) + eps

        largest_key = largest_of_token if self.as_flare_study else partial(largest_of_head, mask=mask)
        k = zero_padding(features(k, largest_key), by_head(mask))
        numerator, denominator = kernel_sums(features(q, largest_of_token), k, v)
        return numerator / (denominator + STUDY_EPS) if self.as_flare_study else ratio(numerator, denominator)
