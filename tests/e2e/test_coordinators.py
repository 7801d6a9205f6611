"""Two coordinators at once, as in a roll, over TCP and CURVE: either aborts the other's requests; one may die."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from tests.e2e.local_pipelines import APART, PATIENCE_S, Client, at_rest, diamond, eventually
from tests.e2e.pod_pipelines import Pods, pods


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def rolled() -> AsyncIterator[tuple[Pods, Path]]:
    """A diamond with the coordinators ``old`` and ``new``, and its log."""
    with tempfile.TemporaryDirectory(prefix="e-") as folder:
        async with pods(diamond(APART), Path(folder), "old", "new") as made:
            yield made, Path(folder, "log")


@pytest.mark.proves("killed-coordinator")
async def test_of_two_coordinators_either_cancels_the_other_s_requests_and_one_survives_the_other(
    rolled: tuple[Pods, Path],
) -> None:
    made, _log = rolled
    async with Client(made.url("old")) as old, Client(made.url("new")) as new:
        for client in (old, new):
            await eventually(partial(lambda client: complete(client), client))
            assert (await client.answer("a b"))["text"] == "a b"

        # a client's DELETE that reaches the coordinator which does not know its request
        asking = asyncio.create_task(old.post({"inputs": {"text": "a b", "nap": 60}}, request_id="theirs"))
        await eventually(lambda: in_flight(old, 1))
        async with httpx.AsyncClient(base_url=made.url("new"), timeout=PATIENCE_S) as http:
            gone = await http.delete("/v1/requests/theirs")
            assert (gone.status_code, gone.json()) == (200, {"id": "theirs", "cancelled": True})
            answer = await asking
            assert (answer.status_code, answer.json()["error"]["code"]) == (499, "cancelled")
            assert (await http.delete("/v1/requests/theirs")).status_code == 404
            assert (await http.delete("/v1/requests/nobody-s")).status_code == 404
        await at_rest(old)

        # a coordinator that is killed: its clients' connections end, the stages drop its requests, the other serves
        words = " ".join(["word"] * 400)
        doomed = [asyncio.create_task(old.ask("a b", nap=60, size=1 << 20)) for _ in range(4)]
        streams = [asyncio.create_task(old.streamed(words, slow=0.5, size=1 << 16)) for _ in range(4)]
        kept = asyncio.create_task(new.answer("a b", nap=1.0))
        await eventually(lambda: in_flight(old, 8))
        pid = made.pids()["old"]
        os.kill(pid, signal.SIGKILL)
        for one in await asyncio.gather(*doomed, *streams, return_exceptions=True):
            assert isinstance(one, httpx.TransportError), one
        assert (await new.answer("next"))["text"] == "next"
        assert (await kept)["text"] == "a b", "the other's requests go on"
        await at_rest(new)  # slots, credits and queue entries of the dead one's came back
        await eventually(lambda: made.pids().get("old", pid) != pid)
        await made.ready()
    async with Client(made.url("old")) as reborn:
        await eventually(lambda: complete(reborn))
        assert (await reborn.answer("and this one"))["text"] == "and this one"


@pytest.mark.proves("killed-coordinator")
async def test_a_stage_that_was_stopped_while_its_coordinator_was_replaced_comes_to_the_new_one(
    rolled: tuple[Pods, Path],
) -> None:
    """Its connection broke and came back meanwhile: another process answers at the same address."""
    made, log = rolled
    await made.ready()
    async with Client(made.url("old")) as old:
        await eventually(lambda: complete(old))
        left = asyncio.create_task(old.ask("a b", nap=60))
        await eventually(lambda: in_flight(old, 1))
        served, pids = _served(log), made.pids()
        os.kill(pids["side"], signal.SIGSTOP)
        try:
            os.kill(pids["old"], signal.SIGKILL)
            await eventually(lambda: _served(log) > served)
        finally:
            os.kill(pids["side"], signal.SIGCONT)
        assert isinstance((await asyncio.gather(left, return_exceptions=True))[0], httpx.TransportError)
    await made.ready()
    async with Client(made.url("old")) as reborn, Client(made.url("new")) as new:
        await eventually(lambda: complete(reborn))
        assert (await reborn.answer("a b"))["text"] == "a b"
        await at_rest(new)


def _served(log: Path) -> int:
    """How often a coordinator named ``old`` has begun to serve."""
    return sum(line.startswith("old: ") and "serving diamond" in line for line in log.read_text().splitlines())


@pytest.mark.long
@pytest.mark.proves("frozen-coordinator")
async def test_a_coordinator_that_freezes_and_goes_on_costs_the_other_one_s_requests_nothing(
    rolled: tuple[Pods, Path],
) -> None:
    """All instances lose it, and come back to it as they are: those that it still counts as its own, too."""
    made, log = rolled
    async with Client(made.url("old")) as old, Client(made.url("new")) as new:
        for client in (old, new):
            await eventually(partial(lambda client: complete(client), client))
            assert (await client.answer("a b"))["text"] == "a b"
        before = await incarnations(new)
        assert before == await incarnations(old)
        stopped, answers = asyncio.Event(), []

        async def load() -> None:
            while not stopped.is_set():
                answers.append(await new.ask("a b", nap=0.05))

        under_load = [asyncio.create_task(load()) for _ in range(8)]
        aborted = log.read_text().count("of its requests aborted")
        retried = (await new.metrics())["omnipipeline_requests_retried_total"]
        known = log.read_text().count("registered with coordinator")
        os.kill(made.pids()["old"], signal.SIGSTOP)
        try:
            await eventually(lambda: log.read_text().count("of its requests aborted") >= aborted + len(before))
        finally:
            os.kill(made.pids()["old"], signal.SIGCONT)
        await eventually(lambda: log.read_text().count("registered with coordinator") >= known + len(before))
        await eventually(lambda: complete(old))
        assert (await old.answer("next"))["text"] == "next"
        stopped.set()
        await asyncio.gather(*under_load)
        assert {one["results"]["speak"]["text"] if "results" in one else str(one) for one in answers} == {"a b"}
        assert await incarnations(new) == await incarnations(old) == before
        assert (await new.metrics())["omnipipeline_requests_retried_total"] == retried
        await at_rest(new)


async def incarnations(client: Client) -> set[str]:
    return {one["incarnation"] for one in (await client.status())["instances"]}


async def complete(client: Client) -> bool:
    return bool((await client.status())["complete"])


async def in_flight(client: Client, count: int) -> bool:
    return bool((await client.status())["in_flight"] == count)
