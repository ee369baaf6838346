"""The verb `status`: where runs stand, read from folders alone."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from pathlib import Path

import pytest
import torch

from flarepp import record, train
from flarepp.spec import expand
from flarepp.status import State, TimeLeft, held, identity, progress_of, seconds_left, shown, span, states


@pytest.fixture
def plan(config, tmp_path, monkeypatch):
    """The plan of scale smoke, in an empty working folder."""
    monkeypatch.chdir(tmp_path)
    config["scale"] = "smoke"
    return expand(config)


def folder_of(plan, part: str):
    return next(path for path in plan.trained if part in path)


def one(plan, name: str) -> State:
    return next(state for state in states(plan) if state.name == name)


def leave(path: str, spec: dict) -> None:
    record.write_json(spec, f"{path}/spec.json")
    record.write_record({"status": "ok", "message": "", "metrics": {}, "spec": spec, "provenance": {}}, path)


def checkpoint(path: str, steps: int, seconds: float, age: float) -> None:
    """As `loop.save_checkpoint` writes it, so long ago."""
    progress = {"steps": steps, "seconds": seconds, "best_test": float("inf"), "history": [{"step": 1}]}
    torch.save({"model": torch.nn.Linear(1, 1).state_dict(), "progress": progress}, f"{path}/checkpoint-abc.pt")
    os.utime(f"{path}/checkpoint-abc.pt", (time.time() - age,) * 2)


def test_nothing_is_there_at_first(plan):
    found = states(plan)
    assert {state.state for state in found} == {"missing"}
    suites = {"data": 7, "table1": 12 * 5 - 2 + 15, "table2": 4, "figure5": 8, "table6": 48}  # each cell of a curve
    assert {suite: sum(state.suite == suite for state in found) for suite in suites} == suites
    assert len({state.name for state in found}) == len(found)


def test_a_record_is_done_and_one_of_another_spec_is_stale(plan):
    first, second = folder_of(plan, "table1/darcy/flare/"), folder_of(plan, "table6/listops/flare/")
    leave(first, plan.runs[first].spec)
    leave(second, plan.classifiers[second].spec | {"scale": "desk"})
    assert one(plan, first) == State(first, "table1", "done")
    assert one(plan, second) == State(second, "table6", "stale")


def test_a_cell_of_a_curve_is_done_by_its_own_spec(plan):
    curve = next(path for path in plan.curves if "/flare/" in path)
    spec = plan.curves[curve].spec
    leave(f"{curve}/N64", spec | {"cost": spec["cost"] | {"num_tokens": 64}})
    leave(f"{curve}/N128", spec | {"cost": spec["cost"] | {"num_tokens": 64}})
    assert [one(plan, f"{curve}/N{tokens}").state for tokens in (64, 128)] == ["done", "stale"]


def test_a_held_lock_means_running_with_the_step_of_the_checkpoint(plan):
    path = folder_of(plan, "table1/darcy/flare/")
    record.write_json(plan.runs[path].spec, f"{path}/spec.json")
    checkpoint(path, steps=3, seconds=30, age=10)
    with open(f"{path}/.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert held(Path(path) / ".lock")
        state = one(plan, path)
        assert state.state == "running" and state.note == "step 3 of 12, 10 s ago"
        assert state.left_s == pytest.approx(10 * 9 - 10, abs=1)
        assert f"running {path}: step 3 of 12, 10 s ago, 80 s left" in shown(plan, [state])
    assert not held(Path(path) / ".lock")


def test_what_stopped_says_where_or_why(plan):
    failed, killed = folder_of(plan, "table1/darcy/flare/"), folder_of(plan, "table1/darcy/flarepp/")
    for path in (failed, killed):
        record.write_json({}, f"{path}/spec.json")
        (Path(path) / "train.log").write_text("step 1: loss 1\nRuntimeError: the reason\n\n")
    checkpoint(killed, steps=6, seconds=6, age=100)
    assert one(plan, failed).note == "RuntimeError: the reason"
    assert one(plan, killed).note == "step 6 of 12, 100 s ago"
    assert {one(plan, path).state for path in (failed, killed)} == {"stopped"}
    text = shown(plan, states(plan))
    assert f"stopped {failed}: RuntimeError: the reason" in text.splitlines()


def dataset_states(plan) -> dict[str, State]:
    return {state.name: state for state in states(plan) if state.suite == "data"}


def test_a_dataset_is_done_by_its_card_and_runs_by_its_log(plan):
    card, log = Path("results/smoke/data/darcy.json"), Path("results/smoke/logs/data/darcy.log")
    log.parent.mkdir(parents=True)
    log.write_text("darcy:   0%|  | 0/32\rdarcy:  50%|##| 16/32")
    assert dataset_states(plan)["darcy"] == State("darcy", "data", "running", "darcy:  50%|##| 16/32")
    os.utime(log, (time.time() - 100,) * 2)
    assert dataset_states(plan)["darcy"] == State("darcy", "data", "stopped", "darcy:  50%|##| 16/32")
    counts, cars = ({key: plan.datasets[name].get(f"num_{key}", 841) for key in ("train", "test", "points")}
                    for name in ("darcy", "drivaerml"))
    for source, found, state in (("generated", counts, "done"), ("generated", counts | {"train": 1}, "stale"),
                                 ("published", counts, "stale")):
        record.write_json({"source": source, "counts": found}, card)
        assert dataset_states(plan)["darcy"].state == state
    record.write_json({"source": "stand-in", "counts": cars}, card.with_name("drivaerml.json"))
    assert dataset_states(plan)["drivaerml"].state == "done"
    assert dataset_states(plan)["pipe"] == State("pipe", "data", "missing")


def test_the_checkpoint_of_a_real_run_is_read(run_spec, dataset, tmp_path, monkeypatch):
    run_spec["training"]["checkpoint_seconds"] = 0
    step, taken = train.training_step, []

    def dies(run):
        taken.append(1)
        if len(taken) == 6:
            raise KeyboardInterrupt
        return step(run)

    monkeypatch.setattr(train, "training_step", dies)
    with pytest.raises(KeyboardInterrupt):
        train.train(run_spec, dataset, tmp_path / "run")
    (saved,) = (tmp_path / "run").glob("checkpoint-*.pt")
    steps, seconds = progress_of(saved)
    assert steps == 5 and 0 < seconds < 300


def test_files_that_go_while_they_are_read_are_no_error(plan, monkeypatch):
    path = folder_of(plan, "table1/darcy/flare/")
    record.write_json({}, f"{path}/spec.json")
    (Path(path) / "train.log").symlink_to("gone")
    (Path(path) / "checkpoint-abc.pt").symlink_to("gone")
    monkeypatch.setattr(Path, "exists", lambda self, **_: os.path.lexists(self))  # there when it is looked for
    assert one(plan, path) == State(path, "table1", "stopped", "")


@pytest.mark.parametrize("content", [b"", b"PK", b"no archive at all" * 100])
def test_a_damaged_checkpoint_is_none(tmp_path, content):
    (tmp_path / "checkpoint-abc.pt").write_bytes(content)
    assert progress_of(tmp_path / "checkpoint-abc.pt") is None


def test_a_checkpoint_calls_nothing(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    torch.save({"progress": {"steps": 5, "seconds": 2.5}, "model": Evil()}, tmp_path / "checkpoint-abc.pt")
    assert progress_of(tmp_path / "checkpoint-abc.pt") == (5, 2.5)
    assert not (tmp_path / "made").exists()


def test_the_time_left_follows_the_forecast_and_what_jobs_took(plan, tmp_path):
    given = (("before", "done", 1), ("since", "missing", 1), ("open", "missing", 2), ("runs", "stale", 1))
    jobs = [{"name": name, "file": f"{name}/metrics.json", "state": state, "seconds": 10.0, "threads": threads}
            for name, state, threads in given]
    for name in ("before", "since", "open", "runs"):
        (tmp_path / name).mkdir()
    for name in ("before", "runs"):
        (tmp_path / name / "metrics.json").touch()
        os.utime(tmp_path / name / "metrics.json", (1, 1))
    assert seconds_left(plan, []) is None
    forecast = {"cores": 2, "jobs": jobs, "of": identity(plan)}
    record.write_json(forecast, "results/smoke/plan.json")
    os.utime("results/smoke/plan.json", (100, 100))
    assert seconds_left(plan, []) == (10 + 20 + 10) / 2
    (tmp_path / "since/metrics.json").touch()
    for unwritten in ("", "s\tmax_rss\n", "s\tmax_rss\nNA\t1\n"):  # Snakemake leaves it after the record
        (tmp_path / "since/benchmark.tsv").write_text(unwritten)
        assert seconds_left(plan, []) == (20 + 10) / 2
    (tmp_path / "since/benchmark.tsv").write_text("s\tmax_rss\n15.0\t1\n")  # took half as long again
    assert seconds_left(plan, []) == 1.5 * (20 + 10) / 2
    assert seconds_left(plan, [State("runs", "table1", "running", left_s=4.0)]) == 1.5 * (20 + 4) / 2
    assert "about 22 s left" in shown(plan, [State("open", "table1", "missing")])


def test_a_forecast_of_another_configuration_says_nothing(plan, config):
    record.write_json({"cores": 1, "jobs": [], "of": identity(plan)}, "results/smoke/plan.json")
    assert seconds_left(plan, []) == 0
    config["defaults"]["training"]["steps"] = 13
    assert seconds_left(expand(config), []) is None
    assert "`python -m flarepp plan` makes an estimate" in shown(expand(config), [State("open", "table1", "missing")])


def test_snakemake_says_the_time_left_after_each_job(plan, capsys):
    from snakemake_interface_logger_plugins.common import LogEvent

    logger = logging.Logger("test")
    logger.addHandler(TimeLeft(plan))
    logger.info(None, extra={"event": LogEvent.PROGRESS, "done": 1, "total": 3})
    assert capsys.readouterr().err == ""
    jobs = [{"name": "a", "file": "a.csv", "state": "missing", "seconds": 30.0, "threads": 1}]
    record.write_json({"cores": 1, "jobs": jobs, "of": identity(plan)}, "results/smoke/plan.json")
    logger.info(None, extra={"event": LogEvent.JOB_FINISHED})
    logger.info(None, extra={"event": LogEvent.PROGRESS, "done": 1, "total": 3})
    assert capsys.readouterr().err == "all of scale smoke: about 30 s left\n"
    Path("a.csv").touch()
    logger.info(None, extra={"event": LogEvent.PROGRESS, "done": 3, "total": 3})
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("content", ["", "{}", '{"of": "OF"}', '{"of": "OF", "jobs": [{"name": "a"}], "cores": 0}'])
def test_no_forecast_ends_snakemake(plan, capsys, content):
    """What a handler raises goes through Snakemake's scheduler, whose jobs are left alone then."""
    Path("results/smoke").mkdir(parents=True)
    Path("results/smoke/plan.json").write_text(content.replace("OF", identity(plan)))
    logger = logging.Logger("test")
    logger.addHandler(TimeLeft(plan))
    logger.info(None, extra={"event": "progress"})
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("seconds, text", [
    (0, "0 s"), (99.4, "99 s"), (99.6, "1 min 40 s"), (754, "12 min 34 s"), (3600, "1 h 00 min"), (12000, "3 h 20 min"),
    (5e6, "57 d 21 h")])  # fmt: skip
def test_spans(seconds, text):
    assert span(seconds) == text


def test_the_verb(flarepp, tmp_path, config):
    """In a folder without results; the configuration is checked as ever."""
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    answer = flarepp("status", "--scale", "smoke", cwd=tmp_path)
    assert answer.returncode == 0 and answer.stdout.startswith("scale smoke\n"), answer.stderr
    assert "time left: `python -m flarepp plan` makes an estimate" in answer.stdout
    wrong = flarepp("status", "--config", "shown_error=lst", cwd=tmp_path)
    assert wrong.returncode == 2 and "did you mean 'last'" in wrong.stderr and wrong.stderr.count("\n") == 1
