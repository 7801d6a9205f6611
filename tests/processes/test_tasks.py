"""A task of a process's own that ends too early is reported, whatever ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from stage_runtime.processes.tasks import TaskEnded, Tasks


async def raises() -> None:
    raise LookupError("no beat")


async def returns() -> None:
    await asyncio.sleep(0)


async def is_cancelled() -> None:
    raise asyncio.CancelledError


async def waits() -> None:
    await asyncio.Event().wait()


class Heard:
    """The ends that `Tasks` tells, and a way to wait for the first."""

    def __init__(self) -> None:
        self.ends: list[tuple[str, BaseException]] = []
        self.one = asyncio.Event()

    def __call__(self, name: str, error: BaseException) -> None:
        self.ends.append((name, error))
        self.one.set()


@pytest.mark.proves("internal-task-ends")
@pytest.mark.parametrize(
    ("work", "kind", "text"),
    [
        (raises, LookupError, "no beat"),
        (returns, TaskEnded, "beat returned"),
        (is_cancelled, TaskEnded, "beat was cancelled"),
    ],
)
async def test_a_task_that_ends_by_itself_is_reported_with_its_name_and_reason(
    work: Callable[[], Coroutine[Any, Any, None]], kind: type[BaseException], text: str
) -> None:
    listener = Heard()
    with Tasks(listener) as tasks:
        tasks.start("beat", work())
        await asyncio.wait_for(listener.one.wait(), 60)
    [(name, error)] = listener.ends
    assert (name, type(error), str(error)) == ("beat", kind, text)


async def test_one_that_may_return_is_reported_only_when_it_fails() -> None:
    listener = Heard()
    with Tasks(listener) as tasks:
        tasks.start_finite("drain", returns())
        tasks.start_finite("greeting", raises())
        await asyncio.wait_for(listener.one.wait(), 60)
    assert [name for name, _ in listener.ends] == ["greeting"]


async def test_the_end_of_the_block_cancels_what_runs_and_tells_nothing() -> None:
    listener = Heard()
    with Tasks(listener) as tasks:
        tasks.start("beat", waits())
        [running] = (task for task in asyncio.all_tasks() if task.get_name() == "beat")
    await asyncio.wait([running])
    assert running.cancelled()
    assert listener.ends == []
