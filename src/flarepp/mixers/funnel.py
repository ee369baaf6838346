"""Funnel attention: queries pooled along the sequence, keys and values not (Funnel-Transformer, arXiv 2006.03236).

    p = mean of r tokens at a time        z = softmax(s q k^T) v,   q = W_q p + b,  [k | v] = W_kv x + b,   s = D^(-1/2)
    y_i = W_out z_floor(i / r) + b_out

The paper halves the sequence from block to block and repeats it at the end. A mixer keeps the length, so each one pools its
queries (r = `stride`, the paper's 2) and repeats its outputs, without the paper's relative positions. A mean is over the
real tokens of its window; a window is real if any of its tokens is. Padding behind the tokens changes nothing, however much
there is. O(N^2 / r) work.
"""

from __future__ import annotations

from fractions import Fraction

from torch import Tensor, nn

from flarepp.attention import attend
from flarepp.layers import head_width, init_linears, merge_heads, split_heads, zero_padding
from flarepp.patterns import check_positive, real_in_blocks, to_blocks


def pooled(x: Tensor, real: Tensor | None, stride: int) -> Tensor:
    """Means [B, n, C] over the real tokens of every window, of x [B, N, C] with zeros where there is none."""
    windows = to_blocks(x, stride)  # [B, n, r, C]
    if real is None:
        return windows.mean(2)
    return windows.sum(2) / real.sum(2, keepdim=True).clamp_min(1)


class Mixer(nn.Module):
    """x [B, N, C] -> [B, N, C] with one query for `stride` tokens."""

    def __init__(self, channel_dim: int, num_heads: int, norm: str, *, stride: int = 2) -> None:
        super().__init__()
        head_dim = head_width(channel_dim, num_heads)
        check_positive(stride=stride)
        self.num_heads, self.stride, self.scale = num_heads, stride, head_dim**-0.5
        share = Fraction(2, stride)
        self.operations = f"{2 + share} C^2 + {share} N C"  # multiply-adds a token, forward
        self.query_proj, self.key_value_proj = nn.Linear(channel_dim, channel_dim), nn.Linear(channel_dim, 2 * channel_dim)
        self.out_proj = nn.Linear(channel_dim, channel_dim)
        init_linears(self)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = zero_padding(x, mask)
        k, v = (split_heads(part, self.num_heads) for part in self.key_value_proj(x).chunk(2, dim=-1))  # [B, H, N, D]
        windows = pooled(x, real_in_blocks(x, mask, self.stride), self.stride)
        q = split_heads(self.query_proj(windows), self.num_heads)  # [B, H, n, D]
        z = self.out_proj(merge_heads(attend(q, k, v, scale=self.scale, key_mask=mask)))  # [B, n, C]
        return zero_padding(z.repeat_interleave(self.stride, 1)[:, :x.shape[1]], mask)
