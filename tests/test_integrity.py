"""What was changed after a run ended is refused, or shown as missing, from run folders to tables and figures."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import h5py
import pytest

from flarepp import __main__, record
from flarepp.data import store
from folders import leave

ERRORS = {"full": 0.05, "flare": 0.0625, "flarepp": 0.03125, "transolver": 0.125}


@pytest.fixture
def call(monkeypatch, capsys):
    """`python -m flarepp ...` in this process: exit code and what it said on standard error."""
    def answer(*words) -> tuple[int, str]:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["flarepp", *words])
        return __main__.main(), capsys.readouterr().err

    return answer


@pytest.fixture
def collect(call):
    return lambda: call("records", "--plan", "plan.json", "--out", "records.csv")


@pytest.fixture
def artefacts(call):
    """Every artefact of Table 1's records that these tests make; the first complaint ends it."""
    def answer() -> tuple[int, str]:
        shown = ("--records", "records.csv", "--out", "out", "--shown", "last", "--scale", "quick")
        verbs = (("table", "table1", "--compared", "last"), ("figure", "learning_curves"), ("figure", "error_distribution"))
        return next((found for verb in verbs if (found := call(*verb, *shown))[0]), (0, ""))

    return answer


@pytest.fixture(autouse=True)
def project(monkeypatch, tmp_path, collect):
    """A project folder with the runs of four models and their records; returns the models' run folders."""
    monkeypatch.chdir(tmp_path)
    entries = [leave(model, error) for model, error in ERRORS.items()]
    record.write_json({"suite": "table1", "scale": "quick", "entries": entries}, tmp_path / "plan.json")
    assert collect() == (0, "")
    return {entry["model"]: tmp_path / entry["run"] for entry in entries}


def edit(folder, change, digest=True):
    """Edit a record by hand; digest: leave it the digest of what it was."""
    result = record.read_json(folder / "metrics.json")
    change(result)
    (folder / "metrics.json").write_text(json.dumps(result if digest else record._without_digest(result)))


def test_what_was_not_touched_passes(collect, artefacts):
    figures = [Path(f"out/{name}.png") for name in ("learning_curves", "error_distribution")]
    assert collect() == (0, "") and artefacts() == (0, "")
    assert "**3.12**" in Path("out/table1.md").read_text() and all(path.exists() for path in figures)


@pytest.mark.parametrize("change", [
    lambda result: result["metrics"].update(last=-result["metrics"]["last"]),
    lambda result: result["metrics"].update(ema=0.001),
    lambda result: result.update(status="diverged"),
    lambda result: result["spec"]["training"].update(seed=1),
    lambda result: result["provenance"]["dataset"].update(source="published"),
    lambda result: result["files"].clear(),
    lambda result: result.update(note="fine"),
])  # fmt: skip
def test_a_record_that_was_edited_is_refused(project, collect, artefacts, change):
    edit(project["flarepp"], change)
    for code, said in (collect(), artefacts()):
        assert code == 2 and "flarepp/B2-fp32-s0/metrics.json: was changed after the run ended; delete it" in said
    assert not Path("out").exists()


def test_a_record_without_its_digest_is_refused(project, collect, artefacts):
    edit(project["flarepp"], lambda result: None, digest=False)
    for code, said in (collect(), artefacts()):
        assert code == 2 and "flarepp/B2-fp32-s0/metrics.json: has no digest of itself" in said and "run again" in said


def test_a_metric_with_a_digest_made_up_disagrees_with_the_table(project, artefacts):
    """What remains, a record consistent in itself, `evaluate` finds: it computes the error from the weights."""
    result = record.read_json(project["flarepp"] / "metrics.json")
    result["metrics"]["last"] *= -1
    record.write_record(result, project["flarepp"])
    code, said = artefacts()
    assert code == 2 and "flarepp/B2-fp32-s0: last: got 0.03125, its record has -0.03125; delete records.csv" in said


def swap(first, second):
    shutil.move(first, first.with_name("aside"))
    shutil.move(second, first)
    shutil.move(first.with_name("aside"), second)


def test_swapped_folders_are_refused(project, collect, artefacts):
    swap(project["flare"], project["flarepp"])
    code, said = collect()
    assert code == 2 and "flare/B2-fp32-s0: holds another run than the planned one (mixer flarepp, scale quick" in said
    code, said = artefacts()
    assert code == 2 and "got" in said and "its record has" in said


def test_swapped_records_are_refused(project, collect):
    swap(project["flare"] / "metrics.json", project["flarepp"] / "metrics.json")
    code, said = collect()
    assert code == 2 and "flare/B2-fp32-s0: its record is of another spec than its spec.json" in said


def test_swapped_seeds_and_depths_are_refused(project, collect):
    plan = record.read_json(Path("plan.json"))
    entries = [leave("flare", 0.5, seed=seed) for seed in (1, 2)]
    record.write_json(plan | {"entries": entries}, Path("plan.json"))
    assert collect() == (0, "")
    swap(*(Path(entry["run"]) for entry in entries))
    code, said = collect()
    assert code == 2 and "s1: holds another run than the planned one" in said and "seed 2" in said


def test_a_run_that_is_gone_is_missed(project, collect, artefacts):
    shutil.rmtree(project["flare"])
    for code, said in (collect(), artefacts()):
        assert code == 2 and "flare/B2-fp32-s0/metrics.json: the run's record is missing" in said


def rewrite(change, digest=False):
    """Edit the table by hand, line by line; digest: make up one for what it became."""
    lines = Path("records.csv").read_text().splitlines()
    text = "\n".join(line for line in map(change, lines) if line is not None) + "\n"
    record._write_table(text, Path("records.csv")) if digest else Path("records.csv").write_text(text)


MADE_UP = "table1,,quick,pipe,Pipe,flarepp,FLARE++,ranked,2,,,,fp32,0,ok,generated,last,0.0001"


@pytest.mark.parametrize("change", [
    lambda line: f"{line}\n{MADE_UP}" if line.startswith("suite,") else line,
    lambda line: MADE_UP.replace(",ok,generated,last,0.0001", ",not affordable,,status,") if "/flare/" in line else line,
    lambda line: line.replace(",FLARE,", ",x,").replace(",FLARE++,", ",FLARE,").replace(",x,", ",FLARE++,"),
    lambda line: line.replace(",Darcy,", ",Elasticity,"),
    lambda line: line.replace(",FLARE,ranked,", ",FLARE,reference,"),
    lambda line: line.replace(",flare,FLARE,", ",flarex,FLARE,"),
    lambda line: None if "/flare/" in line else line,
    lambda line: None if "/flare/" in line and ",ema," in line else line,
    lambda line: line.replace(",0.03125", ",0.0001"),
], ids=["made up row", "not affordable", "labels", "dataset labels", "role", "name", "dropped model", "dropped row", "error"])
def test_a_table_that_was_edited_in_any_column_or_row_is_refused(artefacts, call, change):
    rewrite(change)
    joined = call("records", "--join", "records.csv", "--out", "joined.csv")
    words = "--records records.csv --out out --shown last --compared last --scale quick"
    judged = call("ledger", *words.split())
    for code, said in (artefacts(), joined, judged):
        assert code == 2 and said == "error: records.csv: was changed after it was collected; delete it and run again\n"
    assert not Path("out").exists() and not Path("joined.csv").exists()


def test_a_table_without_its_digest_is_refused(artefacts):
    Path("records.csv.sha256").unlink()
    code, said = artefacts()
    assert code == 2 and said == "error: records.csv: has no digest, records.csv.sha256; delete it and run again\n"


def test_joined_records_are_the_rows_of_all_under_one_header_with_the_usual_digest(project, call, artefacts):
    record.write_json(record.read_json(Path("plan.json")) | {"entries": [leave("flare", 0.5, seed=1)]}, Path("more.json"))
    assert call("records", "--plan", "more.json", "--out", "more.csv") == (0, "")
    first, more = (Path(name).read_text() for name in ("records.csv", "more.csv"))
    assert call("records", "--join", "records.csv", "more.csv", "--out", "joined.csv") == (0, "")
    assert Path("joined.csv").read_text() == first + more.split("\n", 1)[1] and more.count("\n") == 5
    assert Path("joined.csv.sha256").read_text() == f"{record.sha256(Path('joined.csv'))}  joined.csv\n"
    assert len(record.read_records(Path("joined.csv"))) == 20


def only(model, metric, change):
    """Change the line of one metric of a model."""
    return lambda line: change(line) if f"/{model}/" in line and f",{metric}," in line else line


@pytest.mark.parametrize("change, words", [
    (only("flarepp", "last", lambda line: line.replace(",0.03125", ",-0.03125")), "last: got -0.03125, its record"),
    (only("flarepp", "last", lambda line: line.replace(",0.03125", ",")), "last: got nan, its record has 0.03125"),
    (only("flarepp", "last", lambda line: None), "last: got 'no row', its record has 0.03125"),
    (only("flarepp", "last", lambda line: f"{line}\n{line}"), "a metric stands there more than once"),
    (only("flarepp", "ema", lambda line: line.replace(",ema,", ",best,")), "its record has"),
    (only("flarepp", "last", lambda line: line.replace(",ok,", ",diverged,")), "status: got 'diverged', its record"),
    (only("flarepp", "last", lambda line: line.replace(",generated,", ",published,")), "data_source: got 'published'"),
    (only("flarepp", "last", lambda line: line.replace(",quick,", ",paper,")), "scale: got 'paper', its record has 'quick'"),
    (only("flarepp", "last", lambda line: line.replace(",darcy,", ",pipe,")), "dataset: got 'pipe', its record has 'darcy'"),
    (only("flarepp", "last", lambda line: line.replace(",fp32,", ",fp16,")), "precision: got 'fp16', its record has 'fp32'"),
    (lambda line: line.replace(",flare,FLARE,", ",flarepp,FLARE++,"), "model: got 'flarepp', its record has 'flare'"),
])  # fmt: skip
def test_a_table_made_up_with_its_digest_is_checked_against_the_runs(artefacts, change, words):
    rewrite(change, digest=True)
    code, said = artefacts()
    assert code == 2 and "records.csv: results/quick/runs/table1/darcy/flare" in said and words in said, said
    assert not Path("out").exists()


@pytest.mark.parametrize("name, figure", [("predictions.h5", "error_distribution"), ("history.csv", "learning_curves")])
def test_files_that_are_not_as_the_run_left_them_are_refused(project, collect, call, name, figure):
    kept = {}
    damages = {"flarepp": lambda content: content[:-8] + b"12345678", "flare": lambda content: kept["flarepp"]}
    for model, damage in damages.items():
        path = project[model] / name
        kept[model] = path.read_bytes()
        path.write_bytes(damage(kept[model]))
        words = ("figure", figure, "--records", "records.csv", "--out", "out", "--shown", "last", "--scale", "quick")
        for code, said in (collect(), call(*words)):
            assert code == 2 and f"{model}/B2-fp32-s0/{name}: was changed after the run ended" in said
        path.write_bytes(kept[model])
    assert collect() == (0, "")


def test_changed_weights_are_refused(project, collect):
    (project["flare"] / "model.safetensors").write_bytes(b"other")
    code, said = collect()
    assert code == 2 and "flare/B2-fp32-s0/model.safetensors: was changed after the run ended" in said
    (project["flare"] / "model.safetensors").unlink()  # what is gone changed no number
    assert collect() == (0, "")


@pytest.fixture
def dataset(benchmark):
    """A dataset file and its card, as `data` leaves them; returns the file."""
    facts = {"label": "Darcy", "dimension": "2D", "structure": "unstructured", "grid": None, "rejected": 0}
    facts |= {"split": "first / last", "counts": {"train": 16, "test": 6, "points": 60}, "fingerprint": benchmark.fingerprint}
    store.write(benchmark, Path("data/darcy.h5"))
    record.write_with_digest(benchmark.card | facts, Path("data/darcy.json"))
    return Path("data/darcy.h5")


@pytest.fixture
def shown(call, dataset):
    """What Table 3 and Figure 2 say of the dataset."""
    return lambda: (call("table", "table3", "--cards", "data/darcy.json", "--out", "out", "--scale", "quick"),
                    call("figure", "figure2", "--stores", "data/darcy.h5", "--out", "out", "--scale", "quick"))  # fmt: skip


def test_a_card_that_was_edited_or_is_gone_is_refused(dataset, shown):
    assert shown() == ((0, ""), (0, "")) and Path("out/table3.md").exists() and Path("out/figure2.png").exists()
    card = record.read_json(dataset.with_suffix(".json"))
    for other, words in ((card | {"source": "published"}, "was changed after it was made"),
                         (record._without_digest(card), "has no digest of itself, as a dataset card has")):
        record.write_json(other, dataset.with_suffix(".json"))
        assert shown() == 2 * ((2, f"error: data/darcy.json: {words}; delete it and run again\n"),)
    dataset.with_suffix(".json").unlink()
    for code, said in shown():
        assert code == 2 and "data/darcy.json: the dataset card is missing; `snakemake data/darcy.json` makes" in said


@pytest.mark.parametrize("name", ["test/target", "test/features", "train/target", "norm/target"])
def test_a_dataset_file_that_was_edited_is_not_drawn(dataset, shown, name):
    with h5py.File(dataset, "r+") as file:
        file[name][0] = 7 * file[name][0] + 1
        file.attrs["fingerprint"] = record.fingerprint(record._arrays(file))  # made up: the card has the true one
    said = "error: data/darcy.h5: the arrays are not those of its card; delete both and run again\n"
    assert shown()[1] == (2, said) and not Path("out/figure2.png").exists()
