"""Whether the content of a fetched object is what its store says: SHA-256 from a list, or an ETag made of MD5.

Here: the list's form and the arithmetic of ETags; pure but for reading the fetched file. Not here: what is done about a
file that is not whole (`cache`).
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Final

from stage_runtime.errors import ConfigurationError

SUMS: Final = "SHA256SUMS"  #: The file beside a model's files: what ``sha256sum * > SHA256SUMS`` writes.
MAX_SUMS_BYTES: Final = 4 << 20  # of 40,000 files
_LINE: Final = re.compile(r"^([0-9a-f]{64}) [ *](?:\./)?(.+)$")
_MD5: Final = re.compile(r"^[0-9a-f]{32}$")
_PARTS: Final = re.compile(r"^([0-9a-f]{32})-([1-9][0-9]{0,4})$")
#: Sizes of parts that clients upload with, in MiB and MB: AWS' tools 8 and 16, MinIO's 16 and 64, s3fs' 50, rclone's 5.
_SIZES: Final = tuple(
    count * unit
    for count in (5, 8, 10, 15, 16, 20, 25, 32, 50, 64, 100, 128, 200, 250, 256, 500, 512, 1000, 1024, 5000, 5120)
    for unit in (1 << 20, 10**6)
)


def read_sums(text: str, place: str) -> dict[str, str]:
    """Path -> SHA-256 of a list.

    Raises: ConfigurationError: names the line that is not of its form.
    """
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        match = _LINE.match(line.rstrip())
        if match is None:
            raise ConfigurationError(f"{place}, line {number}: expected 64 hex digits, two blanks and a file's path")
        found[match[2]] = match[1]
    return found


def bare(etag: str | None) -> str:
    """An ETag without its quotes."""
    return (etag or "").strip().removeprefix("W/").strip('"').lower()


def condition(etag: str | None) -> str:
    """An ETag for ``If-Match``; empty: it may not be compared so (RFC 9110, 13.1.1)."""
    given = (etag or "").strip()
    return "" if not given or given.startswith("W/") else f'"{given.strip(chr(34))}"'


def is_md5(etag: str) -> bool:
    """Whether an ETag may be the MD5 of the whole object."""
    return _MD5.match(etag) is not None


def md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def matches_parts(path: Path, etag: str) -> bool:
    """Whether an ETag is of this content, uploaded in parts of a usual size. False says nothing about the content."""
    match = _PARTS.match(etag)
    if match is None:
        return False
    nbytes, count = path.stat().st_size, int(match[2])
    sizes = [size for size in _SIZES if -(-nbytes // size) == count] or ([nbytes] if count == 1 else [])
    return any(_of_parts(path, size) == etag for size in sizes)


def _of_parts(path: Path, size: int) -> str:
    """The ETag of this content, uploaded in parts of this size: the MD5 of their MD5s, and their count."""
    digests = []
    with path.open("rb") as file:
        while True:
            part, left = hashlib.md5(usedforsecurity=False), size
            while left and (chunk := file.read(min(left, 8 << 20))):
                part.update(chunk)
                left -= len(chunk)
            if left == size:
                break
            digests.append(part.digest())
    return f"{hashlib.md5(b''.join(digests), usedforsecurity=False).hexdigest()}-{len(digests)}"
