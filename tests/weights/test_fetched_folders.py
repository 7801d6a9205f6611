"""The folder of a fetched model: compared with its manifest, and filled."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stage_runtime.weights import folders
from stage_runtime.weights.cache import Fetch
from stage_runtime.weights.folders import FetchedFile, Manifest
from stage_runtime.weights.progress import Progress
from stage_runtime.weights.source import Interrupted, StoredFile

STACK_TOO_LARGE = 1 << 47  # bytes: all that a process can address, so that no thread can start


def test_a_file_that_can_be_looked_at_and_not_read_is_named(tmp_path: Path) -> None:
    """A disk that fails, or no right to read: here a folder in its place, of the same size."""
    (tmp_path / "weights.bin").mkdir()
    nbytes = (tmp_path / "weights.bin").stat().st_size
    known = FetchedFile(nbytes=nbytes, sha256="0" * 64, etag="", mtime_ns=0)
    found = folders.damaged(tmp_path, Manifest(url="s3://bucket/model", files={"weights.bin": known}))
    assert list(found) == [("weights.bin", "cannot be read: Is a directory")]


class Store:
    """`source.Source` of one file."""

    url = "s3://bucket/model"

    def files(self) -> list[StoredFile]:
        return [StoredFile(path="config.json", nbytes=2, etag="99914b932bd37a50b983c5e7c90ae93b")]

    def chunks(self, file: StoredFile, offset: int) -> Iterator[bytes]:
        yield b"{}"[offset:]


def test_a_fetch_for_which_no_thread_can_start_may_be_repeated(tmp_path: Path) -> None:
    store: Any = Store()
    said: list[str] = []
    fetch = Fetch(store, tmp_path, Progress(said.append), say=said.append)
    before = threading.stack_size(STACK_TOO_LARGE)
    try:
        with pytest.raises(Interrupted, match="s3://bucket/model: can't start new thread"):
            fetch.ensure()
    finally:
        threading.stack_size(before)
    assert (fetch.ensure() / "config.json").read_bytes() == b"{}"
