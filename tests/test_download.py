"""Downloads from a local server of what the generators wrote: whole, cut, corrupted, replaced, refused, malicious."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import threading
import time
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from flarepp.data import archive, darcy, download, elasticity, names, prepare, store, transfer
from flarepp.record import read_json, sha256
from server import Fault, Server

REPO, MIRROR = "someone/fields", "else/mirror"
DARCY = {"num_train": 3, "num_test": 2, "resolution": 5, "solver_resolution": 9, "seed": 0}
ELASTICITY = {"num_train": 2, "num_test": 1, "mesh": [12, 9], "seed": 0}
TRAIN, TEST = darcy.PUBLISHED_FILES
MAT = Path(TRAIN).name
POSITIONS = sorted(random.Random(5).sample(range(1, 1000), 10))  # thousandths of a file


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> dict[str, bytes]:
    """Published files of Darcy and Elasticity by path, as the generators write them."""
    root = tmp_path_factory.mktemp("published")
    darcy.write_published(root, DARCY)
    elasticity.write_published(root, ELASTICITY)
    return {path: (root / path).read_bytes() for path in darcy.PUBLISHED_FILES + elasticity.PUBLISHED_FILES}


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    """Seconds that a download would have waited."""
    seconds: list[float] = []
    monkeypatch.setattr(transfer, "sleep", seconds.append)
    return seconds


@pytest.fixture
def server(monkeypatch, published, waits):
    """Serves FNO.tar.gz of `published` at the hub, and its files at the hub's mirror and at a plain one."""
    with Server() as running:
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.setenv(name, "127.0.0.1")
        monkeypatch.setenv("HF_ENDPOINT", running.url)  # for other processes; the client read it when it was imported
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", running.url)
        template = running.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        running.commit(REPO, {"FNO.tar.gz": packed(published), "README.md": b"fields"})
        running.commit(MIRROR, {f"data/darcy/{Path(path).name}": data for path, data in published.items()})
        running.files = {Path(path).name: data for path, data in published.items()}
        yield running


@pytest.fixture
def place(tmp_path) -> SimpleNamespace:
    return SimpleNamespace(root=tmp_path / "data", lock=tmp_path / "lock.json")


def packed(members: dict[str, bytes]) -> bytes:
    """A .tar.gz of regular files."""
    return packed_members([(member(name, size=len(data)), data) for name, data in members.items()])


def packed_members(members) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def member(name: str, **attributes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for key, value in attributes.items():
        setattr(info, key, value)
    return info


def reversed_data(data: bytes) -> bytes:
    """Another file of the same kind and size."""
    return data[:128] + data[128:][::-1]


def hub(**source) -> dict:
    return {"hub": REPO, "archive": "FNO.tar.gz"} | source


def loose() -> dict:
    return {"hub": MIRROR, "folder": "data/darcy"}


def plain(server) -> dict:
    return {"url": server.url + "/files/{name}"}


def dataset(*sources, files=darcy.PUBLISHED_FILES) -> SimpleNamespace:
    return SimpleNamespace(PUBLISHED_FILES=files, SOURCES=sources, LICENCE="none stated")


def fetch(place, *sources, files=darcy.PUBLISHED_FILES) -> None:
    download.fetch("darcy", dataset(*sources, files=files), place.root, place.lock)


def assert_complete(place, published, files=darcy.PUBLISHED_FILES) -> None:
    """The files are those that were published and that the lock knows; nothing is left of the way there."""
    known = download._known(download.read_lock(place.lock))
    for path in files:
        assert (place.root / path).read_bytes() == published[path]
        assert known[path] == {"bytes": len(published[path]), "sha256": sha256(place.root / path)}
    assert_nothing_partial(place)


def assert_nothing_partial(place) -> None:
    left = [path for path in (place.root / ".download").rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert left == [] and not list(place.root.rglob("*.unpacked"))


def assert_refused(place, *sources, words=(), error=FileNotFoundError) -> str:
    """No file under its name, one line that says all of `words`."""
    with pytest.raises(error) as caught:
        fetch(place, *sources)
    message = str(caught.value)
    assert [word for word in words if str(word) not in message] == [], message
    assert not (place.root / TRAIN).exists()
    return message


def archive_path(server) -> str:
    """Where the hub's archive is really served from."""
    data = server.repos[REPO][server.heads[REPO]]["FNO.tar.gz"]
    return f"/cdn/{hashlib.sha256(data).hexdigest()}"


# Complete


def test_an_archive_of_the_hub_is_unpacked_and_locked(server, place, published):
    fetch(place, hub())
    assert_complete(place, published)
    entry = read_json(place.lock)["FNO.tar.gz"]
    data = server.repos[REPO][server.heads[REPO]]["FNO.tar.gz"]
    assert {key: entry[key] for key in ("source", "repo", "revision", "name", "bytes")} == {
        "source": "hub", "repo": REPO, "revision": server.heads[REPO], "name": "FNO.tar.gz", "bytes": len(data)}
    assert sorted(entry["members"]) == sorted(published)
    assert place.lock.read_text() == json.dumps(read_json(place.lock), indent=1, sort_keys=True) + "\n"


def test_the_readers_take_what_was_downloaded(server, place):
    fetch(place, hub())
    fetch(place, hub(), files=elasticity.PUBLISHED_FILES)
    assert len(server.asked("/cdn/")) == 1  # the archive holds both
    for module, spec in ((darcy, DARCY), (elasticity, ELASTICITY)):
        benchmark = module.read_published(place.root, spec)
        assert benchmark.card["source"] == "published" and np.isfinite(benchmark.train.target).all()


@pytest.mark.parametrize("source", ["hub", "plain"])
def test_loose_files_are_fetched_and_locked(server, place, published, source):
    fetch(place, loose() if source == "hub" else plain(server))
    assert_complete(place, published)
    entry = read_json(place.lock)[TRAIN]
    expected = {"source": "url", "url": f"{server.url}/files/{MAT}", "name": MAT} if source == "plain" else {
        "source": "hub", "repo": MIRROR, "revision": server.heads[MIRROR], "name": f"data/darcy/{MAT}"}
    assert {key: value for key, value in entry.items() if key not in ("bytes", "sha256")} == expected


def test_what_is_there_is_not_asked_for_again(server, place, published):
    fetch(place, hub())
    server.requests.clear()
    fetch(place, hub())
    assert server.requests == []


def test_an_archive_may_unpack_below_a_folder_and_match_a_pattern(server, place):
    runs = {f"presampled/train/run_{number}.npz": bytes([number]) * number for number in (3, 12)}
    server.commit(REPO, {"cars.tar.gz": packed(runs)})
    files = ("Cars/presampled/train/run_*.npz",)
    fetch(place, hub(archive="cars.tar.gz", below="Cars"), files=files)
    assert_complete(place, {f"Cars/{path}": data for path, data in runs.items()}, [f"Cars/{path}" for path in runs])
    (place.root / "Cars/presampled/train/run_3.npz").unlink()  # the lock knows what the pattern stands for
    fetch(place, hub(archive="cars.tar.gz", below="Cars"), files=files)
    assert (place.root / "Cars/presampled/train/run_3.npz").read_bytes() == bytes([3]) * 3


def test_a_small_file_without_a_digest_at_the_hub_is_hashed_here(server, place):
    server.commit(MIRROR, {"data/darcy/notes.md": b"text" * 9})
    fetch(place, loose(), files=("notes.md",))
    assert read_json(place.lock)["notes.md"]["sha256"] == sha256(place.root / "notes.md")


# Interrupted


@pytest.mark.parametrize("thousandths", POSITIONS)
def test_an_interrupted_transfer_goes_on_in_the_next_process(server, place, published, monkeypatch, thousandths):
    path, position = archive_path(server), thousandths * len(packed(published)) // 1000
    server.faults[path] = [Fault(cut=position)]
    with monkeypatch.context() as patched:
        patched.setattr(transfer, "MAX_FAILURES", 0)
        assert_refused(place, hub(), words=["broke off", position])
    assert place.root.joinpath(".download/FNO.tar.gz.partial").stat().st_size == position
    assert not place.lock.exists()
    fetch(place, hub())
    assert_complete(place, published)
    assert server.asked("/cdn/")[-1]["Range"] == f"bytes={position}-"


def test_ten_interruptions_of_one_mirror_file_in_one_process(server, place, published, waits):
    size = len(published[TRAIN])
    cuts = [thousandths * size // 1000 for thousandths in POSITIONS]
    server.faults[f"/files/{MAT}"] = [Fault(cut=cut) for cut in cuts]
    fetch(place, plain(server))
    assert_complete(place, published)
    assert [headers.get("Range") for headers in server.asked(MAT)] == [None, *(f"bytes={cut}-" for cut in cuts)]
    assert len(waits) == 10


def test_a_server_that_stalls_is_asked_again(server, place, published, monkeypatch):
    monkeypatch.setattr(transfer, "STALL_SECONDS", 1)
    monkeypatch.setattr(transfer, "CHUNK", 64)
    held = threading.Event()
    server.faults[f"/files/{MAT}"] = [Fault(cut=128, hold=held)]
    fetch(place, plain(server))
    held.set()
    assert_complete(place, published)
    assert server.asked(MAT)[1]["Range"] == "bytes=128-"


def test_a_server_without_ranges_starts_over(server, place, published):
    server.faults[f"/files/{MAT}"] = [Fault(cut=100), Fault(ranges=False)]
    fetch(place, plain(server))
    assert_complete(place, published)


@pytest.mark.parametrize("etag", ["", 'W/"same meaning"'])
def test_a_mirror_that_cannot_tell_files_apart_starts_over(server, place, published, etag):
    server.faults[f"/files/{MAT}"] = [Fault(cut=100, etag=etag)]
    fetch(place, plain(server))
    assert_complete(place, published)
    assert "Range" not in server.asked(MAT)[1]


def test_an_archive_labelled_as_compressed_content_is_not_decoded(server, place, published):
    server.lasting[archive_path(server)] = Fault(headers={"Content-Encoding": "gzip"})
    fetch(place, hub())
    assert_complete(place, published)


def test_a_mirror_goes_on_where_the_hub_broke_off_if_the_lock_vouches_for_both(server, place, published):
    fetch(place, plain(server))
    (place.root / TRAIN).unlink()
    path = f"/cdn/{hashlib.sha256(published[TRAIN]).hexdigest()}"
    server.lasting[path] = Fault(cut=700)
    fetch(place, loose(), plain(server))
    assert_complete(place, published)
    assert server.asked(f"/files/{MAT}")[-1]["Range"] == "bytes=700-"


def test_patience_ends(server, place, waits):
    server.lasting[f"/files/{MAT}"] = Fault(cut=100)
    assert_refused(place, plain(server), words=[f"{server.url}/files/{MAT}", "100 of", "5 failures in a row"])
    assert len(waits) < 8 and sum(waits) < 100


SCRIPT = """
import json, sys
from pathlib import Path
from types import SimpleNamespace
from flarepp.data import download, transfer
root, lock, files, chunk = json.loads(sys.argv[1])
transfer.CHUNK = chunk
module = SimpleNamespace(PUBLISHED_FILES=files, SOURCES=[{"hub": "someone/fields", "archive": "FNO.tar.gz"}])
download.fetch("other process", module, Path(root), Path(lock))
"""


def start(place, files, log: Path, chunk=1 << 16) -> subprocess.Popen:
    words = json.dumps([str(place.root), str(place.lock), files, chunk])
    with open(log, "w") as stream:
        return subprocess.Popen([sys.executable, "-c", SCRIPT, words], stdin=subprocess.DEVNULL, stdout=stream,
                                stderr=stream)


def wait_for(condition, seconds: float = 60) -> None:
    stop = time.monotonic() + seconds
    while not condition() and time.monotonic() < stop:
        time.sleep(0.02)
    assert condition()


def test_a_killed_process_leaves_a_part_that_the_next_one_completes(server, place, published, tmp_path):
    held, half = threading.Event(), len(packed(published)) // 2
    server.faults[archive_path(server)] = [Fault(cut=half, hold=held)]
    process = start(place, darcy.PUBLISHED_FILES, tmp_path / "log", chunk=256)
    partial = place.root / ".download/FNO.tar.gz.partial"
    wait_for(lambda: process.poll() is not None or partial.exists() and partial.stat().st_size > half // 2)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL, (tmp_path / "log").read_text()
    held.set()
    size = partial.stat().st_size
    assert size <= half and not (place.root / TRAIN).exists() and not place.lock.exists()
    fetch(place, hub())
    assert_complete(place, published)
    assert server.asked("/cdn/")[-1]["Range"] == f"bytes={size}-"


def test_two_processes_share_an_archive_and_a_lock(server, place, published, tmp_path):
    held = threading.Event()
    server.faults[archive_path(server)] = [Fault(cut=100, hold=held)]
    logs = [tmp_path / "first", tmp_path / "second"]
    both = (darcy.PUBLISHED_FILES, elasticity.PUBLISHED_FILES)
    processes = [start(place, files, log) for files, log in zip(both, logs, strict=True)]
    wait_for(lambda: any("waiting" in log.read_text() for log in logs) or any(process.poll() for process in processes))
    held.set()
    assert [process.wait(60) for process in processes] == [0, 0], [log.read_text() for log in logs]
    assert_complete(place, published, [*published])
    assert len(server.asked("/cdn/")) == 1 and [*read_json(place.lock)] == ["FNO.tar.gz"]


def test_entries_written_at_once_are_all_kept(place):
    entry = {"source": "path", "name": "x", "bytes": 1, "sha256": "0" * 64}
    threads = [threading.Thread(target=download._enter, args=(place.lock, {f"file{number}": entry})) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_json(place.lock)) == 16


# Wrong content


def test_a_corrupted_byte_is_refused(server, place):
    path = archive_path(server)
    server.lasting[path] = Fault(flip=200)
    message = assert_refused(place, hub(), words=["FNO.tar.gz", "expected sha256", path.removeprefix("/cdn/"), "got"])
    assert message.count("sha256") == 1 and len(server.asked("/cdn/")) == 1
    assert_nothing_partial(place)


def test_a_part_that_was_damaged_on_disk_is_fetched_again(server, place, published, monkeypatch):
    server.faults[archive_path(server)] = [Fault(cut=500)]
    with monkeypatch.context() as patched:
        patched.setattr(transfer, "MAX_FAILURES", 0)
        assert_refused(place, hub())
    (place.root / ".download/FNO.tar.gz.partial").write_bytes(bytes(500))
    fetch(place, hub())
    assert_complete(place, published)


@pytest.mark.parametrize("size", [10, 10**6])
def test_a_wrong_size_is_refused(server, place, size):
    expected = len(server.repos[REPO][server.heads[REPO]]["FNO.tar.gz"])
    server.lasting[archive_path(server)] = Fault(headers={"Content-Length": size})
    assert_refused(place, hub(), words=["FNO.tar.gz", f"expected {expected} bytes", f"has {size}"])
    assert_nothing_partial(place)


def test_a_body_without_a_length_may_not_end_early(server, place):
    size = len(server.repos[REPO][server.heads[REPO]]["FNO.tar.gz"])
    server.lasting[archive_path(server)] = Fault(headers={"Content-Length": None}, cut=size - 1)
    assert_refused(place, hub(), words=[f"{size - 1} of {size} bytes"])


def test_no_more_is_read_than_the_lock_says(server, place, published):
    fetch(place, plain(server))
    (place.root / TRAIN).unlink()
    server.files[MAT] = published[TRAIN] + bytes(10**6)
    server.lasting[f"/files/{MAT}"] = Fault(headers={"Content-Length": None})
    fetch(place, plain(server))
    assert_complete(place, published)


def test_a_size_that_nobody_knows_is_refused(server, place):
    server.lasting[f"/files/{MAT}"] = Fault(headers={"Content-Length": None})
    assert_refused(place, plain(server), words=[MAT, "does not say how large"])


@pytest.mark.parametrize("kind, body", [("text/html; charset=utf-8", b"MATLAB"), ("x/mat", b"\n <!DOCTYPE html>")])
def test_a_web_page_is_refused(server, place, kind, body):
    server.files[MAT] = body
    server.lasting[f"/files/{MAT}"] = Fault(headers={"Content-Type": kind})
    assert_refused(place, plain(server), words=[MAT, "web page"])
    assert_nothing_partial(place)


def test_a_web_page_in_answer_to_a_resumption_leaves_the_part(server, place, published):
    server.faults[f"/files/{MAT}"] = [Fault(cut=100), Fault(headers={"Content-Type": "text/html"})]
    assert_refused(place, plain(server), words=[MAT, "web page"])
    fetch(place, plain(server))
    assert_complete(place, published)
    assert server.asked(MAT)[-1]["Range"] == "bytes=100-"


# Statuses


@pytest.mark.parametrize("status, word", [
    (401, "HF_TOKEN"), (403, "licence"), (404, "moved"), (410, "withdrawn"), (418, "not understood")])
def test_final_statuses_are_final_and_say_what_to_do(server, place, waits, status, word):
    server.lasting[f"/files/{MAT}"] = Fault(status)
    assert_refused(place, plain(server), words=[f"HTTP {status}", MAT, word, "'generate'", place.root])
    assert len(server.asked(MAT)) == 1 and waits == []


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_heeded(server, place, published, waits, status):
    soon = formatdate(time.time() + 90, usegmt=True)
    pauses = [Fault(status, {"Retry-After": value}) for value in ("7", soon, "nonsense")]
    server.faults[f"/files/{MAT}"] = pauses
    fetch(place, plain(server))
    assert_complete(place, published)
    assert waits[0] == 7 and 30 < waits[1] <= 90 and 0 < waits[2] < 30


def test_too_long_a_wait_is_not_waited(server, place, waits):
    server.lasting[f"/files/{MAT}"] = Fault(429, {"Retry-After": "86400"})
    assert_refused(place, plain(server), words=["429", "86400"])
    assert waits == []


def test_an_endless_429_ends(server, place, waits):
    server.lasting[f"/files/{MAT}"] = Fault(429, {"Retry-After": "2"})
    assert_refused(place, plain(server), words=["429", "gave up after 5"])
    assert waits == [2, 2, 2, 2]


def test_the_hubs_metadata_are_asked_for_with_the_same_patience(server, place, published, waits):
    server.faults[f"/api/datasets/{REPO}/revision/main"] = [Fault(429, {"Retry-After": "3"}), Fault(500)]
    fetch(place, hub())
    assert_complete(place, published)
    assert waits == [3, 4]


@pytest.mark.parametrize("fault, words", [
    (Fault(404, {"X-Error-Code": "RepoNotFound"}), ["HTTP 404", REPO, "moved"]),
    (Fault(403, {"X-Error-Code": "GatedRepo"}), ["HTTP 403", REPO, "HF_TOKEN"]),
    (Fault(200, {"Content-Type": "text/html"}, b"<html>log in to the network</html>"), ["the hub cannot be asked"]),
    (Fault(200, {"Content-Type": "application/json"}, b'{"id": "a/b", "sha": "main", "tags": []}'), ["'main'", "40 hex"]),
])
def test_what_the_hub_refuses_is_told(server, place, fault, words):
    server.lasting[f"/api/datasets/{REPO}/revision/main"] = fault
    assert_refused(place, hub(), words=words)


def test_a_file_that_the_repository_lacks_is_named(server, place):
    assert_refused(place, hub(archive="FNO2.tar.gz"), words=["FNO2.tar.gz", server.heads[REPO], "expected one"])


def test_416_starts_over(server, place, published):
    """The file has become shorter than the part: the part belongs to another file."""
    server.faults[f"/files/{MAT}"] = [Fault(cut=200), Fault(416, {"Content-Range": "bytes */150"})]
    fetch(place, plain(server))
    assert_complete(place, published)
    assert [headers.get("Range") for headers in server.asked(MAT)] == [None, "bytes=200-", None]


@pytest.mark.parametrize("span", ["bytes 0-99/{size}", "bytes 200-300/301", "bytes 200-{size}/*", None])
def test_another_range_than_asked_for_starts_over(server, place, published, span):
    span = span and span.format(size=len(published[TRAIN]))
    server.faults[f"/files/{MAT}"] = [Fault(cut=200), Fault(headers={"Content-Range": span})]
    fetch(place, plain(server))
    assert_complete(place, published)
    assert [headers.get("Range") for headers in server.asked(MAT)] == [None, "bytes=200-", None]


def test_416_for_ever_ends(server, place):
    server.lasting[f"/files/{MAT}"] = Fault(416)
    assert_refused(place, plain(server), words=["416", "gave up"])


# Replaced upstream


def interrupt(place, server, monkeypatch, source, path) -> None:
    server.faults[path] = [Fault(cut=300)]
    with monkeypatch.context() as patched:
        patched.setattr(transfer, "MAX_FAILURES", 0)
        assert_refused(place, source, words=["broke off after 300"])


@pytest.mark.parametrize("if_range", [True, False])
@pytest.mark.parametrize("extra", [b"", b"more"])
def test_a_mirror_file_replaced_meanwhile_is_fetched_anew(server, place, published, monkeypatch, if_range, extra):
    interrupt(place, server, monkeypatch, plain(server), f"/files/{MAT}")
    changed = published | {TRAIN: reversed_data(published[TRAIN]) + extra}
    server.files[MAT] = changed[TRAIN]
    server.faults[f"/files/{MAT}"] = [Fault(if_range=if_range)]
    fetch(place, plain(server))
    assert_complete(place, changed)
    etag = f'"{hashlib.md5(published[TRAIN]).hexdigest()}"'
    asked = [(headers.get("Range"), headers.get("If-Range")) for headers in server.asked(MAT)]
    assert asked == [(None, None), ("bytes=300-", etag)] + [(None, None)] * (not if_range)


def test_a_hub_that_moved_meanwhile_is_fetched_anew(server, place, published, monkeypatch):
    interrupt(place, server, monkeypatch, hub(), archive_path(server))
    changed = published | {TRAIN: reversed_data(published[TRAIN])}
    revision = server.commit(REPO, {"FNO.tar.gz": packed(changed)})
    fetch(place, hub())
    assert_complete(place, changed)
    assert read_json(place.lock)["FNO.tar.gz"]["revision"] == revision


def test_a_locked_revision_outlives_a_newer_one(server, place, published):
    fetch(place, hub())
    locked = place.lock.read_bytes()
    server.commit(REPO, {"FNO.tar.gz": packed({TRAIN: b"another", TEST: b"another"})})
    (place.root / TRAIN).unlink()
    fetch(place, hub())
    assert_complete(place, published)
    assert place.lock.read_bytes() == locked


def test_a_locked_revision_with_another_content_is_refused(server, place):
    fetch(place, hub())
    expected = read_json(place.lock)["FNO.tar.gz"]["sha256"]
    server.repos[REPO][server.heads[REPO]]["FNO.tar.gz"] = packed({TRAIN: b"another", TEST: b"another"})
    (place.root / TRAIN).unlink()
    assert_refused(place, hub(), words=["FNO.tar.gz", server.heads[REPO], expected, "got", archive_path(server)[5:]])


def test_a_mirror_file_replaced_after_locking_is_refused(server, place, published):
    fetch(place, plain(server))
    (place.root / TRAIN).unlink()
    server.files[MAT] = reversed_data(published[TRAIN])
    assert_refused(place, plain(server), words=[MAT, "expected sha256", read_json(place.lock)[TRAIN]["sha256"], "got"])
    server.files[MAT] = published[TRAIN] + b"0"
    assert_refused(place, plain(server), words=[f"expected {len(published[TRAIN])} bytes", len(published[TRAIN]) + 1])


# The lock binds every source and what is on disk


def test_a_mirror_has_to_match_the_members_of_the_locked_archive(server, place, published):
    fetch(place, hub())
    locked = place.lock.read_bytes()
    (place.root / TRAIN).unlink()
    fetch(place, plain(server))
    assert_complete(place, published)
    assert place.lock.read_bytes() == locked
    (place.root / TRAIN).unlink()
    server.files[MAT] = reversed_data(published[TRAIN])
    assert_refused(place, plain(server), words=["expected sha256"])


def test_an_archive_has_to_match_the_locked_loose_files(server, place, published):
    fetch(place, plain(server))
    (place.root / TRAIN).unlink()
    server.commit(REPO, {"FNO.tar.gz": packed(published | {TRAIN: reversed_data(published[TRAIN])})})
    assert_refused(place, hub(), words=[TRAIN, "expected", read_json(place.lock)[TRAIN]["sha256"]])
    assert_nothing_partial(place)


def test_files_that_somebody_put_there_are_locked_and_kept(server, place, published):
    for path in darcy.PUBLISHED_FILES:
        (place.root / path).parent.mkdir(parents=True, exist_ok=True)
        (place.root / path).write_bytes(published[path])
    fetch(place, hub())
    assert server.requests == [] and read_json(place.lock)[TRAIN]["source"] == "path"
    (place.root / TRAIN).unlink()
    fetch(place, hub())
    assert_complete(place, published)


def test_another_file_than_the_locked_one_is_an_error_and_kept(server, place, published):
    fetch(place, hub())
    (place.root / TRAIN).write_bytes(b"x" * len(published[TRAIN]))
    server.requests.clear()
    with pytest.raises(ValueError, match="expected .* sha256") as caught:
        fetch(place, hub())
    assert TRAIN in str(caught.value) and sha256(place.root / TRAIN) in str(caught.value)
    assert (place.root / TRAIN).read_bytes()[:1] == b"x" and server.requests == []


def test_generated_files_are_not_taken_for_published_ones(server, place):
    darcy.write_published(place.root, DARCY)
    with pytest.raises(ValueError, match="generated data.*data.source"):
        fetch(place, hub())
    assert not place.lock.exists()


@pytest.mark.parametrize("text", ['{"a": {"bytes": 3, "sha256": "12"}}', '{"a": 3}', '{"a": {'])
def test_a_damaged_lock_is_named(place, text):
    place.lock.write_text(text)
    with pytest.raises(ValueError, match="lock.json: (a: expected|not valid JSON)"):
        fetch(place)


# Several sources


def test_mirrors_follow_when_a_source_fails(server, place, published, capsys):
    server.lasting[f"/api/datasets/{REPO}/revision/main"] = Fault(403)
    server.repos[MIRROR][server.heads[MIRROR]].pop(f"data/darcy/{Path(TEST).name}")  # gives one of the two files
    fetch(place, hub(), loose(), plain(server))
    assert_complete(place, published)
    assert {path: entry["source"] for path, entry in read_json(place.lock).items()} == {TRAIN: "hub", TEST: "url"}
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2, lines
    assert "HTTP 403" in lines[0] and Path(TEST).name in lines[1]


def test_when_all_fail_each_is_named_with_its_reason(server, place):
    server.lasting[f"/api/datasets/{REPO}/revision/main"] = Fault(403)
    server.files.clear()
    server.repos[MIRROR][server.heads[MIRROR]].clear()
    assert_refused(place, hub(), loose(), plain(server), words=[
        TRAIN, TEST, f"hub {REPO}: FNO.tar.gz: HTTP 403", f"hub {MIRROR}: data/darcy: ", "/files/{name}: HTTP 404"])


def test_a_dataset_without_sources_says_so(place, tmp_path):
    own = SimpleNamespace(PUBLISHED_FILES=("own/points.npy",))
    with pytest.raises(FileNotFoundError, match="own/points.npy. None is known.*'generate'"):
        download.fetch("own", own, place.root, place.lock)
    assert "missing" in rows(place, {"own": own}, tmp_path / "generated")


def test_without_a_network_the_way_out_is_named(server, place, waits, monkeypatch):
    sources = (hub(), plain(server))
    server.shutdown()
    server.server_close()
    message = assert_refused(place, *sources, words=["data.source", "'generate'", place.root, "cannot be"])
    assert waits == [] and "\n" not in message


# Disk


def test_a_full_disk_keeps_the_part_and_stops(server, place, published, monkeypatch):
    """The third block of the file does not fit; no other source is asked."""
    monkeypatch.setattr(transfer, "CHUNK", 100)
    real, blocks = open, []

    class Full(io.FileIO):
        def write(self, data):
            blocks.append(data)
            if len(blocks) > 2:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)

    def opened(path, mode="r"):
        return Full(path, mode) if str(path).endswith(".partial") and mode != "rb" else real(path, mode)

    with monkeypatch.context() as patched:
        patched.setattr(transfer, "open", opened, raising=False)
        assert_refused(place, plain(server), hub(), error=OSError, words=["disk is full", "200 bytes", MAT, "start again"])
    assert server.asked("/api/") == [] and not place.lock.exists()
    fetch(place, plain(server))
    assert_complete(place, published)
    assert server.asked(MAT)[-1]["Range"] == "bytes=200-"


def test_free_space_is_checked_before_for_the_archive_and_what_it_unpacks_to(server, place, monkeypatch):
    size = len(server.repos[REPO][server.heads[REPO]]["FNO.tar.gz"])
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=2 * size))
    assert_refused(place, hub(), words=["bytes are needed", f"{2 * size} are free"])
    assert_nothing_partial(place)


def test_a_disk_that_fills_while_unpacking_keeps_the_archive(server, place, published, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(archive.shutil, "disk_usage", lambda _: SimpleNamespace(free=10**9))
        patched.setattr(archive.shutil, "copyfileobj", full_disk)
        assert_refused(place, hub(), error=OSError, words=["No space left"])
    assert not list(place.root.rglob("*.unpacked")) and not place.lock.exists()
    fetch(place, hub())
    assert_complete(place, published)
    assert len(server.asked("/cdn/")) == 1


def full_disk(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# Malicious and damaged archives


def bomb(*headers: tarfile.TarInfo, zeros: int = 10**10) -> bytes:
    """A .tar.gz of these headers and 10 GB of zeros: one small gzip stream of them, repeated."""
    block = 10**8
    packed_zeros = gzip.compress(bytes(block), 6)
    return b"".join(gzip.compress(header.tobuf()) for header in headers) + packed_zeros * (zeros // block)


LINK, DEVICE = {"type": tarfile.SYMTYPE}, {"type": tarfile.CHRTYPE}
MALICIOUS = {
    "absolute path": ([(member("/tmp/outside"), b"")], "/tmp/outside", "leads out"),
    "climbing path": ([(member("FNO/../../outside"), b"")], "FNO/../../outside", "leads out"),
    "symlink out": ([(member("FNO", **LINK, linkname="/tmp"), b"")], "FNO", "link or a device"),
    "symlink inside": ([(member("FNO/a", **LINK, linkname="b"), b"")], "FNO/a", "link or a device"),
    "hard link": ([(member("FNO/a", type=tarfile.LNKTYPE, linkname="../../lock.json"), b"")], "FNO/a", "link or a device"),
    "device": ([(member("FNO/null", **DEVICE, devmajor=1, devminor=3), b"")], "FNO/null", "link or a device"),
    "pipe": ([(member("FNO/pipe", type=tarfile.FIFOTYPE), b"")], "FNO/pipe", "link or a device"),
    "file as folder": ([(member("FNO"), b""), (member("FNO/a"), b"")], "FNO/a", "FNO"),
    "too many": ([(member(f"a{number}"), b"") for number in range(41)], "a36", "more than 40 members"),
}


@pytest.mark.parametrize("kind", MALICIOUS)
def test_malicious_archives_are_refused(server, place, published, monkeypatch, kind):
    monkeypatch.setattr(archive, "MAX_MEMBERS", 40)
    members, name, word = MALICIOUS[kind]
    good = [] if kind == "file as folder" else [(member(path, size=len(data)), data) for path, data in published.items()]
    server.commit(REPO, {"FNO.tar.gz": packed_members(good + members)})
    assert_refused(place, hub(), words=["FNO.tar.gz", f"member {name!r}", word])
    assert_nothing_left(place)


@pytest.fixture(scope="module")
def bombs() -> dict[str, bytes]:
    """A member that announces its 10 GB, ten members of 1 GB, and zeros after the end of the archive."""
    small = bomb(zeros=10**9)
    tenth = [gzip.compress(member(f"FNO/zeros{number}", size=10**9).tobuf()) + small for number in range(10)]
    return {"announced": bomb(member("FNO/zeros", size=10**10)), "in pieces": b"".join(tenth), "after the end": bomb()}


@pytest.mark.parametrize("kind", ["announced", "in pieces", "after the end"])
def test_bombs_are_refused_early(server, place, bombs, monkeypatch, kind):
    if kind == "after the end":  # read, though not written, up to the bound: a lower one is quicker
        monkeypatch.setattr(archive, "MAX_RATIO", 10)
    server.commit(REPO, {"FNO.tar.gz": bombs[kind]})
    began = time.process_time()
    words = {"announced": ["member 'FNO/zeros'", "unpacks to 10000000000 bytes"], "after the end": ["unpacks to more than"],
             "in pieces": ["member 'FNO/zeros0'", "unpacks to 1000000000 bytes"]}
    assert_refused(place, hub(), words=["FNO.tar.gz", *words[kind]])
    assert time.process_time() - began < 5
    assert_nothing_left(place)


@pytest.mark.parametrize("damage", ["cut", "flipped", "checksum", "not gzip", "empty", "tar cut inside"])
def test_damaged_archives_are_refused(server, place, published, damage):
    whole = packed(published)
    data = {
        "cut": whole[: len(whole) // 2],
        "flipped": whole[:900] + bytes([whole[900] ^ 0xFF]) + whole[901:],
        "checksum": whole[:-8] + bytes(4) + whole[-4:],
        "not gzip": b"PK" + whole,
        "empty": b"",
        "tar cut inside": gzip.compress(gzip.decompress(whole)[: 512 + 100]),
    }[damage]
    server.commit(REPO, {"FNO.tar.gz": data})
    assert_refused(place, hub(), words=["the archive FNO.tar.gz is refused"])
    assert_nothing_left(place)


@pytest.mark.parametrize("names", [["FNO/other.mat"], [f"deeper/{TRAIN}", f"deeper/{TEST}"]])
def test_an_archive_without_the_published_files_is_refused(server, place, names):
    server.commit(REPO, {"FNO.tar.gz": packed(dict.fromkeys(names, b"x"))})
    assert_refused(place, hub(), words=["FNO.tar.gz", f"has no {TRAIN}", *names])
    assert_nothing_left(place)


def assert_nothing_left(place) -> None:
    assert_nothing_partial(place)
    assert [path.name for path in place.root.iterdir()] == [".download"] and not place.lock.exists()
    assert not Path("/tmp/outside").exists() and not (place.root.parent / "outside").exists()


# The list


def rows(place, modules, generated) -> str:
    return download.listing(modules, place.root, place.lock, generated)


def test_the_list_tells_states_and_sizes(server, place, published, tmp_path):
    modules = {"darcy": dataset(hub(), plain(server)), "elasticity": elasticity}
    generated = tmp_path / "generated"
    text = rows(place, modules, generated)
    assert text.count("missing") == 2 and text.count("unknown") == 2 and elasticity.SOURCES[0]["hub"] in text
    fetch(place, hub())
    assert rows(place, modules, generated).count("present, verified") == 2
    assert f"{sum(len(published[path]) for path in darcy.PUBLISHED_FILES) / 1000:.3g}"[:3] in rows(place, modules, generated)
    place.lock.unlink()
    assert rows(place, modules, generated).count("present, not in the lock") == 2
    (place.root / TRAIN).unlink()
    assert "partial: 1 of 2 files" in rows(place, modules, generated)
    fetch(place, hub())
    (place.root / TRAIN).write_bytes(b"other")
    assert "present, but not as locked" in rows(place, modules, generated).replace("\n", " ")


def test_the_list_knows_generated_and_unfinished_data(server, place, monkeypatch, tmp_path):
    modules, generated = {"darcy": dataset(hub())}, tmp_path / "generated"
    server.faults[archive_path(server)] = [Fault(cut=400)]
    with monkeypatch.context() as patched:
        patched.setattr(transfer, "MAX_FAILURES", 0)
        assert_refused(place, hub())
    assert "partial: 0 of 2 files, 400B more" in rows(place, modules, generated).replace("\n", " ")
    darcy.write_published(generated, DARCY)
    place.root = tmp_path / "none"
    assert "generated" in rows(place, modules, generated)
    assert "generated" in rows(SimpleNamespace(root=generated, lock=place.lock), modules, tmp_path / "none")


@pytest.mark.parametrize("module", [darcy, elasticity])
def test_datasets_say_where_they_come_from(module):
    assert module.LICENCE and all(("hub" in source) != ("url" in source) for source in module.SOURCES)
    assert all("{name}" in source["url"] for source in module.SOURCES if "url" in source)


@pytest.mark.parametrize("body", [b"", b"Quota exceeded", b'{"error": "quota exceeded"}', b"\xef\xbb\xbf<html>sign in</html>"])
def test_an_answer_that_is_no_data_is_neither_kept_nor_locked(server, place, published, body):
    server.files[MAT] = body
    assert_refused(place, plain(server), words=[MAT])
    assert not place.lock.exists() or MAT not in place.lock.read_text()
    server.files[MAT] = published[TRAIN]
    fetch(place, plain(server))
    assert_complete(place, published)


def test_a_part_that_somebody_put_there_is_not_locked(server, place, published):
    path = elasticity.PUBLISHED_FILES[1]
    (place.root / path).parent.mkdir(parents=True)
    (place.root / path).write_bytes(published[path][:1000])
    with pytest.raises(ValueError, match="damaged or cut short"):
        fetch(place, hub(), files=elasticity.PUBLISHED_FILES)
    assert not place.lock.exists()


def test_what_systems_pack_along_is_left_out(server, place, published):
    extra = {"FNO/darcy/provenance.json": b"{}", ".download/x": b"x", "FNO/._darcy": b"x"}
    server.commit(REPO, {"FNO.tar.gz": packed(published | extra)})
    fetch(place, hub())
    fetch(place, hub())
    assert_complete(place, published)
    assert not any((place.root / path).exists() for path in extra)


@pytest.mark.parametrize("source", ["path", "download"])
def test_another_file_than_the_locked_one_is_not_read(server, place, published, tmp_path, monkeypatch, source):
    monkeypatch.setattr(elasticity, "SOURCES", (hub(),))
    fetch(place, hub(), files=elasticity.PUBLISHED_FILES)
    path = place.root / elasticity.PUBLISHED_FILES[1]
    np.save(path, np.load(path) + 1)
    spec = ELASTICITY | {"name": "elasticity", "source": source, "root": str(place.root)}
    with pytest.raises(ValueError, match="as locked in"):
        prepare(spec, tmp_path / "e.h5", tmp_path / "e.json", tmp_path / "unused", place.lock, 1)
    assert not (tmp_path / "e.h5").exists()


@pytest.mark.parametrize("text", ["", "{}", '{"url": 1}'])
def test_a_damaged_note_beside_a_part_starts_over(server, place, published, monkeypatch, text):
    interrupt(place, server, monkeypatch, plain(server), f"/files/{MAT}")
    (note,) = place.root.rglob("*.partial.json")
    note.write_text(text)
    fetch(place, plain(server))
    assert_complete(place, published)


def test_a_folder_in_the_place_of_a_file_is_named(server, place):
    (place.root / TRAIN).mkdir(parents=True)
    with pytest.raises(ValueError, match=f"{MAT}: a folder stands where"):
        fetch(place, hub())
    assert not server.requests


# --- from a spec to the dataset file


def test_a_dataset_is_downloaded_read_and_stored(server, place, published, tmp_path, monkeypatch):
    """The store holds the arrays that were served, the card says from which files."""
    monkeypatch.setattr(elasticity, "SOURCES", (hub(),))
    spec = ELASTICITY | {"name": "elasticity", "source": "download", "root": str(place.root)}
    prepare(spec, tmp_path / "e.h5", tmp_path / "e.json", tmp_path / "unused", place.lock, 1)
    stress = np.load(io.BytesIO(published[elasticity.PUBLISHED_FILES[1]]))  # [P, N]
    np.testing.assert_array_equal(store.read(tmp_path / "e.h5").train.target[..., 0], stress[:, :2].T.astype(np.float32))
    card = read_json(tmp_path / "e.json")
    assert card["source"] == "published" and card["counts"] == {"train": 2, "test": 1, "points": 972}
    assert {path: entry["sha256"] for path, entry in card["published"].items()} == {
        path: hashlib.sha256(published[path]).hexdigest() for path in elasticity.PUBLISHED_FILES}
    assert not (tmp_path / "unused").exists()


def test_the_command_line_lists_fetches_and_refuses(server, place, flarepp):
    """No source is reached: one line, exit code 2, and the way out."""
    words = ("--root", place.root, "--lock", place.lock)
    listed = flarepp("data", "--list", *words)
    assert listed.returncode == 0 and all(name in listed.stdout for name in names())
    fetched = flarepp("data", "--fetch", "darci", *words)
    assert fetched.returncode == 2 and "did you mean 'darcy'" in fetched.stderr and fetched.stdout == ""
    server.shutdown()
    server.server_close()
    fetched = flarepp("data", "--fetch", "pipe", *words)
    assert fetched.returncode == 2 and "data.source" in fetched.stderr and "Traceback" not in fetched.stderr
    assert flarepp("data").returncode == 2
