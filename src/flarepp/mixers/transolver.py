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

from flarepp.layers import head_width, init_linears, merge_heads, zero_padding
from flarepp.slices import SliceAttention, slice_means, slice_mix

FIRST_TEMPERATURE, CLAMP = 0.5, (0.1, 5.0)


class Mixer(nn.Module):
    """x [B, N, C] -> [B, N, C] with `num_latents` M slices; the weights [B, H, N, M] are held in memory."""

    operations = "3 C^2 + 3 M C"  # multiply-adds a token, forward
    sum_over_tokens = staticmethod(lambda sums: sums)  # context parallelism replaces it

    def __init__(self, channel_dim: int, num_heads: int, norm: str, num_latents: int) -> None:
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

    def logit_map(self) -> tuple[Tensor, Tensor]:
        """A [H, M, D] and a [H, M]: from W_x x, without b_x, to the logits of its slices."""
        temperature = self.temperature.clamp(*CLAMP)  # [H, 1, 1]
        bias = self.routing_proj.bias.unflatten(0, (self.num_heads, -1))  # [H, D]
        shift = F.linear(bias, self.slice_proj.weight, self.slice_proj.bias)
        return self.slice_proj.weight / temperature, shift / temperature[..., 0]

    def mix(self, sums: Tensor) -> Tensor:
        """What each slice hands to its tokens, [B, H, M, D], from the sums [B, H, M, D + 1] of W_f x, without b_f."""
        values, mass = self.sum_over_tokens(sums).split([sums.shape[-1] - 1, 1], -1)
        values = values + mass * self.token_proj.bias.unflatten(0, (self.num_heads, 1, -1))
        return self.slice_attention(slice_means(torch.cat([values, mass], -1)))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        weight = torch.cat([self.routing_proj.weight, self.token_proj.weight])  # [2 C, C]
        tokens = F.linear(zero_padding(x, mask), weight)
        y = slice_mix(tokens, *self.logit_map(), mask, self.mix)  # [B, H, N, D]
        return zero_padding(self.out_proj(merge_heads(y)), mask)
