"""A file that others write: each change of its content is seen once, also where few of its facts change."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from stage_runtime.processes.watched_files import JUST_WRITTEN_S, WatchedFile

LONG_AGO_S = 1_000_000.0


def written(path: Path, content: bytes, *, at_s: float = LONG_AGO_S) -> None:
    path.write_bytes(content)
    os.utime(path, (at_s, at_s))


def swapped(path: Path, content: bytes) -> None:
    """Another file takes the name, as the kubelet does it. The size and the time of writing stay."""
    other = path.with_suffix(".new")
    written(other, content)
    other.replace(path)


def rewritten(path: Path, content: bytes) -> None:
    written(path, content, at_s=LONG_AGO_S + 1)


def resized(path: Path, content: bytes) -> None:
    written(path, content + b"!")


def deleted_and_made(path: Path, content: bytes) -> None:
    path.unlink()
    written(path, content, at_s=LONG_AGO_S + 2)


@pytest.mark.parametrize("change", [swapped, rewritten, resized, deleted_and_made])
def test_a_change_is_seen_once(tmp_path: Path, change: Callable[[Path, bytes], None]) -> None:
    path = tmp_path / "file"
    written(path, b"one")
    watched = WatchedFile(path)
    assert watched.changed() is None
    change(path, b"two")
    assert watched.changed() == path.read_bytes()
    assert watched.changed() is None


def test_a_second_write_within_one_step_of_the_file_systems_clock_is_seen(tmp_path: Path) -> None:
    path, now_s = tmp_path / "file", LONG_AGO_S + JUST_WRITTEN_S / 2
    written(path, b"one")
    watched = WatchedFile(path, clock=lambda: now_s)
    assert watched.changed() is None
    written(path, b"two")
    assert watched.changed() == b"two"


def test_what_was_read_before_counts_as_known(tmp_path: Path) -> None:
    path = tmp_path / "file"
    written(path, b"two")
    assert WatchedFile(path, b"two").changed() is None
    assert WatchedFile(path, b"one").changed() == b"two"


def test_a_file_that_is_not_there_for_a_while_has_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    written(path, b"one")
    watched = WatchedFile(path)
    path.unlink()
    assert watched.changed() is None
    written(path, b"one")
    assert watched.changed() is None


def test_an_unchanged_file_is_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    written(path, b"one")
    watched = WatchedFile(path)
    watched.changed()
    descriptor = os.open(path, os.O_WRONLY)
    os.write(descriptor, b"two")
    os.close(descriptor)
    os.utime(path, (LONG_AGO_S, LONG_AGO_S))  # every fact is as it was, so only a read would tell
    assert watched.changed() is None
