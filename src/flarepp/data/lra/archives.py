"""Members of a published .tar.gz, read without unpacking it to disk."""

from __future__ import annotations

import gzip
import re
import tarfile
import zlib
from pathlib import Path

LARGEST = 64 * 2**20  # bytes of a member
ALL = 2**30  # bytes of all members that are kept, with a block for the name of each
READ = 1 << 20  # bytes


def members(path: Path, pattern: str) -> dict[str, bytes]:
    """{name: content} of the regular files whose whole name matches; ValueError for an archive that is damaged."""
    found: dict[str, bytes] = {}
    total = 0
    try:
        with gzip.open(path) as stream:
            with tarfile.open(fileobj=stream, mode="r|") as tar:
                for member in tar:
                    if member.isreg() and re.fullmatch(pattern, member.name):
                        if member.size > LARGEST:
                            raise ValueError(f"{member.name} has {member.size} bytes, at most {LARGEST} are accepted")
                        if member.name in found:
                            raise ValueError(f"{member.name} is there twice")
                        if (total := total + tarfile.BLOCKSIZE + member.size) > ALL:
                            raise ValueError(f"more than {ALL} bytes in all")
                        content = tar.extractfile(member)
                        assert content is not None, member.name
                        found[member.name] = content.read()
            while stream.read(READ):  # to the checksum at the end
                pass
    except (tarfile.TarError, EOFError, zlib.error, ValueError, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ValueError(f"{path}: damaged or cut short ({type(error).__name__}: {error})") from None
    return found
