"""TensorBoard event files: the rows of the learning curve, and nothing of a run depends on them."""

from __future__ import annotations

import csv

import pytest

from flarepp import classify, events, record, train
from test_lra_model import data, spec  # noqa: F401  fixtures: a task and its run


def scalars(folder) -> dict[str, dict[int, float]]:
    """name -> step -> value of the event file in a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = folder.glob(events.FILES)
    found = EventAccumulator(str(file), size_guidance={"scalars": 0})
    found.Reload()
    return {name: {event.step: event.value for event in found.Scalars(name)} for name in found.Tags()["scalars"]}


def curve(folder) -> dict[str, dict[int, float]]:
    """The same of history.csv."""
    with open(folder / "history.csv") as stream:
        rows = list(csv.DictReader(stream))
    return {name: {int(row["step"]): float(row[name]) for row in rows if row[name]} for name in rows[0] if name != "step"}


def close(expected):
    return {name: pytest.approx(values, rel=1e-6) for name, values in expected.items()}  # event files hold FP32


def test_events_are_the_learning_curve_and_change_no_bit(run_spec, dataset, tmp_path):
    plain, watched = (train.train(run_spec, dataset, tmp_path / name, events=name == "watched") for name in ("plain", "watched"))
    assert scalars(tmp_path / "watched") == close(curve(tmp_path / "watched"))
    assert set(scalars(tmp_path / "watched")) == {"lr", "loss", "grad_norm", "loss_scale", "test_last", "test_ema"}
    assert list((tmp_path / "plain").glob(events.FILES)) == []
    assert plain["files"].keys() == watched["files"].keys() == set(record.OUTPUTS)
    assert plain["files"]["model.safetensors"] == watched["files"]["model.safetensors"]
    assert plain["files"]["history.csv"] == watched["files"]["history.csv"]
    assert plain["provenance"]["code"] == watched["provenance"]["code"]  # so that checkpoints of one are the other's


def test_a_resumed_run_writes_the_whole_curve_once(run_spec, dataset, tmp_path, monkeypatch):
    whole = train.train(run_spec, dataset, tmp_path / "whole")
    run_spec["training"]["checkpoint_seconds"] = 0
    step, taken = train.training_step, []

    def dies(run):
        taken.append(1)
        if len(taken) == 15:
            raise KeyboardInterrupt
        return step(run)

    monkeypatch.setattr(train, "training_step", dies)
    with pytest.raises(KeyboardInterrupt):
        train.train(run_spec, dataset, tmp_path / "run", events=True)
    result = train.train(run_spec, dataset, tmp_path / "run", events=True)
    assert len(taken) == 25  # 24 steps and the one that failed: it went on from the checkpoint
    assert scalars(tmp_path / "run") == close(curve(tmp_path / "run"))
    assert result["files"]["history.csv"] == whole["files"]["history.csv"]


def test_a_missing_package_is_named_with_the_extra(monkeypatch, tmp_path):
    monkeypatch.setattr(events.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"tensorboard is not installed; pip install 'flarepp\[tensorboard\]'"):
        events.event_writer(tmp_path)


def test_classifiers_leave_them_too(spec, data, tmp_path):  # noqa: F811
    plain, watched = (classify.classify(spec, data, tmp_path / name, events=name == "watched") for name in ("plain", "watched"))
    assert scalars(tmp_path / "watched") == close(curve(tmp_path / "watched"))
    assert "dev_last" in scalars(tmp_path / "watched")
    assert plain["files"] == watched["files"] and list((tmp_path / "plain").glob(events.FILES)) == []
