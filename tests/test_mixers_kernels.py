"""Kernel and Nystrom mixers: dense twins, public codes as oracles, padding, randomness, precision, work, what papers claim.

The twins hold the full [N, N] matrices of one sample without padding and use nothing of the package.
"""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flarepp.kernels import RandomFeatures, iterative_inverse, largest_of_head, orthogonal_features, product, real_tokens
from flarepp.layers import zero_padding
from flarepp.mixers import build_mixer, cosformer, favor_pp, nystromformer, skyformer
from flarepp.operations import evaluate, mixer_multiply_adds
from reference import Recorder

CHANNELS, HEADS, TOKENS = 12, 3, 9
WIDTH = CHANNELS // HEADS
SIZES = {"performer": {"num_features": 6}, "favor_pp": {"num_features": 6},
         "nystromformer": {"num_landmarks": 4, "conv_kernel": 5}, "skyformer": {"num_landmarks": 5}}
NAMES = ("cosformer", "favor_pp", "hedgehog", "linear", "norm_attention", "nystromformer", "performer", "skyformer")
FORMS = [*((name, {}) for name in NAMES), ("performer", {"as_flare_study": True}),
         ("norm_attention", {"as_flare_study": True}), ("linear", {"unit_qk": True}),
         ("linear", {"unit_qk": True, "feature_map": "identity"}),
         ("nystromformer", {"conv_kernel": None}), ("nystromformer", {"num_landmarks": 20})]
POSITIONAL = ("cosformer", "nystromformer", "skyformer")  # these see the order of the tokens


def forms(function):
    return pytest.mark.parametrize("name, options", FORMS, ids=str)(function)


def lively(module, seed=0):
    """FP64 with parameters far from their initial values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.double().parameters():
            parameter += 0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return module.eval()


def mixer_of(name, **options):
    torch.manual_seed(0)
    return lively(build_mixer(name, channel_dim=CHANNELS, num_heads=HEADS, **SIZES.get(name, {}) | options))


def plain(name, width=32, heads=4, **options):
    """As initialised, in FP32 and for training."""
    torch.manual_seed(0)
    return build_mixer(name, channel_dim=width, num_heads=heads, **SIZES.get(name, {}) | options)


def tokens(batch=2, count=TOKENS, channels=CHANNELS, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, count, channels, generator=generator, dtype=torch.float64)


def heads_of(x):
    """[N, C] -> [H, N, D]"""
    return torch.stack([x[:, head * WIDTH:(head + 1) * WIDTH] for head in range(HEADS)])


def relative(ours, theirs, floor=0.0):
    return ((ours - theirs).abs().max() / max(theirs.abs().max().item(), floor, 1e-300)).item()


def ragged_mask():
    """Padding at the end, none, at the end again; the last sample has no token at all."""
    mask = torch.ones(4, TOKENS, dtype=torch.bool)
    mask[0, 5:], mask[2, 1:], mask[3] = False, False, False
    return mask


# --- twins: y [N, C] of one sample's q, k, v [N, C], or [H, N, D] of each head's


def normalised(weights):
    return weights / weights.sum(-1, keepdim=True)


def linear(mixer, q, k, v, feature_map="elu", unit_qk=False):
    q, k = ((torch.where(x > 0, x + 1, torch.exp(x)) if feature_map == "elu" else x) for x in (q, k))
    if unit_qk:
        q, k = (x / ((x * x).sum(-1, keepdim=True).sqrt() + 1e-6) for x in (q, k))
    weights = torch.einsum("hid,hjd->hij", q, k)
    return weights / (weights.sum(-1, keepdim=True) + 1e-6) @ v


def cosine(mixer, q, k, v):
    count, places = q.shape[1], torch.arange(q.shape[1]).double()
    distance = places[:, None] - places
    weights = torch.einsum("hid,hjd->hij", F.relu(q), F.relu(k)) * torch.cos(math.pi / 2 * distance / count)
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-6) @ v


def hedgehog(mixer, q, k, v):
    def features(module, x):
        y = torch.einsum("hde,hne->hnd", module.weight, x) + module.bias
        return torch.cat([torch.exp(y), torch.exp(-y)], -1)

    return normalised(features(mixer.query_map, q) @ features(mixer.key_map, k).mT) @ v


def norm_attention(mixer, q, k, v, as_flare_study=False):
    if as_flare_study:
        q, k = (x / ((x * x).sum(-1, keepdim=True).sqrt() + 1e-6) for x in (q, k))
        z = torch.einsum("hid,hjd->hij", q, k) @ v / q.shape[1]
    else:
        q, k = (torch.where(x > 0, x + 1, torch.exp(x)) for x in (q, k))
        z = torch.einsum("hid,hjd->hij", q, k) @ v
    z = torch.cat(list(z), -1)  # [N, C]
    if as_flare_study:
        z = (z - z.mean(-1, keepdim=True)) / torch.sqrt(z.var(-1, unbiased=False, keepdim=True) + 1e-5)
        return heads_of(z * mixer.mix_norm.weight + mixer.mix_norm.bias)
    return heads_of(z / torch.sqrt((z * z).mean(-1, keepdim=True) + 1e-6) * mixer.mix_norm.weight)


def favor(mixer, q, k, v, as_flare_study=False):
    w, (q, k), eps = mixer.random_features.projection, (x * WIDTH**-0.25 for x in (q, k)), 1e-6 if as_flare_study else 1e-4
    u, t = q @ w.mT, k @ w.mT
    top = (t.amax(-1, keepdim=True) if as_flare_study else t.amax((-2, -1), keepdim=True)).detach()
    left = torch.exp(u - (q * q).sum(-1, keepdim=True) / 2 - u.amax(-1, keepdim=True).detach()) + eps
    weights = left @ (torch.exp(t - (k * k).sum(-1, keepdim=True) / 2 - top) + eps).mT
    return weights / (weights.sum(-1, keepdim=True) + (1e-6 if as_flare_study else 0)) @ v


def optimal_features(mixer, q, k, v):
    w, (q, k) = mixer.random_features.projection, (x * WIDTH**-0.25 for x in (q, k))
    spread = ((q[:, :, None] + k[:, None])**2).sum(-1).mean((1, 2))[:, None, None].detach()
    u = (WIDTH + 2 * spread + torch.sqrt((WIDTH + 2 * spread)**2 + 8 * WIDTH * spread)) / (2 * WIDTH)
    a = (1 - u) / 8
    left, right = (torch.exp(a * (w * w).sum(-1) + torch.sqrt(1 - 4 * a) * x @ w.mT - (x * x).sum(-1, keepdim=True) / 2)
                   for x in (q, k))
    return normalised(left @ right.mT) @ v


def thirteen(a):
    """Six steps towards the inverse of one matrix a [M, M]."""
    one = torch.eye(len(a), dtype=a.dtype)
    z = a.T / (torch.linalg.matrix_norm(a, 1) * torch.linalg.matrix_norm(a, math.inf))
    for _ in range(6):
        z = z @ (13 * one - a @ z @ (15 * one - a @ z @ (7 * one - a @ z))) / 4
    return z


def nystrom(mixer, q, k, v, conv_kernel=5, num_landmarks=4):
    count, scale, outs = q.shape[1], WIDTH**-0.5, []
    segment = torch.arange(count) * num_landmarks // count
    used = segment.unique()
    for head in range(HEADS):
        ql, kl = (torch.stack([x[head][segment == index].mean(0) for index in used]) for x in (q, k))
        first, middle, last = (torch.softmax(scale * a @ b.T, -1) for a, b in ((q[head], kl), (ql, kl), (ql, k[head])))
        y = first @ thirteen(middle) @ last @ v[head]
        if conv_kernel:
            padded = F.pad(v[head], (0, 0, conv_kernel // 2, conv_kernel // 2))
            y = y + sum(mixer.conv.weight[head, 0, i, 0] * padded[i:i + count] for i in range(conv_kernel))
        outs.append(y)
    return torch.stack(outs)


def gaussian(a, b):
    return torch.exp(-((a[:, None] - b[None])**2).sum(-1) / 2)


def sky(mixer, q, k, v):
    count, outs = q.shape[1], []
    chosen = (mixer.places * count).long()
    half = (len(chosen) + 1) // 2
    for a, b, values in zip(WIDTH**-0.25 * q, WIDTH**-0.25 * k, v):
        points = torch.cat([a[chosen[:half]], b[chosen[half:]]])
        gram = gaussian(points, points) + 0.1 * torch.eye(len(points)).double()
        root = torch.diag(gram.sum(-1)**-0.5)
        outs.append(gaussian(a, points) @ root @ thirteen(root @ gram @ root) @ root @ gaussian(points, b) @ values)
    return torch.stack(outs)


TWINS = {"linear": linear, "cosformer": cosine, "hedgehog": hedgehog, "norm_attention": norm_attention, "performer": favor,
         "favor_pp": optimal_features, "nystromformer": nystrom, "skyformer": sky}


def twin(name, mixer, x, options):
    """out [N, C] of one sample x [N, C]."""
    q, k, v = (x @ mixer.qkv_proj.weight.T + mixer.qkv_proj.bias).split(CHANNELS, -1)
    if name == "norm_attention" and options:
        q, k, v = x + q, x + k, x + v
    y = TWINS[name](mixer, heads_of(q), heads_of(k), heads_of(v), **options)
    return torch.cat(list(y), -1) @ mixer.out_proj.weight.T + mixer.out_proj.bias


@pytest.mark.parametrize("masked", [False, True])
@forms
def test_outputs_and_gradients_equal_the_dense_twin(name, options, masked):
    mixer, x = mixer_of(name, **options), tokens(4).requires_grad_()
    mask = ragged_mask() if masked else torch.ones(4, TOKENS, dtype=torch.bool)
    ours = mixer(x, mask if masked else None)
    theirs = torch.stack([
        torch.cat([twin(name, mixer, x[i, real], options), x.new_zeros((~real).sum(), CHANNELS)]) if real.any() else x[i] * 0
        for i, real in enumerate(mask)])
    assert relative(ours, theirs) <= 1e-10
    direction, leaves = tokens(4, seed=2), [x, *mixer.parameters()]
    found, expected = (torch.autograd.grad((y * direction).sum(), leaves) for y in (ours, theirs))
    largest = max(grad.abs().max().item() for grad in expected)
    for label, one, other in zip(["x", *dict(mixer.named_parameters())], found, expected, strict=True):
        assert relative(one, other, 1e-6 * largest) <= 1e-8, label


# --- oracles: public codes, installed for the tests only


def qkv(batch=2, count=24, width=8, scale=1.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)
    return [scale * torch.randn(batch, HEADS, count, width, generator=generator, dtype=torch.float64).to(dtype)
            for _ in range(3)]


def mixed(name, q, k, v, **options):
    """What `mix` makes of q, k, v [B, H, N, D], and the mixer."""
    mixer = mixer_of_width(name, q.shape[-1], **options).to(q.dtype)
    with torch.no_grad():
        return mixer.mix(q, k, v, None), mixer


def mixer_of_width(name, width, **options):
    torch.manual_seed(0)
    return build_mixer(name, channel_dim=HEADS * width, num_heads=HEADS, **SIZES.get(name, {}) | options).eval()


def test_performer_is_that_of_its_public_code():
    from performer_pytorch import FastAttention

    q, k, v = qkv()
    ours, mixer = mixed("performer", q, k, v, num_features=20)
    oracle = FastAttention(dim_heads=8, nb_features=20)
    oracle.projection_matrix = mixer.random_features.projection
    assert relative(ours, oracle(q, k, v)) <= 1e-6


@pytest.mark.parametrize("name", ["linear", "cosformer", "hedgehog", "favor_pp"])
def test_the_sums_are_those_of_a_public_linear_attention(name):
    from performer_pytorch.performer_pytorch import linear_attention

    q, k, v = qkv()
    ours, mixer = mixed(name, q, k, v)
    count = q.shape[2]
    angle = torch.pi / 2 * torch.arange(1, count + 1)[:, None] / count
    scaled = [8**-0.25 * x for x in (q, k)]

    def optimal(x):
        a = favor_pp.optimal_coefficient(*scaled, None)
        w = mixer.random_features.projection
        return torch.exp(a * w.square().sum(-1) + (1 - 4 * a).sqrt() * x @ w.T - x.square().sum(-1, keepdim=True) / 2)

    maps = {
        "linear": lambda: [F.elu(x) + 1 for x in (q, k)],
        "cosformer": lambda: [torch.cat([F.relu(x) * angle.cos(), F.relu(x) * angle.sin()], -1) for x in (q, k)],
        "hedgehog": lambda: [torch.cat([x.exp(), (-x).exp()], -1) for x in (q, k)],  # as initialised
        "favor_pp": lambda: [optimal(x) for x in scaled],
    }
    assert relative(ours, linear_attention(*maps[name](), v)) <= 1e-6


@pytest.mark.parametrize("conv_kernel", [None, 33])
def test_nystromformer_is_that_of_a_public_code(conv_kernel):
    """One head and one sample: the public code starts all inverses of a batch from one number."""
    from nystrom_attention import NystromAttention

    torch.manual_seed(0)
    oracle = NystromAttention(dim=16, dim_head=16, heads=1, num_landmarks=8, residual=conv_kernel is not None).double()
    ours = build_mixer("nystromformer", channel_dim=16, num_heads=1, num_landmarks=8, conv_kernel=conv_kernel).double()
    with torch.no_grad():
        ours.qkv_proj.weight.copy_(10 * ours.qkv_proj.weight)
        oracle.to_qkv.weight.copy_(ours.qkv_proj.weight)
        oracle.to_out[0].weight.copy_(ours.out_proj.weight)
        oracle.to_out[0].bias.copy_(ours.out_proj.bias)
        if conv_kernel:
            oracle.res_conv.weight.copy_(ours.conv.weight)
    x = tokens(1, 64, 16)
    assert relative(ours(x), oracle.eval()(x)) <= 1e-10


# --- padding, lengths, samples


@forms
def test_padding_and_batch_mates_change_nothing(name, options):
    """P1: what stands in the padding; P2: how much of it; and neither do the other samples of a batch."""
    mixer, x, mask = mixer_of(name, **options), tokens(4), ragged_mask()
    clean = mixer(x, mask)
    assert (clean[~mask] == 0).all() and clean.isfinite().all()
    for poison in (math.nan, math.inf, 1e300):
        assert torch.equal(mixer(x.masked_fill(~mask[..., None], poison), mask), clean)
    for more in (1, 14):
        longer = mixer(F.pad(x, (0, 0, 0, more), value=7), F.pad(mask, (0, more)))
        assert relative(longer[:, :TOKENS], clean) <= 1e-12 and (longer[:, TOKENS:] == 0).all()
    for sample in range(3):
        real = mask[sample]
        assert relative(clean[sample:sample + 1, real], mixer(x[sample:sample + 1, real])) <= 1e-12


@forms
def test_padding_may_stand_anywhere(name, options):
    """Kernels, segments and draws count real tokens only; a convolution meets a zero for each of padding."""
    mixer, x = mixer_of(name, **options), tokens()
    mask = torch.rand(2, TOKENS, generator=torch.Generator().manual_seed(1)) < 0.6
    together = mixer(x, mask)
    if getattr(mixer, "conv", None) is None:
        for sample, real in enumerate(mask):
            assert relative(together[sample, real], mixer(x[sample:sample + 1, real])[0]) <= 1e-12
    else:
        without = mixer_of(name, **options | {"conv_kernel": None})
        without.load_state_dict(mixer.state_dict(), strict=False)
        v = mixer.qkv_proj(zero_padding(x, mask))[..., -CHANNELS:].masked_fill(~mask[..., None], 0)
        v = F.conv1d(v.mT, mixer.conv.weight[:, 0].mT.repeat_interleave(WIDTH, 0), padding="same", groups=CHANNELS).mT
        expected = without(x, mask) + v @ mixer.out_proj.weight.T
        assert relative(together[mask], expected[mask]) <= 1e-12


@pytest.mark.parametrize("count", [1, 2, 7, 31])
@pytest.mark.parametrize("training", [True, False])
@forms
def test_any_length_and_batch_works(name, options, training, count):
    mixer = plain(name, **options).train(training)
    for mask in (None, torch.arange(count)[None] < max(1, count - 3), torch.zeros(1, count, dtype=torch.bool)):
        x = tokens(1, count, 32).float().requires_grad_()
        out = mixer(x, mask)
        out.square().sum().backward()
        gradients = [x.grad, *(parameter.grad for parameter in mixer.parameters() if parameter.grad is not None)]
        assert out.shape == x.shape and out.isfinite().all() and all(grad.isfinite().all() for grad in gradients)


@forms
def test_the_order_of_the_tokens(name, options):
    mixer, x = mixer_of(name, **options), tokens()
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(3))
    moved = relative(mixer(x[:, order]), mixer(x)[:, order])
    assert moved > 1e-3 if name in POSITIONAL else moved <= 1e-12


# --- randomness


def draws(name):
    return [key for key, _ in plain(name).named_buffers()]


def test_what_is_random():
    kept = {name: draws(name) for name in NAMES}
    random = dict.fromkeys(("performer", "favor_pp"), ["random_features.projection"]) | {"skyformer": ["places"]}
    assert kept == dict.fromkeys(NAMES, []) | random


@pytest.mark.parametrize("name", ["performer", "favor_pp"])
def test_features_are_drawn_again_in_training_only(name):
    mixer, x = plain(name, redraw_interval=3), tokens(1, 20, 32).float()
    seen = [mixer.random_features.projection]
    for _ in range(7):
        mixer(x).sum().backward()
        seen.append(mixer.random_features.projection)
    changes = [not torch.equal(a, b) for a, b in zip(seen, seen[1:])]
    assert changes == [False, False, True, False, False, True, False]
    with torch.no_grad():
        for _ in range(5):  # counting operations, for one
            mixer(x)
    mixer.eval()
    outputs = [mixer(x) for _ in range(5)]
    assert all(torch.equal(out, outputs[0]) for out in outputs)
    assert torch.equal(mixer.random_features.projection, seen[-1])


def test_an_earlier_pass_keeps_its_features():
    mixer, x = plain("performer", redraw_interval=2), tokens(1, 20, 32).float().requires_grad_()
    first, second = mixer(x), mixer(x)
    (first + second).sum().backward()  # the second pass drew; the first one's graph still holds the old features
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("name", ["performer", "favor_pp", "skyformer"])
def test_a_run_resumes_with_the_same_numbers(name):
    options = {} if name == "skyformer" else {"redraw_interval": 4}
    mixer, x = plain(name, **options), tokens(2, 20, 32).float()
    for _ in range(3):
        mixer(x)
    state, generator = copy.deepcopy(mixer.state_dict()), torch.get_rng_state()
    assert all(isinstance(value, torch.Tensor) for value in state.values())  # safetensors takes no other
    expected = [mixer(x) for _ in range(6)]
    other = build_mixer(name, channel_dim=32, num_heads=4, **SIZES[name], **options)
    other.load_state_dict(state)
    torch.set_rng_state(generator)
    assert all(torch.equal(other(x), out) for out in expected)


def test_no_interval_never_draws():
    features = RandomFeatures(lambda: torch.randn(3), None)
    first = features()
    for _ in range(2000):
        assert features() is first


def test_skyformer_draws_landmarks_in_training_only():
    mixer, x = plain("skyformer"), tokens(2, 40, 32).float()
    assert not torch.equal(mixer(x), mixer(x))
    mixer.eval()
    assert torch.equal(mixer(x), mixer(x))


def test_skyformer_draws_among_real_tokens():
    torch.manual_seed(0)
    mixer = skyformer.Mixer(8, 2, "layernorm", 2000)
    q = torch.arange(10.0).expand(3, 2, 4, 10).mT.clone()  # the token's number in each channel
    mask = torch.zeros(3, 10, dtype=torch.bool)
    mask[0, [2, 5]], mask[1, 7:], mask[2] = True, True, True
    for training in (True, False):
        points = mixer.train(training).landmarks(q, q + 100, mask)
        assert points.shape == (3, 2, 2000, 4)
        for sample, real in enumerate(mask):
            numbers, counts = points[sample].flatten(1).unique(return_counts=True)
            where = real.nonzero()[:, 0]
            assert numbers.tolist() == [*where.tolist(), *(where + 100).tolist()]
            assert counts.max() < 2 * counts.min()


# --- random features


def test_features_are_orthogonal_and_normal():
    torch.manual_seed(0)
    w = orthogonal_features(2 * 8 + 3, 8)
    assert w.shape == (19, 8)
    for block in (w[:8], w[8:16], w[16:]):
        gram = block @ block.T
        assert (gram - torch.diag(gram.diagonal())).abs().max() <= 1e-5
    many = orthogonal_features(40000, 8)
    standard_error = 40000**-0.5
    assert many.mean(0).abs().max() < 4 * standard_error  # without corrected signs -0.06
    assert (many.T @ many / 40000 - torch.eye(8)).abs().max() < 6 * standard_error
    assert many.square().sum(-1).mean().item() == pytest.approx(8, abs=4 * 4 * standard_error)  # chi^2: variance 2 D
    diagonal = torch.stack([orthogonal_features(8, 8).diagonal() for _ in range(2000)])
    assert diagonal.mean(0).abs().max() < 4 * 2000**-0.5


def test_the_shift_of_keys_is_that_of_real_ones():
    logits = torch.arange(24.0).view(2, 1, 4, 3) - 30
    mask = torch.tensor([[True, True, False, False], [False] * 4])
    assert largest_of_head(logits)[:, 0, 0, 0].tolist() == [-19, -7]
    assert largest_of_head(logits, mask)[:, 0, 0, 0].tolist() == [-25, 0]


def row_errors(name, num_features, q, k):
    """Mean L1 distance of an attention row from softmax's."""
    one = torch.eye(q.shape[2]).expand(1, HEADS, -1, -1)
    mixer = mixer_of_width(name, q.shape[-1], num_features=num_features)
    with torch.no_grad():
        weights = mixer.mix(q, k, one, None)
    return (weights - torch.softmax(q.shape[-1]**-0.5 * q @ k.mT, -1)).abs().sum(-1).mean().item()


def test_performer_converges_to_softmax_attention():
    q, k, _ = qkv(1, 32, 16, scale=0.5)
    counts = (64, 1024, 16384)
    errors = [row_errors("performer", count, q, k) for count in counts]
    slope = math.log(errors[-1] / errors[0]) / math.log(counts[-1] / counts[0])
    assert errors[-1] < 0.025 and -0.6 < slope < -0.38, (errors, slope)  # uniform weights: 0.2; biased rotations: 0.033


def test_the_study_s_performer_does_not():
    q, k, _ = qkv(1, 32, 16, scale=0.5)
    one = torch.eye(32).expand(1, HEADS, -1, -1)
    mixer = mixer_of_width("performer", 16, num_features=16384, as_flare_study=True)
    exact = torch.softmax(q @ k.mT / 4, -1)
    with torch.no_grad():
        error = (mixer.mix(q, k, one, None) - exact).abs().sum(-1).mean()
    assert error > 0.9 * (1 / 32 - exact).abs().sum(-1).mean()
    assert mixer.random_features.projection.shape == (HEADS, 16384, 16) and mixer.random_features.interval is None
    assert mixer.random_features.projection.norm(dim=-1).allclose(torch.ones(()))


def test_favor_pp_at_zero_is_favor_plus():
    x, w = torch.randn(2, 3, 5, 4).double(), torch.randn(6, 4).double()
    ours = favor_pp.log_features(x, w, torch.zeros(2, 3, 1, 1).double())
    assert relative(ours, x @ w.T - x.square().sum(-1, keepdim=True) / 2) <= 1e-14


def test_favor_pp_s_coefficient_minimises_the_variance():
    for scale in (0.3, 1.0, 2.0):
        q, k, _ = (scale * x for x in qkv(2, 9, 8, dtype=torch.float64))
        a = favor_pp.optimal_coefficient(q, k, None)
        spread = ((q[:, :, :, None] + k[:, :, None])**2).sum(-1).mean((2, 3))  # [B, H]
        grid = torch.linspace(-3, 0.12, 400001, dtype=torch.float64)[:, None, None]
        log_square = 8 * torch.log(1 - 4 * grid) - 4 * torch.log(1 - 8 * grid) + 2 * (1 - 4 * grid) * spread / (1 - 8 * grid)
        assert (a[..., 0, 0] - grid[log_square.argmin(0), 0, 0]).abs().max() <= 2e-5
        assert (a < 0).all()


def test_favor_pp_estimates_the_kernel_with_less_variance():
    torch.manual_seed(0)
    q, k = 0.3 * torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    w = torch.randn(200000, 8, dtype=torch.float64)
    found = {}
    for name, a in (("zero", torch.zeros(1, 1, 1, 1).double()), ("optimal", favor_pp.optimal_coefficient(q, k, None))):
        logs = sum(favor_pp.log_features(x, w, a) for x in (q, k))
        estimate = ((1 - 4 * a)**4 * torch.exp(logs)).flatten() / torch.exp((q * k).sum())
        found[name] = estimate.var().item()
        assert estimate.mean().item() == pytest.approx(1, abs=5 * (found[name] / len(w))**0.5)
        phi = (q + k).square().sum()
        square = 8 * torch.log(1 - 4 * a) - 4 * torch.log(1 - 8 * a) + 2 * (1 - 4 * a) * phi / (1 - 8 * a) - phi
        assert found["zero"] > found[name] or name == "zero"
        assert 1 + found[name] == pytest.approx(square.exp().item(), rel=0.2)
    assert found["optimal"] < 0.7 * found["zero"]


def test_favor_pp_stays_finite_for_large_queries():
    q, k, v = (30 * x for x in qkv())
    assert mixed("favor_pp", q, k, v)[0].isfinite().all()


# --- linear attentions


def mixing_matrix(mixer, x):
    """The linear map from the values of a head to its outputs, [H, N, N]."""
    q, k, _ = (heads_of(part) for part in mixer.qkv_proj(x).split(CHANNELS, -1))
    with torch.no_grad():
        columns = torch.eye(len(x)).double().expand(1, HEADS, -1, -1).split(WIDTH, -1)
        return torch.cat([mixer.mix(q[None], k[None], v, None) for v in columns], -1)[0]


@pytest.mark.parametrize("name, rank", [("linear", WIDTH), ("cosformer", 2 * WIDTH), ("hedgehog", 2 * WIDTH),
                                        ("performer", 6), ("favor_pp", 6), ("skyformer", 5)])
def test_rank_and_sums_of_the_weights(name, rank):
    weights = mixing_matrix(mixer_of(name), tokens(1, 20)[0])
    assert torch.linalg.matrix_rank(weights, rtol=1e-10).max() == rank
    if name != "skyformer":
        sums = weights.sum(-1)
        assert (weights >= -1e-12).all() and (sums - 1)[sums > 0].abs().max() <= 1e-5


def test_cosformer_weighs_by_distance():
    q = k = torch.ones(1, 1, 8, 1).double()
    one = torch.eye(8).double()[None, None]
    weights = cosformer.Mixer(4, 1, "layernorm").double().mix(q, k, one, None)[0, 0]
    distance = (torch.arange(8)[:, None] - torch.arange(8)[None]).abs()
    expected = torch.cos(torch.pi / 2 * distance.double() / 8)
    assert relative(weights, expected / expected.sum(-1, keepdim=True)) <= 1e-12


def test_cosformer_without_a_positive_query_is_zero():
    q, k, v = qkv()
    q[:, :, 3] = -1
    out = mixed("cosformer", q, k, v)[0]
    assert (out[:, :, 3] == 0).all() and out.isfinite().all()


def test_hedgehog_starts_from_the_identity():
    mixer = plain("hedgehog")
    for module in (mixer.query_map, mixer.key_map):
        assert torch.equal(module.weight, torch.eye(8).expand(4, 8, 8)) and (module.bias == 0).all()
    q, k, v = (20 * x for x in qkv())  # exp of it is infinite
    assert mixed("hedgehog", q, k, v)[0].isfinite().all()


def test_norm_attention_does_not_see_the_scale():
    """Tokens that come twice, and values of any length: the norm takes the place of the denominator."""
    mixer, x = mixer_of("norm_attention"), tokens()
    assert relative(mixer(torch.cat([x, x], 1))[:, :TOKENS], mixer(x)) <= 1e-6
    q, k, v = qkv(dtype=torch.float64)
    assert relative(mixed("norm_attention", q, k, 1e3 * v)[0], mixed("norm_attention", q, k, v)[0]) <= 1e-6


def test_norm_attention_has_bounded_gradients():
    """Where the scores vanish the denominator of linear attention makes its gradient large; a norm does not."""
    largest = {}
    for name in ("linear", "norm_attention"):
        q, k, v = (x.requires_grad_() for x in qkv(1, 24, 8, dtype=torch.float64))
        options = {"feature_map": "identity"} if name == "linear" else {"as_flare_study": True}
        out = mixer_of_width(name, 8, **options).double().mix(q, k, v, None)
        largest[name] = max(grad.abs().max().item() for grad in torch.autograd.grad(out.sum(), (q, k, v)))
    assert largest["norm_attention"] < 100 < largest["linear"]


# --- Nystrom


def test_the_iterative_inverse():
    torch.manual_seed(0)
    a = torch.softmax(3 * torch.eye(12) + torch.randn(5, 12, 12), -1).double()
    errors = [(iterative_inverse(a, steps) @ a - torch.eye(12)).norm(dim=(1, 2)).max() for steps in (6, 12, 24)]
    assert errors[2] <= 1e-8 and errors[0] > errors[1] > errors[2]
    assert torch.equal(iterative_inverse(a)[1:2], iterative_inverse(a[1:2]))  # by its own norms
    a[0, 3], a[0, :, 3] = 0, 0
    kept = [index for index in range(12) if index != 3]
    inverse = iterative_inverse(a, 24)[0]
    assert (inverse[3] == 0).all() and (inverse[:, 3] == 0).all()
    assert relative(inverse[kept][:, kept], torch.linalg.inv(a[0, kept][:, kept])) <= 1e-8
    assert (iterative_inverse(torch.zeros(1, 4, 4)) == 0).all()


def test_nystromformer_with_every_token_a_landmark_is_full_attention(monkeypatch):
    monkeypatch.setattr(nystromformer, "iterative_inverse", lambda a: torch.linalg.pinv(a))
    for count in (TOKENS, TOKENS + 5):
        mixer = mixer_of("nystromformer", num_landmarks=count, conv_kernel=None)
        full = build_mixer("full", channel_dim=CHANNELS, num_heads=HEADS).double()
        full.load_state_dict(mixer.state_dict())
        x, mask = tokens(3), ragged_mask()[:3]
        assert relative(mixer(x), full(x)) <= 1e-9 and relative(mixer(x, mask), full(x, mask)) <= 1e-9


def test_segments_are_even_and_hold_real_tokens_only():
    x = torch.arange(10.0).expand(2, 1, 10).mT.clone()  # the token's number
    means, real = nystromformer.segment_means(x, None, 4)
    assert real is None and means[0, :, 0].tolist() == [1, 3.5, 6, 8.5]  # 0-2, 3-4, 5-7, 8-9
    mask = torch.zeros(2, 10, dtype=torch.bool)
    mask[0, [1, 4, 5, 6, 9]], mask[1, 8] = True, True
    means, real = nystromformer.segment_means(x, mask, 3)
    assert means[..., 0].tolist() == [[2.5, 5.5, 9], [8, 0, 0]] and real.tolist() == [[True] * 3, [True, False, False]]


def test_nystromformer_rows_sum_to_one():
    torch.manual_seed(0)
    mixer = nystromformer.Mixer(32, 2, "layernorm", 16, conv_kernel=None).double()
    nn.init.normal_(mixer.qkv_proj.weight, std=0.18)
    with torch.no_grad():
        mixer.qkv_proj.weight[64:], mixer.qkv_proj.bias[64:] = 0, 1
        mixer.out_proj.weight.copy_(torch.eye(32))
        assert (mixer(tokens(2, 128, 32)) - 1).abs().max() <= 5e-3


@pytest.mark.parametrize("gamma, tolerance", [(1e-1, 5e-2), (1e-3, 1e-4), (1e-6, 1e-9)])
def test_skyformer_with_all_points_is_its_kernel(monkeypatch, gamma, tolerance):
    q, k, v = qkv(1, 10, 8, dtype=torch.float64)
    mixer = mixer_of_width("skyformer", 8).double()
    monkeypatch.setattr(skyformer, "GAMMA", gamma)
    monkeypatch.setattr(skyformer, "iterative_inverse", torch.linalg.inv)
    monkeypatch.setattr(mixer, "landmarks", lambda q, k, mask: torch.cat([q, k], 2))
    scaled = [8**-0.25 * x for x in (q, k)]
    exact = torch.exp(-(scaled[0][:, :, :, None] - scaled[1][:, :, None]).square().sum(-1) / 2) @ v
    assert relative(mixer.mix(q, k, v, None), exact) <= tolerance


def test_real_tokens_come_first_and_in_order():
    mask = torch.tensor([[False, True, False, True], [True] * 4, [False] * 4])
    positions, count = real_tokens(torch.zeros(3, 4, 1), mask)
    assert positions.tolist() == [[1, 3, 0, 2], [0, 1, 2, 3], [0, 1, 2, 3]] and count.tolist() == [[2], [4], [0]]


# --- precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name, options", [form for form in FORMS if "feature_map" not in form[1]], ids=str)
def test_autocast_keeps_the_kernel_in_full_precision(name, options, dtype):
    """Sums of half-precision values over 3,000 tokens overflow FP16; features and inverses lose all digits."""
    mixer = plain(name, **options).eval()
    x = 20 * tokens(1, 3000, 32).float()
    exact = mixer(x)
    with torch.autocast("cpu", dtype=dtype):
        out = mixer(x)
        inside = torch.autograd.grad(1e3 * out.float().square().mean(), list(mixer.parameters()), retain_graph=True)
    assert out.isfinite().all() and relative(out.float(), exact) <= 0.2
    outside = torch.autograd.grad(1e3 * out.float().square().mean(), list(mixer.parameters()))
    for one, other in zip(inside, outside):
        assert one.isfinite().all() and relative(one, other) <= 1e-2


def test_products_keep_their_precision_in_a_backward_pass_under_autocast():
    a, b = (300 * torch.randn(shape).requires_grad_() for shape in ((2, 3, 5, 4), (4, 6)))
    plain, ours = a @ b, product(a, b)
    with torch.autocast("cpu", dtype=torch.float16):
        found = torch.autograd.grad(ours.sum() * 300, (a, b))
    expected = torch.autograd.grad(plain.sum() * 300, (a, b))
    assert torch.equal(plain, ours) and all(relative(one, other) <= 1e-6 for one, other in zip(found, expected))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_but_projections_and_softmax_runs_in_half_precision(name):
    mixer = plain(name, **({"conv_kernel": None} if name == "nystromformer" else {}))
    with torch.autocast("cpu", dtype=torch.bfloat16), Recorder() as recorder:
        mixer(tokens(1, 50, 32).float())
    halves = {kind for kind, (arguments, _, _) in zip(recorder.names, recorder.calls)
              if any(isinstance(argument, torch.Tensor) and argument.dtype == torch.bfloat16 for argument in arguments)}
    assert "addmm" in halves and not halves & {"exp", "bmm", "sum", "div", "rsqrt", "_softmax"}
    assert name == "nystromformer" or not any("attention" in kind for kind in halves)


# --- work


FORMULAS = {"linear": "4 C^2 + 2 C D + C", "cosformer": "4 C^2 + 4 C D + 2 C", "hedgehog": "4 C^2 + 6 C D + 2 C",
            "norm_attention": "4 C^2 + 2 C D", "performer": "4 C^2 + 4 M C + H M", "favor_pp": "4 C^2 + 4 M C + H M",
            "nystromformer": "4 C^2 + 4 M C + 5 C", "skyformer": "4 C^2 + 4 M C + 4 H M"}


@forms
def test_a_mixer_does_what_its_formula_says(name, options):
    mixer = plain(name, **options)
    assert options or mixer.operations == FORMULAS[name]
    sizes = {"C": 32, "H": 4, "D": 8, "M": next((value for key, value in (SIZES.get(name, {}) | options).items()
                                                 if key.startswith("num_")), 0)}
    once, twice = (mixer_multiply_adds(mixer, count, 32) for count in (80, 160))
    assert twice - once == 80 * evaluate(mixer.operations, **sizes)


def exponent(counts, values):
    """Least-squares slope of log value against log count."""
    x, y = (torch.tensor(numbers, dtype=torch.float64).log() for numbers in (counts, values))
    return ((x - x.mean()) * (y - y.mean())).sum().item() / (x - x.mean()).square().sum().item()


@pytest.mark.parametrize("name", NAMES)
def test_work_and_memory_are_linear_in_the_tokens(name):
    mixer, counts, largest = plain(name), (1024, 2048, 4096, 8192), []
    work = [mixer_multiply_adds(mixer, count, 32) for count in counts]
    assert exponent(counts, work) == pytest.approx(1, abs=0.02)
    for count in counts[:2]:
        with Recorder() as recorder:
            mixer(torch.zeros(1, count, 32), torch.arange(count)[None] < count - 10).sum().backward()
        largest.append(recorder.largest)
    assert largest[1] <= 2.1 * largest[0]


def test_only_fused_attention_touches_the_tokens_of_a_softmax():
    mixer = plain("nystromformer", conv_kernel=None)
    with Recorder() as recorder:
        mixer(torch.randn(1, 100, 32)).sum().backward()
    fused = "_scaled_dot_product_flash_attention_for_cpu"
    assert sorted(recorder.attention()) == [fused, fused, fused + "_backward", fused + "_backward"]
    softmaxes = [result for kind, (_, _, result) in zip(recorder.names, recorder.calls) if kind == "_softmax"]
    assert [tuple(result.shape) for result in softmaxes] == [(1, 4, 4, 4)]  # that of the landmarks, to be inverted


# --- parameters and errors


def test_parameters():
    count = {name: sum(parameter.numel() for parameter in plain(name).parameters()) for name in NAMES}
    same = 4 * 32**2 + 4 * 32  # q, k, v and output
    extra = {"hedgehog": 2 * 4 * (8**2 + 8), "norm_attention": 32, "nystromformer": 4 * 5}
    assert count == {name: same + extra.get(name, 0) for name in NAMES}
    for name in NAMES:
        mixer = plain(name)
        mixer(tokens(1, 20, 32).float()).square().sum().backward()
        assert all(parameter.grad is not None for parameter in mixer.parameters()), name


@pytest.mark.parametrize("name, options, words", [
    ("linear", {"feature_map": "relu"}, ["feature_map 'relu' is unknown", "Allowed: elu, identity"]),
    ("performer", {"redraw_interval": 0}, ["redraw_interval: got 0"]),
    ("favor_pp", {"redraw_interval": -1}, ["redraw_interval: got -1"]),
    ("nystromformer", {"conv_kernel": 4}, ["conv_kernel: got 4", "odd"]),
    ("nystromformer", {"conv_kernel": 0}, ["conv_kernel: got 0"]),
    ("hedgehog", {"num_heads": 5}, ["32 is not divisible by num_heads 5"]),
])
def test_wrong_options_are_named(name, options, words):
    with pytest.raises(ValueError) as error:
        build_mixer(name, **{"channel_dim": 32, "num_heads": 4} | SIZES.get(name, {}) | options)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("name", ["performer", "favor_pp", "nystromformer", "skyformer"])
def test_sizes_have_no_default(name):
    size = next(iter(SIZES[name]))
    with pytest.raises(ValueError, match=f"needs {size}"):
        build_mixer(name, channel_dim=32, num_heads=4)
