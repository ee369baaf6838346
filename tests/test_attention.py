"""The fused primitive against its slow twin: values, gradients, masks, layouts, memory, CUDA without CUDA."""

import math
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from flarepp import attention
from flarepp.attention import attend, attend_with_lse, kernel_for, merge_shards
from reference import UNFUSED, Recorder
from reference import attention as twin

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
SCALE = 0.6
aten = torch.ops.aten
SIZES = [  # B, H, M, N, D
    (2, 3, 5, 7, 4), (1, 1, 1, 1, 1), (3, 2, 1, 9, 3), (3, 1, 6, 1, 8), (2, 2, 40, 33, 7), (2, 1, 7, 70, 17),
    (1, 2, 2, 1030, 8), (2, 1, 600, 5, 2),
]
THROUGH = ["out", "lse", "both"]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0, dtype=FP64):
    return torch.randn(*shape, generator=generator(seed), dtype=FP64).to(dtype)


def inputs(size, dtype=FP64):
    """Leaves q [B, H, M, D], k, v [B, H, N, D]."""
    batch, num_heads, queries, keys, head_dim = size
    shapes = ((batch, num_heads, queries, head_dim), *((batch, num_heads, keys, head_dim),) * 2)
    return [normal(*shape, seed=seed, dtype=dtype).requires_grad_() for seed, shape in enumerate(shapes)]


def random_mask(batch, keys, *, empty_last=True):
    """About two thirds real; the first sample has a real key, the last of several has none."""
    mask = torch.rand(batch, keys, generator=generator(9)) < 0.67
    mask[:, : 1] = True
    if empty_last and batch > 1:
        mask[-1] = False
    return mask


def gradients(outputs, leaves, through, grads=None):
    """Gradients through out only, lse only or both, of fixed random directions."""
    grads = grads or [normal(*t.shape, seed=7 + i, dtype=t.dtype) for i, t in enumerate(outputs)]
    chosen = {"out": [0], "lse": [1], "both": [0, 1]}[through]
    return torch.autograd.grad([outputs[i] for i in chosen], leaves, [grads[i] for i in chosen],
                               materialize_grads=True)


def assert_close(ours, theirs, tolerance):
    """Same infinities, elsewhere within `tolerance` of the largest value (at least 1)."""
    assert ours.shape == theirs.shape
    assert torch.equal(ours.isinf(), theirs.isinf()) and not ours.isnan().any()
    ours, theirs = (torch.where(t.isinf(), 0, t).to(FP64) for t in (ours.detach(), theirs.detach()))
    if ours.numel():
        assert (ours - theirs).abs().max() <= tolerance * max(1.0, theirs.abs().max())


def assert_equals_twin(leaves, through, mask=None, tolerance=1e-12, call=attend_with_lse):
    """Our values and gradients in the leaves' dtype against the twin in FP64 on the same numbers."""
    exact = [leaf.detach().to(FP64).requires_grad_() for leaf in leaves]
    ours, theirs = call(*leaves, scale=SCALE, key_mask=mask), twin(*exact, SCALE, mask)
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one, other, tolerance)
    found, expected = gradients(ours, leaves, through), gradients(theirs, exact, through)
    for leaf, one, other in zip(leaves, found, expected, strict=True):
        assert one.dtype == leaf.dtype
        assert_close(one, other, tolerance)


# --- which kernel


@pytest.mark.parametrize("device, dtype, head_dim, masked, kernel", [
    *[("cpu", dtype, head_dim, masked, "cpu_flash") for dtype in (FP16, BF16, FP32, FP64)
      for head_dim in (1, 8, 300) for masked in (False, True)],
    *[("cuda", dtype, head_dim, False, "cuda_flash") for dtype in (FP16, BF16) for head_dim in (8, 16, 248)],
    *[("cuda", dtype, head_dim, True, "cuda_efficient") for dtype in (FP16, BF16, FP32)
      for head_dim in (8, 256)],
    *[("cuda", FP32, head_dim, False, "cuda_efficient") for head_dim in (8, 256, 264)],
    *[("cuda", dtype, 264, False, "cuda_efficient") for dtype in (FP16, BF16)],
    *[("cuda", FP64, 8, masked, "unfused") for masked in (False, True)],
])
def test_kernel_table(device, dtype, head_dim, masked, kernel):
    assert kernel_for(device, dtype, head_dim, masked) == kernel
    assert kernel in attention.KERNELS


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_other_dtypes_are_refused(device, dtype):
    with pytest.raises(ValueError, match=f"{dtype}.*float16"):
        kernel_for(device, dtype, 8, False)


@pytest.mark.parametrize("device", ["mps", "xpu", "meta"])
def test_other_devices_are_refused(device):
    with pytest.raises(ValueError, match=f"{device}.*cuda"):
        kernel_for(device, FP32, 8, False)


# --- values and gradients


@pytest.mark.parametrize("through", THROUGH)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_fp64_equals_the_twin(size, masked, through):
    assert_equals_twin(inputs(size), through, random_mask(size[0], size[3]) if masked else None)


@pytest.mark.parametrize("through", THROUGH)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype, tolerance", [(FP32, 3e-6), (FP16, 3e-3), (BF16, 2e-2)], ids=str)
@pytest.mark.parametrize("size", [(2, 3, 5, 7, 4), (2, 2, 40, 33, 7), (2, 1, 7, 200, 16)], ids=str)
def test_other_dtypes_equal_the_twin(size, dtype, tolerance, masked, through):
    leaves = inputs(size, dtype)
    mask = random_mask(size[0], size[3]) if masked else None
    assert_equals_twin(leaves, through, mask, tolerance)
    out, lse = attend_with_lse(*leaves, scale=SCALE, key_mask=mask)
    assert (out.dtype, lse.dtype) == (dtype, FP32)


@pytest.mark.parametrize("masked", [False, True])
def test_attend_is_the_first_result(masked):
    leaves, mask = inputs((2, 3, 5, 7, 4)), random_mask(2, 7) if masked else None
    out, lse = attend_with_lse(*leaves, scale=SCALE, key_mask=mask)
    assert torch.equal(attend(*leaves, scale=SCALE, key_mask=mask), out)
    assert (out.dtype, lse.dtype, out.shape, lse.shape) == (FP64, FP64, (2, 3, 5, 4), (2, 3, 5))


@pytest.mark.parametrize("masked", [False, True])
def test_gradcheck(masked):
    mask = random_mask(2, 5) if masked else None
    assert torch.autograd.gradcheck(lambda q, k, v: attend_with_lse(q, k, v, scale=SCALE, key_mask=mask)[0],
                                    inputs((2, 2, 3, 5, 3)))
    mask = random_mask(2, 5, empty_last=False) if masked else None
    assert torch.autograd.gradcheck(lambda q, k, v: attend_with_lse(q, k, v, scale=SCALE, key_mask=mask),
                                    inputs((2, 2, 3, 5, 3)))


def test_large_scores_do_not_overflow():
    leaves = inputs((1, 1, 3, 5, 4))
    out, lse = attend_with_lse(*leaves, scale=1e4)
    winners = torch.einsum("bhmd,bhnd->bhmn", leaves[0], leaves[1]).max(-1)
    assert_close(lse, 1e4 * winners.values, 1e-12)
    assert_close(out, leaves[2][0, 0][winners.indices], 1e-12)


@pytest.mark.parametrize("dtype, depth, tolerance", [(FP64, 400, 1e-11), (FP32, 50, 1e-3)], ids=str)
@pytest.mark.parametrize("through", THROUGH)
def test_masked_keys_above_very_negative_scores(dtype, depth, tolerance, through):
    """A padded key scores 0, far above every real one: exp(0 - lse) overflows where the mask is forgotten."""
    q, k, v = inputs((2, 1, 3, 5, 4), dtype)
    k = (-depth * (1 + k.detach().abs())).requires_grad_()
    q = (1 + q.detach().abs()).requires_grad_()
    assert_equals_twin([q, k, v], through, random_mask(2, 5, empty_last=False) & (torch.arange(5) < 3), tolerance)


# --- without keys


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [FP64, FP32, FP16], ids=str)
def test_no_keys_at_all(dtype, masked):
    leaves = inputs((2, 3, 5, 0, 4), dtype)
    mask = torch.zeros(2, 0, dtype=torch.bool) if masked else None
    out, lse = attend_with_lse(*leaves, scale=SCALE, key_mask=mask)
    assert (out.shape, out.dtype, lse.shape) == ((2, 3, 5, 4), dtype, (2, 3, 5)) and (out == 0).all()
    assert lse.dtype == (FP64 if dtype == FP64 else FP32) and (lse == -math.inf).all()
    found = gradients((out, lse), leaves, "out")
    assert [grad.shape for grad in found] == [leaf.shape for leaf in leaves] and (found[0] == 0).all()


def test_no_keys_shared_latents():
    q, k, v = inputs((2, 3, 5, 0, 4))
    q = q[:1].detach().requires_grad_()
    out = attend(q, k, v, scale=SCALE)
    assert out.shape == (2, 3, 5, 4)
    assert (torch.autograd.grad(out.sum(), q)[0] == torch.zeros(1, 3, 5, 4)).all()


@pytest.mark.parametrize("through", ["lse", "both"])
def test_log_sum_exp_without_keys_is_differentiable(through):
    leaves = inputs((2, 3, 5, 0, 4))
    found = gradients(attend_with_lse(*leaves, scale=SCALE), leaves, through)
    assert [grad.shape for grad in found] == [leaf.shape for leaf in leaves]
    assert all((grad == 0).all() for grad in found)


@pytest.mark.parametrize("masked", [False, True])
def test_no_queries(masked):
    leaves = inputs((2, 3, 0, 6, 4))
    out, lse = attend_with_lse(*leaves, scale=SCALE, key_mask=random_mask(2, 6) if masked else None)
    assert (out.shape, lse.shape) == ((2, 3, 0, 4), (2, 3, 0))
    assert all((grad == 0).all() for grad in torch.autograd.grad(out.sum(), leaves))


@pytest.mark.parametrize("through", THROUGH)
@pytest.mark.parametrize("dtype", [FP64, FP32, FP16, BF16], ids=str)
def test_fully_masked_samples_give_nothing(dtype, through):
    leaves = inputs((3, 2, 4, 6, 5), dtype)
    mask = torch.zeros(3, 6, dtype=torch.bool)
    mask[1, 2] = True
    out, lse = attend_with_lse(*leaves, scale=SCALE, key_mask=mask)
    assert (out[::2] == 0).all() and (lse[::2] == -math.inf).all() and lse[1].isfinite().all()
    assert torch.equal(out[1], leaves[2][1, :, 2:3].expand(-1, 4, -1))
    for grad in gradients((out, lse), leaves, through):
        assert grad.isfinite().all() and (grad[::2] == 0).all()


@pytest.mark.parametrize("keys", [0, 5])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_rows_without_keys_give_nothing_whatever_the_query(poison, keys):
    q, k, v = inputs((1, 2, 4, keys, 3))
    q = torch.full_like(q, poison)
    out, lse = attend_with_lse(q, k, v, scale=SCALE, key_mask=torch.zeros(1, keys, dtype=torch.bool))
    assert (out == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize("through", THROUGH)
@pytest.mark.parametrize("dtype", [FP64, FP32, FP16], ids=str)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_stands_behind_the_mask_leaks_nowhere(poison, dtype, through):
    mask = random_mask(3, 7)
    hidden = ~mask[:, None, :, None]
    results = []
    for value in (0.0, poison):
        q, k, v = inputs((3, 2, 4, 7, 5), dtype)
        k, v = (t.detach().masked_fill(hidden, value).requires_grad_() for t in (k, v))
        outputs = attend_with_lse(q, k, v, scale=SCALE, key_mask=mask)
        results.append((*outputs, *gradients(outputs, (q, k, v), through)))
    for clean, poisoned in zip(*results, strict=True):
        assert torch.equal(clean, poisoned)
    for grad in results[1][3:]:
        assert (grad.masked_select(hidden) == 0).all() and grad.isfinite().all()


# --- layouts


LAYOUTS = {  # shape of the leaf for a wanted [B, H, N, D], and the view on it
    "split heads": (lambda b, h, n, d: (b, n, h * d),
                    lambda t, b, h, n, d: t.unflatten(-1, (h, d)).transpose(1, 2)),
    "every other channel": (lambda b, h, n, d: (b, h, n, 2 * d), lambda t, b, h, n, d: t[..., ::2]),
    "channels before tokens": (lambda b, h, n, d: (b, h, d, n), lambda t, b, h, n, d: t.transpose(-1, -2)),
    "one sample for all": (lambda b, h, n, d: (1, h, n, d), lambda t, b, h, n, d: t.expand(b, h, n, d)),
    "one head for all": (lambda b, h, n, d: (b, 1, n, d), lambda t, b, h, n, d: t.expand(b, h, n, d)),
    "one token for all": (lambda b, h, n, d: (b, h, 1, d), lambda t, b, h, n, d: t.expand(b, h, n, d)),
    "one channel for all": (lambda b, h, n, d: (b, h, n, 1), lambda t, b, h, n, d: t.expand(b, h, n, d)),
    "one number for all": (lambda b, h, n, d: (1, 1, 1, 1), lambda t, b, h, n, d: t.expand(b, h, n, d)),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype, tolerance", [(FP64, 1e-12), (FP16, 1e-2)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_the_inputs(layout, dtype, tolerance, masked):
    shape, view = LAYOUTS[layout]
    sizes = ((3, 2, 4, 5), (3, 2, 6, 5), (3, 2, 6, 5))
    leaves = [normal(*shape(*size), seed=i, dtype=dtype).requires_grad_() for i, size in enumerate(sizes)]

    def viewed(function):
        def call(*tensors, scale=SCALE, key_mask=None):
            views = [view(t, *size) for t, size in zip(tensors, sizes, strict=True)]
            return function(*views, scale=scale, key_mask=key_mask)
        return call

    mask = random_mask(3, 6) if masked else None
    exact = [leaf.detach().to(FP64).requires_grad_() for leaf in leaves]
    ours, theirs = viewed(attend_with_lse)(*leaves, key_mask=mask), viewed(twin)(*exact, key_mask=mask)
    found, expected = gradients(ours, leaves, "both"), gradients(theirs, exact, "both")
    for one, other in zip((*ours, *found), (*theirs, *expected), strict=True):
        assert_close(one, other, tolerance)


@pytest.mark.parametrize("through", THROUGH)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_the_incoming_gradients(layout, through):
    shape, view = LAYOUTS[layout]
    leaves, size = inputs((3, 2, 4, 6, 5)), (3, 2, 4, 5)
    grads = [view(normal(*shape(*size), seed=5), *size), view(normal(*shape(*size), seed=6), *size)[..., 0]]
    ours, theirs = attend_with_lse(*leaves, scale=SCALE), twin(*leaves, SCALE)
    found, expected = (gradients(outputs, leaves, through, grads) for outputs in (ours, theirs))
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, 1e-12)


@pytest.mark.parametrize("through", THROUGH)
@pytest.mark.parametrize("masked", [False, True])
def test_shared_latents_sum_their_gradient_over_the_batch(masked, through):
    q, k, v = inputs((3, 2, 4, 6, 5))
    leaves = [q[:1].detach().requires_grad_(), k, v]
    assert_equals_twin(leaves, through, random_mask(3, 6) if masked else None)


def test_inputs_and_incoming_gradients_are_left_alone():
    leaves, mask = inputs((2, 2, 4, 7, 7)), random_mask(2, 7)
    outputs = attend_with_lse(*leaves, scale=SCALE, key_mask=mask)
    grads = [normal(*t.shape) for t in outputs]
    before = [t.detach().clone() for t in (*leaves, *outputs, *grads)]
    gradients(outputs, leaves, "both", grads)
    assert all(torch.equal(old, new) for old, new in zip(before, (*leaves, *outputs, *grads), strict=True))


# --- merging shards


def shards_of(leaves, bounds, mask):
    q, k, v = leaves
    parts = []
    for start, stop in zip(bounds, bounds[1:], strict=False):
        part = None if mask is None else mask[:, start:stop]
        parts.append(attend_with_lse(q, k[:, :, start:stop], v[:, :, start:stop], scale=SCALE, key_mask=part))
    return merge_shards(*zip(*parts, strict=True))


@pytest.mark.parametrize("through", THROUGH)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("bounds", [(0, 17), (0, 1, 17), (0, 3, 8, 17), (0, 0, 9, 9, 17, 17)], ids=str)
def test_merged_shards_equal_dense(bounds, masked, through):
    mask = None
    if masked:  # sample 0 empty in the first half, sample 1 empty everywhere
        mask = random_mask(3, 17, empty_last=False)
        mask[0, :9], mask[1] = False, False
    assert_equals_twin(inputs((3, 2, 4, 17, 5)), through, mask,
            call=lambda q, k, v, scale, key_mask: shards_of((q, k, v), bounds, key_mask))


def test_rows_empty_in_every_shard_stay_empty():
    outs = [torch.zeros(1, 1, 2, 3, requires_grad=True) for _ in range(3)]
    lses = [torch.full((1, 1, 2), -math.inf, requires_grad=True) for _ in range(3)]
    out, lse = merge_shards(outs, lses)
    assert (out == 0).all() and (lse == -math.inf).all()
    for grad in torch.autograd.grad([out, lse], [*outs, *lses], [torch.ones_like(out), torch.ones_like(lse)]):
        assert (grad == 0).all()


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_half_precision_shards_merge_in_fp32(dtype):
    outs = [torch.full((1, 1, 2, 3), 4e4, dtype=dtype) for _ in range(4)]  # their sum exceeds FP16
    lses = [torch.full((1, 1, 2), 7.0) for _ in range(4)]
    out, lse = merge_shards(outs, lses)
    assert (out.dtype, lse.dtype) == (dtype, FP32)
    assert torch.equal(out, outs[0]) and torch.allclose(lse, torch.tensor(7 + math.log(4)))
    values = (256.0, *[0.25] * 64)  # in a half-precision sum each small one would be lost
    terms = [torch.full((1, 1, 1, 1), value, dtype=dtype) for value in values]
    out, _ = merge_shards(terms, [torch.zeros(1, 1, 1)] * 65)
    assert out.item() == pytest.approx((256 + 16) / 65, rel=5e-3 if dtype == BF16 else 1e-3)


@pytest.mark.parametrize("peak", [-1e4, 1e4])
@pytest.mark.parametrize("order", [1, -1])
def test_far_apart_shards_do_not_overflow(peak, order):
    shards = [(torch.ones(1, 1, 1, 2), torch.full((1, 1, 1), peak)),
              (torch.full((1, 1, 1, 2), 3.0), torch.full((1, 1, 1), peak - 500))]
    out, lse = merge_shards(*zip(*shards[::order], strict=True))
    assert (out == 1).all() and (lse == peak).all()


@pytest.mark.parametrize("outs, lses", [(2, 1), (1, 2), (0, 0)])
def test_shards_of_unequal_number_are_refused(outs, lses):
    with pytest.raises(ValueError, match=f"{outs} and {lses}"):
        merge_shards([torch.zeros(1, 1, 2, 3)] * outs, [torch.zeros(1, 1, 2)] * lses)


# --- autocast and errors


@pytest.mark.parametrize("half", [FP16, BF16], ids=str)
def test_autocast_casts_mixed_dtypes(half):
    q, k, v = inputs((2, 2, 4, 6, 8), FP32)
    leaves = [q, k.detach().to(half).requires_grad_(), v]
    with torch.autocast("cpu", dtype=half):
        out, lse = attend_with_lse(*leaves, scale=SCALE)
    assert (out.dtype, lse.dtype) == (half, FP32)
    assert_close(out, twin(*(leaf.detach().to(half).to(FP64) for leaf in leaves), SCALE)[0], 2e-2)
    found = torch.autograd.grad(out.float().sum() + lse.sum(), leaves)
    assert [grad.dtype for grad in found] == [FP32, half, FP32]


def test_autocast_leaves_fp64_alone():
    with torch.autocast("cpu", dtype=BF16):
        assert attend(*inputs((1, 1, 2, 3, 4)), scale=SCALE).dtype == FP64


QKV = (2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 4)


@pytest.mark.parametrize("position, shape", [
    (0, (3, 5, 4)), (0, (2, 3, 5, 6)), (0, (2, 1, 5, 4)), (0, (4, 3, 5, 4)),
    (1, (2, 3, 6, 4)), (1, (3, 7, 4)), (2, (2, 3, 7, 6)), (2, (1, 3, 7, 4)),
])
def test_wrong_shapes_are_named(position, shape):
    shapes = [shape if index == position else right for index, right in enumerate(QKV)]
    with pytest.raises(ValueError, match="attention needs q") as error:
        attend(*(torch.zeros(s) for s in shapes), scale=1.0)
    assert all(str(s) in str(error.value) for s in shapes)


@pytest.mark.parametrize("dtypes", [(FP32, FP64, FP64), (FP32, FP32, FP16), (FP16, BF16, FP16)], ids=str)
def test_mixed_dtypes_are_named(dtypes):
    tensors = [torch.zeros(shape, dtype=dtype) for shape, dtype in zip(QKV, dtypes, strict=True)]
    with pytest.raises(ValueError) as error:
        attend(*tensors, scale=1.0)
    assert all(str(dtype) in str(error.value) for dtype in dtypes)


def test_integers_are_refused():
    with pytest.raises(ValueError, match="torch.int64"):
        attend(*(torch.zeros(shape, dtype=torch.int64) for shape in QKV), scale=1.0)


@pytest.mark.parametrize("shape, dtype", [((2, 7), FP32), ((2, 6), torch.bool), ((7,), torch.bool),
                                          ((1, 7), torch.bool)])
def test_wrong_masks_are_named(shape, dtype):
    mask = torch.ones(shape, dtype=dtype)
    with pytest.raises(ValueError) as error:
        attend(*(torch.zeros(shape) for shape in QKV), scale=1.0, key_mask=mask)
    assert all(str(part) in str(error.value) for part in ((2, 7), tuple(mask.shape), mask.dtype))


def test_a_wrong_mask_is_named_when_there_are_no_keys():
    q, k = torch.zeros(2, 3, 5, 4), torch.zeros(2, 3, 0, 4)
    with pytest.raises(ValueError, match="key_mask"):
        attend(q, k, k, scale=1.0, key_mask=torch.ones(2, 7, dtype=torch.bool))


# --- memory and the operators that run


@pytest.mark.parametrize("through", THROUGH)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)
def test_only_the_fused_operator_runs_and_memory_is_linear(dtype, decode, masked, through):
    queries, keys = (700, 256) if decode else (256, 700)
    leaves, mask = inputs((2, 2, queries, keys, 8), dtype), random_mask(2, keys) if masked else None
    with Recorder() as recorder:
        outputs = attend_with_lse(*leaves, scale=SCALE, key_mask=mask)
        gradients(outputs, leaves, through, [torch.ones_like(t) for t in outputs])
    name = "_scaled_dot_product_flash_attention_for_cpu"
    assert recorder.attention() == [name, name + "_backward"]
    assert not UNFUSED & set(recorder.names)
    assert recorder.largest <= 2 * 2 * 700 * 16  # [B, H, N, D + 8], far below M * N


def test_the_latents_are_expanded_without_memory():
    q, k, v = inputs((4, 2, 300, 20, 8))
    with torch.no_grad(), Recorder() as recorder:
        attend(q[:1], k, v, scale=SCALE)
    args, _, _ = recorder.calls[recorder.names.index("_scaled_dot_product_flash_attention_for_cpu")]
    assert args[0].shape[0] == 4 and args[0].stride(0) == 0


# --- CUDA's path without CUDA: numbers


def require(condition, what):
    assert condition, f"the CUDA kernel asks for {what}"


def check_arguments(q, k, v, bias=None, *, widest=10**6):
    width = q.shape[-1]
    require(width % 8 == 0 and width <= widest, f"head widths in multiples of 8 up to {widest}; got {width}")
    require(q.shape[:2] == k.shape[:2] == v.shape[:2], "equal batches and heads")
    require(all(t.stride(-1) == 1 for t in (q, k, v)), "channels side by side")
    if bias is not None:
        require(bias.shape == (*q.shape[:3], k.shape[2]), "a bias [B, H, M, N]")
        require(bias.dtype == q.dtype, "a bias of the dtype of q")
        require(all(stride % 8 == 0 for stride in bias.stride()[:3]), "rows of the bias aligned to 8 numbers")


def forward_numbers(q, k, v, bias, scale):
    scores = scale * torch.einsum("bhmd,bhnd->bhmn", q, k) + (0 if bias is None else bias)
    return torch.einsum("bhmn,bhnd->bhmd", torch.softmax(scores, -1), v), torch.logsumexp(scores, -1)


def backward_numbers(grad, q, k, v, bias, out, lse, scale):
    """The kernels' formula: from the saved out and lse, whatever they are."""
    scores = scale * torch.einsum("bhmd,bhnd->bhmn", q, k) + (0 if bias is None else bias)
    weights = torch.exp(scores - lse[..., None])
    slopes = weights * (torch.einsum("bhmd,bhnd->bhmn", grad, v) - (grad * out).sum(-1)[..., None])
    return (scale * torch.einsum("bhmn,bhnd->bhmd", slopes, k),
            scale * torch.einsum("bhmn,bhmd->bhnd", slopes, q),
            torch.einsum("bhmn,bhmd->bhnd", weights, grad))


def flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    check_arguments(q, k, v, widest=256)
    assert (dropout_p, is_causal, return_debug_mask) == (0.0, False, False)
    out, lse = forward_numbers(q, k, v, None, scale)
    return out, lse, "queries", "keys", q.shape[2], k.shape[2], "seed", "offset", "debug"


def flash_backward(grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, seed, offset, *,
                   scale=None):
    check_arguments(q, k, v, widest=256)
    assert (cum_q, cum_k, max_q, max_k) == ("queries", "keys", q.shape[2], k.shape[2])
    assert (dropout_p, is_causal, seed, offset) == (0.0, False, "seed", "offset")
    require(lse.is_contiguous(), "a contiguous lse, which it reads by pointer")
    require(grad.stride(-1) == 1 and grad.shape == out.shape == q.shape, "a gradient like out")
    return backward_numbers(grad, q, k, v, None, out, lse, scale)


def efficient(q, k, v, bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    check_arguments(q, k, v, bias)
    assert (compute_log_sumexp, dropout_p, is_causal) == (True, 0.0, False)
    out, lse = forward_numbers(q, k, v, bias, scale)
    padded = torch.full((*lse.shape[:2], -(-q.shape[2] // 32) * 32), math.inf, dtype=lse.dtype)
    padded[..., : q.shape[2]] = lse
    return out, padded, "seed", "offset"


def efficient_backward(grad, q, k, v, bias, out, lse, seed, offset, dropout_p, wanted, is_causal=False, *,
                       scale=None):
    check_arguments(q, k, v, bias)
    assert (seed, offset, dropout_p, is_causal) == ("seed", "offset", 0.0, False)
    assert list(wanted) == [True, True, True, False]
    require(lse.shape[-1] == -(-q.shape[2] // 32) * 32, "the padded lse of its forward")
    require(grad.stride(-1) == 1 and grad.shape == out.shape == q.shape, "a gradient like out")
    return *backward_numbers(grad, q, k, v, bias, out, lse[..., : q.shape[2]], scale), None


@pytest.fixture
def cuda_numbers(monkeypatch):
    """Serve CPU tensors by stand-ins for CUDA's operators; returns a function that chooses the kernel."""
    operators = {"flash": (flash, flash_backward), "efficient": (efficient, efficient_backward)}
    table = {f"_scaled_dot_product_{name}_attention{suffix}": function for name, pair in operators.items()
             for suffix, function in zip(("", "_backward"), pair, strict=True)}
    monkeypatch.setattr(attention, "aten", SimpleNamespace(**table))
    return lambda kernel: monkeypatch.setattr(attention, "kernel_for", lambda *arguments: kernel)


@pytest.mark.parametrize("through", THROUGH)
@pytest.mark.parametrize("kernel, masked", [("cuda_flash", False), ("cuda_efficient", False),
                                            ("cuda_efficient", True), ("unfused", False), ("unfused", True)])
@pytest.mark.parametrize("size", [(2, 3, 5, 7, 8), (3, 2, 33, 16, 16), (1, 1, 32, 1, 8)], ids=str)
def test_numbers_of_the_cuda_path(cuda_numbers, size, kernel, masked, through):
    cuda_numbers(kernel)
    assert_equals_twin(inputs(size), through, random_mask(size[0], size[3]) if masked else None)


@pytest.mark.parametrize("kernel, masked", [("cuda_flash", False), ("cuda_efficient", False), ("cuda_efficient", True)])
@pytest.mark.parametrize("size", [(1, 2, 40, 5, 8), (1, 2, 41, 5, 8), (2, 2, 41, 5, 8), (1, 2, 5, 41, 8), (2, 2, 5, 41, 8)], ids=str)
def test_numbers_of_the_cuda_path_in_parts(cuda_numbers, cut, size, kernel, masked):
    cuda_numbers(kernel)
    cut(64)
    assert_equals_twin(inputs(size), "out", random_mask(size[0], size[3]) if masked else None)


@pytest.mark.parametrize("slots", [1, 64])
def test_attend_ignores_what_stands_behind_the_mask(cut, slots):
    cut(slots)
    leaves, mask = inputs((2, 3, 5, 37, 8)), random_mask(2, 37)
    expected = attend_with_lse(*leaves, scale=SCALE, key_mask=mask)[0]
    with torch.no_grad():
        for leaf in leaves[1:]:
            leaf.masked_fill_(~mask[:, None, :, None], math.nan)
    out = attend(*leaves, scale=SCALE, key_mask=mask)
    assert_close(out, expected, 1e-13)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(out.sum(), leaves))


@pytest.mark.parametrize("through", THROUGH)
@pytest.mark.parametrize("head_dim", [248, 256, 264])
def test_the_widest_heads_of_the_cuda_path(cuda_numbers, head_dim, through):
    """Whichever kernel serves them takes the backward too, a channel wider for the gradient of lse."""
    cuda_numbers(kernel_for("cuda", FP16, head_dim, False))
    assert_equals_twin(inputs((1, 1, 2, 3, head_dim)), through)


# --- parts of an axis


SLOTS = [1, 2, 5, 64]
LONG = [(1, 2, 5, 37, 8), (2, 2, 4, 36, 3), (2, 3, 40, 5, 8), (1, 1, 64, 3, 8), (3, 1, 7, 100, 4), (1, 1, 9, 9, 8)]


@pytest.fixture
def cut(monkeypatch):
    """Returns a function that pretends a device of so many slots on which parts of three tokens pay."""
    monkeypatch.setattr(attention, "LEAST_PART", 3)
    return lambda slots: monkeypatch.setattr(attention, "parallel_slots", lambda device: slots)


@pytest.mark.parametrize("through", THROUGH)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("size", LONG, ids=str)
def test_parts_equal_the_twin(cut, size, slots, masked, through):
    cut(slots)
    mask = random_mask(size[0], size[3]) if masked else None
    if masked:
        mask[0, : size[3] // 2] = False  # whole parts without a key
        mask[0, -1] = True
    assert_equals_twin(inputs(size), through, mask)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("size", [*LONG, *SIZES[:5]], ids=str)
def test_attend_equals_attend_with_lse(cut, size, slots, masked):
    """Where one kernel serves, PyTorch differentiates it; else our function does."""
    leaves, mask = inputs(size), random_mask(size[0], size[3]) if masked else None
    cut(1)
    expected = attend_with_lse(*leaves, scale=SCALE, key_mask=mask)
    cut(slots)
    out = attend(*leaves, scale=SCALE, key_mask=mask)
    assert_close(out, expected[0], 1e-13)
    direction = normal(*out.shape, seed=7)
    for one, other in zip(torch.autograd.grad(out, leaves, direction), torch.autograd.grad(expected[0], leaves, direction)):
        assert_close(one, other, 1e-13)


@pytest.mark.parametrize("dtype, tolerance", [(FP32, 3e-6), (FP16, 4e-3), (BF16, 3e-2)], ids=str)
@pytest.mark.parametrize("size", [(1, 2, 5, 37, 8), (2, 3, 40, 5, 8)], ids=str)
def test_parts_of_other_dtypes_equal_the_twin(cut, size, dtype, tolerance):
    cut(64)
    assert_equals_twin(inputs(size, dtype), "out", None, tolerance)


@pytest.mark.parametrize("pieces, length, expected", [
    (8, 1_000_000, [(slice(0, 1_000_000), 32)]),
    (264, 1_000_000, [(slice(0, 1_000_000), 1)]), (8, 2047, [(slice(0, 2047), 1)]),
    (8, 4099, [(slice(0, 4096), 4), (slice(4096, 4099), 1)]), (1000, 10**6, [(slice(0, 10**6), 1)]),
])
def test_where_an_axis_is_cut(monkeypatch, pieces, length, expected):
    """256 slots; parts of 1,024 tokens or more."""
    monkeypatch.setattr(attention, "parallel_slots", lambda device: 256)
    assert attention.spans(torch.device("cpu"), pieces, length) == expected


@pytest.mark.parametrize("size, forward, backward", [
    ((1, 8, 64, 9000, 16), 2, 3), ((1, 8, 9000, 64, 16), 1, 3), ((4, 8, 64, 9000, 16), 4, 4)], ids=str)
def test_parts_stand_in_the_batch_of_one_call(monkeypatch, size, forward, backward):
    """Twenty slots: of one sample an encoder has 16 pieces forward, 8 backward; a batch of four fills the device."""
    monkeypatch.setattr(attention, "parallel_slots", lambda device: 20)
    leaves = inputs(size, FP32)
    with Recorder() as recorder:
        torch.autograd.grad(attend(*leaves, scale=SCALE).sum(), leaves)
    calls = [(name, args) for name, (args, _, _) in zip(recorder.names, recorder.calls) if "attention" in name]
    name = "_scaled_dot_product_flash_attention_for_cpu"
    assert [called for called, _ in calls] == [name, f"{name}_backward"] and not UNFUSED & set(recorder.names)
    assert [calls[0][1][0].shape[0], calls[1][1][1].shape[0]] == [forward, backward]


# --- CUDA's path without CUDA: the real operators' schemas, shapes and dtypes on fake tensors


class ByOperators(TorchFunctionMode):
    """Python's indexing, ~ and some methods want a CUDA device even for fake tensors: call the operators."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.__getitem__:
            return sliced(*args)
        if function is torch.Tensor.__setitem__:
            write = aten.copy_.default if isinstance(args[2], torch.Tensor) else aten.fill_.Scalar
            return write(sliced(*args[:2]), args[2])
        if function is torch.Tensor.contiguous:
            return aten.clone.default(args[0], memory_format=torch.contiguous_format)
        if function is torch.Tensor.to and isinstance(args[1], torch.dtype):
            return aten._to_copy.default(args[0], dtype=args[1])
        if function is torch.Tensor.__invert__:
            return aten.bitwise_not.default(*args)
        return function(*args, **(kwargs or {}))


def sliced(tensor, index):
    index = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in index:
        where = index.index(Ellipsis)
        missing = tensor.ndim - sum(item is not None for item in index) + 1
        index[where: where + 1] = [slice(None)] * missing
    dim = 0
    for item in index:
        if item is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(item, int):
            tensor, dim = tensor.select(dim, item), dim - 1
        elif item != slice(None):
            tensor = aten.slice.Tensor(tensor, dim, item.start, item.stop, item.step or 1)
        dim += 1
    return tensor


def fake_inputs(head_dim, dtype, masked, batch=2):
    """q with a batch of one, k and v [2, 3, 13, D] as views of projections, a mask, all on "cuda"."""
    q = torch.empty(1, 3, 5, head_dim, device="cuda", dtype=dtype)
    k, v = (torch.empty(batch, 13, 3, head_dim, device="cuda", dtype=dtype).transpose(1, 2) for _ in range(2))
    return q, k, v, torch.empty(batch, 13, device="cuda", dtype=torch.bool) if masked else None


def fake_context():
    context = SimpleNamespace(set_materialize_grads=lambda flag: None, saved_tensors=())
    context.save_for_backward = lambda *tensors: setattr(context, "saved_tensors", tensors)
    return context


FAKE = [(FP16, False, "flash"), (BF16, False, "flash"), (FP16, True, "efficient"), (BF16, True, "efficient"),
        (FP32, False, "efficient"), (FP32, True, "efficient"), (FP64, False, None), (FP64, True, None)]


@pytest.fixture(params=[1, 264], ids="slots {}".format)
def fake_cuda(monkeypatch, request):
    """With one slot and with those of a large device: then axes of 4 tokens or more are cut."""
    monkeypatch.setattr(attention, "parallel_slots", lambda device: request.param)
    monkeypatch.setattr(attention, "LEAST_PART", 4)
    with ExitStack() as stack, FakeTensorMode(), torch.no_grad():
        recorder = stack.enter_context(Recorder())
        stack.enter_context(ByOperators())
        yield recorder


def check_fused_call(recorder, name):
    """One call of the operator `name`, a second for what division leaves over, on CUDA, with arguments the kernels take."""
    if name is None:
        assert recorder.attention() == [] and UNFUSED & set(recorder.names)
        return
    calls = 1 if attention.parallel_slots("cuda") == 1 else 2
    assert recorder.attention() == [name] * calls and not UNFUSED & set(recorder.names)
    args, kwargs, _ = recorder.calls[recorder.names.index(name)]
    if name.endswith("backward"):
        require(args[0].stride(-1) == 1, "a gradient with channels side by side")
        args = args[1:]
    bias = args[3] if "efficient" in name else None
    check_arguments(*args[:3], bias, widest=256 if "flash" in name else 10**6)
    assert args[0].device.type == "cuda" and kwargs == {"scale": SCALE}


@pytest.mark.parametrize("head_dim", [5, 8, 64])
@pytest.mark.parametrize("dtype, masked, operator", FAKE, ids=str)
def test_cuda_forward_on_fake_tensors(fake_cuda, dtype, masked, operator, head_dim):
    q, k, v, mask = fake_inputs(head_dim, dtype, masked)
    out, lse = attend_with_lse(q, k, v, scale=SCALE, key_mask=mask)
    assert (out.shape, out.dtype, out.device.type) == ((2, 3, 5, head_dim), dtype, "cuda")
    assert (lse.shape, lse.dtype) == ((2, 3, 5), FP64 if dtype == FP64 else FP32)
    check_fused_call(fake_cuda, operator and f"_scaled_dot_product_{operator}_attention")


@pytest.mark.parametrize("through", THROUGH)
@pytest.mark.parametrize("dtype, masked, operator", FAKE, ids=str)
def test_cuda_backward_on_fake_tensors(fake_cuda, dtype, masked, operator, through):
    q, k, v, mask = fake_inputs(16, dtype, masked)
    q, context = q.expand(2, -1, -1, -1), fake_context()
    out, lse = attention._FusedAttention.forward(context, q, k, v, mask, SCALE)
    fake_cuda.names.clear(), fake_cuda.calls.clear()
    transposed = torch.empty(2, 3, 16, 5, device="cuda", dtype=dtype).transpose(-1, -2)
    grad_out = None if through == "lse" else transposed
    grad_lse = None if through == "out" else torch.empty_like(lse)
    found = attention._FusedAttention.backward(context, grad_out, grad_lse)
    assert found[3:] == (None, None)
    assert [(grad.shape, grad.dtype, grad.device.type) for grad in found[:3]] == [
        (t.shape, dtype, "cuda") for t in (q, k, v)]
    check_fused_call(fake_cuda, operator and f"_scaled_dot_product_{operator}_attention_backward")
