"""Nystromformer: softmax attention through segment means as landmarks (Xiong et al., arXiv 2102.03902).

    y = softmax_M(s q kl^T) Z softmax_N(s ql k^T) v + conv(v)        Z ~ softmax_M(s ql kl^T)^(-1),  s = D^(-1/2)
    [q | k | v] = W x + b,  out = W_out y + b_out,  ql and kl: means of q and k over M segments

Z: six steps of `kernels.iterative_inverse`. conv is a convolution of each head's values along the tokens, over `conv_kernel`
of them, or none. Segments are cut over the real tokens, equal to within one token, and their means divide by the number of
these; of fewer than M tokens each is a landmark and the others are none. Padding is 0 to the convolution.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flarepp.attention import attend
from flarepp.kernels import gather_tokens, iterative_inverse, product, real_tokens
from flarepp.layers import head_width, init_linears, merge_heads, split_heads, widened, zero_padding


def segment_means(x: Tensor, mask: Tensor | None, num_segments: int) -> tuple[Tensor, Tensor | None]:
    """Means of x [B, N, C] over equal segments of its real tokens, [B, M, C]; which segments are not empty, None for all."""
    num_tokens, (positions, count) = x.shape[1], real_tokens(x, mask)
    bounds = -(-count * torch.arange(num_segments + 1, device=x.device) // num_segments)  # [B, M + 1]
    ranks = bounds[:, :-1, None] + torch.arange(-(-num_tokens // num_segments), device=x.device)  # [B, M, longest]
    inside = ranks < bounds[:, 1:, None]
    tokens = gather_tokens(x, positions.gather(1, ranks.clamp(max=num_tokens - 1).flatten(1))).unflatten(1, ranks.shape[1:])
    length = inside.sum(-1, keepdim=True)  # [B, M, 1]
    return zero_padding(tokens, inside).sum(2) / length.clamp(min=1), \
        None if mask is None and num_tokens >= num_segments else length[..., 0] > 0


class Mixer(nn.Module):
    """x [B, N, C] -> [B, N, C] with `num_landmarks` M landmarks; rank M a head besides the convolution."""

    def __init__(self, channel_dim: int, num_heads: int, norm: str, num_landmarks: int, *, conv_kernel: int | None = 35) -> None:
        super().__init__()
        if conv_kernel is not None and (conv_kernel < 1 or conv_kernel % 2 == 0):
            raise ValueError(f"conv_kernel: got {conv_kernel}; allowed: an odd number of tokens from 1 on, or none")
        head_dim = head_width(channel_dim, num_heads)
        self.num_heads, self.num_landmarks, self.scale = num_heads, num_landmarks, head_dim**-0.5
        self.qkv_proj = nn.Linear(channel_dim, 3 * channel_dim)
        self.conv = None if conv_kernel is None else nn.Conv2d(
            num_heads, num_heads, (conv_kernel, 1), padding=(conv_kernel // 2, 0), groups=num_heads, bias=False)
        self.out_proj = nn.Linear(channel_dim, channel_dim)
        self.operations = "4 C^2 + 4 M C" + (f" + {conv_kernel} C" if conv_kernel else "")  # multiply-adds a token, forward
        init_linears(self)

    def inverse(self, q: Tensor, k: Tensor, real: Tensor | None) -> Tensor:
        """Z [B, H, M, M] of the landmarks q, k [B, H, M, D] in FP32 or better; 0 for those that are none."""
        scores = self.scale * product(widened(q), widened(k).mT)
        if real is None:
            return iterative_inverse(torch.softmax(scores, -1))
        among = scores.masked_fill(~real[:, None, None], torch.finfo(scores.dtype).min)
        return iterative_inverse(zero_padding(torch.softmax(among, -1), real[:, None]))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        qkv = self.qkv_proj(zero_padding(x, mask))  # [B, N, 3 C]
        q, k, v = (split_heads(part, self.num_heads) for part in qkv.chunk(3, dim=-1))  # [B, H, N, D]
        means, real = segment_means(widened(qkv[..., :2 * x.shape[-1]]), mask, self.num_landmarks)
        landmark_q, landmark_k = (split_heads(part.to(v.dtype), self.num_heads) for part in means.chunk(2, dim=-1))
        z = attend(landmark_q, k, v, scale=self.scale, key_mask=mask)  # [B, H, M, D]
        z = product(self.inverse(landmark_q, landmark_k, real), widened(z)).to(v.dtype)
        y = attend(q, landmark_k, z, scale=self.scale, key_mask=real)  # [B, H, N, D]
        y = y if self.conv is None else y + self.conv(zero_padding(v, None if mask is None else mask[:, None]))
        return zero_padding(self.out_proj(merge_heads(y)), mask)
