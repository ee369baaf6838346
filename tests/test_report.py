"""From a number to its run: pages, the verb trace, and all artefacts in one document, on synthetic runs."""

from __future__ import annotations

import os
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path

import pandas
import pytest

from conftest import PROJECT
from flarepp import __main__
from flarepp.paper import document, html, style, typeset
from flarepp.paper.trace import FIELDS, trace
from flarepp.paper.typeset import Block, Cell, Table
from flarepp.record import digest, read_json, records, write_json, write_record, write_records

LABELS = {"flare": "FLARE", "flarepp": "FLARE++"}
ERRORS = {("darcy", "flare"): 0.0524, ("darcy", "flarepp"): 0.39829747285693884, ("pipe", "flare"): 0.51,
          ("pipe", "flarepp"): 0.5}
PAPER = PROJECT / "src/flarepp/paper"
ARTEFACTS = {kind: sorted(path.stem for path in (PAPER / f"{kind}s").glob("[!_]*.py")) for kind in ("table", "figure")}


class Page(HTMLParser):
    """The anchors and links of a page, the text within each anchor, and the tags it uses."""

    def __init__(self, text: str):
        super().__init__()
        self.links, self.anchors, self.tags, self.open = [], {}, set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.add(tag)
        if tag not in ("br", "meta"):
            self.open.append((tag, attributes.get("id")))
        if tag == "a":
            self.links.append([attributes["href"], ""])
        if "id" in attributes:
            assert attributes["id"] not in self.anchors
            self.anchors[attributes["id"]] = ""

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, text):
        for _, name in self.open:
            if name:
                self.anchors[name] += text
        if any(tag == "a" for tag, _ in self.open):
            self.links[-1][1] += text


def run_of(dataset: str, model: str, seed: int, suite: str = "table1") -> str:
    return f"results/quick/runs/{suite}/{dataset}/{model}/B2-M16-fp32-s{seed}"


def write_run(dataset: str, model: str, seed: int, suite: str = "table1") -> dict:
    """A finished run; returns its entry of the suite's plan."""
    path = Path(run_of(dataset, model, seed, suite))
    path.mkdir(parents=True)
    spec = {"scale": "quick", "dataset": {"name": dataset}, "model": {"name": "backbone", "mixer": model, "num_blocks": 2},
            "training": {"seed": seed, "precision": "fp32", "steps": 10, "batch_size": 2}}
    write_json(spec, path / "spec.json")
    (path / "model.safetensors").write_bytes(f"{path}".encode())
    error = ERRORS[dataset, model] * (1 + seed / 100)
    provenance = {"dataset": {"source": "generated", "fingerprint": "f" * 64}, "device": "a <machine>",
                  "git": {"commit": "c" * 40, "dirty": True}}
    metrics = {"last": error, "ema": 2 * error, "best_test": error / 2, "parameter_count": 26_849}
    write_record({"status": "ok", "message": "", "metrics": metrics, "spec": spec, "provenance": provenance}, path)
    return {"run": str(path), "spec": digest(spec), "dataset": dataset, "dataset_label": dataset.capitalize(),
            "model": model, "label": LABELS[model], "role": "ranked", "num_blocks": 2, "num_latents": 16,
            "precision": "fp32", "seed": seed}


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Two models on two datasets with two seeds, as Table 1 and as Figure 4, below the working folder."""
    monkeypatch.chdir(tmp_path)
    for suite in ("table1", "figure4"):
        entries = [write_run(*key, seed, suite) for key in ERRORS for seed in (0, 1)]
        path = Path(f"results/quick/records/{suite}.csv")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_records(records({"suite": suite, "scale": "quick", "entries": entries}), path)
    call(monkeypatch, "table", "table1", "--records", "results/quick/records/table1.csv", "--out", "results/quick/tables",
         "--shown", "last", "--compared", "last", "--scale", "quick")
    return Path("results/quick")


def call(monkeypatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["flarepp", *words])
    return __main__.main()


def test_the_same_runs_have_the_same_anchor():
    links = html.Links()
    found = [links.to(runs) for runs in (("a", "b"), ("b",), ("a", "b"), ("b", "a"), ("a", "a"), ("b",), ("a",))]
    assert found == ["runs-1", "run-2", "runs-1", "runs-2", "runs-3", "run-2", "run-1"]
    assert links.runs == ["a", "b"] and links.sets == [("a", "b"), ("b", "a"), ("a", "a")]


def test_a_page_escapes_whatever_a_label_holds():
    hostile = '<script>alert("1")</script> & \'x\' <img src=x onerror=y>'
    cells = [Cell(hostile, True, True, ("a",), (hostile,)), Cell(hostile, runs=(hostile, "other")), Cell("")]
    columns = [("", hostile, "l"), (hostile, hostile, "r"), (hostile, "", "r")]
    table = Table(hostile, columns, [Block([cells], hostile)], hostile, [("a", hostile)])
    page = Page(html.page(hostile, [(hostile, table), (hostile, [hostile])]))
    assert not page.tags & {"script", "img"} and page.open == []
    assert page.links[0][1] == hostile


def test_a_page_stands_alone_and_shows_the_table():
    rows = [[Cell("FLARE++"), Cell("0.38", bold=True)], [Cell("FLARE"), Cell("0.64", underline=True, marks=("a", "b"))]]
    blocks = [Block(rows), Block([[Cell("Constant"), Cell("--")]], "not ranked")]
    columns = [("", "model", "l"), ("ours", "Darcy", "r")]
    page = html.page("Table 1", [("", Table("Errors.", columns, blocks, "scale quick", [("a", "why")]))])
    assert "<b>0.38</b>" in page and "<u>0.64</u><sup>a,b</sup>" in page
    assert "scale quick" in page and "<sup>a</sup> why." in page
    assert '<th colspan="1">ours</th>' in page and '<td class="title" colspan="2">not ranked</td>' in page
    assert "Runs" not in page and not re.search(r"https?:|src=|url\(|@import", page)


def test_every_link_has_its_anchor_and_each_run_is_listed_once():
    runs = [("r/1",), ("r/2",), ("r/1", "r/2"), ("r/2", "r/1", "r/3"), ("r/1",)]
    table = Table("c", [("", "n", "r")], [Block([[Cell(str(number), runs=each)] for number, each in enumerate(runs)])])
    page = Page(html.page("t", [("", table), ("again", table)]))
    assert {target[1:] for target, _ in page.links} == set(page.anchors) == {"run-1", "run-2", "run-3", "runs-1", "runs-2"}
    for place, folders in enumerate(runs):
        text = page.anchors[page.links[place][0][1:]]
        assert all(folder in text for folder in folders) and len(re.findall("r/[0-9]", text)) == len(folders)
    missing = [text.split() for text in page.anchors.values() if "the record is not here" in text]
    assert [text[0][:3] for text in missing] == ["r/1", "r/2", "r/3"]


def test_two_clicks_from_the_table_to_the_runs_behind_a_number(results):
    page = Page((results / "tables/table1.html").read_text(encoding="utf-8"))
    shown = f"{100 * ERRORS['darcy', 'flarepp'] * 1.005:.1f}"  # the mean of both seeds
    target = next(target for target, text in page.links if text.startswith(shown))
    folders = [run_of("darcy", "flarepp", seed) for seed in (0, 1)]
    assert all(folder in page.anchors[target[1:]] for folder in folders)
    for folder in folders:
        target = next(target for target, text in page.links if text == folder)
        record, text = read_json(Path(folder) / "metrics.json"), page.anchors[target[1:]]
        seen = ("status: ok", f"seed: {folder[-1]}", f"last {record['metrics']['last']:g}", "scale: quick",
                "precision: fp32", "device: a <machine>", "c" * 40 + " with uncommitted changes", record["sha256"],
                record["files"]["model.safetensors"])
        assert all(word in text for word in seen)


def test_a_record_that_was_changed_is_neither_shown_nor_traced(results):
    path = Path(run_of("darcy", "flarepp", 0), "metrics.json")
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 7'))
    with pytest.raises(ValueError, match="changed after the run ended"):
        trace("table1", ["darcy", "flarepp"], results)
    with pytest.raises(ValueError, match="changed after the run ended"):
        html.page("t", [("", Table("c", [("", "n", "r")], [Block([[Cell("1", runs=(str(path.parent),))]])]))])


def test_weights_that_were_changed_are_not_traced(results):
    Path(run_of("darcy", "flarepp", 0), "model.safetensors").write_bytes(b"other")
    with pytest.raises(ValueError, match="model.safetensors: was changed"):
        trace("table1", ["darcy", "flarepp"], results)


@pytest.mark.parametrize("words", [["darcy", "flarepp"], ["FLARE++", "Darcy"]])
def test_trace_prints_the_number_and_its_runs(results, words, monkeypatch, capsys):
    assert call(monkeypatch, "trace", "table1", *words) == 0
    lines = capsys.readouterr().out.splitlines()
    folders = [line.strip() for line in lines if line.startswith("  results/")]
    assert folders == [run_of("darcy", "flarepp", seed) for seed in (0, 1)]
    mean = next(line for line in lines if line.startswith("  error_percent: "))
    assert mean.split()[1] == f"{100 * ERRORS['darcy', 'flarepp'] * 1.005:.1f}"
    record = read_json(Path(folders[0]) / "metrics.json")
    expected = {"status": "ok", "seed": "0", "last": repr(record["metrics"]["last"]), "spec": f"{folders[0]}/spec.json",
                "dataset fingerprint": "f" * 64, "git commit": "c" * 40 + " with uncommitted changes",
                "device": "a <machine>",
                "weights": f"{folders[0]}/model.safetensors", "weights sha256": record["files"]["model.safetensors"],
                "made again by": f"python -m flarepp train '{folders[0]}/spec.json'"}
    first = lines[lines.index(f"  {folders[0]}") + 1 : lines.index(f"  {folders[1]}")]
    found = dict(line.strip().split(": ", 1) for line in first)
    assert {name: found[name] for name in expected} == expected


def test_trace_of_a_figure_goes_through_its_suite(results):
    lines = trace("figure4", ["B2", "M16", "fp32", "pipe", "flare"], results).splitlines()
    assert [line.strip() for line in lines if "results/quick/runs" in line and ":" not in line] == [
        run_of("pipe", "flare", seed, "figure4") for seed in (0, 1)]
    assert any(line.startswith("  last_percent: 51.3 (51.25") for line in lines)
    fields = trace("figure7", [], results)
    assert run_of("darcy", "flare", 0) in fields and "pipe" not in fields


def test_the_figures_of_fields_are_traced_on_their_dataset():
    for name, dataset in FIELDS.items():
        assert f'"{name}", "{dataset}"' in (PROJECT / f"src/flarepp/paper/figures/{name}.py").read_text()


def test_trace_of_a_claim_of_a_size_and_of_a_cell_without_run(results):
    runs = ";".join(run_of("darcy", model, 0) for model in LABELS)
    claim = {"id": "t1.best", "measured": "lowest on 1 of 2", "verdict": "not comparable (scale quick)", "runs": runs}
    pandas.DataFrame([claim, {"id": "lra.mean", "verdict": "not run"}]).to_csv(results / "ledger.csv", index=False)
    text = trace("ledger", ["T1.best"], results)
    assert all(run in text for run in runs.split(";")) and "verdict: not comparable (scale quick)" in text
    step = {"model": "flare", "num_latents": 64.0, "step_ms": 1234.5, "status": "ok", "runs": runs}
    steps = [step | {"num_tokens": tokens} for tokens in (1024, 65536)]
    steps.append({"model": "full", "num_tokens": 65536, "status": "out of memory"})
    pandas.DataFrame(steps).to_csv(results / "tables/figure5_cells.csv", index=False)
    assert "step_ms: 1,234 (1234.5)" in trace("figure5_cells", ["m64", "N65536"], results)
    assert trace("figure5_cells", ["full"], results).endswith("no run: out of memory")
    cells = [{"dataset": "darcy", "num_latents": latents, "runs": runs} for latents in ("8", "mean of 8 16")]
    pandas.DataFrame(cells).to_csv(results / "tables/figure3_cells.csv", index=False)
    assert trace("figure3_cells", ["M8"], results) != trace("figure3_cells", ["mean of 8 16"], results)


@pytest.mark.parametrize("words, expected", [
    (["table1", "drcy"], "no cell is named 'drcy'; nearest: darcy"),
    (["table1", "darcy", "flarep"], "no cell with darcy is named 'flarep'; nearest: flarepp"),
    (["figure4", "darcy", "B8"], "no cell with darcy is named 'B8'; nearest: B2"),
    (["tabel1"], "there is no artefact 'tabel1'; nearest: table1"),
    (["figure2"], "drawn from the datasets"),
    (["table2"], "`snakemake table2` makes it"),
])
def test_trace_refuses_nonsense_in_one_line_with_the_nearest_names(results, monkeypatch, capsys, words, expected):
    assert call(monkeypatch, "trace", *words) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1


@pytest.mark.parametrize("kind, verb, spec", [
    ("table2/flare/N64-R2", "parallel", {"scaling": {"num_ranks": 2}}),
    ("figure5/flare/M8/N64", "cost", {"cost": {"num_tokens": 64}}),
    ("table1/darcy/constant/s0", "predictor", {"training": {"seed": 0}})])
def test_every_kind_of_run_says_what_makes_it_again(tmp_path, monkeypatch, kind, verb, spec):
    monkeypatch.chdir(tmp_path)
    write_record({"status": "ok", "metrics": {}, "spec": spec}, Path(kind))
    folder = "figure5/flare/M8" if verb == "cost" else kind
    assert html.origin.of_run(kind)["made again by"] == f"python -m flarepp {verb} '{folder}/spec.json'"


@pytest.fixture
def artefacts(tmp_path):
    """A table and a figure of every name, and the folder of the document; the caption of every figure is the project's."""
    table = Table("Errors in %, B ≥ 2.", [("", "model", "l")], [Block([[Cell("FLARE++_x")]])], "scale quick")
    tables = [tmp_path / f"results/quick/tables/{name}.tex" for name in ARTEFACTS["table"]]
    tables.append(tmp_path / "results/quick/ledger.tex")
    for path in tables:
        typeset.write(table, pandas.DataFrame(), path.parent, path.stem)
    out = tmp_path / "paper_figures/quick"
    for name in ARTEFACTS["figure"]:
        with style.figure(out, name, (2, 1), "scale quick") as drawing:
            drawing.subplots()
    figures = [out / f"{name}.pdf" for name in ARTEFACTS["figure"]]
    return {"tables": tables, "figures": figures, "captions": PROJECT / "workflow/report", "out": out, "scale": "quick"}


def test_the_document_holds_every_artefact_by_its_number(artefacts, monkeypatch):
    monkeypatch.setenv("PATH", "")
    said = document.build(**artefacts)
    text = (artefacts["out"] / "paper.tex").read_text()
    assert "no LaTeX engine" in said and "\n" not in said and not (artefacts["out"] / "paper.pdf").exists()
    sections = re.findall(r"\\section\{(.*?)\}", text)
    assert sections[:6] == [f"Table {number}" for number in range(1, 7)] and sections[-1] == "Ledger"
    assert sections[6:14] == [f"Figure {number}" for number in range(2, 10)]
    assert sorted(sections) == sorted(map(html.title, [*ARTEFACTS["table"], *ARTEFACTS["figure"], "ledger"]))
    assert r"\section{Figure 7}" "\n" r"\setcounter{figure}{6}" in text
    tables = [f"tables/{name}" for name in ARTEFACTS["table"]]
    assert set(re.findall(r"\\input\{\.\./\.\./results/quick/(.*?)\.tex\}", text)) == {*tables, "ledger"}
    assert set(re.findall(r"\\includegraphics\[.*?\]\{(.*?)\}", text)) == {f"{name}.pdf" for name in ARTEFACTS["figure"]}
    captions = re.findall(r"\\caption\{(.*)\}", text)
    assert len(captions) == len(ARTEFACTS["figure"]) and not re.search(r"``|\{\{|snakemake", "".join(captions))


def test_the_document_compiles_to_the_same_bytes_where_there_is_an_engine(artefacts):
    said = document.build(**artefacts)
    pdf = artefacts["out"] / "paper.pdf"
    if not shutil.which(document.ENGINE):
        assert "no LaTeX engine" in said and not pdf.exists()
        return
    assert said.endswith(f"{pdf} are written"), said
    first = pdf.read_bytes()
    os.utime(artefacts["figures"][0], (0, 0))
    document.build(**artefacts)
    assert first.startswith(b"%PDF") and pdf.read_bytes() == first
    assert sorted(path.name for path in artefacts["out"].glob("paper*")) == ["paper.pdf", "paper.tex"]


@pytest.mark.parametrize("script, expected", [
    ("echo \"! LaTeX Error: File \\`booktabs.sty' not found.\"; exit 1", "no paper.pdf: pdflatex lacks booktabs.sty"),
    ("for word; do case $word in -output-directory=*) echo %PDF > \"${word#*=}/paper.pdf\";; esac; done",
     "paper.pdf are written")])
def test_what_the_engine_lacks_is_one_line(artefacts, tmp_path, monkeypatch, script, expected):
    engine(tmp_path, monkeypatch, script)
    said = document.build(**artefacts)
    assert said.endswith(expected) and (artefacts["out"] / "paper.pdf").exists() == ("written" in expected)


def test_the_engine_runs_until_page_numbers_stay(tmp_path, monkeypatch):
    """Once for the contents, once more with the pages that they move, and once more with their numbers."""
    script = "for word; do case $word in -output-directory=*) echo pass >> \"${word#*=}/paper.pdf\";; esac; done"
    engine(tmp_path, monkeypatch, script)
    document.build([], [], tmp_path, tmp_path / "out", scale="quick")
    assert (tmp_path / "out/paper.pdf").read_text() == "pass\n" * 3


def test_a_document_that_does_not_compile_is_an_error_and_leaves_no_older_pdf(artefacts, tmp_path, monkeypatch):
    (artefacts["out"] / "paper.pdf").write_bytes(b"older")
    engine(tmp_path, monkeypatch, "echo '! Undefined control sequence.'; exit 1")
    with pytest.raises(ValueError, match="Undefined control sequence"):
        document.build(**artefacts)
    assert not (artefacts["out"] / "paper.pdf").exists()


@pytest.mark.parametrize("changed, words", [
    ({"tables": [Path("nope.tex")]}, "nope.tex: not there"),
    ({"tables": [Path("table1.md")]}, "table1.md: a .tex file is wanted"),
    ({"figures": [Path("x.png")]}, "x.png: a .pdf file is wanted"), ({"figures": [Path("x.pdf")]}, "x.pdf: not there"),
    ({"captions": Path("nowhere")}, "nowhere/[a-z0-9_]+.rst: not there")])
def test_the_document_is_made_of_its_kinds_of_files_alone(artefacts, changed, words):
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        document.build(**artefacts | changed)
    assert not (artefacts["out"] / "paper.tex").exists()


def test_a_dataset_names_a_column_of_table5(results):
    runs = [run_of(dataset, "flarepp", 0) for dataset in ("darcy", "pipe")]
    row = {"model": "matched backbone", "setting": "batch size", "darcy": 4, "pipe": 8, "darcy_paper": 2, "pipe_paper": 1}
    pandas.DataFrame([row | {"runs": ";".join(runs)}]).to_csv(results / "tables/table5.csv", index=False)
    lines = trace("table5", ["darcy", "batch size"], results).splitlines()
    assert lines[1:4] == ["  ours: 4", "  paper: 2", f"  {runs[0]}"] and not any(runs[1] in line for line in lines)


@pytest.mark.parametrize("words, expected", [
    (["figure", "figure4", "--records", "no.csv", "--out", "x", "--shown", "last"], "--records no.csv: not there"),
    (["table", "table3", "--cards", "no.json", "--out", "x"], "no.json: the dataset card is missing"),
    (["document", "--tables", "t.tex", "--figures", "f.pdf", "--captions", ".", "--out", "file"],
     "--out file: a file is where a folder is wanted")])
def test_a_file_that_is_not_there_or_in_the_way_is_one_line_that_names_it(tmp_path, monkeypatch, capsys, words, expected):
    monkeypatch.chdir(tmp_path)
    for name in ("t.tex", "f.pdf", "f.rst", "file"):
        Path(name).write_text("")
    assert call(monkeypatch, *words, "--scale", "quick") == 2
    error = capsys.readouterr().err
    assert expected in error and "Errno" not in error and error.count("\n") == 1


def engine(folder: Path, monkeypatch, script: str) -> None:
    """A program of the engine's name, first on PATH."""
    path = folder / "bin" / document.ENGINE
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")


def test_captions_hold_no_character_or_markup_that_the_document_cannot_set():
    for name in ARTEFACTS["figure"]:
        text = (PROJECT / f"workflow/report/{name}.rst").read_text(encoding="utf-8")
        assert all(character.isascii() or character in typeset.LATEX for character in text), name
        assert not re.search(r"\*|:\w+:|`_|^\.\. ", re.sub("``.*?``", "", text), flags=re.MULTILINE), name


def test_columns_of_a_page_are_aligned_and_grouped():
    columns = [("", "model", "l"), ("ours", "A", "r"), ("ours", "B", "r"), ("paper", "A", "r"), ("", "runs", "l")]
    page = html.page("t", [("", Table("c", columns, [Block([[Cell(str(n)) for n in range(5)]])]))])
    assert '<tr><td></td><th colspan="2">ours</th><th colspan="1">paper</th><td></td></tr>' in page
    kinds = ["l", "r g", "r", "r g", "l g"]
    assert re.findall('<t[dh] class="([a-z ]+)">', page) == kinds * 2 and page.count("<section") == page.count("<h2>") == 0


@pytest.mark.parametrize("value, shown", [(999.4, "999 (999.4)"), (999.6, "1,000 (999.6)"), (-1234.5, "-1,234 (-1234.5)"),
                                          (0.012345, "0.0123 (0.012345)"), (7, "7"), ("a", "a")])
def test_a_traced_number_is_shown_as_in_tables_and_in_full(results, value, shown):
    pandas.DataFrame([{"id": "a", "measured": value, "runs": ""}], dtype=object).to_csv(results / "ledger.csv", index=False)
    assert trace("ledger", ["a"], results) == f"ledger: a\n  measured: {shown}\n  no run"


def test_a_cell_with_a_card_has_no_run_and_words_are_not_named_twice(results):
    cells = [{"dataset": "darcy", "points": 4, "card": "data/darcy.json"}, {"dataset": "darcy_b", "card": "data/b.json"}]
    pandas.DataFrame(cells).to_csv(results / "tables/table3.csv", index=False)
    assert trace("table3", ["darcy"], results) == "table3: darcy\n  card: data/darcy.json"
    with pytest.raises(ValueError, match="no cell with darcy is named 'darc'; nearest: none"):
        trace("table3", ["darcy", "darc"], results)


def test_figures_of_fields_show_two_models(results, monkeypatch):
    monkeypatch.setitem(ERRORS, ("darcy", "full"), 0.4)
    monkeypatch.setitem(LABELS, "full", "Full")
    entries = [write_run("darcy", model, 7) for model in ("full", "flare")]
    write_records(records({"suite": "table1", "scale": "quick", "entries": entries}), results / "records/table1.csv")
    found = trace("figure7", [], results).splitlines()
    assert [line for line in found if line.startswith("figure7")] == ["figure7: Darcy, FLARE, fp32, B2, M16"]


def test_the_document_numbers_what_the_paper_lacks_by_letters_and_sets_captions(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    for name in ("figure2", "figure10", "more"):
        (tmp_path / f"{name}.rst").write_text("Of ``a_b`` at\n``{{ snakemake.config['scale'] }}`` & more.\n")
        (tmp_path / f"{name}.pdf").touch()
    for name in ("ledger", "table5", "cells"):
        (tmp_path / f"{name}.tex").touch()
    files = [[tmp_path / f"{name}.{kind}" for name in names] for kind, names in (
        ("tex", ("ledger", "cells", "table5")), ("pdf", ("more", "figure10", "figure2")))]  # fmt: skip
    document.build(*files, tmp_path, tmp_path, scale="quick")
    text = (tmp_path / "paper.tex").read_text()
    found = re.findall(r"\\section\{(.*?)\}|\\setcounter\{(\w+)\}\{(\d+)\}(?:\\renewcommand\{\\the\w+\}\{(\w))?", text)
    assert ["".join(each) for each in found if each[1] != "secnumdepth"] == [
        "Table 5", "table4", "Figure 2", "figure1", "Figure 10", "figure9", "Cells", "table0S", "figure0S", "More", "Ledger",
        "table0L", "figure0L"]  # fmt: skip
    assert text.count(r"\caption{Of \texttt{a\_b} at \texttt{quick} \& more.}") == 3
