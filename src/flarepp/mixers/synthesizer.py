"""Synthesizer, factorised random: attention weights that are learned for positions and see no token (arXiv 2005.00743).

    y = softmax(R_1 R_2^T) v,   R_1, R_2 [N, r] learned for each head,   v = W_v x + b        out = W_out y + b_out
    with `dot_product`:   softmax(R_1 R_2^T + s q k^T),   s = D^(-1/2)   ("random + vanilla")

Factors start from N(0, r^(-1/2)), so that logits have variance 1; N tokens use the first N rows. The fused kernel takes R_1
and R_2 as queries and keys. The row of the Long Range Arena is random + vanilla, with an unfactorised R. Padded keys are
masked: padding behind the tokens changes nothing, however much there is.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flarepp.attention import attend
from flarepp.layers import head_width, init_linears, merge_heads, split_heads, zero_padding
from flarepp.patterns import check_fits, check_positive, check_seq_len


class Mixer(nn.Module):
    """x [B, N, C] -> [B, N, C] with factors of `rank` columns; `seq_len` is the most tokens it will see."""

    def __init__(self, channel_dim: int, num_heads: int, norm: str, rank: int, seq_len: int | None, *,
                 dot_product: bool = False) -> None:
        super().__init__()
        head_dim = head_width(channel_dim, num_heads)
        check_positive(rank=rank)
        self.num_heads, self.scale, self.seq_len = num_heads, head_dim**-0.5, check_seq_len(seq_len)
        width = rank + head_dim if dot_product else max(rank, head_dim)  # of the kernel
        self.operations = f"{4 if dot_product else 2} C^2 + {2 * width} H N"  # multiply-adds a token, forward
        self.factors = nn.Parameter(torch.randn(2, num_heads, self.seq_len, rank).mul_(rank**-0.25))
        self.query_key_proj = nn.Linear(channel_dim, 2 * channel_dim) if dot_product else None
        self.value_proj = nn.Linear(channel_dim, channel_dim)
        self.out_proj = nn.Linear(channel_dim, channel_dim)
        init_linears(self)

    def queries_and_keys(self, x: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Two [B, H, N, r or r + D] whose products are the logits."""
        q, k = (factor.to(like.dtype).expand(len(x), -1, -1, -1) for factor in self.factors[:, :, :x.shape[1]])
        if self.query_key_proj is None:
            return q, k
        own = [split_heads(part, self.num_heads) for part in self.query_key_proj(x).chunk(2, dim=-1)]
        return torch.cat([q, self.scale * own[0]], -1), torch.cat([k, own[1]], -1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        check_fits(x.shape[1], self.seq_len)
        x = zero_padding(x, mask)
        v = split_heads(self.value_proj(x), self.num_heads)  # [B, H, N, D]
        q, k = self.queries_and_keys(x, v)
        width = max(q.shape[-1], v.shape[-1])
        y = attend(*(F.pad(part, (0, width - part.shape[-1])) for part in (q, k, v)), scale=1.0, key_mask=mask)
        return zero_padding(self.out_proj(merge_heads(y[..., :v.shape[-1]])), mask)
