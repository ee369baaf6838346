"""Context parallelism: R ranks compute what one process does, what they send for it, how they start and how they fail.

The ranks are forks of the test's process. One launch serves many cases: a case of R ranks runs on the first R of four.
"""

import copy
import hashlib
import importlib
import inspect
import multiprocessing
import os
import random
import select
import signal
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import isfunction
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from flarepp import attention, parallel
from flarepp.attention import attend
from flarepp.losses import mean_squared_error, training_loss
from flarepp.mixers import build_mixer, mixer_names
from flarepp.models import build_model
from flarepp.parallel import RankFailed, Ranks, Traffic, context_parallel, distributed_encode, join, launch, sync_gradients
from reference import attention as twin
from test_attention import (
    FAKE,
    check_fused_call,
    efficient,
    efficient_backward,
    fake_context,
    fake_cuda,  # noqa: F401
    fake_inputs,
    flash,
    flash_backward,
    require,
)

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
TOLERANCES = {FP64: 1e-12, FP32: 1e-5, FP16: 2e-2, BF16: 2e-2}
FLOORS = {FP64: 1e-2, FP32: 1, FP16: 1, BF16: 1}  # a gradient's size: its largest entry, at least this times the model's
MOST = 4  # ranks
SPLITS = {"flare": ({}, {"qk_norm": True}), "flarepp": ({}, {"qk_norm": True}, {"seed_norm": False}),
          "flarepp_shared": ({}, {"qk_norm": True, "seed_norm": False}), "flarepp_anchored": ({},), "transolver": ({},),
          "transolverpp": ({}, {"eval_noise": True}), "transolver3": ({}, {"tile": 4})}
FORMS = [(mixer, options) for mixer, forms in SPLITS.items() for options in forms]
ENCODERS = {"flare": 1, "flarepp": 2, "flarepp_shared": 2, "flarepp_anchored": 2}


@pytest.fixture(scope="module", autouse=True)
def small_tiles():
    """The shards of some cases, though not of all, fill several tiles."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("slices", "mixers.transolver3"):
            patch.setattr(f"flarepp.{module}.TILE", 2**6)
        yield


def splits(name):
    mixer = importlib.import_module(f"flarepp.mixers.{name}").Mixer
    return hasattr(mixer, "encode") or hasattr(mixer, "sum_over_tokens")


def test_every_mixer_that_splits_is_looked_at():
    assert set(SPLITS) == {name for name in mixer_names() if splits(name)}


# --- running cases on ranks


def several(function, cases):
    """On each of four ranks: function(case, ranks) of every case. Returns what each case's ranks, `num_ranks`, found."""
    torch.set_num_threads(1)
    with join(MOST, 1, "cpu") as everyone:
        rank, found = everyone.context_rank, []
        groups = {size: dist.new_group(list(range(size))) for size in range(1, MOST)} | {MOST: everyone.context_group}
        for case in cases:
            ranks = Ranks(groups[case.num_ranks], None, case.num_ranks, rank) if rank < case.num_ranks else None
            try:
                found.append(ranks and function(case, ranks))
            except Exception as error:
                error.add_note(str(case))
                raise
        parts = [None] * MOST
        dist.all_gather_object(parts, found)
    return [list(results[:case.num_ranks]) for case, results in zip(cases, zip(*parts))]


@dataclass(frozen=True)
class Job:
    """A case of which only the number of ranks matters."""

    num_ranks: int


def largest(results):
    """The largest value of every quantity over the ranks; NaN if one is."""
    return {key: torch.tensor([result[key] for result in results], dtype=FP64).amax().item() for key in results[0]}


def off(found, tolerance):
    """What is beyond the tolerance, NaN included."""
    return {key: value for key, value in found.items() if not value <= tolerance}


# --- the same numbers


@dataclass(frozen=True)
class Case:
    """A model, or one mixer alone (num_blocks 0), on tokens that are divided as `counts` says; its data are random."""

    mixer: str
    counts: tuple[int, ...]
    options: dict = field(default_factory=dict)
    loss: str = "dot"  # "dot", "mse", "l2" or "darcy"
    masked: bool = False
    training: bool = False
    dtype: torch.dtype = FP64  # FP16, BF16: FP32 weights under autocast
    batch: int = 3
    channels: int = 12
    heads: int = 3
    latents: int = 5
    num_blocks: int = 2
    norm: str = "layernorm"
    seed: int = 0

    @property
    def num_ranks(self):
        return len(self.counts)

    @property
    def grid(self):
        columns = max(extent for extent in range(1, 7) if sum(self.counts) % extent == 0 and extent**2 <= sum(self.counts))
        return sum(self.counts) // columns, columns

    def __str__(self):
        return " ".join(f"{key}={value}" for key, value in vars(self).items())


def own(x, case, ranks, dim=1):
    """This rank's tokens under the case's division."""
    return None if x is None else x.split(case.counts, dim)[ranks.context_rank]


def random_mask(case, generator):
    """Sample 0 has all its keys on the last rank that has tokens, sample 1 none there, if there are two such ranks."""
    mask = torch.rand(case.batch, sum(case.counts), generator=generator) < 0.6
    owners = [rank for rank, count in enumerate(case.counts) if count]
    parts = mask.split(case.counts, 1)
    if len(owners) > 1:
        for rank in owners[:-1]:
            parts[rank][0] = False
        if case.batch > 1:
            parts[owners[-1]][1] = False
    first = torch.tensor(case.counts).cumsum(0).tolist()[owners[-1]] - 1  # the last token of all
    mask[:, 0], mask[0, 0], mask[0, first] = True, len(owners) == 1, True
    return mask


def sample(case):
    """features and target [B, N, c] in FP64 of FP32 numbers, mask [B, N] or None; NaN behind the mask."""
    generator = torch.Generator().manual_seed(case.seed)
    channels = case.channels if case.num_blocks == 0 else 3, case.channels if case.num_blocks == 0 else 1
    features, target = (torch.randn(case.batch, sum(case.counts), width, generator=generator).double() for width in channels)
    mask = random_mask(case, generator) if case.masked else None
    if mask is not None:
        features, target = features.masked_fill(~mask[..., None], torch.nan), target.masked_fill(~mask[..., None], 0)
    return features, target, mask


def model_of(case):
    """FP32, with weights far from their initial values, so that every term of a formula shows."""
    torch.manual_seed(case.seed)
    sizes = {"channel_dim": case.channels, "num_heads": case.heads, "norm": case.norm, "num_latents": case.latents}
    if case.num_blocks == 0:
        model = build_mixer(case.mixer, **sizes, **case.options)
    else:
        model = build_model("backbone", in_dim=3, out_dim=1, mixer=case.mixer, num_blocks=case.num_blocks, ffn_ratio=2,
                            **sizes, **case.options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape)
    return model.train(case.training)


def loss_of(case, prediction, target, count, ranks):
    """(what this rank differentiates, whether every rank holds all of it)."""
    if case.loss == "dot":
        return (prediction.double() * target).sum(), False
    if case.loss == "mse":
        return mean_squared_error(prediction, target, count=count), False
    weight = 0.1 if case.loss == "darcy" else 0
    return training_loss(prediction, target, gradient_weight=weight, grid=case.grid, norms=ranks.norms,
                         whole=partial(ranks.whole, num_tokens=sum(case.counts))), True


def evaluated(case, model, features, target, mask, ranks, count):
    """Prediction, loss, gradients by name of a model in the case's precision; the input is a leaf of its own."""
    features = features.clone().requires_grad_()
    torch.manual_seed(case.seed + 1)  # noise
    half = case.dtype if case.dtype in (FP16, BF16) and features.dtype == FP32 else None
    with torch.autocast("cpu", dtype=half or BF16, enabled=half is not None):
        prediction = model(features, mask)
    loss, replicated = loss_of(case, prediction, target, count, ranks)
    loss.backward()
    ranks.sync_gradients(model)
    total = loss.detach().clone()
    if not replicated and ranks.num_context > 1:
        dist.all_reduce(total, group=ranks.context_group)
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return prediction.detach(), total, features.grad, grads


def deviation(ours, theirs, size):
    """The largest difference over `size`; NaN if there is one, 0 of nothing."""
    assert ours.shape == theirs.shape
    return ((ours.double() - theirs).abs().max() / size).item() if theirs.numel() else 0.0


def digest(*tensors):
    """A number that tells apart tensors with different bits."""
    data = b"".join(tensor.flatten().view(torch.uint8).numpy().tobytes() for tensor in tensors)
    return int(hashlib.sha256(data).hexdigest()[:12], 16)


def compare(case, ranks):
    """How far this rank's part is from one FP64 process, relative to each quantity's size; the bits of what all hold."""
    features, target, mask = sample(case)
    model = model_of(case)
    dense = copy.deepcopy(model).double()
    count = target.numel() if mask is None else int(mask.sum()) * target.shape[-1]
    prediction, loss, inputs, grads = evaluated(case, dense, features, target, mask, Ranks(), count)
    dtype = FP64 if case.dtype == FP64 else FP32
    model = context_parallel(model.to(dtype), ranks.context_group)
    parts = own(features.to(dtype), case, ranks), own(target, case, ranks), own(mask, case, ranks)
    found = evaluated(case, model, *parts, ranks, count)
    biggest = max(grad.abs().max() for grad in grads.values())
    assert found[3].keys() == grads.keys()
    return {
        "prediction": deviation(found[0], own(prediction, case, ranks), prediction.abs().max()),
        "loss": deviation(found[1], loss, loss.abs()),
        "inputs": deviation(found[2], own(inputs, case, ranks), inputs.abs().max()),
        **{name: deviation(found[3][name], grad, max(grad.abs().max(), FLOORS[case.dtype] * biggest))
           for name, grad in grads.items()},
    } | ({"bits": digest(found[1], *found[3].values())} if ranks.num_context > 1 else {})


def split_bits(results):
    """The deviations alone; every rank must hold the same bits of loss and gradients."""
    assert len({result.pop("bits", None) for result in results}) == 1
    return largest(results)


SHARDS = [  # tokens of each rank, loss, with and without a mask
    ((13,), "l2", (True,)), ((7, 0, 9), "mse", (False, True)), ((3, 8), "l2", (False, True)), ((5, 1, 0, 20), "l2", (True,)),
    ((9, 9, 9, 8), "darcy", (False,)), ((6, 6), "darcy", (True,))]
EXACT = [Case(mixer, counts, options, loss, masked, training=mixer == "transolverpp" and not options, seed=number)
         for mixer, options in FORMS for number, (counts, loss, masks) in enumerate(SHARDS) for masked in masks]
EXACT += [Case("transolverpp", counts, {}, loss, True) for counts, loss, _ in SHARDS[1:3]]  # evaluation without noise


@pytest.fixture(scope="module")
def exact():
    return dict(zip(map(str, EXACT), launch(several, (compare, EXACT), MOST)))


@pytest.mark.parametrize("mixer, options", FORMS, ids=str)
def test_ranks_compute_what_one_process_does(exact, mixer, options):
    """Predictions, losses, gradients of parameters and inputs, in FP64."""
    cases = [case for case in EXACT if (case.mixer, case.options) == (mixer, options)]
    assert {case.num_ranks for case in cases} == {1, 2, 3, 4}
    for case in cases:
        assert not off(split_bits(exact[str(case)]), TOLERANCES[FP64]), case


def drawn(number):
    """A random case; in half precision a mixer alone under autocast, as the roundings of a whole model add up."""
    draw = random.Random(number)
    mixer, options = draw.choice(FORMS)
    dtype = FP64 if "eval_noise" in options else draw.choice([FP64, FP64, FP32, FP16, BF16])  # each has its noise
    half = dtype in (FP16, BF16)
    counts = [draw.choice([0, 1, 2, 5, 17, 40]) for _ in range(draw.choice([1, 2, 2, 3, 3, 4, 4]))]
    counts[draw.randrange(len(counts))] += 3  # somebody has tokens
    heads = draw.choice([1, 2, 3])
    width = draw.choice([8, 11] if half else [3, 5, 8])  # a norm over few numbers makes much of roundings
    return Case(mixer, tuple(counts), options, draw.choice(["mse", "l2"]), draw.random() < 0.5,
                training=dtype == FP64 and draw.random() < 0.5, dtype=dtype, batch=draw.randint(1, 4),
                channels=heads * width, heads=heads, latents=draw.choice([1, 4, 33]),
                num_blocks=0 if half else draw.choice([0, 1, 2]), norm=draw.choice(["layernorm", "rmsnorm"]), seed=number)


def test_random_cases_agree_with_one_process():
    cases = [drawn(number) for number in range(50)]
    assert {case.num_ranks for case in cases} == {1, 2, 3, 4} and {case.dtype for case in cases} == set(TOLERANCES)
    for case, results in zip(cases, launch(several, (compare, cases), MOST)):
        assert not off(split_bits(results), TOLERANCES[case.dtype]), case


# --- what the comparison above sees: each of these changes is wrong


def local_out(patch, ranks):
    """The conventional local backward pass: <G, O_r> in place of <G, Z>."""
    fused = parallel.fused_backward

    def backward(grad, q, k, v, key_mask, out, *rest):
        return fused(grad, q, k, v, key_mask, parallel.fused_forward(q, k, v, key_mask, rest[-1])[0], *rest)

    patch.setattr(parallel, "fused_backward", backward)


def local_softmax(patch, ranks):
    """The local attention's own backward pass: its out and its log-sum-exp."""
    fused = parallel.fused_backward

    def backward(grad, q, k, v, key_mask, out, lse, extra, scale):
        return fused(grad, q, k, v, key_mask, *parallel.fused_forward(q, k, v, key_mask, scale), scale)

    patch.setattr(parallel, "fused_backward", backward)


def query_gradient_summed(patch, ranks):
    fused = parallel.fused_backward

    def backward(*arguments):
        grad_q, *others = fused(*arguments)
        return parallel._summed(grad_q, ranks.context_group), *others

    patch.setattr(parallel, "fused_backward", backward)


def summed_first(function):
    """The incoming gradient of an autograd function is summed over the ranks, once more or against its rule."""
    def mutate(patch, ranks):
        backward = function.backward
        patch.setattr(function, "backward", staticmethod(
            lambda ctx, grad: backward(ctx, parallel._summed(grad, ranks.context_group))))
    return mutate


def gradient_kept(patch, ranks):
    """G_r in place of G: nothing is summed in backward passes."""
    for function in (parallel._Encode, parallel._SumOverRanks):
        backward = function.backward

        def alone(ctx, grad, backward=backward):
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(parallel, "_summed", lambda x, group: x)
                return backward(ctx, grad)

        patch.setattr(function, "backward", staticmethod(alone))


def sums_doubled(patch, ranks):
    patch.setattr(parallel, "_sum_over_tokens", lambda sums, group, once=parallel._sum_over_tokens: once(
        once(sums, group=group), group=group))


def gradients_then(change):
    """change(gradient, ranks) after the gradients were synchronised."""
    def mutate(patch, ranks):
        sync = Ranks.sync_gradients

        def changed(self, model):
            sync(self, model)
            for parameter in model.parameters() if self.num_context > 1 else ():
                parameter.grad = change(parameter.grad, ranks)

        patch.setattr(Ranks, "sync_gradients", changed)
    return mutate


def not_synchronised(patch, ranks):
    patch.setattr(Ranks, "sync_gradients", lambda self, model: None)


def averaged_errors(patch, ranks):
    """Every rank's own relative error, averaged over the ranks."""
    right = loss_of

    def wrong(case, prediction, target, count, own):
        return right(case, prediction, target, count, Ranks())[0] / own.num_context, own.num_context == 1

    patch.setattr(sys.modules[__name__], "loss_of", wrong)


def noise_of_its_own(patch, ranks):
    patch.setattr(parallel, "_own_noise", lambda logits, mixer, draw, **groups: draw(logits))


FLARE, FLAREPP = Case("flare", (7, 2, 9), loss="mse"), Case("flarepp", (3, 8), masked=True, loss="mse")
SLICES, DARCY = Case("transolver", (3, 8), loss="l2"), Case("flarepp", (6, 6), loss="darcy")
MUTATIONS = {  # the change, a case that shows it
    "local out": [(local_out, FLARE), (local_out, FLAREPP)],
    "local out and log-sum-exp": [(local_softmax, FLARE), (local_softmax, FLAREPP)],
    "gradients averaged": [(gradients_then(lambda grad, ranks: grad / ranks.num_context), case) for case in (FLARE, SLICES)],
    "gradients summed twice": [(gradients_then(lambda grad, ranks: parallel._summed(grad, ranks.context_group)), FLARE)],
    "gradients not summed": [(not_synchronised, FLARE), (not_synchronised, SLICES)],
    "dQ summed by the encoder": [(query_gradient_summed, FLARE), (query_gradient_summed, FLAREPP)],
    "G summed twice": [(summed_first(parallel._Encode), FLARE), (summed_first(parallel._Encode), FLAREPP)],
    "G not summed": [(gradient_kept, FLARE), (gradient_kept, FLAREPP), (gradient_kept, SLICES)],
    "slices summed twice": [(sums_doubled, SLICES)],
    "gradient of slices summed twice": [(summed_first(parallel._SumOverRanks), SLICES)],
    "relative errors averaged": [(averaged_errors, case) for case in (SLICES, replace(FLARE, loss="l2", masked=True))],
    "norms sum in backward": [(summed_first(parallel._Norms), SLICES)],
    "gather sums in backward": [(summed_first(parallel._Whole), DARCY)],
    "noise of its own": [(noise_of_its_own, Case("transolverpp", (3, 8), training=True))],
}


@dataclass(frozen=True)
class Mutated:
    change: object
    case: Case

    @property
    def num_ranks(self):
        return self.case.num_ranks


def mutated(mutation, ranks):
    with pytest.MonkeyPatch.context() as patch:
        if mutation.change:
            mutation.change(patch, ranks)
        return compare(mutation.case, ranks)


@pytest.fixture(scope="module")
def mutants():
    changes = [(name, Mutated(*pair)) for name, pairs in MUTATIONS.items() for pair in pairs]
    changes += [(None, Mutated(None, mutation.case)) for _, mutation in changes]
    return list(zip(changes, launch(several, (mutated, [mutation for _, mutation in changes]), MOST)))


@pytest.mark.parametrize("name", [*MUTATIONS, None])
def test_a_wrong_reduction_is_seen(mutants, name):
    """The same cases pass unchanged."""
    chosen = [(mutation, results) for (label, mutation), results in mutants if label == name]
    assert chosen
    for mutation, results in chosen:
        found = largest(results)
        found.pop("bits")
        if name is None:
            assert not off(found, TOLERANCES[FP64]), mutation
        else:
            assert any(1e-6 < value < float("inf") for value in found.values()), mutation


# --- the encoder alone: every dtype, masks, magnitudes, CUDA's kernels


@dataclass(frozen=True)
class Encode:
    """One distributed encoder on random q [B or 1, H, M, D] and k, v [B, H, N, D]."""

    counts: tuple[int, ...]
    dtype: torch.dtype = FP64
    size: tuple[int, int, int, int] = (3, 2, 5, 4)  # B, H, M, D
    masked: bool = False
    shared: bool = False  # q [1, H, M, D]
    change: object = None  # what to make of the inputs: a function (counts, q, k, v, gradients of z)
    kernel: str = "cpu_flash"
    seed: int = 0

    @property
    def num_ranks(self):
        return len(self.counts)

    @property
    def batch(self):
        return self.size[0]


def encoder_inputs(case):
    """q, k, v in the case's dtype, mask, and the gradient of z that each rank has, all the same on every rank."""
    generator = torch.Generator().manual_seed(case.seed)
    batch, heads, latents, width = case.size
    shapes = [(1 if case.shared else batch, heads, latents, width), *[(batch, heads, sum(case.counts), width)] * 2,
              *[(batch, heads, latents, width)] * case.num_ranks]
    q, k, v, *grads = (torch.randn(shape, generator=generator, dtype=FP64) for shape in shapes)
    if case.change:
        q, k, v, grads = case.change(case.counts, q, k, v, grads)
    mask = random_mask(case, generator) if case.masked else None
    return *(t.to(case.dtype) for t in (q, k, v)), mask, [grad.to(case.dtype) for grad in grads]


def as_on_cuda(patch, kernel):
    """Stand-ins serve CPU tensors in place of CUDA's kernels, head widths padded as for those."""
    def checked(grad, q, k, v, bias, out, lse, *rest, scale):
        require((lse[..., q.shape[2]:] == torch.inf).all(), "an lse padded with infinity")
        return efficient_backward(grad, q, k, v, bias, out, lse, *rest, scale=scale)

    def padded(q, k, v, key_mask, prepared=parallel.prepared):
        return tuple(nn.functional.pad(t, (0, -t.shape[-1] % 8)) for t in prepared(q, k, v, key_mask))

    operators = {"flash_attention": flash, "flash_attention_backward": flash_backward, "efficient_attention": efficient,
                 "efficient_attention_backward": checked}
    operators = {f"_scaled_dot_product_{name}": operator for name, operator in operators.items()}
    patch.setattr(attention, "aten", SimpleNamespace(**operators))
    patch.setattr(attention, "kernel_for", lambda *arguments: kernel)
    patch.setattr(parallel, "prepared", padded)


def encode(case, ranks):
    """How far z and the gradients of q (summed over the ranks), k and v are from the twin's, in FP64."""
    q, k, v, mask, grads = encoder_inputs(case)
    exact = [t.to(FP64, copy=True).requires_grad_() for t in (q, k, v)]
    expected = twin(*exact, 0.6, mask)[0]
    expected_grads = torch.autograd.grad(expected, exact, sum(grad.double() for grad in grads))
    leaves = [t.transpose(1, 2).contiguous().requires_grad_() for t in (q, own(k, case, ranks, 2), own(v, case, ranks, 2))]
    hidden = own(mask, case, ranks)
    if mask is not None:
        with torch.no_grad():
            leaves[1][~hidden], leaves[2][~hidden] = torch.nan, torch.inf
    with pytest.MonkeyPatch.context() as patch:
        if case.kernel != "cpu_flash":
            as_on_cuda(patch, case.kernel)
        views = [leaf.transpose(1, 2) for leaf in leaves]
        z = distributed_encode(*views, scale=0.6, group=ranks.context_group, key_mask=hidden)
        z.backward(grads[ranks.context_rank])
    assert z.dtype == case.dtype and all(leaf.grad.dtype == case.dtype for leaf in leaves)
    ours = [leaf.grad.transpose(1, 2) for leaf in leaves]
    total = ours[0].double()
    if ranks.num_context > 1:
        total = parallel._summed(total, ranks.context_group)
    theirs = [expected_grads[0], *(own(grad, case, ranks, 2) for grad in expected_grads[1:])]
    biggest = max(grad.abs().max() for grad in expected_grads)
    sizes = [max(grad.abs().max(), FLOORS[case.dtype] * biggest) for grad in expected_grads]
    sizes[0] *= max(1, k.abs().max()) if case.change else 1  # dQ = s dS K sums large numbers to a small one
    found = map(deviation, (total, *ours[1:]), theirs, sizes)
    return {"z": deviation(z.detach(), expected.detach(), expected.abs().max()), "bits": digest(z.detach()),
            **dict(zip("qkv", found, strict=True))}


def far_apart(counts, q, k, v, grads):
    """Logits of about 1,000 on the first rank, of about -1,000 on the last."""
    sides = torch.zeros(len(k[0, 0]), 1, dtype=k.dtype)
    sides[:counts[0]], sides[-counts[-1]:] = 400, -400
    return 1 + q.abs(), 0.01 * k + sides, v, grads


def very_negative(counts, q, k, v, grads):
    """Logits of about -1,000 everywhere: exp(0 - lse) of a key that is not there overflows."""
    return 1 + q.abs(), 0.1 * k - 400, v, grads


def large_and_close(counts, q, k, v, grads):
    """Logits near 1,000 that differ by 0.6 from rank to rank, less than FP16 and BF16 tell apart there."""
    k = torch.zeros_like(k)
    k[..., 0], k[..., 1] = 52, torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)) / 32
    return torch.full_like(q, 32), k, v, grads


def near_overflow(counts, q, k, v, grads):
    """In FP16 the sum of what the ranks found overflows, forward and backward, though neither result does."""
    return q, 0 * k, torch.full_like(v, 5e4), [2e3 * grad + 5e4 * (-1) ** (rank // 2) for rank, grad in enumerate(grads)]


ENCODES = [
    *[Encode(counts, dtype, masked=masked, shared=not masked, seed=len(counts)) for dtype in TOLERANCES
      for counts in ((6,), (4, 5), (7, 0, 9), (5, 1, 0, 20)) for masked in (False, True)],
    *[Encode((40, 30), dtype, (2, 2, 33, 17), masked) for dtype in TOLERANCES for masked in (False, True)],
    *[Encode((2, 3), FP64, size, masked) for size in ((1, 1, 1, 1), (2, 1, 1, 3), (1, 3, 2, 8)) for masked in (False, True)],
    *[Encode((0, 0, 1, 0), dtype) for dtype in TOLERANCES],
    *[Encode((4, 0, 5), dtype, masked=masked, change=change) for dtype in TOLERANCES for masked in (False, True)
      for change in (far_apart, very_negative)],
    *[Encode((5, 5, 5, 5), dtype, change=change) for dtype in (FP16, BF16) for change in (large_and_close, near_overflow)],
]
ON_CUDA = [Encode(counts, FP64, size, masked, shared=not masked, kernel=kernel) for counts in ((4, 5), (7, 0, 9))
           for size in ((3, 2, 5, 8), (2, 1, 33, 16), (2, 2, 3, 5)) for kernel, masked in (
               ("cuda_flash", False), ("cuda_efficient", False), ("cuda_efficient", True), ("unfused", True))]


@pytest.mark.parametrize("cases", [ENCODES, ON_CUDA], ids=["cpu", "cuda"])
def test_the_encoder_is_attention_over_all_keys(cases):
    for case, results in zip(cases, launch(several, (encode, cases), MOST)):
        rounded = case.dtype == FP32 and case.change  # FP32 holds a logit of 1,000 to 6e-5
        assert not off(split_bits(results), 1e-3 if rounded else TOLERANCES[case.dtype]), case


def nothing(job, ranks):
    """The encoder of no sample or of no latent, which kills the process where a kernel sees it."""
    for batch, latents, masked in ((0, 5, False), (2, 0, False), (2, 0, True), (0, 5, True)):
        q, k = torch.zeros(batch, 2, latents, 4, requires_grad=True), torch.zeros(batch, 2, 3, 4, requires_grad=True)
        mask = torch.ones(batch, 3, dtype=torch.bool) if masked else None
        z = distributed_encode(q, k, k, scale=1, group=ranks.context_group, key_mask=mask)
        z.sum().backward()
        assert z.shape == q.shape == q.grad.shape and k.grad.shape == k.shape and not k.grad.any()


def test_the_encoder_of_nothing_is_nothing():
    assert launch(several, (nothing, [Job(1), Job(2)]), MOST) == [[None], [None, None]]


@pytest.mark.parametrize("head_dim", [5, 16])
@pytest.mark.parametrize("dtype, masked, operator", FAKE, ids=str)
def test_the_encoder_on_fake_cuda_tensors(fake_cuda, monkeypatch, dtype, masked, operator, head_dim):  # noqa: F811
    """One fused operator forward and one backward, each with arguments that CUDA's kernels take, by their schemas."""
    widened = torch.promote_types(dtype, FP32)
    monkeypatch.setattr(parallel, "num_ranks", lambda group: 2)
    monkeypatch.setattr(parallel, "_gathered", lambda x, group: torch.stack([x, x]))
    monkeypatch.setattr(parallel, "_summed", lambda x, group: x)
    monkeypatch.setattr(parallel, "_require_keys", lambda *arguments: None)  # fake tensors hold no numbers
    q, k, v, mask = fake_inputs(head_dim, dtype, masked)
    z = distributed_encode(q, k, v, scale=0.6, group="two", key_mask=mask)
    assert (z.shape, z.dtype, z.device.type) == ((2, 3, 5, head_dim), dtype, "cuda")
    check_fused_call(fake_cuda, operator and f"_scaled_dot_product_{operator}_attention")
    context, leaves = fake_context(), attention.prepared(q, k, v, mask)
    z = parallel._Encode.forward(context, *leaves, mask, 0.6, "two")
    fake_cuda.names.clear(), fake_cuda.calls.clear()
    found = parallel._Encode.backward(context, torch.empty_like(z.transpose(2, 3).contiguous()).transpose(2, 3))
    assert found[3:] == (None, None, None) and z.shape[-1] % 8 == 0
    assert [(grad.shape, grad.dtype) for grad in found[:3]] == [(leaf.shape, dtype) for leaf in leaves]
    check_fused_call(fake_cuda, operator and f"_scaled_dot_product_{operator}_attention_backward")
    if operator:
        arguments = fake_cuda.calls[fake_cuda.names.index(f"_scaled_dot_product_{operator}_attention_backward")][0]
        lse = next(t for t in arguments[1:] if t is not None and t.dim() == 3)
        assert lse.dtype == widened and lse.shape[1:] == (3, 32 if operator == "efficient" else 5)


# --- what the ranks send


COMMUNICATE = (
    "all_", "barrier", "batch_", "broadcast", "gather", "irecv", "isend", "monitored", "recv", "reduce", "scatter", "send")


class Wire(TorchDispatchMode):
    """Counts calls of every function of torch.distributed that communicates, and the bytes of what is handed to them."""

    def __init__(self):
        super().__init__()
        self.calls, self.bytes, self.patch = [], 0, pytest.MonkeyPatch()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert "c10d_functional" not in function.namespace, "communicates without a function of torch.distributed"
        return function(*args, **(kwargs or {}))

    def watched(self, name, function):
        def call(*arguments, **options):
            handed = arguments[1 if name == "all_gather" else 0]
            assert handed.is_contiguous(), "NCCL takes contiguous tensors only"
            self.calls.append(name)
            self.bytes += handed.nbytes
            return function(*arguments, **options)
        return call

    def __enter__(self):
        for name in dist.distributed_c10d.__all__:
            function = getattr(dist, name, None)
            if name.startswith(COMMUNICATE) and isfunction(function):
                self.patch.setattr(dist, name, self.watched(name, function))
        return super().__enter__()

    def __exit__(self, *error):
        self.patch.undo()
        return super().__exit__(*error)


def sent(function):
    """(function's result, collectives, bytes) as counted by wrapping torch.distributed; `Traffic` finds the same."""
    with Wire() as wire, Traffic() as traffic:
        result = function()
    assert (traffic.count, traffic.bytes) == (len(wire.calls), wire.bytes)
    return result, len(wire.calls), wire.bytes


def mixer_traffic(case, ranks):
    """((collectives, bytes) forward, the same backward) of a mixer alone."""
    features, target, mask = sample(case)
    dtype = FP64 if case.dtype == FP64 else FP32
    mixer = context_parallel(model_of(case).to(dtype), ranks.context_group)
    x, target = own(features.to(dtype), case, ranks).requires_grad_(), own(target, case, ranks)
    with torch.autocast("cpu", dtype=case.dtype if case.dtype in (FP16, BF16) else BF16, enabled=case.dtype in (FP16, BF16)):
        y, *forward = sent(lambda: mixer(x, own(mask, case, ranks)))
    _, *backward = sent((y.double() * target).sum().backward)
    return tuple(forward), tuple(backward)


def formula(case):
    """What `mixer_traffic` should find, from sizes alone."""
    size = 8 if case.dtype == FP64 else 4  # reductions run in FP32 or better
    rows, width = case.batch * case.heads * case.latents, case.channels // case.heads
    if case.mixer in ENCODERS:
        count = ENCODERS[case.mixer]
        return (count, count * rows * (width + 1) * size), (count, count * rows * width * size)
    sums = rows * ((case.channels if case.mixer == "transolver3" else width) + 1) * size
    noise = case.mixer == "transolverpp" and (case.training or bool(case.options))
    return (1 + noise, sums + 8 * noise), (1, sums)


TRAFFIC = [
    Case(mixer, counts, options, masked=masked, training=mixer == "transolverpp" and not options, dtype=dtype, batch=2,
         num_blocks=0) for mixer, options in FORMS for counts, masked, dtype in (
        ((5, 6), False, FP64), ((5, 6), True, FP16), ((900, 0, 100), False, FP32), ((7, 9, 3, 1), True, FP64))]
TRAFFIC += [Case("transolverpp", (5, 6), num_blocks=0)]


def test_collectives_and_bytes_of_every_mixer():
    """Independent of the number of tokens and of their division; the table is what `pytest -s` prints."""
    lines = []
    for case, results in zip(TRAFFIC, launch(several, (mixer_traffic, TRAFFIC), MOST)):
        assert set(results) == {formula(case)}, case
        (forward, sent_forward), (backward, sent_backward) = results[0]
        switches = ", ".join(f"{key}={value}" for key, value in case.options.items()) or "training" * case.training
        lines.append(f"{case.mixer + ' ' + switches:<44} {case.num_ranks} {sum(case.counts):>5} {str(case.dtype)[6:]:>8} "
                     f"{forward:>8} {sent_forward:>7} {backward:>9} {sent_backward:>7}")
    print(f"\n{'mixer':<44} R     N    dtype  forward   bytes  backward   bytes", *lines, sep="\n")


def step_traffic(case, ranks):
    """(collectives, bytes) of the loss forward, the loss backward alone, and the gradients of a model."""
    model = nn.Linear(3, 1).double()
    features, target, _ = sample(case)
    prediction = own(features, case, ranks) @ model.weight.T + model.bias
    (loss, _), *forward = sent(lambda: loss_of(case, prediction, own(target, case, ranks), target.numel(), ranks))
    _, *backward = sent(loss.backward)
    _, *gradients = sent(lambda: ranks.sync_gradients(model))
    return tuple(forward), tuple(backward), tuple(gradients)


def test_collectives_and_bytes_of_loss_and_gradients():
    """Norms and field one each in forward, none in backward; the gradients and a flag for each in one buffer."""
    cases = [Case("flare", (9, 9, 9, 8), loss=loss) for loss in ("mse", "l2", "darcy")]
    cases += [Case("flare", (7, 0, 9), loss="l2")]
    norms, field, gradients = 2 * 3 * 8, 3 * 9 * 2 * 8, (4 + 2) * 8
    expected = [(0, 0), (1, norms), (2, norms + field), (1, norms)]
    for case, forward, results in zip(cases, expected, launch(several, (step_traffic, cases), MOST)):
        assert set(results) == {(forward, (0, 0), (1, gradients))}, case


# --- errors


def message_of(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return None


def without_keys(job, ranks):
    """What the ranks are told when sample 1 of 3 has no key: none of it on any rank, or no rank has a token."""
    def run(count, masked, empty=1):
        k = torch.randn(3, 2, count, 4, requires_grad=True)
        mask = torch.ones(3, count, dtype=torch.bool) if masked else None
        if masked:
            mask[empty] = False
        return message_of(lambda: distributed_encode(torch.randn(1, 2, 5, 4), k, k, scale=1, group=ranks.context_group,
                                                     key_mask=mask))

    rank = ranks.context_rank
    return [run(4, True), run(4 * (rank != 1), True), run(0, False), run(0, True),
            run(4, rank == 0), run(4, True, rank), run(4 * (rank == 0), rank > 0)]


def test_a_sample_without_any_key_is_named_on_every_rank():
    for results in launch(several, (without_keys, [Job(size) for size in (1, 3)]), MOST):
        for messages in results:
            nowhere, somewhere = messages[:4], messages[4:] if len(results) > 1 else []
            for message, sample_number in zip(nowhere, (1, 1, 0, 0), strict=True):
                assert message == f"sample {sample_number} of the batch has no valid key on any rank"
            assert somewhere in ([], [None] * 3)  # another rank has keys of every sample


@pytest.mark.parametrize("count", [0, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_a_sample_without_any_key_is_named_without_a_group(count, masked):
    q, k, mask = torch.randn(3, 2, 5, 4), torch.randn(3, 2, count, 4), torch.ones(3, count, dtype=torch.bool)
    mask[1] = False
    mask = mask if masked else None
    if count and not masked:
        assert torch.equal(distributed_encode(q, k, k, scale=1, group=None), attend(q, k, k, scale=1))
        return
    with pytest.raises(ValueError, match=f"sample {int(count > 0)} of the batch has no valid key"):
        distributed_encode(q, k, k, scale=1, group=None, key_mask=mask)
    assert (attend(q, k, k, scale=1, key_mask=mask)[1] == 0).all()


SHAPES = [((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 5)), ((2, 3, 5, 4), (2, 2, 7, 4), (2, 2, 7, 4)),
          ((3, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 4)), ((3, 5, 4), (3, 7, 4), (3, 7, 4))]


def wrong_inputs(job, ranks):
    run = partial(distributed_encode, scale=1, group=ranks.context_group)
    found = [message_of(lambda: run(*map(torch.zeros, shapes))) for shapes in SHAPES]
    fine = torch.zeros(2, 3, 5, 4)
    found.append(message_of(lambda: run(fine, fine.double(), fine)))
    found += [message_of(lambda: run(fine, fine, fine, key_mask=torch.ones(shape))) for shape in ((2, 5), (1, 5))]
    with pytest.raises(ValueError, match="needs 3 processes; got 4"), join(3, 1, "cpu"):
        pass
    with pytest.raises(ValueError, match="context_parallel 1 x data_parallel 2 needs 2 processes; got 4"), join(1, 2, "cpu"):
        pass
    assert parallel.launched()
    return found


def test_wrong_inputs_are_named_on_every_rank():
    (alone,), together = launch(several, (wrong_inputs, [Job(1), Job(3)]), MOST)
    assert all(result == alone for result in together)
    for message, shapes in zip(alone, SHAPES):
        assert all(str(shape) in message for shape in shapes)
    assert "torch.float64" in alone[4] and "key_mask must be bool" in alone[5] and "(1, 5)" in alone[6]


def test_processes_that_are_not_there_are_missed():
    assert not parallel.launched()
    with pytest.raises(ValueError, match="context_parallel 3 x data_parallel 2 needs 6 processes; got 1"), join(3, 2, "cpu"):
        pass
    with join(1, 1, "cpu") as ranks:
        assert ranks == Ranks()
    assert not dist.is_initialized()


COMPLETE = {
    "gnot": {"num_experts": 2, "ffn_ratio": 2}, "lno": {"num_modes": 4, "num_layers": 1},
    "perceiver_io": {"num_latents": 4, "ffn_ratio": 2, "init_std": 0.02},
    "set_transformer": {"num_inducing": 4, "ffn_ratio": 2},
}


@pytest.mark.parametrize("name", COMPLETE)
def test_complete_architectures_are_refused(name):
    model = build_model(name, in_dim=3, out_dim=1, channel_dim=8, num_heads=2, num_blocks=1, **COMPLETE[name])
    with pytest.raises(ValueError, match=f"context_parallel: models.{name} cannot be split"):
        context_parallel(model, None)


@pytest.mark.parametrize("name", [name for name in mixer_names() if not splits(name)])
def test_mixers_that_do_not_split_are_refused(name):
    parameters = inspect.signature(importlib.import_module(f"flarepp.mixers.{name}").Mixer).parameters.values()
    sizes = {p.name: 4 for p in parameters if p.default is p.empty} | {"channel_dim": 8, "num_heads": 2, "norm": "rmsnorm"}
    with pytest.raises(ValueError, match=f"context_parallel: mixers.{name} cannot be split"):
        context_parallel(build_mixer(name, **sizes), None)


def test_models_of_full_attention_are_refused():
    model = build_model("backbone", in_dim=3, out_dim=1, mixer="full", channel_dim=8, num_heads=2, num_blocks=2, ffn_ratio=2,
                        norm="layernorm")
    with pytest.raises(ValueError, match="context_parallel: mixers.full cannot be split"):
        context_parallel(model, None)
    model.blocks[0].mixer = build_mixer("flare", channel_dim=8, num_heads=2, num_latents=3)
    with pytest.raises(ValueError, match="mixers.full"):  # one block of two
        context_parallel(model, None)
    assert model.blocks[0].mixer.encode is attend  # and nothing was replaced


# --- gradients, and what else ranks do together


def layers(*dtypes):
    """One parameter of each dtype, 0 everywhere."""
    return nn.ParameterList([nn.Parameter(torch.zeros(2, 3, dtype=dtype)) for dtype in dtypes])


def with_gradients(dtypes, value, skipped=()):
    model = layers(*dtypes)
    for index, parameter in enumerate(model):
        if index not in skipped:
            parameter.grad = torch.full((2, 3), value * (index + 1), dtype=FP64).to(parameter.dtype)
    return model


def gradients_of(model):
    grads = [parameter.grad for parameter in model]
    return [None if grad is None else (grad.dtype, *grad.unique().tolist()) for grad in grads]


def two_by_two():
    """Four ranks, R = 2 and P = 2: everything that concerns both groups, as lists of what each rank found."""
    torch.set_num_threads(1)
    with join(2, 2, "cpu") as ranks:
        found = {"place": (ranks.context_rank, ranks.data_rank, ranks.is_main, dist.get_rank()),
                 "sizes": (ranks.num_context, parallel.num_ranks(ranks.context_group),
                           ranks.num_data, parallel.num_ranks(ranks.data_group))}
        value = 10.0**dist.get_rank()
        dtypes = (FP32, FP64, FP16, BF16)
        both = {"context_group": ranks.context_group, "data_group": ranks.data_group}
        for name, groups in {"both": both, **{key: {key: group} for key, group in both.items()}}.items():
            model = with_gradients(dtypes[:2], value)
            sync_gradients(model, **groups)
            found[name] = gradients_of(model)
        model = with_gradients(dtypes, 1 + 2.0**-40 + dist.get_rank())
        ranks.sync_gradients(model)
        found["dtypes"] = gradients_of(model)
        model = with_gradients((FP32,) * 4, value, skipped=(0, 2) if ranks.is_main else (1, 2))
        model[3].requires_grad_(False)
        ranks.sync_gradients(model)
        found["unused"] = gradients_of(model)
        model = with_gradients((FP64, FP32), random.Random(value).random())
        ranks.sync_gradients(model)
        found["bits"] = digest(*(parameter.grad for parameter in model))
        found["traffic"] = sent(lambda: ranks.sync_gradients(model))[1:]
        sync_gradients(nn.Identity(), context_group=ranks.context_group)  # has no parameters
        tensor = torch.tensor([value], requires_grad=True)
        mean = ranks.mean(tensor)
        found["mean"] = (mean.item(), mean.requires_grad, sent(lambda: ranks.mean(tensor))[1], tensor.item() == value)
        found["replica"] = ranks.replica(torch.arange(6)).tolist()
        found["prepared"] = prepared_models(ranks)
        found["waited"] = waited(ranks)
        parts = [None] * 4
        dist.all_gather_object(parts, found)
    assert not dist.is_initialized()
    return {key: [part[key] for part in parts] for key in found}


def waited(ranks):
    """Seconds that the barrier takes when the last rank is late."""
    ranks.barrier()
    started = time.monotonic()
    if dist.get_rank() == 3:
        time.sleep(0.3)
    ranks.barrier()
    return time.monotonic() - started


def prepared_models(ranks):
    """How far a step of R x P ranks is from that of one process; noise is that of the whole batch, its state the same."""
    found = {}
    for case in (Case("flarepp", (6, 5), loss="l2", masked=True, batch=4),
                 Case("transolverpp", (6, 5), loss="l2", batch=4, training=True),
                 Case("transolverpp", (6, 5), {"eval_noise": True}, loss="l2", batch=4)):
        features, target, mask = sample(case)
        model = model_of(case).double()
        noisy_evaluation = bool(case.options)  # every data rank then evaluates the same samples
        prediction, _, _, grads = evaluated(case, copy.deepcopy(model), features, target, mask, Ranks(), None)
        state = torch.get_rng_state()
        replica = (lambda x: x) if noisy_evaluation else ranks.replica
        part = [None if x is None else ranks.shard(replica(x)) for x in (features, target, mask)]
        ours = evaluated(case, ranks.prepare(model), *part, ranks, None)
        expected = ranks.shard(replica(prediction))
        size = max(grad.abs().max() for grad in grads.values())
        found[str(case)] = max(deviation(ours[0], expected, prediction.abs().max()),
                               *(deviation(ours[3][name], grad, size) for name, grad in grads.items()),
                               float(not torch.equal(torch.get_rng_state(), state)))
    return found


@pytest.fixture(scope="module")
def four():
    return launch(two_by_two, (), MOST)


def test_ranks_of_a_row_split_the_tokens_of_the_same_samples(four):
    assert four["place"] == [(0, 0, True, 0), (1, 0, False, 1), (0, 1, False, 2), (1, 1, False, 3)]
    assert four["sizes"] == [(2, 2, 2, 2)] * 4
    assert four["replica"] == [[0, 1, 2]] * 2 + [[3, 4, 5]] * 2


def test_gradients_are_summed_over_the_context_and_averaged_over_the_data(four):
    assert four["both"] == [[(FP32, 555.5), (FP64, 1111.0)]] * 4
    assert four["context_group"] == [[(FP32, 11), (FP64, 22)]] * 2 + [[(FP32, 1100), (FP64, 2200)]] * 2
    assert four["data_group"] == [[(FP32, 50.5), (FP64, 101)], [(FP32, 505), (FP64, 1010)]] * 2
    assert four["traffic"] == [(2, 2 * (6 + 6 + 2) * 8)] * 4  # FP32 and FP64 travel together, in FP64
    assert len(set(four["bits"])) == 1


def test_gradients_keep_their_dtypes_and_their_digits(four):
    """The sum of 1 + e, 2 + e, 3 + e, 4 + e, halved, times 1, 2, 3, 4 for FP32, FP64, FP16, BF16."""
    assert four["dtypes"] == [[(FP32, 5), (FP64, 10 + 2.0**-38), (FP16, 15), (BF16, 20)]] * 4


def test_a_parameter_without_gradient_on_some_ranks_counts_as_zero_there(four):
    """Parameter 0 is unused on rank 0, 1 on the others, 2 everywhere; 3 does not learn and keeps what it has."""
    for rank, found in enumerate(four["unused"]):
        assert found[:3] == [(FP32, 555), (FP32, 1), None] and found[3] == (FP32, 4 * 10.0**rank)


def test_the_mean_over_the_data_ranks_has_no_gradient(four):
    assert four["mean"] == [(50.5, False, 1, True), (505, False, 1, True)] * 2


def test_a_step_of_two_by_two_ranks_is_that_of_one_process(four):
    for found in four["prepared"]:
        assert len(found) == 3 and not off(found, TOLERANCES[FP64])


def test_the_barrier_waits_for_all(four):
    assert min(four["waited"]) > 0.25


def test_one_process_alone_does_nothing():
    ranks, x, model = Ranks(), torch.randn(2, 5, 3), model_of(FLAREPP)
    before = copy.deepcopy(model)
    assert torch.equal(ranks.shard(x), x) and torch.equal(ranks.replica(x), x) and ranks.is_main
    assert ranks.whole(x, 5) is x and ranks.norms(x) is x and ranks.mean(x) is x
    assert ranks.prepare(model) is model and "encode" not in vars(model.blocks[0].mixer)
    next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
    ranks.sync_gradients(model), ranks.barrier()
    assert (next(model.parameters()).grad == 1).all() and not dist.is_initialized()
    features = torch.randn(2, 5, 3)
    assert torch.equal(context_parallel(model, None)(features), before(features))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 2, 4, 5, 11])
def test_shards_are_contiguous_and_even(num_ranks, count):
    x = torch.arange(2 * count * 3).view(2, count, 3)
    parts = [Ranks(None, None, num_ranks, rank).shard(x) for rank in range(num_ranks)]
    lengths = [part.shape[1] for part in parts]
    assert torch.equal(torch.cat(parts, 1), x) and max(lengths) - min(lengths) <= 1
    flat = [Ranks(None, None, num_ranks, rank).shard(x.flatten(), dim=0) for rank in range(num_ranks)]
    assert torch.equal(torch.cat(flat), x.flatten())


def test_a_batch_that_does_not_divide_is_no_batch():
    with pytest.raises(AssertionError, match="7 samples over 2 data ranks"):
        Ranks(num_data=2).replica(torch.zeros(7, 3))


def gathers(job, ranks):
    """Round trips of shards, norms of parts, their gradients for a loss that every rank holds."""
    for count in (1, 2, 3, 4, 7, 12):
        for dtype in (FP64, FP32, FP16):
            x = torch.randn(2, count, 3, generator=torch.Generator().manual_seed(count), dtype=FP64).to(dtype)
            part = ranks.shard(x).transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()  # channels apart
            whole, *_ = sent(lambda: ranks.whole(part, count))
            assert torch.equal(whole, x) and whole.dtype == dtype
            weights = torch.arange(x.numel(), dtype=dtype).view_as(x)
            (whole * weights).sum().backward()
            assert torch.equal(part.grad, ranks.shard(weights)), (count, dtype)
    rank, size = ranks.context_rank, ranks.num_context
    x = torch.tensor([3.0 * (rank == 0), 4.0 if rank == size - 1 else 0, 1e30, 0], dtype=FP32, requires_grad=True)
    norms = ranks.norms(x)
    norms.sum().backward()
    sums = torch.full((2, 3), 1.0 + rank)
    total = parallel._sum_over_tokens(sums, group=ranks.context_group)
    assert (total == size * (size + 1) / 2).all() and (sums == 1 + rank).all()
    return norms.detach(), x.grad, digest(norms.detach())


def test_gathers_of_the_loss():
    for size, results in zip((1, 2, 3, 4), launch(several, (gathers, [Job(size) for size in (1, 2, 3, 4)]), MOST)):
        for rank, (norms, grad, _) in enumerate(results):
            assert torch.allclose(norms, torch.tensor([3, 4, 1e30 * size**0.5, 0]), rtol=1e-6)  # 1e60 overflows FP32
            if size > 1:
                expected = torch.tensor([float(rank == 0), float(rank == size - 1), size**-0.5, 0])
                assert torch.allclose(grad, expected, rtol=1e-6)
        assert len({bits for *_, bits in results}) == 1


NOISE = (2, 3, 7, 5)  # B, H, N, M


def noise(job, ranks):
    """This rank's part of the noise against what one process draws, bit for bit, and where the generator stands."""
    mixer = build_mixer("transolverpp", channel_dim=6, num_heads=3, num_latents=5)
    draw, spans = mixer.uniform, [span.tolist() for span in torch.arange(7).tensor_split(ranks.num_context)]
    context_parallel(mixer, ranks.context_group)
    for dtype in (FP64, FP32, FP16, BF16):
        torch.manual_seed(4)
        whole = draw(torch.zeros(NOISE, dtype=dtype))
        state = torch.get_rng_state()
        torch.manual_seed(4)
        part = mixer.uniform(torch.zeros(NOISE, dtype=dtype)[:, :, spans[ranks.context_rank]])
        assert torch.equal(part, whole[:, :, spans[ranks.context_rank]]) and part.dtype == whole.dtype
        assert torch.equal(torch.get_rng_state(), state)


def test_noise_is_a_part_of_what_one_process_draws():
    assert launch(several, (noise, [Job(size) for size in (1, 2, 3, 4)]), MOST) == [[None] * size for size in (1, 2, 3, 4)]


# --- starting and failing


def told(number):
    with join(2, 1, "cpu") as ranks:
        total = torch.tensor([float(number + ranks.context_rank)])
        dist.all_reduce(total)
        return ranks.context_rank, total.item()


def test_new_processes_where_pytorch_knows_cuda(monkeypatch):
    """Something looks for a device before the ranks start (PyTorch's own launcher does): forks could not use one then."""
    methods = []
    get_context = parallel.multiprocessing.get_context
    monkeypatch.setattr(parallel.multiprocessing, "get_context", lambda method: methods.append(method) or get_context(method))
    assert launch(os.getppid, (), 1) == os.getpid()
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert launch(os.getppid, (), 2) == os.getpid() and list(dict.fromkeys(methods)) == ["fork", "spawn"]


def test_a_device_for_every_process(monkeypatch):
    taken = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    parallel._take_device(1)
    with pytest.raises(ValueError, match="got 2 for process 2"):
        parallel._take_device(2)
    assert taken == [1]


def failing(how):
    """Rank 2 of three ends while the ranks talk."""
    with join(3, 1, "cpu") as ranks:
        tensor = torch.ones(3)
        for step in range(10**6):
            dist.all_reduce(tensor)
            if step == 50 and ranks.context_rank == 2:
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "exit":
                    os._exit(7)
                raise IndexError("a shape that does not fit")


def launched_beside(function, argument, num_ranks):
    """(result, seconds), or the RankFailed's message in place of the result."""
    started = time.monotonic()
    try:
        result = launch(function, (argument,), num_ranks)
    except RankFailed as error:
        result = str(error)
    return result, time.monotonic() - started


FORKED = []  # when the launching process forked, as far as the fork at hand knows


def entered():
    """When the function began on each rank, and when the last rank was forked."""
    moments = [None] * 3
    now = time.monotonic()
    with join(3, 1, "cpu"):
        dist.all_gather_object(moments, (now, max(FORKED)))
    return [now for now, _ in moments], max(forked for _, forked in moments)


def test_no_rank_begins_before_all_are_forked(monkeypatch):
    """A thread that answers the ranks that begin holds locks of the C library, and a fork at that moment for ever."""
    start = multiprocessing.process.BaseProcess.start

    def late(process):
        time.sleep(0.3)
        FORKED.append(time.monotonic())
        start(process)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", late)
    began, forked = launch(entered, (), 3)
    assert min(began) > forked


def test_launches_beside_each_other_end_each_in_its_way():
    """Three that succeed and three of whose ranks one fails, all at once: no port is used twice."""
    jobs = [(told, 1, 2), (failing, "kill", 3), (told, 10, 2), (failing, "exit", 3), (failing, "raise", 3), (told, 100, 2)]
    with ProcessPoolExecutor(len(jobs), multiprocessing.get_context("fork")) as pool:
        futures = [pool.submit(launched_beside, *job) for job in jobs]
        found = {job[:2]: future.result(timeout=60) for job, future in zip(jobs, futures)}
    for number in (1, 10, 100):
        assert found[told, number][0] == (0, 2 * number + 1)  # what rank 0 returned
    ends = {"kill": "ended with SIGKILL", "exit": "ended with exit code 7", "raise": "ended with exit code 1"}
    for how, words in ends.items():
        message, seconds = found[failing, how]
        assert message.startswith("rank 2 (process ") and words in message.splitlines()[0], message
        assert seconds < 20
    message = found[failing, "raise"][0]
    assert "Traceback" in message and "in failing" in message and "IndexError: a shape that does not fit" in message


def sleeping(folder, pipe):
    """Says that it is there, then hangs with the pipe open and hears nothing, as in a kernel."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    (folder / str(os.getpid())).touch()
    time.sleep(60)


def test_ranks_end_with_the_process_that_launched_them(tmp_path):
    """The pipe is at its end when nobody has it open any more."""
    reading, writing = os.pipe()
    launcher = os.fork()
    if launcher == 0:
        os.close(reading)
        launch(sleeping, (tmp_path, writing), 3)
        os._exit(1)
    os.close(writing)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    ended = bool(select.select([reading], [], [], 20)[0]) and os.read(reading, 1) == b""
    os.close(reading)
    for path in tmp_path.iterdir() if not ended else ():
        os.kill(int(path.name), signal.SIGKILL)
    assert ended
