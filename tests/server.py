"""A web server on 127.0.0.1 for the tests of downloads: the hub's pages that a download asks for, plain files, and faults.

    /api/datasets/REPO/revision/REVISION        commit, files with size and, as for large files, sha256
    /datasets/REPO/resolve/COMMIT/NAME          a redirection to
    /cdn/SHA256                                 the bytes, with ETag, Range and If-Range
    /files/NAME                                 the bytes of a plain mirror, the same way
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote


@dataclass
class Fault:
    """What goes wrong with one answer. `cut`: the connection ends before this byte of the file, or waits for `hold`."""

    status: int | None = None
    headers: dict = field(default_factory=dict)
    body: bytes = b""
    cut: int | None = None
    hold: threading.Event | None = None
    etag: str | None = None  # another than the content's; "" for none
    flip: int | None = None  # position of a byte that arrives with another value
    ranges: bool = True
    if_range: bool = True


class Server(ThreadingHTTPServer):
    """`with Server() as server`: `files[name]`, `repos[repo][commit][name]`, `heads[repo]`, `faults[path]`, `requests`."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.files: dict[str, bytes] = {}
        self.repos: dict[str, dict[str, dict[str, bytes]]] = defaultdict(dict)
        self.heads: dict[str, str] = {}
        self.faults: dict[str, list[Fault]] = defaultdict(list)  # the first is used up by the first request
        self.lasting: dict[str, Fault] = {}  # for every request
        self.requests: list[tuple[str, dict]] = []

    def __enter__(self) -> Server:
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, *_) -> None:
        """A client that goes away is part of the tests."""

    def commit(self, repo: str, files: dict[str, bytes]) -> str:
        """Publish a new revision of a repository."""
        revision = hashlib.sha1(f"{repo} {len(self.repos[repo])}".encode()).hexdigest()
        self.repos[repo][revision], self.heads[repo] = files, revision
        return revision

    def asked(self, part: str) -> list[dict]:
        """Headers of the requests for paths that contain `part`."""
        return [headers for path, headers in self.requests if part in path]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        self.server.requests.append((path, dict(self.headers)))
        queue = self.server.faults[path]
        fault = queue.pop(0) if queue else self.server.lasting.get(path, Fault())
        if fault.status:
            self.answer(fault.status, fault.headers, fault.body)
        elif match := re.fullmatch("/api/datasets/(.+)/revision/(.+)", path):
            self.describe(*match.groups())
        elif match := re.fullmatch("/datasets/(.+?)/resolve/([^/]+)/(.+)", path):
            repo, commit, name = match.groups()
            data = self.server.repos[repo][commit][name]
            place = f"{self.server.url}/cdn/{hashlib.sha256(data).hexdigest()}"
            self.answer(302, {"Location": place, "X-Repo-Commit": commit})
        else:
            self.send_file(self.find(path), fault)

    def find(self, path: str) -> bytes | None:
        if path.startswith("/files/"):
            return self.server.files.get(path.removeprefix("/files/"))
        everything = [data for repo in self.server.repos.values() for commit in repo.values() for data in commit.values()]
        return next((data for data in everything if path == f"/cdn/{hashlib.sha256(data).hexdigest()}"), None)

    def describe(self, repo: str, revision: str) -> None:
        commit = self.server.heads.get(repo) if revision == "main" else revision
        files = self.server.repos.get(repo, {}).get(commit)
        if files is None:
            self.answer(404, {"X-Error-Code": "RevisionNotFound"})
            return
        siblings = []
        for name, data in files.items():
            digest = hashlib.sha256(data).hexdigest()
            large = {"lfs": {"sha256": digest, "size": len(data), "pointerSize": 130}} if not name.endswith(".md") else {}
            siblings.append({"rfilename": name, "size": len(data), "blobId": digest[:40]} | large)
        value = {"id": repo, "sha": commit, "private": False, "tags": [], "siblings": siblings}
        self.answer(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def answer(self, status: int, headers: dict, body: bytes = b"") -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": len(body)} | headers).items():
            self.send_header(key, str(value))
        self.end_headers()
        self.wfile.write(body)

    def send_file(self, data: bytes | None, fault: Fault) -> None:
        if data is None:
            self.answer(404, {})
            return
        etag = f'"{hashlib.md5(data).hexdigest()}"' if fault.etag is None else fault.etag
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")) if fault.ranges else None
        if fault.if_range and self.headers.get("If-Range", etag) != etag:
            asked = None
        first = int(asked[1]) if asked else 0
        if asked and first >= len(data):
            self.answer(416, {"Content-Range": f"bytes */{len(data)}"})
            return
        headers = {"Content-Type": "application/octet-stream", "Content-Length": len(data) - first}
        headers |= {"ETag": etag} if etag else {}
        headers |= {"Content-Range": f"bytes {first}-{len(data) - 1}/{len(data)}"} if asked else {}
        headers |= fault.headers
        self.send_response(206 if asked else 200)
        for key, value in headers.items():
            if value is not None:
                self.send_header(key, str(value))
        self.end_headers()
        sent = bytearray(data)
        if fault.flip is not None:
            sent[fault.flip] ^= 1
        cut = len(data) if fault.cut is None else max(first, fault.cut)
        self.wfile.write(sent[first:cut])
        if fault.hold:
            fault.hold.wait(60)
            self.wfile.write(sent[cut:])
