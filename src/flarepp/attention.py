"""The fused attention primitive and the exact merge of attention over shards of the keys.

    out = softmax_N(scale * q k^T) v          lse = log sum_N exp(scale * q k^T)          (FLARE++, Section C.1)

One autograd function serves every device: it calls the fused kernel that `kernel_for` names and keeps its log-sum-exp, so no
[M, N] matrix is stored. Both results are differentiable. A row without any key gives out = 0 and lse = -inf, never NaN.
A kernel divides its work by batch, heads and tiles of one axis; where that leaves much of the device idle, a long other axis is
cut into parts that stand in the batch, and the parts are merged as those of several devices are.
B batch, H heads, M queries, N keys, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
WIDEST_FLASH_HEAD = 248
Attended = tuple[Tensor, Tensor, tuple]  # out, lse, what else the backward pass needs
Gradients = tuple[Tensor, Tensor, Tensor]  # of q, k, v


def kernel_for(device_type: str, dtype: torch.dtype, head_dim: int, masked: bool) -> str:
    """Name the kernel that serves these inputs: "cpu_flash", "cuda_flash", "cuda_efficient" or "unfused".

    CUDA flash takes half precision without a mask and head widths up to 248 (its limit is 256, and the gradient of lse adds 8
    channels); memory-efficient takes the rest of FP16, BF16 and FP32. "unfused" is FP64 on CUDA, which no fused kernel takes:
    it stores [M, N] and serves only exactness checks.
    Raises ValueError for a device or dtype that no kernel takes.
    """
    if dtype not in (*HALF, torch.float32, torch.float64):
        raise ValueError(f"attention of dtype {dtype}: allowed are float16, bfloat16, float32, float64")
    if device_type == "cpu":
        return "cpu_flash"
    if device_type != "cuda":
        raise ValueError(f"attention on device {device_type!r}: allowed are 'cpu' and 'cuda'")
    if dtype == torch.float64:
        return "unfused"
    return "cuda_flash" if dtype in HALF and not masked and head_dim <= WIDEST_FLASH_HEAD else "cuda_efficient"


def _cpu_flash(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Attended:
    return *aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias, scale=scale), ()


def _cpu_flash_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor,
                        extra: tuple, scale: float) -> Gradients:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, False, attn_mask=bias, scale=scale)


def _cuda_flash(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Attended:
    out, lse, *extra = aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)
    return out, lse, (*extra[:2], *extra[4:6])  # cumulative lengths of queries and keys, philox seed and offset


def _cuda_flash_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor,
                         extra: tuple, scale: float) -> Gradients:
    queries, keys, seed, offset = extra
    return aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse.contiguous(), queries, keys, q.shape[2], k.shape[2], 0.0, False, seed, offset, scale=scale)


def _cuda_efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Attended:
    out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(
        q, k, v, _full_bias(bias, q, k), compute_log_sumexp=True, scale=scale)
    return out, lse[..., : q.shape[2]], (seed, offset)  # the kernel pads lse along M to a multiple of 32


def _cuda_efficient_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor,
                             extra: tuple, scale: float) -> Gradients:
    wanted = [True, True, True, False]
    padded = F.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)
    return aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, _full_bias(bias, q, k), out, padded, *extra, 0.0, wanted, scale=scale)[:3]


def _unfused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Attended:
    scores = scale * q @ k.transpose(-1, -2) + (0 if bias is None else bias)  # [B, H, M, N]
    return torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1), ()


def _unfused_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor,
                      extra: tuple, scale: float) -> Gradients:
    scores = scale * q @ k.transpose(-1, -2) + (0 if bias is None else bias)  # [B, H, M, N]
    weights = torch.exp(scores - lse[..., None])
    d_scores = weights * (grad @ v.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True))
    return scale * d_scores @ k, scale * d_scores.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ grad


KERNELS = {
    "cpu_flash": (_cpu_flash, _cpu_flash_backward),
    "cuda_flash": (_cuda_flash, _cuda_flash_backward),
    "cuda_efficient": (_cuda_efficient, _cuda_efficient_backward),
    "unfused": (_unfused, _unfused_backward),
}


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _full_bias(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Expand [B, 1, 1, N] to [B, H, M, N] without memory, rows aligned to 8 elements as the kernel asks."""
    if bias is None:
        return None
    num_keys = k.shape[2]
    aligned = F.pad(bias, (0, _padded(num_keys, 8) - num_keys))[..., :num_keys]
    return aligned.expand(q.shape[0], q.shape[1], q.shape[2], num_keys)


def _mask_bias(key_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive mask [B, 1, 1, N]; a sample without any real key is left unmasked, its result is discarded afterwards."""
    attended = key_mask | ~key_mask.any(-1, keepdim=True)
    bias = torch.zeros(key_mask.shape, dtype=dtype, device=key_mask.device)
    return bias.masked_fill(~attended, -math.inf)[:, None, None, :]


def _forward(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float) -> Attended:
    bias = None if key_mask is None else _mask_bias(key_mask, q.dtype)
    kernel = kernel_for(q.device.type, q.dtype, q.shape[-1], key_mask is not None)
    return KERNELS[kernel][0](q, k, v, bias, scale)


def _backward(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, out: Tensor, lse: Tensor,
              extra: tuple, scale: float) -> Gradients:
    bias = None if key_mask is None else _mask_bias(key_mask, q.dtype)
    if key_mask is not None:  # where there is no real key, P = 0
        lse = lse.masked_fill(~key_mask.any(-1)[:, None, None], math.inf)
    kernel = kernel_for(q.device.type, q.dtype, q.shape[-1], key_mask is not None)
    return KERNELS[kernel][1](grad_out, q, k, v, bias, out, lse, extra, scale)


# --- kernels on parts of an axis

QUERY_TILE = {"cpu": 32, "cuda": 128}  # of a forward kernel, which divides its work by batch, heads and queries
KEY_TILE = {"cpu": math.inf, "cuda": 128}  # of a backward kernel, which divides it by batch, heads and keys; not so on the CPU
LEAST_PART = 1024  # tokens below which a part is not worth its merge


def parallel_slots(device: torch.device) -> int:
    """Pieces of work that fill the device: two a multiprocessor, one a thread."""
    if device.type == "cuda":
        return 2 * torch.cuda.get_device_properties(device).multi_processor_count
    return torch.get_num_threads()


def spans(device: torch.device, pieces: int, length: int) -> list[tuple[slice, int]]:
    """An axis of `length`, each span with the number of equal parts it is cut into, for a kernel that has `pieces` of work.

    One span in one part where the pieces fill the device; else as many parts as do, and what division leaves over.
    """
    parts = max(1, min(math.ceil(parallel_slots(device) / pieces), length // LEAST_PART))
    whole = length - length % parts
    return [(slice(0, whole), parts), (slice(whole, length), 1)][:1 if whole == length else 2]


def _cut_forward(q: Tensor, k: Tensor) -> list[tuple[slice, int]]:
    """Spans of the keys."""
    return spans(q.device, q.shape[:2].numel() * math.ceil(q.shape[2] / QUERY_TILE[q.device.type]), k.shape[2])


def _cut_backward(q: Tensor, k: Tensor) -> list[tuple[slice, int]]:
    """Spans of the longer of queries and keys."""
    tiles = max(1, math.ceil(k.shape[2] / KEY_TILE[q.device.type]))
    return spans(q.device, q.shape[:2].numel() * tiles, max(q.shape[2], k.shape[2]))


def _in_parts(q: Tensor, k: Tensor) -> bool:
    """Whether either pass takes more than one kernel."""
    long = max(q.shape[2], k.shape[2]) >= 2 * LEAST_PART
    return long and (_cut_forward(q, k)[0][1] > 1 or _cut_backward(q, k)[0][1] > 1)


def _fold(tensor: Tensor, span: slice, parts: int) -> Tensor:
    """[B, H, N, ...] -> [B * parts, H, n, ...], the tokens of a span; a view where they lie in one piece."""
    return tensor[:, :, span].unflatten(2, (parts, -1)).movedim(2, 1).flatten(0, 1)


def _fold_mask(key_mask: Tensor | None, span: slice, parts: int) -> Tensor | None:
    """[B, N] -> [B * parts, n]"""
    return None if key_mask is None else _fold(key_mask[:, None], span, parts)[:, 0]


def _unfold(tensor: Tensor, parts: int) -> Tensor:
    """[B * parts, H, n, ...] -> [B, H, parts * n, ...], a view."""
    return tensor.unflatten(0, (-1, parts)).movedim(1, 2).flatten(2, 3)


def _repeat(tensor: Tensor, parts: int) -> Tensor:
    """[B, ...] -> [B * parts, ...], the same for every part."""
    return tensor if parts == 1 else tensor.repeat_interleave(parts, 0)


def _total(pieces: Sequence[tuple[Tensor, int]]) -> Tensor:
    """Sum over all parts of all spans, [B * parts, ...] each -> [B, ...], in FP32 or better."""
    dtype = torch.promote_types(pieces[0][0].dtype, torch.float32)
    return sum(tensor.unflatten(0, (-1, parts)).sum(1, dtype=dtype) for tensor, parts in pieces).to(pieces[0][0].dtype)


def _joined(pieces: Sequence[tuple[Tensor, int]]) -> Tensor:
    """The spans in a row again, [B, H, N, ...]."""
    whole = [_unfold(tensor, parts) for tensor, parts in pieces]
    return whole[0] if len(whole) == 1 else torch.cat(whole, 2)


def fused_forward(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float) -> Attended:
    """Fused kernels, outside any graph: out [B, H, M, D], lse [B, H, M], and what else their backward pass needs.

    Inputs as `prepared` leaves them, at least one key; a sample without a real key gets numbers that mean nothing.
    """
    cut = _cut_forward(q, k)
    if cut[0][1] == 1:
        return _forward(q, k, v, key_mask, scale)
    outs, lses = [], []
    for span, parts in cut:
        mask = _fold_mask(key_mask, span, parts)
        out, lse, extra = _forward(_repeat(q, parts), _fold(k, span, parts), _fold(v, span, parts), mask, scale)
        out, lse = without_keys(out, lse, mask)
        outs += out.unflatten(0, (-1, parts)).unbind(1)
        lses += lse.unflatten(0, (-1, parts)).unbind(1)
    return *merge_shards(outs, lses), extra


def fused_backward(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, out: Tensor, lse: Tensor,
                   extra: tuple, scale: float) -> Gradients:
    """Gradients of q, k, v from fused kernels, with P = exp(scale * q k^T - lse) and dS = P * (G v^T - <G, out>).

    out and lse may be those over more keys than k holds: then dS is that of all of them (FLARE++, Section C.1).
    """
    grad_out = grad_out if grad_out.stride(-1) == 1 else grad_out.contiguous()
    cut = _cut_backward(q, k)
    if cut[0][1] == 1:
        return _backward(grad_out, q, k, v, key_mask, out, lse, extra, scale)
    over_keys, found = k.shape[2] > q.shape[2], []
    for span, parts in cut:
        rows, columns = (grad_out, q, out, lse), (k, v)
        if over_keys:
            grad, queries, outs, logs = (_repeat(t, parts) for t in rows)
            keys, values = (_fold(t, span, parts) for t in columns)
            mask = _fold_mask(key_mask, span, parts)
        else:
            grad, queries, outs, logs = (_fold(t, span, parts) for t in rows)
            keys, values = (_repeat(t, parts) for t in columns)
            mask = None if key_mask is None else _repeat(key_mask, parts)
        found.append([(t, parts) for t in _backward(grad, queries, keys, values, mask, outs, logs, extra, scale)])
    dq, dk, dv = zip(*found)
    return (_total(dq), _joined(dk), _joined(dv)) if over_keys else (_joined(dq), _total(dk), _total(dv))


class _FusedAttention(torch.autograd.Function):
    """(out, lse) of one fused kernel, differentiable in both.

    The gradient g of lse enters the scores' gradient as P * g. The kernel computes P * (G v^T - <G, out>); one more channel
    that is 0 in v, -g in out and 1 in G turns its inner product into <G, out> - g, so one fused call serves both gradients.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, ctx.extra = fused_forward(q, k, v, key_mask, scale)
        ctx.scale = scale
        ctx.save_for_backward(q, k, v, key_mask, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse  # [B, H, M, D], [B, H, M]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_out is None and grad_lse is None:
            return (None,) * 5
        q, k, v, key_mask, out, lse = ctx.saved_tensors
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        head_dim = q.shape[-1]
        if grad_lse is not None:
            q, k, v, out, grad_out = (_widen(t) for t in (q, k, v, out, grad_out))
            out[..., head_dim], grad_out[..., head_dim] = -grad_lse.to(out.dtype), 1
        grads = fused_backward(grad_out, q, k, v, key_mask, out, lse, ctx.extra, ctx.scale)
        return *(grad[..., :head_dim] for grad in grads), None, None


def _widen(tensor: Tensor) -> Tensor:
    """Append channels of zeros: the one that carries the gradient of lse, rounded up to the 8 that kernels like."""
    return F.pad(tensor, (0, _padded(tensor.shape[-1] + 1, 8) - tensor.shape[-1]))


def prepared(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """What the kernels take: cast as autocast would, a batch of one (shared latents) expanded, padding zeroed.

    Raises ValueError for shapes or dtypes that do not fit.
    """
    device = q.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = (t if t.dtype == torch.float64 else t.to(dtype) for t in (q, k, v))
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"attention needs one dtype; got q {q.dtype}, k {k.dtype}, v {v.dtype}")
    if q.ndim != 4 or k.shape != v.shape or q.shape[1::2] != k.shape[1::2] or q.shape[0] not in (1, k.shape[0]):
        raise ValueError("attention needs q [B, H, M, D] and k, v [B, H, N, D]; "
                         f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
    if key_mask is not None and (key_mask.shape != (k.shape[0], k.shape[2]) or key_mask.dtype != torch.bool):
        raise ValueError(f"key_mask must be bool [B, N] = {(k.shape[0], k.shape[2])}; "
                         f"got {key_mask.dtype} {tuple(key_mask.shape)}")
    if key_mask is not None:
        k, v = (t.masked_fill(~key_mask[:, None, :, None], 0) for t in (k, v))  # 0 * NaN is NaN
    q = q if q.shape[0] == k.shape[0] else q.expand(k.shape[0], -1, -1, -1)
    if device == "cuda" and q.shape[-1] % 8:  # the CUDA kernels want multiples of 8; zero channels change nothing
        q, k, v = (F.pad(t, (0, -t.shape[-1] % 8)) for t in (q, k, v))
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    return q, k, v


def without_keys(out: Tensor, lse: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """(out, lse) with 0 and -inf where a sample has no real key."""
    if key_mask is None:
        return out, lse
    empty = ~key_mask.any(-1)[:, None, None]  # [B, 1, 1]
    return out.masked_fill(empty[..., None], 0), lse.masked_fill(empty, -math.inf)


def attend_with_lse(q: Tensor, k: Tensor, v: Tensor, *, scale: float,
                    key_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Fused attention and its log-sum-exp.

    q [B, H, M, D] (or batch 1, expanded), k and v [B, H, N, D], key_mask [B, N] bool, True = a real key. Returns out
    [B, H, M, D] in the inputs' dtype and lse [B, H, M] in FP32 (FP64 for FP64). A row without keys: out = 0, lse = -inf.
    Values behind the mask may be anything, NaN included. Raises ValueError for shapes or dtypes that do not fit.
    """
    head_dim = q.shape[-1]
    q, k, v = prepared(q, k, v, key_mask)
    if k.shape[2] == 0 or q.numel() == 0:  # the CPU kernel divides by the number of keys
        lse_dtype = torch.promote_types(q.dtype, torch.float32)
        everywhere = torch.ones((), dtype=torch.bool, device=q.device)
        out = q.masked_fill(everywhere, 0) + k.sum(2, keepdim=True) + v.sum(2, keepdim=True)
        return out[..., :head_dim], out.sum(-1, dtype=lse_dtype).masked_fill(everywhere, -math.inf)
    out, lse = _FusedAttention.apply(q, k, v, key_mask, scale)
    out, lse = without_keys(out, lse, key_mask)
    return (out if out.shape[-1] == head_dim else out[..., :head_dim]), lse  # a slice of all of it would cost a copy backward


def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, key_mask: Tensor | None = None) -> Tensor:
    """softmax_N(scale * q k^T) v, fused, on any device and dtype. Arguments and errors as in `attend_with_lse`.

    Where one kernel serves both passes its derivative is PyTorch's own, which costs no Python.
    """
    queries, keys, values = prepared(q, k, v, key_mask)
    if keys.shape[2] == 0 or queries.numel() == 0 or _in_parts(queries, keys):
        return attend_with_lse(q, k, v, scale=scale, key_mask=key_mask)[0]
    out, lse, _ = _forward(queries, keys, values, key_mask, scale)
    out = without_keys(out, lse, key_mask)[0]
    return out if out.shape[-1] == q.shape[-1] else out[..., :q.shape[-1]]


def merge_shards(outs: Sequence[Tensor] | Tensor, lses: Sequence[Tensor] | Tensor) -> tuple[Tensor, Tensor]:
    """Recombine attention over disjoint shards of the keys, exactly (FLARE++, Section C.1).

    outs: sequence of [B, H, M, D], lses: sequence of [B, H, M], one pair a shard, as `attend_with_lse` returns them.
    Returns (out, lse) of the attention over all keys. Sums run in FP32 or better. A row empty in every shard stays empty.
    """
    if len(outs) != len(lses) or len(outs) == 0:
        raise ValueError(f"merge_shards needs one lse per out and at least one shard; got {len(outs)} and {len(lses)}")
    logs = torch.stack(tuple(lses))  # [R, B, H, M]
    peak = logs.detach().amax(0)
    peak = torch.where(torch.isfinite(peak), peak, torch.zeros_like(peak))
    mass = torch.exp(logs - peak)
    total = mass.sum(0)  # [B, H, M]
    empty = total == 0
    total = torch.where(empty, torch.ones_like(total), total)
    weighted = (mass[..., None] * torch.stack(tuple(outs)).to(mass.dtype)).sum(0)  # [B, H, M, D]
    lse = torch.where(empty, torch.full_like(total, -math.inf), peak + torch.log(total))
    return (weighted / total[..., None]).to(outs[0].dtype), lse
