"""Every mixer of the folder: twin, padding, equivariance, rank, initialisation, errors; the backbone."""

import gc
import importlib
import inspect
import math
import weakref

import pytest
import torch
from torch import nn

from flarepp import slices
from flarepp.layers import NORMS, ResidualLinear, project
from flarepp.mixers import build_mixer, mixer_names, transolver3
from flarepp.models import build_model
from flarepp.slices import gumbel, rowwise
from reference import TWINS, UNFUSED, Recorder, normalise, normalised

CHANNELS, HEADS, LATENTS, TOKENS = 12, 3, 4, 9
RANDOM = {"eval_noise"}  # switches that make a mixer's output random
SLICED = ("transolver", "transolverpp", "transolver3")
TILES = [{"tile": tile} for tile in (1, 4, 9, 20)]  # 4 does not divide the nine tokens
FORMS = [*((name, {}) for name in mixer_names()), *(("transolver3", tile) for tile in TILES)]
LOW_RANK = [name for name in mixer_names() if name.startswith("flare")]
ORDERED = {"bigbird", "cosformer", "funnel", "local", "longformer", "nystromformer", "reformer", "skyformer", "sparse"}
DYNAMIC = [name for name in LOW_RANK if name.startswith("flarepp")]


def parameters_of(name):
    mixer = importlib.import_module(f"flarepp.mixers.{name}").Mixer
    return {key: value for key, value in inspect.signature(mixer).parameters.items()
            if key not in ("channel_dim", "num_heads", "norm")}


def sizes(name):
    """Every constructor argument without a default; seq_len and grid describe TOKENS tokens."""
    given = {"seq_len": TOKENS, "grid": (3, TOKENS // 3)}
    return {key: given.get(key, LATENTS) for key, parameter in parameters_of(name).items()
            if parameter.default is parameter.empty or key in given}


def variants(name):
    """The defaults, each switch flipped, and all switches flipped."""
    flipped = {key: not parameter.default for key, parameter in parameters_of(name).items()
               if isinstance(parameter.default, bool) and key not in RANDOM}
    singles = [{key: value} for key, value in flipped.items()]
    tiles = TILES if "tile" in parameters_of(name) else []
    return [{}, *singles, *tiles, *([flipped] if len(flipped) > 1 else [])]


def cases(names, norms=tuple(NORMS)):
    def label(name, norm, switches):
        return "-".join([name, norm, *(f"{key}={value}" for key, value in switches.items())])

    return [pytest.param(name, norm, switches, id=label(name, norm, switches))
            for name in names for norm in norms for switches in variants(name)]


def sees_positions(name):
    """Whether it matters at which place a token stands."""
    return name in ORDERED or bool({"seq_len", "grid"} & set(parameters_of(name)))


def lively(module, seed=0):
    """FP64 with parameters far from their initial values, so that every term of a formula shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.double().parameters():
            parameter += 0.6 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return module.eval()


def mixer_of(name, norm="layernorm", **switches):
    torch.manual_seed(0)
    options = sizes(name) | switches
    return lively(build_mixer(name, channel_dim=CHANNELS, num_heads=HEADS, norm=norm, **options))


def tokens(batch=2, count=TOKENS, channels=CHANNELS, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, count, channels, generator=generator, dtype=torch.float64)


def ragged_mask():
    """Padding at the end, in the middle and at the start; the last sample has no token at all."""
    mask = torch.ones(4, TOKENS, dtype=torch.bool)
    mask[0, 5:], mask[1, 2:5], mask[2, 0], mask[3] = False, False, False, False
    return mask


def relative(ours, theirs, floor=0.0):
    return ((ours - theirs).abs().max() / max(theirs.abs().max().item(), floor)).item()


def test_the_folder_is_the_registry():
    assert {"flare", "flarepp", "flarepp_anchored", "flarepp_shared", "full", *SLICED} <= set(mixer_names())
    assert list(mixer_names()) == sorted(mixer_names()) and "__init__" not in mixer_names()


# --- the twin


@pytest.mark.parametrize("name, norm, switches", cases(TWINS))
def test_outputs_and_gradients_equal_the_twin(name, norm, switches):
    mixer, x = mixer_of(name, norm, **switches), tokens().requires_grad_()
    parameters = dict(mixer.named_parameters())
    direction = tokens(seed=2)
    ours, theirs = mixer(x), TWINS[name](parameters, x, num_heads=HEADS, norm=norm, **switches)
    assert relative(ours, theirs) <= 1e-10
    leaves = [x, *parameters.values()]
    found, expected = (torch.autograd.grad((y * direction).sum(), leaves) for y in (ours, theirs))
    largest = max(grad.abs().max().item() for grad in expected)
    for label, one, other in zip(["x", *parameters], found, expected, strict=True):
        assert relative(one, other, 1e-6 * largest) <= 1e-8, label
        shifts_all_keys = label.endswith(("key_proj.bias", "key_norm.bias"))  # softmax does not see it
        assert other.abs().max() > 1e-4 * largest or shifts_all_keys, f"{label} is hardly tested"


@pytest.mark.parametrize("name", LOW_RANK + ["full"])
def test_only_fused_attention_runs(name):
    mixer = mixer_of(name).float()
    with Recorder() as recorder:
        mixer(tokens().float()).sum().backward()
    assert not UNFUSED & set(recorder.names)
    kernels = recorder.attention()
    assert len(kernels) == 2 * {"full": 1, "flare": 2}.get(name, 3)
    fused = "_scaled_dot_product_flash_attention_for_cpu"
    assert set(kernels) == {fused, fused + "_backward"}


@pytest.mark.parametrize("name, norm, switches", cases(SLICED, ["layernorm"]))
def test_slices_attend_through_the_fused_kernel(name, norm, switches):
    mixer = mixer_of(name, norm, **switches).float()
    with Recorder() as recorder:
        mixer(tokens().float()).sum().backward()
    fused = "_scaled_dot_product_flash_attention_for_cpu"
    assert recorder.attention() == [fused, fused + "_backward"]


@pytest.mark.parametrize("name", LOW_RANK)
def test_memory_is_linear_in_the_tokens(name):
    count = 300
    mixer = build_mixer(name, channel_dim=8, num_heads=1, num_latents=64)
    with Recorder() as recorder:
        mixer(torch.randn(1, count, 8), torch.arange(count)[None] < 290).sum().backward()
    assert recorder.largest <= count * 16 < count * 64


# --- padding


@pytest.mark.parametrize("name, norm, switches", cases(mixer_names()))
def test_a_padded_batch_equals_its_samples_alone(name, norm, switches):
    mixer, mask = mixer_of(name, norm, **switches), ragged_mask()
    x = tokens(4)
    together = mixer(x, mask)
    assert (together[~mask] == 0).all() and not together.isnan().any()
    for sample in range(3):
        real = mask[sample]
        alone = mixer(x[sample: sample + 1], mask[sample: sample + 1]) if sees_positions(name) else \
            mixer(x[sample: sample + 1, real])
        alone = alone[:, real] if sees_positions(name) else alone
        assert relative(together[sample, real], alone[0]) <= 1e-12


@pytest.mark.parametrize("name, norm, switches", cases(mixer_names()))
def test_a_full_mask_changes_nothing(name, norm, switches):
    mixer, x = mixer_of(name, norm, **switches), tokens()
    assert relative(mixer(x, torch.ones(2, TOKENS, dtype=torch.bool)), mixer(x)) <= 1e-12


@pytest.mark.parametrize("poison", [math.nan, math.inf, -1e300])
@pytest.mark.parametrize("name, norm, switches", cases(mixer_names(), ["layernorm"]))
def test_padding_leaks_into_neither_outputs_nor_gradients(name, norm, switches, poison):
    mixer, mask, results = mixer_of(name, norm, **switches), ragged_mask(), []
    for value in (0.0, poison):
        x = tokens(4).masked_fill(~mask[..., None], value).requires_grad_()
        out = mixer(x, mask)
        results.append((out, *torch.autograd.grad((out * tokens(4, seed=2)).sum(), [x, *mixer.parameters()])))
    for clean, poisoned in zip(*results, strict=True):
        assert torch.equal(clean, poisoned) and poisoned.isfinite().all()
    assert (results[1][1][~mask] == 0).all() and (results[1][1][mask] != 0).any()


# --- structure


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name, norm, switches",
                         cases([name for name in mixer_names() if not sees_positions(name)], ["rmsnorm"]))
def test_token_permutation_equivariance(name, norm, switches, masked):
    mixer, x = mixer_of(name, norm, **switches), tokens(4)
    mask = ragged_mask() if masked else None
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(3))
    permuted = mixer(x[:, order], mask if mask is None else mask[:, order])
    assert relative(permuted, mixer(x, mask)[:, order]) <= 1e-12


@pytest.mark.parametrize("name, norm, switches", cases(mixer_names(), ["layernorm"]))
def test_samples_do_not_see_each_other(name, norm, switches):
    mixer, x = mixer_of(name, norm, **switches), tokens(3)
    assert relative(mixer(x)[1:2], mixer(x[1:2])) <= 1e-12
    changed = x.clone()
    changed[0] += 1
    assert torch.equal(mixer(changed)[1:], mixer(x)[1:])


def calls_of(name, mixer, monkeypatch, replace=None):
    """Watch the attention over tokens: the list of its (q, k, v). `replace(v)` stands in for the last v."""
    calls, original = [], importlib.import_module(f"flarepp.mixers.{name}").attend
    last = 1 if name in ("flare", "full") else 2

    def encode(q, k, v, **options):
        calls.append((q, k, v))
        v = replace(v) if replace and len(calls) == last else v
        return original(q, k, v, **options)

    if name == "full":
        monkeypatch.setattr(f"flarepp.mixers.{name}.attend", encode)
    else:
        mixer.encode = encode
    return calls


def mixing_rank(name, monkeypatch):
    """Rank of the linear map from the values of one channel of head 0 to the outputs, routing held fixed."""
    mixer, x, offset = mixer_of(name), tokens(1), torch.zeros(TOKENS, dtype=torch.float64)
    bump = torch.zeros(1, HEADS, 1, CHANNELS // HEADS, dtype=torch.float64)
    bump[0, 0, 0, 0] = 1

    def output(shift):
        with monkeypatch.context() as patch:
            calls_of(name, mixer, patch, replace=lambda v: v + shift[None, None, :, None] * bump)
            return mixer(x)[0]  # [N, C]

    matrix = torch.autograd.functional.jacobian(output, offset)  # [N, C, N]
    assert relative(output(offset + 2), output(offset) + 2 * matrix.sum(-1)) <= 1e-10  # linear in the values
    return torch.linalg.matrix_rank(matrix.permute(1, 0, 2), rtol=1e-10).max().item()


@pytest.mark.parametrize("name", LOW_RANK)
def test_the_mixing_matrix_has_rank_m(name, monkeypatch):
    assert mixing_rank(name, monkeypatch) == LATENTS < TOKENS


def test_full_attention_has_full_rank(monkeypatch):
    assert mixing_rank("full", monkeypatch) == TOKENS


def final_queries(name, x, monkeypatch):
    mixer = mixer_of(name)
    calls = calls_of(name, mixer, monkeypatch)
    mixer(x)
    return calls[-1][0]


@pytest.mark.parametrize("name", LOW_RANK)
def test_only_flarepp_routes_by_the_tokens(name, monkeypatch):
    first, second = (final_queries(name, tokens(1, seed=seed), monkeypatch) for seed in (1, 2))
    assert first.shape == (1, HEADS, LATENTS, CHANNELS // HEADS)
    assert torch.equal(first, second) == (name == "flare")
    assert name not in DYNAMIC or relative(first, second) > 1e-2


# --- initialisation


def test_linear_weights_and_latents_start_from_small_normals():
    for name in TWINS:
        torch.manual_seed(1)
        options = {} if name == "full" else {"num_latents": 64}
        mixer = build_mixer(name, channel_dim=64, num_heads=4, **options)
        for key, module in mixer.named_modules():
            if isinstance(module, nn.Linear):
                identity = name == "flarepp_anchored" and key in ("routing_proj", "key_proj", "value_proj")
                noise = module.weight - torch.eye(64) if identity else module.weight
                if key == "slice_proj":  # orthogonal: 64 slices of 16 channels
                    assert relative(module.weight.T @ module.weight, torch.eye(16)) <= 1e-5 and (module.bias == 0).all()
                    continue
                spread = 4 / math.sqrt(2 * noise.numel())  # four standard errors
                assert noise.std().item() == pytest.approx(0.02, rel=spread), (name, key)
                assert abs(noise.mean().item()) < 0.02 * 2 * spread, (name, key)
                assert module.bias is None or (module.bias == 0).all(), (name, key)
            if isinstance(module, tuple(NORMS.values())) and module.weight is not None:
                assert (module.weight == 1).all()
                assert getattr(module, "bias", None) is None or (module.bias == 0).all()
        for key in {"seeds", "latents"} & set(dict(mixer.named_parameters())):
            value = getattr(mixer, key)
            assert value.shape == (4, 64, 16), (name, key)
            assert value.std().item() == pytest.approx(0.02, rel=0.05), (name, key)


def test_anchored_gates_start_at_a_quarter():
    gates = build_mixer("flarepp_anchored", channel_dim=8, num_heads=2, num_latents=3).gate_logit
    assert gates.shape == (2,) and (gates == 0.25).all()


@pytest.mark.parametrize("name, norm, switches", cases(mixer_names()))
def test_every_parameter_trains(name, norm, switches):
    mixer = mixer_of(name, norm, **switches)
    (mixer(tokens()) * tokens(seed=2)).sum().backward()
    for key, parameter in mixer.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), key


def count(name, norm, channels=32, num_heads=4, **options):
    options = {} if name == "full" else {"num_latents": 8} | options
    model = build_model("backbone", in_dim=2, out_dim=1, mixer=name, channel_dim=channels, num_blocks=3,
                        num_heads=num_heads, ffn_ratio=2, norm=norm, **options)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("norm, per_norm", [("layernorm", 2), ("rmsnorm", 1)])
def test_parameter_counts(norm, per_norm):
    channels, head_dim, blocks = 32, 8, 3
    projection, seed_norms, latents = channels**2 + channels, 2 * per_norm * head_dim, 4 * 8 * head_dim
    flare = count("flare", norm)
    assert count("flarepp", norm) - flare == blocks * (2 * projection + seed_norms)
    assert count("flarepp", norm, seed_norm=False) - flare == blocks * 2 * projection
    assert count("flarepp_shared", norm) - flare == blocks * seed_norms
    assert count("flarepp_anchored", norm) - flare == blocks * (projection + seed_norms + latents + 4)
    assert count("full", norm) - flare == blocks * (projection - latents)
    ends = 2 * channels + channels + 6 * projection + channels + 1  # two residual MLPs with two hidden layers
    mixer = 3 * projection + latents
    ffn = 2 * 2 * channels**2 + 3 * channels
    assert flare == ends + per_norm * channels + blocks * (mixer + ffn + 2 * per_norm * channels)


@pytest.mark.parametrize("width, num_heads, slices", [(12, 3, 4), (64, 4, 32), (10, 1, 7)])
def test_parameter_counts_of_the_slice_mixers(width, num_heads, slices):
    def parameters(name, **options):
        mixer = build_mixer(name, channel_dim=width, num_heads=num_heads, num_latents=slices, **options)
        return sum(parameter.numel() for parameter in mixer.parameters())

    head_dim = width // num_heads
    to_slices, attention, projection = head_dim * slices + slices, 3 * head_dim**2, width**2 + width
    transolver = 3 * projection + to_slices + num_heads + attention
    assert parameters("transolver") == parameters("transolver3") == parameters("transolver3", tile=5) == transolver
    temperature = to_slices + slices + 1 + num_heads  # two layers and a bias a head
    assert parameters("transolverpp") == 2 * projection + to_slices + temperature + attention


def test_temperatures_start_at_one_half():
    for name, key in (("transolver", "temperature"), ("transolver3", "temperature"), ("transolverpp", "bias")):
        value = getattr(build_mixer(name, channel_dim=8, num_heads=2, num_latents=3), key)
        assert value.shape == (2, 1, 1) and (value == 0.5).all(), name


@pytest.mark.parametrize("tile", [0, -1])
def test_a_tile_holds_a_token_at_least(tile):
    with pytest.raises(ValueError, match=f"tile: got {tile}; allowed"):
        build_mixer("transolver3", channel_dim=8, num_heads=2, num_latents=3, tile=tile)


# --- slices


def sliced(name, norm="layernorm", bias=True, **options):
    """One of the slice mixers with the parameters of one Transolver, its temperatures inside the clamp."""
    mixer, source = mixer_of(name, norm, **options), mixer_of("transolver")
    with torch.no_grad():
        source.temperature.clamp_(0.2, 4)
        source.token_proj.bias.mul_(bias)
    mixer.load_state_dict(source.state_dict())
    return mixer


def results(mixer, mask=None):
    """Output and gradients with respect to the input and every parameter."""
    x = tokens(4).requires_grad_()
    out = mixer(x, mask)
    return [out, *torch.autograd.grad((out * tokens(4, seed=2)).sum(), [x, *mixer.parameters()])]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("tile", [1, 4, 9, 20])
def test_tiled_transolver3_is_transolver(tile, masked):
    mask = ragged_mask() if masked else None
    for ours, theirs in zip(results(sliced("transolver3", tile=tile), mask), results(sliced("transolver"), mask), strict=True):
        assert relative(ours, theirs, 1e-9) <= 1e-12


@pytest.mark.parametrize("masked", [False, True])
def test_plain_transolver3_differs_from_transolver_by_the_bias_alone(masked):
    mask = ragged_mask() if masked else None
    unbiased = [results(sliced(name, bias=False), mask)[0] for name in ("transolver3", "transolver")]
    assert relative(*unbiased) <= 1e-12
    plain, original = (results(sliced(name), mask)[0] for name in ("transolver3", "transolver"))
    assert relative(plain, original) > 1e-9
    captured = []
    for name in ("transolver3", "transolver"):
        mixer = sliced(name)
        mixer.slice_attention.register_forward_hook(lambda module, inputs, output: captured.append(inputs[0]))
        sums = []
        mixer.sum_over_tokens = lambda value, sums=sums: sums.append(value) or value
        mixer(tokens(4), mask)
    mass = sums[0][:3, ..., -1:]  # of Transolver; the last sample may have no token
    bias = mixer.token_proj.bias.view(HEADS, 1, -1)
    assert relative(captured[0][:3] - captured[1][:3], 1e-5 * bias / (mass + 1e-5)) <= 1e-6


def test_only_transolver_clamps_its_temperature():
    for value, factor in ((0.01, 10), (50.0, 0.1)):
        outputs = {}
        for name in ("transolver", "transolver3"):
            mixer = sliced(name, bias=False)
            for scale in (1, factor):
                with torch.no_grad():
                    mixer.temperature.fill_(value * scale)
                outputs[name, scale] = mixer(tokens())
            if name == "transolver":
                with torch.no_grad():
                    mixer.temperature.fill_(value)
                mixer(tokens()).sum().backward()
                assert (mixer.temperature.grad == 0).all()
        assert relative(outputs["transolver", 1], outputs["transolver", factor]) <= 1e-12  # 0.1 or 5 all the same
        assert relative(outputs["transolver3", 1], outputs["transolver3", factor]) > 1e-3


def test_transolverpp_draws_noise_in_training_only():
    mixer, x = mixer_of("transolverpp"), tokens()
    quiet = mixer(x)
    assert torch.equal(mixer(x), quiet)
    mixer.train()
    torch.manual_seed(5)
    first, second = mixer(x), mixer(x)
    torch.manual_seed(5)
    assert torch.equal(mixer(x), first) and relative(first, second) > 1e-3 and relative(first, quiet) > 1e-3
    mixer.uniform = lambda logits: torch.full_like(logits, math.exp(-1 + 1e-8) - 1e-8)  # where the noise is 0
    assert relative(mixer(x), quiet) <= 1e-12


@pytest.mark.parametrize("training", [False, True])
def test_the_noise_is_that_of_the_twin(training):
    mixer, x = mixer_of("transolverpp", eval_noise=not training).train(training), tokens().requires_grad_()
    parameters, drawn = dict(mixer.named_parameters()), []
    for noisy in (mixer, lambda x: TWINS["transolverpp"](parameters, x, num_heads=HEADS, norm="layernorm", eval_noise=True)):
        torch.manual_seed(5)
        out = noisy(x)
        drawn.append([out, *torch.autograd.grad((out * tokens(seed=2)).sum(), [x, *parameters.values()])])
    largest = max(grad.abs().max().item() for grad in drawn[1][1:])
    assert relative(drawn[0][0], drawn[1][0]) <= 1e-10
    for ours, theirs in zip(drawn[0][1:], drawn[1][1:], strict=True):
        assert relative(ours, theirs, 1e-6 * largest) <= 1e-8


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-24])
@pytest.mark.parametrize("half", [None, torch.float16, torch.bfloat16], ids=str)
def test_extreme_draws_stay_finite(uniform, half):
    mixer, x = mixer_of("transolverpp").float().train(), tokens(4).float()
    mixer.uniform = lambda logits: torch.full(logits.shape, 0.5).index_fill_(-1, torch.tensor([0]), uniform)
    with torch.autocast("cpu", dtype=half, enabled=half is not None):
        out = mixer(x, ragged_mask())
    (out.float() * tokens(4, seed=2)).sum().backward()
    assert out.isfinite().all() and all(parameter.grad.isfinite().all() for parameter in mixer.parameters())


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
def test_numbers_are_drawn_in_fp32_in_half_precision(half):
    """In half precision 1e-8 is nothing, and so few numbers lie next to 0 and 1 that one would be drawn."""
    mixer, seen = mixer_of("transolverpp").float().train(), []
    draw = mixer.uniform
    mixer.uniform = lambda logits: seen.append(draw(logits)) or seen[-1].clone()
    with torch.autocast("cpu", dtype=half):
        mixer(tokens().float())
    (uniform,) = seen
    assert uniform.dtype == torch.float32 and uniform.shape == (2, HEADS, TOKENS, LATENTS)
    assert (uniform != uniform.to(half)).any() and 0 <= uniform.min() and uniform.max() < 1


def test_the_noise_is_gumbels():
    """Logits 0 and temperature 1: what enters the softmax is the noise."""
    torch.manual_seed(0)
    uniform = torch.rand(1, HEADS, 100_000, LATENTS, dtype=torch.float64)
    noise = gumbel(uniform.clone())
    assert relative(noise, -torch.log(-torch.log(uniform + 1e-8) + 1e-8)) <= 1e-12
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.005)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, rel=0.01)
    mixer, sums = mixer_of("transolverpp", eval_noise=True), []
    with torch.no_grad():
        for layer in (mixer.slice_proj, *mixer.temperature_proj[::2]):
            layer.weight.zero_()
            layer.bias.zero_()
        mixer.bias.fill_(1)
    mixer.sum_over_tokens = lambda value: sums.append(value) or value
    torch.manual_seed(0)
    mixer(torch.zeros(1, 100_000, CHANNELS, dtype=torch.float64))
    assert relative(sums[0][..., -1], torch.softmax(noise, -1).sum(2)) <= 1e-12


def test_temperatures_of_tokens_have_a_floor():
    mixer, x = mixer_of("transolverpp"), tokens()
    with torch.no_grad():
        mixer.bias.fill_(-20)
    u = mixer.routing_proj(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    assert (mixer.temperature(u) == 0.01).all() and mixer.temperature(u).shape == (2, HEADS, TOKENS, 1)
    mixer(x).sum().backward()
    assert (mixer.bias.grad == 0).all()


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name, options", [*((name, {}) for name in SLICED), ("transolver3", {"tile": 9_000})])
def test_half_precision_holds_many_tokens_in_one_slice(name, options, half):
    torch.manual_seed(0)
    mixer = build_mixer(name, channel_dim=16, num_heads=2, num_latents=4, **options)
    with torch.no_grad():
        mixer.slice_proj.bias[0] = 20
        getattr(mixer, "token_proj", mixer.routing_proj).bias.fill_(5)
    x = torch.randn(1, 100_000, 16)
    with torch.autocast("cpu", dtype=half):
        out, quiet = mixer.train()(x), mixer.eval()(x)
    (out.float() ** 2).mean().backward()
    assert out.isfinite().all() and all(parameter.grad.isfinite().all() for parameter in mixer.parameters())
    assert relative(quiet.float(), mixer(x)) <= 0.05


WAYS = [*((name, switches) for name, switches in FORMS if name in SLICED and "tile" not in switches),
        ("transolverpp", {"eval_noise": True})]


TOO_LARGE = 2**40  # to be filled: each line of the formulas is an operator


def several_tiles(monkeypatch, numbers=LATENTS * 4):
    """Four tokens of one head a tile, or of all heads in Transolver-3; with more numbers, several heads a tile."""
    for module in ("slices", "mixers.transolver3"):
        monkeypatch.setattr(f"flarepp.{module}.TILE", numbers)


@pytest.mark.parametrize("numbers", [1, LATENTS * 4, LATENTS * TOKENS * 2])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name, switches", WAYS, ids=str)
def test_the_ways_through_the_slices_agree(name, switches, masked, numbers, monkeypatch):
    """Tiles of any size, and none, give the same; the noise too, drawn as for all logits at once."""
    mixer, mask, found, made = mixer_of(name, **switches), ragged_mask() if masked else None, [], []
    tiles = transolver3._TiledSums if name == "transolver3" else slices._Sums
    apply = tiles.apply
    monkeypatch.setattr(tiles, "apply", lambda *words: made.append(numbers) or apply(*words))
    for tile in (numbers, TOO_LARGE):
        with monkeypatch.context() as patch:
            several_tiles(patch, tile)
            torch.manual_seed(3)
            found.append(results(mixer, mask))
    assert len(made) == 1
    for ours, theirs in zip(*found, strict=True):
        assert relative(theirs, ours, 1e-6) <= 1e-10


@pytest.mark.parametrize("name, norm, switches", cases(SLICED, ["layernorm"]))
def test_tiles_hold_what_their_docstring_says(name, norm, switches, monkeypatch):
    """Nothing as large as all slice weights but these, once; what else is large is as large as the tokens."""
    several_tiles(monkeypatch, 2**10)
    count, slices = 400, 64
    mixer = build_mixer(name, channel_dim=8, num_heads=2, norm=norm, num_latents=slices, **switches).train()
    with Recorder() as recorder:
        mixer(torch.randn(1, count, 8, requires_grad=True), torch.arange(count)[None] < 390).sum().backward()
    results_of_calls = [result for _, _, result in recorder.calls if isinstance(result, torch.Tensor)]
    numbers = {result.untyped_storage().data_ptr(): result.untyped_storage().nbytes() // 4 for result in results_of_calls}
    large = [number for number in numbers.values() if number > max(count * 3 * 8, 3 * 2**10)]
    assert large == ([] if "tile" in switches else [count * 2 * slices])


@pytest.mark.parametrize("name", SLICED)
def test_the_weights_go_with_the_backward_pass(name, monkeypatch):
    several_tiles(monkeypatch)
    kept, mixer = [], mixer_of(name)
    original = torch.Tensor.new_empty

    def watched(tensor, *size, **options):
        made = original(tensor, *size, **options)
        if made.numel() == 2 * HEADS * TOKENS * LATENTS:
            kept.append(weakref.ref(made))
        return made

    monkeypatch.setattr(torch.Tensor, "new_empty", watched)
    mixer.uniform = lambda logits: watched(logits, *logits.shape).fill_(0.5)
    loss = mixer.train()(tokens().requires_grad_()).sum()
    alive = [ref for ref in kept if ref() is not None]
    loss.backward()
    assert alive and all(ref() is None for ref in kept)  # `loss` still holds the graph


@pytest.mark.parametrize("wanted", ["everything", "nothing", "a part"])
@pytest.mark.parametrize("name, options", [*((name, {}) for name in SLICED), ("transolver3", {"tile": 3})], ids=str)
def test_no_tiles_outlive_their_step(name, options, wanted, monkeypatch):
    """What a step holds must not hold itself: no collector sees through the graph."""
    several_tiles(monkeypatch)
    kept = []
    for module in (slices, transolver3):
        made = module._Tiles.__init__
        monkeypatch.setattr(module._Tiles, "__init__",
                            lambda tiles, *words, made=made: (kept.append(weakref.ref(tiles)), made(tiles, *words))[1])
    mixer = mixer_of(name, **options)
    out = mixer(tokens().requires_grad_())
    if wanted == "everything":
        out.sum().backward()
    elif wanted == "a part":
        torch.autograd.grad(out.sum(), list(mixer.slice_attention.parameters()))
    del out
    gc.collect()
    assert all(ref() is None for ref in kept) and kept


@pytest.mark.parametrize("name", SLICED)
def test_slices_answer_other_losses_and_any_gradient_alone(name, monkeypatch):
    several_tiles(monkeypatch)
    mixer, x, one, other = mixer_of(name), tokens(4).requires_grad_(), tokens(4, seed=2), tokens(4, seed=3)
    found = gradients(mixer, mixer(x, ragged_mask()), x, one, other, one + other, one)
    for first, second, both, again in zip(*found, strict=True):
        assert relative(first + second, both, 1e-2) <= 1e-12 and torch.equal(again, first)
    for leaf, gradient in zip([x, *mixer.parameters()], found[0], strict=True):
        for parameter in (x, *mixer.parameters()):
            parameter.requires_grad_(parameter is leaf)
        (alone,) = torch.autograd.grad((mixer(x, ragged_mask()) * one).sum(), [leaf])
        assert relative(alone, gradient, 1e-2) <= 1e-12


def test_rows_are_computed_again(monkeypatch):
    monkeypatch.setattr("flarepp.slices.TILE", 8)
    layer, x, calls = nn.Linear(3, 1).double(), tokens(channels=3).requires_grad_(), []

    def function(rows):
        calls.append(len(rows))
        return layer(rows).sin()

    out = rowwise(function, 2, x, layer.parameters())
    grads = torch.autograd.grad(out.sum(), [x, *layer.parameters()])
    assert calls == 2 * [4, 4, 4, 4, 2] and torch.equal(out, layer(x).sin())
    for ours, theirs in zip(grads, torch.autograd.grad(layer(x).sin().sum(), [x, *layer.parameters()]), strict=True):
        assert relative(ours, theirs) <= 1e-12
    assert rowwise(function, 2, x[:, :0], layer.parameters()).shape == (2, 0, 1)


def test_tiles_survive_a_second_backward_frozen_parameters_and_fixed_inputs():
    mixer, x = mixer_of("transolver3", tile=4), tokens().requires_grad_()
    loss = mixer(x).square().sum()
    first, second = (torch.autograd.grad(loss, [x, *mixer.parameters()], retain_graph=True) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second))
    expected = dict(zip([x, *mixer.parameters()], first))
    for frozen in ("slice_proj", "out_proj", "token_proj"):
        getattr(mixer, frozen).requires_grad_(False)
    kept = [parameter for parameter in mixer.parameters() if parameter.requires_grad]
    loss = mixer(tokens()).square().sum()
    for parameter, found in zip(kept, torch.autograd.grad(loss, kept), strict=True):
        assert relative(found, expected[parameter], 1e-9) <= 1e-12
    mixer.requires_grad_(False)
    assert relative(torch.autograd.grad(mixer(x).square().sum(), x)[0], first[0]) <= 1e-12


def gradients(mixer, out, x, *directions):
    """Of each of several losses on one output: by input and parameters."""
    leaves = [x, *mixer.parameters()]
    return [torch.autograd.grad((out * direction).sum(), leaves, retain_graph=True) for direction in directions]


def test_tiles_answer_another_loss_on_the_same_output():
    mixer, x, one, other = mixer_of("transolver3", tile=4), tokens(4).requires_grad_(), tokens(4, seed=2), tokens(4, seed=3)
    found = gradients(mixer, mixer(x, ragged_mask()), x, one, other, one + other, one)
    for first, second, both, again in zip(*found, strict=True):
        assert relative(first + second, both, 1e-2) <= 1e-12 and torch.equal(again, first)


def test_tiles_give_any_gradient_alone():
    mixer, x = mixer_of("transolver3", tile=4), tokens().requires_grad_()
    expected = gradients(mixer, mixer(x), x, tokens(seed=2))[0]
    for leaf, gradient in zip([x, *mixer.parameters()], expected, strict=True):
        for other in (x, *mixer.parameters()):
            other.requires_grad_(other is leaf)
        (found,) = torch.autograd.grad((mixer(x) * tokens(seed=2)).sum(), [leaf])
        assert relative(found, gradient, 1e-2) <= 1e-12
    leaf.requires_grad_(False)
    assert not mixer(x).requires_grad


LAYOUTS = {"transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
           "expanded": lambda x: x[:1].expand(2, -1, -1)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name, norm, switches", cases(mixer_names(), ["layernorm"]))
def test_the_layout_in_memory_does_not_matter(name, norm, switches, layout):
    mixer, x = mixer_of(name, norm, **switches), LAYOUTS[layout](tokens())
    found = []
    for leaf in (x, x.clone(memory_format=torch.contiguous_format)):
        out = mixer(leaf.requires_grad_())
        found.append([out, *gradients(mixer, out, leaf, tokens(seed=2))[0]])
    for ours, theirs in zip(*found, strict=True):
        assert relative(ours, theirs, 1e-2) <= 1e-12


def test_an_input_changed_before_the_backward_pass_is_an_error():
    mixer, x = mixer_of("transolver3", tile=4), tokens().requires_grad_()
    changed = x * 1
    out = mixer(changed)
    changed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_tiles_never_hold_all_slice_weights():
    count, tile, slices = 200, 10, 2 * 64
    mixer = build_mixer("transolver3", channel_dim=8, num_heads=2, num_latents=64, tile=tile)
    with Recorder() as recorder:
        mixer(torch.randn(1, count, 8, requires_grad=True), torch.arange(count)[None] < 190).sum().backward()
    assert recorder.largest <= max(count * 8, tile * slices, slices * 9) < count * slices / 10


@pytest.mark.parametrize("name, options", [*((name, {}) for name in SLICED), ("transolver3", {"tile": 2})])
def test_sums_of_two_shards_are_those_of_the_whole(name, options):
    """What context parallelism relies on: `sum_over_tokens` sees sums that add up."""
    mixer, x, sums = sliced(name, **options) if name != "transolverpp" else mixer_of(name), tokens(), []
    whole = mixer(x)
    for shard in (x[:, :5], x[:, 5:]):
        mixer.sum_over_tokens = lambda value: sums.append(value) or value
        mixer(shard)
    mixer.sum_over_tokens = lambda value: sums[0] + sums[1]
    assert relative(torch.cat([mixer(x[:, :5]), mixer(x[:, 5:])], 1), whole) <= 1e-12


@pytest.mark.parametrize("name, norm, switches", cases(mixer_names(), ["layernorm"]))
def test_a_single_token(name, norm, switches):
    mixer, x, mask = mixer_of(name, norm, **switches), tokens(), torch.zeros(2, TOKENS, dtype=torch.bool)
    mask[:, 4] = True
    out = mixer(x, mask)
    grads = torch.autograd.grad((out * tokens(seed=2)).sum(), list(mixer.parameters()))
    assert out.isfinite().all() and (out[~mask] == 0).all() and all(grad.isfinite().all() for grad in grads)
    if not sees_positions(name):
        assert relative(out[:, 4:5], mixer(x[:, 4:5])) <= 1e-12
    if name in TWINS:
        twin = TWINS[name](dict(mixer.named_parameters()), x[:, 4:5], num_heads=HEADS, norm=norm, **switches)
        assert relative(out[:, 4:5], twin) <= 1e-10


# --- errors


@pytest.mark.parametrize("name, options, words", [
    ("flarep", {"num_latents": 4}, ["flarep'", "did you mean 'flare"]),
    ("nothing_like_it", {}, ["nothing_like_it", "Allowed", *mixer_names()]),
    ("__init__", {}, ["unknown"]),
    ("flarepp", {"num_latents": 4, "seednorm": False}, ["flarepp", "'seednorm'", "did you mean 'seed_norm'"]),
    ("flare", {"num_latents": 4, "seed_norm": False}, ["flare", "'seed_norm'", "Allowed", "qk_norm"]),
    ("full", {"num_latents": 4}, ["full", "'num_latents'"]),
    ("flarepp", {}, ["flarepp", "needs num_latents"]),
    ("flare", {"num_latents": 4, "num_heads": 5}, ["12", "5", "divisible"]),
    ("transolver_3", {"num_latents": 4}, ["did you mean 'transolver3'"]),
    ("transolver", {"num_latents": 4, "tile": 2}, ["transolver", "'tile'", "num_latents"]),
    ("transolverpp", {"num_latents": 4, "evalnoise": True}, ["did you mean 'eval_noise'"]),
    ("transolver3", {"num_latents": 4, "tiles": 2}, ["did you mean 'tile'"]),
])
def test_build_mixer_errors(name, options, words):
    with pytest.raises(ValueError) as error:
        build_mixer(name, **{"channel_dim": CHANNELS, "num_heads": HEADS} | options)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("name", mixer_names())
def test_every_mixer_refuses_an_unknown_norm(name):
    with pytest.raises(ValueError, match="norm 'rmsnrom' is unknown; did you mean 'rmsnorm'"):
        build_mixer(name, channel_dim=CHANNELS, num_heads=HEADS, norm="rmsnrom", **sizes(name))


@pytest.mark.parametrize("name", mixer_names())
def test_every_mixer_refuses_heads_that_do_not_divide_the_width(name):
    with pytest.raises(ValueError, match="12.*5"):
        build_mixer(name, channel_dim=CHANNELS, num_heads=5, **sizes(name))


@pytest.mark.parametrize("name", mixer_names())
def test_every_mixer_asks_for_its_sizes(name):
    for key in sizes(name).keys() - {"seq_len", "grid"}:
        others = {other: value for other, value in sizes(name).items() if other != key}
        with pytest.raises(ValueError, match=f"{name}.*{key}"):
            build_mixer(name, channel_dim=CHANNELS, num_heads=HEADS, **others)


BACKBONE = {"in_dim": 3, "out_dim": 2, "mixer": "flarepp", "channel_dim": CHANNELS, "num_heads": HEADS,
            "num_blocks": 2, "ffn_ratio": 2, "norm": "layernorm", "num_latents": LATENTS}


@pytest.mark.parametrize("changes, words", [
    ({"name": "backbones"}, ["backbones", "did you mean 'backbone'"]),
    ({"mixer": "flarpp"}, ["flarpp", "did you mean 'flarepp'"]),
    ({"num_latent": 4}, ["'num_latent'", "did you mean 'num_latents'"]),
    ({"num_latents": None}, ["flarepp", "num_latents"]),
    ({"norm": "layer"}, ["'layer'", "layernorm"]),
    ({"num_heads": 5}, ["12", "5"]),
    ({"ffn_ratio": None}, ["ffn_ratio"]),
    ({"mixer": None}, ["mixer"]),
    ({"ffn_ratio": None, "ffn_ration": 2}, ["ffn_ratio"]),
], ids=str)
def test_build_model_errors(changes, words):
    options = {"name": "backbone"} | BACKBONE | changes
    with pytest.raises(ValueError) as error:
        build_model(**{key: value for key, value in options.items() if value is not None})
    assert all(word in str(error.value) for word in words), error.value


# --- the backbone


def backbone(name, norm="layernorm", **switches):
    torch.manual_seed(0)
    options = {key: value for key, value in BACKBONE.items() if key != "num_latents"} | sizes(name) | switches
    return lively(build_model("backbone", **options | {"mixer": name, "norm": norm}))


def twin_mlp(p, prefix, x, input_residual, output_residual):
    def dense(layer, x):
        return x @ p[f"{prefix}.{layer}.weight"].T + p[f"{prefix}.{layer}.bias"]

    def gelu(x):
        return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    h = gelu(dense("input", x)) + (x if input_residual else 0)
    for layer in range(sum(key.startswith(f"{prefix}.hidden.") and key.endswith("weight") for key in p)):
        h = h + gelu(dense(f"hidden.{layer}", h))
    return dense("output", h) + (h if output_residual else 0)


@pytest.mark.parametrize("name, norm, switches", cases(TWINS))
def test_the_backbone_equals_its_formula(name, norm, switches):
    model, features = backbone(name, norm, **switches), tokens(channels=3)
    p = dict(model.named_parameters())
    x = twin_mlp(p, "in_proj", features, False, True)
    for block in range(2):
        mixer = {key.removeprefix(f"blocks.{block}.mixer."): value for key, value in p.items()
                 if key.startswith(f"blocks.{block}.mixer.")}
        y = normalise(p, f"blocks.{block}.norm1", x, norm)
        x = x + TWINS[name](mixer, y, num_heads=HEADS, norm=norm, **switches)
        y = normalise(p, f"blocks.{block}.norm2", x, norm)
        x = x + twin_mlp(p, f"blocks.{block}.ffn", y, False, False)
    expected = twin_mlp(p, "out_proj", normalise(p, "out_norm", x, norm), True, False)
    assert all(sum(key.startswith(f"{end}.hidden.") for key in p) == 4 for end in ("in_proj", "out_proj"))
    assert relative(model(features), expected) <= 1e-10


@pytest.mark.parametrize("poison", [0.0, math.nan])
@pytest.mark.parametrize("name, switches", FORMS)
def test_padding_through_the_whole_backbone(name, switches, poison):
    model, mask = backbone(name, **switches), ragged_mask()
    features = tokens(4, channels=3).masked_fill(~mask[..., None], poison).requires_grad_()
    out = model(features, mask)
    assert out.shape == (4, TOKENS, 2) and (out[~mask] == 0).all()
    grads = torch.autograd.grad((out * tokens(4, channels=2, seed=2)).sum(), [features, *model.parameters()])
    assert all(grad.isfinite().all() for grad in grads) and (grads[0][~mask] == 0).all()
    for sample in range(3):
        real = mask[sample]
        if sees_positions(name):
            alone = model(features[sample: sample + 1], mask[sample: sample + 1])[0, real]
        else:
            alone = model(features[sample: sample + 1, real])[0]
        assert relative(out[sample, real], alone) <= 1e-11


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name, switches", FORMS)
def test_half_precision_keeps_norms_in_fp32(name, switches, norm, half):
    model, seen = backbone(name, norm, **switches).float(), {}

    def watch(module, inputs, output):
        parameters = {f"norm.{key}": value.double() for key, value in module.named_parameters()}
        own = next(key for key, kind in NORMS.items() if type(module) is kind)
        exact = normalise(parameters, "norm", inputs[0].double(), own) if parameters else \
            normalised(inputs[0].double(), own)
        seen[module] = (output.dtype, relative(output.double(), exact))

    for module in model.modules():
        if isinstance(module, tuple(NORMS.values())):
            module.register_forward_hook(watch)
    with torch.autocast("cpu", dtype=half):
        out = model(tokens(4, channels=3).float(), ragged_mask())
        (out.float() * tokens(4, channels=2, seed=2)).sum().backward()
    assert out.isfinite().all() and out.dtype == half
    assert len(seen) >= 5  # two a block and the last one
    assert all(dtype == torch.float32 and error <= 1e-5 for dtype, error in seen.values())
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("norm", NORMS)
def test_norms_of_large_half_precision_values_do_not_overflow(norm):
    x = 3e4 * tokens(channels=8).clamp(-2, 2).half()
    for affine in (True, False):
        y = NORMS[norm](8, affine=affine)(x)
        assert y.dtype == torch.float32 and relative(y.double(), normalised(x.double(), norm)) <= 1e-5


@pytest.mark.parametrize("name, switches", FORMS)
def test_half_precision_is_close_to_fp32(name, switches):
    model, features = backbone(name, "rmsnorm", **switches).float(), tokens(channels=3).float()
    with torch.autocast("cpu", dtype=torch.float16):
        half = model(features)
    assert relative(half.double(), model(features).double()) <= 3e-2


# --- projections of the same tokens


def projections(count=3, dtype=torch.float64):
    torch.manual_seed(3)
    layers = [ResidualLinear(12).to(dtype) for _ in range(count)]
    for layer in layers:
        torch.nn.init.normal_(layer.bias)
    return layers


@pytest.mark.parametrize("shape", [(2, 7, 12), (1, 1, 12), (2, 0, 12)], ids=str)
def test_projections_of_the_same_tokens_are_those_one_by_one(shape):
    layers, x = projections(), torch.randn(shape, dtype=torch.float64, requires_grad=True)
    leaves = [x, *(parameter for layer in layers for parameter in layer.parameters())]
    together, apart = project(x, *layers), [layer(x) for layer in layers]
    directions = [torch.randn_like(y) for y in apart]
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    for one, other in zip(*(torch.autograd.grad(ys, leaves, directions) for ys in (together, apart)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_one_projection_of_several_may_be_used_alone():
    layers, x = projections(), torch.randn(2, 5, 12, dtype=torch.float64, requires_grad=True)
    layers[0].weight.requires_grad_(False)
    _, second, _ = project(x.transpose(0, 1), *layers)
    second.square().sum().backward()
    found, x.grad = (x.grad, layers[1].weight.grad.clone(), layers[1].bias.grad.clone()), None
    layers[1].zero_grad()
    layers[1](x.transpose(0, 1)).square().sum().backward()
    for one, other in zip(found, (x.grad, layers[1].weight.grad, layers[1].bias.grad), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)
    assert layers[0].weight.grad is None


def test_in_half_precision_the_identity_stays_outside_the_weight():
    """1 + w has the precision of 1: a weight of 1e-5 would be lost."""
    layers, x = projections(1, torch.float32), torch.ones(1, 1, 12)
    with torch.no_grad():
        layers[0].weight.copy_(1e-5 * torch.eye(12))
        layers[0].bias.zero_()
    with torch.autocast("cpu", dtype=torch.float16):
        (y,) = project(x, *layers)
    assert y.dtype == torch.float32 and torch.allclose(y, torch.full_like(y, 1 + 1e-5), rtol=0, atol=1e-7)


def test_the_backward_pass_of_projections_may_run_under_autocast():
    layers, x = projections(2, torch.float32), torch.randn(1, 3, 12, requires_grad=True)
    loss = sum(y.square().sum() for y in project(x, *layers))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss.backward()
    assert x.grad.dtype == torch.float32 and x.grad.isfinite().all()
