"""Table 6: the plan of its runs, the table from synthetic records, the claims about it, and one run by the command line."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy
import pandas
import pytest
import yaml
from snakemake.utils import update_config

from conftest import PROJECT
from flarepp import spec
from flarepp.data import lra
from flarepp.paper import claims, deviations, ledger, quoted, sequences, trace
from flarepp.paper.tables import table6
from flarepp.record import read_json, read_records, records, write_json, write_record

TASKS = ["listops", "text", "retrieval", "image", "pathfinder"]
DRAWN = ["listops", "pathfinder"]
CLAIMS = ["lra.average", "lra.best", "lra.tasks"]
LABELS = [row["model"] for row in quoted.rows("table6_lra")]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def plan_of(config, scale, **changes):
    config = copy.deepcopy(config) | {"scale": scale}
    for path, value in changes.items():
        *parents, last = path.split("__")
        section = config
        for key in parents:
            section = section[key]
        section[last] = value
    return spec.expand(config)


def left(plan, accuracy, *, source="published", status=None) -> pandas.DataFrame:
    """The records of a plan whose runs all ended, with accuracy(row, task, seed) as a fraction."""
    for entry in filter(lambda entry: entry["run"], plan.suites[spec.LRA]):
        run, value = (plan.classifiers | plan.predictors)[entry["run"]], accuracy(entry["model"], entry["dataset"], entry["seed"])
        ended = (status or {}).get((entry["model"], entry["dataset"]), "ok")
        names = ("last",) if entry["role"] == "trivial" else ("last", "ema", "selected", "dev_selected")
        metrics = {name: value + 0.01 * (name == "dev_selected") for name in names} if ended == "ok" else {"steps": 0}
        Path(run.path).mkdir(parents=True)
        write_json(run.spec, Path(run.path) / "spec.json")
        write_record({"status": ended, "message": "", "spec": run.spec, "metrics": metrics,
                      "provenance": {"dataset": {"source": source}}}, Path(run.path))
    return records(json.loads(plan.suite_json(spec.LRA)))


def printed(row, task, seed=0) -> float:
    """What the paper prints; of the baselines 15 %."""
    text, _ = quoted.table6(row, task)
    return float(text) / 100 if text else 0.15


def table_of(monkeypatch, frame, **options):
    """The table as a value, and its rows by label: {(group, heading): cell}."""
    kept = []
    monkeypatch.setattr(table6, "write", lambda table, data, out, name: kept.append((table, data)))
    table6.build(frame, Path("out"), **options)
    table, data = kept[0]
    names, rows = [column[:2] for column in table.columns], [row for block in table.blocks for row in block.rows]
    return table, {row[0].text: dict(zip(names, row)) for row in rows}, data


# --- the plan


def test_paper_plans_twenty_two_rows_on_five_tasks(config):
    plan = plan_of(config, "paper")
    runs = [path for path in plan.classifiers if "/table6/" in path]
    assert len(runs) == 22 * 5 and list(plan.tasks) == TASKS
    assert all(plan.classifiers[path].verb == "classify" and "src/flarepp/classify.py" in plan.classifiers[path].code for path in runs)
    assert [config["lra"]["mixers"][row]["label"] for row in config["lra"]["mixers"]] == LABELS
    run = plan.classifiers["results/paper/runs/table6/pathfinder/flarepp/B4-M128-fp32-s0"].spec
    assert (run["training"]["steps"], run["training"]["lr"], run["model"]["ffn_ratio"]) == (1_000_000, 3e-4, 1)
    assert not set(spec.OF_FIELDS) & set(run["training"]) and run["model"]["protocol"] == "strict"


@pytest.mark.parametrize("scale", ["smoke", "quick", "desk"])
def test_tasks_that_are_published_only_are_no_runs_elsewhere(config, scale):
    plan = plan_of(config, scale)
    assert list(plan.tasks) == DRAWN and len([path for path in plan.classifiers if "/table6/" in path]) == 44
    assert len([path for path in plan.predictors if "/table6/" in path]) == 4
    absent = [entry for entry in plan.suites[spec.LRA] if entry["absent"]]
    assert len(absent) == 66 and {entry["absent"] for entry in absent} == {"no data"}
    everything = plan_of(config, scale, lra__source="path")
    assert list(everything.tasks) == TASKS and "num_train" not in everything.tasks["listops"]
    origin = {"name": "text", "source": "path", "root": "data"}
    assert everything.tasks["text"] == origin | {"num_dev": 2500, "max_length": 4000, "seed": 0}


@pytest.mark.parametrize("path, value, words", [
    ("lra__protocol", "strickt", ["lra.protocol", "did you mean 'strict'"]),
    ("lra__source", "download", ["lra.source", "listops.py has no SOURCES", "generate, path"]),
    ("lra__tasks__listops__data__max_deph", 3, ["lra.tasks.listops.data", "did you mean 'max_depth'"]),
    ("lra__tasks__text__data__num_train", 3, ["lra.tasks.text.data", "num_train"]),
    ("lra__tasks__pathfindr", {"label": "P", "data": {"seed": 0}}, ["lra.tasks", "did you mean 'pathfinder'"]),
    ("lra__mixers__flare__mixer", "flair", ["lra.mixers.flare.mixer", "did you mean 'flare'"]),
    ("lra__mixers__flare__label", "FLARE++", ["label 'flare++' is given twice"]),
    ("lra__model__num_latens", 3, ["lra.model", "did you mean 'num_latents'"]),
    ("lra__training__gradient_weight", 1, ["training", "'gradient_weight' is unknown"]),
    ("lra__training__steps", 5, ["pct_start", "OneCycle"]),
    ("lra__mixers__flare__model", {"rank": 3}, ["lra.mixers.flare.model", "'rank' is unknown"]),
    ("lra__baselines__majorty", {"label": "M"}, ["lra.baselines", "did you mean 'majority'"]),
])
def test_what_cannot_run_is_refused_when_it_is_planned(config, path, value, words):
    with pytest.raises(ValueError) as error:
        plan_of(config, "quick", **{path: value})
    assert all(word in str(error.value) for word in words), error.value


def test_a_key_of_one_mixer_or_task_changes_its_runs_alone(config):
    before = {path: run.json for path, run in plan_of(config, "quick").classifiers.items()}
    for key, value, part in (("lra__mixers__flare__training", {"lr": 0.5}, "/flare/"),
                             ("lra__tasks__listops__data__seed", 1, "/listops/")):
        after = {path: run.json for path, run in plan_of(config, "quick", **{key: value}).classifiers.items()}
        changed = {path for path in after if after[path] != before[path]}
        assert changed == {path for path in before if "/table6/" in path and part in path}


def test_the_older_study_is_an_overlay(config):
    overlay = yaml.safe_load((PROJECT / "workflow/overlays/lra_study.yaml").read_text())
    update_config(config, overlay)
    runs = plan_of(config, "paper").classifiers.items()
    runs = {tuple(path.split("/")[4:6]): run.spec for path, run in runs if "/table6/" in path}
    assert len(runs) == 110 and {run["model"]["protocol"] for run in runs.values()} == {"authors"}
    assert [runs[task, "linformer_kv"]["training"]["lr"] for task in TASKS] == [5e-4, 5e-7, 4.2e-5, 1e-3, 1e-3]
    assert runs["text", "flare"]["training"]["steps"] == 20_000 and runs["image", "flare"]["model"]["num_latents"] == 256
    assert runs["text", "performer"]["model"]["as_flare_study"] and runs["text", "linear"]["model"]["unit_qk"]
    shared, apart = (runs["pathfinder", row]["model"] for row in ("linformer_kv", "linformer_heads"))
    assert shared | {"sharing": "heads"} == apart and apart["norm"] == "rmsnorm"


# --- the table


def test_the_papers_own_numbers_come_back_as_it_prints_them(config, monkeypatch):
    frame = left(plan_of(config, "paper"), printed)
    table, rows, data = table_of(monkeypatch, frame, scale="paper")
    assert table.stamp == "" and [block.title for block in table.blocks] == ["", "no learning, not ranked"]
    assert list(rows)[:22] == LABELS
    for row in quoted.rows("table6_lra"):
        found = [cell.text for (group, _), cell in rows[row["model"]].items() if group == "this project"]
        theirs = [cell.text for (group, _), cell in rows[row["model"]].items() if group == "paper"]
        assert found[:5] == theirs[:5] == [row[name] for name in ("listops", "text", "retrieval", "image", "pathfinder32")]
        assert theirs[5] == row["average"]
    averages = {label: cells["this project", "average"] for label, cells in rows.items()}
    assert averages["FLARE++"].bold and averages["Hedgehog"].underline and not averages["Full self-attention"].bold
    assert len(averages["FLARE++"].runs) == 5 and averages["Sinkhorn Transformer"].text == "51.48"
    notes = dict(table.notes)
    texts = {label: [notes[mark] for mark in cells["", "mixer"].marks] for label, cells in rows.items()}
    assert {label for label, said in texts.items() if table6.QUOTED in said} == {
        row["model"] for row in quoted.rows("table6_lra") if row["source"] == "quoted"}
    said = {label: [notes[mark] for mark in cells["paper", "average"].marks] for label, cells in rows.items()}
    assert {label: text for label, text in said.items() if text} == {
        "Sinkhorn Transformer": ["as printed; the mean of its numbers is 51.48"]}
    assert "Protocol strict" in table.caption and "on ListOps (n = 2,000)" in table.caption
    assert data.loc[(data["model"] == "flare") & (data["dataset"] == "average"), "difference_points"].abs().item() < 0.01


def test_a_column_without_data_and_rows_that_learned_nothing_are_named(config, monkeypatch):
    def accuracy(row, task, seed):
        return 0.1 if row == "local" else printed(row, task) + 0.01 * (row != "majority")

    frame = left(plan_of(config, "quick"), accuracy, source="generated", status={("reformer", "listops"): "diverged"})
    table, rows, _ = table_of(monkeypatch, frame, scale="quick")
    notes, own = dict(table.notes), "this project, scale quick"
    assert "not the paper's numbers" in table.stamp and "generated" in table.stamp
    empty = rows["FLARE"][own, "Text"]
    assert empty.text == "--" and [notes[mark] for mark in empty.marks] == ["no data"]
    assert {rows[label][own, "average"].text for label in LABELS} == {"--"}
    assert [notes[mark] for mark in rows["Reformer"][own, "ListOps"].marks] == ["diverged"]
    learned = {label: [notes[mark] for mark in cells["", "mixer"].marks] for label, cells in rows.items()}
    below = "not above the majority class on any task"
    assert [label for label, said in learned.items() if below in said] == ["Local attention"]
    assert not rows["Local attention"][own, "Pathfinder"].bold and "drawn by our own code" in table.caption
    assert rows["Majority class"][own, "ListOps"].text == "15.00" and rows["Majority class"]["paper", "ListOps"].text == ""
    assert "Text" not in table.caption.split("Data:")[1].split("Protocol")[0]


@pytest.mark.parametrize("beside, groups", [
    ("ours", {"", "this project, scale quick"}), ("paper", {"", "paper"}),
    ("difference", {"", "this project, scale quick", "difference to the paper (points)"}),
])
def test_the_switch_says_whose_numbers_are_shown(config, monkeypatch, beside, groups):
    frame = left(plan_of(config, "quick"), lambda *key: printed(*key) + 0.02, source="generated")
    table, rows, _ = table_of(monkeypatch, frame, scale="quick", beside=beside)
    assert {group for group, _, _ in table.columns} == groups
    if beside == "difference":
        found = [rows["FLARE"][table6.DIFFERENCE, label].text for label in ("ListOps", "Text")]
        assert found == ["+2.0", "--"]
    if beside == "paper":
        assert table.stamp == table6.PAPERS_ALONE and rows["FLARE++"]["paper", "Pathfinder"].bold and len(rows) == 22


def test_the_protocol_of_the_authors_shows_dev_accuracies_and_says_so(config, monkeypatch):
    frame = left(plan_of(config, "quick", lra__protocol="authors"), printed, source="generated")
    table, rows, data = table_of(monkeypatch, frame, scale="quick")
    assert rows["FLARE"]["this project, scale quick", "ListOps"].text == "37.85" and "Protocol authors" in table.caption
    assert set(data["protocol"]) == {"authors"}


def test_seeds_are_averaged_and_mixed_protocols_refused(config, monkeypatch):
    plan = plan_of(config, "quick", seeds=[0, 1])
    frame = left(plan, lambda row, task, seed: printed(row, task) + 0.01 * seed, source="generated")
    _, rows, _ = table_of(monkeypatch, frame, scale="quick")
    assert rows["FLARE"]["this project, scale quick", "ListOps"].text == "37.35 ± 0.71"
    (path,) = [path for path in plan.classifiers if "/table6/listops/flare/" in path and path.endswith("s1")]
    other = json.loads(plan.classifiers[path].json)
    other["model"]["protocol"] = "authors"
    write_record(read_json(Path(path) / "metrics.json") | {"spec": other}, Path(path))
    with pytest.raises(ValueError, match="authors and strict"):
        sequences.frame(frame)
    with pytest.raises(ValueError, match="scale 'paper' was asked for"):
        table6.build(frame, Path("out"), scale="paper")


def test_the_files_are_written_and_traced_to_runs(config):
    frame = left(plan_of(config, "quick"), printed, source="generated")
    results = Path("results/quick")
    table6.build(frame, results / "tables", scale="quick")
    assert all((results / f"tables/table6.{kind}").stat().st_size > 1000 for kind in ("tex", "csv", "md", "html"))
    lines = trace.trace("table6", ["listops", "flarepp"], results)
    assert "accuracy_percent: 38.0 (38.05)" in lines and "results/quick/runs/table6/listops/flarepp/B1-M16-fp32-s0" in lines
    assert "flarepp classify" in lines and "predictor" in trace.trace("table6", ["listops", "majority"], results)


def test_without_records_there_is_an_empty_table(config, monkeypatch):
    frame = records({"suite": "table6", "scale": "quick", "entries": []})
    table, rows, _ = table_of(monkeypatch, frame, scale="quick")
    assert rows == {} and "no data" in table.caption


# --- the claims


def judged(frame, scale="paper"):
    read = [claim for claim in claims.read() if claim["id"].startswith("lra.")]
    suites = {"table6": ledger.frame(frame, "table6", "last")}
    differing = {"table6": deviations.find(frame, "table6", scale)}
    return {claim["id"]: ledger.decide(claim, suites, differing, scale) for claim in read}


def test_the_papers_own_numbers_reproduce_its_claims(config):
    found = judged(left(plan_of(config, "paper"), printed))
    assert {name: row["verdict"] for name, row in found.items()} == dict.fromkeys(CLAIMS, "reproduced")
    assert found["lra.average"]["measured"] == "58.08 to 60.36 (+2.28) over 5 tasks, protocol strict"
    assert found["lra.best"]["measured"] == "FLARE++ 60.36, place 1 of 22; best other: Hedgehog 59.66, protocol strict"
    assert "Retrieval +0.2, Image +5.2" in found["lra.tasks"]["measured"]


@pytest.mark.parametrize("row, task, change, refuted", [
    ("hedgehog", "image", 0.05, {"lra.best"}), ("flare", "retrieval", 0.01, {"lra.tasks"}),
    ("flarepp", "image", -0.08, {"lra.average", "lra.best", "lra.tasks"}),
])
def test_other_numbers_refute_them(config, row, task, change, refuted):
    def accuracy(model, name, seed):
        return printed(model, name) + change * ((model, name) == (row, task))

    found = judged(left(plan_of(config, "paper"), accuracy))
    assert {name for name, each in found.items() if each["verdict"] == "not reproduced"} == refuted


def test_generated_data_other_scales_settings_and_missing_tasks_are_not_judged(config):
    found = judged(left(plan_of(config, "paper", lra__training__clip_norm=2), printed, source="generated"))
    settings = "settings differ: clipped gradient norm 2 (1), clipped gradient norm 2 (0.5)"
    assert {row["verdict"] for row in found.values()} == {f"not comparable (generated data, {settings})"}


def test_at_quick_the_averages_wait_for_the_missing_tasks(config):
    found = judged(left(plan_of(config, "quick"), printed, source="generated"), "quick")
    assert found["lra.average"]["verdict"] == found["lra.best"]["verdict"] == "not run"
    assert found["lra.average"]["measured"] == "missing: Text, Retrieval, Image"
    row = found["lra.tasks"]
    assert row["verdict"].startswith("not comparable (scale quick") and "ListOps +1.2" in row["measured"]


# --- one run


def test_the_verbs_make_a_task_and_its_runs(config, flarepp):
    plan = plan_of(config, "smoke")
    answer = flarepp("data", plan.dataset_json("listops"), "--store", "results/smoke/data/listops.h5", "--card", "card.json")
    assert answer.returncode == 0, answer.stderr
    assert read_json(Path("card.json"))["counts"] == {"train": 64, "dev": 16, "test": 16}
    assert lra.sequences.read("results/smoke/data/listops.h5").num_classes == 10
    known = plan.classifiers | plan.predictors
    chosen = [next(path for path in known if f"/listops/{row}/" in path) for row in ("flare", "majority")]
    for path in chosen:
        run = known[path]
        write_json(run.spec, Path(path) / "spec.json")
        answer = flarepp(run.verb, f"{path}/spec.json")
        assert answer.returncode == 0 and answer.stdout.splitlines()[-1].startswith("ok"), answer.stderr
    entries = [entry for entry in plan.suites[spec.LRA] if entry["run"] in chosen]
    frame = records({"suite": "table6", "scale": "smoke", "entries": entries})
    frame.to_csv("records.csv", index=False)
    found = sequences.frame(read_records(Path("records.csv")))
    assert list(found["model"]) == ["flare", "majority"] and found["mean"].between(0, 100).all()
    assert numpy.isfinite(found["mean"]).all()
    answer = flarepp("evaluate", chosen[0])
    assert answer.returncode == 2 and "predicts fields" in answer.stderr
