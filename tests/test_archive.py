"""Results that travel: packed, placed elsewhere, drawn the same; and archives that are refused, with nothing placed."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import sys
import tarfile
from pathlib import Path

import h5py
import pytest

from flarepp import __main__, archive, record
from flarepp.data import store
from flarepp.provenance import exclusive
from folders import leave

ERRORS = {"full": 0.05, "flare": 0.0625, "flarepp": 0.03125, "transolver": 0.125}
RUN = "results/quick/runs/table1/darcy/flarepp/B2-fp32-s0"
STORE = "results/quick/data/elasticity.h5"
SHOWN = ("--shown", "last", "--scale", "quick")


@pytest.fixture
def call(monkeypatch, capsys):
    """`python -m flarepp ...` in this process: exit code, and all that it said."""
    def answer(*words) -> tuple[int, str]:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["flarepp", *map(str, words)])
        code = __main__.main()
        said = capsys.readouterr()
        return code, said.out + said.err

    return answer


@pytest.fixture(autouse=True)
def project(monkeypatch, tmp_path, benchmark):
    """A project, the working folder, with four runs, a dataset and notes on them; returns it."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    entries = [leave(model, error) for model, error in ERRORS.items()]
    store.write(benchmark, Path(STORE))
    card = benchmark.card | {"name": "elasticity", "fingerprint": benchmark.fingerprint}
    record.write_with_digest(card, Path(STORE).with_suffix(".json"))
    for path in (f"{RUN}/metrics.json", f"{RUN}/model.safetensors", STORE):
        record.write_json({"rule": "train", "params": ["'1'"], "conda_env": "x"}, archive.note_of(path))
    record.write_json({"suite": "table1", "scale": "quick", "entries": entries}, Path("plan.json"))
    return folder


def draw(call) -> dict[str, bytes]:
    """Records, a table and two figures from the run folders; returns what was drawn."""
    records = "results/quick/records/table1.csv"
    words = (("records", "--plan", "plan.json", "--out", records),
             ("table", "table1", "--records", records, "--out", "results/quick/tables", "--compared", "last", *SHOWN),
             ("figure", "learning_curves", "--records", records, "--out", "paper_figures/quick", *SHOWN),
             ("figure", "error_distribution", "--records", records, "--out", "paper_figures/quick", *SHOWN))
    for verb in words:
        assert call(*verb) == (0, "")
    folders = map(Path, ("results/quick/tables", "results/quick/records", "paper_figures/quick"))
    return {path.as_posix(): path.read_bytes() for folder in folders for path in folder.iterdir()}


@pytest.fixture
def drawn(call) -> dict[str, bytes]:
    """What is drawn from the project's runs, which the archive then has too."""
    return draw(call)


@pytest.fixture
def packed(call, tmp_path) -> Path:
    """The archive of the project, with weights."""
    assert call("archive", "--out", tmp_path / "quick.tar.gz", "--weights")[0] == 0
    return tmp_path / "quick.tar.gz"


@pytest.fixture
def elsewhere(project, packed, tmp_path, monkeypatch) -> Path:
    """An empty project, now the working folder."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def files(folder=Path()) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_same_results_give_the_same_bytes_and_a_manifest_of_their_origin(call, drawn, packed, tmp_path):
    shutil.copytree("results", tmp_path / "other/results")  # other times, other folder
    shutil.copytree("paper_figures", tmp_path / "other/paper_figures")
    shutil.copytree(".snakemake", tmp_path / "other/.snakemake")
    again = tmp_path / "again.tar.gz"
    code, said = call("archive", "--results", tmp_path / "other/results/quick", "--out", again, "--weights")
    assert code == 0 and "4 records of results/quick with weights, 1 datasets" in said
    assert again.read_bytes() == packed.read_bytes()
    with tarfile.open(packed) as tar:
        entries = tar.getmembers()
        manifest = json.load(tar.extractfile("manifest.json"))
    assert {(entry.mtime, entry.uid, entry.uname, entry.mode) for entry in entries} == {(0, 0, "", 0o644)}
    assert {entry.name for entry in entries} == {"manifest.json", *manifest["files"]}
    assert manifest["files"][STORE] == {"bytes": Path(STORE).stat().st_size, "sha256": record.sha256(Path(STORE))}
    assert (manifest["records"], manifest["status"], manifest["scale"]) == (4, {"ok": 4}, ["quick"])
    assert {"results/quick/tables/table1.md", "paper_figures/quick/learning_curves.pdf"} <= manifest["files"].keys()


def test_elsewhere_the_same_tables_and_figures_are_drawn_from_the_same_files(call, project, drawn, packed, elsewhere):
    code, said = call("import", packed)
    assert code == 0 and "4 records of results/quick, made on" in said and "22 files placed, 0 are here" in said, said
    assert "`snakemake -n --config scale=quick` says what this clone draws from them" in said
    before, placed = files(project), files()
    marks = {path for path in placed if path.endswith("imported.json")}
    assert placed.keys() - marks == before.keys() - drawn.keys() - {"plan.json"} and len(marks) == 4
    assert all(placed[path] == before[path] for path in placed.keys() - marks if path.startswith("results"))
    shutil.copy(project / "plan.json", ".")
    again = draw(call)
    (page,) = (path for path in drawn if path.endswith(".html"))
    assert len(drawn) == 10 and all(again[path] == content for path, content in drawn.items() if path != page)
    line = f"<li>imported from: quick.tar.gz, sha256 {record.sha256(packed)}</li>".encode()
    assert again[page].count(line) == 4 and again[page].replace(line, b"") == drawn[page]


def test_the_notes_come_without_what_another_machine_has_otherwise_and_no_file_is_older(call, packed, elsewhere):
    for path in (f"{RUN}/metrics.json", f"{RUN}/spec.json"):
        for kind in ("metadata", "incomplete"):  # of an earlier, killed run here
            own = Path(".snakemake") / kind / archive.note_of(path).relative_to(".snakemake/metadata")
            record.write_json({"rule": "old"}, own)
    assert call("import", packed)[0] == 0
    note = record.read_json(archive.note_of(f"{RUN}/metrics.json"))
    assert (note["rule"], note["params"], note["conda_env"], note["software_stack_hash"]) == ("train", ["'1'"], None, None)
    assert not archive.note_of(f"{RUN}/spec.json").exists() and not [*Path(".snakemake/incomplete").iterdir()]
    placed = [path for path in Path("results").rglob("*.*") if path.is_file() and path.name != "imported.json"]
    assert len(placed) == 22 and len({path.stat().st_mtime_ns for path in placed}) == 1


def test_runs_say_where_they_were_imported_from_until_they_are_made_here(call, drawn, packed, elsewhere, project):
    assert call("import", packed)[0] == 0
    shutil.copytree(project / "results/quick/records", "results/quick/records")
    words = ("trace", "learning_curves", "flarepp")
    assert f"imported from: quick.tar.gz, sha256 {record.sha256(packed)}" in call(*words)[1]
    spec, result = record.read_run(Path(RUN))
    record.write_record(result | {"message": "made here"}, Path(RUN))
    code, said = call(*words)
    assert code == 0 and "made here" in said and "imported" not in said and not Path(RUN, "imported.json").exists()
    note = record.read_json(Path("results/quick/runs/table1/darcy/flare/B2-fp32-s0/imported.json"))
    record.write_json(note | {"archive": "other.tar.gz"}, Path(RUN) / "imported.json")
    code, said = call(*words)
    assert code == 2 and f"{RUN}/imported.json: was changed after the run was imported" in said


def test_without_weights_and_then_with_them(call, project, packed, elsewhere, monkeypatch, tmp_path):
    monkeypatch.chdir(project)
    assert "without weights" in call("archive", "--out", tmp_path / "light.tar.gz")[1]
    monkeypatch.chdir(elsewhere)
    code, said = call("import", tmp_path / "light.tar.gz")
    assert code == 0 and "without weights: nothing to evaluate or export" in said
    assert not [*Path("results").rglob("model.safetensors")] and Path(RUN, "predictions.h5").exists()
    assert record.read_json(archive.note_of(f"{RUN}/model.safetensors"))["rule"] == "train"
    assert "4 files placed, 18 are here already" in call("import", packed)[1]
    assert Path(RUN, "model.safetensors").read_bytes() == b"flarepp"
    assert "0 files placed, 22 are here already" in call("import", packed)[1]


def test_results_that_differ_are_replaced_only_when_asked(call, project, packed, elsewhere, monkeypatch, tmp_path):
    monkeypatch.chdir(project)
    assert call("archive", "--out", tmp_path / "light.tar.gz")[0] == 0
    monkeypatch.chdir(elsewhere)
    leave("flarepp", 0.5)
    for name in ("checkpoint-1.pt", "benchmark.tsv", "train.log", "events.out.tfevents.1"):
        Path(RUN, name).touch()
    before = files()
    code, said = call("import", tmp_path / "light.tar.gz")
    words = f"{RUN}/history.csv: is here with another content, as are 2 further files"
    assert code == 2 and words in said and said.endswith("; --replace takes those of the archive and removes the weights of 1 "
                                                         "runs here, of which it has none\n")
    assert files() == before
    assert call("import", tmp_path / "light.tar.gz", "--replace")[0] == 0
    assert record.read_whole_run(Path(RUN))[1]["metrics"]["last"] == 0.03125
    own = {"spec.json", "history.csv", "predictions.h5", "metrics.json", "imported.json"}
    assert {path.name for path in Path(RUN).iterdir()} == own  # and nothing of the run that was here


def test_nothing_is_packed_or_placed_while_snakemake_works(call, packed, elsewhere, project, monkeypatch, tmp_path):
    for folder, words in ((elsewhere, ("import", packed)), (project, ("archive", "--out", tmp_path / "other.tar.gz"))):
        monkeypatch.chdir(folder)
        Path(".snakemake/locks").mkdir(parents=True)
        Path(".snakemake/locks/0.input.lock").touch()
        code, said = call(*words)
        assert code == 2 and "Snakemake works in this folder" in said
    assert not (elsewhere / "results").exists() and not (tmp_path / "other.tar.gz").exists()


@pytest.mark.parametrize("folder", [RUN, str(Path(RUN).parent)], ids=["run", "curve"])
def test_nothing_is_packed_or_placed_where_a_job_outlived_snakemake(call, packed, elsewhere, project, monkeypatch, tmp_path, folder):
    leave("flarepp", 0.5)
    with exclusive(elsewhere / folder / ".lock"), exclusive(project / folder / ".lock"):
        before = files()
        code, said = call("import", packed, "--replace")
        assert code == 2 and f"{folder}: a process still works there; wait for its end" in said and files() == before
        monkeypatch.chdir(project)
        code, said = call("archive", "--out", tmp_path / "other.tar.gz")
        assert code == 2 and "a process still works there" in said and not (tmp_path / "other.tar.gz").exists()
    monkeypatch.chdir(elsewhere)
    assert call("import", packed, "--replace")[0] == 0


def test_nothing_is_placed_or_removed_where_the_files_cannot_be_moved_whole(call, packed, elsewhere, monkeypatch):
    leave("flarepp", 0.5)
    before, stat = files(), Path.stat

    def on_two_disks(path, **words):
        found = [*stat(path, **words)]
        return os.stat_result([*found[:2], path == Path("results/quick"), *found[3:]])

    with monkeypatch.context() as patched:
        patched.setattr(archive.Path, "stat", on_two_disks)
        code, said = call("import", packed, "--replace")
    assert code == 2 and "results/quick: lies on another disk than results; let the whole of results lie there" in said
    assert files() == before


def test_nothing_is_removed_where_a_folder_cannot_be_written(call, packed, elsewhere, monkeypatch):
    leave("flare", 0.7)
    leave("flarepp", 0.5)
    before, access = files(), os.access
    monkeypatch.setattr(archive.os, "access", lambda path, mode: "flarepp" not in str(path) and access(path, mode))
    code, said = call("import", packed, "--replace")
    assert code == 2 and "flarepp" in said and files() == before


def test_what_stops_a_replacement_costs_one_run(call, packed, elsewhere, monkeypatch):
    leave("flare", 0.7)
    leave("transolver", 0.6)
    before, moved = files(), []

    def full(source, target):
        moved.append(str(target))
        if "/transolver/" in str(target):
            raise OSError(28, "No space left on device", str(target))
        return replace(source, target)

    replace = os.replace
    monkeypatch.setattr(archive.os, "replace", full)
    assert call("import", packed, "--replace")[0] == 2
    after = files()
    for run in {path.rpartition("/")[0] for path in before if path.endswith("metrics.json")} - {moved[-1].rpartition("/")[0]}:
        assert f"{run}/metrics.json" in after, run


def test_records_of_a_device_in_results_reference_travel_the_same_way(call, monkeypatch, tmp_path):
    Path("results/quick/runs/table1/darcy/flarepp").rename("curve")
    reference = Path("results/reference/a-gpu")
    (reference / "runs/figure5/flarepp").mkdir(parents=True)
    Path("curve/B2-fp32-s0").rename(reference / "runs/figure5/flarepp/N64")
    for path in (reference / "suite.json", reference / "runs/figure5/flarepp/spec.json"):
        record.write_json({"suite": "figure5"}, path)
    assert call("archive", "--results", reference, "--out", tmp_path / "gpu.tar.gz", "--weights")[0] == 0
    before = files(Path("results/reference"))
    shutil.rmtree(reference)
    assert call("import", tmp_path / "gpu.tar.gz")[0] == 0
    after = files(Path("results/reference"))
    assert len(before) == 7 and {path: after[path] for path in before} == before


@pytest.mark.parametrize("damage, words", [
    (lambda: Path(RUN, "predictions.h5").write_bytes(b"other"), f"{RUN}/predictions.h5: was changed after the run ended"),
    (lambda: Path(RUN, "history.csv").unlink(), f"{RUN}/history.csv: the file is missing"),
    (lambda: Path(RUN, "model.safetensors").unlink(), f"{RUN}/model.safetensors: the file is missing"),
    (lambda: Path(STORE).unlink(), "elasticity.h5"),
    (lambda: Path(STORE).with_suffix(".json").write_text("{}"), "elasticity.json: has no digest of itself"),
    (lambda: shutil.rmtree("results/quick/runs"), "results/quick: there is no finished run"),
])  # fmt: skip
def test_only_whole_results_are_packed(call, tmp_path, damage, words):
    damage()
    code, said = call("archive", "--out", tmp_path / "broken.tar.gz", "--weights")
    assert code == 2 and words in said and not (tmp_path / "broken.tar.gz").exists()


def test_a_folder_that_is_no_results_folder_is_refused(call, tmp_path):
    for folder in ("results", "paper_figures/quick", "results/quik"):
        code, said = call("archive", "--results", folder, "--out", tmp_path / "x.tar.gz")
        assert code == 2 and f"--results {folder}: expected a folder below `results`, such as results/quick" in said


# --- archives that nobody should trust


def members(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {entry.name: tar.extractfile(entry).read() for entry in tar.getmembers()}


def written(path: Path, contents: dict[str, bytes], *special: tarfile.TarInfo, listed: bool = True) -> Path:
    """An archive of these members, and of special ones; listed: under a manifest that fits."""
    if listed:
        manifest = json.loads(contents["manifest.json"])
        manifest["files"] = {name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
                             for name, content in contents.items() if name != "manifest.json"}  # fmt: skip
        contents = contents | {"manifest.json": json.dumps(manifest).encode()}
    with tarfile.open(path, "w:gz") as tar:
        for name, content in contents.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
        for entry in special:
            tar.addfile(entry, io.BytesIO(bytes(entry.size)))
    return path


def special(name: str, kind: bytes = tarfile.REGTYPE, target: str = "", size: int = 0) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname, entry.size = kind, target, size
    return entry


@pytest.mark.parametrize("entry, words", [
    (special("{folder}/escaped"), "leads out of the folder"),
    (special("results/../../escaped"), "leads out of the folder"),
    (special("results/link", tarfile.SYMTYPE, "/etc"), "a link or a device"),
    (special("results/link", tarfile.LNKTYPE, "/etc/passwd"), "a link or a device"),
    (special("results/pipe", tarfile.FIFOTYPE), "a link or a device"),
    (special("results/disk", tarfile.CHRTYPE), "a link or a device"),
    (special(f"{RUN}/metrics.json"), "File exists"),
    (special("results/zeros", size=300 * 2**20), "at most"),
    (special("results/quick/added"), "results/quick/added: is not listed in the manifest"),
], ids=["absolute", "climbing", "symlink", "hard link", "pipe", "device", "twice", "bomb", "added"])
def test_members_that_no_archive_has_are_refused(call, packed, elsewhere, tmp_path, entry, words):
    entry.name = entry.name.format(folder=tmp_path)
    path = written(tmp_path / "hostile.tar.gz", members(packed), entry)
    code, said = call("import", path)
    assert code == 2 and "hostile.tar.gz" in said and words in said, said
    assert files() == {} and not (tmp_path / "escaped").exists()


def edited(change):
    """Edit the record of a run, as `change` does, and let it have its digest again."""
    def edit(contents: dict) -> None:
        result = json.loads(contents[f"{RUN}/metrics.json"])
        change(result)
        result["sha256"] = record._sha256_of(record._without_digest(result))
        contents[f"{RUN}/metrics.json"] = json.dumps(result).encode()

    return edit


def predicted(change):
    """Edit the predictions of a run, as `change` does, and let its record have their digest."""
    def edit(contents: dict) -> None:
        content = io.BytesIO(contents[f"{RUN}/predictions.h5"])
        with h5py.File(content, "r+") as file:
            del file["target"]
            change(file)
        contents[f"{RUN}/predictions.h5"] = content.getvalue()
        digest = hashlib.sha256(content.getvalue()).hexdigest()
        edited(lambda result: result["files"].update({"predictions.h5": digest}))(contents)

    return edit


def external(file: h5py.File) -> None:
    file["target"] = h5py.ExternalLink("other.h5", "target")


def never_written(file: h5py.File) -> None:
    """Four terabytes that take no byte of the file."""
    file.create_dataset("target", (10**12,), "float32", chunks=(10**6,))


def manifest(**changes):
    def edit(contents: dict) -> None:
        contents["manifest.json"] = json.dumps(json.loads(contents["manifest.json"]) | changes).encode()

    return edit


def put(name, content):
    return lambda contents: contents.update({name: content})


def swap(first, second):
    return lambda contents: contents.update({first: contents[second], second: contents[first]})


OTHER = RUN.replace("flarepp", "flare")
EMPTY = hashlib.sha256(b"").hexdigest()


@pytest.mark.parametrize("change, words", [
    (put(f"{RUN}/metrics.json", b'{"status": "ok"}'), f"{RUN}/metrics.json: has no digest of itself"),
    (put(f"{RUN}/metrics.json", b'{"sha256": "00"}'), f"{RUN}/metrics.json: was changed after the run ended"),
    (edited(lambda result: result["spec"]["training"].update(seed=1)), f"{RUN}: its record is of another spec"),
    (edited(lambda result: result.update(status="fine")), f"{RUN}/metrics.json"),
    (edited(lambda result: result.pop("provenance")), f"{RUN}/metrics.json"),
    (edited(lambda result: result["metrics"].update(last=float("nan"))), f"{RUN}/metrics.json"),
    (edited(lambda result: result["metrics"].update(last=10**400)), f"{RUN}/metrics.json: metrics: got"),
    (edited(lambda result: result["files"].update({"/dev/null": EMPTY})), f"{RUN}/metrics.json: files: got"),
    (swap(f"{RUN}/predictions.h5", f"{OTHER}/predictions.h5"), f"{OTHER}/predictions.h5: was changed after the run ended"),
    (swap(f"{RUN}/metrics.json", f"{OTHER}/metrics.json"), f"{OTHER}: its record is of another spec"),
    (predicted(external), f"{RUN}/predictions.h5: target: the array lies elsewhere"),
    (predicted(never_written), f"{RUN}/predictions.h5: target: with it the file takes 4000000000"),
    (put("results/quick/suite.json", b"[]"), "results/quick/suite.json: expected a JSON object"),
    (lambda contents: contents.pop(f"{RUN}/metrics.json"), f"{RUN}/history.csv: is of no finished run"),
    (lambda contents: contents.pop(f"{RUN}/history.csv"), f"{RUN}/history.csv: the file is missing"),
    (lambda contents: contents.pop(STORE), "elasticity.h5"),
    (lambda contents: contents.pop(STORE.replace(".h5", ".json")), f"{STORE}: is of no finished run and of no dataset"),
    (lambda contents: contents.update({STORE: contents[STORE][:4000]}), f"{STORE}: cannot be read as HDF5"),
    (put("src/flarepp/train.py", b"import os"), "src/flarepp/train.py: no file of the pipeline"),
    (put("results/other/runs/a/spec.json", b"{}"), "results/other/runs/a/spec.json: no file of the pipeline"),
    (put(f"{RUN}/sitecustomize.py", b""), "sitecustomize.py: no file of the pipeline"),
    (manifest(results="../elsewhere"), "results: got '../elsewhere'"),
    (manifest(results="results/../src"), "results: got 'results/../src'"),
    (put(archive.note_of(STORE).as_posix(), b"[]"), "expected a JSON object"),
    (put(archive.note_of(STORE).as_posix(), b'{"code": 3}'), "code: not what Snakemake writes"),
    (put(archive.note_of(STORE).as_posix(), b'{"input": [3]}'), "input or log: not what Snakemake writes"),
    (manifest(format=2), "format: got 2; this version reads 1"),
])  # fmt: skip
def test_archives_whose_manifest_fits_are_refused_for_what_their_files_say(call, packed, elsewhere, tmp_path, change, words):
    contents = members(packed)
    change(contents)
    code, said = call("import", written(tmp_path / "hostile.tar.gz", contents))
    assert code == 2 and "hostile.tar.gz" in said and words in said and len(said.splitlines()) == 1, said
    assert files() == {}


def test_what_is_said_of_the_origin_is_what_the_records_say(call, packed, elsewhere, tmp_path):
    lies = {"records": 1234, "devices": 5, "torch": ["9.9"], "commits": ["f00\x1b[2J"], "scale": ["paper"], "weights": False}
    said_by_records = {"dataset": {"source": "generated"}, "device": "a CPU", "versions": {"torch": "2\x1b[2J"}, "git": ["f00"]}
    contents = members(packed)
    for change in (manifest(**lies), edited(lambda result: result.update(provenance=said_by_records))):
        change(contents)
    code, said = call("import", written(tmp_path / "lies.tar.gz", contents))
    assert code == 0 and "4 records of results/quick, made on a CPU, PyTorch unknown, commit unknown\n" in said, said
    assert "without weights" not in said and "--config scale=quick`" in said and "\x1b" not in said


@pytest.mark.parametrize("change, words", [
    (lambda contents: contents.pop("manifest.json"), "has no manifest.json"),
    (put("manifest.json", b"{"), "manifest.json: not valid JSON"),
    (lambda contents: contents.pop(STORE), f"{STORE}: is missing"),
    (put(STORE, b"other"), f"{STORE}: was changed"),
    (manifest(files=[]), "format"),
])  # fmt: skip
def test_archives_that_are_not_what_their_manifest_says_are_refused(call, packed, elsewhere, tmp_path, change, words):
    contents = members(packed)
    change(contents)
    code, said = call("import", written(tmp_path / "hostile.tar.gz", contents, listed=False))
    assert code == 2 and "hostile.tar.gz" in said and words in said, said
    assert files() == {}


@pytest.mark.parametrize("content", [slice(-9), slice(5000), b"", b"text", gzip.compress(b"text")])
def test_what_is_no_whole_archive_is_refused(call, packed, elsewhere, tmp_path, content):
    path = tmp_path / "half.tar.gz"
    path.write_bytes(packed.read_bytes()[content] if isinstance(content, slice) else content)
    code, said = call("import", path)
    assert code == 2 and "half.tar.gz" in said and files() == {}


def test_a_missing_archive_is_named(call, elsewhere):
    code, said = call("import", "gone.tar.gz")
    assert code == 2 and re.search("gone.tar.gz: not there", said)
