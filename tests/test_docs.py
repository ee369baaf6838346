"""What README and docs/ show works: the example mixer and dataset, added to a copy, become runs; commands, targets, files, links."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from clone import clone, variables
from conftest import PROJECT
from flarepp.__main__ import parser
from flarepp.record import read_json
from flarepp.spec import SCALES

README = (PROJECT / "README.md").read_text(encoding="utf-8")
PAGES = {path.name: path.read_text(encoding="utf-8") for path in (PROJECT / "README.md", *sorted((PROJECT / "docs").glob("*.md")))}
DATASET = """
import json, yaml
from flarepp.spec import expand
plan = expand(yaml.safe_load(open("config.yaml")))
runs = {path.split("/")[5]: run.spec for path, run in plan.runs.items() if "/table1/rods/" in path}
predictors = [path.split("/")[5] for path in plan.predictors if "/rods/" in path]
print(json.dumps({"data": plan.datasets["rods"], "models": list(runs), "predictors": predictors, "spec": runs["flarepp"]}))
"""
PLACEHOLDERS = {"R": "2", "…": "pipe"}


def example(page: str, kind: str) -> str:
    """The only block of a kind on a page."""
    (code,) = re.findall(rf"```{kind}\n(.*?)```", PAGES[page], flags=re.DOTALL)
    return code


@pytest.fixture
def copy(tmp_path) -> Path:
    """A clone, at scale smoke, with the files that docs/add_a_mixer.md and docs/add_a_dataset.md show."""
    folder = clone(tmp_path / "a clone")
    for name, page in (("mixers/luna.py", "add_a_mixer.md"), ("data/rods.py", "add_a_dataset.md")):
        code = example(page, "python")
        assert len(code.splitlines()) <= 40 and f"`src/flarepp/{name}`" in PAGES[page]
        (folder / "src/flarepp" / name).write_text(code)
    return folder


def call(folder, *words):
    answer = subprocess.run([sys.executable, *words], cwd=folder, env=variables(folder, OMP_NUM_THREADS="1"), capture_output=True,
                            text=True, timeout=240)  # fmt: skip
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout + answer.stderr


def test_the_example_mixer_is_a_file_a_line_and_a_name(copy):
    """As docs/add_a_mixer.md says, word for word in config.yaml; its first cell by Snakemake, with what else the record needs."""
    config = (PROJECT / "config.yaml").read_text(encoding="utf-8").replace("scale: quick", "scale: smoke", 1)
    config = config.replace("\nmodels:\n", "\nmodels:\n" + example("add_a_mixer.md", "yaml"), 1)
    config = re.sub(r"(  table1:[^\n]*\n    models: \[[^\]]*)\]", r"\1, luna]", config, count=1)
    (copy / "config.yaml").write_text(config, encoding="utf-8")
    asked = re.search(r"snakemake --cores all (results/quick/runs/\S*/luna/\S*)\n", PAGES["add_a_mixer.md"])[1]
    folder = Path(asked.replace("quick", "smoke").replace("B2-M16", "B1-M8")).parent
    call(copy, "-m", "snakemake", "--cores", "2", "--scheduler", "greedy", str(folder / "metrics.json"))
    record = read_json(copy / folder / "metrics.json")
    assert record["status"] == "ok" and record["metrics"]["steps"] == 12
    assert read_json(copy / folder / "spec.json")["model"]["num_latents"] == 8
    assert len(list(copy.glob("results/smoke/runs/**/metrics.json"))) == 1  # and no other run


def test_the_example_dataset_is_made_and_every_model_runs_on_it(copy, config):
    """One line of configuration: the dataset's file and card, a run of each model of Table 1 and each trivial predictor."""
    config["datasets"] |= yaml.safe_load(example("add_a_dataset.md", "yaml"))
    (copy / "config.yaml").write_text(yaml.safe_dump(config | {"scale": "smoke"}))
    plan = json.loads(call(copy, "-c", DATASET))
    assert plan["models"] == config["suites"]["table1"]["models"] and plan["predictors"] == list(config["predictors"])
    words = ["--store", "rods.h5", "--card", "rods.json", "--generated", "generated"]
    call(copy, "-m", "flarepp", "data", json.dumps(plan["data"]), *words)
    card = read_json(copy / "rods.json")
    assert card["counts"] == {"train": 64, "test": 16, "points": 41} and card["dimension"] == "1D" and card["grid"] == [41]
    assert card["source"] == "generated"
    (copy / "run").mkdir()
    (copy / "run" / "spec.json").write_text(json.dumps(plan["spec"]))
    call(copy, "-m", "flarepp", "train", "run/spec.json", "--data", "rods.h5")
    assert read_json(copy / "run" / "metrics.json")["status"] == "ok"


def commands() -> list[tuple[str, str]]:
    """(page, command) of every command that README and docs/ show, in blocks without a language and in the text."""
    found = []
    for page, text in PAGES.items():
        blocks = [code for kind, code in re.findall(r"(?ms)^```(\w*)\n(.*?)^```", text) if kind in ("", "sh")]
        spans = re.findall(r"`([^`]+)`", re.sub(r"(?ms)^```.*?^```", "", text))
        for line in [*(line for block in blocks for line in block.splitlines()), *(span.replace("\n", " ") for span in spans)]:
            if shown := re.match(r"(?:[A-Z_]+=\S* )*((?:snakemake|make|python|torchrun|pip) .*)", line):
                words = [PLACEHOLDERS.get(word, word) for word in shlex.split(shown[1], comments=True)]
                found.append((page, shlex.join(words)))
    return sorted(set(found))


def known_targets() -> set[str]:
    folders = (PROJECT / "src/flarepp/paper" / kind for kind in ("tables", "figures"))
    return {path.stem for folder in folders for path in folder.glob("*.py")} - {"__init__"} | {"ledger", "paper_pdf", "all"}


def check_snakemake(words: list[str]) -> None:
    """Options that Snakemake has, values and targets that the pipeline has."""
    from snakemake.cli import parse_args

    if "--profile" in words:  # may name a plugin that is not installed here
        place = words.index("--profile")
        assert (PROJECT / words[place + 1] / "config.yaml").exists(), words
        words = words[:place] + words[place + 2 :]
    given = parse_args(words)[1]
    for target in given.targets or ():
        assert target in known_targets() or target.startswith("results/"), target
    for value in given.config or ():
        name, _, chosen = value.partition("=")
        assert name in yaml.safe_load((PROJECT / "config.yaml").read_text(encoding="utf-8")), value
        assert name != "scale" or chosen in SCALES, value


def check_python(words: list[str]) -> None:
    """A verb with arguments that it takes, a module, or a file of the project. A verb alone is only named."""
    if words[:2] == ["-m", "flarepp"]:
        with pytest.raises(SystemExit, match="^0$") if len(words) == 3 or "--help" in words else contextlib.nullcontext():
            parser().parse_args(words[2:] if len(words) > 3 else [*words[2:], "--help"])
    elif words[0] == "-m":
        assert words[1] in ("pytest", "flarepp.devices"), words
    else:
        assert (PROJECT / words[0]).exists(), words


@pytest.mark.parametrize("page, command", commands())
def test_every_command_is_understood(page, command):
    tool, *words = shlex.split(command)
    if tool == "snakemake":
        check_snakemake(words)
    elif tool == "python":
        check_python(words)
    elif tool == "make":
        assert {*words} <= {*re.search(r"\.PHONY: (.*)", (PROJECT / "Makefile").read_text())[1].split()}
    elif tool == "torchrun":
        check_python(words[words.index("-m") :])
    else:
        extra = re.search(r"\[(\w+)\]", command)[1]
        assert words[0] == "install" and re.search(rf"(?m)^{extra} = \[", (PROJECT / "pyproject.toml").read_text())


def test_commands_are_found():
    assert len(commands()) > 40 and {page for page, _ in commands()} >= {"README.md", "paper_scale.md", "cluster.md"}


@pytest.mark.parametrize("words", [["--config", "scale=paper"], ["table1", "--config", "scale=paper", "data={source: generate}"]])
def test_what_pages_dry_run_is_planned(words):
    answer = call(PROJECT, "-m", "snakemake", "-n", *words)
    assert re.search(r"(?m)^table1 +1$", answer) and "This was a dry-run" in answer


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    folder = PROJECT if page == "README.md" else PROJECT / "docs"
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", PAGES[page]) if "://" not in link]
    assert [link for link in links if not (folder / link).exists()] == []
    assert all((folder / link).stat().st_size < 150_000 for link in links if link.endswith(".png"))


def test_every_page_is_linked_from_the_readme():
    assert {f"docs/{page}" for page in PAGES if page != "README.md"} <= set(re.findall(r"\]\((docs/[\w.]+)\)", README))


def test_the_readme_names_every_target():
    folders = (PROJECT / "src/flarepp/paper" / kind for kind in ("tables", "figures"))
    artefacts = {path.stem for folder in folders for path in folder.glob("*.py")} - {"__init__"}
    named = re.search(r"one artefact: ([a-z0-9_, ]+)", README).group(1).strip().split(", ")
    assert sorted(named) == sorted({*artefacts, "ledger", "paper_pdf"})
    for name in artefacts - {"figure7", "figure8"}:  # "figure6.pdf to figure9.pdf"
        assert f"{name}." in README, name


def test_every_named_target_and_file_exists():
    snakefiles = "".join(path.read_text() for path in (PROJECT / "workflow/rules").glob("*.smk"))
    for target in re.search(r"one artefact: ([a-z0-9_, ]+)", README).group(1).strip().split(", "):
        assert f'"{target}"' in snakefiles or f"rule {target}:" in snakefiles, target
    named = set(re.findall(r"`((?:src|tests|workflow|envs)/[\w/.]+)`", "".join(PAGES.values())))
    for name in named - {"src/flarepp/mixers/luna.py", "src/flarepp/data/rods.py", "envs/data.lock.json"}:
        assert (PROJECT / name).exists(), name
