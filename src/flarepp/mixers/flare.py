"""FLARE: rank-M attention through M fixed latent queries a head (arXiv 2508.12594; FLARE++, Section 2).

    k = x + W_k x + b_k,  v = x + W_v x + b_v,  learned Q [M, D] per head,  s = D^(-1/2)
    z = softmax_N(s Q k^T) v   (encode)        y = softmax_M(s k Q^T) z   (decode)        out = W_out y + b_out
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
    """x [B, N, C] -> [B, N, C] with `num_latents` M latents. `qk_norm` normalises Q and k over the head width."""

    operations = "3 C^2 + 4 M C"
    encode = staticmethod(attend)  # context parallelism replaces it

    def __init__(self, channel_dim: int, num_heads: int, norm: str, num_latents: int, *, qk_norm: bool = False) -> None:
        super().__init__()
        head_dim = head_width(channel_dim, num_heads)
        self.num_heads, self.scale = num_heads, head_dim**-0.5
        self.latents = latent_tokens(num_heads, num_latents, head_dim)
        self.key_proj, self.value_proj = ResidualLinear(channel_dim), ResidualLinear(channel_dim)
        self.query_norm = make_norm(norm, head_dim) if qk_norm else nn.Identity()
        self.key_norm = make_norm(norm, head_dim) if qk_norm else nn.Identity()
        self.out_proj = nn.Linear(channel_dim, channel_dim)
        init_linears(self)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = zero_padding(x, mask)
        k, v = project(x, self.key_proj, self.value_proj)  # [B, N, C]
        v = split_heads(v, self.num_heads)  # [B, H, N, D]
        k = split_heads(k, self.num_heads, self.key_norm).to(v.dtype)
        q = self.query_norm(self.latents)[None].to(v.dtype)  # [1, H, M, D]
        z = self.encode(q, k, v, scale=self.scale, key_mask=mask)  # [B, H, M, D]
        y = attend(k, q.expand_as(z), z, scale=self.scale)  # [B, H, N, D]
        return zero_padding(self.out_proj(merge_heads(y)), mask)
