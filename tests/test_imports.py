"""The shape of the package, from its syntax trees: who may import whom, and that importing does nothing."""

import ast
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import flarepp

ROOT = Path(flarepp.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
LONGEST_FUNCTION = 60
ALLOWED = {  # part of the package -> what it may import of the package besides itself
    "errors": [], "processes": [], "devices": [], "events": [], "attention": [], "losses": [], "optimise": [], "memory": [],
    "spec": ["errors", "record"],
    "record": ["errors"],
    "operations": ["errors"],
    "layers": ["errors"],
    "slices": ["attention", "layers"],
    "patterns": ["attention"],
    "kernels": ["layers"],
    "mixers": ["attention", "layers", "slices", "patterns", "kernels", "errors"],
    "models": ["mixers", "layers", "attention", "errors"],
    "solvers": ["errors", "processes"],
    "data": ["solvers", "record", "errors"],
    "paper": ["record"],
    "parallel": ["attention", "processes"],
    "loop": ["optimise", "parallel", "processes", "events", "memory", "record", "provenance"],
    "train": ["loop", "models", "data", "spec", "record", "losses", "optimise", "parallel", "provenance", "errors",
              "events"],
    "classify": ["loop", "models", "data", "record", "losses", "optimise", "parallel", "provenance", "errors", "events"],
    "class_baselines": ["data", "record"],
    "provenance": ["record"],
    "step": ["models", "losses", "record", "provenance"],
    "scaling": ["step", "parallel", "record", "provenance", "memory"],
    "cost": ["step", "models", "attention", "operations", "processes", "record", "provenance", "memory"],
    "evaluate": ["loop", "train", "data", "record", "provenance"],
    "archive": ["data", "record"],
    "export": ["evaluate", "train", "models", "data", "record", "errors"],
    "calibration": ["train", "classify", "cost", "step", "operations", "models", "data", "record", "provenance"],
    "status": ["spec", "record"],
    "forecast": ["spec", "record", "status", "calibration"],
}
TORCH_FREE = ("errors", "processes", "devices", "spec", "status", "forecast", "record", "paper", "solvers", "data", "__main__")
QUIET = ("errors", "devices", "spec", "status", "forecast", "record", "paper", "__main__")  # importing these loads no torch


def module_of(path):
    """ "mixers.flare" for mixers/flare.py, "mixers" for mixers/__init__.py, "" for the package itself."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


@cache
def tree_of(module):
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def imported_names(module):
    """Absolute dotted names of everything a file imports, inside functions too."""
    names = []
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{MODULES[module].name} imports relatively"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def edges(module):
    """The package's modules that a file imports: the longest dotted name that is one."""
    found = set()
    for name in imported_names(module):
        parts = name.split(".")
        if parts[0] == "flarepp":
            tails = [".".join(parts[1:stop]) for stop in range(len(parts), 0, -1)]
            found.add(next(tail for tail in tails if tail in MODULES))
    return found


def within(module, part):
    return module == part or module.startswith(part + ".")


def third_party(module):
    return {name.split(".")[0] for name in imported_names(module)}


@pytest.mark.parametrize("part", ALLOWED)
def test_imports_point_one_way(part):
    members = [module for module in MODULES if within(module, part)]
    assert members
    for module in members:
        for target in edges(module) - {""}:
            allowed = any(within(target, other) for other in (part, *ALLOWED[part]))
            assert allowed, f"{module} imports {target}"


def test_a_mixer_imports_no_other_mixer():
    for module in MODULES:
        if module.startswith("mixers."):
            assert not {target for target in edges(module) if within(target, "mixers")}, module


def test_nothing_imports_the_command_line():
    assert [module for module in MODULES if "__main__" in edges(module)] == []


@pytest.mark.parametrize("part", TORCH_FREE)
def test_torch_stays_outside(part):
    members = [module for module in MODULES if within(module, part)]
    assert members and [module for module in members if third_party(module) & {"torch", "safetensors"}] == []


def test_only_parallel_knows_ranks():
    for module in MODULES:
        attributes = [node for node in ast.walk(tree_of(module)) if isinstance(node, ast.Attribute)]
        names = [*imported_names(module), *map(ast.unparse, attributes)]
        assert module == "parallel" or not any(name.startswith("torch.distributed") for name in names), module


def test_there_are_no_cycles():
    graph = {module: edges(module) - {module} for module in MODULES}
    while leaves := [module for module, targets in graph.items() if not targets & graph.keys()]:
        for module in leaves:
            del graph[module]
    assert graph == {}


# --- functions fit a screen; nothing happens at import


def functions(module):
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(tree_of(module)) if isinstance(node, kinds)]


def test_no_function_is_long():
    long = [f"{module}.{node.name}: {node.end_lineno - node.lineno + 1} lines" for module in MODULES
            for node in functions(module) if node.end_lineno - node.lineno >= LONGEST_FUNCTION]
    assert long == []


def test_every_file_says_what_it_is():
    assert [module for module in MODULES if not ast.get_docstring(tree_of(module))] == []


def is_main_guard(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def test_modules_only_define():
    """At the top level: a docstring, imports, definitions, constants; no bare calls or environment reads."""
    allowed = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    for module in MODULES:
        for position, node in enumerate(tree_of(module).body):
            docstring = position == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            typing = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            harmless = docstring or typing or is_main_guard(node) or isinstance(node, allowed)
            assert harmless, f"{module}: {ast.unparse(node)}"
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                assert "environ" not in ast.unparse(node) and "getenv" not in ast.unparse(node), module


PROBE = """
import importlib, json, sys
quiet, rest = json.loads(sys.argv[1])
for name in quiet:
    importlib.import_module(name)
early = sorted({"torch", "safetensors"} & set(sys.modules))
import numpy, random, torch
def state():
    return [torch.initial_seed(), torch.get_rng_state().tolist(), torch.get_num_threads(),
            torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(), str(numpy.random.get_state()), random.getstate()]
import h5py, matplotlib, pandas, safetensors.torch, scipy, skfem, torch.nn  # their own effects are not ours
before = state()
for name in rest:
    importlib.import_module(name)
after = state()
changed = [i for i, (old, new) in enumerate(zip(before, after)) if old != new]
sys.stderr.write(json.dumps({"early": early, "changed": changed, "cuda": torch.cuda.is_initialized()}))
"""


def package_files():
    return {path for path in ROOT.rglob("*") if "__pycache__" not in path.parts}


def test_importing_does_nothing(tmp_path):
    names = {module: f"flarepp.{module}".rstrip(".") for module in MODULES}
    quiet = [name for module, name in names.items() if any(within(module, part) for part in QUIET)]
    rest = [name for name in names.values() if name not in quiet]
    home = tmp_path / "home"
    home.mkdir()
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(ROOT.parent),
                                "MPLCONFIGDIR": str(home)}
    files = package_files()
    work = tmp_path / "work"
    work.mkdir()
    run = subprocess.run([sys.executable, "-c", PROBE, json.dumps([quiet, rest])], cwd=work, env=environment,
                         capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout == ""
    assert json.loads(run.stderr) == {"early": [], "changed": [], "cuda": False}
    assert list(work.iterdir()) == []
    assert package_files() == files
