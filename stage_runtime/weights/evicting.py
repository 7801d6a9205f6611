"""Makes room in a folder of models that several pipelines of a node share: the least recently used ones are deleted.

Here: which models may be deleted, and deleting them. Not here: fetching (`cache`), which asks for room before it
fetches and holds the lock of its own model. A model is not deleted while a process reads it (`folders.local` holds a
lock on its folder), while one is fetching it, or until `GRACE_S` after it was asked for last: a pod fetches before its
stages start.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from stage_runtime.errors import ConfigurationError

GRACE_S: Final = 900.0  # longer than the kubelet's longest pause before it starts a failed container again
LOCK: Final = ".lock"


def make_room(own: Path, nbytes: int, bound: int, *, now: float, say: Callable[[str], None]) -> None:
    """Delete other models until ``nbytes`` more of ``own`` are within ``bound``.

    own:    the link of the model that is about to be fetched; its lock is held. The room is its own until then.
    Raises: ConfigurationError: too little may be deleted.
    """
    with _locked(own.parent):
        locks = [each for each in own.parent.glob(f"*{LOCK}") if each.name != f"{own.name}{LOCK}"]
        there = sum(_all_bytes(each) for each in own.parent.iterdir() if each.is_dir() and not each.is_symlink())
        over = there + sum(map(_expected, locks)) + nbytes - bound
        for lock in sorted(locks, key=_used_at):
            if over <= 0:
                break
            if now - _used_at(lock) > GRACE_S:
                freed = _delete(lock)
                over -= freed
                if freed:
                    say(f"{lock.name.removesuffix(LOCK)} was deleted: {freed} bytes that were not used lately")
        if over > 0:
            raise ConfigurationError(
                f"{own.parent}: {nbytes} bytes must be fetched, {over} more than the bound of {bound} bytes has room "
                "for; the other models there are in use"
            )
        lock = own.with_name(f"{own.name}{LOCK}")
        lock.write_text(str(sum(map(_all_bytes, _versions(lock))) + nbytes))


def _expected(lock: Path) -> int:
    """The bytes that are still to come of a model that another process fetches: its lock has all that it will have."""
    try:
        whole = int(lock.read_text() or 0)
    except (OSError, ValueError):
        return 0
    with _alone(lock) as alone:
        return 0 if alone else max(0, whole - sum(map(_all_bytes, _versions(lock))))


def _versions(lock: Path) -> list[Path]:
    """The folders of a model."""
    name = lock.name.removesuffix(LOCK)
    return [each for each in lock.parent.glob(f"{name}.*") if each.is_dir() and not each.is_symlink()]


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time makes room: two that look at the same moment would both take it."""
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def _delete(lock: Path) -> int:
    """Delete all versions of a model that nobody fetches and nobody reads; returns how many bytes they had."""
    link = lock.with_name(lock.name.removesuffix(LOCK))
    versions = _versions(lock)
    with contextlib.ExitStack() as stack:
        if not all(stack.enter_context(_alone(each)) for each in (lock, *versions)):
            return 0
        freed = sum(map(_all_bytes, versions))
        link.unlink(missing_ok=True)
        for each in versions:
            shutil.rmtree(each, ignore_errors=True)
        return freed - sum(map(_all_bytes, versions))


def delete_unread(version: Path) -> None:
    """Delete one version of a model unless a process reads it; the lock of the model is held."""
    with _alone(version) as alone:
        if alone:
            shutil.rmtree(version, ignore_errors=True)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Whether nobody else has a lock on it; nobody gets one until the block ends."""
    try:
        held = os.open(path, os.O_RDONLY)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(held)


def _used_at(lock: Path) -> float:
    with contextlib.suppress(OSError):
        return lock.stat().st_mtime
    return 0.0


def _all_bytes(folder: Path) -> int:
    found = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                found += os.lstat(os.path.join(parent, name)).st_size
    return found
