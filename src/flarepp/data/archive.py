"""Unpack a downloaded .tar.gz that nobody vouches for: regular files below one folder, within bounds, whole or not at all.

Stricter than tarfile's `data` filter (PEP 706, from Python 3.11.4 on), and without it: no links or devices, no absolute or
climbing paths, no member twice, nothing of a header is taken over but path and bytes; and bounds against archives that unpack to
far more than they seem: on the sum of the sizes that the members announce, before anything of a member is written, and on what
the gzip stream yields, whatever the tar headers say.
"""

from __future__ import annotations

import errno
import gzip
import shutil
import tarfile
import zlib
from pathlib import Path, PurePosixPath
from typing import IO, cast

from tqdm import tqdm

from flarepp.data.transfer import Refused
from flarepp.record import sha256

MAX_BYTES = 64 * 10**9
MAX_RATIO = 100  # unpacked to packed; floating-point arrays reach 1.1 to 10
ALWAYS_ALLOWED = 64 * 2**20  # bytes, whatever the ratio
MAX_MEMBERS = 100_000
READ = 1 << 20  # bytes


class _Bounded:
    """The unpacked stream, which ends with an error when it yields more than `limit` bytes."""

    def __init__(self, stream: gzip.GzipFile, limit: int) -> None:
        self.stream, self.limit, self.count = stream, limit, 0

    def read(self, size: int) -> bytes:
        data = self.stream.read(size)
        self.count += len(data)
        if self.count > self.limit:
            raise Refused(f"unpacks to more than {self.limit} bytes")
        return data


def described(file: Path) -> dict:
    """What the lock says of a file."""
    return {"bytes": file.stat().st_size, "sha256": sha256(file)}


def unpack(archive: Path, folder: Path, name: str) -> dict[str, dict]:
    """Unpack `archive` into the new folder `folder`; returns {path: {"bytes", "sha256"}} of its files, sorted.

    name: what errors call the archive. Refused names archive and member, OSError for a full disk; the folder is gone then.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        _extract(archive, folder, name)
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        return {file.relative_to(folder).as_posix(): described(file) for file in files}
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _extract(archive: Path, folder: Path, name: str) -> None:
    limit = min(MAX_BYTES, max(ALWAYS_ALLOWED, MAX_RATIO * archive.stat().st_size))
    member, total = None, 0
    try:
        with gzip.open(archive) as unpacked:
            stream = _Bounded(unpacked, 2 * limit)  # headers and padding come on top of the members' bytes
            with tarfile.open(fileobj=cast(IO[bytes], stream), mode="r|", bufsize=READ) as tar:
                for count, member in enumerate(tqdm(tar, desc=f"unpack {name}", unit="file", disable=None), 1):
                    total += member.size
                    _require_harmless(member, count, total, limit, shutil.disk_usage(folder).free)
                    _write(tar, member, folder)
            while stream.read(READ):  # to the checksum at the end of the gzip stream
                pass
    except (Refused, tarfile.TarError, EOFError, zlib.error, ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        where = f"member {member.name!r}" if member else "its first member"
        raise Refused(f"the archive {name} is refused at {where}: {error}") from None


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    """Write a harmless member; OSError when it is there already."""
    path = folder / member.name
    if member.isdir():
        path.mkdir(parents=True, exist_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    source = tar.extractfile(member)
    assert source is not None, member.name
    with open(path, "xb") as target:
        shutil.copyfileobj(source, target, READ)


def _require_harmless(member: tarfile.TarInfo, count: int, total: int, limit: int, free: int) -> None:
    """Refused for a member that is not unpacked; OSError when the disk has no room for it."""
    path = PurePosixPath(member.name)
    if not (member.isreg() or member.isdir()):
        raise Refused("it is a link or a device; only regular files and folders are unpacked")
    if path.is_absolute() or ".." in path.parts or "\\" in member.name:
        raise Refused("its path leads out of the folder")
    if count > MAX_MEMBERS:
        raise Refused(f"more than {MAX_MEMBERS} members")
    if total > limit:
        raise Refused(f"with it the archive unpacks to {total} bytes, at most {limit} are accepted")
    if member.size > free:
        raise OSError(errno.ENOSPC, f"{member.name} needs {member.size} bytes, {free} are free")
