"""Local attention: softmax attention inside blocks of w consecutive tokens ("Local Att." of Tay et al., arXiv 2011.04006).

    y_i = sum_j softmax_j(s q_i k_j) v_j  over floor(j / w) = floor(i / w),   [q | k | v] = W x + b,   s = D^(-1/2)
    out = W_out y + b_out

Blocks do not overlap; the last one may be shorter. They are contiguous, as the paper says; its public code attends among
tokens that are N / w apart. Padding behind the tokens changes nothing, however much there is.
"""

from __future__ import annotations

from torch import Tensor, nn

from flarepp.attention import attend
from flarepp.layers import head_width, init_linears, merge_heads, split_heads, zero_padding
from flarepp.patterns import check_positive, fold, fold_mask, real_in_blocks, to_blocks, unfold


class Mixer(nn.Module):
    """x [B, N, C] -> [B, N, C] in blocks of `block_size` tokens."""

    def __init__(self, channel_dim: int, num_heads: int, norm: str, block_size: int) -> None:
        super().__init__()
        head_dim = head_width(channel_dim, num_heads)
        check_positive(block_size=block_size)
        self.num_heads, self.block_size, self.scale = num_heads, block_size, head_dim**-0.5
        self.operations = f"4 C^2 + {2 * block_size} C"  # multiply-adds a token, forward
        self.qkv_proj = nn.Linear(channel_dim, 3 * channel_dim)
        self.out_proj = nn.Linear(channel_dim, channel_dim)
        init_linears(self)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        size = min(self.block_size, x.shape[1])
        qkv = self.qkv_proj(zero_padding(x, mask)).chunk(3, dim=-1)
        q, k, v = (fold(to_blocks(split_heads(part, self.num_heads), size)) for part in qkv)  # [B n, H, w, D]
        y = attend(q, k, v, scale=self.scale, key_mask=fold_mask(real_in_blocks(x, mask, size)))
        return zero_padding(self.out_proj(merge_heads(unfold(y, *x.shape[:2]))), mask)
