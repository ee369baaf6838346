"""Transolver: Physics-Attention on irregular meshes (arXiv 2402.02366; FLARE++, Section 4).

    f = W_f x + b_f,  u = W_x x + b_x  per head        w_n = softmax_M((W_s u_n + b_s) / tau_h)        (weights of token n)
    t_m = sum_n w_nm f_n / (sum_n w_nm + 1e-5)        o = softmax_M(s q k^T) v,  q, k, v = W_q t, W_k t, W_v t
    y_n = sum_m w_nm o_m

W_s, W_q, W_k, W_v are shared by the heads; tau_h starts at 0.5 and is clamped to [0.1, 5]; out = W_out y + b_out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flarepp.layers import (SliceAttention, head_width, init_linears, merge_heads, slice_means, slice_softmax, slice_sums,
                            split_heads, zero_padding)

FIRST_TEMPERATURE, CLAMP = 0.5, (0.1, 5.0)


class Mixer(nn.Module):
    """x [B, N, C] -> [B, N, C] with `num_latents` M slices; the weights [B, H, N, M] are held in memory."""

    sum_over_tokens = staticmethod(lambda sums: sums)  # context parallelism replaces it

    def __init__(self, channel_dim: int, num_heads: int, norm: str, num_latents: int):
        super().__init__()
        head_dim = head_width(channel_dim, num_heads)
        self.num_heads = num_heads
        self.token_proj, self.routing_proj = nn.Linear(channel_dim, channel_dim), nn.Linear(channel_dim, channel_dim)
        self.slice_proj = nn.Linear(head_dim, num_latents)
        self.temperature = nn.Parameter(torch.full((num_heads, 1, 1), FIRST_TEMPERATURE))
        self.slice_attention = SliceAttention(head_dim)
        self.out_proj = nn.Linear(channel_dim, channel_dim)
        init_linears(self)
        nn.init.orthogonal_(self.slice_proj.weight)

    def slice_weights(self, x: Tensor) -> Tensor:
        """w [B, H, N, M]. The temperature divides u and a constant channel that carries the bias, not the M logits."""
        u = F.pad(split_heads(self.routing_proj(x), self.num_heads), (0, 1), value=1)  # [B, H, N, D + 1]
        weight = torch.cat([self.slice_proj.weight, self.slice_proj.bias[:, None]], 1)  # [M, D + 1]
        return slice_softmax(F.linear(u / self.temperature.clamp(*CLAMP), weight))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        heads_mask = None if mask is None else mask[:, None]  # [B, 1, N]
        x = zero_padding(x, mask)
        weights, f = self.slice_weights(x), split_heads(self.token_proj(x), self.num_heads)  # [B, H, N, M], [B, H, N, D]
        tokens = slice_means(self.sum_over_tokens(slice_sums(weights, f, heads_mask)))  # [B, H, M, D]
        y = weights @ self.slice_attention(tokens).to(weights.dtype)  # [B, H, N, D]
        return zero_padding(self.out_proj(merge_heads(y)), mask)
