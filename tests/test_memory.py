"""Peak memory in processes of their own: Transolver-3 in tiles holds a few of them, models are linear in N, FLARE's peak does not
know M; and what becomes of freed memory."""

from __future__ import annotations

import json
import platform
import subprocess
import sys

import numpy
import pytest

TOKENS, TILE, CHANNELS, HEADS, FLOAT = 200_000, 10_000, 128, 8, 4
STEP = """
import resource, sys, torch
from flarepp.memory import freed_at_once
from flarepp.mixers import build_mixer
tokens, tile, channels, heads, slices, masked = map(int, sys.argv[1:])
mixer = build_mixer("transolver3", channel_dim=channels, num_heads=heads, num_latents=slices, tile=tile)

def step(count):
    x = torch.randn(1, count, channels, requires_grad=True)
    mask = torch.arange(count)[None] < count - 5 if masked else None
    out = mixer(x, mask)
    out.backward(torch.randn_like(out))
    norm = x.grad.norm()  # reduces without a copy
    assert norm.isfinite() and norm > 0

unit = 1 if sys.platform == "darwin" else 1024
step(tile // 100)  # loads the code
# The peak until here, not what is resident now: a system may take pages back that the step then asks for again.
idle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with freed_at_once():  # the peak of what is live, whatever the allocator keeps
    step(tokens)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - idle) * unit, sum(p.numel() for p in mixer.parameters()))
"""


@pytest.mark.parametrize("slices, masked", [(64, 0), (128, 1)])
def test_tiled_transolver3_holds_a_few_tiles(slices, masked):
    words = [str(value) for value in (TOKENS, TILE, CHANNELS, HEADS, slices, masked)]
    answer = subprocess.run([sys.executable, "-c", STEP, *words], capture_output=True, text=True, timeout=600)
    assert answer.returncode == 0, answer.stderr
    peak, parameters = map(int, answer.stdout.split())
    kept = 4 * TOKENS * CHANNELS * FLOAT + 2 * parameters * FLOAT  # input, output, their gradients; parameters and theirs
    tile = TILE * HEADS * slices * FLOAT
    print(f"peak {peak / 2**20:.0f} MiB = kept {kept / 2**20:.0f} MiB + {(peak - kept) / tile:.1f} tiles")
    assert peak <= kept + 8 * tile
    assert peak < TOKENS * HEADS * slices * FLOAT + kept  # what the weights of all tokens alone would take


SIZES, LATENTS = (4096, 8192, 16384), (64, 128)
CURVE = """
import json, sys
from pathlib import Path
from flarepp import cost
spec = json.loads(sys.argv[1])
cost.measure(spec, Path(sys.argv[2]))
"""


def peaks(folder, mixer, latents):
    """Peak memory in MiB of one block of C = 32 at every N of SIZES."""
    model = {"name": "backbone", "mixer": mixer, "channel_dim": 32, "num_heads": 4, "num_blocks": 1, "ffn_ratio": 4,
             "norm": "layernorm", "num_latents": latents}
    settings = {"num_tokens": list(SIZES), "batch_size": 2, "precision": "fp32", "warmup_steps": 1, "timed_steps": 1,
                "max_seconds": 1.0, "max_step_seconds": 60.0, "num_threads": 1, "device": "cpu", "compile": False, "seed": 0}
    spec = {"scale": "smoke", "model": model, "cost": settings}
    words = [sys.executable, "-c", CURVE, json.dumps(spec), str(folder)]
    answer = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stderr
    records = [json.loads((folder / f"N{tokens}" / "metrics.json").read_text()) for tokens in SIZES]
    return numpy.array([record["metrics"]["peak_memory_mb"] for record in records])


def test_peaks_are_linear_in_tokens_and_flares_does_not_know_its_latents(tmp_path):
    found = {(mixer, latents): peaks(tmp_path / f"{mixer}{latents}", mixer, latents)
             for mixer in ("flare", "transolver3") for latents in LATENTS}
    for line in found.values():
        beside = line - numpy.polyval(numpy.polyfit(SIZES, line, 1), SIZES)
        assert abs(beside).max() < 0.02 * line[-1]
    few, many = (found["flare", latents] for latents in LATENTS)
    assert abs(many / few - 1)[-1] < 0.02
    weights = 64 * 4 * 2 * SIZES[-1] * FLOAT / 2**20  # of 64 more slices, all heads and samples
    assert found["transolver3", 128][-1] - found["transolver3", 64][-1] > 0.9 * weights


ALLOCATIONS = """
import resource, sys, torch
from flarepp.memory import freed_at_once, keep_freed

def used():
    found = resource.getrusage(resource.RUSAGE_SELF)
    return found.ru_maxrss / 2**10, found.ru_minflt

def churn():
    for size in range(40, 60):
        torch.ones(size * 2**18)  # of 40 to 59 MiB, one after the other

peak, _ = used()
with freed_at_once():
    churn()
at_once, _ = used()
churn()
_, before = used()
for _ in range(3):
    churn()
print(at_once - peak, used()[1] - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="freed memory is that of glibc")
def test_freed_memory_is_returned_at_once_and_afterwards_kept():
    answer = subprocess.run([sys.executable, "-c", ALLOCATIONS], capture_output=True, text=True, timeout=100)
    assert answer.returncode == 0, answer.stderr
    peak, faults = map(float, answer.stdout.split())
    assert peak < 75  # MiB: the largest by itself
    assert faults < 1000  # 3,000 MiB, touched anew, would be 760,000
