"""Slow, obvious twins of the fused paths, and a recorder of the operators that run.

Nothing here uses the package's own attention or layers: the full [M, N] matrix, one sample at a time, and
the formulas of each mixer's docstring written out with einsum and softmax on tokens [B, N, H, D].
"""

import math

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def attention(q, k, v, scale, key_mask=None):
    """(out [B, H, M, D], lse [B, H, M]); padded keys are removed, a sample without keys gives 0 and -inf."""
    outs, lses = [], []
    for sample in range(k.shape[0]):
        real = torch.ones(k.shape[2], dtype=torch.bool) if key_mask is None else key_mask[sample]
        query = q[0 if q.shape[0] == 1 else sample]  # [H, M, D]
        scores = scale * torch.einsum("hmd,hnd->hmn", query, k[sample][:, real])
        if not real.any():
            outs.append(query * 0)
            lses.append(query.sum(-1) * 0 - math.inf)
            continue
        outs.append(torch.einsum("hmn,hnd->hmd", torch.softmax(scores, -1), v[sample][:, real]))
        lses.append(torch.logsumexp(scores, -1))
    return torch.stack(outs), torch.stack(lses)


# --- mixers: p holds the parameters by name, x [B, N, C]


def linear(p, name, x):
    return torch.einsum("bnc,oc->bno", x, p[f"{name}.weight"]) + p[f"{name}.bias"]


def residual(p, name, x):
    return x + linear(p, name, x)


def heads(x, num_heads):
    """[B, N, C] -> [B, N, H, D]"""
    return x.reshape(*x.shape[:2], num_heads, -1)


def latents(p, name):
    """[H, M, D] -> [1, M, H, D]"""
    return torch.einsum("hmd->mhd", p[name])[None]


def normalised(x, norm):
    if norm == "rmsnorm":
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6)
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + 1e-5)


def normalise(p, name, x, norm, wanted=True):
    if not wanted:
        return x
    y = normalised(x, norm) * p[f"{name}.weight"]
    return y + p[f"{name}.bias"] if norm == "layernorm" else y


def softmax_mix(q, k, v):
    """softmax(D^(-1/2) q k^T) v for q [B or 1, M, H, D] and k, v [B, N, H, D]."""
    q = q.expand(k.shape[0], -1, -1, -1)
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k) / math.sqrt(q.shape[-1])
    return torch.einsum("bhmn,bnhd->bmhd", torch.softmax(scores, -1), v)


def read_out(p, y):
    return linear(p, "out_proj", y.reshape(*y.shape[:2], -1))


def low_rank(p, q, k, v):
    q = q.expand(k.shape[0], -1, -1, -1)
    return read_out(p, softmax_mix(k, q, softmax_mix(q, k, v)))


def full(p, x, num_heads, norm, qk_norm=False):
    q, k, v = (heads(part, num_heads) for part in linear(p, "qkv_proj", x).split(x.shape[-1], -1))
    q, k = normalise(p, "query_norm", q, norm, qk_norm), normalise(p, "key_norm", k, norm, qk_norm)
    return read_out(p, softmax_mix(q, k, v))


def flare(p, x, num_heads, norm, qk_norm=False):
    k, v = (heads(residual(p, name, x), num_heads) for name in ("key_proj", "value_proj"))
    q = normalise(p, "query_norm", latents(p, "latents"), norm, qk_norm)
    return low_rank(p, q, normalise(p, "key_norm", k, norm, qk_norm), v)


def flarepp(p, x, num_heads, norm, seed_norm=True, qk_norm=False,
            routing=("routing_key_proj", "routing_value_proj")):
    names = (*routing, "key_proj", "value_proj")
    projected = {name: heads(residual(p, name, x), num_heads) for name in dict.fromkeys(names)}
    k0, v0, k, v = (projected[name] for name in names)
    seeds = normalise(p, "seed_norm", latents(p, "seeds"), norm, seed_norm)
    q = softmax_mix(seeds, normalise(p, "routing_key_norm", k0, norm, seed_norm), v0)
    q = normalise(p, "query_norm", q, norm, qk_norm)
    return low_rank(p, q, normalise(p, "key_norm", k, norm, qk_norm), v)


def flarepp_shared(p, x, num_heads, norm, **switches):
    return flarepp(p, x, num_heads, norm, routing=("key_proj", "value_proj"), **switches)


def flarepp_anchored(p, x, num_heads, norm):
    k0, k, v = (heads(linear(p, name, x), num_heads) for name in ("routing_proj", "key_proj", "value_proj"))
    k0 = normalised(k0, norm)
    dynamic = softmax_mix(normalise(p, "seed_norm", latents(p, "seeds"), norm), k0, k0)
    gate = 1 / (1 + torch.exp(-p["gate_logit"]))  # [H]
    q = normalised(latents(p, "latents"), norm) + gate[:, None] * dynamic
    return low_rank(p, q, normalise(p, "key_norm", k, norm), v)


def softmax_slices(f, weights):
    """Slice tokens [B, M, H, D] of f [B, N, H, D] under weights [B, H, N, M]."""
    mass = weights.sum(2).transpose(1, 2)[..., None]  # [B, M, H, 1]
    return torch.einsum("bhnm,bnhd->bmhd", weights, f) / (mass + 1e-5)


def slice_mix(p, t):
    """Attention among the slice tokens t [B, M, H, D]; the maps are shared by the heads and have no bias."""
    q, k, v = (torch.einsum("bmhd,ed->bmhe", t, p[f"slice_attention.{name}_proj.weight"]) for name in ("query", "key", "value"))
    return softmax_mix(q, k, v)


def slice_logits(p, u):
    """[B, H, N, M] of u [B, N, H, D]"""
    return torch.einsum("bnhd,md->bhnm", u, p["slice_proj.weight"]) + p["slice_proj.bias"]


def transolver(p, x, num_heads, norm):
    f, u = (heads(linear(p, name, x), num_heads) for name in ("token_proj", "routing_proj"))
    weights = torch.softmax(slice_logits(p, u) / torch.clamp(p["temperature"], 0.1, 5), -1)
    return read_out(p, torch.einsum("bhnm,bmhd->bnhd", weights, slice_mix(p, softmax_slices(f, weights))))


def exact_gelu(x):
    return x / 2 * (1 + torch.erf(x / math.sqrt(2)))


def transolverpp(p, x, num_heads, norm, eval_noise=False):
    u = heads(linear(p, "routing_proj", x), num_heads)
    hidden = exact_gelu(torch.einsum("bnhd,md->bhnm", u, p["temperature_proj.0.weight"]) + p["temperature_proj.0.bias"])
    last = torch.einsum("bhnm,om->bhno", hidden, p["temperature_proj.2.weight"]) + p["temperature_proj.2.bias"]
    temperature = torch.clamp(exact_gelu(last) + p["bias"], min=0.01)  # [B, H, N, 1]
    logits = slice_logits(p, u)
    if eval_noise:
        logits = logits - torch.log(-torch.log(torch.rand_like(logits) + 1e-8) + 1e-8)
    weights = torch.softmax(logits / temperature, -1)
    return read_out(p, torch.einsum("bhnm,bmhd->bnhd", weights, slice_mix(p, softmax_slices(u, weights))))


def transolver3(p, x, num_heads, norm, tile=None):
    """The raw tokens are averaged, the output projection is applied to the slices; tiled it is Transolver without the clamp."""
    per_head = {name: p[name].reshape(num_heads, -1, *p[name].shape[1:]) for name in (
        "token_proj.weight", "token_proj.bias", "routing_proj.weight", "routing_proj.bias")}
    fused = torch.einsum("md,hdc->hmc", p["slice_proj.weight"], per_head["routing_proj.weight"])
    shift = torch.einsum("md,hd->hm", p["slice_proj.weight"], per_head["routing_proj.bias"]) + p["slice_proj.bias"]
    logits = (torch.einsum("bnc,hmc->bhnm", x, fused) + shift[:, None]) / p["temperature"]
    weights = torch.softmax(logits, -1)
    mass = weights.sum(2)  # [B, H, M]
    raw = torch.einsum("bhnm,bnc->bhmc", weights, x) / (mass[..., None] + 1e-5)
    share = torch.ones_like(mass) if tile is None else mass / (mass + 1e-5)
    t = torch.einsum("bhmc,hdc->bmhd", raw, per_head["token_proj.weight"])
    t = t + torch.einsum("bhm,hd->bmhd", share, per_head["token_proj.bias"])
    out_proj = p["out_proj.weight"].reshape(x.shape[-1], num_heads, -1)  # [C, H, D]
    slices = torch.einsum("bmhd,chd->bhmc", slice_mix(p, t), out_proj)
    return torch.einsum("bhnm,bhmc->bnc", weights, slices) + p["out_proj.bias"]


TWINS = {"full": full, "flare": flare, "flarepp": flarepp, "flarepp_shared": flarepp_shared,
         "flarepp_anchored": flarepp_anchored, "transolver": transolver, "transolverpp": transolverpp,
         "transolver3": transolver3}


# --- what ran


class Recorder(TorchDispatchMode):
    """Remembers every operator that runs below autograd, its arguments and the largest tensor returned."""

    def __init__(self):
        super().__init__()
        self.names, self.calls, self.largest = [], [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.names.append(function.overloadpacket.__name__)
        self.calls.append((args, kwargs or {}, result))
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, torch.Tensor):
                self.largest = max(self.largest, item.numel())
        return result

    def attention(self):
        """Names of the fused operators that ran, in order."""
        return [name for name in self.names if "attention" in name]


UNFUSED = {"softmax", "_softmax", "_log_softmax", "logsumexp", "bmm", "baddbmm", "matmul", "einsum",
           "_scaled_dot_product_attention_math", "_safe_softmax"}
