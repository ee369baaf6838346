"""Sequence classifier of the Long Range Arena: the matched backbone's blocks around any mixer (arXiv 2011.04006).

    x0 = token embedding + position embedding;   each block: x <- x + drop(mixer(norm(x))),  x <- x + drop(FFN(norm(x)))
    document = mean over tokens of norm(x), or its first token (`pooling` cls);   logits = head(document)
    two documents a, b share everything but the head:   logits = W_2 GELU(W_1 [a, b, a * b, a - b])

`protocol` strict: positions are added once, padding is neither attended nor pooled. `protocol` authors, as the public
code has it: positions are added again before every block, padding is a token like any other, the head of two documents is
linear in [a, b].
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flarepp.errors import unknown
from flarepp.layers import INIT_STD, ResidualMLP, init_linears, make_norm, zero_padding
from flarepp.mixers import build_mixer
from flarepp.models import backbone

POOLINGS = ("mean", "cls")
PROTOCOLS = ("strict", "authors")


class Block(backbone.Block):
    """The backbone's block with dropout on what mixer and feed-forward add."""

    def __init__(self, mixer: nn.Module, channel_dim: int, ffn_ratio: float, norm: str, dropout: float) -> None:
        super().__init__(mixer, channel_dim, ffn_ratio, norm)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.mixer(self.norm1(x), mask))
        return x + self.dropout(self.ffn(self.norm2(x)))


class PairHead(nn.Module):
    """Logits [B, K] of documents [B, 2, C]: W_2 GELU(W_1 [a, b, a * b, a - b])."""

    def __init__(self, channel_dim: int, ffn_ratio: float, num_classes: int) -> None:
        super().__init__()
        self.mlp = ResidualMLP(4 * channel_dim, int(channel_dim * ffn_ratio), num_classes, num_layers=0)

    def forward(self, documents: Tensor) -> Tensor:
        a, b = documents.unbind(1)
        return self.mlp(torch.cat([a, b, a * b, a - b], -1))


class LinearHead(nn.Linear):
    """Logits [B, K], linear in the documents [B, D, C] side by side."""

    def __init__(self, channel_dim: int, num_documents: int, num_classes: int) -> None:
        super().__init__(num_documents * channel_dim, num_classes)
        init_linears(self)

    def forward(self, documents: Tensor) -> Tensor:
        return super().forward(documents.flatten(1))


class Model(nn.Module):
    """tokens [B, D, N] (int64, 0 .. in_dim - 1, N at most seq_len) -> logits [B, out_dim]; mask [B, D, N], True for tokens.

    in_dim: the vocabulary, padding included; out_dim: the classes; seq_len: the most tokens of a document.
    """

    def __init__(self, *, in_dim: int, out_dim: int, mixer: str, channel_dim: int, num_heads: int, num_blocks: int,
                 ffn_ratio: float, norm: str, seq_len: int, num_documents: int = 1, pooling: str = "mean",
                 protocol: str = "strict", embedding_dropout: float = 0.0, block_dropout: float = 0.0,
                 head_dropout: float = 0.0, grid: None = None, **mixer_options: Any) -> None:
        super().__init__()
        for what, value, allowed in (("pooling", pooling, POOLINGS), ("protocol", protocol, PROTOCOLS)):
            if value not in allowed:
                raise ValueError(unknown(what, value, allowed))
        if num_documents not in (1, 2):
            raise ValueError(f"num_documents: got {num_documents}; allowed: 1, 2")
        self.vocabulary, self.num_documents, self.pooling, self.protocol = in_dim, num_documents, pooling, protocol
        self.max_length, places = seq_len, seq_len + (pooling == "cls")
        self.token_embedding = nn.Embedding(in_dim + (pooling == "cls"), channel_dim)
        self.position_embedding = nn.Embedding(places, channel_dim)
        self.embedding_dropout, self.head_dropout = nn.Dropout(embedding_dropout), nn.Dropout(head_dropout)
        self.blocks = nn.ModuleList(
            Block(build_mixer(mixer, channel_dim=channel_dim, num_heads=num_heads, norm=norm, seq_len=places, grid=grid,
                              **mixer_options), channel_dim, ffn_ratio, norm, block_dropout)
            for _ in range(num_blocks))
        self.out_norm = make_norm(norm, channel_dim)
        pair = num_documents == 2 and protocol == "strict"
        self.head = PairHead(channel_dim, ffn_ratio, out_dim) if pair else LinearHead(channel_dim, num_documents, out_dim)
        for embedding in (self.token_embedding, self.position_embedding):
            nn.init.normal_(embedding.weight, std=INIT_STD)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, documents, length = tokens.shape
        if documents != self.num_documents or length > self.max_length:
            raise ValueError(f"tokens {list(tokens.shape)}: the model takes {self.num_documents} documents of at most "
                             f"{self.max_length} tokens")
        mask = None if mask is None or self.protocol == "authors" else mask.flatten(0, 1)
        encoded = self.encode(tokens.flatten(0, 1), mask)  # [B D, C]
        return self.head(self.head_dropout(encoded.unflatten(0, (batch, documents))))

    def encode(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """One vector [B, C] of each document, tokens [B, N] and mask [B, N]."""
        if self.pooling == "cls":  # a token of its own in front
            tokens = F.pad(tokens, (1, 0), value=self.vocabulary)
            mask = None if mask is None else F.pad(mask, (1, 0), value=True)
        positions = self.position_embedding.weight[:tokens.shape[1]]
        x = self.token_embedding(tokens)  # [B, N, C]
        if self.protocol == "strict":
            x = x + positions
        x = zero_padding(self.embedding_dropout(x), mask)
        for block in self.blocks:
            x = block(x + positions if self.protocol == "authors" else x, mask)
        return self.pool(self.out_norm(x), mask)

    def pool(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """[B, N, C] -> [B, C]: the first token, or the mean over real tokens (0 where there is none)."""
        if self.pooling == "cls":
            return x[:, 0]
        if mask is None:
            return x.mean(1)
        return zero_padding(x, mask).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
