"""Sinkhorn Transformer: attention to the own block and to a learned, doubly stochastic mix of blocks (arXiv 2002.11296).

    s_j = sum of the keys of block j (w tokens)        R = s W  [b, b] per head        P = exp(sinkhorn((R + Gumbel) / tau))
    K' = P K,  V' = P V  (blocks)        y_i = softmax(s q_i [K_own | K'_own]^T) [V_own | V'_own],   s = D^(-1/2)
    out = W_out y + b_out

Sinkhorn: rows, then columns of R are normalised in turn, `num_iterations` times, in FP32 or better. As in the paper one
softmax runs over the own and the sorted block (the public code of the Long Range Arena adds two, and normalises rows only),
and noise is drawn in training only. Block summaries are those of the keys, and W [D, b_max] is shared by the heads:
recommended choices where there are several. Padded tokens are in no summary and no softmax, blocks of padding take no part
in P: in evaluation, padding behind the tokens changes nothing, however much there is.
"""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor, nn

from flarepp.attention import attend
from flarepp.layers import head_width, init_linears, merge_heads, split_heads, widened, zero_padding
from flarepp.patterns import check_fits, check_positive, check_seq_len, fold, fold_mask, real_in_blocks, to_blocks, unfold
from flarepp.slices import gumbel

NEVER = -1e30  # the logit of a block of padding


def uniform_like(logits: Tensor) -> Tensor:
    """Fresh numbers on [0, 1) from the global generator."""
    return torch.rand_like(logits)


def sinkhorn(logits: Tensor, iterations: int, allowed: Tensor | None = None) -> Tensor:
    """P [..., b, b] from logits [..., b, b]: rows, then columns normalised, `iterations` times; 0 where not allowed."""
    for _ in range(iterations):
        for axis in (-1, -2):
            logits = logits if allowed is None else logits.masked_fill(~allowed, NEVER)
            logits = logits - logits.logsumexp(axis, keepdim=True)
    return logits.exp() if allowed is None else logits.exp().masked_fill(~allowed, 0)


class Mixer(nn.Module):
    """x [B, N, C] -> [B, N, C] in blocks of `block_size` tokens; `seq_len` is the most tokens it will see."""

    uniform = staticmethod(uniform_like)

    def __init__(self, channel_dim: int, num_heads: int, norm: str, block_size: int, seq_len: int | None, *,
                 num_iterations: int = 8, temperature: float = 0.75) -> None:
        super().__init__()
        head_dim = head_width(channel_dim, num_heads)
        check_positive(block_size=block_size, num_iterations=num_iterations)
        self.seq_len, self.block_size = check_seq_len(seq_len), block_size
        self.num_heads, self.scale = num_heads, head_dim**-0.5
        self.num_iterations, self.temperature = num_iterations, temperature
        mixed = Fraction(2 * block_size + 1, block_size**2)
        self.operations = f"4 C^2 + {4 * block_size} C + {mixed} N C"  # multiply-adds a token, forward
        self.qkv_proj = nn.Linear(channel_dim, 3 * channel_dim)
        self.sort_proj = nn.Linear(head_dim, -(-self.seq_len // block_size), bias=False)
        self.out_proj = nn.Linear(channel_dim, channel_dim)
        init_linears(self)

    def mixing(self, k: Tensor, real: Tensor | None) -> Tensor:
        """P [B, H, b, b] of the keys' blocks [B, H, b, w, D]."""
        sums, weight = widened(k).sum(3), widened(self.sort_proj.weight[:k.shape[2]])
        with torch.autocast(k.device.type, enabled=False):
            logits = sums @ weight.T.to(sums.dtype)
        logits = logits + gumbel(self.uniform(logits)) if self.training else logits
        allowed = None
        if real is not None:
            some = real.any(-1)  # [B, b]
            allowed = (some[:, :, None] & some[:, None])[:, None]  # [B, 1, b, b]
        return sinkhorn(logits / self.temperature, self.num_iterations, allowed)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        check_fits(x.shape[1], self.seq_len)
        real = real_in_blocks(x, mask, self.block_size)  # [B, b, w]
        qkv = zero_padding(self.qkv_proj(zero_padding(x, mask)), mask).chunk(3, dim=-1)
        q, k, v = (to_blocks(split_heads(part, self.num_heads), self.block_size) for part in qkv)  # [B, H, b, w, D]
        mixing = self.mixing(k, real).to(v.dtype)  # [B, H, b, b]
        k, v = (torch.cat([part, (mixing @ part.flatten(3)).view_as(part)], 3) for part in (k, v))  # [B, H, b, 2 w, D]
        if real is not None:
            real = torch.cat([real, real.any(1, keepdim=True).expand_as(real)], 2)
        y = attend(fold(q), fold(k), fold(v), scale=self.scale, key_mask=fold_mask(real))
        return zero_padding(self.out_proj(merge_heads(unfold(y, *x.shape[:2]))), mask)
