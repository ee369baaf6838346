"""Latent Neural Operator: encode into M modes, Transformer blocks among them, decode with the same scores (arXiv 2406.03923).

    X = mlp(features),  Y = mlp'(features),  S = mlp''(X)  [N, M]        Z = softmax_N(S)^T Y
    each block: Z <- Z + W_o attend(q, k, v of LN(Z)),  Z <- Z + W_2 GELU(W_1 LN(Z)), width 2 C
    out = mlp'''(softmax_M(S) Z)

Here mlp(x) = W_out r,  r <- r + GELU(W r) `num_layers` times from r = GELU(W_in x). Exact GELU, PyTorch's own initialisation.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flarepp.attention import attend
from flarepp.layers import LayerNorm, head_width, merge_heads, split_heads, widened, zero_padding

FFN_RATIO = 2


class MLP(nn.Module):
    """[..., in_dim] -> [..., out_dim] with `num_layers` residual hidden layers of width `hidden_dim`."""

    def __init__(self, in_dim: int, hidden_dim: int, out_dim: int, num_layers: int) -> None:
        super().__init__()
        self.input = nn.Linear(in_dim, hidden_dim)
        self.hidden = nn.ModuleList(nn.Linear(hidden_dim, hidden_dim) for _ in range(num_layers))
        self.output = nn.Linear(hidden_dim, out_dim)

    def forward(self, x: Tensor) -> Tensor:
        r = F.gelu(self.input(x))
        for layer in self.hidden:
            r = r + F.gelu(layer(r))
        return self.output(r)


class ModeBlock(nn.Module):
    """Pre-norm self-attention and feed-forward among the modes: [B, M, C] -> [B, M, C]."""

    def __init__(self, channel_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.scale = num_heads, head_width(channel_dim, num_heads) ** -0.5
        self.norm1, self.norm2 = LayerNorm(channel_dim), LayerNorm(channel_dim)
        self.query_proj, self.key_proj, self.value_proj, self.out_proj = (
            nn.Linear(channel_dim, channel_dim) for _ in range(4))
        self.ffn_input = nn.Linear(channel_dim, FFN_RATIO * channel_dim)
        self.ffn_output = nn.Linear(FFN_RATIO * channel_dim, channel_dim)

    def forward(self, z: Tensor) -> Tensor:
        t = self.norm1(z)
        q, k, v = (split_heads(proj(t), self.num_heads) for proj in (self.query_proj, self.key_proj, self.value_proj))
        z = z + self.out_proj(merge_heads(attend(q, k, v, scale=self.scale)))
        return z + self.ffn_output(F.gelu(self.ffn_input(self.norm2(z))))


class Model(nn.Module):
    """features [B, N, in_dim] -> [B, N, out_dim] through `num_modes` M modes; padded tokens neither matter nor have a value."""

    def __init__(self, *, in_dim: int, out_dim: int, channel_dim: int, num_heads: int, num_blocks: int, num_modes: int,
                 num_layers: int, grid: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.trunk_proj = MLP(in_dim, channel_dim, channel_dim, num_layers)
        self.branch_proj = MLP(in_dim, channel_dim, channel_dim, num_layers)
        self.score_proj = MLP(channel_dim, channel_dim, num_modes, num_layers)
        self.blocks = nn.ModuleList(ModeBlock(channel_dim, num_heads) for _ in range(num_blocks))
        self.out_proj = MLP(channel_dim, channel_dim, out_dim, num_layers)

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        features = zero_padding(features, mask)
        scores, values = widened(self.score_proj(self.trunk_proj(features))), widened(self.branch_proj(features))
        with torch.autocast(scores.device.type, enabled=False):  # a weight of 1 / N is nothing in half precision
            z = token_softmax(scores, mask).transpose(1, 2) @ values  # [B, M, C]
        for block in self.blocks:
            z = block(z)
        y = torch.softmax(scores, -1) @ z  # [B, N, C]
        return zero_padding(self.out_proj(y), mask)  # [B, N, out_dim]


def token_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """softmax over the tokens of scores [B, N, M]; padded tokens, and samples without any token, get 0."""
    if mask is not None:
        scores = scores.masked_fill(~(mask | ~mask.any(-1, keepdim=True))[..., None], -math.inf)
    return zero_padding(torch.softmax(scores, 1), mask)
