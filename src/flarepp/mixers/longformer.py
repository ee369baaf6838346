"""Longformer: a sliding window, and global tokens that see everything and are seen by all (arXiv 2004.05150).

    y_i = softmax_j(s q_i k_j) v_j  over |i - j| <= w / 2 and the global j,   s = D^(-1/2)        out = W_out y + b_out
    global i:  y_i = softmax_j(s q'_i k'_j) v'_j  over all j,  with projections q', k', v' of their own

The first `num_global` tokens of a sequence are global: recommended one where the model reads a class token there, else none
(as in the Long Range Arena, whose even window reaches w / 2 - 1 tokens to the left). Queries go in blocks of w / 2 tokens,
each with the keys of three blocks. Padding behind the tokens changes nothing, however much there is. O(N w) work.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flarepp.attention import attend, attend_with_lse, merge_shards
from flarepp.layers import head_width, init_linears, merge_heads, split_heads, zero_padding
from flarepp.patterns import attend_where, fold, real_places, to_blocks, unfold


def three_blocks(x: Tensor, size: int) -> Tensor:
    """[..., N, D] -> [..., n, 3 size, D]: each block between its neighbours, zeros (False) beyond the ends."""
    blocks = F.pad(to_blocks(x, size), (0, 0, 0, 0, 1, 1))  # [..., n + 2, size, D]
    return torch.cat([blocks[..., :-2, :, :], blocks[..., 1:-1, :, :], blocks[..., 2:, :, :]], -2)


class Mixer(nn.Module):
    """x [B, N, C] -> [B, N, C] with windows of `window` tokens and one more."""

    def __init__(self, channel_dim: int, num_heads: int, norm: str, window: int, *, num_global: int = 0) -> None:
        super().__init__()
        head_dim = head_width(channel_dim, num_heads)
        if window < 2 or num_global < 0:
            raise ValueError(f"window: got {window}, num_global: got {num_global}; allowed: from 2 on, and from 0 on")
        self.num_heads, self.reach, self.num_global, self.scale = num_heads, window // 2, num_global, head_dim**-0.5
        self.operations = f"{6 if num_global else 4} C^2 + {6 * self.reach + 4 * num_global} C"  # multiply-adds a token
        self.qkv_proj = nn.Linear(channel_dim, 3 * channel_dim)
        self.global_qkv_proj = nn.Linear(channel_dim, 3 * channel_dim) if num_global else None
        self.out_proj = nn.Linear(channel_dim, channel_dim)
        init_linears(self)

    def window(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """(y [B, H, N, D], lse [B, H, N]) over the windows' keys that are real, [B or 1, N], and not global."""
        batch, _, count, _ = q.shape
        size = min(self.reach, count)
        places = torch.arange(3 * size, device=q.device) - size - torch.arange(size, device=q.device)[:, None]
        keys = real & (torch.arange(count, device=q.device) >= self.num_global)
        keys = three_blocks(keys.expand(batch, -1)[..., None], size)[..., 0]  # [B, n, 3 w / 2]
        allowed = keys.flatten(0, 1)[:, None, None] & (places.abs() <= self.reach)  # [B n, 1, w / 2, 3 w / 2]
        found = attend_where(fold(to_blocks(q, size)), fold(three_blocks(k, size)), fold(three_blocks(v, size)), allowed,
                             scale=self.scale)
        y, lse = (unfold(part, batch, count) for part in found)
        return y, lse

    def global_rows(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """y [B, H, g, D] of the global tokens."""
        assert self.global_qkv_proj is not None
        weights, biases = self.global_qkv_proj.weight.chunk(3), self.global_qkv_proj.bias.chunk(3)
        q, k, v = (split_heads(F.linear(tokens, weight, bias), self.num_heads)
                   for tokens, weight, bias in zip((x[:, :self.num_global], x, x), weights, biases))
        return attend(q, k, v, scale=self.scale, key_mask=mask)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = zero_padding(x, mask)
        q, k, v = (split_heads(part, self.num_heads) for part in self.qkv_proj(x).chunk(3, dim=-1))  # [B, H, N, D]
        y, lse = self.window(q, k, v, real_places(x, mask))
        if self.num_global:
            few = slice(0, self.num_global)
            seen = attend_with_lse(q, k[:, :, few], v[:, :, few], scale=self.scale,
                                   key_mask=None if mask is None else mask[:, few])
            y = merge_shards(*zip((y, lse), seen))[0]
            y = torch.cat([self.global_rows(x, mask), y[:, :, self.num_global:]], 2)
        return zero_padding(self.out_proj(merge_heads(y)), mask)
