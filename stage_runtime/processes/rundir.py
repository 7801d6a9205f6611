"""The private folder of one run: plans, code, sockets. Made 0700 before anything starts, gone when it is over.

Here: where it lies, what its paths may cost, and sweeping up after runs that were killed. Not here: what is written
into it (`launching`, `local`). Called by `local` and `pod`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from stage_runtime.errors import ConfigurationError

PREFIX = "omni-"
MAX_SOCKET_PATH = 107  # bytes; sun_path of sockaddr_un holds 108 with its closing zero
_RANDOM = "xxxxxxxx"  # as long as what mkdtemp appends
_LOCK, _FACTS = "lock", "up.json"


class RunDir:
    """Holds its lock as long as it is open: a folder whose lock nobody holds belongs to nobody."""

    def __init__(self, base: str | None) -> None:
        """Make one under ``base``, or under the system's temporary folder.

        Raises: ConfigurationError: no folder can be made there.
        """
        parent = Path(base or tempfile.gettempdir())
        try:
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        except OSError as error:
            raise ConfigurationError(f"endpoints.basePath: {parent}: {error.strerror}") from error
        self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def write(self, name: str, content: bytes) -> Path:
        """Write a file in one step, for readers that look at it any time."""
        target = self.path / name
        partial = target.with_name(f"{target.name}.new")
        partial.write_bytes(content)
        partial.replace(target)
        return target

    def endpoint(self, name: str) -> str:
        """A Unix socket's endpoint in here."""
        return f"ipc://{self.path / name}"

    def publish(self, facts: dict[str, Any]) -> None:
        """Tell other programs of this user about the run (`running`)."""
        self.write(_FACTS, msgspec.json.encode(facts))

    def remove(self) -> None:
        """Delete it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._lock)


def check_budget(base: str | None, sockets: dict[str, str]) -> None:
    """Refuse a run whose sockets' paths would be too long for the kernel.

    sockets: file name -> the process that it is for.
    Raises: ConfigurationError: names the longest, and what to shorten.
    """
    parent = base or tempfile.gettempdir()
    longest = max(sockets, key=len)
    path = os.path.join(parent, PREFIX + _RANDOM, longest)
    nbytes = len(os.fsencode(path))
    if nbytes > MAX_SOCKET_PATH:
        raise ConfigurationError(
            f"the socket of process {sockets[longest]!r} would have a path of {nbytes} bytes, and the kernel takes "
            f"{MAX_SOCKET_PATH}: shorten endpoints.basePath ({parent}, {len(os.fsencode(parent))} bytes) "
            f"or the name of the process by {nbytes - MAX_SOCKET_PATH}"
        )


def running(base: str | None = None) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The runs of this user under ``base`` that are alive, with what they have published."""
    for folder in _folders(base):
        if not _abandoned(folder):
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                yield folder, msgspec.json.decode((folder / _FACTS).read_bytes(), type=dict[str, Any])


def sweep(base: str | None = None) -> None:
    """Delete what runs left behind that were killed before they could."""
    for folder in _folders(base):
        if _abandoned(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _folders(base: str | None) -> Iterator[Path]:
    for folder in sorted(Path(base or tempfile.gettempdir()).glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError):
            if folder.is_dir() and not folder.is_symlink() and folder.stat().st_uid == os.getuid():
                yield folder


def _abandoned(folder: Path) -> bool:
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR)
    except OSError:  # being made at this moment, or none of ours
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
