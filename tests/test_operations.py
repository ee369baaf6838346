"""Operation counts: the mixers' formulas, their twins and the counter agree; formulas are evaluated or refused."""

import importlib
import inspect
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from flarepp.attention import attend
from flarepp.layers import NORMS
from flarepp.mixers import build_mixer, mixer_names
from flarepp.models import build_model
from flarepp.operations import UNCOUNTED, evaluate, mixer_multiply_adds, model_multiply_adds
from reference import TWINS

SIZES = [{"C": 12, "H": 3, "M": 5}, {"C": 32, "H": 4, "M": 24}, {"C": 128, "H": 8, "M": 64}]
TILED, COUNTS = {"tile": 40}, (40, 100)
MOST = 5001  # tokens
BLOCKS = {"bigbird", "funnel", "local", "longformer", "reformer", "sinkhorn", "sparse"}  # see test_mixers_patterns
FORMS = [*((name, {}) for name in mixer_names() if name not in BLOCKS), ("transolver3", TILED)]


def mixer_of(name, sizes, norm="layernorm", **options):
    """With M for every size that has no default."""
    parameters = inspect.signature(importlib.import_module(f"flarepp.mixers.{name}").Mixer).parameters.values()
    given = {p.name: sizes["M"] for p in parameters if p.default is p.empty}
    given |= {"channel_dim": sizes["C"], "num_heads": sizes["H"], "norm": norm, "seq_len": MOST}
    return build_mixer(name, **given | options)


def formula_of(mixer, sizes, num_tokens):
    return evaluate(mixer.operations, **sizes, D=sizes["C"] // sizes["H"], N=num_tokens)


def counted(function):
    """Multiply-adds of what runs in `function` on real tensors."""
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=UNCOUNTED) as counter:
        function()
    return counter.get_total_flops() // 2


# --- the formulas of the mixers


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name, options", FORMS, ids=str)
def test_a_mixer_does_what_its_formula_says(name, options, sizes, norm):
    mixer, count = mixer_of(name, sizes, norm, **options), 80  # the tile divides it
    once, twice = (mixer_multiply_adds(mixer, tokens, sizes["C"]) for tokens in (count, 2 * count))
    if name in ("full", "synthesizer"):
        assert [once, twice] == [tokens * formula_of(mixer, sizes, tokens) for tokens in (count, 2 * count)]
    else:
        assert twice - once == count * formula_of(mixer, sizes, count)


FORMULAS = {"flare": "3 C^2 + 4 M C", "flarepp": "5 C^2 + 6 M C", "flarepp_shared": "3 C^2 + 6 M C",
            "flarepp_anchored": "4 C^2 + 6 M C", "full": "4 C^2 + 2 N C", "transolver": "3 C^2 + 3 M C",
            "transolverpp": "2 C^2 + 4 M C + H M", "transolver3": "3 H M C"}


def test_the_formulas_are_these():
    assert {name: mixer_of(name, SIZES[0]).operations for name in FORMULAS} == FORMULAS
    assert mixer_of("transolver3", SIZES[0], **TILED).operations == "4 H M C"  # its weights are computed twice


@pytest.mark.parametrize("name", sorted(TWINS))
def test_the_twin_counts_the_same(name):
    """The formulas written with einsum and softmax: nothing counted twice, nothing missed, nothing to spare."""
    for sizes in SIZES[:2]:
        mixer = mixer_of(name, sizes)
        parameters = dict(mixer.named_parameters())
        twin = partial(TWINS[name], parameters, num_heads=sizes["H"], norm="layernorm")
        plain = [counted(partial(twin, torch.randn(1, count, sizes["C"]))) for count in COUNTS]
        ours = [mixer_multiply_adds(mixer, count, sizes["C"]) for count in COUNTS]
        assert ours[1] - ours[0] == plain[1] - plain[0] > 0
        assert ours[0] == pytest.approx(plain[0], rel=0.02)  # besides, one folds biases into maps of the slices


# --- the counter


@pytest.mark.parametrize("name, options", FORMS, ids=str)
def test_the_counter_counts_as_that_of_torch(name, options):
    mixer = mixer_of(name, SIZES[0], **options)
    real = counted(lambda: mixer(torch.randn(1, 70, SIZES[0]["C"])))
    assert mixer_multiply_adds(mixer, 70, SIZES[0]["C"]) == real


@pytest.mark.parametrize("name, options", FORMS, ids=str)
def test_many_tokens_are_counted_at_few(name, options):
    """Exactly, although tiles and chunks divide the tokens then."""
    for count, sizes in ((193, SIZES[1]), (2777, SIZES[1]), (5001, SIZES[2])):
        mixer = mixer_of(name, sizes, **options)
        real = counted(partial(mixer, torch.randn(1, count, sizes["C"])))
        assert mixer_multiply_adds(mixer, count, sizes["C"]) == real


@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_blocks_that_padding_fills_up_are_counted_too(name):
    mixer = mixer_of(name, SIZES[1], **({"num_summary": 2} if name == "sparse" else {}))
    for count in (193, 777, 1000):
        assert mixer_multiply_adds(mixer, count, 32) == counted(partial(mixer, torch.zeros(1, count, 32)))


@pytest.mark.parametrize("queries, keys", [(5, 70), (70, 5), (130, 1500)])
def test_fused_attention_counts_as_under_the_math_formulation(queries, keys):
    q, k, v = torch.randn(2, 3, queries, 8), torch.randn(2, 3, keys, 8), torch.randn(2, 3, keys, 8)
    fused = counted(lambda: attend(q, k, v, scale=0.3))
    plain = counted(lambda: torch.softmax(0.3 * q @ k.mT, -1) @ v)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        math = counted(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v))
    assert fused == plain == math == 2 * 3 * 2 * queries * keys * 8


def test_the_kernels_of_cuda_count_alike():
    kernels = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention")
    known = FlopCounterMode(display=False).flop_registry
    shapes = ((2, 3, 5, 8), (2, 3, 70, 8), (2, 3, 70, 8))
    on_meta = [torch.empty(shape, device="meta") for shape in shapes]
    on_cpu = UNCOUNTED[torch.ops.aten._scaled_dot_product_flash_attention_for_cpu]
    assert {known[getattr(torch.ops.aten, kernel)](*on_meta) for kernel in kernels} == {on_cpu(*shapes)}


def test_every_product_counts_once():
    m, v, batch = torch.randn(5, 5), torch.randn(5), torch.randn(2, 5, 5)
    products = {
        125: [lambda: m @ m, lambda: m.clone().addmm_(m, m), lambda: torch.mm(m, m, out=m.clone())],
        250: [lambda: batch @ batch, lambda: batch @ m, lambda: batch.clone().baddbmm_(batch, batch),
              lambda: torch.einsum("bij,bkj->bik", batch, batch), lambda: nn.functional.linear(batch, m, v)],
        25: [lambda: m @ v, lambda: torch.addmv(v, m, v), lambda: v.clone().addmv_(m, v)],
        5: [lambda: v @ v, lambda: torch.dot(v, v)],
        0: [lambda: m * m, lambda: m.sum(), lambda: m + v],
    }
    assert [{counted(product) for product in row} for row in products.values()] == [{count} for count in products]


def test_any_number_of_tokens_is_counted_and_none_is_held():
    sizes, count = SIZES[2], 10**9
    for name in ("full", "flarepp"):
        mixer = mixer_of(name, sizes)
        per_token = mixer_multiply_adds(mixer, count, sizes["C"]) / count
        assert per_token == pytest.approx(formula_of(mixer, sizes, count), rel=1e-6)


def test_counting_changes_nothing():
    mixer = mixer_of("transolverpp", SIZES[0]).train()
    x, state = torch.randn(2, 9, 12), torch.get_rng_state()
    before = mixer(x).detach()
    torch.set_rng_state(state)
    mixer_multiply_adds(mixer, 9, 12)
    assert mixer.training and torch.equal(torch.get_rng_state(), state) and torch.equal(mixer(x), before)
    assert all(type(parameter) is torch.nn.Parameter and parameter.grad is None for parameter in mixer.parameters())


@pytest.mark.parametrize("name", ["flare", "full", "transolver3"])
def test_a_model_is_its_blocks_and_its_ends(name):
    latents = {} if name == "full" else {"num_latents": 5}
    width, count = 12, 50

    def model(blocks):
        return build_model("backbone", in_dim=3, out_dim=2, mixer=name, channel_dim=width, num_heads=3, num_blocks=blocks,
                           ffn_ratio=4, norm="rmsnorm", **latents)

    ends, whole = (model_multiply_adds(model(blocks), count, 3) for blocks in (0, 2))
    assert ends == count * (3 * width + 6 * width**2 + 2 * width)
    block = mixer_multiply_adds(mixer_of(name, SIZES[0]), count, width) + count * 8 * width**2
    assert whole - ends == 2 * block


# --- formulas


@pytest.mark.parametrize("formula, value", [
    ("3 C^2 + 4 M C", 3 * 144 + 4 * 5 * 12), ("4 C^2 + 2 N C", 4 * 144 + 2 * 7 * 12), ("3 H M C", 3 * 3 * 5 * 12),
    ("M", 5), ("17", 17), ("2/5 N C", 2 * 7 * 12 / 5), (" 2  D^3+N ", 2 * 64 + 7),
])
def test_formulas_have_values(formula, value):
    assert evaluate(formula, C=12, M=5, H=3, D=4, N=7) == value


@pytest.mark.parametrize("formula, words", [
    ("3 C^2 + 4 G C", ["3 C^2 + 4 G C", "symbol 'G' is unknown", "Allowed: C, M, H, D, N"]),
    ("3 c", ["symbol 'c' is unknown. Allowed: C, M, H, D, N"]), ("CC", ["symbol 'CC' is unknown; did you mean 'C'"]),
    ("2 N C", ["needs the size N; got C, M"]),
    ("3 C^2 +", ["''", "is no factor"]), ("", ["is no factor"]), ("3 C - M", ["'-' is no factor", "C^2"]),
    ("C^M", ["'C^M' is no factor"]), ("(C)", ["'(C)'"]), ("C*M", ["'C*M'"]), ("2C", ["'2C'"]), ("1.5 C", ["'1.5'"]),
    ("2/0 C", ["'2/0'"]),
    ("__import__", ["'__import__' is no factor"]),
])
def test_nothing_else_is_a_formula(formula, words):
    with pytest.raises(ValueError) as error:
        evaluate(formula, C=12, M=5)
    assert all(word in str(error.value) for word in words), error.value
