"""One file over HTTP, to the end or not at all: ranged requests that resume, patience that ends, content that is checked.

Bytes go to NAME.partial. NAME.partial.json beside it says which file they are of (url, etag, bytes, sha256), so that another
process resumes only the same file. `Range` asks for the rest; where no sha256 decides in the end, `If-Range` makes that all
of it if the file has changed (RFC 9110, sections 13 and 14). Who called gives the file its name.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from time import sleep
from typing import Any, BinaryIO

import requests
import urllib3
from tqdm import tqdm

from flarepp.record import read_json, sha256, write_json

CHUNK = 1 << 16  # bytes
CONNECT_SECONDS, STALL_SECONDS = 20, 60
MAX_FAILURES = 5  # in a row, without a byte gained
MAX_WAIT = 300  # seconds before one attempt
ADVICE = {
    401: "a login is needed; set HF_TOKEN for the hub, or get the file by hand",
    403: "access is refused; it may need a login (HF_TOKEN for the hub) or an accepted licence, or get the file by hand",
    404: "there is no such file or revision, it may have been moved; look for it at its source and get it by hand",
    410: "the file was withdrawn; look for it at another source and get it by hand",
}


class Refused(Exception):
    """Why a source does not give a file; asking again would not help."""


class Later(Exception):
    """A failure that may pass; `wait` seconds, if the server said how long."""

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.wait = wait


@dataclass(frozen=True)
class Remote:
    """A file at a source. `size` (bytes) and `sha256` bind if they are given; without them the server's word is taken."""

    url: str
    size: int | None
    sha256: str | None
    headers: Mapping[str, str]


def transfer(remote: Remote, partial: Path, reserve: int = 0) -> dict:
    """Bring the whole file to `partial`, going on where an earlier transfer of it stopped; returns its {"bytes", "sha256"}.

    reserve: bytes that must stay free besides. Refused for what only another source can mend, OSError for a full disk.
    """
    partial.parent.mkdir(parents=True, exist_ok=True)
    try:
        return patiently(lambda: _attempt(remote, partial, reserve), progress=lambda: _size(partial))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        reason = f"the disk is full; {_size(partial)} bytes of {remote.url} are kept, make room and start again"
        raise OSError(errno.ENOSPC, reason, str(partial)) from None


def patiently(action: Callable[[], object], progress: Callable[[], int] = lambda: 0) -> Any:
    """Do `action` until it raises no Later. Refused after MAX_FAILURES in a row during which `progress` did not grow."""
    failures, best = 0, progress()
    while True:
        try:
            return action()
        except Later as error:
            gained = progress() > best
            failures, best = 0 if gained else failures + 1, max(best, progress())
            if failures >= MAX_FAILURES:
                raise Refused(f"{error}; gave up after {failures} failures in a row") from None
            wait = min(2.0**failures, MAX_WAIT) if error.wait is None else error.wait
            if wait > MAX_WAIT:
                raise Refused(f"{error}; it asks for {wait:.0f} s of patience, try again then") from None
            say(f"{error}; trying again in {wait:.0f} s")
            sleep(wait)


def discard(partial: Path) -> None:
    """Remove a partial file and what is known of it."""
    for file in (partial, beside(partial)):
        file.unlink(missing_ok=True)


def beside(partial: Path) -> Path:
    """The file that says what a partial file is a part of."""
    return partial.with_name(f"{partial.name}.json")


def say(text: str) -> None:
    """One line on standard error, beside the progress bars."""
    tqdm.write(" ".join(text.split()), file=sys.stderr)


def check_status(status: int, headers: Mapping[str, str], url: str) -> None:
    """Raise Later or Refused for an HTTP status that brings no data."""
    reason = f"HTTP {status} from {url}"
    if status in (408, 429) or status >= 500:
        raise Later(reason, _retry_after(headers.get("Retry-After")))
    if status not in (200, 206, 416):
        raise Refused(f"{reason}: {ADVICE.get(status, 'not understood')}")


def _retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header, which holds seconds or a date."""
    if value is None or value.strip().isdecimal():
        return None if value is None else float(value)
    try:
        seconds = (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds()
    except (TypeError, ValueError):  # neither; or a date without a time zone
        return None
    return max(0.0, seconds)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _attempt(remote: Remote, partial: Path, reserve: int) -> dict:
    """At most one request, then the check of everything that is there."""
    known = _resumable(remote, partial)
    offset = _size(partial) if known else 0
    if not known or offset < known["bytes"]:
        offset = _receive(remote, partial, known, offset, reserve)
    digest, size = sha256(partial), _size(partial)
    if remote.sha256 not in (None, digest):
        discard(partial)
        message = f"{remote.url}: expected sha256 {remote.sha256}, got {digest} ({size} bytes)"
        # Bytes of an earlier process may be to blame, of a disk that lost power for instance: once more from zero.
        raise Later(message, wait=0) if offset else Refused(message)
    return {"bytes": size, "sha256": digest}


def _resumable(remote: Remote, partial: Path) -> dict:
    """What is known of the partial file if its bytes are the beginning of this one, else {}."""
    if not (partial.exists() and beside(partial).exists()):
        return {}
    try:
        known = read_json(beside(partial))
    except ValueError:  # cut by whatever killed its writer
        return {}
    if not {"url", "etag", "sha256", "bytes"} <= known.keys():
        return {}
    same_url = known["url"] == remote.url and _strong(known["etag"])
    same = known["sha256"] == remote.sha256 if remote.sha256 else same_url
    return known if same and _size(partial) <= known["bytes"] else {}


def _strong(etag: str | None) -> bool:
    """Whether an etag stands for the same bytes; a weak one (W/) stands for the same meaning only."""
    return bool(etag and not etag.startswith("W/"))


def _receive(remote: Remote, partial: Path, known: dict, offset: int, reserve: int) -> int:
    """Ask for the bytes from `offset` on and write what comes; returns from where on the server really sent."""
    headers = {"Accept-Encoding": "identity"} | dict(remote.headers)
    if offset:
        headers["Range"] = f"bytes={offset}-"
        if remote.sha256 is None:
            headers["If-Range"] = known["etag"]
    with _get(remote.url, headers, reached=offset > 0) as response:
        check_status(response.status_code, response.headers, remote.url)
        offset, total = _span(response, remote, partial, known, offset)
        _require_space(partial, total - offset + reserve)
        with open(partial, "ab" if offset else "wb") as stream:
            if not offset:
                sides = {"url": remote.url, "etag": response.headers.get("ETag"), "bytes": total, "sha256": remote.sha256}
                write_json(sides, beside(partial))
            _copy(response, remote.url, stream, partial, offset, total)
    return offset


def _get(url: str, headers: dict, reached: bool) -> requests.Response:
    """The response, its body not read yet. `reached`: the source answered before, so that silence may pass."""
    try:
        return requests.get(url, headers=headers, stream=True, timeout=(CONNECT_SECONDS, STALL_SECONDS))
    except requests.RequestException as error:
        cause = next(iter(error.args), error)
        message = f"{url} cannot be reached ({getattr(cause, 'reason', cause)})"
        broken_off = isinstance(error, requests.ReadTimeout) or isinstance(cause, urllib3.exceptions.ProtocolError)
        if broken_off or reached and isinstance(error, requests.ConnectionError | requests.Timeout):
            raise Later(message) from None
        raise Refused(message) from None


def _span(response: requests.Response, remote: Remote, partial: Path, known: dict, offset: int) -> tuple[int, int]:
    """(first byte, bytes of the whole file) of a response. Later, with nothing kept, when that is not `offset`."""
    total = response.headers.get("Content-Length")
    if response.status_code == 200:  # to a Range too: no ranges here, or the file is another by now
        offset = 0
    else:
        span = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(\d+)", response.headers.get("Content-Range", ""))
        first, total = span.groups() if span else (None, None)
        etag = response.headers.get("ETag")
        changed = remote.sha256 is None and etag != known.get("etag")
        if first != str(offset) or total != str(known.get("bytes")) or changed:
            discard(partial)
            asked = f"from byte {offset} of {known['bytes']} on, etag {known['etag']}" if offset else "for the whole file"
            got = f"HTTP {response.status_code}, {span[0] if span else 'no range'}, etag {etag}"
            raise Later(f"{remote.url}: asked {asked}; got {got}", wait=0)
    if "html" in response.headers.get("Content-Type", "").lower():
        raise Refused(f"{remote.url} answers with a web page in place of data")
    if total is None and remote.size is None:
        raise Refused(f"{remote.url} does not say how large the file is, so a part could not be told from the whole")
    size = remote.size if total is None else int(total)
    assert size is not None
    if remote.size not in (None, size):
        raise Refused(f"{remote.url}: expected {remote.size} bytes, the server has {size}")
    return offset, size


def _require_space(partial: Path, needed: int) -> None:
    free = shutil.disk_usage(partial.parent).free
    if needed > free:
        raise Refused(f"{needed} bytes are needed below {partial.parent}, {free} are free")


def _copy(response: requests.Response, url: str, stream: BinaryIO, partial: Path, offset: int, total: int) -> None:
    """Write the body behind the first `offset` bytes. Later, the bytes kept, when it ends early."""
    received = offset
    with tqdm(total=total, initial=offset, desc=partial.stem, unit="B", unit_scale=True, disable=None) as bar:
        try:
            # Not decoded: servers label an archive itself as `Content-Encoding: gzip`.
            while received < total and (chunk := response.raw.read(min(CHUNK, total - received), decode_content=False)):
                if not received and chunk.lstrip()[:1] == b"<":
                    discard(partial)
                    raise Refused(f"{url} answers with a web page in place of data; it begins {chunk[:40]!r}")
                stream.write(chunk)
                received += len(chunk)
                bar.update(len(chunk))
            stream.flush()
            os.fsync(stream.fileno())
        except urllib3.exceptions.HTTPError as error:
            raise Later(f"{url} broke off after {received} of {total} bytes ({type(error).__name__})") from None
    if received != total:
        raise Later(f"{url} broke off after {received} of {total} bytes")
