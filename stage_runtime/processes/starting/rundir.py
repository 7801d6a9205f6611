"""The private folder of one run: plans, code, sockets. Made 0700 before anything starts, gone when it is over.

Here: where it may lie, what its paths may cost, and sweeping up after runs that were killed. Not here: what is written
into it (`launching`, `local`). Called by `local` and `pod`.

A run holds an exclusive flock of the file ``lock`` in its folder. A process that makes or deletes a folder takes that
lock first, and then looks whether the file still is the one at that path. So a maker whose folder was swept before it
had the lock makes another one, and no sweeper deletes a folder that a maker has claimed. Sweepers delete the file last:
if one is killed, the next one goes on.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from stage_runtime.errors import ConfigurationError, naming
from stage_runtime.processes.supervision import reaper

PREFIX = "omni-"
MAX_SOCKET_PATH = 107  # bytes; sun_path of sockaddr_un holds 108 with its closing zero
_RANDOM = "xxxxxxxx"  # as long as what mkdtemp appends
_LOCK, _FACTS = "lock", "up.json"
_NAME = re.compile(rf"{PREFIX}[a-z0-9_]{{{len(_RANDOM)}}}")  # as mkdtemp makes them: other people's folders are left
EMPTY_S = 3600.0  # a folder without a lock is deleted when it is empty and as old as this: its maker was killed
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class RunDir:
    """Holds its lock as long as it is open: a folder whose lock is free is left over."""

    def __init__(self, base: str | None) -> None:
        """Make one under ``base``, or under the system's temporary folder.

        Raises: ConfigurationError: no folder can be made there.
        """
        parent = _parent(base)
        try:
            _make_private(parent)
            self.path, lock = _claimed(parent)
        except OSError as error:
            raise ConfigurationError(f"{_field(base)}: {parent}: {error.strerror}") from error
        self._lock: int | None = lock  #: None: it is removed.

    def write(self, name: str, content: bytes) -> Path:
        """Write a file in one step, for readers that look at it any time."""
        target = self.path / name
        partial = target.with_name(f"{target.name}.new")
        with naming(partial):
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
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def check_budget(base: str | None, sockets: dict[str, str]) -> None:
    """Refuse a run whose sockets' paths would be too long for the kernel.

    sockets: file name -> the process that it is for.
    Raises: ConfigurationError: names the longest, and what to shorten.
    """
    parent = str(_parent(base))
    longest = max(sockets, key=len)
    path = os.path.join(parent, PREFIX + _RANDOM, longest)
    nbytes = len(os.fsencode(path))
    if nbytes > MAX_SOCKET_PATH:
        raise ConfigurationError(
            f"the socket of process {sockets[longest]!r} would have a path of {nbytes} bytes, and the kernel takes "
            f"{MAX_SOCKET_PATH}: shorten endpoints.basePath ({parent}, {len(os.fsencode(parent))} bytes) "
            f"or the name of the process by {nbytes - MAX_SOCKET_PATH}"
        )


def check_access(base: str | None) -> None:
    """Refuse a place where another user could replace our folder, as sshd does with StrictModes.

    Every folder on the way must belong to us or root, and no other user may write into it, unless its sticky bit keeps
    others from renaming what is not theirs (``/tmp``).
    Raises: ConfigurationError: names the folder, and what is wrong with it.
    """
    parent = _parent(base)
    for folder in (parent, *parent.parents):
        try:
            found = folder.stat()
        except FileNotFoundError:
            continue  # it will be made, 0700
        except OSError as error:
            raise ConfigurationError(f"{_field(base)}: {folder}: {error.strerror}") from error
        problem = objection(found.st_uid, found.st_mode)
        if problem is not None:
            raise ConfigurationError(f"{_field(base)}: {parent} is not safe: {folder} {problem}")


def objection(owner: int, mode: int) -> str | None:
    """The fault of a folder above the run's, and the cure. None: nothing."""
    trusted = {0, os.geteuid(), os.stat("/").st_uid}  # in a user namespace root may have another number
    if owner not in trusted:
        return f"belongs to {_user(owner)}, who could replace its content: choose another folder"
    if mode & OTHERS_WRITE and not mode & stat.S_ISVTX:
        who = "everybody" if mode & stat.S_IWOTH else "its group"
        return f"may be written by {who} (mode {stat.S_IMODE(mode):04o}): chmod go-w it, or choose another folder"
    return None


def running(base: str | None = None) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The runs of this user under ``base`` that are alive, with what they have published."""
    for folder in _folders(base):
        if _alive(folder):
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                yield folder, msgspec.json.decode((folder / _FACTS).read_bytes(), type=dict[str, Any])


def sweep(base: str | None = None) -> None:
    """Delete what runs left behind that were killed before they could."""
    for folder in _folders(base):
        with contextlib.suppress(OSError):  # it is in use, or another process is deleting it
            _sweep(folder)


def _field(base: str | None) -> str:
    return "endpoints.basePath" if base else "the folder for temporary files (TMPDIR)"


def _parent(base: str | None) -> Path:
    """The folder that holds the folders of runs. Its path has no links: what one of them leads to could be changed
    later.
    """
    if base:
        return Path(base).resolve()
    try:
        return Path(tempfile.gettempdir()).resolve()
    except FileNotFoundError as error:  # it tries to write a file into each candidate, and names no reason
        problem = "no folder for temporary files can be written: free some disk space, or set TMPDIR to such a folder"
        raise ConfigurationError(problem) from error


def _make_private(folder: Path) -> None:
    """Does what ``mkdir -p`` does; each new folder gets the mode 0700."""
    for one in (*reversed(folder.parents), folder):
        if not one.exists():
            one.mkdir(mode=0o700, exist_ok=True)


def _claimed(parent: Path) -> tuple[Path, int]:
    """A new folder, and the descriptor that holds its lock."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        try:
            lock = os.open(path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            continue  # swept already
        fcntl.flock(lock, fcntl.LOCK_EX)  # waits for a process that is checking it
        if _is_at(lock, path / _LOCK):
            return path, lock
        os.close(lock)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is the one at ``path``."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _folders(base: str | None) -> Iterator[Path]:
    for folder in sorted(_parent(base).glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError):
            if _NAME.fullmatch(folder.name) and not folder.is_symlink() and folder.is_dir() and _is_own(folder):
                yield folder


def _is_own(folder: Path) -> bool:
    return folder.stat().st_uid == os.getuid()


def _alive(folder: Path) -> bool:
    """Whether a run holds its lock."""
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # being made or swept at this moment, or not one of our runs
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(lock)


def _sweep(folder: Path) -> None:
    """Raises: OSError: it is not abandoned."""
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        if time.time() - folder.stat().st_mtime > EMPTY_S:
            folder.rmdir()  # of a maker that comes to it after all, the next step fails, and it makes another one
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_at(lock, folder / _LOCK):
            return  # deleted by another process meanwhile
        reaper.end(reaper.RUN, str(folder))  # its program was killed, and its reaper with it
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != _LOCK:
                entry.unlink(missing_ok=True)
        (folder / _LOCK).unlink()
        folder.rmdir()
    finally:
        os.close(lock)


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
