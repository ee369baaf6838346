"""Peak memory of Transolver-3 in tiles, measured in a process of its own: a few tiles of slice weights, not those of all tokens."""

from __future__ import annotations

import subprocess
import sys

import pytest

TOKENS, TILE, CHANNELS, HEADS, FLOAT = 200_000, 10_000, 128, 8, 4
STEP = """
import gc, psutil, resource, sys, torch
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

step(tile)
for parameter in mixer.parameters():
    parameter.grad = None
gc.collect()
idle = psutil.Process().memory_info().rss  # warmed up by one tile
step(tokens)
unit = 1 if sys.platform == "darwin" else 1024
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - idle, sum(p.numel() for p in mixer.parameters()))
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
