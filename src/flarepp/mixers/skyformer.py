"""Skyformer: attention with a Gaussian kernel, not normalised, through sampled landmarks (Chen et al., arXiv 2111.00035).

    y = G(q', L) (G(L, L) + 0.1 I)^(-1) G(L, k') v        G_ij = exp(-|a_i - b_j|^2 / 2),  q' = D^(-1/4) q,  k' = D^(-1/4) k
    [q | k | v] = W x + b,  out = W_out y + b_out

L: M landmarks a head, half of them from q' and half from k', drawn from the real tokens with replacement, for each sample
and alike for its heads, anew in every training pass and at fixed relative positions in evaluation. The inverse takes six
steps of `kernels.iterative_inverse` after the matrix is divided from both sides by the roots of its row sums.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flarepp.attention import attend_with_lse
from flarepp.kernels import KernelAttention, iterative_inverse, product, real_tokens

GAMMA = 0.1


def half_square(x: Tensor) -> Tensor:
    """|x|^2 / 2 of vectors [..., D], [..., 1]."""
    return x.square().sum(-1, keepdim=True) / 2


def gaussian_sum(a: Tensor, b: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """G(a, b) v, fused: sum_j exp(a_i b_j - |b_j|^2 / 2) v_j is attention times its own exp(lse).

    a [B, H, M, D], b and v [B, H, N, D], mask [B, N] -> [B, H, M, D]. One more channel, 1 in a, carries -|b|^2 / 2.
    """
    q, k = F.pad(a, (0, 1), value=1.0), torch.cat([b, -half_square(b)], -1)
    out, lse = attend_with_lse(q, k, F.pad(v, (0, 1)), scale=1.0, key_mask=mask)
    return out[..., :-1] * torch.exp(lse[..., None] - half_square(a))


def kernel_matrix(a: Tensor) -> Tensor:
    """G(a, a), [B, H, M, D] -> [B, H, M, M]."""
    half = half_square(a)
    return torch.exp(product(a, a.mT) - half - half.mT)


class Mixer(KernelAttention):
    """x [B, N, C] -> [B, N, C] with `num_landmarks` M landmarks; rank M a head."""

    operations = "4 C^2 + 4 M C + 4 H M"  # multiply-adds a token, forward

    def __init__(self, channel_dim: int, num_heads: int, norm: str, num_landmarks: int) -> None:
        super().__init__(channel_dim, num_heads)
        self.places: Tensor
        self.register_buffer("places", torch.rand(num_landmarks))  # in evaluation, as shares of the sequence

    def landmarks(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """L [B, H, M, D] of scaled queries and keys [B, H, N, D]."""
        positions, count = real_tokens(q.transpose(1, 2), mask)  # [B, N], [B, 1]
        places = self.places.expand(len(q), -1)
        places = torch.rand_like(places) if self.training else places
        ranks = torch.minimum((places * count).long(), (count - 1).clamp(min=0))  # [B, M]
        chosen = positions.gather(1, ranks)[:, None, :, None].expand(-1, self.num_heads, -1, self.head_dim)  # [B, H, M, D]
        half = (chosen.shape[2] + 1) // 2
        return torch.cat([q.gather(2, chosen[:, :, :half]), k.gather(2, chosen[:, :, half:])], 2)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        q, k = (self.head_dim**-0.25 * x for x in (q, k))
        points = self.landmarks(q, k, mask)
        gram = kernel_matrix(points)
        gram = gram + GAMMA * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        root = gram.sum(-1, keepdim=True).rsqrt()  # [B, H, M, 1]
        inverse = iterative_inverse(root * gram * root.mT)
        z = root * product(inverse, root * gaussian_sum(points, k, v, mask))  # [B, H, M, D]
        return gaussian_sum(q, points, z)
