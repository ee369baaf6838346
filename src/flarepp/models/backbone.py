"""The matched backbone: one Transformer-block model in which only the token mixer changes (arXiv 2608.11519, Table 4).

    x0 = rmlp_in(features);   each block: x <- x + mixer(norm(x)),  x <- x + FFN(norm(x));   out = rmlp_out(norm(x))
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from flarepp.layers import ResidualMLP, input_projection, make_norm, output_projection, zero_padding
from flarepp.mixers import build_mixer


class Block(nn.Module):
    """Pre-norm mixer and GELU feed-forward, each with a residual: [B, N, C] -> [B, N, C]."""

    def __init__(self, mixer: nn.Module, channel_dim: int, ffn_ratio: float, norm: str) -> None:
        super().__init__()
        self.norm1, self.norm2 = make_norm(norm, channel_dim), make_norm(norm, channel_dim)
        self.mixer = mixer
        self.ffn = ResidualMLP(channel_dim, int(channel_dim * ffn_ratio), channel_dim, num_layers=0)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.mixer(self.norm1(x), mask)
        return x + self.ffn(self.norm2(x))


class Model(nn.Module):
    """features [B, N, in_dim] -> [B, N, out_dim]; padded tokens (mask False) neither matter nor carry a value."""

    def __init__(self, *, in_dim: int, out_dim: int, mixer: str, channel_dim: int, num_heads: int, num_blocks: int,
                 ffn_ratio: float, norm: str, seq_len: int | None = None, grid: tuple[int, ...] | None = None,
                 **mixer_options: Any) -> None:
        super().__init__()
        self.in_proj = input_projection(in_dim, channel_dim)
        self.blocks = nn.ModuleList(
            Block(build_mixer(mixer, channel_dim=channel_dim, num_heads=num_heads, norm=norm, seq_len=seq_len, grid=grid,
                              **mixer_options), channel_dim, ffn_ratio, norm)
            for _ in range(num_blocks))
        self.out_norm = make_norm(norm, channel_dim)
        self.out_proj = output_projection(channel_dim, out_dim)

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.in_proj(zero_padding(features, mask))  # [B, N, C]
        for block in self.blocks:
            x = block(x, mask)
        return zero_padding(self.out_proj(self.out_norm(x)), mask)  # [B, N, out_dim]
