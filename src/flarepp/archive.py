"""Results that travel: all that a folder of results holds as one .tar.gz, and back, on another machine, without training.

An archive holds manifest.json (what it is, where it was made, bytes and SHA-256 of every other member) and, below the paths
that they have in the project, the records with their specs, learning curves and predictions, weights if asked for, the
datasets with their cards, Snakemake's notes on these files (from which sources and parameters each was made), and, for
readers without the project, the tables, the ledger and the figures. The same files give the same bytes.

`place` takes nothing on trust: unpacked into a folder aside within the bounds of `data.archive`, compared with the manifest,
every record, output, card and dataset read back with its checks, and only then moved to its place, each run's record last.
Tables and figures are not placed: Snakemake draws them here, from the records, and its notes tell it that these are up to
date.
"""

from __future__ import annotations

import base64
import errno
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import tarfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import h5py

from flarepp import record
from flarepp.data import benchmark_module, lra, store
from flarepp.data.archive import ALWAYS_ALLOWED, MAX_RATIO, unpack
from flarepp.data.lra import sequences
from flarepp.data.transfer import Refused

FORMAT = 1
MANIFEST = "manifest.json"
WEIGHTS = "model.safetensors"
RUN_FILES = ("spec.json", *record.OUTPUTS, "metrics.json")  # the last says that the others are there
NOTES, LOCKS = Path(".snakemake/metadata"), Path(".snakemake/locks")
OF_ONE_MACHINE = ("conda_env", "container_img_url", "software_stack_hash", "external_jobid")  # in a note
NOTE = {"rule": str | None, "code": str | None, "shellcmd": str | None, "input": list | None, "log": list | None,
        "params": list | None, "input_checksums": dict | None, "job_hash": int | None, "starttime": float | int | None,
        "endtime": float | int | None, "incomplete": bool | None, "record_format_version": int}  # what Snakemake reads of a note
OF_ONE_RUN = ("checkpoint-*.pt", "benchmark.tsv", "*.log", "events.out.tfevents.*")  # beside its results; no part of them
DRAWN = ("*.csv", "*.sha256", "ledger.*", "records/*", "tables/*")  # below the folder of results


# --- what belongs to a folder of results


def located(results: Path) -> tuple[Path, str]:
    """The project's folder, and the path of a folder of results in it; ValueError for a folder that is none."""
    parts = results.absolute().parts
    if "results" not in parts[:-1] or not results.is_dir():
        raise ValueError(f"--results {results}: expected a folder below `results`, such as results/quick")
    place = max(index for index, part in enumerate(parts[:-1]) if part == "results")
    return Path(*parts[:place]), "/".join(parts[place:])


def runs_of(results: Path) -> list[Path]:
    """The folders of finished runs, sorted."""
    return sorted(path.parent for path in results.rglob("metrics.json") if path.with_name("spec.json").exists())


def results_of(results: Path, weights: bool) -> list[Path]:
    """What cannot be drawn again: the files of finished runs and of the cost curves they are cells of, plans, datasets."""
    runs = runs_of(results)
    names = [name for name in RUN_FILES if weights or name != WEIGHTS]
    files = [run / name for run in runs for name in names if (run / name).exists()]
    files += {run.parent / "spec.json" for run in runs if (run.parent / "spec.json").exists()}
    cards = [card for card in results.glob("data/*.json")]
    files += [*results.rglob("suite.json"), *cards, *(card.with_suffix(".h5") for card in cards)]
    return sorted(files)


def check_dataset(card: Path) -> dict:
    """Read a card and its dataset file; ValueError when they are not as they were made, or not each other's."""
    reader = sequences if card.stem in lra.task_names() else store
    reader.read(card.with_suffix(".h5"))
    return record.read_card(card)


def check_run(run: Path, weights: bool) -> dict:
    """The record of a run that has all it left, weights where they are asked for; else ValueError or FileNotFoundError."""
    _, result = record.read_whole_run(run)
    for name in result.get("files", {}):
        if name != WEIGHTS or weights:
            record.read_output(run, name)
    return result


def note_of(path: str) -> Path:
    """Where Snakemake keeps its note on a file of the project: its path in base 64, in parts short enough for a name."""
    name = base64.urlsafe_b64encode(path.encode()).decode()
    parts = [name[start:start + 254] for start in range(0, len(name), 254)]
    return NOTES.joinpath(*(f"@{part}" for part in parts[:-1]), parts[-1])


def _require_rest(root: Path, runs: Iterable[Path]) -> None:
    """ValueError while Snakemake works in a project, or a process in one of these runs, which may outlive it."""
    if (root / LOCKS).is_dir() and any((root / LOCKS).iterdir()):
        raise ValueError("Snakemake works in this folder; wait for it, or after it was killed: snakemake --unlock")
    for folder in sorted({folder for run in runs for folder in (run, run.parent)}):  # all cells of a curve have one lock
        if record.held(folder / ".lock"):
            raise ValueError(f"{folder}: a process still works there; wait for its end")


# --- packing


def pack(results: Path, out: Path, weights: bool) -> str:
    """Write the archive `out` of a folder of results; returns what it holds, in words.

    ValueError or FileNotFoundError for a run or a dataset that is not as it was made, a folder without finished runs, or one
    in which something still runs.
    """
    root, name = located(results)
    _require_rest(root, runs_of(root / name))
    found = [check_run(run, weights) for run in runs_of(root / name)]
    if not found:
        raise ValueError(f"--results {results}: there is no finished run")
    cards = {path: check_dataset(path) for path in sorted(root.joinpath(name, "data").glob("*.json"))}
    members = _members(root, name, weights)
    manifest = {"format": FORMAT, "results": name, "weights": weights, **_origin(found), "files": _described(members)}
    text = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
    with record.atomic_path(out) as partial:
        _write(partial, {MANIFEST: text.encode(), **members})
    published = [f"{path.stem} ({_licence(path.stem)})" for path, card in cards.items() if card.get("source") == "published"]
    return "\n".join([
        f"{out}: {len(found)} records of {name} {'with' if weights else 'without'} weights, {len(cards)} datasets, "
        f"{out.stat().st_size / 2**20:.1f} MiB, sha256 {record.sha256(out)}",
        *([f"holds published data: {', '.join(published)}; mind that when you pass it on"] if published else [])])


def _licence(dataset: str) -> str:
    """Of the published files of a benchmark or a task."""
    module = lra.task_module(dataset) if dataset in lra.task_names() else benchmark_module(dataset)
    return getattr(module, "LICENCE", "no licence stated")


def _members(root: Path, name: str, weights: bool) -> dict[str, Path | bytes]:
    """All members but the manifest, by their names, sorted: files, and notes as bytes."""
    kept = {path.relative_to(root).as_posix(): path for path in results_of(root / name, weights)}
    whole = results_of(root / name, weights=True)  # notes are small: those on the weights travel in any case
    noted = [note_of(path.relative_to(root).as_posix()) for path in whole]
    notes = {path.as_posix(): _note(root / path) for path in noted if (root / path).exists()}
    figures = root / "paper_figures" / Path(name).name
    drawn = [*(path for pattern in DRAWN for path in (root / name).glob(pattern)), *figures.glob("[!.]*")]
    shown = {path.relative_to(root).as_posix(): path for path in drawn if path.is_file()}
    members: dict[str, Path | bytes] = {**kept, **notes, **shown}
    return dict(sorted(members.items()))


def _note(path: Path) -> bytes:
    """Snakemake's note on a file, without what another machine has otherwise."""
    return json.dumps(record.read_json(path) | dict.fromkeys(OF_ONE_MACHINE), sort_keys=True).encode()


def _origin(found: list[dict]) -> dict:
    """Where records were made, each fact once; of what a record of unknown origin says only what is one line of text."""
    def facts(*keys: str) -> list[str]:
        values: list = found
        for key in keys:
            values = [value.get(key) if isinstance(value, dict) else None for value in values]
        return sorted({value for value in values if isinstance(value, str) and value and value.isprintable()})

    return {"records": len(found), "status": dict(Counter(result["status"] for result in found)),
            "scale": facts("spec", "scale"), "devices": facts("provenance", "device"),
            "torch": facts("provenance", "versions", "torch"), "commits": facts("provenance", "git", "commit")}


def _described(members: dict[str, Path | bytes]) -> dict[str, dict]:
    """What the manifest says of each member."""
    return {name: {"bytes": len(member), "sha256": hashlib.sha256(member).hexdigest()} if isinstance(member, bytes)
            else {"bytes": member.stat().st_size, "sha256": record.sha256(member)} for name, member in members.items()}


def _write(path: Path, members: dict[str, Path | bytes]) -> None:
    """A .tar.gz that says of each member its name and content and nothing else."""
    with (open(path, "wb") as file, gzip.GzipFile("", "wb", 6, file, mtime=0) as stream,
          tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as tar):
        for name, member in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(member) if isinstance(member, bytes) else member.stat().st_size
            with io.BytesIO(member) if isinstance(member, bytes) else open(member, "rb") as content:
                tar.addfile(entry, content)


# --- placing


def place(archive: Path, replace: bool) -> str:
    """Place the results of an archive in this project, the working folder; returns what came from where, in words.

    ValueError, with nothing placed, for an archive that is not whole, not what its manifest says or holds what no pipeline
    leaves, and without `replace` also where a file here has another content.
    """
    _require_rest(Path(), [])
    source = {"archive": archive.name, "archive_sha256": record.sha256(archive)}
    with _unpacked(archive, Path("results") / f".import-{os.getpid()}") as (aside, manifest):
        if record.sha256(archive) != source["archive_sha256"]:
            raise ValueError("was changed while it was read")
        kept, notes = _sorted_out(manifest)
        origin = _origin(_check(aside, manifest["results"], kept))
        new = [path for path in kept if not Path(path).exists()]
        files = manifest["files"]
        other = [path for path in kept if path not in new and record.sha256(Path(path)) != files[path]["sha256"]]
        if other and not replace:
            raise ValueError(_refusal(other, kept))
        _require_rest(Path(), {Path(path).parent for path in new + other})
        _require_places(aside, new + other)
        _require_notes(aside, notes)
        _move(aside, new + other, kept, notes, source)
    return _words(archive, source["archive_sha256"], manifest["results"], origin, len(new) + len(other), kept)


def _refusal(other: list[str], kept: list[str]) -> str:
    """Why files that are here are not replaced unasked, and what --replace would do to them."""
    weights = [path.with_name(WEIGHTS) for path in map(Path, other) if path.name == "metrics.json"]
    lost = sum(path.exists() and str(path) not in kept for path in weights)
    return (f"{other[0]}: is here with another content" + f", as are {len(other) - 1} further files" * (len(other) > 1)
            + "; --replace takes those of the archive"
            + f" and removes the weights of {lost} runs here, of which it has none" * (lost > 0))


@contextmanager
def _unpacked(archive: Path, aside: Path) -> Iterator[tuple[Path, dict]]:
    """The archive unpacked in the folder `aside`, gone afterwards, and its manifest; a ValueError speaks of the archive."""
    try:
        found = unpack(archive, aside, archive.name)
        yield aside, _manifest(aside, found)
    except (Refused, ValueError, FileNotFoundError) as error:
        if isinstance(error, FileNotFoundError) and error.filename:
            raise
        text = str(error).replace(f"{aside}/", f"{archive}: ").split("; delete ")[0].split("; `snakemake ")[0]
        raise ValueError(text if str(archive) in text else f"{archive}: {text}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _manifest(aside: Path, found: dict[str, dict]) -> dict:
    """The manifest; ValueError unless it lists exactly the files that were unpacked."""
    if MANIFEST not in found:
        raise ValueError(f"has no {MANIFEST}; it is no archive of results")
    manifest = record.read_json(aside / MANIFEST)
    files, name = manifest.get("files"), manifest.get("results")
    if manifest.get("format") != FORMAT or not isinstance(files, dict):
        raise ValueError(f"{MANIFEST}: format: got {manifest.get('format')!r}; this version reads {FORMAT}")
    if not isinstance(name, str) or not re.fullmatch(r"results(/[A-Za-z0-9][\w.-]*)+", name):
        raise ValueError(f"{MANIFEST}: results: got {name!r}; expected a folder below results")
    for path in sorted(files.keys() | found.keys() - {MANIFEST}):
        if files.get(path) != found.get(path):
            state = "is missing" if path not in found else "was changed"
            raise ValueError(f"{path}: {state if path in files else 'is not listed in the manifest'}")
    return manifest


def _sorted_out(manifest: dict) -> tuple[list[str], dict[str, str]]:
    """The members that are placed, and notes by the files they are on, weights that stayed behind included; ValueError for
    what no pipeline leaves."""
    name, kept = manifest["results"], []
    for path in map(PurePosixPath, manifest["files"]):
        below = path.is_relative_to(name)
        dataset = path.parent == PurePosixPath(name, "data") and path.suffix in (".h5", ".json")
        if below and (path.name in (*RUN_FILES, "suite.json") or dataset):
            kept.append(str(path))
        elif not (path.is_relative_to(NOTES) or path.parts[0] == "paper_figures" or below and any(map(path.match, DRAWN))):
            raise ValueError(f"{path}: no file of the pipeline")
    noted = {*kept, *(str(PurePosixPath(path).with_name(WEIGHTS)) for path in kept if path.endswith("/metrics.json"))}
    return kept, {path: note for path in noted if (note := note_of(path).as_posix()) in manifest["files"]}


def _check(aside: Path, name: str, kept: list[str]) -> list[dict]:
    """The records of the files aside; ValueError unless these are whole runs and datasets, and nothing else."""
    for path in kept:
        if path.endswith(".h5"):
            _require_own_arrays(aside / path)
        elif path.endswith(".json"):
            record.read_json(aside / path)  # also what stands in no run's folder: plans, specs of curves
    found = [check_run(run, (run / WEIGHTS).exists()) for run in runs_of(aside / name)]
    for card in aside.joinpath(name, "data").glob("*.json"):
        check_dataset(card)
    whole = {path.relative_to(aside).as_posix() for path in results_of(aside / name, weights=True)}
    if strangers := sorted(whole ^ set(kept)):
        raise ValueError(f"{strangers[0]}: is of no finished run and of no dataset")
    return found


def _require_own_arrays(path: Path) -> None:
    """ValueError for an HDF5 file with an array that lies in another file, of which no digest of this one tells, or with arrays
    that take far more memory than the file has bytes, as those do that were never written."""
    total, limit = 0, max(ALWAYS_ALLOWED, MAX_RATIO * path.stat().st_size)

    def check(group: h5py.Group) -> None:
        nonlocal total
        for name in group:
            part = group[name] if isinstance(group.get(name, getlink=True), h5py.HardLink) else None
            if part is None or isinstance(part, h5py.Dataset) and (part.external or part.is_virtual):
                raise ValueError(f"{path}: {name}: the array lies elsewhere, behind a link")
            if isinstance(part, h5py.Group):
                check(part)
            elif (total := total + part.nbytes) > limit:
                raise ValueError(f"{path}: {name}: with it the file takes {total} bytes in memory, at most {limit} are accepted")

    try:
        with h5py.File(path, "r") as file:
            check(file)
    except (OSError, *record.DAMAGE) as error:
        raise error if str(error).startswith(str(path)) else ValueError(f"{path}: cannot be read as HDF5 ({error})") from None


def _require_notes(aside: Path, notes: dict[str, str]) -> None:
    """ValueError for a note that Snakemake would not read."""
    for path in notes.values():
        note = record.read_json(aside / path)
        wrong = [key for key, types in NOTE.items() if key in note and not isinstance(note[key], types)]
        texts = [text for key in ("input", "log") for text in note.get(key) or () if not isinstance(text, str)]
        if wrong or texts:
            raise ValueError(f"{path}: {', '.join(wrong) or 'input or log'}: not what Snakemake writes")


def _require_places(aside: Path, fresh: list[str]) -> None:
    """Nothing is removed before all can be placed: PermissionError for a folder that cannot be written; ValueError for one on
    another disk than the folder aside, where a file cannot be moved whole."""
    for path in (*map(Path, fresh), *map(note_of, fresh)):
        folder = next(parent for parent in path.parents if parent.exists())
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        if folder.stat().st_dev != aside.stat().st_dev:
            raise ValueError(f"{folder}: lies on another disk than {aside.parent}; let the whole of {aside.parent} lie there")


def _move(aside: Path, fresh: list[str], kept: list[str], notes: dict[str, str], source: dict) -> None:
    """Move the files `fresh` to their places, a folder after the other, so that what stops it costs one run at most. A run's
    record comes last; until then none is there."""
    for folder in sorted({Path(path).parent for path in fresh}):
        names = sorted((path for path in fresh if Path(path).parent == folder), key=lambda name: (name.endswith("/metrics.json"), name))
        folder.mkdir(parents=True, exist_ok=True)
        left_behind = str(folder / WEIGHTS)
        if names[-1].endswith("/metrics.json"):
            _clear(aside, folder, kept, source)
            names = [*({left_behind} & notes.keys() - {*kept}), *names]
        for name in names:
            _place_note(aside, name, notes.get(name))
            if name in fresh:
                os.replace(aside / name, name)
    now = time.time()
    for name in kept:  # none is older than another
        os.utime(name, (now, now))


def _clear(aside: Path, folder: Path, kept: list[str], source: dict) -> None:
    """Remove what a run's folder has of another run, its record first, and say where the next one is from."""
    (folder / "metrics.json").unlink(missing_ok=True)
    for left in (*(folder / name for name in record.OUTPUTS if str(folder / name) not in kept),
                 *(left for pattern in OF_ONE_RUN for left in folder.glob(pattern))):
        left.unlink(missing_ok=True)
    _, result = record.read_run(aside / folder)
    record.write_with_digest(source | {"record": result["sha256"]}, folder / record.IMPORTED)


def _place_note(aside: Path, path: str, note: str | None) -> None:
    """Give Snakemake the note on a file in place of its own; that the file was incomplete here is over."""
    own = note_of(path)
    (Path(".snakemake/incomplete") / own.relative_to(NOTES)).unlink(missing_ok=True)
    if note is None:
        own.unlink(missing_ok=True)
    else:
        record.write_json(record.read_json(aside / note), own)


def _words(archive: Path, digest: str, results: str, origin: dict, moved: int, kept: list[str]) -> str:
    """What was placed, where its records say that they are from, what to do next."""
    name = Path(results).name
    scale = f" --config scale={name}" if origin["scale"] == [name] else ""
    facts = {key: ", ".join(origin[key] or ["unknown"]) for key in ("devices", "torch", "commits")}
    return "\n".join([
        f"{archive} (sha256 {digest}): {origin['records']} records of {results}, made on "
        f"{facts['devices']}, PyTorch {facts['torch']}, commit {facts['commits']}",
        f"{moved} files placed, {len(kept) - moved} are here already; tables and `trace` show what was \"imported from\" it",
        *([] if any(path.endswith(WEIGHTS) for path in kept) else ["without weights: nothing to evaluate or export"]),
        f"`snakemake -n{scale}` says what this clone draws from them, and what its code or configuration would make anew"])
