"""The folder of the fetched model of an ``s3://`` address, and whether it is as it was fetched.

Here: names of folders, the manifest beside the files, and comparing both. Not here: fetching (`cache`). Called by
`cache`, and by each stage process before its factory, so it imports nothing that takes time.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from omnipipeline_spec.types import stores
from stage_runtime.errors import UNDECODABLE, ConfigurationError

MANIFEST: Final = ".omnipipeline.json"
READ_BYTES: Final = 8 << 20


class FetchedFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file, as it was when it had been fetched and checked."""

    nbytes: int
    sha256: str
    etag: str
    mtime_ns: int  #: A file with another one is hashed before it counts as whole.


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """All files of one fetched model."""

    url: str
    files: dict[str, FetchedFile]  #: Files by path below the folder.


def root(environ: Mapping[str, str]) -> Path:
    """The folder of all fetched models: ``OMNI_MODELS_DIR``, else one of this user's caches."""
    given = environ.get("OMNI_MODELS_DIR")
    cache = environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(given) if given else Path(cache) / "omnipipeline" / "models"


def name(url: str) -> str:
    """The name of a model's folder: a hash of its address, and the end of the address for people."""
    tail = re.sub(r"[^A-Za-z0-9._-]+", "-", url.rstrip("/").rpartition("/")[2])[-40:].strip(".-") or "model"
    return f"{hashlib.sha256(url.rstrip('/').encode()).hexdigest()[:12]}-{tail}"


def link(root: Path, url: str) -> Path:
    """The symbolic link to the version of a model that is whole."""
    return root / "s3" / name(url)


def local(model_path: str | None, environ: Mapping[str, str]) -> str | None:
    """The ``model_path`` of factories: the folder of a fetched model; any other path as it is.

    The folder counts as in use until this process ends, so that `evicting` leaves it.

    Raises: ConfigurationError: it has not been fetched, or a file is not as it was fetched.
    """
    if model_path is None or not stores.is_address(model_path):
        return model_path
    at = link(root(environ), model_path)
    cure = (
        "`omni prefetch` fetches it; on a cluster, delete the prefetch Job, which the operator then makes again, "
        "or the pod where modelCache.type is Node"
    )
    if not at.exists():
        raise ConfigurationError(f"{model_path} has not been fetched: {at} does not exist; {cure}")
    folder = at.resolve()
    with contextlib.suppress(OSError):  # a file system without locks; or it is deleted now, which is seen next
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_SH | fcntl.LOCK_NB)
    for path, why in damaged(folder, read(folder)):
        raise ConfigurationError(f"{folder / path}: {why}; {cure}")
    return str(folder)


def read(folder: Path) -> Manifest:
    """The manifest of a fetched model.

    Raises: ConfigurationError: none can be read.
    """
    try:
        return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, *UNDECODABLE) as error:
        raise ConfigurationError(f"{folder / MANIFEST}: {error}") from error


def damaged(folder: Path, manifest: Manifest, *, thorough: bool = False) -> Iterator[tuple[str, str]]:
    """(path, what is wrong) of each file that is not as it was fetched.

    thorough: hash each file, also one whose size and time of change are as they were.
    """
    for path, known in manifest.files.items():
        try:
            found = (folder / path).stat()
            if found.st_size != known.nbytes:
                yield path, f"has {found.st_size} bytes, and {known.nbytes} were fetched"
            elif (thorough or found.st_mtime_ns != known.mtime_ns) and digest(folder / path) != known.sha256:
                yield path, f"has changed since it was fetched: its SHA-256 is not {known.sha256}"
        except OSError as error:
            yield path, f"cannot be read: {error.strerror}"


def digest(path: Path) -> str:
    """SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
