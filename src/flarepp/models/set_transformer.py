"""Set Transformer: blocks of induced set attention, in the pre-norm residual form of the FLARE++ authors (arXiv 1810.00825).

    MAB(q, k) = LN(o + GELU(W_o o)),  o = LN(q' + attend(q', k', v')),  q' = W_q q, k' = W_k k, v' = W_v k
    ISAB(x) = MAB(x, MAB(I, x))
    x0 = rmlp(features);   each block: x <- x + ISAB(LN(x)),  x <- x + FFN(LN(x));   out = rmlp(LN(x))

I: learned inducing points. The scale is C^(-1/2), the full width; GELU inside a MAB is the exact one, elsewhere by tanh.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
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


class AttentionBlock(nn.Module):
    """MAB: queries [B, M, C] read tokens [B, N, C]; [B, M, C]."""

    def __init__(self, channel_dim: int, num_heads: int) -> None:
        super().__init__()
        head_width(channel_dim, num_heads)
        self.num_heads, self.scale = num_heads, channel_dim**-0.5
        self.query_proj, self.key_proj, self.value_proj, self.out_proj = (
            nn.Linear(channel_dim, channel_dim) for _ in range(4))
        self.norm1, self.norm2 = LayerNorm(channel_dim), LayerNorm(channel_dim)
        init_linears(self)

    def forward(self, queries: Tensor, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        projected = self.query_proj(queries), self.key_proj(tokens), self.value_proj(tokens)
        q, k, v = (split_heads(part, self.num_heads) for part in projected)  # [B, H, M or N, D]
        o = self.norm1(merge_heads(q + attend(q, k, v, scale=self.scale, key_mask=mask)))
        return self.norm2(o + F.gelu(self.out_proj(o)))


class Block(nn.Module):
    """Induced set attention (encode, decode) and a feed-forward, each with a residual: [B, N, C] -> [B, N, C]."""

    def __init__(self, channel_dim: int, num_heads: int, num_inducing: int, ffn_ratio: float) -> None:
        super().__init__()
        self.inducing_points = nn.Parameter(nn.init.xavier_uniform_(torch.empty(1, num_inducing, channel_dim)))
        self.encode_block, self.decode_block = AttentionBlock(channel_dim, num_heads), AttentionBlock(channel_dim, num_heads)
        self.norm1, self.norm2 = LayerNorm(channel_dim), LayerNorm(channel_dim)
        self.ffn = ResidualMLP(channel_dim, int(channel_dim * ffn_ratio), channel_dim, num_layers=0)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        tokens = self.norm1(x)
        induced = self.encode_block(self.inducing_points, tokens, mask)  # [B, M, C]
        x = x + self.decode_block(tokens, induced)
        return x + self.ffn(self.norm2(x))


class Model(nn.Module):
    """features [B, N, in_dim] -> [B, N, out_dim]; padded tokens (mask False) neither matter nor carry a value."""

    def __init__(self, *, in_dim: int, out_dim: int, channel_dim: int, num_heads: int, num_blocks: int, num_inducing: int,
                 ffn_ratio: float, grid: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.in_proj = input_projection(in_dim, channel_dim)
        self.blocks = nn.ModuleList(Block(channel_dim, num_heads, num_inducing, ffn_ratio) for _ in range(num_blocks))
        self.out_norm = LayerNorm(channel_dim)
        self.out_proj = output_projection(channel_dim, out_dim)

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.in_proj(zero_padding(features, mask))  # [B, N, C]
        for block in self.blocks:
            x = block(x, mask)
        return zero_padding(self.out_proj(self.out_norm(x)), mask)  # [B, N, out_dim]
