"""Mixers with a pattern of attention against dense twins and public implementations, and what defines each of them."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from flarepp import patterns
from flarepp.attention import attend_with_lse
from flarepp.mixers import build_mixer, reformer, sinkhorn
from flarepp.operations import evaluate, mixer_multiply_adds
from flarepp.patterns import attend_where
from reference import Recorder
from test_attention import cuda_numbers  # noqa: F401

CHANNELS, HEADS, WIDTH, LONGEST = 12, 3, 4, 40
FP64 = torch.float64
FORMS = [  # mixer, options
    ("local", {"block_size": 5}), ("sparse", {"stride": 5, "num_summary": 2}), ("sparse", {"stride": 3, "num_summary": 3}),
    ("reformer", {"chunk_size": 4, "num_hashes": 1}), ("reformer", {"chunk_size": 3, "num_hashes": 3}),
    ("reformer", {"chunk_size": 1, "num_hashes": 2}), ("sinkhorn", {"block_size": 4}),
    ("sinkhorn", {"block_size": 7, "num_iterations": 2, "temperature": 1.5}), ("linformer", {"num_latents": 6}),
    ("linformer", {"num_latents": 6, "sharing": "kv"}), ("funnel", {}), ("funnel", {"stride": 3}),
    ("synthesizer", {"rank": 3}), ("synthesizer", {"rank": 9}), ("synthesizer", {"rank": 3, "dot_product": True}),
    ("longformer", {"window": 6}), ("longformer", {"window": 5, "num_global": 2}),
    ("bigbird", {"block_size": 2, "num_random": 2}), ("bigbird", {"block_size": 3, "num_random": 0}),
]
GROWING = {"reformer", "bigbird"}  # more padding changes their result


def built(name, channels=CHANNELS, heads=HEADS, seq_len=LONGEST, seed=0, **options):
    torch.manual_seed(seed)
    return build_mixer(name, channel_dim=channels, num_heads=heads, seq_len=seq_len, **options)


def lively(name, **options):
    """In FP64, evaluation, with parameters far from their first values."""
    mixer, generator = built(name, **options).double().eval(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += 0.6 * torch.randn(parameter.shape, generator=generator, dtype=FP64)
    return mixer


def tokens(count, batch=3, channels=CHANNELS, seed=2, dtype=FP64):
    return torch.randn(batch, count, channels, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def ragged(count, batch=3):
    """Padding behind the tokens, in between and in front; the last sample has no token at all."""
    mask = torch.ones(batch, count, dtype=torch.bool)
    mask[0, (2 * count + 2) // 3:], mask[1, count // 3: count // 2], mask[1, 0], mask[2] = False, False, count == 1, False
    return mask


def relative(ours, theirs, floor=0.0):
    return ((ours - theirs).abs().max() / max(theirs.abs().max().item(), floor, 1e-300)).item()


# --- twins: explicit loops over samples, heads and tokens


def heads_of(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def linear(layer, x):
    return x @ layer.weight.T + layer.bias


def softmax_over(scores, values):
    return torch.softmax(scores, -1) @ values if len(scores) else values.new_zeros(values.shape[-1])


def qkv_of(mixer, x):
    return [heads_of(part) for part in linear(mixer.qkv_proj, x).chunk(3, -1)]


def merged(mixer, y, real):
    return linear(mixer.out_proj, y.transpose(1, 2).flatten(2)) * real[..., None]


def by_pattern(allowed):
    """The twin of a mixer whose token i of head h sees the j with allowed(mixer, h, i, j, N)."""

    def twin(mixer, x, real):
        q, k, v = qkv_of(mixer, x)
        out = torch.stack([torch.stack([torch.stack([
            softmax_over(k[b, h, seen] @ q[b, h, i] / math.sqrt(WIDTH), v[b, h, seen])
            for i in range(x.shape[1])
            for seen in [[j for j in range(x.shape[1]) if real[b, j] and allowed(mixer, h, i, j, x.shape[1])]]])
            for h in range(HEADS)]) for b in range(len(x))])
        return merged(mixer, out, real)

    return twin


def sees_local(mixer, h, i, j, count):
    return i // mixer.block_size == j // mixer.block_size


def sees_sparse(mixer, h, i, j, count):
    return i // mixer.stride == j // mixer.stride or j % mixer.stride >= mixer.num_own


def sees_window(mixer, h, i, j, count):
    return abs(i - j) <= mixer.reach or j < mixer.num_global


def sees_bigbird(mixer, h, i, j, count):
    size = mixer.block_size
    last, i, j = -(-count // size) - 1, i // size, j // size
    if i in (0, last) or j in (0, last) or abs(i - j) <= 1:
        return True
    blocks, counts = mixer.plan(last + 1)
    return j in blocks[h, i - 1][counts[h, i - 1]].tolist()


def twin_longformer(mixer, x, real):
    y = by_pattern(sees_window)(mixer, x, real)
    if mixer.num_global:
        q, k, v = (heads_of(part) for part in linear(mixer.global_qkv_proj, x).chunk(3, -1))
        scores = (q @ k.mT / math.sqrt(WIDTH)).masked_fill(~real[:, None, None], -math.inf)
        weights = torch.softmax(scores, -1).nan_to_num(0)
        y = torch.cat([merged(mixer, weights @ v, real)[:, :mixer.num_global], y[:, mixer.num_global:]], 1)
    return y


def twin_reformer(mixer, x, real):
    batch, count, _ = x.shape
    size = mixer.chunk_size
    places = -(-count // size) * size
    x, here = F.pad(x, (0, 0, 0, places - count)), F.pad(real, (0, places - count))
    q, v = heads_of(linear(mixer.query_proj, x)), heads_of(linear(mixer.value_proj, x))
    k = q / torch.sqrt((q * q).sum(-1, keepdim=True) + WIDTH * 1e-6)
    first, *others = reformer.bucket_factors(places, size)
    rotations = mixer.rotations((first + sum(others)) // 2, q)
    out = []
    for b in range(batch):
        for h in range(HEADS):
            numerator, denominator = torch.zeros(places, WIDTH, dtype=FP64), torch.zeros(places, 1, dtype=FP64)
            for r in range(mixer.num_hashes):
                turned = q[b, h] @ rotations[h, :, r]
                parts = turned[:, :first // 2], turned[:, first // 2:]
                parts = [torch.cat([part, -part], -1).argmax(-1) if part.shape[1] else 0 for part in parts]
                bucket = (parts[0] + first * parts[1]).masked_fill(~here[b], 10**6).tolist()
                order = sorted(range(places), key=lambda t: (bucket[t], t))
                chunks = [order[start: start + size] for start in range(0, places, size)]
                for number, chunk in enumerate(chunks):
                    seen = [j for j in {*chunk, *chunks[number - 1]} if here[b, j]]
                    for i in chunk:
                        others = [j for j in seen if j != i] or [j for j in seen if j == i]
                        weights = torch.exp(k[b, h, others] @ q[b, h, i])
                        numerator = numerator.index_add(0, torch.tensor([i]), (weights @ v[b, h, others])[None])
                        denominator = denominator.index_add(0, torch.tensor([i]), weights.sum()[None, None])
            out.append(numerator / torch.where(denominator == 0, 1, denominator))
    return merged(mixer, torch.stack(out).view(batch, HEADS, places, WIDTH)[:, :, :count], real)


def twin_sinkhorn(mixer, x, real):
    batch, count, _ = x.shape
    size = mixer.block_size
    places = -(-count // size) * size
    here = F.pad(real, (0, places - count))
    q, k, v = (F.pad(part, (0, 0, 0, places - count)) * here[:, None, :, None] for part in qkv_of(mixer, x))
    q, k, v = (part.unflatten(2, (-1, size)) for part in (q, k, v))  # [B, H, b, w, D]
    here = here.unflatten(1, (-1, size))
    out = torch.zeros_like(q)
    for b in range(batch):
        blocks = [j for j in range(here.shape[1]) if here[b, j].any()]
        places_real = here[b].any(0)
        for h in range(HEADS if blocks else 0):
            p = (k[b, h, blocks].sum(1) @ mixer.sort_proj.weight[blocks].T / mixer.temperature).exp()
            for _ in range(mixer.num_iterations):
                p = p / p.sum(1, keepdim=True)
                p = p / p.sum(0, keepdim=True)
            for row, i in enumerate(blocks):
                keys, values = (torch.einsum("j,jwd->wd", p[row], part[b, h, blocks]) for part in (k, v))
                keys = torch.cat([k[b, h, i][here[b, i]], keys[places_real]])
                values = torch.cat([v[b, h, i][here[b, i]], values[places_real]])
                out[b, h, i] = torch.softmax(q[b, h, i] @ keys.T / math.sqrt(WIDTH), -1) @ values
    return merged(mixer, out.flatten(2, 3)[:, :, :count], real)


def twin_linformer(mixer, x, real):
    e, f = mixer.token_proj[0, :, :x.shape[1]], mixer.token_proj[-1, :, :x.shape[1]]
    q, k, v = qkv_of(mixer, x)
    k, v = (torch.einsum("mn,bhnd->bhmd", matrix, part * real[:, None, :, None]) for matrix, part in ((e, k), (f, v)))
    return merged(mixer, torch.softmax(q @ k.mT / math.sqrt(WIDTH), -1) @ v, real)


def dense(q, k, v, real):
    return torch.softmax((q @ k.mT / math.sqrt(WIDTH)).masked_fill(~real[:, None, None], -math.inf), -1).nan_to_num(0) @ v


def twin_funnel(mixer, x, real):
    count, stride = x.shape[1], mixer.stride
    k, v = (heads_of(part) for part in linear(mixer.key_value_proj, x).chunk(2, -1))
    means = [torch.stack([x[b, i:i + stride][real[b, i:i + stride]].sum(0) / max(1, real[b, i:i + stride].sum())
                          for i in range(0, count, stride)]) for b in range(len(x))]
    y = dense(heads_of(linear(mixer.query_proj, torch.stack(means))), k, v, real)
    return merged(mixer, y[:, :, [i // stride for i in range(count)]], real)


def twin_synthesizer(mixer, x, real):
    logits = torch.einsum("hir,hjr->hij", *mixer.factors[:, :, :x.shape[1]])[None]
    if mixer.query_key_proj is not None:
        q, k = (heads_of(part) for part in linear(mixer.query_key_proj, x).chunk(2, -1))
        logits = logits + q @ k.mT / math.sqrt(WIDTH)
    weights = torch.softmax(logits.masked_fill(~real[:, None, None], -math.inf), -1).nan_to_num(0)
    return merged(mixer, weights @ heads_of(linear(mixer.value_proj, x)), real)


TWINS = {"local": by_pattern(sees_local), "sparse": by_pattern(sees_sparse), "longformer": twin_longformer,
         "bigbird": by_pattern(sees_bigbird), "reformer": twin_reformer, "sinkhorn": twin_sinkhorn,
         "linformer": twin_linformer, "funnel": twin_funnel, "synthesizer": twin_synthesizer}


@pytest.mark.parametrize("masked", [False, True], ids=["all real", "ragged"])
@pytest.mark.parametrize("count", [1, 4, 13, 20])
@pytest.mark.parametrize("name, options", FORMS, ids=str)
def test_outputs_and_gradients_equal_the_twin(name, options, count, masked):
    mixer, x = lively(name, **options), tokens(count).requires_grad_()
    real = ragged(count) if masked else torch.ones(3, count, dtype=torch.bool)
    ours = mixer(x, real if masked else None)
    theirs = TWINS[name](mixer, x * real[..., None], real)
    assert relative(ours, theirs) <= 1e-10
    leaves = [x, *mixer.parameters()]
    found, expected = (torch.autograd.grad((y * tokens(count, seed=3)).sum(), leaves, allow_unused=True)
                       for y in (ours, theirs))
    expected = [torch.zeros(()) if grad is None else grad for grad in expected]
    largest = max(grad.abs().max().item() for grad in expected)
    for one, other in zip(found, expected, strict=True):
        assert one.isfinite().all() and relative(one, other, 1e-6 * largest) <= 1e-8


# --- padding


@pytest.mark.parametrize("count, padded", [(1, 6), (7, 8), (13, 17), (20, 40)])
@pytest.mark.parametrize("name, options", [form for form in FORMS if form[0] not in GROWING], ids=str)
def test_more_padding_changes_nothing(name, options, count, padded):
    mixer, x, mask = lively(name, **options), tokens(padded), torch.arange(padded).expand(3, -1) < count
    together = mixer(x, mask)
    assert relative(together[:, :count], mixer(x[:, :count])) <= 1e-12 and (together[:, count:] == 0).all()


@pytest.mark.parametrize("poison", [math.nan, math.inf, -1e300])
@pytest.mark.parametrize("name, options", FORMS, ids=str)
def test_what_padding_holds_changes_nothing(name, options, poison):
    mixer, mask, results = lively(name, **options), ragged(20), []
    for value in (0.0, poison):
        x = tokens(20).masked_fill(~mask[..., None], value).requires_grad_()
        out = mixer(x, mask)
        results.append((out, *torch.autograd.grad((out * tokens(20, seed=3)).sum(), [x, *mixer.parameters()])))
    for clean, poisoned in zip(*results, strict=True):
        assert torch.equal(clean, poisoned) and poisoned.isfinite().all()


# --- full attention as a special case


def as_full(name, **options):
    """Full attention, and a mixer with its projections."""
    full, mixer = lively("full"), lively(name, **options)
    weights = {key: value for key, value in full.state_dict().items() if key.startswith(("qkv_proj", "out_proj"))}
    for kind in ("weight", "bias"):
        q, k, v = full.state_dict()[f"qkv_proj.{kind}"].chunk(3)
        weights |= {f"query_proj.{kind}": q, f"key_value_proj.{kind}": torch.cat([k, v]), f"value_proj.{kind}": v,
                    f"query_key_proj.{kind}": torch.cat([q, k])}
    own = mixer.state_dict()
    mixer.load_state_dict(own | {key: value for key, value in weights.items() if key in own})
    return full, mixer


@pytest.mark.parametrize("count", [1, 19, 20])
@pytest.mark.parametrize("name, options", [
    ("local", {"block_size": 20}), ("sparse", {"stride": 20, "num_summary": 3}), ("sparse", {"stride": 3, "num_summary": 3}),
    ("longformer", {"window": 40}), ("longformer", {"window": 200}), ("bigbird", {"block_size": 4, "num_random": 1}),
    ("bigbird", {"block_size": 2, "num_random": 40}), ("sinkhorn", {"block_size": 20}), ("funnel", {"stride": 1}),
], ids=str)
def test_a_pattern_of_everything_is_full_attention(name, options, count):
    full, mixer = as_full(name, **options)
    x = tokens(count)
    assert relative(mixer(x), full(x)) <= 1e-12
    mask = ragged(count)
    assert relative(mixer(x, mask), full(x, mask)) <= 1e-12


@pytest.mark.parametrize("sharing", ["heads", "kv"])
def test_a_projection_to_itself_is_full_attention(sharing):
    full, mixer = as_full("linformer", num_latents=20, seq_len=20, sharing=sharing)
    mixer.token_proj.data[:] = torch.eye(20)
    assert relative(mixer(tokens(20)), full(tokens(20))) <= 1e-12


def test_dot_products_alone_are_full_attention():
    full, mixer = as_full("synthesizer", rank=2, dot_product=True)
    mixer.factors.data.zero_()
    assert relative(mixer(tokens(20)), full(tokens(20))) <= 1e-12


def test_reformer_in_one_chunk_is_attention_with_shared_keys():
    for rounds in (1, 3):
        mixer, x = lively("reformer", chunk_size=20, num_hashes=rounds), tokens(20)
        q, v = heads_of(linear(mixer.query_proj, x)), heads_of(linear(mixer.value_proj, x))
        scores = (q @ F.normalize(q, dim=-1).mT).masked_fill(torch.eye(20, dtype=torch.bool), -math.inf)
        expected = linear(mixer.out_proj, (torch.softmax(scores, -1) @ v).transpose(1, 2).flatten(2))
        assert relative(mixer(x), expected) <= 1e-4  # but for what is added to the square of a query
        assert relative(mixer(x), twin_reformer(mixer, x, torch.ones(3, 20, dtype=torch.bool))) <= 1e-12


# --- attention among allowed pairs


@pytest.mark.parametrize("shape", [(4, 3, 5, 7), (4, 1, 5, 7), (1, 1, 5, 7), (4, 3, 1, 7)])
@pytest.mark.parametrize("width, kernel", [(4, "cpu_flash"), (8, "cpu_flash"), (8, "cuda_efficient"), (8, "unfused")])
def test_attention_among_allowed_pairs(shape, width, kernel, cuda_numbers, monkeypatch):  # noqa: F811
    if kernel != "cpu_flash":  # by stand-ins that check what CUDA's operators ask for
        cuda_numbers(kernel)
        monkeypatch.setattr(patterns, "kernel_for", lambda *arguments: kernel)
    else:
        monkeypatch.undo()
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(4, 3, count, width, generator=generator, dtype=FP64).requires_grad_() for count in (5, 7, 7))
    allowed = torch.rand(shape, generator=generator) < 0.4
    allowed[0, 0, 0] = False
    out, lse = attend_where(q, k, v, allowed, scale=0.7)
    scores = (0.7 * q @ k.mT).masked_fill(~allowed, -math.inf)
    some = allowed.any(-1, keepdim=True).expand(4, 3, 5, 1)
    safe = torch.where(some, scores, 0)
    theirs, their_lse, real = torch.where(some, torch.softmax(safe, -1) @ v, 0), safe.logsumexp(-1), some[..., 0]
    assert relative(out, theirs) <= 1e-12 and relative(lse[real], their_lse[real]) <= 1e-12
    assert (lse[~real] == -math.inf).all() and not real.all()
    uses = (lambda o, s: o.sin().sum(), lambda o, s: s[real].sin().sum(),
            lambda o, s: (o.sum(-1)[real] * s[real].exp()).sum())
    for use in uses:
        found, expected = (torch.autograd.grad(use(*pair), [q, k, v], allow_unused=True, retain_graph=True)
                           for pair in ((out, lse), (theirs, their_lse)))
        for one, other in zip(found, expected, strict=True):
            assert relative(0 if one is None else one, torch.zeros(()) if other is None else other, 1e-2) <= 1e-12


def test_allowed_pairs_agree_with_key_masks():
    q, k, v = (torch.randn(2, 3, 9, 8, dtype=FP64, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    mask = ragged(9)[:2]
    expected = attend_with_lse(q, k, v, scale=0.3, key_mask=mask)
    for ours, theirs in zip(attend_where(q, k, v, mask[:, None, None], scale=0.3), expected, strict=True):
        assert relative(ours, theirs) <= 1e-12


@pytest.mark.parametrize("name, options", FORMS, ids=str)
def test_attention_is_fused(name, options):
    mixer = built(name, **options)
    with Recorder() as recorder:
        mixer(tokens(20, dtype=torch.float32), ragged(20)).sum().backward()
    assert {"_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"} == set(
        recorder.attention())
    assert not {"softmax", "_softmax", "_scaled_dot_product_attention_math", "_safe_softmax"} & set(recorder.names)


# --- Reformer


def test_rotations_are_fresh_in_training_and_fixed_in_evaluation():
    mixer, x = built("reformer", chunk_size=4, num_hashes=1).double(), tokens(40)
    torch.manual_seed(5)
    first, second = mixer(x), mixer(x)
    torch.manual_seed(5)
    assert torch.equal(mixer(x), first) and not torch.equal(first, second)
    mixer.eval()
    state = torch.get_rng_state()
    assert torch.equal(mixer(x), mixer(x)) and torch.equal(torch.get_rng_state(), state)
    other = built("reformer", chunk_size=4, num_hashes=1, seed=1).double().eval()
    assert mixer.seed != other.seed
    other.load_state_dict(mixer.state_dict())
    assert torch.equal(other(x), mixer(x))


def test_the_hash_is_local():
    mixer = built("reformer", channels=16, heads=1, chunk_size=4, num_hashes=64).eval()
    x = torch.randn(1, 1, 512, 16, generator=torch.Generator().manual_seed(0))
    near, far = x + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1)), x.roll(1, 2)
    own, close, apart = (mixer.buckets(part, None) for part in (x, near, far))
    assert own.unique().tolist() == list(range(256)) and own.shape == (1, 1, 64, 512)
    assert torch.equal(mixer.buckets(3 * x, None), own)
    opposite = mixer.buckets(-x, None)  # of the pair on the other side each
    assert torch.equal((own % 16 + 8) % 16 + 16 * ((own // 16 + 8) % 16), opposite)
    agree = [(own == other).double().mean().item() for other in (close, apart)]
    assert agree[0] > 0.7 and agree[1] < 0.02


@pytest.mark.parametrize("count, chunk, buckets", [
    (1, 64, 2), (64, 64, 2), (128, 64, 4), (2000, 64, 64), (4096, 64, 128), (40, 1, 64)])
def test_the_number_of_buckets(count, chunk, buckets):
    assert reformer.num_buckets(count, chunk) == buckets


@pytest.mark.parametrize("count, factors", [(4096, (128,)), (8192, (16, 16)), (65536, (32, 64))])
def test_many_buckets_are_a_product(count, factors):
    assert reformer.bucket_factors(count, 64) == factors
    assert all(math.prod(reformer.bucket_factors(n, 3)) == reformer.num_buckets(n, 3) for n in range(1, 300))


def test_padding_is_sorted_behind_all_tokens():
    mixer, mask = lively("reformer", chunk_size=4, num_hashes=2), ragged(20)
    order = mixer.order(tokens(20, channels=WIDTH * HEADS).unflatten(-1, (HEADS, -1)).transpose(1, 2), mask)
    for b in range(3):
        assert not mask[b][order[b]][..., mask[b].sum():].any()
        assert (order[b].sort(-1).values == torch.arange(20)).all()


# --- BigBird


@pytest.mark.parametrize("num_blocks", [3, 4, 7, 20])
def test_the_plan(num_blocks):
    mixer = built("bigbird", block_size=2, num_random=3)
    blocks, counts = mixer.plan(num_blocks)
    for head in range(HEADS):
        for row in range(num_blocks - 2):
            seen = blocks[head, row][counts[head, row]].tolist()
            fixed = {row, row + 1, row + 2, 0, num_blocks - 1}
            assert len(seen) == len(set(seen)) == min(num_blocks, len(fixed) + 3) and fixed <= set(seen)
    again = mixer.plan(num_blocks)
    assert torch.equal(blocks, again[0]) and torch.equal(counts, again[1])
    if num_blocks == 20:
        others = blocks[..., 5:]
        assert not torch.equal(others[0], others[1]) and len(others.unique()) >= 18


def test_the_plan_is_that_of_the_seed():
    mixer, other, x = (built("bigbird", block_size=2, num_random=2, seed=seed).double() for seed in (0, 1)), None, tokens(40)
    mixer, other = mixer
    state = torch.get_rng_state()
    assert torch.equal(mixer.train()(x), mixer.eval()(x)) and torch.equal(torch.get_rng_state(), state)
    other.load_state_dict({key: value for key, value in mixer.state_dict().items() if key != "seed"}, strict=False)
    assert not torch.equal(other(x), mixer(x))
    other.load_state_dict(mixer.state_dict())
    assert torch.equal(other(x), mixer(x))


# --- Sparse Transformer, Longformer


def test_two_sparse_layers_connect_everything():
    count = 23
    mixer = built("sparse", stride=5, num_summary=1)
    seen = torch.tensor([[sees_sparse(mixer, 0, i, j, count) for j in range(count)] for i in range(count)]).double()
    assert not seen.all() and (seen @ seen > 0)[:, :20].all()  # but for the block that has no summary column
    assert seen[:, [4, 9, 14, 19]].all()


@pytest.mark.parametrize("name, options, reach", [("local", {"block_size": 5}, 4), ("longformer", {"window": 6}, 3)])
def test_far_tokens_do_not_matter(name, options, reach):
    mixer, x = lively(name, **options), tokens(30, batch=1).requires_grad_()
    gradient = torch.autograd.grad(mixer(x)[0, 15].sum(), [x])[0][0].abs().sum(-1)
    seen = gradient.nonzero().flatten().tolist()
    assert seen == list(range(15, 20) if name == "local" else range(12, 19)) and all(abs(15 - j) <= reach for j in seen)


# --- Sinkhorn


def test_sinkhorn_makes_doubly_stochastic_matrices():
    logits = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    p = sinkhorn.sinkhorn(logits, 8)
    assert (p >= 0).all() and (p.sum(-2) - 1).abs().max() <= 1e-5 and (p.sum(-1) - 1).abs().max() <= 1e-3
    some = torch.arange(16) < 11
    allowed = some[:, None] & some
    masked = sinkhorn.sinkhorn(logits, 8, allowed)
    assert relative(masked[..., :11, :11], sinkhorn.sinkhorn(logits[..., :11, :11], 8)) <= 1e-6
    assert (masked.masked_select(~allowed) == 0).all()
    assert sinkhorn.sinkhorn(logits, 3, torch.zeros(16, 16, dtype=torch.bool)).eq(0).all()


def test_sharp_logits_sort_blocks():
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    p = sinkhorn.sinkhorn(40 * torch.eye(8)[order], 8)
    assert relative(p, torch.eye(8)[order]) <= 1e-6


def test_noise_is_drawn_in_training_only():
    mixer, x = built("sinkhorn", block_size=4).double(), tokens(40)
    torch.manual_seed(5)
    first, second = mixer(x), mixer(x)
    torch.manual_seed(5)
    assert torch.equal(mixer(x), first) and not torch.equal(first, second)
    state = torch.get_rng_state()
    assert torch.equal(mixer.eval()(x), mixer(x)) and torch.equal(torch.get_rng_state(), state)
    draws = []
    mixer.train().uniform = lambda logits: draws.append(logits.shape) or torch.full_like(logits, math.exp(-1))
    assert relative(mixer(x), mixer.eval()(x)) <= 1e-7 and draws == [(3, HEADS, 10, 10)]  # noise of 0, but for its eps


# --- Synthesizer, Linformer


def test_synthesised_weights_see_no_token():
    mixer, x, other = lively("synthesizer", rank=3), tokens(20), tokens(20, seed=4)
    bias = mixer(0 * x)
    assert relative(mixer(2 * x + other) - bias, 2 * (mixer(x) - bias) + mixer(other) - bias) <= 1e-12
    identity = lively("synthesizer", rank=20)
    identity.factors.data[:] = 40 * torch.eye(LONGEST, 20, dtype=FP64)
    expected = linear(identity.out_proj, linear(identity.value_proj, x))
    assert relative(identity(x), expected) <= 1e-12


def test_logits_and_projected_keys_start_with_their_variance():
    factors = built("synthesizer", rank=32, seq_len=200).factors
    assert (factors[0] @ factors[1].mT).std().item() == pytest.approx(1, rel=0.05)
    matrices = built("linformer", num_latents=50, seq_len=200).token_proj
    assert matrices.shape == (2, 50, 200) and matrices.std().item() == pytest.approx(200**-0.5, rel=0.05)
    assert built("linformer", num_latents=50, sharing="kv").token_proj.shape == (1, 50, LONGEST)


def test_linformer_mixes_with_rank_m():
    mixer, x = lively("linformer", num_latents=6, heads=1), tokens(20, batch=1)
    keys = mixer.token_proj[0, :, :20] @ linear(mixer.qkv_proj, x)[0, :, CHANNELS:2 * CHANNELS]
    queries = linear(mixer.qkv_proj, x)[0, :, :CHANNELS]
    matrix = torch.softmax(queries @ keys.T / math.sqrt(CHANNELS), -1) @ mixer.token_proj[1, :, :20]
    values = linear(mixer.qkv_proj, x)[0, :, 2 * CHANNELS:]
    assert torch.linalg.matrix_rank(matrix) == 6
    assert relative(mixer(x)[0], linear(mixer.out_proj, matrix @ values)) <= 1e-12


# --- errors


@pytest.mark.parametrize("name, options, words", [
    ("local", {"block_size": 0}, ["block_size", "got 0"]), ("longformer", {"window": 1}, ["window", "got 1"]),
    ("sparse", {"stride": 4, "num_summary": 5}, ["num_summary", "5", "4"]),
    ("sparse", {"stride": 4, "num_summary": 0}, ["num_summary", "got 0"]), ("funnel", {"stride": 0}, ["stride", "got 0"]),
    ("longformer", {"window": 2, "num_global": -1}, ["num_global", "-1"]),
    ("reformer", {"chunk_size": 4, "num_hashes": 0}, ["num_hashes"]),
    ("bigbird", {"block_size": 4, "num_random": -1}, ["num_random", "-1"]),
    ("linformer", {"num_latents": 4, "sharing": "head"}, ["sharing 'head'", "did you mean 'heads'"]),
    ("linformer", {"num_latents": 4, "seq_len": None}, ["seq_len", "None"]),
    ("sinkhorn", {"block_size": 4, "seq_len": None}, ["seq_len"]),
    ("synthesizer", {"rank": 4, "seq_len": None}, ["seq_len"]), ("synthesizer", {"rank": 0}, ["rank"]),
])
def test_wrong_sizes(name, options, words):
    with pytest.raises(ValueError) as error:
        built(name, **options)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("name, options", [
    ("linformer", {"num_latents": 4}), ("sinkhorn", {"block_size": 4}), ("synthesizer", {"rank": 4})])
def test_more_tokens_than_learned_positions(name, options):
    with pytest.raises(ValueError, match="41 tokens.*seq_len 40"):
        built(name, **options)(tokens(41, dtype=torch.float32))


# --- what grows how


@pytest.mark.parametrize("name, options", [
    ("local", {"block_size": 8}), ("sparse", {"stride": 8, "num_summary": 2}), ("sparse", {"stride": 10, "num_summary": 1}),
    ("reformer", {"chunk_size": 8, "num_hashes": 2}), ("sinkhorn", {"block_size": 8}), ("linformer", {"num_latents": 6}),
    ("linformer", {"num_latents": 6, "sharing": "kv"}), ("funnel", {}), ("funnel", {"stride": 4}),
    ("synthesizer", {"rank": 3}), ("synthesizer", {"rank": 9, "dot_product": True}), ("longformer", {"window": 16}),
    ("longformer", {"window": 16, "num_global": 3}), ("bigbird", {"block_size": 8, "num_random": 3}),
], ids=str)
def test_a_mixer_does_what_its_formula_says(name, options):
    mixer, once = built(name, seq_len=640, **options), 320
    sizes = {"C": CHANNELS, "H": HEADS, "M": options.get("num_latents", 0)}
    found = [mixer_multiply_adds(mixer, count, CHANNELS) for count in (once, 2 * once)]
    expected = [count * evaluate(mixer.operations, N=count, **sizes) for count in (once, 2 * once)]
    if name == "reformer":  # beside hashing
        expected = [work + count * CHANNELS * 2 * sum(reformer.bucket_factors(count, 8)) // 2
                    for work, count in zip(expected, (once, 2 * once))]
    constant = {"bigbird": -2 * 8 * 2 * 8 * 8 * CHANNELS, "longformer": options.get("num_global", 0) * CHANNELS**2}
    assert found == [work + constant.get(name, 0) for work in expected]


GROWTH = {  # options, exponent of the multiply-adds, exponent of the largest tensor
    "local": ({"block_size": 64}, 1, 1), "sparse": ({"num_summary": 1}, 1.5, 1),  # stride N^(1/2)
    "reformer": ({"chunk_size": 64, "num_hashes": 2}, 1, 1), "sinkhorn": ({"block_size": 64}, 1.2, 1),
    "linformer": ({"num_latents": 64}, 1, 1), "funnel": ({}, 2, 1), "synthesizer": ({"rank": 8}, 2, 1),
    "longformer": ({"window": 128}, 1, 1), "bigbird": ({"block_size": 64, "num_random": 3}, 1, 1),
}


@pytest.mark.parametrize("name", GROWTH)
def test_work_and_memory_grow_as_claimed(name):
    options, work, memory = GROWTH[name]
    found = []
    for count in (1024, 8192):
        stride = {"stride": round(count**0.5)} if name == "sparse" else {}
        mixer = built(name, channels=16, heads=2, seq_len=count, **options | stride)
        with Recorder() as recorder:
            amount = mixer_multiply_adds(mixer, count, 16)
        found.append((amount, recorder.largest))
    exponents = [math.log(later / earlier, 8) for earlier, later in zip(*found)]
    assert exponents[0] <= work + 0.1 and exponents[1] <= memory + 0.1


# --- public implementations


def close(ours, theirs, tolerance=1e-6):
    return relative(ours.double(), theirs.double()) <= tolerance


def qkv(count, width=8, batch=2, heads=2):
    return (torch.randn(batch, heads, count, width, generator=torch.Generator().manual_seed(seed)) for seed in range(3))


def single(name, channels=16, heads=2, **options):
    """A mixer in FP32, evaluation, with the output projection the identity."""
    mixer = built(name, channels=channels, heads=heads, **options).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        mixer.out_proj.weight.copy_(torch.eye(channels))
        mixer.out_proj.bias.zero_()
    return mixer


def parts(layer, x, heads=2):
    found = layer(x).chunk(layer.out_features // x.shape[-1], -1)
    return [part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in found]


def joined(y):
    return y.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("count", [40, 37])
def test_local_attention_equals_that_of_local_attention(count):
    import local_attention as package
    mixer, x = single("local", block_size=8), tokens(count, channels=16, dtype=torch.float32)
    theirs = package.LocalAttention(window_size=8, causal=False, look_backward=0, look_forward=0, use_rotary_pos_emb=False,
                                    autopad=True)
    mask = torch.arange(count) < torch.tensor([[count], [21], [1]])
    expected = joined(theirs(*parts(mixer.qkv_proj, x), mask=mask))
    assert close(mixer(x, mask), expected * mask[..., None])


def test_a_window_equals_that_of_local_attention():
    import local_attention as package
    mixer, x = single("longformer", window=16), tokens(40, channels=16, dtype=torch.float32)
    theirs = package.LocalAttention(window_size=8, causal=False, look_backward=1, look_forward=1, use_rotary_pos_emb=False,
                                    exact_windowsize=True)
    assert close(mixer(x), joined(theirs(*parts(mixer.qkv_proj, x))))


@pytest.mark.parametrize("num_global", [0, 1])
def test_longformer_equals_that_of_transformers(num_global):
    from transformers.models.longformer import modeling_longformer as package
    config = package.LongformerConfig(hidden_size=16, num_attention_heads=2, attention_window=[8],
                                      attention_probs_dropout_prob=0.0)
    theirs, count = package.LongformerSelfAttention(config, layer_id=0).eval(), 48
    mixer, x = single("longformer", window=8, num_global=num_global), tokens(count, channels=16, dtype=torch.float32)
    names = {"": mixer.qkv_proj} | ({"_global": mixer.global_qkv_proj} if num_global else {})
    with torch.no_grad():
        for suffix, layer in names.items():
            for ours, part in zip(("query", "key", "value"), zip(layer.weight.chunk(3), layer.bias.chunk(3))):
                getattr(theirs, ours + suffix).weight.copy_(part[0])
                getattr(theirs, ours + suffix).bias.copy_(part[1])
    mask = torch.arange(count) < torch.tensor([[count], [30], [9]])
    attention = torch.where(mask, 0.0, -1e4)
    attention[:, :num_global] = 1e4
    out = theirs(x, attention_mask=attention, is_index_masked=attention < 0, is_index_global_attn=attention > 0,
                 is_global_attn=num_global > 0)[0]
    assert close(mixer(x, mask), out * mask[..., None])


def test_bigbird_equals_that_of_transformers(monkeypatch):
    from transformers.models.big_bird import modeling_big_bird as package
    config = package.BigBirdConfig(hidden_size=16, num_attention_heads=2, block_size=4, num_random_blocks=2, use_bias=True,
                                   attention_probs_dropout_prob=0.0, max_position_embeddings=64)
    theirs, count = package.BigBirdBlockSparseAttention(config, seed=0).train(), 48
    mixer, x = single("bigbird", block_size=4, num_random=2), tokens(count, channels=16, dtype=torch.float32)
    with torch.no_grad():
        weights, biases = mixer.qkv_proj.weight.chunk(3), mixer.qkv_proj.bias.chunk(3)
        for layer, weight, bias in zip((theirs.query, theirs.key, theirs.value), weights, biases):
            layer.weight.copy_(weight), layer.bias.copy_(bias)
    drawn, draw = [], theirs._bigbird_block_rand_mask_with_head
    monkeypatch.setattr(theirs, "_bigbird_block_rand_mask_with_head",
                        lambda *arguments, **options: drawn.append(draw(*arguments, **options)) or drawn[-1])
    mask = torch.arange(count) < torch.tensor([[count], [30], [9]])
    blocked = mask.float()
    blocks, band, start, end = package.BigBirdModel.create_masks_for_block_sparse_attn(blocked, 4)
    out = theirs(x, band_mask=band, from_mask=start, to_mask=end, from_blocked_mask=blocks, to_blocked_mask=blocks)[0]
    others = torch.as_tensor(np.array(drawn[-1]))  # [H, n - 2, r]
    blocks, counts = mixer.plan(12)
    blocks, counts = torch.cat([blocks[..., :5], others], -1), torch.cat([counts[..., :5], others >= 0], -1)
    mixer.plan = lambda num_blocks: (blocks, counts)
    assert close(mixer(x, mask), out * mask[..., None])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("chunk", [2, 8])  # buckets of two factors, and of one
def test_reformer_equals_that_of_transformers(masked, chunk):
    from transformers.models.reformer import modeling_reformer as package
    count, buckets = 40, reformer.bucket_factors(40, chunk)
    assert len(buckets) == (2 if chunk == 2 else 1)
    config = package.ReformerConfig(hidden_size=16, num_attention_heads=2, attention_head_size=8, lsh_attn_chunk_length=chunk,
                                    lsh_num_chunks_before=1, lsh_num_chunks_after=0, num_hashes=1,
                                    num_buckets=list(buckets) if chunk == 2 else buckets[0],
                                    lsh_attention_probs_dropout_prob=0.0, hash_seed=3, is_decoder=False)
    theirs = package.LSHSelfAttention(config).eval()
    mixer, x = single("reformer", chunk_size=chunk, num_hashes=1), tokens(count, channels=16, dtype=torch.float32)
    with torch.no_grad():
        theirs.query_key.weight.copy_(mixer.query_proj.weight)
        theirs.value.weight.copy_(mixer.value_proj.weight)
        mixer.query_proj.bias.zero_(), mixer.value_proj.bias.zero_()
    torch.manual_seed(3)
    rotations = torch.randn(2, 8, 1, sum(buckets) // 2)
    mixer.rotations = lambda columns, like: rotations
    mask = torch.arange(count) < torch.tensor([[count], [30], [9]]) if masked else None
    out = theirs(x, attention_mask=mask, num_hashes=1).hidden_states
    real = torch.ones(3, count, dtype=torch.bool) if mask is None else mask
    assert close(mixer(x, mask), out * real[..., None], 2e-6)


def test_linformer_equals_that_of_linformer():
    import linformer as package
    theirs = package.LinformerSelfAttention(16, 40, k=6, heads=2, dim_head=8, one_kv_head=False, share_kv=False).eval()
    mixer, x = single("linformer", num_latents=6), tokens(33, channels=16, dtype=torch.float32)
    with torch.no_grad():
        for layer, weight in zip((theirs.to_q, theirs.to_k, theirs.to_v), mixer.qkv_proj.weight.chunk(3)):
            layer.weight.copy_(weight)
        mixer.qkv_proj.bias.zero_()
        theirs.proj_k.copy_(mixer.token_proj[0].T), theirs.proj_v.copy_(mixer.token_proj[1].T)
        theirs.to_out.weight.copy_(torch.eye(16)), theirs.to_out.bias.zero_()
    assert close(mixer(x), theirs(x))


def test_sinkhorn_equals_that_of_sinkhorn_transformer():
    from sinkhorn_transformer import sinkhorn_transformer as package
    logits = torch.randn(6, 9, 9, generator=torch.Generator().manual_seed(0))
    for iterations in (1, 5, 8):
        assert close(sinkhorn.sinkhorn(logits, iterations), package.sinkhorn_sorting_operator(logits, iterations))
