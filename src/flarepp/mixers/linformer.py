"""Linformer: keys and values projected along the sequence to M rows (arXiv 2006.04768).

    y = softmax(s q (E k)^T) F v,   E, F [M, N] learned,   [q | k | v] = W x + b,   s = D^(-1/2)        out = W_out y + b_out

`sharing`: "heads", E and F shared by the heads, or "kv", E = F as well. Entries start from N(0, 1 / N_max), N_max =
`seq_len`, which keeps the variance of keys; N tokens use the first N columns. Padded keys and values are 0 before the
projection, so that padding behind the tokens changes nothing. The M projected rows are no tokens: none is ever masked.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flarepp.attention import attend
from flarepp.errors import unknown
from flarepp.layers import head_width, init_linears, merge_heads, split_heads, zero_padding
from flarepp.patterns import check_fits, check_positive, check_seq_len

MATRICES = {"heads": 2, "kv": 1}  # how many there are, by sharing


class Mixer(nn.Module):
    """x [B, N, C] -> [B, N, C] through `num_latents` projected rows; `seq_len` is the most tokens it will see."""

    operations = "4 C^2 + 4 M C"  # multiply-adds a token, forward

    def __init__(self, channel_dim: int, num_heads: int, norm: str, num_latents: int, seq_len: int | None, *,
                 sharing: str = "heads") -> None:
        super().__init__()
        head_dim = head_width(channel_dim, num_heads)
        if sharing not in MATRICES:
            raise ValueError(unknown("sharing", sharing, MATRICES))
        check_positive(num_latents=num_latents)
        self.num_heads, self.scale, self.seq_len = num_heads, head_dim**-0.5, check_seq_len(seq_len)
        self.token_proj = nn.Parameter(torch.randn(MATRICES[sharing], num_latents, self.seq_len) * self.seq_len**-0.5)
        self.qkv_proj = nn.Linear(channel_dim, 3 * channel_dim)
        self.out_proj = nn.Linear(channel_dim, channel_dim)
        init_linears(self)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        check_fits(x.shape[1], self.seq_len)
        q, k, v = self.qkv_proj(zero_padding(x, mask)).chunk(3, dim=-1)  # [B, N, C]
        matrices = self.token_proj[..., :x.shape[1]]
        k, v = (matrix @ zero_padding(part, mask) for matrix, part in zip((matrices[0], matrices[-1]), (k, v)))  # [B, M, C]
        q, k, v = (split_heads(part, self.num_heads) for part in (q, k, v))
        y = attend(q, k, v, scale=self.scale)  # [B, H, N, D]
        return zero_padding(self.out_proj(merge_heads(y)), mask)
