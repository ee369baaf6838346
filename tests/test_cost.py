"""Cost curves: what a cell records, that cells know nothing of each other, what is kept, how they end when they cannot run.

Measurements fork, so they run in a process that has not computed: the command line, or the script CURVES for many of them.
"""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from conftest import PROJECT
from flarepp import cost, record
from flarepp.__main__ import main
from flarepp.attention import KERNELS, attend
from flarepp.cost import ASKED, MEBIBYTES, is_out_of_memory, watched_kernels
from flarepp.operations import evaluate
from flarepp.spec import expand

CURVES = """
import json, os, pathlib, signal, sys, time
from flarepp import attention, cost
call, kernel_for = cost.Step.__call__, attention.kernel_for
AT = 128  # the number of tokens at which something goes wrong

def lacks_memory(self):
    raise RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: "
                       "you tried to allocate 3145728 bytes. Error code 12\\nmore")

def is_killed(self):
    os.kill(os.getpid(), signal.SIGKILL)

def leaves(self):
    os._exit(7)

def is_wrong(self):
    return 1 / 0

def is_not_finite(self):
    return call(self) * float("nan")

def hangs(self):
    print(os.getpid(), flush=True)
    time.sleep(60)

def stores_the_scores(*arguments):
    return "unfused"

def is_slow(self):
    time.sleep(0.05)
    return call(self)

jobs = json.load(sys.stdin)
model = cost.build_model(**jobs[0][3]["model"], in_dim=3, out_dim=1)
cost.model_multiply_adds(model, 64, 3)  # what counting loads is then there in every fork
for name, change, everywhere, spec, folder in jobs:
    function = globals().get(change, call)
    attention.kernel_for = function if change == "stores_the_scores" else kernel_for
    bad = call if change == "stores_the_scores" else function
    cost.Step.__call__ = lambda self: (bad if everywhere or self.features.shape[1] == AT else call)(self)
    folder, lines = pathlib.Path(folder), []
    cost.print = lambda *words, **_: lines.append(" ".join(map(str, words)))
    try:
        cost.measure(spec, folder)
    except cost.ChildFailed as error:
        lines.append(str(error))
    (folder / f"{name}.txt").write_text("\\n".join(lines))
"""


def curve(config: dict, model: str, num_tokens=(64, 128), changes: dict | None = None, **settings) -> dict:
    """A smoke curve's spec with other settings of its two sections."""
    plan = expand(config | {"scale": "smoke"})
    spec = copy.deepcopy(plan.curves[f"results/smoke/runs/figure5/{model}/{'' if model == 'full' else 'M8-'}fp32"].spec)
    settings = spec["cost"] | {"num_tokens": list(num_tokens)} | settings
    return spec | {"model": spec["model"] | (changes or {}), "cost": settings}


def jobs(config: dict) -> list[tuple]:
    """Name, what goes wrong, whether at every N, spec and folder of every curve that the script measures."""
    flare, flarepp = curve(config, "flare"), curve(config, "flarepp")
    large = {"num_tokens": (8192, 16384), "changes": {"num_heads": 4, "channel_dim": 32}, "timed_steps": 1}
    many = curve(config, "flare", **large | {"changes": large["changes"] | {"num_latents": 64}})
    half = curve(config, "transolver3", (64,), {"norm": "rmsnorm"}, precision="fp16")
    return [
        *((name, "", False, flarepp, "plain") for name in ("plain", "again")),
        ("bug", "is_wrong", False, flare, "bug"), ("mended", "", False, flare, "bug"),
        ("changed", "", False, curve(config, "flare", timed_steps=3), "bug"),
        ("full", "", False, curve(config, "full", (64,)), "full"),
        ("half", "", False, half, "half"),
        ("memory", "lacks_memory", False, curve(config, "flare", (64, 128, 192)), "memory"),
        ("killed", "is_killed", False, flare, "killed"), ("gone", "leaves", False, flare, "gone"),
        ("nan", "is_not_finite", False, flare, "nan"), ("unfused", "stores_the_scores", False, flare, "unfused"),
        ("slow", "is_slow", True, curve(config, "flare", (64, 128, 2048), max_step_seconds=0.1, max_seconds=0.12,
                                        warmup_steps=2, timed_steps=9), "slow"),
        ("device", "is_wrong", True, curve(config, "flare", device="cuda"), "device"),
        ("large", "", False, curve(config, "flare", **large), "large"), ("many", "", False, many, "many"),
        ("turned", "", False, curve(config, "flare", **large | {"num_tokens": (16384, 64)}), "turned"),
        ("unknown", "", False, flare | {"model": flare["model"] | {"mixer": "flair"}}, "unknown"),
    ]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The folder of all curves; beside a curve's cells stands what was printed."""
    folder = tmp_path_factory.mktemp("curves")
    config = yaml.safe_load((PROJECT / "config.yaml").read_text(encoding="utf-8"))
    answer = subprocess.run([sys.executable, "-c", CURVES], input=json.dumps(jobs(config)), cwd=folder, timeout=300,
                            capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert answer.returncode == 0, answer.stderr
    return folder


def cell(folder: Path) -> dict:
    return record.read_json(folder / "metrics.json")


def said(folder: Path, name: str) -> list[str]:
    return (folder / f"{name}.txt").read_text().splitlines()


def test_a_cell_records_what_it_is_and_was(measured, config):
    spec = curve(config, "flarepp")
    first, second = (cell(measured / f"plain/N{tokens}") for tokens in (64, 128))
    assert second["status"] == "ok" and second["message"] == ""
    asked = spec | {"cost": spec["cost"] | {"num_tokens": 128}}
    assert second["spec"] == asked == record.read_json(measured / "plain/N128/spec.json")
    metrics, origin = second["metrics"], second["provenance"]
    assert set(metrics) == {
        "step_ms", "step_ms_low", "step_ms_high", "steps", "first_step_ms", "predicted_ms", "peak_memory_mb",
        "parameter_count", "loss", "cores", "mixer_multiply_adds", "model_multiply_adds", "wall_time_s"}
    assert set(first["metrics"]) == set(metrics) - {"predicted_ms"}
    assert 0 < metrics["step_ms_low"] <= metrics["step_ms"] <= metrics["step_ms_high"] and metrics["steps"] == 2
    assert metrics["loss"] > 0 and metrics["first_step_ms"] > 0 and 0 <= metrics["peak_memory_mb"] < 10
    ratio = metrics["model_multiply_adds"] / first["metrics"]["model_multiply_adds"]
    assert metrics["predicted_ms"] == pytest.approx(first["metrics"]["step_ms"] * ratio) and 1 < ratio < 2.01
    assert (origin["dataset"]["source"], origin["device_type"]) == ("random", "cpu")
    assert origin["num_threads"] == origin["num_ranks"] == 1
    assert origin["precision"] == {"autocast": False, "float32_matmul": "highest", "parameters": ["torch.float32"]}
    assert origin["attention"] == ["cpu_flash"] and re.fullmatch("[0-9a-f]{12}", origin["code"])


def test_operations_of_a_cell_are_those_of_the_formula(measured):
    """FLARE's does not name what is the same for any N."""
    metrics = cell(measured / "bug/N128")["metrics"]
    assert metrics["mixer_multiply_adds"] == pytest.approx(evaluate("3 C^2 + 4 M C", C=16, M=8))
    full = cell(measured / "full/N64")
    assert full["metrics"]["mixer_multiply_adds"] == pytest.approx(evaluate(full["provenance"]["operations"], C=16, N=64))


@pytest.mark.parametrize("name", ["full", "half"])
def test_every_kind_of_mixer_and_precision_runs_fused(measured, name):
    result = cell(measured / f"{name}/N64")
    assert result["status"] == "ok" and result["provenance"]["attention"] == ["cpu_flash"]
    assert result["provenance"]["precision"]["autocast"] is (name == "half")


def test_measured_cells_are_kept(measured):
    """The second time nothing runs; after a failure only what is missing; with another spec everything."""
    assert all(text.endswith("kept: measured before, same spec and code") for text in said(measured / "plain", "again"))
    assert not any("kept" in text for text in said(measured / "plain", "plain"))
    assert ["kept" in text for text in said(measured / "bug", "mended")] == [True, False]
    assert not any("kept" in text for text in said(measured / "bug", "changed"))
    assert cell(measured / "bug/N64")["metrics"]["steps"] == 3


def test_a_bug_names_the_cell_and_leaves_those_before_it(measured):
    kept, failed, *rest = said(measured / "bug", "bug")
    assert kept.startswith("N 64: ok") and failed.startswith("bug/N128: Traceback")
    assert rest[-1].startswith("ZeroDivisionError")
    *_, last = said(measured / "gone", "gone")
    assert last == "gone/N128: the process ended with exit code 7"
    assert (measured / "gone/N64/metrics.json").exists() and not (measured / "gone/N128/metrics.json").exists()
    first, *_, last = said(measured / "unknown", "unknown")
    assert first.startswith("unknown: Traceback") and last.startswith("ValueError: mixer 'flair' is unknown")


def test_attention_that_is_not_fused_is_an_error(measured):
    *_, last = said(measured / "unfused", "unfused")
    assert last == "AssertionError: attention ran in ['unfused']"


def test_lack_of_memory_is_a_result_with_the_size_it_asked_for(measured):
    result = cell(measured / "memory/N128")
    assert result["status"] == "oom" and result["message"].startswith("[enforce fail") and "more" not in result["message"]
    metrics = result["metrics"]
    assert metrics["asked_mb"] == 3 and metrics["predicted_ms"] > 0 and "step_ms" not in metrics
    assert metrics["parameter_count"] == cell(measured / "memory/N64")["metrics"]["parameter_count"]
    assert cell(measured / "memory/N192")["status"] == "ok"


@pytest.mark.parametrize("text, mebibytes", [
    ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2097152 bytes. Error code 12", 2),
    ("CUDA out of memory. Tried to allocate 3.50 GiB. GPU 0 has a total capacity of 79.10 GiB", 3584),
    ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0", 20),
])
def test_the_size_is_read_from_the_allocators_words(text, mebibytes):
    asked = ASKED.search(text)
    assert is_out_of_memory(RuntimeError(text)) and float(asked[1]) * MEBIBYTES[asked[2]] == mebibytes


def test_a_killed_process_is_a_failure(measured):
    """Whoever killed it, it was not the kernel for want of memory."""
    assert not (measured / "killed/N128/metrics.json").exists()
    assert "N128: the process ended with exit code -9" in said(measured / "killed", "killed")[-1]


def test_a_process_that_the_kernel_kills_for_memory_is_out_of_memory(monkeypatch, tmp_path):
    def killed(*words):
        raise cost.ChildFailed("killed", -signal.SIGKILL)

    counts = iter((4, 5))
    monkeypatch.setattr(cost, "in_child", killed)
    monkeypatch.setattr(cost, "kills_for_memory", lambda: next(counts))
    spec = {"cost": {"max_step_seconds": 5, "device": "cpu"}}
    result = cost.attempt(spec, tmp_path, {"device_type": "cpu"}, None)
    assert result["status"] == "oom" and "SIGKILL" in result["message"] and result["metrics"] == {}


def test_a_loss_that_is_not_finite_is_a_result(measured):
    result = cell(measured / "nan/N128")
    assert (result["status"], result["message"]) == ("diverged", "the loss is nan")
    assert "step_ms" not in result["metrics"] and result["metrics"]["model_multiply_adds"] > 0


def test_steps_that_would_take_too_long_are_not_made(measured):
    """0.05 s at 64 tokens: at 128 it would be 0.1 s and more, at 2,048 1.6 s. Steps end when their time is over."""
    first, *others = (cell(measured / f"slow/N{tokens}") for tokens in (64, 128, 2048))
    assert first["status"] == "ok" and 2 <= first["metrics"]["steps"] <= 3
    for result in others:
        assert result["status"] == "not run" and result["provenance"]["attention"] == []
        seconds = re.fullmatch(r"predicted ([\d.]+) s a step, above max_step_seconds 0.1", result["message"])[1]
        assert float(seconds) == pytest.approx(result["metrics"]["predicted_ms"] / 1e3, rel=1e-2)
    assert others[1]["metrics"]["predicted_ms"] == pytest.approx(16 * others[0]["metrics"]["predicted_ms"], rel=0.05)


def test_a_missing_device_is_a_result(measured):
    for tokens in (64, 128):
        result = cell(measured / f"device/N{tokens}")
        assert (result["status"], result["message"]) == ("not run", "needs a CUDA device, none is visible")


def test_a_cell_knows_nothing_of_the_one_before(measured):
    """The same numbers after a smaller and before any cell; a small cell's memory after a large one."""
    (large, alone), small = ((cell(measured / f"{name}/N16384")["metrics"] for name in ("large", "turned")),
                             cell(measured / "turned/N64")["metrics"])
    assert large["loss"] == alone["loss"] and large["peak_memory_mb"] == pytest.approx(alone["peak_memory_mb"], rel=0.01)
    assert small["peak_memory_mb"] < 5


def test_the_peak_is_that_of_live_tensors(measured):
    """Linear in N and, for FLARE, the same for any M: no memory that the allocator keeps for later."""
    half, whole = (cell(measured / f"large/N{tokens}")["metrics"]["peak_memory_mb"] for tokens in (8192, 16384))
    activations = 16384 * 32 * 4 / 2**20  # of one layer
    assert whole == pytest.approx(2 * half, rel=0.1) and 10 * activations < whole < 60 * activations
    assert cell(measured / "many/N16384")["metrics"]["peak_memory_mb"] == pytest.approx(whole, rel=0.02)


def test_watched_kernels_are_those_that_are_called():
    before, seen, q = dict(KERNELS), set(), torch.randn(1, 2, 4, 8)
    with watched_kernels(seen):
        assert seen == set()
        attend(q, q, q, scale=1.0)
    assert seen == {"cpu_flash"} and before == KERNELS


def test_a_child_ends_with_its_parent(config, tmp_path):
    job = ("hangs", "hangs", True, curve(config, "flare", (128,)), "hangs")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", CURVES], cwd=tmp_path, **pipes) as parent:
        parent.stdin.write(json.dumps([job]))
        parent.stdin.close()
        child = Path("/proc") / parent.stdout.readline().strip() / "stat"
        assert child.exists()
        parent.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + 20
        while child.exists() and child.read_text().split()[2] != "Z":
            assert time.monotonic() < deadline, "the child outlives its parent"
            time.sleep(0.05)


# --- the command line


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """`flarepp cost ...` in this process, in an empty folder: exit code, output and errors. It must measure nothing."""
    monkeypatch.chdir(tmp_path)

    def call(*words) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["flarepp", "cost", *map(str, words)])
        return main(), *capsys.readouterr()
    return call


SMOKE = ("--config", PROJECT / "config.yaml", "--scale", "smoke", "--device", "cpu", "--out", "here")


@pytest.mark.parametrize("words, expected", [
    (["--scale", "papre"], "scale 'papre' is unknown; did you mean 'paper'"),
    (["--models", "flair"], "cost.models: model 'flair' is unknown; did you mean 'flare'"),
    (["--device", "cuda"], "device is 'cuda' but no CUDA device is visible"),
    (["--config", "elsewhere.yaml"], "elsewhere.yaml"),
    (["spec.json"], "spec.json"),
])
def test_what_cannot_be_measured_is_one_line(command, tmp_path, words, expected):
    code, _, errors = command(*SMOKE, "--minutes", 0, *words)
    assert code == 2 and errors.startswith("error: ") and expected in errors
    assert len(errors.splitlines()) == 1 and list(tmp_path.iterdir()) == []


def test_a_spec_without_its_section_is_one_line(command, tmp_path):
    record.write_json({"model": {}}, tmp_path / "spec.json")
    assert command("spec.json") == (2, "", "error: run spec: the section 'cost' is missing\n")


def test_a_failure_is_the_exit_code(command, config, tmp_path, monkeypatch):
    def fail(folder, *_):
        raise cost.ChildFailed(f"{folder}: Traceback")

    monkeypatch.setattr(cost, "in_child", fail)
    record.write_json(curve(config, "flare"), tmp_path / "runs/spec.json")
    assert command("runs/spec.json") == (1, "", "runs: Traceback\n")
    code, said, errors = command(*SMOKE)
    assert code == 1 and "0 of 8 cells" in said and errors == "here/runs/figure5/flare/M8-fp32: Traceback\n"
    assert "here/runs/figure5/full/fp32: Traceback" in said  # one failure does not keep the others from their turn


def test_the_records_of_this_device_have_a_folder_of_their_own(command, tmp_path):
    assert command(*SMOKE[:-2], "--minutes", 0)[::2] == (0, "")
    (plan,) = tmp_path.glob("results/reference/*/suite.json")
    assert re.fullmatch("[a-z0-9-]+", plan.parent.name)
    assert [entry["absent"] for entry in record.read_json(plan)["entries"]] == 8 * ["not run"]


BLOCKED = ("jsonschema", "h5py", "safetensors", "tqdm", "scipy", "pandas", "snakemake", "matplotlib", "seaborn", "tabulate",
           "huggingface_hub", "requests")
BARE = f"""
import sys
sys.modules |= dict.fromkeys({BLOCKED!r})
sys.argv[0] = "flarepp"
from flarepp.__main__ import main
sys.exit(main())
"""


def test_the_sweep_needs_no_more_than_torch_numpy_and_yaml(command, tmp_path):
    """One model of scale smoke, then the plan of two for a table of records; what was not measured says so."""
    words = [sys.executable, "-c", BARE, "cost", *map(str, SMOKE), "--models", "flare"]
    answer = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stderr
    assert "here/runs/figure5/flare/M8-fp32" in answer.stdout and "2 of 8 cells" in answer.stdout
    code, said, _ = command(*SMOKE, "--models", "flare", "full", "--minutes", 0)
    assert code == 0 and "2 of 8 cells; the same command goes on" in said
    plan = record.read_json(tmp_path / "here/suite.json")
    assert (plan["suite"], plan["scale"]) == ("figure5", "smoke")
    assert [(entry["model"], entry["num_tokens"], entry["absent"]) for entry in plan["entries"]] == [
        (model, tokens, None if model == "flare" else "not run")
        for model in ("full", "transolver3", "flare", "flarepp") for tokens in (64, 128)]
    frame = record.records(plan)
    assert set(frame["suite"]) == {"figure5"} and set(frame["num_tokens"]) == {64, 128}
    assert set(zip(frame["model"], frame["status"])) == {
        ("flare", "ok"), *((model, "not run") for model in ("full", "transolver3", "flarepp"))}


@pytest.mark.parametrize("damage", ["", "{", "[]", "null", '{"status": "ok"}', '{"status": "ok", "metrics": {}}'])
def test_a_damaged_record_is_none(tmp_path, damage):
    (tmp_path / "metrics.json").write_text(damage)
    assert cost.found(tmp_path, {"cost": {}}) is None


@pytest.mark.parametrize("settings, message", [
    ({}, "cost.num_tokens: the key is missing in the spec of a curve"),
    (dict.fromkeys(cost.NEEDED, 1), "cost.num_tokens: got 1; a curve has a list, its cells one number each")])
def test_the_spec_of_a_curve_is_checked(tmp_path, settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        cost.measure({"model": {}, "cost": settings}, tmp_path / "curve")
    assert not (tmp_path / "curve").exists()


@pytest.mark.parametrize("text, message", [
    ("[1, 2", "not valid YAML"), ("- 1", "expected a mapping, got list"), ("datasets: {a: 1}", "models: got None"),
    ("{datasets: {a: 1}, models: {b: 1}}", "cost: got None")])
def test_a_wrong_configuration_is_one_line(command, tmp_path, text, message):
    (tmp_path / "wrong.yaml").write_text(text)
    code, _, errors = command("--config", "wrong.yaml", "--scale", "smoke", "--device", "cpu")
    assert code == 2 and message in errors and errors.count("\n") == 1
