"""Published files from the hub or a mirror, under a lock file: trusted at first use, bound to it from then on.

A dataset's file says what is published (PUBLISHED_FILES, paths below the data root) and where (SOURCES, tried in order):
    {"hub": repository, "archive": name, "below": folder}    a .tar.gz of a Hugging Face dataset repository, unpacked in
                                                             `below` (left out: the data root) and then deleted
    {"hub": repository, "folder": folder}                    loose files of the same base names in a folder of it
    {"url": "https://.../{name}"}                            a plain mirror of loose files

The lock file has one entry for each file or archive that was ever accepted, by its path below the data root: source ("hub",
"url", or "path" for a file that somebody put there), repo and revision (40 hex digits) or url, name, bytes, sha256 and, for
archives, bytes and sha256 of the members. What it knows, every source and every file found on disk has to match.

What is under way lies in the folder .download below the data root; a file gets its name by a rename when it is whole,
checked and locked. An existing file is never overwritten.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from types import ModuleType

import filelock
from tabulate import tabulate
from tqdm import tqdm

from flarepp.data.archive import described, unpack
from flarepp.data.published import PROVENANCE, require_data
from flarepp.data.transfer import CONNECT_SECONDS, Refused, Remote, check_status, discard, patiently, say, transfer
from flarepp.record import read_json, write_json

WORK = ".download"
UNPACKED_RATIO = 2  # unpacked to packed size that the check of free space assumes until the lock knows better


def fetch(name: str, module: ModuleType, root: Path, lock: Path) -> None:
    """Make sure that the published files of the dataset `name` are below `root`, and that they are those of `lock`.

    module: the dataset's, with PUBLISHED_FILES and SOURCES. ValueError for a file on disk that is not the lock's, or was
    generated; FileNotFoundError, with each source and its reason, when no source gave a file; OSError for a full disk.
    """
    root, lock = Path(root), Path(lock)
    if folders := [str(root / path) for path in module.PUBLISHED_FILES if (root / path).is_dir()]:
        raise ValueError(f"{folders[0]}: a folder stands where the published file belongs; move it away")
    _accept_present(module, root, lock)
    reasons = []
    for source in _sources(module):
        missing = _missing(module, root, lock)
        if not missing:
            return
        try:
            if "archive" in source:
                _get_archive(source, module, root, lock)
            else:
                for path in missing:
                    _get_file(source, path, root, lock)
        except Refused as error:
            reasons.append(f"{_title(source)}: {error}")
            say(f"{name}: {reasons[-1]}")
    if missing := _missing(module, root, lock):
        raise FileNotFoundError(
            f"{name}: no source gave {', '.join(missing)}. {'; '.join(reasons) or 'None is known'}. Without a network set "
            f"data.source to 'generate', or put the published files below {root.resolve()}"
        )


def require_locked(root: Path, lock: Path, digests: dict[str, str]) -> None:
    """ValueError for a file below `root` whose sha256 is not the one that `lock` has for its path."""
    known = _known(read_lock(Path(lock)))
    for path, digest in digests.items():
        if path in known and digest != known[path]["sha256"]:
            raise ValueError(f"{Path(root) / path}: expected sha256 {known[path]['sha256']}, as locked in {lock}; got {digest}. If you "
                             "trust the file, delete its entry in the lock")


def listing(modules: Mapping[str, ModuleType], root: Path, lock: Path, generated: Path) -> str:
    """A table of datasets (name -> module): sources, licence, size and state. Reads the files that are there, no network.

    generated: folder below which generated files in the published layout lie.
    """
    rows = []
    for name, module in modules.items():
        known = _known(read_lock(lock))
        paths = _wanted(module, Path(root), known)
        sizes = [known[path]["bytes"] if path in known else _size(Path(root) / path) for path in paths]
        size = "unknown" if None in sizes else tqdm.format_sizeof(sum(filter(None, sizes)), "B")
        sources = "\n".join(_title(source) for source in _sources(module))
        licence = getattr(module, "LICENCE", "")
        rows.append([name, sources, licence, size, _state(module, Path(root), paths, known, Path(generated))])
    return tabulate(rows, ["dataset", "sources", "licence", "size", "state"], maxcolwidths=[None, None, 32, None, 40])


def _sources(module: ModuleType) -> tuple[dict, ...]:
    """A dataset of somebody's own may come from nowhere."""
    return getattr(module, "SOURCES", ())


def read_lock(lock: Path) -> dict:
    """Entries of the lock file by path below the data root; {} when there is none. ValueError when it is damaged."""
    entries = read_json(lock) if lock.exists() else {}
    for path, entry in entries.items():
        where = f"{lock}: {path}"
        members = entry.get("members", {}) if isinstance(entry, dict) else None
        if not isinstance(members, dict) or PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
            raise ValueError(f"{where}: expected an object under a path below the data root, got {entry!r}")
        if "repo" in entry and not re.fullmatch("[0-9a-f]{40}", str(entry.get("revision"))):
            raise ValueError(f"{where}: expected a revision of 40 hex digits, got {entry.get('revision')!r}")
        for member in (entry, *members.values()):
            sound = isinstance(member, dict) and type(member.get("bytes")) is int and member["bytes"] >= 0
            if not (sound and re.fullmatch("[0-9a-f]{64}", str(member.get("sha256")))):
                raise ValueError(f"{where}: expected bytes and a sha256 of 64 hex digits, got {member}")
    return entries


def _known(entries: dict) -> dict[str, dict]:
    """{path: {"bytes", "sha256"}} of all locked files, members of archives included."""
    files: dict[str, dict] = {}
    for path, entry in entries.items():
        files |= {path: entry, **entry.get("members", {})}
    return {path: {key: entry[key] for key in ("bytes", "sha256")} for path, entry in files.items()}


def _require_locked(what: object, known: dict, found: dict, lock: Path) -> None:
    """Refused when a file is not the one the lock knows; `found` may lack a value (None)."""
    if any(found[key] not in (None, value) for key, value in known.items()):
        raise Refused(f"{what}: expected {known['bytes']} bytes, sha256 {known['sha256']}, as locked in {lock}; "
                      f"got {found['bytes']} bytes, sha256 {found['sha256']}")


def _enter(lock: Path, new: dict) -> None:
    """Add entries that are new to the lock file. Refused when one of their files is locked with another content."""
    if not new:
        return
    lock.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(lock.with_name(f".{lock.name}.guard")):
        entries = read_lock(lock)
        known = _known(entries)
        for path, found in _known(new).items():
            _require_locked(path, known.get(path, {}), found, lock)
        if new := {path: entry for path, entry in new.items() if path not in known}:
            write_json(entries | new, lock)


def _wanted(module: ModuleType, root: Path, known: dict) -> list[str]:
    """Paths of the published files; a pattern stands for those on disk or in the lock, and for itself if there are none."""
    paths = []
    for pattern in module.PUBLISHED_FILES:
        present = {file.relative_to(root).as_posix() for file in root.glob(pattern)}
        paths += sorted(present | {path for path in known if _matches(path, pattern)}) or [pattern]
    return paths


def _matches(path: str, pattern: str) -> bool:
    return PurePosixPath("/", path).match(f"/{pattern}")  # from the root on: without the slash its end would be enough


def _missing(module: ModuleType, root: Path, lock: Path) -> list[str]:
    return [path for path in _wanted(module, root, _known(read_lock(lock))) if not (root / path).is_file()]


def _accept_present(module: ModuleType, root: Path, lock: Path) -> None:
    """Compare the files that are there with the lock, and lock those that it does not know. ValueError for another file."""
    known, new = _known(read_lock(lock)), {}
    for path in _wanted(module, root, known):
        file = root / path
        if not file.is_file():
            continue
        if _is_generated(file, root):
            raise ValueError(f"{file.parent}: holds generated data, not the published; set data.source to 'generate', or "
                             "data.root to another folder")
        if path not in known:
            require_data(file, file.suffix)
        new[path] = {"source": "path", "name": file.name} | described(file)
    try:
        _enter(lock, new)
    except Refused as error:
        raise ValueError(f"{root}: a file is not the locked one. {error}. Delete the file to download it again; or, if you "
                         "trust it, delete its entry in the lock") from None


def _is_generated(file: Path, root: Path) -> bool:
    folders = [folder for folder in file.parents if folder.is_relative_to(root)]
    return any((folder / PROVENANCE).exists() for folder in folders)


def _get_file(source: dict, path: str, root: Path, lock: Path) -> None:
    """One loose file from the hub or a mirror."""
    with _alone(root, path) as partial:
        if (root / path).exists():
            return
        remote, origin = _remote(source, path, lock)
        found = transfer(remote, partial)
        try:
            require_data(partial, PurePosixPath(path).suffix)
        except ValueError as error:
            discard(partial)
            raise Refused(f"{remote.url} answers with something else than the file: {error}") from None
        _enter(lock, {path: origin | found})
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        os.rename(partial, root / path)
        discard(partial)


def _get_archive(source: dict, module: ModuleType, root: Path, lock: Path) -> None:
    """All files of an archive, of which other datasets may need some; those that are there already stay as they are."""
    below = PurePosixPath(source.get("below", ""))
    path = (below / source["archive"]).as_posix()
    with _alone(root, path) as partial:
        if not _missing(module, root, lock):  # another process unpacked it while this one waited
            return
        remote, origin = _remote(source, path, lock)
        locked = read_lock(lock).get(path, {}).get("members", {}).values()
        unpacked = sum(member["bytes"] for member in locked) or UNPACKED_RATIO * (remote.size or 0)
        found = transfer(remote, partial, reserve=unpacked)
        folder = partial.with_suffix(".unpacked")
        try:
            members = {(below / member).as_posix(): entry for member, entry in unpack(partial, folder, path).items()
                       if not _is_foreign(member)}
            _require_published(module, path, members)
            _enter(lock, {path: origin | found | {"members": members}})
            for member in members:
                if not (root / member).exists():
                    (root / member).parent.mkdir(parents=True, exist_ok=True)
                    os.rename(folder / PurePosixPath(member).relative_to(below), root / member)
            discard(partial)
        except Refused:
            discard(partial)
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _is_foreign(member: str) -> bool:
    """Hidden files, which some systems pack along, and what would make published data look generated."""
    parts = PurePosixPath(member).parts
    return any(part.startswith(".") for part in parts) or parts[-1] == PROVENANCE


def _require_published(module: ModuleType, archive: str, members: Mapping[str, dict]) -> None:
    for pattern in module.PUBLISHED_FILES:
        if not any(_matches(member, pattern) for member in members):
            raise Refused(f"the archive {archive} has no {pattern}; it has {', '.join([*members][:5]) or 'no file'}, ...")


@contextmanager
def _alone(root: Path, path: str) -> Iterator[Path]:
    """Yield the partial file of what is to become `path`, which no other process touches meanwhile."""
    partial = root / WORK / f"{path}.partial"
    partial.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(partial.with_suffix(".lock"))
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        say(f"{path}: another process is downloading it, waiting for that one")
        lock.acquire()
    try:
        yield partial
    finally:
        lock.release()


def _remote(source: dict, path: str, lock: Path) -> tuple[Remote, dict]:
    """The file at a source that is to become `path`, bound to what lock and hub know; and its origin for the lock."""
    entries = read_lock(lock)
    known, name = _known(entries).get(path, {}), PurePosixPath(path).name
    if "url" in source:
        url = source["url"].format(name=name)
        return Remote(url, known.get("bytes"), known.get("sha256"), {}), {"source": "url", "url": url, "name": name}
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    repo, entry = source["hub"], entries.get(path, {})
    asked = entry["revision"] if entry.get("repo") == repo else "main"
    revision, files = patiently(lambda: _hub_files(repo, asked))
    folder = f"{source['folder']}/" if "folder" in source else ""
    named = [file for file in files if file.startswith(folder) and PurePosixPath(file).name == name]
    matches = named if folder else [file for file in named if file == name]
    if len(matches) != 1:
        raise Refused(f"revision {revision} has {len(matches)} files {folder and folder + '.../'}{name}; expected one")
    found = files[matches[0]]
    _require_locked(f"{matches[0]}, revision {revision}", known, found, lock)
    bound = found | known
    url = hf_hub_url(repo, matches[0], repo_type="dataset", revision=revision)
    origin = {"source": "hub", "repo": repo, "revision": revision, "name": matches[0]}
    return Remote(url, bound["bytes"], bound["sha256"], build_hf_headers()), origin


def _hub_files(repo: str, revision: str) -> tuple[str, dict[str, dict]]:
    """(commit, {name: {"bytes", "sha256"}}) of a dataset repository; sha256 is None outside the storage of large files."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        info = HfApi().dataset_info(repo, revision=revision, files_metadata=True, timeout=CONNECT_SECONDS)
    except HfHubHTTPError as error:
        check_status(error.response.status_code, error.response.headers, f"the hub for {repo}, revision {revision}")
        raise Refused(f"the hub's answer is not understood ({error})") from None
    except Exception as error:  # no network, offline mode, a web page in place of JSON: the client has no common error
        raise Refused(f"the hub cannot be asked ({type(error).__name__}: {error})") from None
    if not re.fullmatch("[0-9a-f]{40}", str(info.sha)):
        raise Refused(f"the hub gives {info.sha!r} for revision {revision}; expected a commit of 40 hex digits")
    files = {file.rfilename: {"bytes": file.size, "sha256": file.lfs and file.lfs.sha256} for file in info.siblings or ()}
    return str(info.sha), files


def _state(module: ModuleType, root: Path, paths: list[str], known: dict, generated: Path) -> str:
    """What is on disk of a dataset, in a few words."""
    present = [path for path in paths if (root / path).is_file()]
    if any(_is_generated(root / path, root) for path in present):
        return "generated"
    if len(present) == len(paths):
        other = [path for path in present if path in known and described(root / path) != known[path]]
        if other:
            return f"present, but not as locked: {', '.join(other)}"
        return "present, verified" if known.keys() >= set(present) else "present, not in the lock"
    archives = [f"{source.get('below', '.')}/{source['archive']}" for source in _sources(module) if "archive" in source]
    under_way = sum(_size(root / WORK / f"{path}.partial") or 0 for path in (*paths, *archives))
    if present or under_way:
        more = f", {tqdm.format_sizeof(under_way, 'B')} more" if under_way else ""
        return f"partial: {len(present)} of {len(paths)} files{more}"
    return "generated" if any(any(generated.glob(pattern)) for pattern in module.PUBLISHED_FILES) else "missing"


def _size(file: Path) -> int | None:
    return file.stat().st_size if file.is_file() else None


def _title(source: dict) -> str:
    if "url" in source:
        return source["url"]
    return f"hub {source['hub']}: {source.get('archive') or source['folder']}"

