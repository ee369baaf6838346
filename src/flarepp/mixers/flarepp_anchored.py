"""FLARE++ anchored: fixed latent queries plus a gated dynamic part (a later public variant by the authors of arXiv 2608.11519).

    k0 = v0 = norm0(W_0 x + b_0)        Q_dyn = softmax_N(s norm(Q~) k0^T) v0        Q = norm0(Q_fixed) + sigmoid(g_h) Q_dyn
    k = norm(W_k x + b_k),  v = W_v x + b_v        z = softmax_N(s Q k^T) v        y = softmax_M(s k Q^T) z

norm0 has no affine part; g is one gate logit a head, initially 0.25; W_0, W_k, W_v start at the identity plus N(0, 0.02^2).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flarepp.attention import attend
from flarepp.layers import (
    INIT_STD,
    head_width,
    init_linears,
    latent_tokens,
    make_norm,
    merge_heads,
    split_heads,
    zero_padding,
)

GATE_LOGIT = 0.25


class Mixer(nn.Module):
    """x [B, N, C] -> [B, N, C] with `num_latents` M latents."""

    operations = "4 C^2 + 6 M C"
    encode = staticmethod(attend)  # context parallelism replaces it

    def __init__(self, channel_dim: int, num_heads: int, norm: str, num_latents: int) -> None:
        super().__init__()
        head_dim = head_width(channel_dim, num_heads)
        self.num_heads, self.scale = num_heads, head_dim**-0.5
        self.seeds = latent_tokens(num_heads, num_latents, head_dim)
        self.latents = latent_tokens(num_heads, num_latents, head_dim)
        self.gate_logit = nn.Parameter(torch.full((num_heads,), GATE_LOGIT))
        self.routing_proj = nn.Linear(channel_dim, channel_dim)
        self.key_proj, self.value_proj = nn.Linear(channel_dim, channel_dim), nn.Linear(channel_dim, channel_dim)
        self.out_proj = nn.Linear(channel_dim, channel_dim)
        self.seed_norm, self.key_norm = make_norm(norm, head_dim), make_norm(norm, head_dim)
        self.plain_norm = make_norm(norm, head_dim, affine=False)
        init_linears(self)
        for projection in (self.routing_proj, self.key_proj, self.value_proj):
            nn.init.trunc_normal_(projection.weight, std=INIT_STD, a=-2, b=2)
            with torch.no_grad():
                projection.weight += torch.eye(channel_dim)

    def routing_queries(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Q [B, H, M, D] of padded-with-zeros tokens x [B, N, C]; the gated sum runs in FP32 or better."""
        routing = split_heads(self.routing_proj(x), self.num_heads, self.plain_norm)  # [B, H, N, D]
        seeds = self.seed_norm(self.seeds)[None].to(routing.dtype)  # [1, H, M, D]
        dynamic = self.encode(seeds, routing, routing, scale=self.scale, key_mask=mask)  # [B, H, M, D]
        gate = torch.sigmoid(self.gate_logit)[:, None, None]  # [H, 1, 1]
        return self.plain_norm(self.latents) + gate * dynamic.to(gate.dtype)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = zero_padding(x, mask)
        v = split_heads(self.value_proj(x), self.num_heads)  # [B, H, N, D]
        k = split_heads(self.key_proj(x), self.num_heads, self.key_norm).to(v.dtype)
        q = self.routing_queries(x, mask).to(v.dtype)  # [B, H, M, D]
        z = self.encode(q, k, v, scale=self.scale, key_mask=mask)  # [B, H, M, D]
        y = attend(k, q, z, scale=self.scale)  # [B, H, N, D]
        return zero_padding(self.out_proj(merge_heads(y)), mask)
