"""PerceiverIO: M latent vectors read the tokens once, attend among themselves, and are read by the tokens (arXiv 2107.14795).

    x = rmlp(features)        z = W_o attend(latents, k(t), v(t)),  t = LN(x)        (encode; no residual)
    each block: z <- z + W_o attend(q, k, v of LN(z)),  z <- z + FFN(LN(z))
    o = W_o attend(q(LN(x)), k(LN(z)), v(LN(z)))  (decode; no residual)        out = rmlp(LN(o))

As configured in the FLARE study (arXiv 2508.12594); always LayerNorm, s = D^(-1/2), GELU by tanh. Linear weights start from
N(0, init_std^2), 0.02 in the study: with narrow layers a token is then seen in its output at rounding level only, since neither
attention has a residual, and gradients of the decoder's queries lie below AdamW's epsilon.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flarepp.attention import attend
from flarepp.layers import (
    LayerNorm,
    ResidualMLP,
    head_width,
    init_linears,
    input_projection,
    merge_heads,
    output_projection,
    split_heads,
    zero_padding,
)


class CrossAttention(nn.Module):
    """Queries [B, M, C] (`query_proj` or as they are) read tokens [B, N, C]: [B, M, C], with biases."""

    def __init__(self, channel_dim: int, num_heads: int, *, project_queries: bool) -> None:
        super().__init__()
        self.num_heads, self.scale = num_heads, head_width(channel_dim, num_heads) ** -0.5
        self.query_proj = nn.Linear(channel_dim, channel_dim) if project_queries else nn.Identity()
        self.key_proj, self.value_proj = nn.Linear(channel_dim, channel_dim), nn.Linear(channel_dim, channel_dim)
        self.out_proj = nn.Linear(channel_dim, channel_dim)

    def forward(self, queries: Tensor, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        projected = self.query_proj(queries), self.key_proj(tokens), self.value_proj(tokens)
        q, k, v = (split_heads(part, self.num_heads) for part in projected)  # [B, H, M or N, D]
        return self.out_proj(merge_heads(attend(q.to(v.dtype), k, v, scale=self.scale, key_mask=mask)))


class LatentBlock(nn.Module):
    """Pre-norm self-attention (no bias on q, k, v) and feed-forward among the latents: [B, M, C] -> [B, M, C]."""

    def __init__(self, channel_dim: int, num_heads: int, ffn_ratio: float) -> None:
        super().__init__()
        self.num_heads, self.scale = num_heads, head_width(channel_dim, num_heads) ** -0.5
        self.norm1, self.norm2 = LayerNorm(channel_dim), LayerNorm(channel_dim)
        self.qkv_proj = nn.Linear(channel_dim, 3 * channel_dim, bias=False)
        self.out_proj = nn.Linear(channel_dim, channel_dim)
        self.ffn = ResidualMLP(channel_dim, int(channel_dim * ffn_ratio), channel_dim, num_layers=0)

    def forward(self, z: Tensor) -> Tensor:
        q, k, v = (split_heads(part, self.num_heads) for part in self.qkv_proj(self.norm1(z)).chunk(3, dim=-1))
        z = z + self.out_proj(merge_heads(attend(q, k, v, scale=self.scale)))
        return z + self.ffn(self.norm2(z))


class Model(nn.Module):
    """features [B, N, in_dim] -> [B, N, out_dim] through `num_latents` M latents; padding neither matters nor has a value."""

    def __init__(self, *, in_dim: int, out_dim: int, channel_dim: int, num_heads: int, num_blocks: int, num_latents: int,
                 ffn_ratio: float, init_std: float, grid: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.in_proj = input_projection(in_dim, channel_dim)
        self.latents = nn.Parameter(torch.randn(num_latents, channel_dim))
        self.encoder_norm = LayerNorm(channel_dim)
        self.encoder = CrossAttention(channel_dim, num_heads, project_queries=False)
        self.blocks = nn.ModuleList(LatentBlock(channel_dim, num_heads, ffn_ratio) for _ in range(num_blocks))
        self.latent_norm, self.token_norm = LayerNorm(channel_dim), LayerNorm(channel_dim)
        self.decoder = CrossAttention(channel_dim, num_heads, project_queries=True)
        self.out_norm = LayerNorm(channel_dim)
        self.out_proj = output_projection(channel_dim, out_dim)
        init_linears(self, init_std)

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.in_proj(zero_padding(features, mask))  # [B, N, C]
        z = self.encoder(self.latents[None], self.encoder_norm(x), mask)  # [B, M, C]
        for block in self.blocks:
            z = block(z)
        y = self.decoder(self.token_norm(x), self.latent_norm(z))  # [B, N, C]
        return zero_padding(self.out_proj(self.out_norm(y)), mask)  # [B, N, out_dim]
