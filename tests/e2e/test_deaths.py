"""A stage that is killed under load: restarted, known under a new name, and mourned by its own requests at most."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from omnipipeline_spec.cluster import ProcessGroup
from stage_runtime.processes.one_machine.local import LocalPipeline
from tests.e2e.local_pipelines import (
    APART,
    Client,
    at_rest,
    coordinator,
    diamond,
    eventually,
    holds,
    replicas,
    running,
)
from tests.thoroughness import rows


class Load:
    """Steady requests, each with a text of its own, and what became of each."""

    def __init__(self, client: Client, *, each_s: float = 0.02, **inputs: Any) -> None:
        self._client = client
        self._each_s = each_s
        self._inputs = inputs
        self.outcomes: dict[int, str] = {}
        self.wrong: list[Any] = []

    async def run(self, count: int) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(count):
                group.create_task(self._one(number))
                await asyncio.sleep(self._each_s)

    async def _one(self, number: int) -> None:
        text = f"request number {number}"
        body = await self._client.ask(text, **self._inputs)
        if "results" in body:
            self.outcomes[number] = "completed"
            if body["results"]["speak"]["text"] != text:
                self.wrong.append((number, body))
        else:
            error = body["error"]
            self.outcomes[number] = f"{error['code']}: {error['message']}"


async def incarnations(client: Client, group: str, *, ready: bool = False) -> set[str]:
    """ready: only those that requests may be bound to."""
    instances = (await client.status())["instances"]
    return {one["incarnation"] for one in instances if one["group"] == group and (one["ready"] or not ready)}


@pytest.mark.long
@pytest.mark.proves("killed-stage", "group-on-its-way")
# tests/faults kills every member
@pytest.mark.parametrize(("group", "stage"), rows([("front", "take"), ("voice", "speak")], each_run=1))
async def test_a_killed_stage_comes_back_under_a_new_name_and_no_request_is_lost(
    group: str, stage: str, base: Path
) -> None:
    """New requests and old ones wait for the next life of the only instance: none is refused, none fails."""
    async with running(diamond(APART), base) as pipeline, Client(pipeline.url, connections=200) as client:
        (before,) = await incarnations(client, group)
        load, hit = Load(client), Load(client, until={stage: str(base / "go on")})
        waiting = asyncio.create_task(hit.run(5))
        await eventually(lambda: holds(client, group, 5))
        under_load = asyncio.create_task(load.run(150))
        await eventually(lambda: bool(load.outcomes))
        pid = pipeline.pids()[group]
        os.kill(pid, signal.SIGKILL)

        async def mourned() -> bool:
            return before not in await incarnations(client, group)

        async def back() -> bool:
            return bool(await incarnations(client, group, ready=True) - {before})

        await eventually(mourned, what="a kill must be seen")
        (base / "go on").touch()
        await eventually(back, what="it must be started again")
        await asyncio.gather(waiting, under_load)
        await eventually(lambda: pipeline.pids().get(group, pid) != pid)
        await pipeline.ready()
        (after,) = await incarnations(client, group)
        assert after != before
        assert load.wrong == hit.wrong == []
        assert {*load.outcomes.values(), *hit.outcomes.values()} == {"completed"}
        assert (len(load.outcomes), len(hit.outcomes)) == (150, 5)
        assert (await client.metrics())["omnipipeline_requests_retried_total"] > 0, "the kill has hit requests"
        await at_rest(client)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def unretried() -> AsyncIterator[tuple[LocalPipeline, Path]]:
    """A diamond without retries, and its log."""
    groups = [ProcessGroup(name="front", stuck_after_seconds=4)]
    spec = diamond(APART, process_groups=groups, coordinator=coordinator(retries=0))
    with tempfile.TemporaryDirectory(prefix="e-") as folder:
        async with running(spec, Path(folder)) as pipeline:
            yield pipeline, Path(folder, "log")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def two_voices() -> AsyncIterator[LocalPipeline]:
    with tempfile.TemporaryDirectory(prefix="e-") as folder:
        async with running(diamond(APART, process_groups=replicas(voice=2)), Path(folder)) as pipeline:
            yield pipeline


@pytest.mark.proves("killed-stage")
async def test_without_retries_the_killed_stage_s_requests_fail_with_its_name(
    unretried: tuple[LocalPipeline, Path], base: Path
) -> None:
    """The positive control: what the retries above hide."""
    pipeline, _log = unretried
    async with Client(pipeline.url, connections=200) as client:
        never = {"speak": str(base / "never")}
        tasks = [asyncio.create_task(client.ask("a b", until=never)) for _ in range(10)]
        await eventually(lambda: holds(client, "voice", 10))
        os.kill(pipeline.pids()["voice"], signal.SIGKILL)
        for body in await asyncio.gather(*tasks):
            assert (body["error"]["code"], body["error"]["stage"]) == ("unavailable", "speak")
        await pipeline.ready()
        assert (await client.answer("a b"))["text"] == "a b"


@pytest.mark.proves("killed-stage")
async def test_streams_that_had_begun_end_with_an_error_and_new_ones_are_served(
    two_voices: LocalPipeline, base: Path
) -> None:
    async with Client(two_voices.url, connections=200) as client:
        until, came = {"speak": str(base / "go on")}, asyncio.Semaphore(0)
        tasks = [asyncio.create_task(client.streamed("one two three", came=came, until=until)) for _ in range(8)]
        for _ in tasks:
            await came.acquire()  # the first word of each; the second waits
        killed = two_voices.pids()["voice"]
        os.kill(killed, signal.SIGKILL)
        await eventually(lambda: killed not in two_voices.pids().values())
        (base / "go on").touch()
        ends = [events[-1] for events in await asyncio.gather(*tasks)]
        codes = sorted(last["error"]["code"] if name == "error" else name for name, last in ends)
        assert codes == ["result"] * 4 + ["unavailable"] * 4
        assert (await client.answer("next"))["text"] == "next"
        await eventually(lambda: two_voices.pids().get("voice", killed) != killed)
        await two_voices.ready()


@pytest.mark.proves("frozen-stage")
async def test_a_frozen_stage_is_dead_and_returns_under_a_new_incarnation(two_voices: LocalPipeline) -> None:
    async with Client(two_voices.url, connections=200) as client:
        before = await incarnations(client, "voice")
        load = Load(client)
        under_load = asyncio.create_task(load.run(150))
        await eventually(lambda: len(load.outcomes) > 20)
        frozen = two_voices.pids()["voice"]
        os.kill(frozen, signal.SIGSTOP)
        try:

            async def one_left() -> bool:
                return len(before & await incarnations(client, "voice")) == 1

            await eventually(one_left, what="silence must be seen")
            await under_load
        finally:
            os.kill(frozen, signal.SIGCONT)
        assert set(load.outcomes.values()) == {"completed"} and load.wrong == []

        async def back() -> bool:
            found = await incarnations(client, "voice")
            return len(found) == 2 and len(found - before) == 1

        await eventually(back, what="the thawed process must join again, under a new name")
        assert two_voices.pids()["voice"] == frozen, "it lives on: nothing was wrong with it"
        await asyncio.gather(*(client.answer(f"after {index}") for index in range(10)))
        await at_rest(client)


@pytest.mark.proves("no-progress")
async def test_a_stage_that_makes_no_progress_is_ended_whether_it_keeps_the_gil_or_not(
    unretried: tuple[LocalPipeline, Path],
) -> None:
    """Its own look at the time needs the GIL; where that is kept for ever, C code ends the process."""
    pipeline, log = unretried
    async with Client(pipeline.url) as client:
        for waits, traces in (
            ("hold", ["in _hold_the_gil"]),
            ("nap", ["no progress for 4 s with unfinished requests", "in _nap"]),
        ):
            pid = pipeline.pids()["front"]
            body = await client.ask("a b", **{waits: 300})
            assert (body["error"]["code"], body["error"]["stage"]) == ("unavailable", "take"), waits
            for trace in traces:
                await eventually(partial(lambda trace: trace in log.read_text(), trace))
            await eventually(partial(lambda pid: pipeline.pids().get("front", pid) != pid, pid))
            await pipeline.ready()
        assert (await client.answer("a b"))["text"] == "a b"


@pytest.mark.long
@pytest.mark.proves("frozen-stage")
async def test_a_stage_that_computes_without_letting_go_of_the_gil_is_not_declared_dead(
    shared: LocalPipeline, client: Client
) -> None:
    """libzmq's own thread answers for it."""
    before = [await incarnations(client, group) for group in ("front", "voice")]
    assert (await client.answer("a b", hold=5.0))["text"] == "a b"
    assert [await incarnations(client, group) for group in ("front", "voice")] == before
