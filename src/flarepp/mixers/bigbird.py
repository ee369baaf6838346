"""BigBird: block-sparse attention to neighbours, to the first and the last block and to random ones (arXiv 2007.14062).

    blocks of w tokens; block i sees the blocks i - 1, i, i + 1, the first, the last and r random others, each once
    the first and the last block see everything        y = softmax(s q k^T) v over what is seen,   s = D^(-1/2)

Global blocks are blocks of the sequence (the paper's ITC). Random blocks are drawn for every head from a seed kept with the
weights, and are the same in training and evaluation. Where r others do not exist all of them are taken, so that short
sequences get full attention. What padding holds changes nothing; how much there is does: it moves the last block and the
random ones.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flarepp.attention import attend
from flarepp.layers import head_width, init_linears, merge_heads, split_heads, zero_padding
from flarepp.patterns import (
    attend_where,
    check_positive,
    fold,
    generator_of,
    new_seed,
    real_in_blocks,
    real_places,
    to_blocks,
)


class Mixer(nn.Module):
    """x [B, N, C] -> [B, N, C] with blocks of `block_size` tokens that each see `num_random` random ones."""

    def __init__(self, channel_dim: int, num_heads: int, norm: str, block_size: int, num_random: int) -> None:
        super().__init__()
        head_dim = head_width(channel_dim, num_heads)
        check_positive(block_size=block_size)
        if num_random < 0:
            raise ValueError(f"num_random: got {num_random}; allowed: whole numbers from 0 on")
        self.num_heads, self.block_size, self.num_random, self.scale = num_heads, block_size, num_random, head_dim**-0.5
        self.operations = f"4 C^2 + {2 * (7 + num_random) * block_size} C"  # multiply-adds a token, forward
        self.qkv_proj = nn.Linear(channel_dim, 3 * channel_dim)
        self.out_proj = nn.Linear(channel_dim, channel_dim)
        self.seed: Tensor
        self.register_buffer("seed", new_seed())
        init_linears(self)

    def plan(self, num_blocks: int) -> tuple[Tensor, Tensor]:
        """The blocks [H, n - 2, 5 + r] that each block but the first and the last sees, and which of them count."""
        rows, last = torch.arange(1, num_blocks - 1)[:, None], num_blocks - 1
        window = rows + torch.arange(-1, 2)  # [n - 2, 3]
        ends = torch.tensor([0, last]).expand(len(rows), -1)
        beyond = (ends - rows).abs() > 1  # the ends that the window does not hold
        scores = torch.rand(self.num_heads, len(rows), num_blocks, generator=generator_of(self.seed))
        taken = ((torch.arange(num_blocks) - rows).abs() <= 1).index_fill(1, ends[0], True)
        found, others = scores.masked_fill(taken, -1).topk(min(self.num_random, num_blocks), -1)
        fixed, counts = torch.cat([window, ends], 1), torch.cat([torch.ones_like(window, dtype=torch.bool), beyond], 1)
        heads = (self.num_heads, -1, -1)
        return torch.cat([fixed.expand(heads), others], -1), torch.cat([counts.expand(heads), found >= 0], -1)

    def seen(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        """y [B, H, n - 2, w, D] of all blocks [B, H, n, w, D] but the first and the last; real [B or 1, n, w]."""
        blocks, counts = (part.to(q.device) for part in self.plan(q.shape[2]))  # [H, n - 2, s]
        heads = torch.arange(self.num_heads, device=q.device)[:, None, None]
        k, v = (fold(part[:, heads, blocks].flatten(3, 4)) for part in (k, v))  # [B (n - 2), H, s w, D]
        allowed = (real[:, blocks] & counts[..., None]).flatten(3)  # [B or 1, H, n - 2, s w]
        allowed = fold(allowed.expand(len(q), -1, -1, -1))[:, :, None]  # [B (n - 2), H, 1, s w]
        y, _ = attend_where(fold(q[:, :, 1:-1]), k, v, allowed, scale=self.scale)
        return y.unflatten(0, (len(q), -1)).transpose(1, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        count, size = x.shape[1], self.block_size
        qkv = self.qkv_proj(zero_padding(x, mask)).chunk(3, dim=-1)
        q, k, v = (to_blocks(split_heads(part, self.num_heads), size) for part in qkv)  # [B, H, n, w, D]
        real = real_in_blocks(x, mask, size)
        ends = q[:, :, [0, -1]] if q.shape[2] > 1 else q
        y = attend(ends.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3), scale=self.scale,
                   key_mask=None if real is None else real.flatten(1)).unflatten(2, (-1, size))  # [B, H, 2 or 1, w, D]
        if q.shape[2] > 2:
            real = real_places(x, None).view(1, -1, size) if real is None else real
            y = torch.cat([y[:, :, :1], self.seen(q, k, v, real), y[:, :, 1:]], 2)
        return zero_padding(self.out_proj(merge_heads(y.flatten(2, 3)[:, :, :count])), mask)
