"""Files that the coordinator reads again while it serves: a broken one never ends the process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stage_runtime.errors import ConfigurationError
from stage_runtime.processes import coordinator_process

READERS: tuple[Callable[[bytes], Any], ...] = (
    coordinator_process._revisions,
    coordinator_process._hosts,
    coordinator_process._groups,
    coordinator_process._canary,
    coordinator_process._limits,
)


@pytest.mark.parametrize("content", [b"", b"{", b'["\xff"]', b'{"x":' + b"[" * 100_000], ids=range(4))
@pytest.mark.parametrize("read", READERS)
def test_a_file_that_cannot_be_read_is_a_fault_of_the_file(read: Callable[[bytes], Any], content: bytes) -> None:
    with pytest.raises(ConfigurationError):
        read(content)


def test_a_list_of_revisions_that_is_not_text_is_named_at_the_start(tmp_path: Path) -> None:
    revisions = tmp_path / "revisions.json"
    revisions.write_bytes(b'[{"revision":"\xff"}]')
    with pytest.raises(ConfigurationError, match=f"OMNI_REVISIONS: {revisions}: no list of revisions: 'utf-8' codec"):
        coordinator_process.read_revisions(revisions)
