"""Sparse Transformer, fixed pattern: the own block and summary columns of every block (arXiv 1904.10509, Section 4.2).

    y_i = sum_j softmax_j(s q_i k_j) v_j  over j with floor(j / l) = floor(i / l)  or  j mod l >= l - c,   s = D^(-1/2)
    [q | k | v] = W x + b        out = W_out y + b_out

Both sets in one softmax (merged heads), stride l, c summary columns a block. Bidirectional: the paper's pattern without its
condition j <= i (the row of the Long Range Arena is causal, behind a class token that sees everything). The softmax over the
summary columns and that over the rest of the own block are merged exactly by their log-sum-exps: O(N (l + c N / l)) work.
Padding behind the tokens changes nothing, however much there is.
"""

from __future__ import annotations

from fractions import Fraction

from torch import Tensor, nn

from flarepp.attention import attend_with_lse, merge_shards
from flarepp.layers import head_width, init_linears, merge_heads, split_heads, zero_padding
from flarepp.patterns import check_positive, fold, fold_mask, real_in_blocks, to_blocks, unfold


class Mixer(nn.Module):
    """x [B, N, C] -> [B, N, C] with blocks of `stride` tokens, the last `num_summary` of which everyone sees."""

    def __init__(self, channel_dim: int, num_heads: int, norm: str, stride: int, num_summary: int) -> None:
        super().__init__()
        head_dim = head_width(channel_dim, num_heads)
        check_positive(stride=stride, num_summary=num_summary)
        if num_summary > stride:
            raise ValueError(f"num_summary: got {num_summary}; allowed: 1 to the stride, {stride}")
        self.num_heads, self.scale = num_heads, head_dim**-0.5
        self.stride, self.num_own = stride, stride - num_summary
        self.operations = f"4 C^2 + {2 * self.num_own} C + {Fraction(2 * num_summary, stride)} N C"  # multiply-adds a token
        self.qkv_proj = nn.Linear(channel_dim, 3 * channel_dim)
        self.out_proj = nn.Linear(channel_dim, channel_dim)
        init_linears(self)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        """y [B, H, N, D] of q, k, v [B, H, N, D] with real [B, n, l] or None."""
        batch, _, count, _ = q.shape
        own, summary = slice(0, self.num_own), slice(self.num_own, None)
        k, v = to_blocks(k, self.stride), to_blocks(v, self.stride)  # [B, H, n, l, D]
        near = attend_with_lse(fold(to_blocks(q, self.stride)), fold(k[..., own, :]), fold(v[..., own, :]), scale=self.scale,
                               key_mask=None if real is None else fold_mask(real[..., own]))
        far = attend_with_lse(q, k[..., summary, :].flatten(2, 3), v[..., summary, :].flatten(2, 3), scale=self.scale,
                              key_mask=None if real is None else real[..., summary].flatten(1))
        outs, lses = zip([unfold(part, batch, count) for part in near], far)
        return merge_shards(outs, lses)[0]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        qkv = self.qkv_proj(zero_padding(x, mask)).chunk(3, dim=-1)
        q, k, v = (split_heads(part, self.num_heads) for part in qkv)  # [B, H, N, D]
        y = self.attention(q, k, v, real_in_blocks(x, mask, self.stride))
        return zero_padding(self.out_proj(merge_heads(y)), mask)
