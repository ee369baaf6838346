"""FLARE++: FLARE whose routing queries are themselves read from the tokens (arXiv 2608.11519, Section 2).

    Q(x) = softmax_N(s norm(Q~) norm(k~)^T) v~          (query synthesis; seeds Q~ [M, D] per head, k~ and v~ projections of x)
    z = softmax_N(s Q(x) k^T) v        y = softmax_M(s k Q(x)^T) z        out = W_out y + b_out

Projections are residual linear (x + W x + b), s = D^(-1/2). `seed_norm` normalises seeds and k~ over the head width, as the
authors' code does; `qk_norm` further normalises Q(x) and k.
"""

from __future__ import annotations

from torch import Tensor, nn

from flarepp.attention import attend
from flarepp.layers import (
    ResidualLinear,
    head_width,
    init_linears,
    latent_tokens,
    make_norm,
    merge_heads,
    project,
    split_heads,
    zero_padding,
)


class Mixer(nn.Module):
    """x [B, N, C] -> [B, N, C] with `num_latents` M latents."""

    operations = "5 C^2 + 6 M C"
    encode = staticmethod(attend)  # context parallelism replaces it

    def __init__(self, channel_dim: int, num_heads: int, norm: str, num_latents: int, *,
                 seed_norm: bool = True, qk_norm: bool = False) -> None:
        super().__init__()
        head_dim = head_width(channel_dim, num_heads)
        self.num_heads, self.scale = num_heads, head_dim**-0.5
        self.seeds = latent_tokens(num_heads, num_latents, head_dim)
        self.routing_key_proj, self.routing_value_proj = ResidualLinear(channel_dim), ResidualLinear(channel_dim)
        self.key_proj, self.value_proj = ResidualLinear(channel_dim), ResidualLinear(channel_dim)
        self.seed_norm = make_norm(norm, head_dim) if seed_norm else nn.Identity()
        self.routing_key_norm = make_norm(norm, head_dim) if seed_norm else nn.Identity()
        self.query_norm = make_norm(norm, head_dim) if qk_norm else nn.Identity()
        self.key_norm = make_norm(norm, head_dim) if qk_norm else nn.Identity()
        self.out_proj = nn.Linear(channel_dim, channel_dim)
        init_linears(self)

    def routing_queries(self, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Q(x) [B, H, M, D] from the routing keys and values [B, N, C]."""
        v = split_heads(v, self.num_heads)  # [B, H, N, D]
        k = split_heads(k, self.num_heads, self.routing_key_norm).to(v.dtype)
        seeds = self.seed_norm(self.seeds)[None].to(v.dtype)  # [1, H, M, D]
        return self.query_norm(self.encode(seeds, k, v, scale=self.scale, key_mask=mask)).to(v.dtype)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        routing_k, routing_v, k, v = project(zero_padding(x, mask), self.routing_key_proj, self.routing_value_proj,
                                             self.key_proj, self.value_proj)  # [B, N, C]
        q = self.routing_queries(routing_k, routing_v, mask)  # [B, H, M, D]
        v = split_heads(v, self.num_heads)  # [B, H, N, D]
        k = split_heads(k, self.num_heads, self.key_norm).to(v.dtype)
        z = self.encode(q, k, v, scale=self.scale, key_mask=mask)  # [B, H, M, D]
        y = attend(k, q, z, scale=self.scale)  # [B, H, N, D]
        return zero_padding(self.out_proj(merge_heads(y)), mask)
