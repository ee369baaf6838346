"""Linear attention: a kernel of positive features replaces the softmax (Katharopoulos et al., arXiv 2006.16236).

    phi(x) = elu(x) + 1        y_n = phi(q_n)^T (sum_j phi(k_j) v_j^T) / (phi(q_n)^T sum_j phi(k_j) + 1e-6)
    [q | k | v] = W x + b        out = W_out y + b_out

The FLARE study (arXiv 2508.12594) divides phi(q) and phi(k) by their length + 1e-6 (`unit_qk`) and takes phi(x) = x
(`feature_map` "identity") for ListOps, Image and Retrieval; the denominator may then have any sign.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from flarepp.errors import unknown
from flarepp.kernels import KernelAttention, by_head, kernel_sums
from flarepp.layers import zero_padding

EPS = 1e-6
FEATURE_MAPS = {"elu": lambda x: F.elu(x) + 1, "identity": lambda x: x}


class Mixer(KernelAttention):
    """x [B, N, C] -> [B, N, C]; rank D a head."""

    operations = "4 C^2 + 2 C D + C"  # multiply-adds a token, forward

    def __init__(self, channel_dim: int, num_heads: int, norm: str, *, feature_map: str = "elu", unit_qk: bool = False) -> None:
        super().__init__(channel_dim, num_heads)
        if feature_map not in FEATURE_MAPS:
            raise ValueError(unknown("feature_map", feature_map, FEATURE_MAPS))
        self.feature_map, self.unit_qk = feature_map, unit_qk

    def features(self, x: Tensor) -> Tensor:
        """phi(x), [B, H, N, D]"""
        x = FEATURE_MAPS[self.feature_map](x)
        return x / (x.norm(dim=-1, keepdim=True) + EPS) if self.unit_qk else x

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        k = zero_padding(self.features(k), by_head(mask))
        numerator, denominator = kernel_sums(self.features(q), k, v)
        return numerator / (denominator + EPS)
