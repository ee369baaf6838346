"""Random mutations of config.yaml, and what comes of each: a plan, or one line that names the key.

    python tests/fuzz_config.py --full      300 mutations, 30 of those that pass dry-run by Snakemake, 10 run at scale smoke
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import math
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from clone import PROJECT, clone, variables
from flarepp.spec import SCALES, Plan, expand

WRONG = (None, True, False, 0, 1, -1, 0.5, 1e300, 10**30, math.inf, math.nan, "", "text", "1e-3", "../up", "a\nb", "$x_%", "é",
         [], [None], [1, 1], [[]], {}, {"smoke": 1}, {"quick": 2}, {"darcy": 3}, {"default": None}, {"smok": 4}, {1: 2},
         datetime.date(2026, 1, 1))  # fmt: skip
FACTORS = (-1, 0, 0.5, 2, 3, 1000)
SMALL = {"steps": 60, "batch_size": 16, "eval_batch_size": 10**6, "num_evaluations": 60, "num_threads": 2, "context_parallel": 2,
         "data_parallel": 2, "num_train": 64, "num_test": 32, "resolution": 40, "solver_resolution": 40, "num_points": 512,
         "channel_dim": 64, "num_blocks": 4, "num_latents": 64, "ffn_ratio": 8}  # fmt: skip  what is executed


@dataclass(frozen=True)
class Mutation:
    """A changed configuration, what was done to it, and the keys of which an error may name one."""

    config: object
    done: str
    keys: tuple[str, ...]


def places(value: object, path: tuple = ()) -> Iterator[tuple]:
    """Paths of everything inside a configuration, of keys and of places in lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def misspelt(key: str, draw: random.Random) -> str:
    """A key with a letter left out, doubled or turned to a capital."""
    place = draw.randrange(len(key))
    return key[:place] + draw.choice(("", 2 * key[place], key[place].upper() + "_")) + key[place + 1 :]


def mutated(config: dict, seed: int) -> Mutation:
    """One random change of type, name, range or structure. The same seed makes the same change."""
    draw, config = random.Random(seed), copy.deepcopy(config)
    every = list(places(config))
    path = draw.choice(every)
    parent = within(config, path[:-1])
    old = parent[path[-1]]
    done, named = draw.choice((of_value, of_value, of_number, of_name, of_structure))(draw, config, parent, path, old, every)
    keys = [str(key) for key in (*path, *named) if isinstance(key, str) and key not in (*SCALES, "default")]
    return Mutation(config, f"{'.'.join(map(str, path))}: {done}", tuple(keys or ["scale"]))


def within(config: object, path: tuple) -> object:
    """What stands at a path."""
    for key in path:
        config = config[key]
    return config


def of_value(draw: random.Random, config, parent, path: tuple, old, every: list) -> tuple[str, tuple]:
    """Another value, of any type."""
    parent[path[-1]] = new = copy.deepcopy(draw.choice(WRONG))
    return f"{shown(old)} -> {shown(new)}", ()


def of_number(draw: random.Random, config, parent, path: tuple, old, every: list) -> tuple[str, tuple]:
    """A number times a factor; anything else as text or in a list."""
    if isinstance(old, int | float) and not isinstance(old, bool):
        new = old * draw.choice(FACTORS)
    else:
        new = draw.choice((str(old), [old], {"smoke": old, "default": old}))
    parent[path[-1]] = new
    return f"{shown(old)} -> {shown(new)}", ()


def of_name(draw: random.Random, config, parent, path: tuple, old, every: list) -> tuple[str, tuple]:
    """A key or a name misspelt."""
    if isinstance(parent, dict):
        name = misspelt(path[-1], draw)
        items = [(name if key == path[-1] else key, value) for key, value in parent.items()]
        parent.clear()
        parent.update(items)
        return f"called {name!r}", (name,)
    parent[path[-1]] = new = misspelt(str(old), draw)
    return f"{shown(old)} -> {new!r}", (new,)


def of_structure(draw: random.Random, config, parent, path: tuple, old, every: list) -> tuple[str, tuple]:
    """Something removed, added, repeated, or exchanged with something elsewhere."""
    what = draw.choice(("removed", "added", "exchanged", "repeated"))
    if what == "removed":
        del parent[path[-1]]
        return what, ()
    if what == "exchanged":
        other = draw.choice([place for place in every if place[: len(path)] != path and path[: len(place)] != place])
        target = within(config, other[:-1])
        parent[path[-1]], target[other[-1]] = target[other[-1]], old
        return f"exchanged with {'.'.join(map(str, other))}", other
    if isinstance(old, list) and what == "repeated":
        old.extend(copy.deepcopy(old[:1]))
    elif isinstance(old, dict):
        old["surplus"] = 1
        return "with the key 'surplus'", ("surplus",)
    else:
        parent[path[-1]] = [old, old] if what == "repeated" else {"surplus": old}
    return f"{what}: {shown(parent[path[-1]])}", ("surplus",)


def shown(value: object) -> str:
    return repr(value)[:60]


def plan_of(mutation: Mutation) -> Plan | None:
    """The plan, or None if it was refused as it should; AssertionError says what is wrong with the refusal."""
    try:
        return expand(copy.deepcopy(mutation.config))
    except ValueError as error:
        message = str(error)
    except Exception as error:
        raise AssertionError(f"{mutation.done}: {type(error).__name__}: {error}") from error
    assert "\n" not in message and len(message) < 600, f"{mutation.done}: not one line: {message}"
    assert any(key in message for key in mutation.keys), f"{mutation.done}: names no key: {message}"
    return None


def snakemake(folder: Path, mutation: Mutation, *words: str) -> None:
    """Run Snakemake in a copy under a mutated configuration; AssertionError unless it succeeds."""
    (folder / "config.yaml").write_text(yaml.safe_dump(mutation.config, sort_keys=False, allow_unicode=True), encoding="utf-8")
    answer = subprocess.run([sys.executable, "-m", "snakemake", "--cores", "2", "--show-failed-logs", "--scheduler", "greedy", *words],
                            cwd=folder, env=variables(folder), capture_output=True, text=True, timeout=300)  # fmt: skip
    assert answer.returncode == 0, f"{mutation.done}: {(answer.stdout + answer.stderr)[-2000:]}"


def target(plan: Plan, usual: Plan) -> tuple[bool, str] | None:
    """The run to execute: on Darcy, small, one that the mutation changed where there is one (False); None without such a run."""
    known = {run.json for run in usual.runs.values()}
    runs = [(run.json in known, path) for path, run in plan.runs.items() if run.spec["dataset"]["name"] == "darcy" and small(run.spec)]
    return min(runs, default=None)


def small(spec: dict) -> bool:
    sizes = spec["dataset"] | spec["model"] | spec["training"]
    return all(sizes.get(key) is None or sizes[key] <= most for key, most in SMALL.items())


def fuzz(count: int, dry: int, executed: int, folder: Path) -> dict[str, int]:
    """Mutations 0 to count - 1; AssertionError for the first that does what none should. Returns how many did what."""
    config = yaml.safe_load((PROJECT / "config.yaml").read_text(encoding="utf-8")) | {"scale": "smoke"}
    usual, passed = expand(copy.deepcopy(config)), []
    for seed in range(count):
        mutation = mutated(config, seed)
        if (plan := plan_of(mutation)) is not None:
            passed.append((mutation, plan))
    clone(folder)
    for mutation, _ in random.Random(0).sample(passed, dry):
        snakemake(folder, mutation, "-n", "--quiet", "all")
    runs = [(*run, place) for place, (_, plan) in enumerate(passed) if (run := target(plan, usual))]
    for _, run, place in sorted(runs)[:executed]:
        mutation = passed[place][0]
        snakemake(folder, mutation, f"{run}/metrics.json")
        status = json.loads((folder / run / "metrics.json").read_text())["status"]
        assert status in ("ok", "diverged"), f"{mutation.done}: {status}"
    return {"passed": len(passed), "refused": count - len(passed), "dry runs": dry, "executed": executed}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="all 300; otherwise 60, 2 dry runs and one run")
    numbers = (300, 30, 10) if parser.parse_args().full else (60, 2, 1)
    with tempfile.TemporaryDirectory() as made:
        print(fuzz(*numbers, Path(made)))
