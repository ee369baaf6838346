"""100 random corruptions of what the pipeline keeps: each is refused in one line that names the file, or changes nothing.

The oracle is what the reader of a file, or the verb that a user calls, makes of the undamaged one: of the damaged one it
says which file is wrong, or makes the very same of it. A checkpoint is never refused: one that is damaged is not used.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy
import pytest
import torch

from flarepp import __main__, export, loop, record
from flarepp import train as training
from flarepp.data import store
from flarepp.data.lra import sequences
from folders import leave

RUN, OTHER = (Path(f"results/quick/runs/table1/darcy/{model}/B2-fp32-s0") for model in ("flarepp", "flare"))
TABLE, OTHER_TABLE = Path("results/quick/records/table1.csv"), Path("results/quick/records/figure3.csv")
STORE, OTHER_STORE = Path("results/quick/data/elasticity.h5"), Path("results/quick/data/pipe.h5")
TASK, OTHER_TASK = Path("results/quick/data/listops.h5"), Path("results/quick/data/pathfinder.h5")


# --- damages: functions of (random generator, path, another file of the kind)


def flip(random, path, other):
    content = bytearray(path.read_bytes())
    content[random.integers(len(content))] ^= 1 << random.integers(8)
    path.write_bytes(content)


def truncate(random, path, other):
    path.write_bytes(path.read_bytes()[:random.integers(path.stat().st_size)])


def overwrite(random, path, other):
    """A block of noise or zeros, as a bad sector leaves."""
    content, size = bytearray(path.read_bytes()), int(random.integers(1, 512))
    start = random.integers(len(content))
    block = random.bytes(size) if random.random() < 0.5 else bytes(size)
    content[start:start + size] = block[:len(content) - start]
    path.write_bytes(content)


def append(random, path, other):
    path.write_bytes(path.read_bytes() + random.bytes(int(random.integers(1, 64))))


def swap(random, path, other):
    path.write_bytes(other.read_bytes())


def edit_number(random, path, other):
    """One digit of the text becomes another."""
    text = path.read_text()
    place = random.choice([match.start() for match in re.finditer(r"\d", text)])
    path.write_text(text[:place] + str((int(text[place]) + random.integers(1, 10)) % 10) + text[place + 1:])


def edit_value(random, path, other):
    """A value somewhere in a JSON object goes, or becomes one of another type."""
    value = json.loads(path.read_text())
    inner = value
    while True:
        key = random.choice(sorted(inner))
        if not isinstance(inner[key], dict) or not inner[key] or random.random() < 0.3:
            break
        inner = inner[key]
    new = random.choice(["gone", "text", "null", "list", "nan", "negative"])
    if new == "gone":
        del inner[key]
    else:
        inner[key] = {"text": "0.5", "null": None, "list": [1], "nan": float("nan"), "negative": -1}[new]
    path.write_text(json.dumps(value))


def drop_line(random, path, other):
    lines = path.read_text().splitlines(keepends=True)
    del lines[random.integers(len(lines))]
    path.write_text("".join(lines))


BYTES = (flip, flip, truncate, overwrite, append, swap)
TEXT = (*BYTES, edit_number, edit_number)
JSON = (*TEXT, edit_value, edit_value, edit_value, edit_value)
STORES = (*[flip] * 4, *[overwrite] * 3, truncate, append, swap)
FILES = {  # what of a run folder, or beside the runs, is damaged how
    "metrics.json": JSON, "spec.json": (flip, swap, edit_number, *[edit_value] * 4), "history.csv": (*TEXT, drop_line),
    "predictions.h5": (*BYTES, flip), "model.safetensors": BYTES[1:],
}  # fmt: skip
TABLES = {"csv": (*TEXT, drop_line), "csv.sha256": (flip, overwrite, truncate, swap)}
CARD, CHECKPOINT, WEIGHTS, ARCHIVE = JSON[2:], (*BYTES, flip), BYTES[2:], (*[flip] * 3, overwrite, truncate, append)


# --- a project in small, and what is made of it


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """The runs of two models with their records, the working folder."""
    monkeypatch.chdir(tmp_path)
    entries = [leave("flarepp", 0.03125), leave("flare", 0.0625, cases=(0.25, 1.0, 1.75))]
    plan = {"suite": "table1", "scale": "quick", "entries": entries}
    record.write_json(plan, Path("plan.json"))
    record.write_records(record.records(plan), TABLE)
    record.write_records(record.records(plan | {"entries": entries[:1]}), OTHER_TABLE)
    return tmp_path


@pytest.fixture
def call(monkeypatch, capsys):
    """What a verb of `python -m flarepp`, in this process, refuses in one line, or the files that it leaves in "out"."""
    def answer(*words):
        shutil.rmtree("out", ignore_errors=True)
        monkeypatch.setattr(sys, "argv", ["flarepp", *map(str, words)])
        code, said = __main__.main(), capsys.readouterr().err
        assert not code or (code == 2 and said.startswith("error: ") and len(said.splitlines()) == 1), said
        return said, files(Path("out"))

    return answer


def files(folder: Path) -> dict[str, bytes]:
    found = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != record.IMPORTED]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def answered(function):
    """What a function refuses as the verbs do, in the words of a ValueError, or what it returns."""
    try:
        return "", function()
    except (ValueError, OSError) as error:
        return str(error), None


def changed(damage, seed: int, path: Path, other: Path) -> None:
    """Damage a file until it is another one."""
    random, kept = numpy.random.default_rng(seed), path.read_bytes()
    while path.read_bytes() == kept:
        damage(random, path, other)


def assert_named_or_harmless(readers: list, damages, path: Path, other: Path, named: str) -> None:
    """Each damage, alone, is refused by every reader with the name of the file, or it makes of it what it made before."""
    kept, clean = path.read_bytes(), [reader() for reader in readers]
    assert all(said == "" and made for said, made in clean), clean
    for seed, damage in enumerate(damages):
        changed(damage, seed, path, other)
        found = [reader() for reader in readers]
        path.write_bytes(kept)
        for (said, made), (_, before) in zip(found, clean):
            assert (named in said and not made if said else made == before), (damage.__name__, seed, said)


SHOWN = ("--records", TABLE, "--out", "out", "--shown", "last", "--scale", "quick")


@pytest.mark.parametrize("name", FILES)
def test_the_files_of_a_run(project, call, name):
    readers = {
        "metrics.json": [lambda: call("table", "table1", "--compared", "last", *SHOWN)],
        "history.csv": [lambda: answered(lambda: record.read_history(RUN).to_csv())],
        "predictions.h5": [lambda: answered(lambda: {key: numpy.asarray(value).tobytes()
                                                     for key, value in record.read_predictions(RUN, "last").items()}),
                           lambda: answered(lambda: record.read_errors(RUN, "ema").tobytes())],
    }  # fmt: skip
    collect = [lambda: call("records", "--plan", "plan.json", "--out", "out/records.csv")]
    assert_named_or_harmless(collect + readers.get(name, []), FILES[name], RUN / name, OTHER / name, named=f"{RUN}")


@pytest.mark.parametrize("kind", TABLES)
def test_records_tables(project, call, kind):
    path, other = TABLE.with_suffix(f".{kind}"), OTHER_TABLE.with_suffix(f".{kind}")
    readers = [lambda: call("table", "table1", "--compared", "last", *SHOWN),
               lambda: call("records", "--join", TABLE, "--out", "out/joined.csv")]
    assert_named_or_harmless(readers, TABLES[kind], path, other, named=str(TABLE))


@pytest.fixture
def data(project, benchmark):
    """A benchmark and a task with their cards, and others."""
    facts = {"label": "Elasticity", "dimension": "2D", "structure": "unstructured", "grid": None, "rejected": 0,
             "counts": {"train": 16, "test": 6, "points": 60}}  # fmt: skip
    for path, scaled in ((STORE, 1), (OTHER_STORE, 2)):
        norm = replace(benchmark.target_norm, std=scaled * benchmark.target_norm.std)
        other = replace(benchmark, name=path.stem, target_norm=norm)
        store.write(other, path)
        record.write_with_digest(benchmark.card | facts | {"fingerprint": other.fingerprint}, path.with_suffix(".json"))
    for path, seed in ((TASK, 0), (OTHER_TASK, 1)):
        random = numpy.random.default_rng(seed)
        split = sequences.Sequences.of_one_length(random.integers(0, 9, (6, 20)), random.integers(0, 2, 6))
        task = sequences.Task(path.stem, split, split[:3], split[3:], 9, 2, {"source": "generated", "split": "x"})
        sequences.write(task, path)
        record.write_with_digest(task.card | {"fingerprint": task.fingerprint}, path.with_suffix(".json"))


def test_cards(data, call):
    card, other = STORE.with_suffix(".json"), OTHER_STORE.with_suffix(".json")
    readers = [lambda: call("table", "table3", "--cards", card, "--out", "out", "--scale", "quick"),
               lambda: answered(lambda: record.read_case(STORE, 0)["target"].tobytes())]
    assert_named_or_harmless(readers, CARD, card, other, named=str(STORE.with_suffix("")))


def test_benchmarks(data):
    def said(benchmark) -> tuple:
        arrays = [array.tobytes() for split in (benchmark.train, benchmark.test) for array in split.arrays.values()]
        norms = [[norm.mean.tobytes(), norm.std.tobytes()] for norm in (benchmark.feature_norm, benchmark.target_norm)]
        return benchmark.name, benchmark.grid, benchmark.points_correspond, benchmark.card, arrays, norms

    readers = [lambda: answered(lambda: said(store.read(STORE))),
               lambda: answered(lambda: [record.read_case(STORE, 1)[key].tobytes() for key in ("features", "target")])]
    assert_named_or_harmless(readers, STORES, STORE, OTHER_STORE, named=str(STORE))


def test_tasks(data):
    def said(task) -> tuple:
        arrays = [getattr(split, key).tobytes() for split in task.splits.values() for key in sequences.DTYPES]
        return task.name, task.num_symbols, task.num_classes, task.dev_is_test, task.card, arrays

    readers = [lambda: answered(lambda: said(sequences.read(TASK)))]
    assert_named_or_harmless(readers, STORES, TASK, OTHER_TASK, named=str(TASK))


@pytest.fixture
def trained(run_spec, dataset, tmp_path):
    """The spec of three steps, their data, and the folder of a run that took them."""
    run_spec["training"] |= {"steps": 3, "num_evaluations": 1, "pct_start": 0.5, "checkpoint_seconds": 0}
    record.write_json(run_spec, tmp_path / "run/spec.json")
    training.train(run_spec, dataset, tmp_path / "run")
    return run_spec, store.read(dataset), tmp_path / "run"


def test_weights(trained, tmp_path):
    spec, benchmark, folder = trained
    path, other = folder / "model.safetensors", tmp_path / "other/model.safetensors"
    other.parent.mkdir()
    run = training.build_run(spec | {"training": spec["training"] | {"seed": 5}}, benchmark)
    training.leave_outputs(benchmark, run, other.parent)
    readers = [lambda: answered(lambda: export.load(folder)(benchmark.test.features).tobytes())]
    assert_named_or_harmless(readers, WEIGHTS, path, other, named=str(path))


def state_of(run) -> list:
    """All that the next steps are a function of."""
    state = [run.model.state_dict(), run.optimiser.state_dict(), asdict(run.progress), {"": torch.get_rng_state()}]
    leaves = torch.utils._pytree.tree_flatten(state)[0]
    return [leaf.numpy().tobytes() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def test_checkpoints_are_trusted_whole_or_not_at_all(trained, tmp_path):
    spec, benchmark, _ = trained
    path, other = tmp_path / "checkpoint-1.pt", tmp_path / "checkpoint-2.pt"
    for file, seed in ((path, 0), (other, 1)):  # of another run, under a name that tells
        run = training.build_run(spec | {"training": spec["training"] | {"seed": seed}}, benchmark)
        training.training_step(run)
        loop.save_checkpoint(run, file)
    fresh = state_of(training.build_run(spec, benchmark))

    def read():
        resumed = training.build_run(spec, benchmark)
        loop.restore_checkpoint(resumed, path)
        return "", state_of(resumed)

    kept, (_, clean) = path.read_bytes(), read()
    assert clean != fresh
    for seed, damage in enumerate(CHECKPOINT):
        changed(damage, seed, path, other)
        assert read()[1] == fresh, (damage.__name__, seed)
        path.write_bytes(kept)


def test_archives(project, data, call, tmp_path):
    path = tmp_path / "quick.tar.gz"
    assert call("archive", "--out", path, "--weights")[0] == ""

    def read():
        shutil.rmtree("elsewhere", ignore_errors=True)
        Path("elsewhere").mkdir()
        with contextlib.chdir("elsewhere"):
            said, _ = call("import", path)
        return said, files(Path("elsewhere"))

    assert_named_or_harmless([read], ARCHIVE, path, path, named="quick.tar.gz")


def test_there_are_a_hundred():
    groups = [*FILES.values(), *TABLES.values(), CARD, STORES, STORES, WEIGHTS, CHECKPOINT, ARCHIVE]
    assert sum(map(len, groups)) == 100
