"""What mixers and models share: norms, the residual MLP, head split and merge, padding (FLARE, arXiv 2508.12594).

B batch, N tokens, C channels, H heads, D = C / H. GELU is the tanh approximation throughout.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from flarepp.errors import unknown

INIT_STD = 0.02  # every linear weight, latent and seed of the matched backbone starts from N(0, 0.02^2)


def widened(x: Tensor) -> Tensor:
    """Half precision to FP32, in which every norm is computed; FP32 and FP64 stay."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


class LayerNorm(nn.LayerNorm):
    """LayerNorm over the last axis, eps 1e-5, in FP32 or better; [..., dim] -> [..., dim]."""

    def __init__(self, dim: int, *, affine: bool = True) -> None:
        super().__init__(dim, eps=1e-5, elementwise_affine=affine)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(widened(x))


class RMSNorm(nn.RMSNorm):
    """RMSNorm over the last axis, eps 1e-6, in FP32 or better; [..., dim] -> [..., dim]."""

    def __init__(self, dim: int, *, affine: bool = True) -> None:
        super().__init__(dim, eps=1e-6, elementwise_affine=affine)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(widened(x))


NORMS = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}


def make_norm(norm: str, dim: int, *, affine: bool = True) -> nn.Module:
    """The norm called `norm` ("layernorm" or "rmsnorm") over `dim` channels; ValueError for another name."""
    if norm not in NORMS:
        raise ValueError(unknown("norm", norm, NORMS))
    return NORMS[norm](dim, affine=affine)


def init_linears(module: nn.Module, std: float = INIT_STD) -> None:
    """Weights N(0, std^2) and zero biases for every Linear inside `module`."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=std)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def latent_tokens(num_heads: int, num_latents: int, head_dim: int) -> nn.Parameter:
    """Learned latent queries or seeds [H, M, D] from N(0, 0.02^2)."""
    return nn.Parameter(INIT_STD * torch.randn(num_heads, num_latents, head_dim))


def head_width(channel_dim: int, num_heads: int) -> int:
    """D = C / H; ValueError when H does not divide C."""
    if num_heads < 1 or channel_dim % num_heads:
        raise ValueError(f"channel_dim {channel_dim} is not divisible by num_heads {num_heads}")
    return channel_dim // num_heads


def split_heads(x: Tensor, num_heads: int, norm: nn.Module = nn.Identity()) -> Tensor:
    """[B, N, C] -> [B, H, N, D], head-major channels, a view; normalised over D before, since norms copy what is transposed."""
    return norm(x.unflatten(-1, (num_heads, -1))).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """[B, H, N, D] -> [B, N, C], the inverse of `split_heads`."""
    return x.transpose(1, 2).flatten(2)


def zero_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """Set x [..., N, C] to 0 where mask (broadcast to [..., N]) is False, whatever stands there."""
    return x if mask is None else x.masked_fill(~mask[..., None], 0)


def in_half_precision(x: Tensor) -> bool:
    """Whether matrix products of x run in half precision, by its dtype or by autocast."""
    return x.dtype in (torch.float16, torch.bfloat16) or (
        torch.is_autocast_enabled(x.device.type) and x.dtype == torch.float32)


class ResidualLinear(nn.Linear):
    """y = x + W x + b, the "linear" projection of the FLARE study; [..., C] -> [..., C]."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def project(x: Tensor, *projections: ResidualLinear) -> tuple[Tensor, ...]:
    """Residual projections of the same tokens [..., C], each [..., C].

    In full precision as (W + I) x + b, one product and no other pass over the tokens; the gradient of x is summed by the
    products. Not in half precision, where 1 + w would round a diagonal weight to the precision of 1.
    """
    if in_half_precision(x) or x.dtype != projections[0].weight.dtype:
        return tuple(projection(x) for projection in projections)
    return _Projections.apply(x, *(p.weight for p in projections), *(p.bias for p in projections))


class _Projections(torch.autograd.Function):
    """(W_i + I) x + b_i for several i; T tokens of all samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        tokens, half = x.reshape(-1, x.shape[-1]), len(parameters) // 2  # [T, C]
        weights = [weight.clone() for weight in parameters[:half]]
        for weight in weights:
            weight.diagonal().add_(1)  # W + I
        ctx.save_for_backward(tokens, *weights)
        return tuple(torch.addmm(bias, tokens, weight.T).view_as(x) for weight, bias in zip(weights, parameters[half:]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tokens, *weights = ctx.saved_tensors
        flat = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        with torch.autocast(tokens.device.type, enabled=False):
            grad_tokens = flat[0] @ weights[0]
            for grad, weight in zip(flat[1:], weights[1:]):
                grad_tokens.addmm_(grad, weight)
            return grad_tokens.view_as(grads[0]), *(grad.T @ tokens for grad in flat), *(grad.sum(0) for grad in flat)


class ResidualMLP(nn.Module):
    """h = GELU(W_in x), L hidden layers h <- h + GELU(W h), y = W_out h; [..., in_dim] -> [..., out_dim].

    `input_residual` adds x to the first h (widths equal, else ignored), `output_residual` adds the last h to y likewise.
    """

    def __init__(self, in_dim: int, hidden_dim: int, out_dim: int, *, num_layers: int,
                 input_residual: bool = False, output_residual: bool = False) -> None:
        super().__init__()
        self.input = nn.Linear(in_dim, hidden_dim)
        self.hidden = nn.ModuleList(nn.Linear(hidden_dim, hidden_dim) for _ in range(num_layers))
        self.output = nn.Linear(hidden_dim, out_dim)
        self.input_residual = input_residual and in_dim == hidden_dim
        self.output_residual = output_residual and hidden_dim == out_dim
        init_linears(self)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.input(x), approximate="tanh")
        h = h + x if self.input_residual else h
        for layer in self.hidden:
            h = h + F.gelu(layer(h), approximate="tanh")
        y = self.output(h)
        return y + h if self.output_residual else y


PROJECTION_LAYERS = 2  # hidden layers of a model's input and output projection


def input_projection(in_dim: int, channel_dim: int) -> ResidualMLP:
    """Features [B, N, in_dim] to tokens [B, N, C] (FLARE++, Table 4)."""
    return ResidualMLP(in_dim, channel_dim, channel_dim, num_layers=PROJECTION_LAYERS, output_residual=True)


def output_projection(channel_dim: int, out_dim: int) -> ResidualMLP:
    """Normalised tokens [B, N, C] to fields [B, N, out_dim] (FLARE++, Table 4)."""
    return ResidualMLP(channel_dim, channel_dim, out_dim, num_layers=PROJECTION_LAYERS, input_residual=True)
