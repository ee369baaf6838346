"""Complete models: one file, one class `Model` each. The folder's listing is the registry.

A model maps features [B, N, in_dim] and an optional mask [B, N] (bool, True = a real token) to [B, N, out_dim].
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from torch import nn

from flarepp.errors import check_arguments, unknown


def model_names() -> tuple[str, ...]:
    """The names of the models: the files of this folder, sorted."""
    return tuple(sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem != "__init__"))


def build_model(name: str, *, in_dim: int, out_dim: int, grid: tuple[int, ...] | None = None, **options: Any) -> nn.Module:
    """Build the model called `name` (see `model_names`); `grid` is the extent of a structured mesh or None.

    ValueError names an unknown model, or whatever the model's own options lack.
    """
    if name not in model_names():
        raise ValueError(unknown("model", name, model_names()))
    model = importlib.import_module(f"flarepp.models.{name}").Model
    given = {"in_dim": in_dim, "out_dim": out_dim, "grid": grid, **options}
    check_arguments(f"model {name!r}", model, given)
    return model(**given)
