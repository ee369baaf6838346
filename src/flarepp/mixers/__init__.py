"""Token mixers: one file, one class `Mixer` each. The folder's listing is the registry.

A mixer maps x [B, N, C] and an optional mask [B, N] (bool, True = a real token) to [B, N, C]. Padding never influences real
tokens, whatever stands there, and padded outputs are 0. To add one, add a file with
`Mixer(channel_dim, num_heads, norm, ...)`; constructor arguments without a default are sizes the configuration must give.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

from torch import nn

from flarepp.errors import check_arguments, unknown
from flarepp.layers import NORMS


def mixer_names() -> tuple[str, ...]:
    """The names of the mixers: the files of this folder, sorted."""
    return tuple(sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem != "__init__"))


def build_mixer(name: str, *, channel_dim: int, num_heads: int, norm: str = "layernorm", seq_len: int | None = None,
                grid: tuple[int, ...] | None = None, **options: Any) -> nn.Module:
    """Build the mixer called `name`.

    channel_dim C must be divisible by num_heads H; norm is "layernorm" or "rmsnorm"; seq_len and grid reach the mixers that
    ask for them. Sizes (num_latents, ...) have no default. ValueError names what is unknown or missing and the nearest name.
    """
    if name not in mixer_names():
        raise ValueError(unknown("mixer", name, mixer_names()))
    if norm not in NORMS:
        raise ValueError(unknown("norm", norm, NORMS))
    mixer = importlib.import_module(f"flarepp.mixers.{name}").Mixer
    parameters = inspect.signature(mixer).parameters
    given = {"channel_dim": channel_dim, "num_heads": num_heads, "norm": norm}
    given |= {key: value for key, value in {"seq_len": seq_len, "grid": grid}.items() if key in parameters}
    check_arguments(f"mixer {name!r}", mixer, given | options)
    return mixer(**given, **options)
