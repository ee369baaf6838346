"""Table 6: the plan of its runs, the table from synthetic records, the claims about it, and one run by the command line."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy
import pandas
import pytest
import torch
import yaml
from snakemake.utils import update_config

from conftest import PROJECT
from flarepp import spec
from flarepp.data import lra
from flarepp.models import build_model
from flarepp.paper import claims, deviations, ledger, quoted, sequences, trace
from flarepp.paper.tables import table6
from flarepp.record import read_json, read_records, records, write_json, write_record, write_records

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


def left(plan, accuracy, *, source="published", status=None, num_test=2000, shared=()) -> pandas.DataFrame:
    """The records of a plan whose runs all ended, with accuracy(row, task, seed) as a fraction; on the tasks `shared` the dev
    split is the test split."""
    for entry in filter(lambda entry: entry["run"], plan.suites[spec.LRA]):
        run, value = (plan.classifiers | plan.predictors)[entry["run"]], accuracy(entry["model"], entry["dataset"], entry["seed"])
        ended = (status or {}).get((entry["model"], entry["dataset"]), "ok")
        names = ("last", "dev_last") if entry["role"] == "trivial" else ("last", "ema", "selected", "dev_selected")
        metrics = {name: value + 0.01 * name.startswith("dev") for name in names} if ended == "ok" else {"steps": 0}
        Path(run.path).mkdir(parents=True)
        write_json(run.spec, Path(run.path) / "spec.json")
        write_record({"status": ended, "message": "", "spec": run.spec, "metrics": metrics,
                      "provenance": {"dataset": {"source": source, "num_test": num_test, "num_dev": num_test // 4,
                                                 "dev_is_test": entry["dataset"] in shared}}},
                     Path(run.path))
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
    ("lra__tasks__text__label", "listops ", ["lra.tasks: the label 'listops' is given twice"]),
    ("lra__mixers__linear__model", {"feature_map": "relu"}, ["feature_map", "relu", "elu"]),
    ("lra__mixers__nystromformer__model", {"conv_kernel": 4}, ["conv_kernel", "4"]),
    ("lra__mixers__sinkhorn__model", {"temperature": 0}, ["temperature", "0"]),
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


# The table of its script in the FLARE study, task by task as TASKS.
STUDY = {
    "full": {
        ("model", "num_heads"): [8, 8, 4, 4, 8], ("model", "ffn_ratio"): [4, 4, 4, 2, 1], ("model", "num_blocks"): [4, 4, 4, 3, 4],
        ("model", "norm"): ["layernorm"] * 4 + ["rmsnorm"], ("model", "block_dropout"): [0, 0, 0, 0, 0.05],
        ("model", "embedding_dropout"): [0, 0, 0, 0, 0.05], ("model", "head_dropout"): 0,
        ("model", "pooling"): ["mean", "cls", *["mean"] * 3],
        ("training", "lr"): [5e-4, 1e-5, 5e-4, 1e-3, 6e-4], ("training", "weight_decay"): [1e-5, 1e-4, 1e-4, 5e-2, 1.5e-4],
        ("training", "batch_size"): [32, 32, 32, 32, 64], ("training", "clip_norm"): 1, ("training", "pct_start"): 0.1,
    },
    "linear": {
        ("model", "num_heads"): [8, 8, 4, 4, 8], ("model", "unit_qk"): True, ("model", "norm"): ["layernorm"] * 4 + ["rmsnorm"],
        ("model", "feature_map"): ["identity", "elu", "identity", "identity", "elu"], ("model", "block_dropout"): 0,
        ("training", "lr"): [5e-4, 1e-5, 5e-4, 1e-3, 5e-4], ("training", "weight_decay"): [1e-5, 1e-4, 1e-4, 5e-2, 1e-4],
        ("training", "clip_norm"): [1, 1, 1, 1, 0.5], ("training", "batch_size"): 32,
    },
    "linformer_kv": {
        ("model", "num_latents"): [128, 128, 128, 256, 256], ("model", "norm"): ["layernorm"] * 4 + ["rmsnorm"],
        ("training", "lr"): [5e-4, 5e-7, 4.2e-5, 1e-3, 1e-3], ("training", "weight_decay"): [1e-5, 5e-3, 1e-6, 5e-2, 1e-4],
        ("training", "clip_norm"): 1, ("training", "batch_size"): [32, 32, 32, 32, 64], ("model", "block_dropout"): 0,
    },
    "performer": {
        ("model", "as_flare_study"): True, ("model", "num_features"): 256, ("model", "block_dropout"): [0, 0, 0, 0.1, 0.1],
        ("model", "embedding_dropout"): 0, ("training", "lr"): [5e-4, 1e-5, 5e-4, 1e-3, 5e-4],
        ("training", "weight_decay"): [1e-5, 1e-4, 1e-4, 5e-2, 5e-4], ("training", "clip_norm"): [1, 1, 1, 1, 0.5],
    },
    "norm_attention": {
        ("model", "as_flare_study"): True, ("model", "block_dropout"): [0, 0, 0, 0.1, 0.1], ("model", "norm"): "layernorm",
        ("model", "embedding_dropout"): [0, 0, 0, 0, 0.1], ("training", "lr"): [5e-4, 1e-5, 5e-4, 1e-3, 1e-5],
        ("training", "weight_decay"): [1e-5, 1e-4, 1e-4, 5e-2, 1e-5], ("training", "clip_norm"): [1, 1, 1, 1, 0.5],
    },
    "flare": {
        ("model", "num_heads"): 8, ("model", "num_latents"): [128, 128, 128, 256, 128], ("model", "block_dropout"): [0, 0, 0, 0, 0.1],
        ("model", "embedding_dropout"): [0, 0, 0, 0, 0.1], ("training", "lr"): [5e-4, 1e-5, 5e-4, 1e-3, 5e-4],
        ("training", "weight_decay"): [1e-5, 1e-4, 1e-4, 5e-2, 5e-4], ("training", "steps"): [10_000, 20_000, 10_000, 20_000, 1_000_000],
        ("training", "clip_norm"): [1, 1, 1, 1, 0.5], ("model", "norm"): "layernorm",
    },
}  # fmt: skip


def test_the_older_study_is_an_overlay(config):
    overlay = yaml.safe_load((PROJECT / "workflow/overlays/lra_study.yaml").read_text())
    update_config(config, overlay)
    runs = plan_of(config, "paper").classifiers.items()
    runs = {tuple(path.split("/")[4:6]): run.spec for path, run in runs if "/table6/" in path}
    assert len(runs) == 110 and {run["model"]["protocol"] for run in runs.values()} == {"authors"}
    for row, values in STUDY.items():
        for (section, key), expected in values.items():
            found = [runs[task, row][section].get(key) for task in TASKS]
            assert found == (expected if isinstance(expected, list) else [expected] * 5), (row, key)
    shared, apart = (runs["pathfinder", row]["model"] for row in ("linformer_kv", "linformer_heads"))
    assert shared | {"sharing": "heads"} == apart and apart["norm"] == "rmsnorm"


@pytest.mark.parametrize("row", LABELS)
def test_every_classifier_of_reviews_sees_their_last_byte(config, row):
    name = next(key for key, mixer in config["lra"]["mixers"].items() if mixer["label"] == row)
    run = next(run for path, run in plan_of(config, "paper").classifiers.items() if f"/table6/text/{name}/" in path)
    torch.manual_seed(0)
    length = 1499  # with the class token whole blocks, whose last tokens the Sparse Transformer passes on
    model = build_model(**run.spec["model"], in_dim=257, out_dim=2, seq_len=length).eval()
    seen = []
    model.token_embedding.register_forward_hook(lambda module, _, x: (seen.append(x), x.retain_grad())[0])
    model(torch.randint(1, 257, (1, 1, length)))[0, 0].backward()
    assert seen[0].grad[0, -1].abs().max() > 0


# --- the table


def test_the_papers_own_numbers_come_back_as_it_prints_them(config, monkeypatch):
    frame = left(plan_of(config, "paper"), printed)
    table, rows, data = table_of(monkeypatch, frame, scale="paper")
    assert "settings differ" in table.stamp and [block.title for block in table.blocks] == ["", "no learning, not ranked"]
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
    below = table6.NOTHING_LEARNED
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
    assert set(data["protocol"]) == {"authors"} and rows["Majority class"]["this project, scale quick", "ListOps"].text == "16.00"


@pytest.mark.parametrize("protocol, num_test, majority", [("strict", 400, 0.15), ("authors", 1600, 0.16)])
def test_what_is_within_chance_of_the_majority_is_not_ranked(config, monkeypatch, protocol, num_test, majority):
    error = numpy.sqrt(majority * (1 - majority) / 400)  # of 400 samples, test or dev
    above = {"flare": 1.9, "flarepp": 2.1}

    def accuracy(row, task, seed):
        return 0.15 + error * above.get(row, 0)

    frame = left(plan_of(config, "quick", lra__protocol=protocol), accuracy, source="generated", num_test=num_test)
    table, rows, data = table_of(monkeypatch, frame, scale="quick")
    own = "this project, scale quick"
    assert rows["FLARE++"][own, "ListOps"].bold and not rows["FLARE"][own, "ListOps"].underline
    ranked = data[data["rank"].notna()]
    assert set(ranked["model"]) == {"flarepp"} and "on ListOps (n = 400)" in table.caption


def test_a_dev_split_that_is_the_test_split_is_named(config, monkeypatch):
    table, _, _ = table_of(monkeypatch, left(plan_of(config, "paper"), printed, shared=["text"]), scale="paper")
    assert "On Text the dev split is the test split." in table.caption
    table, _, _ = table_of(monkeypatch, left(plan_of(config, "quick"), printed, source="generated"), scale="quick")
    assert "dev split is" not in table.caption


@pytest.mark.parametrize("tasks", [["listops", "pathfinder"], ["listops"]])
def test_averages_of_other_tasks_than_the_papers_stand_alone(config, monkeypatch, tasks):
    frame = left(plan_of(config, "quick"), printed, source="generated")
    _, rows, data = table_of(monkeypatch, frame[frame["dataset"].isin(tasks)], scale="quick")
    own, mean = "this project, scale quick", numpy.mean([100 * printed("flare", task) for task in tasks])
    assert rows["FLARE"][own, f"average of these {len(tasks)}"].text == f"{mean:.2f}"
    assert ("paper", "average") not in rows["FLARE"] and not any("average" in name for group, name in rows["FLARE"] if group == "paper")
    averages = data[data["dataset"] == "average"]
    assert set(averages["paper_accuracy_percent"]) == {""} and averages[["difference_points", "parameters"]].isna().all(axis=None)


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


def judged(frame, scale="paper", differing=None):
    """The ledger's entries about Table 6; of runs with other settings than the paper's unless `differing` says otherwise."""
    read = [claim for claim in claims.read() if claim["id"].startswith("lra.")]
    suites = {"table6": ledger.frame(frame, "table6", "last")}
    differing = {"table6": deviations.find(frame, "table6", scale) if differing is None else differing}
    return {claim["id"]: ledger.decide(claim, suites, differing, scale) for claim in read}


def test_the_papers_own_numbers_reproduce_its_claims(config):
    found = judged(left(plan_of(config, "paper"), printed), differing={})
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

    found = judged(left(plan_of(config, "paper"), accuracy), differing={})
    assert {name for name, each in found.items() if each["verdict"] == "not reproduced"} == refuted


def test_generated_data_are_not_judged(config):
    found = judged(left(plan_of(config, "paper"), printed, source="generated"), differing={})
    assert {row["verdict"] for row in found.values()} == {"not comparable (generated data)"}


ALWAYS = {  # what no run of ours has as the authors' script, and the mixed precision that ours leave out
    "listops": ["dropout of attention weights none (0.05)", "precision fp32 (fp16)"],
    "text": ["dropout of attention weights none (0.08)", "positions learned (rotary)", "precision fp32 (fp16)"],
    "retrieval": ["precision fp32 (fp16)"],
    "image": ["dropout of attention weights none (0.08)"],
    "pathfinder": ["dropout of attention weights none (0.11)"],
}


def test_runs_say_what_they_have_other_than_the_authors_script(config):
    plan = plan_of(config, "paper", lra__protocol="authors")
    found = deviations.find(left(plan, printed), "table6", "paper")
    for task in TASKS:
        assert sorted(next(texts for run, texts in found.items() if f"/{task}/flarepp/" in run)) == ALWAYS[task]
    assert "pooling mean (cls)" in next(texts for run, texts in found.items() if "/text/local/" in run)


@pytest.mark.parametrize("path, value, words", [
    ("lra__protocol", "strict", "protocol strict (authors)"), ("lra__training__clip_norm", 2, "clipped gradient norm 2 (1)"),
    ("lra__model__embedding_dropout", 0.9, "dropout of embeddings 0.9 (0)"), ("lra__training__ema_decay", 0.9, None),
])
def test_a_setting_of_ones_own_is_named(config, path, value, words):
    plan = plan_of(config, "paper", **{"lra__protocol": "authors"} | {path: value})
    found = deviations.find(left(plan, printed), "table6", "paper")
    texts = {task: next(texts for run, texts in found.items() if f"/{task}/flarepp/" in run) for task in TASKS}
    assert sorted(texts["listops"]) == sorted(ALWAYS["listops"] + ([words] if words else []))
    assert ("decay of the averaged weights 0.9 (0.999)" in texts["pathfinder"]) == (words is None)


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
    write_records(frame, Path("records.csv"))
    found = sequences.frame(read_records(Path("records.csv")))
    assert list(found["model"]) == ["flare", "majority"] and found["mean"].between(0, 100).all()
    assert numpy.isfinite(found["mean"]).all()
    answer = flarepp("evaluate", chosen[0])
    assert answer.returncode == 2 and "predicts fields" in answer.stderr
