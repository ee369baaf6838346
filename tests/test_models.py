"""The complete architectures: formula twins, padding, equivariance, parameter counts, initialisation, precision, errors."""

import importlib
import inspect
import itertools
import math

import pytest
import torch
from torch import nn

from flarepp.layers import LayerNorm
from flarepp.models import build_model
from flarepp.models.gnot import LinearAttention, lattice_distances
from reference import UNFUSED, Recorder, exact_gelu, heads, linear, normalise
from test_mixers import lively, relative, tokens, twin_mlp

IN, OUT, CHANNELS, HEADS, BLOCKS, GRID = 3, 2, 12, 4, 2, (3, 5)
TOKENS = GRID[0] * GRID[1]
COMMON = {"in_dim": IN, "out_dim": OUT, "channel_dim": CHANNELS, "num_heads": HEADS, "num_blocks": BLOCKS}
OWN = {
    "perceiver_io": {"num_latents": 7, "ffn_ratio": 3, "init_std": 0.3},
    "set_transformer": {"num_inducing": 5, "ffn_ratio": 3},
    "gnot": {"num_experts": 3, "ffn_ratio": 1.5},
    "lno": {"num_modes": 6, "num_layers": 2},
}
PUBLISHED = {"as_published": True, "reference_grid": 4, "grid": GRID}
VARIANTS = [pytest.param(name, {}, id=name) for name in OWN] + [
    pytest.param("gnot", {"grid": GRID}, id="gnot-grid"), pytest.param("gnot", PUBLISHED, id="gnot-as_published")]
EQUIVARIANT = VARIANTS[:-1]


def fresh(name, **options):
    torch.manual_seed(0)
    return build_model(name, **COMMON | OWN[name] | options)


def model_of(name, **options):
    return lively(fresh(name, **options), seed=5)


def features(batch=3, seed=1):
    return tokens(batch, TOKENS, IN, seed)


def ragged_mask():
    """Padding at the end, in the middle and at the start; the last sample has no token at all."""
    mask = torch.ones(4, TOKENS, dtype=torch.bool)
    mask[0, 8:], mask[1, 2:5], mask[2, 0], mask[3] = False, False, False, False
    return mask


def gradients(out, leaves):
    return torch.autograd.grad((out * tokens(*out.shape, seed=2)).sum(), leaves)


def softmax_hides(name, key):
    """A bias on keys shifts every score of a row alike; GNOT takes the softmax over channels and sees it."""
    return name != "gnot" and key.endswith("key_proj.bias")


# --- the formulas written out; p holds the parameters by name


def below(p, prefix):
    return {key.removeprefix(f"{prefix}."): value for key, value in p.items() if key.startswith(f"{prefix}.")}


def norm(p, name, x):
    return normalise(p, name, x, "layernorm")


def merged(x):
    """[B, N, H, D] -> [B, N, C]"""
    return x.reshape(*x.shape[:2], -1)


def mix(q, k, v, scale):
    scores = scale * torch.einsum("bmhd,bnhd->bhmn", q, k)
    return torch.einsum("bhmn,bnhd->bmhd", torch.softmax(scores, -1), v)


def dense(p, x, num_layers):
    """LNO's and GNOT's MLP, exact GELU."""
    h = exact_gelu(linear(p, "input", x))
    for layer in range(num_layers):
        h = h + exact_gelu(linear(p, f"hidden.{layer}", h))
    return linear(p, "output", h)


def multihead(p, q, k, v, scale):
    return linear(p, "out_proj", merged(mix(*(heads(part, HEADS) for part in (q, k, v)), scale)))


def perceiver_io(p, x, table=None):
    scale, batch = math.sqrt(HEADS / CHANNELS), len(x)
    x = twin_mlp(p, "in_proj", x, False, True)
    t, encoder = norm(p, "encoder_norm", x), below(p, "encoder")
    latents = p["latents"].expand(batch, -1, -1)
    z = multihead(encoder, latents, linear(encoder, "key_proj", t), linear(encoder, "value_proj", t), scale)
    for block in range(BLOCKS):
        b = below(p, f"blocks.{block}")
        q, k, v = torch.einsum("bmc,oc->bmo", norm(b, "norm1", z), b["qkv_proj.weight"]).split(CHANNELS, -1)
        z = z + multihead(b, q, k, v, scale)
        z = z + twin_mlp(b, "ffn", norm(b, "norm2", z), False, False)
    decoder, t, z = below(p, "decoder"), norm(p, "token_norm", x), norm(p, "latent_norm", z)
    projected = (linear(decoder, f"{part}_proj", source) for part, source in (("query", t), ("key", z), ("value", z)))
    o = multihead(decoder, *projected, scale)
    return twin_mlp(p, "out_proj", norm(p, "out_norm", o), True, False)


def multihead_block(p, queries, keys):
    sources = {"query": queries, "key": keys, "value": keys}
    q, k, v = (heads(linear(p, f"{part}_proj", source), HEADS) for part, source in sources.items())
    o = norm(p, "norm1", merged(q + mix(q, k, v, 1 / math.sqrt(CHANNELS))))
    return norm(p, "norm2", o + exact_gelu(linear(p, "out_proj", o)))


def set_transformer(p, x, table=None):
    x = twin_mlp(p, "in_proj", x, False, True)
    for block in range(BLOCKS):
        b = below(p, f"blocks.{block}")
        t = norm(b, "norm1", x)
        induced = multihead_block(below(b, "encode_block"), b["inducing_points"].expand(len(x), -1, -1), t)
        x = x + multihead_block(below(b, "decode_block"), t, induced)
        x = x + twin_mlp(b, "ffn", norm(b, "norm2", x), False, False)
    return twin_mlp(p, "out_proj", norm(p, "out_norm", x), True, False)


def linear_attention(p, a, b):
    q, k = (torch.softmax(heads(linear(p, f"{part}_proj", x), HEADS), -1) for part, x in (("query", a), ("key", b)))
    weights = torch.einsum("bmhd,bnhd->bhmn", q, k)  # the explicit N x N matrix
    weights = weights / weights.sum(-1, keepdim=True)
    values = heads(linear(p, "value_proj", b), HEADS)
    return linear(p, "out_proj", merged(q + torch.einsum("bhmn,bnhd->bmhd", weights, values)))


def mixture(p, name, gates, a):
    experts = torch.stack([dense(below(p, f"{name}.experts.{e}"), a, 0) for e in range(gates.shape[-1])], -1)
    return torch.einsum("bne,bnce->bnc", gates, experts)


def gnot(p, x, table=None):
    seen = x if table is None else table.expand(len(x), -1, -1)
    f, x0 = dense(below(p, "f_proj"), seen, 0) + p["placeholder"], dense(below(p, "x_proj"), seen, 0)
    for block in range(BLOCKS):
        b = below(p, f"blocks.{block}")
        hidden = exact_gelu(linear(b, "gate.2", exact_gelu(linear(b, "gate.0", x))))
        gates = torch.softmax(linear(b, "gate.4", hidden), -1)
        a = x0 + linear_attention(below(b, "cross_attention"), norm(b, "norms.0", x0), norm(b, "norms.1", f))
        a = a + norm(b, "norms.2", mixture(b, "experts1", gates, a))
        t = norm(b, "norms.3", a)
        a = a + linear_attention(below(b, "self_attention"), t, t)
        f = a + norm(b, "norms.4", mixture(b, "experts2", gates, a))
    return dense(below(p, "out_proj"), f, 0)


def lno(p, x, table=None):
    scores = dense(below(p, "score_proj"), dense(below(p, "trunk_proj"), x, 2), 2)
    z = torch.einsum("bnm,bnc->bmc", torch.softmax(scores, 1), dense(below(p, "branch_proj"), x, 2))
    for block in range(BLOCKS):
        b = below(p, f"blocks.{block}")
        t = norm(b, "norm1", z)
        q, k, v = (linear(b, f"{part}_proj", t) for part in ("query", "key", "value"))
        z = z + multihead(b, q, k, v, math.sqrt(HEADS / CHANNELS))
        z = z + linear(b, "ffn_output", exact_gelu(linear(b, "ffn_input", norm(b, "norm2", z))))
    y = torch.einsum("bnm,bmc->bnc", torch.softmax(scores, -1), z)
    return dense(below(p, "out_proj"), y, 2)


TWINS = {"perceiver_io": perceiver_io, "set_transformer": set_transformer, "gnot": gnot, "lno": lno}


@pytest.mark.parametrize("name, options", VARIANTS)
def test_outputs_and_gradients_equal_the_formula(name, options):
    model, x = model_of(name, **options), features().requires_grad_()
    parameters = dict(model.named_parameters())
    ours, theirs = model(x), TWINS[name](parameters, x, getattr(model, "distances", None))
    assert ours.shape == (3, TOKENS, OUT) and relative(ours, theirs) <= 1e-10
    leaves = [x, *parameters.values()]
    found, expected = gradients(ours, leaves), gradients(theirs, leaves)
    largest = max(grad.abs().max().item() for grad in expected)
    for label, one, other in zip(["x", *parameters], found, expected, strict=True):
        assert relative(one, other, 1e-6 * largest) <= 1e-8, label
        assert other.abs().max() > 1e-4 * largest or softmax_hides(name, label), f"{label} is hardly tested"


# --- padding


@pytest.mark.parametrize("name, options", VARIANTS)
def test_a_padded_batch_equals_its_samples_alone(name, options):
    model, mask, x = model_of(name, **options), ragged_mask(), features(4)
    together = model(x, mask)
    assert (together[~mask] == 0).all() and not together.isnan().any()
    for sample in range(3):
        one, real = slice(sample, sample + 1), mask[sample]
        alone = model(x[one], mask[one])[:, real] if "as_published" in options else model(x[one, real])
        assert relative(together[sample, real], alone[0]) <= 1e-11


@pytest.mark.parametrize("name, options", VARIANTS)
def test_a_full_mask_changes_nothing(name, options):
    model, x = model_of(name, **options), features()
    assert relative(model(x, torch.ones(3, TOKENS, dtype=torch.bool)), model(x)) <= 1e-11


def test_as_published_padding_removes_tokens_of_the_formula():
    """Positions stay, padded rows of the distance table go."""
    model, mask, x = model_of("gnot", **PUBLISHED), ragged_mask(), features(4)
    out = model(x, mask)
    for sample in range(3):
        real = mask[sample]
        alone = gnot(dict(model.named_parameters()), x[sample: sample + 1, real], model.distances[:, real])
        assert relative(out[sample, real], alone[0]) <= 1e-10


@pytest.mark.parametrize("poison", [math.nan, math.inf, -1e300])
@pytest.mark.parametrize("name, options", VARIANTS)
def test_padding_leaks_into_neither_outputs_nor_gradients(name, options, poison):
    model, mask, results = model_of(name, **options), ragged_mask(), []
    for value in (0.0, poison):
        x = features(4).masked_fill(~mask[..., None], value).requires_grad_()
        out = model(x, mask)
        results.append((out, *gradients(out, [x, *model.parameters()])))
    for clean, poisoned in zip(*results, strict=True):
        assert torch.equal(clean, poisoned) and poisoned.isfinite().all()
    assert (results[1][1][~mask] == 0).all() and (results[1][1][mask] != 0).any()


@pytest.mark.parametrize("name, options", VARIANTS)
def test_a_sample_without_any_token_gives_zeros_and_finite_gradients(name, options):
    model, x = model_of(name, **options), features(1).requires_grad_()
    out = model(x, torch.zeros(1, TOKENS, dtype=torch.bool))
    assert (out == 0).all()
    assert all((grad == 0).all() for grad in gradients(out, [x, *model.parameters()]))


# --- structure


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name, options", EQUIVARIANT)
def test_token_permutation_equivariance(name, options, masked):
    model, x, mask = model_of(name, **options), features(4), ragged_mask() if masked else None
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(3))
    permuted = model(x[:, order], mask if mask is None else mask[:, order])
    assert relative(permuted, model(x, mask)[:, order]) <= 1e-11


def test_as_published_sees_positions():
    model, x = model_of("gnot", **PUBLISHED), features()
    assert relative(model(x.flip(1)), model(x).flip(1)) > 1e-2


@pytest.mark.parametrize("name, options", VARIANTS)
def test_samples_do_not_see_each_other(name, options):
    model, x = model_of(name, **options), features()
    assert relative(model(x)[1:2], model(x[1:2])) <= 1e-11
    changed = x.clone()
    changed[0] += 1
    assert torch.equal(model(changed)[1:], model(x)[1:])


@pytest.mark.parametrize("name, options", VARIANTS)
def test_every_token_reaches_every_output(name, options):
    model, x = model_of(name, **options), features(1)
    for token in (0, TOKENS - 1):
        changed = x.clone()
        changed[0, token] += 1
        moved = (model(changed) - model(x)).abs().amax((0, 2))
        assert (moved > 1e-9).all()


@pytest.mark.parametrize("name, options", VARIANTS)
def test_every_parameter_trains_from_the_start(name, options):
    model = fresh(name, **options).double()
    parameters = dict(model.named_parameters())
    for key, grad in zip(parameters, gradients(model(features()), list(parameters.values())), strict=True):
        assert grad.isfinite().all() and (softmax_hides(name, key) or (grad != 0).any()), key


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("name, options", VARIANTS)
def test_depth_builds_as_many_blocks(name, options, blocks):
    model = fresh(name, **options, num_blocks=blocks)
    assert len(model.blocks) == blocks
    assert len(list(model.blocks.parameters())) == blocks * len(list(model.blocks[0].parameters()))  # none is shared


def test_lno_num_layers_and_gnot_num_experts():
    model = fresh("lno", num_layers=3)
    for part in (model.trunk_proj, model.branch_proj, model.score_proj, model.out_proj):
        assert len(part.hidden) == 3
    for block in fresh("gnot", num_experts=5).blocks:
        assert len(block.experts1.experts) == len(block.experts2.experts) == block.gate[-1].out_features == 5


# --- GNOT as published


def zero_gates(model):
    with torch.no_grad():
        for block in model.blocks:
            for parameter in block.gate.parameters():
                parameter.zero_()
    return model


def test_gnot_as_published_sees_its_input_through_the_gates_alone():
    model, x, other = model_of("gnot", **PUBLISHED), features(), features(seed=5)
    assert relative(model(x), model(other)) > 1e-2
    zero_gates(model)
    leaf = x.clone().requires_grad_()
    out = model(leaf)
    assert torch.equal(out, model(other)) and (gradients(out, [leaf])[0] == 0).all()
    assert (out[0] != out[0, :1]).any()  # the positions remain


@pytest.mark.parametrize("options", [{}, {"grid": GRID}, {"grid": None, "as_published": True}], ids=str)
def test_gnot_sees_its_input_by_default_and_off_the_grid(options):
    model = model_of("gnot", **options)
    assert torch.equal(model(features()), model_of("gnot")(features()))
    zero_gates(model)
    assert relative(model(features()), model(features(seed=5))) > 1e-2


@pytest.mark.parametrize("grid, side", [((3, 5), 4), ((2, 7), 8), ((4, 2, 3), 2), ((6,), 3)], ids=str)
def test_lattice_distances_row_by_row(grid, side):
    table = lattice_distances(grid, side)
    assert table.shape == (1, math.prod(grid), side ** len(grid)) and table.dtype == torch.float32
    points, lattice = (list(itertools.product(*([i / (extent - 1) for i in range(extent)] for extent in extents)))
                       for extents in (grid, (side,) * len(grid)))
    for n, m in itertools.product(range(len(points)), range(len(lattice))):
        assert table[0, n, m].item() == pytest.approx(math.dist(points[n], lattice[m]), abs=1e-6), (n, m)


def test_the_distances_are_no_part_of_the_checkpoint():
    model = model_of("gnot", **PUBLISHED)
    assert "distances" not in model.state_dict() and model.state_dict().keys() == dict(model.named_parameters()).keys()
    assert torch.equal(model.distances, lattice_distances(GRID, 4).double())


# --- parameter counts of the FLARE study (models.md 3.3)


DATASETS = ("elasticity", "darcy", "airfoil", "pipe", "driv40k", "lpbf")
IN_DIM = dict(zip(DATASETS, (2, 3, 2, 2, 3, 3), strict=True))
GRIDS = {"darcy": (85, 85), "airfoil": (221, 51), "pipe": (129, 129)}
COUNTS = {
    "perceiver_io": (1864833, 1864961, 1864833, 1864833, 1864961, 1864961),
    "gnot": (4870553, 4904345, 4902297, 4902297, 4873113, 4873113),
    "lno": (1831745, 762241, 1291905, 1291905, 762241, 762241),
}


def study_options(name, dataset):
    own = {
        "perceiver_io": {"num_latents": 512, "ffn_ratio": 4, "init_std": 0.02},
        "gnot": {"num_experts": 3, "ffn_ratio": 2, "as_published": True, "grid": GRIDS.get(dataset)},
        "lno": {"num_modes": 256, "num_blocks": 8 if dataset in ("pipe", "airfoil") else 4} | (
            {"num_layers": 3, "channel_dim": 192} if dataset == "elasticity" else {"num_layers": 2}),
    }
    return {"in_dim": IN_DIM[dataset], "out_dim": 1, "channel_dim": 128, "num_heads": 8, "num_blocks": 8} | own[name]


@pytest.mark.parametrize("dataset", DATASETS)
@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts_are_those_of_the_study(name, dataset):
    with torch.device("meta"):
        model = build_model(name, **study_options(name, dataset))
    assert sum(parameter.numel() for parameter in model.parameters()) == COUNTS[name][DATASETS.index(dataset)]


def test_set_transformer_parameter_count():
    model, hidden = fresh("set_transformer"), 3 * CHANNELS
    square, pair = CHANNELS**2 + CHANNELS, 2 * CHANNELS  # a Linear, a LayerNorm
    block = 5 * CHANNELS + 2 * (4 * square + 2 * pair) + 2 * pair + 2 * CHANNELS * hidden + hidden + CHANNELS
    ends = IN * CHANNELS + CHANNELS + 6 * square + CHANNELS * OUT + OUT
    assert sum(parameter.numel() for parameter in model.parameters()) == ends + pair + BLOCKS * block


# --- initialisation


def assert_normal(weight, std, label):
    """Moments and tails of N(0, std^2), five standard errors wide."""
    count = weight.numel()
    assert abs(weight.std().item() / std - 1) <= 5 / math.sqrt(2 * count), label
    assert abs(weight.mean().item()) <= 5 * std / math.sqrt(count), label
    tails = (weight.abs() > 2 * std).double().mean().item()
    assert abs(tails - 0.0455) <= 5 * math.sqrt(0.0455 / count), label


def assert_uniform(weight, low, high, label):
    """Bounds, mean and spread of U(low, high), five standard errors wide."""
    count, width = weight.numel(), high - low
    assert low - 1e-6 * width <= weight.min() and weight.max() <= high + 1e-6 * width, label
    assert abs(weight.mean().item() - (low + high) / 2) <= 5 * width / math.sqrt(12 * count), label
    assert abs(weight.std().item() * math.sqrt(12) / width - 1) <= 5 / math.sqrt(5 * count), label


WIDE = {"channel_dim": 64, "num_blocks": 1}


def linears(model):
    return {key: module for key, module in model.named_modules() if isinstance(module, nn.Linear)}


@pytest.mark.parametrize("name, options, std", [
    ("perceiver_io", {"init_std": 0.02}, 0.02), ("perceiver_io", {"init_std": 0.1}, 0.1),
    ("set_transformer", {}, 0.02), ("gnot", {}, 0.02), ("gnot", PUBLISHED, 0.02)], ids=str)
def test_linear_weights_start_from_normals_and_biases_from_zero(name, options, std):
    for key, layer in linears(fresh(name, **WIDE, **options)).items():
        assert_normal(layer.weight.detach(), std, key)
        assert layer.bias is None or (layer.bias == 0).all(), key


def test_lno_starts_from_pytorchs_own_uniforms():
    for key, layer in linears(fresh("lno", **WIDE, num_modes=40)).items():
        bound = layer.in_features**-0.5
        assert_uniform(layer.weight.detach(), -bound, bound, key)
        if layer.out_features >= 40:
            assert_uniform(layer.bias.detach(), -bound, bound, key)
        assert (layer.bias != 0).all(), key


def test_learned_points_and_the_placeholder():
    latents = fresh("perceiver_io", **WIDE, num_latents=50).latents.detach()
    assert latents.shape == (50, 64)
    assert_normal(latents, 1.0, "latents")
    for block in fresh("set_transformer", channel_dim=64, num_inducing=50).blocks:
        assert block.inducing_points.shape == (1, 50, 64)
        bound = math.sqrt(6 / (64 * 50 + 64))  # Xavier's fans of a [1, M, C] tensor, as in the authors' code
        assert_uniform(block.inducing_points.detach(), -bound, bound, "inducing points")
    placeholder = fresh("gnot", **WIDE).placeholder.detach()
    assert placeholder.shape == (64,) and (0 <= placeholder).all()
    assert_uniform(placeholder, 0, 1 / 64, "placeholder")


@pytest.mark.parametrize("name, options", VARIANTS)
def test_norms_start_as_identities(name, options):
    norms = [module for module in fresh(name, **options).modules() if isinstance(module, nn.LayerNorm)]
    assert norms and all(type(module) is LayerNorm for module in norms)
    assert all((module.weight == 1).all() and (module.bias == 0).all() for module in norms)


# --- precision and what runs


@pytest.mark.parametrize("half, tolerance, cosine", [(torch.float16, 0.01, 0.999), (torch.bfloat16, 0.08, 0.98)], ids=str)
@pytest.mark.parametrize("name, options", VARIANTS)
def test_half_precision_autocast_stays_close(name, options, half, tolerance, cosine):
    model, mask = model_of(name, **options).float(), ragged_mask()
    x = features(4).float().masked_fill(~mask[..., None], math.nan)
    expected = model(x, mask)
    with torch.autocast("cpu", dtype=half):
        out = model(x, mask)
    assert relative(out.float(), expected) <= tolerance and (out[~mask] == 0).all()
    ours, theirs = (torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, list(model.parameters()))])
                    for loss in ((y.float() / expected.detach().abs().max()).square().mean() for y in (out, expected)))
    assert ours.isfinite().all() and torch.cosine_similarity(ours, theirs, dim=0) > cosine


def test_sums_over_many_tokens_stay_within_half_precision():
    """Values of 100 at 8,192 tokens: sum_n k_n v_n is 1e5, beyond FP16; 10^6 tokens do the same to values near 1."""
    torch.manual_seed(0)
    attention, x = LinearAttention(8, 1), torch.randn(1, 8192, 8)
    nn.init.constant_(attention.value_proj.bias, 100)
    with torch.autocast("cpu", dtype=torch.float16):
        half = attention(x, x)
    assert half.isfinite().all() and relative(half.float(), attention(x, x)) <= 0.01


def recorded(name, mask=None, **options):
    model = model_of(name, **options).float()
    with Recorder() as recorder:
        model(features().float(), mask).sum().backward()
    return recorder


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name, count", [("perceiver_io", BLOCKS + 2), ("set_transformer", 2 * BLOCKS)])
def test_only_fused_attention_runs(name, count, masked):
    recorder = recorded(name, torch.arange(TOKENS).expand(3, -1) < 9 if masked else None)
    fused = "_scaled_dot_product_flash_attention_for_cpu"
    assert not UNFUSED & set(recorder.names)
    assert sorted(recorder.attention()) == count * [fused] + count * [fused + "_backward"]


def test_the_modes_of_lno_use_fused_attention_and_gnot_uses_none():
    assert len(recorded("lno").attention()) == 2 * BLOCKS and not recorded("gnot").attention()


@pytest.mark.parametrize("name, options, width", [
    ("perceiver_io", {"num_latents": 64, "ffn_ratio": 2}, 32), ("set_transformer", {"num_inducing": 64, "ffn_ratio": 2}, 32),
    ("gnot", {}, 32), ("lno", {"num_modes": 8}, 32)])
def test_memory_is_linear_in_the_tokens(name, options, width):
    count = 500
    model = fresh(name, **options, channel_dim=8, num_heads=1)
    with Recorder() as recorder:
        model(torch.randn(1, count, IN), torch.arange(count)[None] < 490).sum().backward()
    assert recorder.largest <= count * width < count * 64


# --- errors


@pytest.mark.parametrize("name, changes, words", [
    ("perceiver", {}, ["model 'perceiver' is unknown", "did you mean 'perceiver_io'"]),
    ("settransformer", {}, ["did you mean 'set_transformer'"]),
    ("gnott", {}, ["did you mean 'gnot'"]),
    ("nothing_like_it", {}, ["Allowed", *OWN]),
    ("perceiver_io", {"num_latent": 3}, ["model 'perceiver_io'", "'num_latent'", "did you mean 'num_latents'"]),
    ("set_transformer", {"num_latents": 3}, ["model 'set_transformer'", "'num_latents'", "num_inducing"]),
    ("gnot", {"aspublished": True}, ["model 'gnot'", "did you mean 'as_published'"]),
    ("lno", {"ffn_ratio": 2}, ["model 'lno'", "'ffn_ratio'", "Allowed", "num_modes"]),
])
def test_build_model_errors(name, changes, words):
    with pytest.raises(ValueError) as error:
        build_model(name, **COMMON | OWN.get(name, {}) | changes)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("name", OWN)
def test_every_model_asks_for_its_options(name):
    signature = inspect.signature(importlib.import_module(f"flarepp.models.{name}").Model).parameters
    needed = {key for key, parameter in signature.items() if parameter.default is parameter.empty}
    assert needed == {*COMMON, *OWN[name]}
    for key in needed - {"in_dim", "out_dim"}:  # those are arguments of build_model itself
        given = {other: value for other, value in (COMMON | OWN[name]).items() if other != key}
        with pytest.raises(ValueError, match=f"model '{name}' needs {key}"):
            build_model(name, **given)


@pytest.mark.parametrize("heads_given", [5, 0])
@pytest.mark.parametrize("name", OWN)
def test_every_model_refuses_heads_that_do_not_divide_the_width(name, heads_given):
    with pytest.raises(ValueError, match=f"channel_dim 12 is not divisible by num_heads {heads_given}"):
        fresh(name, num_heads=heads_given)
