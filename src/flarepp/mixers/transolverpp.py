"""Transolver++: slices with a temperature for every token and Gumbel noise on their logits (arXiv 2502.02414).

    u = W_x x + b_x  per head        tau_n = max(0.01, GELU(W_2 GELU(W_1 u_n + b_1) + b_2) + bias_h)
    w_n = softmax_M((W_s u_n + b_s + g_n) / tau_n),  g = -log(-log(U + 1e-8) + 1e-8),  U uniform on [0, 1)
    t_m = sum_n w_nm u_n / (sum_n w_nm + 1e-5)        slice attention, deslicing and output as in `transolver`; exact GELU

The noise is drawn in training only. The public codes draw it in evaluation too, which makes test errors random: `eval_noise`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flarepp.layers import (SliceAttention, head_width, init_linears, merge_heads, slice_means, slice_softmax, slice_sums,
                            split_heads, zero_padding)

FIRST_BIAS, LEAST_TEMPERATURE, NOISE_EPS = 0.5, 0.01, 1e-8


def uniform_like(logits: Tensor) -> Tensor:
    """Fresh numbers on [0, 1) from the global generator, FP32 or better: in half precision 1e-8 is 0."""
    return torch.rand(logits.shape, dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)


class Mixer(nn.Module):
    """x [B, N, C] -> [B, N, C] with `num_latents` M slices; the weights [B, H, N, M] are held in memory."""

    sum_over_tokens = staticmethod(lambda sums: sums)  # context parallelism replaces it
    uniform = staticmethod(uniform_like)

    def __init__(self, channel_dim: int, num_heads: int, norm: str, num_latents: int, *, eval_noise: bool = False):
        super().__init__()
        head_dim = head_width(channel_dim, num_heads)
        self.num_heads, self.eval_noise = num_heads, eval_noise
        self.routing_proj = nn.Linear(channel_dim, channel_dim)
        self.slice_proj = nn.Linear(head_dim, num_latents)
        self.temperature_proj = nn.Sequential(nn.Linear(head_dim, num_latents), nn.GELU(), nn.Linear(num_latents, 1), nn.GELU())
        self.bias = nn.Parameter(torch.full((num_heads, 1, 1), FIRST_BIAS))
        self.slice_attention = SliceAttention(head_dim)
        self.out_proj = nn.Linear(channel_dim, channel_dim)
        init_linears(self)
        nn.init.orthogonal_(self.slice_proj.weight)

    def slice_weights(self, u: Tensor) -> Tensor:
        """w [B, H, N, M] of u [B, H, N, D]."""
        logits = self.slice_proj(u)  # [B, H, N, M]
        if self.training or self.eval_noise:
            logits = logits - self.uniform(logits).add_(NOISE_EPS).log_().neg_().add_(NOISE_EPS).log_()
        temperature = (self.temperature_proj(u) + self.bias).clamp_min(LEAST_TEMPERATURE)  # [B, H, N, 1]
        return slice_softmax(logits / temperature)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        heads_mask = None if mask is None else mask[:, None]  # [B, 1, N]
        u = split_heads(self.routing_proj(zero_padding(x, mask)), self.num_heads)  # [B, H, N, D]
        weights = self.slice_weights(u)  # [B, H, N, M]
        tokens = slice_means(self.sum_over_tokens(slice_sums(weights, u, heads_mask)))  # [B, H, M, D]
        y = weights @ self.slice_attention(tokens).to(weights.dtype)  # [B, H, N, D]
        return zero_padding(self.out_proj(merge_heads(y)), mask)
