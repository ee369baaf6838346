"""Transolver++: slices with a temperature for every token and Gumbel noise on their logits (arXiv 2502.02414).

    u = W_x x + b_x  per head        tau_n = max(0.01, GELU(W_2 GELU(W_1 u_n + b_1) + b_2) + bias_h)
    w_n = softmax_M((W_s u_n + b_s + g_n) / tau_n),  g = -log(-log(U + 1e-8) + 1e-8),  U uniform on [0, 1)
    t_m = sum_n w_nm u_n / (sum_n w_nm + 1e-5)        slice attention, deslicing and output as in `transolver`; exact GELU

The noise is drawn in training only. The public codes draw it in evaluation too, so that errors are random: `eval_noise`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flarepp.layers import head_width, init_linears, merge_heads, split_heads, zero_padding
from flarepp.slices import SliceAttention, rowwise, slice_means, slice_mix

FIRST_BIAS, LEAST_TEMPERATURE = 0.5, 0.01


def uniform_like(logits: Tensor) -> Tensor:
    """Fresh numbers on [0, 1) from the global generator, FP32 or better: in half precision 1e-8 is 0."""
    return torch.rand(logits.shape, dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)


class Mixer(nn.Module):
    """x [B, N, C] -> [B, N, C] with `num_latents` M slices; the weights [B, H, N, M] are held in memory."""

    operations = "2 C^2 + 4 M C + H M"  # multiply-adds a token, forward
    sum_over_tokens = staticmethod(lambda sums: sums)  # context parallelism replaces it
    uniform = staticmethod(uniform_like)

    def __init__(self, channel_dim: int, num_heads: int, norm: str, num_latents: int, *, eval_noise: bool = False) -> None:
        super().__init__()
        head_dim = head_width(channel_dim, num_heads)
        self.num_heads, self.eval_noise = num_heads, eval_noise
        self.routing_proj = nn.Linear(channel_dim, channel_dim)
        self.slice_proj = nn.Linear(head_dim, num_latents)
        self.temperature_proj = nn.Sequential(
            nn.Linear(head_dim, num_latents), nn.GELU(), nn.Linear(num_latents, 1), nn.GELU())
        self.bias = nn.Parameter(torch.full((num_heads, 1, 1), FIRST_BIAS))
        self.slice_attention = SliceAttention(head_dim)
        self.out_proj = nn.Linear(channel_dim, channel_dim)
        init_linears(self)
        nn.init.orthogonal_(self.slice_proj.weight)

    def temperature(self, u: Tensor) -> Tensor:
        """tau [B, H, N, 1] of u [B, H, N, D]."""
        layers = self.temperature_proj
        own = rowwise(layers, self.slice_proj.out_features, u.transpose(1, 2), layers.parameters())  # [B, N, H, 1]
        return (own.transpose(1, 2) + self.bias).clamp_min(LEAST_TEMPERATURE)

    def noise(self, u: Tensor) -> Tensor | None:
        """Numbers on [0, 1) [B, H, N, M] for what has the logits' shape, in training."""
        logits = u[..., :1].expand(*u.shape[:3], self.slice_proj.out_features)
        return self.uniform(logits) if self.training or self.eval_noise else None

    def mix(self, sums: Tensor) -> Tensor:
        """What each slice hands to its tokens, [B, H, M, D], from the sums [B, H, M, D + 1]."""
        return self.slice_attention(slice_means(self.sum_over_tokens(sums)))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        tokens = self.routing_proj(zero_padding(x, mask))  # [B, N, C]
        u = split_heads(tokens, self.num_heads)  # [B, H, N, D]
        matrix, bias = (t.expand(self.num_heads, *t.shape) for t in (self.slice_proj.weight, self.slice_proj.bias))
        y = slice_mix(tokens, matrix, bias, mask, self.mix, self.temperature(u), self.noise(u))  # [B, H, N, D]
        return zero_padding(self.out_proj(merge_heads(y)), mask)
