"""Reformer: attention among tokens that fall into the same bucket of a locality-sensitive hash (arXiv 2001.04451).

    q = W_q x + b,  k = q / |q|,  v = W_v x + b
    round r: the bucket of q is argmax [q R_r; -q R_r],  R_r ~ N(0, 1) [D, b / 2]
             tokens are sorted by (bucket, position) and cut into chunks of c; each attends to its chunk and the one before
             (the first to the last), not to itself unless there is no other: o_r = softmax(q k^T) v, L_r its log-sum-exp
    y = sum_r softmax_r(L_r) o_r        out = W_out y + b_out

Queries and keys share one projection, keys have length one and logits no further scale, as in the authors' code. Padded
tokens share a bucket behind all others. b is the power of two nearest to 2 N / c. Above 2 c buckets b = b_1 b_2, factors as
near to each other as powers of two are, and a bucket is a pair of one of b_1 and one of b_2, each from columns of R of its
own: R has (b_1 + b_2) / 2 of them, about (2 N / c)^(1/2), as in the authors' code. R is drawn anew in every forward pass of
training, and from a seed kept with the weights in evaluation; nothing is learned through the hash, computed in FP32 or
better. Rounds do not see each other's chunks. N decides on b and on the chunks, so that more padding changes the result
(what stands in it does not).
Besides the formula in `operations`, hashing takes as many multiply-adds a token, channel and round as R has columns, c at
most where b has no factors.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flarepp.attention import merge_shards
from flarepp.layers import head_width, init_linears, merge_heads, split_heads, widened, zero_padding
from flarepp.patterns import attend_where, check_positive, generator_of, new_seed, real_in_blocks, to_blocks

NORM_EPS = 1e-6  # added to the mean square of a query


def num_buckets(num_tokens: int, chunk_size: int) -> int:
    """The power of two nearest to 2 N / c, at least two."""
    return 2 ** max(1, round(math.log2(max(1, 2 * num_tokens / chunk_size))))


def bucket_factors(num_tokens: int, chunk_size: int) -> tuple[int, ...]:
    """Powers of two whose product is the number of buckets: one up to 2 c buckets, two above."""
    buckets = num_buckets(num_tokens, chunk_size)
    if buckets <= 2 * chunk_size:
        return (buckets,)
    smaller = 2 ** ((buckets.bit_length() - 1) // 2)
    return smaller, buckets // smaller


def gather(x: Tensor, order: Tensor) -> Tensor:
    """Tokens [B, H, N, D] in the order [B, H, R, N] of every round, [B, H, R, N, D]."""
    rounds = x[:, :, None].expand(-1, -1, order.shape[2], -1, -1)
    return rounds.gather(3, order[..., None].expand(*order.shape, x.shape[-1]))


def side(turned: Tensor) -> Tensor:
    """argmax [z; -z] of the last axis, [..., 1]"""
    largest = turned.abs().argmax(-1, keepdim=True)
    return largest + turned.shape[-1] * (turned.gather(-1, largest) < 0)


def with_previous(chunks: Tensor) -> Tensor:
    """Chunks [B, H, R, n, c, ...] behind those before them, [B, H, R, n, 2 c, ...]; a single one stays."""
    return chunks if chunks.shape[3] == 1 else torch.cat([chunks.roll(1, 3), chunks], 4)


def fold_chunks(x: Tensor) -> Tensor:
    """[B, H, R, n, c, ...] -> [B n, H R, c, ...]"""
    return x.movedim(3, 1).flatten(2, 3).flatten(0, 1)


class Mixer(nn.Module):
    """x [B, N, C] -> [B, N, C] with chunks of `chunk_size` tokens and `num_hashes` rounds."""

    def __init__(self, channel_dim: int, num_heads: int, norm: str, chunk_size: int, num_hashes: int) -> None:
        super().__init__()
        self.head_dim = head_width(channel_dim, num_heads)
        check_positive(chunk_size=chunk_size, num_hashes=num_hashes)
        self.num_heads, self.chunk_size, self.num_hashes = num_heads, chunk_size, num_hashes
        self.operations = f"3 C^2 + {4 * num_hashes * chunk_size} C"  # multiply-adds a token, forward
        self.query_proj, self.value_proj = nn.Linear(channel_dim, channel_dim), nn.Linear(channel_dim, channel_dim)
        self.out_proj = nn.Linear(channel_dim, channel_dim)
        self.seed: Tensor
        self.register_buffer("seed", new_seed())
        init_linears(self)

    def rotations(self, columns: int, like: Tensor) -> Tensor:
        """R [H, D, R, columns]: fresh in training, the seed's in evaluation."""
        shape, dtype = (self.num_heads, self.head_dim, self.num_hashes, columns), torch.promote_types(like.dtype, torch.float32)
        if self.training:
            return torch.randn(shape, dtype=dtype, device=like.device)
        return torch.randn(shape, dtype=dtype, generator=generator_of(self.seed)).to(like.device)

    @torch.no_grad()
    def buckets(self, q: Tensor, real: Tensor | None) -> Tensor:
        """The bucket [B, H, R, N] of every query [B, H, N, D] in every round; the last one, b, for padding."""
        factors, rounds = bucket_factors(q.shape[2], self.chunk_size), []
        halves = [factor // 2 for factor in factors]
        with torch.autocast(q.device.type, enabled=False):
            for rotation in self.rotations(sum(halves), q).unbind(2):  # [H, D, columns]
                turned = (widened(q) @ rotation).split(halves, -1)  # [B, H, N, b_i / 2] each
                places = [math.prod(factors[:place]) * side(part) for place, part in enumerate(turned)]
                rounds.append(torch.stack(places).sum(0))
        found = torch.cat(rounds, -1).mT  # [B, H, R, N]
        return found if real is None else found.masked_fill(~real[:, None, None], math.prod(factors))

    def order(self, q: Tensor, real: Tensor | None) -> Tensor:
        """Positions [B, H, R, N], sorted by bucket and then by position."""
        count = q.shape[2]
        return (self.buckets(q, real) * count + torch.arange(count, device=q.device)).argsort(-1)

    def allowed(self, real: Tensor | None, order: Tensor) -> Tensor:
        """Which keys of two chunks each query of the second may see, [B n, H R, c, 2 c]; [1, 1, c, 2 c] for all alike."""
        size, num_chunks = self.chunk_size, order.shape[-1] // self.chunk_size
        if real is None:
            keys = torch.ones(1, 1, 1, min(2, num_chunks) * size, dtype=torch.bool, device=order.device)
        else:
            keys = real[:, None, None].expand(*order.shape).gather(3, order)  # [B, H, R, N]
            keys = fold_chunks(with_previous(keys.unflatten(3, (-1, size))))[:, :, None]
        itself = torch.eye(size, dtype=torch.bool, device=order.device)
        itself = F.pad(itself, (keys.shape[-1] - size, 0))  # [c, 2 c]
        others = keys & ~itself
        return others | (itself & keys & ~others.any(-1, keepdim=True))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        (batch, count, _), size = x.shape, self.chunk_size
        real = real_in_blocks(x, mask, size)
        real = None if real is None else real.flatten(1)  # [B, N], N of whole chunks from here on
        x = to_blocks(zero_padding(x, mask), size).flatten(1, 2)
        q, v = split_heads(self.query_proj(x), self.num_heads), split_heads(self.value_proj(x), self.num_heads)
        order = self.order(q, real)
        q, v = (gather(part, order).unflatten(3, (-1, size)) for part in (q, v))  # [B, H, R, n, c, D]
        k = F.rms_norm(widened(q), (self.head_dim,), eps=NORM_EPS).to(v.dtype)  # of length D^(1/2), hence the scale
        out, lse = attend_where(fold_chunks(q), fold_chunks(with_previous(k)), fold_chunks(with_previous(v)),
                                self.allowed(real, order), scale=self.head_dim**-0.5)  # [B n, H R, c, D], [B n, H R, c]
        y = self.merged(out.unflatten(0, (batch, -1)), lse.unflatten(0, (batch, -1)), order.argsort(-1))
        return zero_padding(self.out_proj(merge_heads(y[:, :, :count])), mask)

    def merged(self, out: Tensor, lse: Tensor, back: Tensor) -> Tensor:
        """y [B, H, N, D] of the rounds' chunks, out [B, n, H R, c, D] and lse [B, n, H R, c]; back [B, H, R, N] unsorts."""
        rounds = (self.num_heads, self.num_hashes)
        out = out.unflatten(2, rounds).movedim(1, 3).flatten(3, 4)  # [B, H, R, N, D]
        lse = lse.unflatten(2, rounds).movedim(1, 3).flatten(3, 4)  # [B, H, R, N]
        out, lse = out.gather(3, back[..., None].expand_as(out)), lse.gather(3, back)
        return merge_shards(out.unbind(2), lse.unbind(2))[0]
