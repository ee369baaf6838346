"""Full self-attention: every token attends to every token, O(N^2) work, the unrestricted reference.

    y = W_out softmax_N(s q k^T) v,   [q | k | v] = W x + b,   s = D^(-1/2)        (Vaswani et al., arXiv 1706.03762)
"""

from __future__ import annotations

from torch import Tensor, nn

from flarepp.attention import attend
from flarepp.layers import head_width, init_linears, make_norm, merge_heads, split_heads, zero_padding


class Mixer(nn.Module):
    """x [B, N, C] -> [B, N, C]. `qk_norm` normalises queries and keys over the head width."""

    operations = "4 C^2 + 2 N C"  # multiply-adds a token, forward

    def __init__(self, channel_dim: int, num_heads: int, norm: str, *, qk_norm: bool = False) -> None:
        super().__init__()
        head_dim = head_width(channel_dim, num_heads)
        self.num_heads, self.scale = num_heads, head_dim**-0.5
        self.qkv_proj = nn.Linear(channel_dim, 3 * channel_dim)
        self.query_norm = make_norm(norm, head_dim) if qk_norm else nn.Identity()
        self.key_norm = make_norm(norm, head_dim) if qk_norm else nn.Identity()
        self.out_proj = nn.Linear(channel_dim, channel_dim)
        init_linears(self)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        qkv = self.qkv_proj(zero_padding(x, mask)).chunk(3, dim=-1)
        q, k, v = (split_heads(part, self.num_heads) for part in qkv)  # [B, H, N, D]
        q, k = self.query_norm(q).to(v.dtype), self.key_norm(k).to(v.dtype)
        y = attend(q, k, v, scale=self.scale, key_mask=mask)
        return zero_padding(self.out_proj(merge_heads(y)), mask)
