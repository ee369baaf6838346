"""The complete DAG at scale smoke, in a copy whose path has a space: outputs, bits, and what re-runs when.

All benchmarks and artefacts; of Table 1's models and Table 6's rows those below, for time (test_ragged trains every model,
test_lra_model every mixer).
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from clone import clone, variables
from flarepp.record import read_records

TABLES = ("table1", "table2", "table3", "table4", "table5", "table6", "figure3_cells", "operations", "figure5_cells")
FIGURES = (*(f"figure{number}" for number in range(2, 10)), "learning_curves", "error_distribution")
ARTEFACTS = [
    *(f"results/smoke/{name}.{kind}" for name in (*(f"tables/{table}" for table in TABLES), "ledger")
      for kind in ("tex", "csv", "md", "html")),
    *(f"paper_figures/smoke/{name}.{kind}" for name in FIGURES for kind in ("pdf", "png")), "results/smoke/records.csv",
    "results/smoke/consistency.csv", "paper_figures/smoke/paper.tex"]
MODELS = ["full", "gnot", "transolver3", "flare", "flarepp"]
COST_MODELS = ["full", "transolver3", "flare", "flarepp"]
ROWS = ["full", "sparse", "flare", "flarepp"]


def snakemake(folder: Path, *words: str) -> subprocess.CompletedProcess:
    """Plain snakemake in `folder`, with the copy's own package first."""
    cores = [] if "--report" in words else ["--cores", "all"]  # as the README has it
    return subprocess.run([sys.executable, "-m", "snakemake", *cores, *words], cwd=folder, env=variables(folder),
                          capture_output=True, text=True, timeout=900)


def planned(folder: Path, *words: str) -> list[str]:
    """Messages of the jobs that a dry run lists."""
    answer = snakemake(folder, "-n", "--scheduler", "greedy", *words)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return re.findall(r"^Job \d+: (.+)$", answer.stdout + answer.stderr, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """The project as a clone holds it, run once at scale smoke."""
    folder = clone(tmp_path_factory.mktemp("pipeline") / "a path with spaces")
    config = folder / "config.yaml"
    text = config.read_text().replace("scale: quick", "scale: smoke", 1)
    start, stop = text.index("  mixers:"), text.index("  # What needs no learning")
    rows = re.sub(r"(?m)^    (\w+):.*\n(?:      .*\n)*", lambda row: row[0] if row[1] in ROWS else "", text[start:stop])
    text = text[:start] + rows + text[stop:]
    config.write_text(re.sub(r"(  table1:[^\n]*\n    models: )\[.*?\]", rf"\g<1>[{', '.join(MODELS)}]", text, count=1, flags=re.DOTALL))
    answer = snakemake(folder, "--profile", "workflow/profiles/local")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return folder


@pytest.fixture
def restored(copy):
    """The copy; files a test edits are put back, times included."""
    kept = {path: (path.read_bytes(), path.stat()) for path in [copy / "config.yaml", *(copy / "src").rglob("*.py")]}
    yield copy
    for path, (content, stat) in kept.items():
        if path.read_bytes() != content or path.stat().st_mtime_ns != stat.st_mtime_ns:
            path.write_bytes(content)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_every_artefact_exists_and_holds_something(copy):
    assert [name for name in ARTEFACTS if not (copy / name).exists() or (copy / name).stat().st_size == 0] == []


def test_records_hold_every_run_once_a_suite(copy, monkeypatch):
    monkeypatch.chdir(copy)  # records name run folders relative to it
    records = read_records(copy / "results/smoke/records.csv")
    absent = records[records["status"] != "ok"]
    assert set(absent["status"]) == {"not affordable", "no data"}
    assert list(absent[absent["status"] == "not affordable"]["dataset"]) == ["pipe", "drivaerml"]
    assert list(absent[absent["status"] == "no data"]["dataset"]) == ["text", "retrieval", "image"] * len(ROWS)
    assert set(records["suite"]) == {"table1", "figure3", "figure4", "table2", "figure5", "table6"}
    runs = records[records["metric"] == "last"].groupby("suite")["run"].count()
    assert runs.to_dict() == {"table1": 5 * len(MODELS) - 2 + 15, "figure3": 16, "figure4": 12, "table6": 2 * len(ROWS) + 4}
    cells = records[records["metric"] == "step_ms"]
    scaled, costs = (cells[cells["suite"] == suite] for suite in ("table2", "figure5"))
    assert set(zip(scaled["model"], scaled["num_ranks"])) == {(model, ranks) for model in ("flare", "flarepp") for ranks in (1, 2)}
    assert set(zip(costs["model"], costs["num_tokens"])) == {(model, tokens) for model in COST_MODELS for tokens in (64, 128)}
    assert not records.dropna(subset=["run"]).duplicated(["suite", "run", "metric"]).any()
    on_disk = {str(path.parent.relative_to(copy)) for path in copy.glob("results/smoke/runs/**/metrics.json")}
    assert set(records["run"].dropna()) == on_disk


def test_an_archive_draws_the_same_elsewhere_without_training(copy, tmp_path, flarepp):
    """Without its weights, with which `all` is content; the jobs that are due are those of the paper layer."""
    other, targets = clone(tmp_path / "a clone", copy), ("table1", "table3", "figure2")
    words = ("--results", "results/smoke", "--out", tmp_path / "smoke.tar.gz")
    assert flarepp("archive", *words, cwd=copy).returncode == flarepp("import", tmp_path / "smoke.tar.gz", cwd=other).returncode == 0
    assert not [*other.rglob("model.safetensors")]
    due = planned(other)
    assert len(due) == 7 + len(TABLES) + len(FIGURES) + 2  # records, artefacts, ledger and document
    assert not [job for job in due if re.match("(dataset|train|classify|trivial|scaling|cost) ", job)]
    assert snakemake(other, "--scheduler", "greedy", *targets).returncode == 0
    made = [path.relative_to(copy) for name in targets for path in [*copy.glob(f"results/*/tables/{name}.*"),
                                                                    *copy.glob(f"paper_figures/*/{name}.*")]]  # fmt: skip
    for path in made:
        ours = re.sub(b"<li>imported from: smoke.tar.gz, sha256 [0-9a-f]{64}</li>", b"", (other / path).read_bytes())
        assert ours == (copy / path).read_bytes(), path
    assert len(made) == 10 and "imported from" in (other / "results/smoke/tables/table1.html").read_text()
    mixer = other / "src/flarepp/mixers/flarepp.py"
    mixer.write_text(mixer.read_text() + "\n# an edit\n")
    assert trained(planned(other)) == {run for run in all_runs(copy) if "/flarepp/" in run}


def spent():
    """CPU seconds of the programs that tests started and that ended: other load on the machine does not count."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_nothing_to_do_the_second_time_and_quickly(copy):
    before = spent()
    answer = snakemake(copy)
    assert answer.returncode == 0 and "Nothing to be done" in answer.stdout + answer.stderr
    assert 0.5 < spent() - before < 6


def test_touching_files_runs_nothing(restored):
    for path in (restored / "config.yaml", restored / "src/flarepp/mixers/flarepp.py"):
        path.touch()
    assert planned(restored) == []


def test_an_unrelated_key_runs_nothing(restored):
    config = yaml.safe_load((restored / "config.yaml").read_text())
    config["defaults"]["training"]["steps"]["desk"] = 4000
    datasets = {name: config.pop(name) for name in ("datasets", "lra")}  # their order is that of the tables' columns and rows
    text = yaml.safe_dump(config) + yaml.safe_dump(datasets, sort_keys=False)  # other order of the other keys, no comments
    (restored / "config.yaml").write_text(text)
    assert planned(restored) == []


def trained(jobs: list[str]) -> set[str]:
    return {re.sub("^(train|classify) results/smoke/runs/", "", job) for job in jobs if job.startswith(("train ", "classify "))}


def all_runs(copy: Path) -> set[str]:
    return {str(path.parent.relative_to(copy / "results/smoke/runs")) for path in copy.glob("results/smoke/runs/**/history.csv")}


def scaled(jobs: list[str]) -> set[str]:
    return {job.removeprefix("scaling results/smoke/runs/") for job in jobs if job.startswith("scaling ")}


def all_cells(copy: Path) -> set[str]:
    return {str(path.parent.relative_to(copy / "results/smoke/runs")) for path in copy.glob("results/smoke/runs/table2/**/metrics.json")}


def curves(jobs: list[str]) -> set[str]:
    return {re.sub("^cost results/smoke/runs/| on .*$", "", job) for job in jobs if job.startswith("cost ")}


def all_curves(copy: Path) -> set[str]:
    return {str(path.parent.relative_to(copy / "results/smoke/runs")) for path in copy.glob("results/smoke/runs/figure5/**/cost.log")}


def test_a_key_of_cost_measures_again_and_trains_nothing(copy):
    overlay = copy / "overlay.yaml"
    overlay.write_text(yaml.safe_dump({"cost": {"max_seconds": 3}}))
    jobs = planned(copy, "--configfile", "config.yaml", str(overlay))
    assert curves(jobs) == all_curves(copy) and len(curves(jobs)) == 4 and trained(jobs) == scaled(jobs) == set()
    assert {"operations", "figure5_cells", "figure5", "records of figure5", "claims ledger"} <= set(jobs)
    assert not {"table1", "table2", "figure4"} & set(jobs)


def test_a_deleted_cell_is_measured_with_its_curve(copy, tmp_path):
    run = copy / "results/smoke/runs/figure5/flare/M8-fp32/N64/metrics.json"
    shutil.move(run, tmp_path / "kept.json")
    try:
        jobs = planned(copy)
    finally:
        shutil.move(tmp_path / "kept.json", run)
    assert curves(jobs) == {"figure5/flare/M8-fp32"} and "figure5" in jobs


def test_a_key_of_scaling_measures_again_and_trains_nothing(copy):
    overlay = copy / "overlay.yaml"
    overlay.write_text(yaml.safe_dump({"scaling": {"timed_steps": 3}}))
    jobs = planned(copy, "--configfile", "config.yaml", str(overlay))
    assert scaled(jobs) == all_cells(copy) and len(scaled(jobs)) == 4 and trained(jobs) == curves(jobs) == set()
    assert {"table2", "records of table2", "claims ledger"} <= set(jobs) and "table1" not in jobs


def test_a_models_key_runs_that_model_and_what_depends_on_it(copy):
    overlay = copy / "overlay.yaml"
    overlay.write_text(yaml.safe_dump({"models": {"flarepp": {"training": {"lr": 5e-4}}}}))
    jobs = planned(copy, "--configfile", "config.yaml", str(overlay))
    assert trained(jobs) == {run for run in all_runs(copy) if "/flarepp/" in run and not run.startswith("table6/")} != set()
    assert {"table1", "figure3", "figure3_cells", "figure4", "figure6", "figure7", "claims ledger"} <= set(jobs)
    assert not any(job.startswith(("dataset", "trivial", "scaling", "cost")) for job in jobs)


def test_a_key_of_a_row_of_table6_runs_that_row_and_what_depends_on_it(copy):
    overlay = copy / "overlay.yaml"
    overlay.write_text(yaml.safe_dump({"lra": {"mixers": {"flare": {"training": {"lr": 5e-4}}}}}))
    jobs = planned(copy, "--configfile", "config.yaml", str(overlay))
    assert trained(jobs) == {run for run in all_runs(copy) if re.match("table6/.*/flare/", run)} and len(trained(jobs)) == 2
    assert {"table6", "records of table6", "claims ledger"} <= set(jobs) and "table1" not in jobs


def test_a_datasets_key_runs_that_dataset(copy):
    overlay = copy / "overlay.yaml"
    overlay.write_text(yaml.safe_dump({"datasets": {"darcy": {"data": {"seed": 1}}}}))
    jobs = planned(copy, "--configfile", "config.yaml", str(overlay))
    assert trained(jobs) == {run for run in all_runs(copy) if "/darcy/" in run}
    assert [job for job in jobs if job.startswith("dataset")] == ["dataset darcy"]


@pytest.mark.parametrize("file, part", [
    ("mixers/flarepp.py", "/flarepp/"), ("solvers/darcy.py", "/darcy/"), ("data/lra/listops.py", "/listops/"),
    ("scaling.py", "table2/"), ("cost.py", "figure5/"), ("classify.py", "table6/")])
def test_editing_a_source_runs_exactly_its_runs(restored, file, part):
    path = restored / "src/flarepp" / file
    path.write_text(path.read_text() + "\n# an edit\n")
    jobs = planned(restored)
    assert trained(jobs) == {run for run in all_runs(restored) if part in run}
    assert scaled(jobs) == {cell for cell in all_cells(restored) if part in cell}
    assert curves(jobs) == {curve for curve in all_curves(restored) if part in curve}


def test_editing_a_figure_redraws_it_alone(restored):
    path = restored / "src/flarepp/paper/figures/figure4.py"
    path.write_text(path.read_text() + "\n# an edit\n")
    assert [job for job in planned(restored) if not job.startswith("rule")] == ["figure4", "all tables and figures in one document"]


def test_figure3_builds_its_suite_and_nothing_else(copy):
    jobs = planned(copy, "figure3", "--forceall")
    runs = {run.split("/", 2)[2] for run in trained(jobs)}
    assert runs == {f"{model}/B{blocks}-M{latents}-fp32-s0" for model in ("flare", "flarepp") for blocks in (1, 2) for latents in (8, 16)}
    assert len(trained(jobs)) == 16 and not scaled(jobs) | curves(jobs)
    assert {"figure3", "records of figure3"} <= set(jobs) and not {"figure3_cells", "figure4", "table1", "claims ledger"} & set(jobs)


def test_a_deleted_output_is_planned_again_with_what_reads_it(copy, tmp_path):
    run = next(path.parent for path in copy.glob("results/smoke/runs/table1/darcy/flarepp/*/predictions.h5"))
    shutil.move(run / "predictions.h5", tmp_path / "kept.h5")
    try:
        jobs = planned(copy)
    finally:
        shutil.move(tmp_path / "kept.h5", run / "predictions.h5")
    assert trained(jobs) == {str(run.relative_to(copy / "results/smoke/runs"))} and "figure7" in jobs


def test_one_artefact_is_a_target(copy):
    jobs = planned(copy, "figure6", "--forceall")
    assert "figure6" in jobs and not {"figure4", "table1", "claims ledger"} & set(jobs)
    assert all("table1/" in run for run in trained(jobs))


def test_paper_scale_is_listed_within_ten_seconds(copy):
    before = spent()
    jobs = planned(copy, "--config", "scale=paper")
    assert 0.5 < spent() - before < 10
    assert len([job for job in jobs if job.startswith("train results/paper/runs/")]) == 98
    assert len([job for job in jobs if job.startswith("classify results/paper/runs/table6/")]) == len(ROWS) * 5
    cells = [job for job in jobs if job.startswith("cost results/paper/runs/figure5/")]
    assert len(cells) == 16 and all(" on cuda, N 1000, 10000, 50000, " in job for job in cells)


@pytest.mark.parametrize("words, expected", [
    (["--config", "scale=papre"], "did you mean 'paper'"),
    (["--config", "defaults={training: {lrr: 1}}"], "did you mean 'lr'"),
    (["--config", "seeds=0"], "seeds"),
    (["--config", "scaling={models: [full]}"], "scaling.models: got 'full'; it cannot share tokens"),
    (["--config", "cost={models: [lno]}"], "cost.models: got 'lno'; it is no model of the backbone"),
    (["--config", "suites={table1: {axes: {precision: [fp16]}}}"], "suites.table1.axes: got 'precision'; allowed: none"),
])
def test_a_broken_configuration_stops_before_any_job(copy, words, expected):
    answer = snakemake(copy, *words)
    output = answer.stdout + answer.stderr
    assert answer.returncode != 0 and expected in output
    assert "Traceback" not in output and not re.search(r"^Job \d+", output, flags=re.MULTILINE)


def test_missing_published_files_are_one_clear_error(copy):
    overrides = ("scale=paper", "data={source: path}")
    answer = snakemake(copy, "results/paper/data/darcy.h5", "--config", *overrides, "--show-failed-logs")
    output = answer.stdout + answer.stderr
    assert answer.returncode != 0 and "data.root: the folder 'data' is not there" in output
    assert "Traceback" not in output and not (copy / "results/paper/data/darcy.h5").exists()


def test_published_files_dropped_into_a_folder_are_read_by_the_same_reader(copy):
    """Files in the published layout below data.root, here those the generator wrote."""
    shutil.copytree(copy / "results/smoke/data/generated", copy / "dropped", dirs_exist_ok=True)
    overlay = copy / "overlay.yaml"
    overlay.write_text(yaml.safe_dump({"data": {"source": "path", "root": "dropped"}}))
    target = "results/smoke/data/elasticity.h5"
    before = (copy / target).read_bytes()
    answer = snakemake(copy, target, "--configfile", "config.yaml", str(overlay))
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert (copy / target).read_bytes() == before
    overlaid = ("--configfile", "config.yaml", str(overlay), "--", target)
    assert planned(copy, *overlaid) == []
    replaced = copy / "dropped/Geo-FNO/elasticity/Meshes/Random_UnitCell_sigma_10.npy"
    content, stat = replaced.read_bytes(), replaced.stat()
    replaced.touch()
    assert planned(copy, *overlaid) == []
    replaced.write_bytes(content[:-8] + b"\0" * 8)
    os.utime(replaced, ns=(0, 0))  # older than everything that was made from it
    assert planned(copy, *overlaid) == ["dataset elasticity"]
    replaced.unlink()  # the files may go once they are read
    assert planned(copy, *overlaid) == []
    replaced.write_bytes(content)
    os.utime(replaced, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_report_opens_offline_with_every_artefact(copy):
    answer = snakemake(copy, "--report", "report.html")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    page = (copy / "report.html").read_text()
    for name in (*TABLES, *FIGURES, "ledger", "darcy.json"):
        assert name in page
