"""The scaling experiment: what a cell records, that R changes only time and memory, and how it ends when it cannot run.

Measurements fork, so they run in a process that has not computed: the command line, or the script CELLS for many of them.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys

import pytest
import torch
import yaml

from conftest import PROJECT
from flarepp import record
from flarepp.parallel import Ranks
from flarepp.scaling import span_of
from flarepp.spec import expand
from flarepp.step import draw

CELLS = """
import json, pathlib, sys, time
from flarepp import parallel, record, scaling
call = scaling.ShardedStep.__call__

def lacks_memory(self):
    if self.ranks.context_rank == 1:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: 4 bytes\\nmore")
    return call(self)

def is_slow_in_turn(self):
    self.calls = getattr(self, "calls", 0) + 1
    loss = call(self)
    if self.calls - 3 == self.ranks.context_rank:  # after one step for the memory and one to warm up
        time.sleep(0.3)
    return loss

def is_wrong(self):
    return 1 / (1 - self.ranks.context_rank)

def is_not_finite(self):
    return call(self) * float("nan")

def one_device(self):
    raise AssertionError("no rank may start")

for name, change, spec in json.load(sys.stdin):
    scaling.ShardedStep.__call__ = globals()[change] if change else call
    scaling.torch.cuda.device_count = lambda: 1
    started, folder = time.monotonic(), pathlib.Path(name)
    record.write_json({"status": "ok"}, folder / "metrics.json")
    try:
        scaling.measure(spec, folder)
    except parallel.RankFailed as error:
        (folder / "error.txt").write_text(str(error))
    (folder / "seconds.txt").write_text(str(time.monotonic() - started))
"""


def cell(config: dict, model: str, num_ranks: int, changes: dict | None = None, **settings) -> dict:
    """A smoke cell's spec with other settings of its two sections."""
    plan = expand(config | {"scale": "smoke"})
    spec = copy.deepcopy(plan.scaling[f"results/smoke/runs/table2/{model}/N256-M8-R1-fp32"].spec)
    return spec | {"model": spec["model"] | (changes or {}), "scaling": spec["scaling"] | {"num_ranks": num_ranks} | settings}


def cells(config: dict) -> dict[str, tuple[str, dict]]:
    """Name -> what goes wrong in it, and the spec, of every measurement that the script makes."""
    two = {"num_blocks": 2}
    large = {"num_tokens": 32768, "warmup_steps": 1, "timed_steps": 1}
    wide = {"channel_dim": 32}
    half = {"precision": "fp16"}
    return {
        **{f"{model} {tokens}": ("", cell(config, model, 2, two, num_tokens=tokens))
           for model in ("flare", "flarepp") for tokens in (257, 600)},
        **{f"memory {ranks}": ("", cell(config, "flarepp", ranks, wide, **large)) for ranks in (1, 2, 4)},
        **{f"half {ranks}": ("", cell(config, "flarepp", ranks, {"norm": "rmsnorm"}, **half)) for ranks in (1, 2)},
        "fewer tokens": ("", cell(config, "flarepp", 3, num_tokens=2)),
        "slow": ("is_slow_in_turn", cell(config, "flare", 2, timed_steps=3)),
        "memory": ("lacks_memory", cell(config, "flare", 2)),
        "bug": ("is_wrong", cell(config, "flare", 2)),
        "nan": ("is_not_finite", cell(config, "flare", 2)),
        "device": ("one_device", cell(config, "flare", 4, device="cuda")),
    }


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Name -> folder of every measurement."""
    folder = tmp_path_factory.mktemp("cells")
    config = yaml.safe_load((PROJECT / "config.yaml").read_text(encoding="utf-8"))
    work = [(name, *what) for name, what in cells(config).items()]
    answer = subprocess.run([sys.executable, "-c", CELLS], input=json.dumps(work), cwd=folder, timeout=300,
                            capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert answer.returncode == 0, answer.stderr
    return {name: folder / name for name, *_ in work}


def metrics(folder) -> dict:
    result = record.read_json(folder / "metrics.json")
    assert result["status"] == "ok", result["message"]
    return result["metrics"]


def test_a_cell_from_the_command_line(config, flarepp, tmp_path):
    """One and two ranks: the record, and the same loss of the same sample."""
    found = {}
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        spec = cell(config, "flarepp", ranks)
        record.write_json(spec, folder / "spec.json")
        answer = flarepp("parallel", folder / "spec.json")
        assert answer.returncode == 0, answer.stderr
        result = record.read_json(folder / "metrics.json")
        found[ranks], origin = result["metrics"], result["provenance"]
        assert (result["status"], result["message"], result["spec"]) == ("ok", "", spec)
        assert (origin["dataset"]["source"], origin["device_type"], origin["num_threads"]) == ("random", "cpu", 1)
        assert origin["precision"] == {"autocast": False, "float32_matmul": "highest", "parameters": ["torch.float32"]}
        assert found[ranks]["steps"] == 2
        assert found[ranks]["step_ms_low"] <= found[ranks]["step_ms"] <= found[ranks]["step_ms_high"]
        assert sorted(path.name for path in folder.iterdir()) == [".lock", "metrics.json", "spec.json"]
    assert found[2]["loss"] == pytest.approx(found[1]["loss"], rel=1e-5)
    assert found[1]["parameter_count"] == found[2]["parameter_count"] and found[1]["cores"] == found[2]["cores"] >= 1
    assert not any(found[1][f"{part}_collectives"] for part in ("forward", "backward", "loss", "gradient"))


def test_a_spec_without_its_section_is_one_line(flarepp, tmp_path):
    record.write_json({"model": {}}, tmp_path / "spec.json")
    answer = flarepp("parallel", tmp_path / "spec.json")
    assert answer.returncode == 2 and answer.stderr == "error: run spec: the section 'scaling' is missing\n"
    assert not (tmp_path / "metrics.json").exists()


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_the_sample_is_the_same_for_any_number_of_ranks(num_ranks):
    """Its bits, also where shards and the pieces that are drawn together cut it elsewhere."""
    settings = {"seed": 3, "batch_size": 2, "num_tokens": 10_001}
    whole = draw(settings)
    assert whole[0].shape == (2, 10_001, 3) and whole[1].shape == (2, 10_001, 1)
    assert abs(whole[0].std() - 1) < 0.02 and len(whole[0].unique()) > 0.99 * whole[0].numel()
    spans = [span_of(10_001, Ranks(num_context=num_ranks, context_rank=rank)) for rank in range(num_ranks)]
    shards = [draw(settings, span) for span in spans]
    for part, expected in zip(zip(*shards), whole):
        assert torch.equal(torch.cat(part, 1), expected)
    assert not torch.equal(draw(settings | {"seed": 4})[0], whole[0])


def test_a_rank_may_have_no_token(measured):
    settings = {"seed": 0, "batch_size": 1, "num_tokens": 2}
    assert draw(settings, span_of(2, Ranks(num_context=3, context_rank=2)))[0].shape == (1, 0, 3)
    assert metrics(measured["fewer tokens"])["loss"] > 0


@pytest.mark.parametrize("model, encoders", [("flare", 1), ("flarepp", 2)])
def test_collectives_and_their_bytes(measured, model, encoders):
    """An encoder gathers (O_r, L_r) forward and sums G backward, a mixer has one or two; the number of tokens is nowhere."""
    blocks, heads, latents, head_dim, size = 2, 2, 8, 8, 4
    for tokens in (257, 600):
        found = metrics(measured[f"{model} {tokens}"])
        assert found["forward_collectives"] == found["backward_collectives"] == blocks * encoders
        assert found["forward_bytes"] == blocks * encoders * heads * latents * (head_dim + 1) * size
        assert found["backward_bytes"] == blocks * encoders * heads * latents * head_dim * size
        assert (found["loss_collectives"], found["gradient_collectives"]) == (0, 1)


def test_memory_falls_with_the_ranks(measured):
    """Efficiency P1 / (R PR) where activations of 32,768 tokens are nearly all there is."""
    peaks = {ranks: metrics(measured[f"memory {ranks}"])["peak_memory_mb"] for ranks in (1, 2, 4)}
    activations = 32768 * 32 * 4 / 2**20  # of one layer
    assert 10 * activations < peaks[1] < 100 * activations
    assert all(peaks[1] / (ranks * peaks[ranks]) > 0.8 for ranks in (2, 4)), peaks
    losses = [metrics(measured[f"memory {ranks}"])["loss"] for ranks in (1, 2, 4)]
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-5)


def test_half_precision_runs(measured):
    losses = [metrics(measured[f"half {ranks}"])["loss"] for ranks in (1, 2)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert record.read_json(measured["half 2"] / "metrics.json")["provenance"]["precision"]["autocast"] is True


def test_a_step_takes_as_long_as_its_slowest_rank(measured):
    """Each rank is slow in one of three steps: two steps of three are."""
    assert metrics(measured["slow"])["step_ms"] > 300


def test_lack_of_memory_on_one_rank_is_a_result(measured):
    result = record.read_json(measured["memory"] / "metrics.json")
    assert (result["status"], result["metrics"]) == ("oom", {})
    assert result["message"].startswith("rank 1: [enforce fail") and "more" not in result["message"]
    assert result["provenance"]["device_type"] == "cpu" and result["provenance"]["num_threads"] == 1
    assert float((measured["memory"] / "seconds.txt").read_text()) < 20


def test_a_loss_that_is_not_finite_is_a_result(measured):
    result = record.read_json(measured["nan"] / "metrics.json")
    assert (result["status"], result["message"], result["metrics"]) == ("diverged", "the loss is nan", {})


def test_too_few_devices_is_a_result(measured):
    result = record.read_json(measured["device"] / "metrics.json")
    assert (result["status"], result["message"]) == ("not run", "needs 4 CUDA devices, 1 is visible")
    assert result["metrics"] == {} and not (measured["device"] / "error.txt").exists()


def test_a_bug_on_one_rank_leaves_no_record(measured):
    """Not even that of an earlier attempt; the message is the rank's traceback."""
    assert not (measured["bug"] / "metrics.json").exists()
    message = (measured["bug"] / "error.txt").read_text()
    assert message.startswith("rank 1 ") and "ZeroDivisionError" in message


def test_records_of_cells(measured):
    names = {"flare 257": "ok", "memory": "oom", "device": "not run"}
    entries = []
    for name in names:
        spec = record.read_json(measured[name] / "metrics.json")["spec"]
        record.write_json(spec, measured[name] / "spec.json")
        entries.append({"run": str(measured[name]), "spec": record.digest(spec), "dataset": "", "dataset_label": "",
                        "model": "flare", "label": "FLARE", "role": "ranked", "num_blocks": 1, "num_latents": 8,
                        "num_tokens": spec["scaling"]["num_tokens"], "num_ranks": spec["scaling"]["num_ranks"],
                        "precision": "fp32", "seed": 0, "absent": None})
    frame = record.records({"suite": "table2", "scale": "smoke", "entries": entries})
    assert dict(zip(frame["run"], frame["status"])) == {str(measured[name]): status for name, status in names.items()}
    assert set(frame["data_source"]) == {"random"}
    assert set(zip(frame["num_tokens"], frame["num_ranks"])) == {(257, 2), (256, 2), (256, 4)}
    assert set(frame[frame["status"] != "ok"]["metric"]) == {"status"}
