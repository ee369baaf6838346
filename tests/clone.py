"""The project as a clone holds it, in a folder of its own, and the environment in which its own package comes first."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[1]


def clone(folder: Path, source: Path = PROJECT) -> Path:
    """What Snakemake reads, copied from `source`; returns `folder`, made where it is missing."""
    for name in ("src", "workflow"):
        shutil.copytree(source / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("Snakefile", "config.yaml"):
        shutil.copy(source / name, folder)
    return folder


def variables(folder: Path, python: str = sys.executable, **more: str) -> dict[str, str]:
    """Variables of a program that works in a clone, whose jobs find this Python."""
    path = f"{Path(python).parent}:{os.environ['PATH']}"
    return os.environ | {"PYTHONPATH": str(folder / "src"), "PATH": path} | more
