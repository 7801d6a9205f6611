"""One child process: what is left when it cannot be watched, and when its lines cannot be shown."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from stage_runtime.processes.supervision.children import Child, Command
from stage_runtime.processes.supervision.progress import ProgressWatch
from tests.patience import patience

PATIENCE_S = patience(60.0)


def ignored(*_: object) -> None:
    """Ignores events and lines."""


def child(script: str, *, on_line: Callable[[str, str], None] = ignored) -> Child:
    command = Command(name="voice", argv=(sys.executable, "-c", script), env=dict(os.environ))
    return Child(command, on_event=ignored, on_line=on_line)


def no_descriptor(*_: object) -> Any:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def second_pipe_fails(patched: pytest.MonkeyPatch) -> None:
    pipes = iter((os.pipe, no_descriptor))
    patched.setattr(os, "pipe", lambda: next(pipes)())


def no_pidfd(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(os, "pidfd_open", no_descriptor)


@pytest.mark.parametrize("fail", [second_pipe_fails, no_pidfd])
async def test_a_child_that_cannot_be_watched_leaves_no_descriptor_and_no_process(
    monkeypatch: pytest.MonkeyPatch, fail: Callable[[pytest.MonkeyPatch], None]
) -> None:
    open_before, children_before = os.listdir("/proc/self/fd"), psutil.Process().children()
    with monkeypatch.context() as patched:
        fail(patched)
        with pytest.raises(OSError, match="Too many open files"):
            child("import time; time.sleep(600)")
    assert os.listdir("/proc/self/fd") == open_before
    assert psutil.Process().children() == children_before


async def test_a_process_whose_last_words_cannot_be_shown_has_ended_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(process: str, line: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    started = child("import sys; sys.stdout.write('one\\ntwo\\nthree'); sys.exit(3)", on_line=full)
    assert await asyncio.wait_for(started.exited, PATIENCE_S) == 3
    assert list(started.tail) == ["one", "two", "three"]
    assert caplog.text.count("a line of a process is not taken (logged once)") == 1


async def test_a_process_has_ended_also_where_what_it_left_cannot_be_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "listdir", no_descriptor)
    problems = list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    started = child("print('over')")
    assert await asyncio.wait_for(started.exited, PATIENCE_S) == 0
    assert list(started.tail) == ["over"]
    assert [str(one["exception"]) for one in problems] == ["[Errno 24] Too many open files"]


async def test_a_process_of_which_nothing_can_be_seen_counts_as_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    started = child("import time; time.sleep(600)")
    watch = ProgressWatch([started], 1.0)
    with monkeypatch.context() as patched:
        patched.setattr(os, "listdir", no_descriptor)
        ProgressWatch([started], 1.0)
        started.last_sign = 0.0
        assert watch.idlest(2.0) == (started, 0.0)
        assert watch.idlest(3.0) == (started, 0.0)
    assert watch.idlest(4.0) == (started, 0.0)  # nothing to compare with
    started.kill()
    await started.exited
