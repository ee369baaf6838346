"""The verb `plan`: states, times, memory and disk of what would run, against what a run really takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clone import clone
from flarepp import calibration, forecast, record
from flarepp.data import store
from flarepp.forecast import Forecast, Job, facts_of, jobs_of, line, wall
from flarepp.spec import expand
from flarepp.status import identity
from test_pipeline import snakemake

RUN = "results/smoke/runs/table1/darcy/flare/B1-M8-fp32-s0"


# --- times at other sizes, and on several cores


@pytest.mark.parametrize("points, at, expected", [
    ([(10, 2.0)], 20, 4.0),  # one place: in proportion
    ([(10, 2.0), (30, 4.0)], 20, 3.0), ([(10, 2.0), (30, 4.0)], 50, 6.0), ([(10, 2.0), (30, 4.0)], 10, 2.0),
    ([(10, 2.0), (30, 4.0)], 5, 1.5), ([(10, 2.0), (11, 1.0)], 22, 2.0),  # places so near that they are one
    ([(10, 2.0), (30, 2.0)], 60, 3.0),  # it seems to cost nothing: half of proportion
])  # fmt: skip
def test_the_line_through_two_places(points, at, expected):
    assert line(points, at) == pytest.approx(expected)


def job(name, seconds, threads=1, after=()):
    return Job(name, "train", "table1", "missing", threads, after=set(after), seconds=seconds)


@pytest.mark.parametrize("jobs, cores, expected", [
    ([job("a", 10), job("b", 10), job("c", 10)], 2, 20), ([job("a", 10), job("b", 10), job("c", 10)], 3, 10),
    ([job("a", 10), job("b", 3, 2)], 2, 13), ([job("a", 10), job("b", 3, 8)], 2, 13),  # more threads than cores: all
    ([job("a", 10), job("b", 3, after="a")], 2, 13), ([job("b", 3, after=["not asked for"])], 1, 3), ([], 2, 0),
])  # fmt: skip
def test_the_time_on_several_cores(jobs, cores, expected):
    assert wall(jobs, cores) == expected


def test_sizes_of_the_published_datasets(config):
    config["scale"] = "paper"
    plan = expand(config)
    points = {name: facts_of(data, {})["tokens"] for name, data in plan.datasets.items()}
    assert points == {"elasticity": 972, "darcy": 7225, "airfoil": 11271, "pipe": 16641, "drivaerml": 40000}
    facts = {name: facts_of(data, {"data": {record.digest(data): {}}}) for name, data in plan.tasks.items()}
    assert facts["retrieval"]["evaluated"] == [18090, 17437] and facts["retrieval"]["documents"] == 2
    assert facts["text"]["evaluated"] == [2500, 25000] and facts["image"]["tokens"] == 1024
    assert facts["listops"]["samples"] == 100_000 and facts["pathfinder"]["evaluated"] == [20000, 20000]


# --- which jobs, and where they stand


def rows(*files):
    return [dict(zip(("output_file", "rule", "status", "plan"), file)) for file in files]


def test_jobs_and_their_states(config):
    config["scale"] = "smoke"
    plan = expand(config)
    curve, new, old = next(path for path in plan.curves), "update pending", "no update"
    other = RUN.replace("/flare/", "/flarepp/")
    jobs = {job.name: job for job in jobs_of(plan, rows(
        (f"{RUN}/metrics.json", "train", "ok", new), (f"{RUN}/history.csv", "train", "missing", new),
        (f"{other}/metrics.json", "train", "params changed", new), ("results/smoke/data/darcy.h5", "dataset", "ok", old),
        (f"{curve}/spec.json", "cost", "ok", old), (f"{curve}/N64/metrics.json", "cost", "ok", old),
        ("results/smoke/tables/table1.tex", "table1", "missing", new),
        ("results/smoke/records/table1.csv", "suite_records", "missing", new)), cores=4)}
    assert {name: (job.suite, job.state, job.threads) for name, job in jobs.items()} == {
        RUN: ("table1", "missing", 1), other: ("table1", "stale", 1), "darcy": ("data", "done", 1), curve: ("figure5", "done", 4),
        "table1": ("paper", "missing", 1)}
    assert jobs[RUN].after == {"darcy"} and jobs["table1"].after == {RUN, other, "darcy", curve}
    assert jobs[RUN].file == f"{RUN}/metrics.json" and jobs[curve].file == f"{curve}/N64/metrics.json"


def test_paper_plans_all_runs_of_table6(config):
    config["scale"] = "paper"
    plan = expand(config)
    assert len(plan.classifiers) == 22 * 5
    files = rows(*((f"{path}/metrics.json", "train", "missing", "update pending") for path in plan.classifiers))
    jobs = jobs_of(plan, files, cores=8)
    known = {"data": {record.digest(data): {"tokens": 2000, "lengths": [2000], "symbols": 15, "classes": 10, "documents": 1}
                      for data in plan.tasks.values()}}
    facts = {name: facts_of(task, known) for name, task in plan.tasks.items()}
    units = [unit for job in jobs for unit in forecast.units_of(job, facts[job.run.spec["dataset"]["name"]], "cpu")]
    assert len(units) == 110 and {unit["tokens"] for unit in units} == {1024, 2000, 4000}
    assert len({forecast.class_of(unit) for unit in units}) == 42  # 21 mixers, wide and at half the width for pictures


def test_devices_are_of_runs_that_may_use_them(config):
    config["scale"] = "smoke"
    config["defaults"]["training"] |= {"device": "cpu", "data_parallel": 2}
    plan = expand(config)
    curve = next(iter(plan.curves))
    plan.curves[curve].spec["cost"]["device"] = "auto"
    found = {found.name: (found.ranks, found.devices) for found in jobs_of(plan, rows(
        (f"{RUN}/metrics.json", "train", "missing", "update pending"),
        (f"{curve}/N64/metrics.json", "cost", "missing", "update pending")), cores=4)}
    assert found == {RUN: (2, 0), curve: (1, 1)}


# --- what is kept

FACTS = {"device": "A device", "device_type": "cpu", "cores": 2, "devices": 0, "torch": "2.0"}
LITTLE = {"seconds": 1.0, "memory_mb": 1.0, "tokens": 4, "bytes": 1.0}


@pytest.fixture
def measured(monkeypatch, tmp_path) -> list[str]:
    """The stages that were measured, of which nothing is; in an empty folder."""
    stages: list[str] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(calibration, "device_of", lambda device: dict(FACTS))
    monkeypatch.setattr(calibration, "measure",
                        lambda stage, items, *_, **__: stages.append(stage) or {key: dict(LITTLE) for key in items})
    return stages


def test_nothing_is_reused_of_another_pytorch_or_number_of_cores(config, measured, monkeypatch):
    config["scale"] = "smoke"
    plan = expand(config)
    jobs = jobs_of(plan, rows(("results/smoke/data/darcy.h5", "dataset", "missing", "update pending")), cores=2)
    monkeypatch.setattr("os.getloadavg", lambda: (7.0, 0, 0))
    assert forecast.calibrated(plan, jobs, "cpu")[0].known["load"] == 7 and measured == ["start", "data"]
    monkeypatch.setattr("os.getloadavg", lambda: (0.5, 0, 0))
    assert forecast.calibrated(plan, jobs, "cpu")[0].known["load"] == 7 and measured == ["start", "data"]
    for change in ({"torch": "2.1"}, {"cores": 3}):
        measured.clear()
        monkeypatch.setitem(FACTS, *change.popitem())
        assert forecast.calibrated(plan, jobs, "cpu")[0].known["load"] == 0.5 and measured == ["start", "data"]


def test_only_a_plan_of_everything_is_kept_for_the_time_left(config, measured, monkeypatch):
    config["scale"] = "smoke"
    monkeypatch.setattr(forecast, "configuration", lambda *_: config)
    darcy = rows(("results/smoke/data/darcy.h5", "dataset", "missing", "update pending"))
    monkeypatch.setattr(forecast, "summary", lambda *_: darcy)
    kept = Path("results/smoke/plan.json")
    for targets, cores, device in ((["table1"], None, "auto"), ([], 64, "auto"), ([], None, "cpu")):
        forecast.forecast(targets, [], [], None, cores, device)
        assert not kept.exists()
    found = forecast.forecast([], [], [], None, None, "auto")
    assert record.read_json(kept)["of"] == identity(expand(config)) and record.read_json(kept)["total"] == found["total"]


def test_a_plan_without_training_runs_is_refused(config):
    plan = expand(config)
    plan.runs.clear()
    with pytest.raises(ValueError, match="suites: none trains"):
        forecast.starts_of(plan, [], 1)


# --- against reality


def test_the_forecast_of_a_run_is_what_it_takes(run_spec, tmp_path):
    """Measured at 64 and 640 tokens, predicted and run at 320."""
    run_spec["training"] |= {"steps": 400, "num_evaluations": 4}
    unit = {"verb": "train", "model": run_spec["model"], "training": run_spec["training"], "device": "cpu"}
    units = {tokens: unit | {"tokens": tokens} for tokens in (64, 320, 640)}
    counts = calibration.measure("counts", {forecast.count_key(unit): unit for unit in units.values()}, 1)
    steps = calibration.measure("steps", {str(tokens): units[tokens] for tokens in (64, 640)}, 1, apart=True)
    assert {found["tokens"] for found in steps.values()} == {64, 640} and steps["640"]["seconds"] > steps["64"]["seconds"]
    points = {forecast.class_of(unit): [found | {"rows": forecast._rows(unit, found["tokens"])} for found in steps.values()]}
    start = calibration._start({"verb": "train", "copies": 1, "spec": run_spec | {"training": run_spec["training"] | {"steps": 4}}})
    predicted = Forecast({"counts": counts, "start": {"train": start}}, points)
    job = Job("run", "train", "table1", "missing", 1, devices=1)
    predicted._fill_training(job, {"tokens": 320, "evaluated": [0, 6]}, units[320])
    store.write(calibration.random_benchmark(320, 16, 6), tmp_path / "store.h5")
    record.write_json(run_spec, tmp_path / "run/spec.json")
    words = ["-m", "flarepp", "train", str(tmp_path / "run/spec.json"), "--data", str(tmp_path / "store.h5")]
    ((_, took),) = calibration._ended([words], tmp_path)  # of computing: other tests run beside it
    metrics = record.read_run(tmp_path / "run")[1]["metrics"]
    left = sum(path.stat().st_size for path in (tmp_path / "run").iterdir())
    assert took > 1.3 * start["seconds"] and 0.65 < job.seconds / took < 1.35
    assert 0.8 < job.memory_mb / metrics["peak_memory_mb"] < 1.25
    assert 0.6 < job.bytes / left < 1.6
    assert counts[forecast.count_key(units[320])]["parameters"] == metrics["parameter_count"]


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """The project as a clone holds it."""
    return clone(tmp_path_factory.mktemp("plan") / "a path with spaces")


def test_plan_runs_nothing_and_follows_what_was_run(copy, flarepp):
    def planned(*words):
        answer = flarepp("plan", "--scale", "smoke", f"{RUN}/metrics.json", *words, cwd=copy)
        assert answer.returncode == 0, answer.stderr
        return answer.stdout

    first = json.loads(planned("--json"))
    (file,) = (copy / "results/calibration").glob("*.json")
    assert not (copy / RUN).exists() and not (copy / "results/smoke/data").exists()
    assert first["to_do"]["missing"] == 2 and {job["name"] for job in first["jobs"]} == {RUN, "darcy"}
    assert first["suites"]["table1"]["seconds"] > 1 and first["wall_to_do_s"] > first["suites"]["table1"]["seconds"]
    assert snakemake(copy, "--config", "scale=smoke", "--", f"{RUN}/metrics.json").returncode == 0
    kept = file.read_bytes()
    second = json.loads(planned("--json", "--config", "tensorboard=True"))  # what no spec holds re-runs nothing
    assert second["total"]["done"] == 2 and second["wall_to_do_s"] == 0 and file.read_bytes() == kept  # nothing is measured twice
    assert second["suites"]["table1"]["done_took_s"] > 0
    assert not (copy / "results/smoke/plan.json").exists()  # nor is one of a part of it kept
    source = copy / "src/flarepp/mixers/flare.py"
    source.write_text(source.read_text() + "\n# an edit\n")
    assert "table1       1       0        1          0" in planned()


@pytest.mark.parametrize("words, said", [(("tabel1",), "tabel1"), (("--config", "shown_error=lst"), "did you mean 'last'"),
                                         (("--scale", "smok"), "did you mean 'smoke'"),
                                         (("--config", "table1"), "Unparsable value: 'table1'"),
                                         (("--configfile", "none.yaml"), "none.yaml")])  # fmt: skip
def test_what_cannot_be_planned_is_one_line(copy, flarepp, words, said):
    answer = flarepp("plan", *words, cwd=copy)
    assert answer.returncode == 2 and said in answer.stderr and answer.stderr.count("\n") == 1, answer.stderr
