"""GNOT: normalised linear attention and mixtures of experts gated by position (arXiv 2302.14376), as run in the FLARE study.

    f = mlp_z(x) + placeholder,  x0 = mlp_x(x),  gates g = softmax_E(gate(x))
    each block: a = x0 + LA_cross(LN(x0), LN(f));   a <- a + LN(sum_e g_e expert_e(a));   a <- a + LA_self(LN(a), LN(a));
                f <- a + LN(sum_e g_e expert'_e(a))        out = W_2 GELU(W_1 f)
    LA(a, b) = W_o [q + q (k^T v) / (q . sum_n k_n)],  q = softmax_D(W_q a), k = softmax_D(W_k b), v = W_v b per head

Every block starts again from x0; f enters through keys and values. GELU is the exact one. `as_published`: on a structured
grid the study replaced x in mlp_x and mlp_z by the distances of the grid point to a lattice of reference points, so that the
input is seen through the gates alone. That path is offered for comparison; by default x goes everywhere.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flarepp.layers import LayerNorm, head_width, init_linears, merge_heads, split_heads, widened, zero_padding

PREPROCESSING_RATIO = 2  # hidden width over C of mlp_x, mlp_z and the output layer


class MLP(nn.Module):
    """W_out GELU(W_in x): [..., in_dim] -> [..., out_dim]."""

    def __init__(self, in_dim: int, hidden_dim: int, out_dim: int) -> None:
        super().__init__()
        self.input, self.output = nn.Linear(in_dim, hidden_dim), nn.Linear(hidden_dim, out_dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(F.gelu(self.input(x)))


class LinearAttention(nn.Module):
    """LA(a, b): a, b [B, N, C] -> [B, N, C]; padded tokens of b count nowhere. Sums over tokens in FP32 or better."""

    def __init__(self, channel_dim: int, num_heads: int) -> None:
        super().__init__()
        head_width(channel_dim, num_heads)
        self.num_heads = num_heads
        self.query_proj, self.key_proj, self.value_proj, self.out_proj = (
            nn.Linear(channel_dim, channel_dim) for _ in range(4))

    def forward(self, a: Tensor, b: Tensor, mask: Tensor | None = None) -> Tensor:
        projected = self.query_proj(a), zero_padding(self.value_proj(b), mask), self.key_proj(b)
        q, v, k = (split_heads(widened(part), self.num_heads) for part in projected)  # [B, H, N, D]
        with torch.autocast(a.device.type, enabled=False):
            q, k = torch.softmax(q, -1), torch.softmax(k, -1)
            k = k if mask is None else zero_padding(k, mask[:, None])
            mass = (q * k.sum(2, keepdim=True)).sum(-1, keepdim=True)  # [B, H, N, 1]
            if mask is not None:  # a sample without any token
                mass = mass.masked_fill(~mask.any(-1)[:, None, None, None], 1)
            y = q + q @ (k.transpose(-1, -2) @ v) / mass
        return self.out_proj(merge_heads(y))


class Experts(nn.Module):
    """sum_e g_e expert_e(a): a [B, N, C], gates [B, N, E] -> [B, N, C]."""

    def __init__(self, channel_dim: int, hidden_dim: int, num_experts: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(MLP(channel_dim, hidden_dim, channel_dim) for _ in range(num_experts))

    def forward(self, a: Tensor, gates: Tensor) -> Tensor:
        return sum(gates[..., e, None] * expert(a) for e, expert in enumerate(self.experts))


class Block(nn.Module):
    """One pass from x0 [B, N, C] and f [B, N, C] to the next f."""

    def __init__(self, channel_dim: int, num_heads: int, num_experts: int, hidden_dim: int, gate_dim: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(LayerNorm(channel_dim) for _ in range(5))
        self.cross_attention, self.self_attention = (LinearAttention(channel_dim, num_heads) for _ in range(2))
        self.experts1, self.experts2 = (Experts(channel_dim, hidden_dim, num_experts) for _ in range(2))
        self.gate = nn.Sequential(nn.Linear(gate_dim, hidden_dim), nn.GELU(), nn.Linear(hidden_dim, hidden_dim), nn.GELU(),
                                  nn.Linear(hidden_dim, num_experts))

    def forward(self, x0: Tensor, f: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        gates = torch.softmax(self.gate(positions), -1)  # [B, N, E]
        a = x0 + self.cross_attention(self.norms[0](x0), self.norms[1](f), mask)
        a = a + self.norms[2](self.experts1(a, gates))
        t = self.norms[3](a)
        a = a + self.self_attention(t, t, mask)
        return a + self.norms[4](self.experts2(a, gates))


class Model(nn.Module):
    """features [B, N, in_dim] -> [B, N, out_dim]; padded tokens (mask False) neither matter nor carry a value."""

    def __init__(self, *, in_dim: int, out_dim: int, channel_dim: int, num_heads: int, num_blocks: int, num_experts: int,
                 ffn_ratio: float, as_published: bool = False, reference_grid: int = 8, grid: tuple[int, ...] | None = None) -> None:
        super().__init__()
        hidden_dim = int(channel_dim * ffn_ratio)
        table = lattice_distances(grid, reference_grid) if as_published and grid is not None else None
        self.distances: Tensor | None
        self.register_buffer("distances", table, persistent=False)
        token_dim = in_dim if table is None else table.shape[-1]
        self.f_proj, self.x_proj = (MLP(token_dim, PREPROCESSING_RATIO * channel_dim, channel_dim) for _ in range(2))
        self.placeholder = nn.Parameter(torch.rand(channel_dim) / channel_dim)
        self.blocks = nn.ModuleList(Block(channel_dim, num_heads, num_experts, hidden_dim, in_dim) for _ in range(num_blocks))
        self.out_proj = MLP(channel_dim, PREPROCESSING_RATIO * channel_dim, out_dim)
        init_linears(self)

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        features = zero_padding(features, mask)
        tokens = features if self.distances is None else self.distances.to(features.dtype).expand(len(features), -1, -1)
        f, x0 = self.f_proj(tokens) + self.placeholder, self.x_proj(tokens)  # [B, N, C]
        for block in self.blocks:
            f = block(x0, f, features, mask)
        return zero_padding(self.out_proj(f), mask)  # [B, N, out_dim]


def lattice_distances(grid: tuple[int, ...], reference_grid: int) -> Tensor:
    """Distances [1, N, R^d] of the points of `grid` (row-major on [0, 1]^d) to those of a lattice of R points a side, FP32."""
    points, lattice = (torch.cartesian_prod(*(torch.linspace(0, 1, extent) for extent in extents)).reshape(-1, len(grid))
                       for extents in (grid, (reference_grid,) * len(grid)))
    return torch.linalg.vector_norm(points[:, None] - lattice, dim=-1)[None]
