"""Prefill and decode apart, as real processes with a toy for KV: every relay, deaths, freezes, scaling under load."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import pytest
import pytest_asyncio

from omnipipeline_spec.cluster import Control
from omnipipeline_spec.pipeline import Disaggregation, PipelineConfig, PrefillPlacement, StageConfig
from stage_runtime.processes.one_machine.local import LocalPipeline
from tests.e2e.local_pipelines import Client, eventually, replicas, running
from tests.e2e.pair_stages import NUMBERS
from tests.thoroughness import rows

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


def pair(**changes: Any) -> PipelineConfig:
    think = StageConfig(
        name="think",
        process="thinker",
        factory="pair_stages:make",
        terminal=True,
        disaggregation=Disaggregation(prefill=PrefillPlacement(process="apart")),
    )
    return PipelineConfig(name="pair", stages=[think], control=Control(heartbeat_seconds=0.25), **changes)


async def ask(client: Client, number: int, until: Path | None = None) -> dict[str, Any]:
    """Its answer, which must be the right one."""
    inputs = {"number": number, "until": str(until) if until is not None else ""}
    body = (await client.post({"inputs": inputs})).json()
    answer: dict[str, Any] = body["results"]["think"]
    assert answer["sum"] == number * NUMBERS
    return answer


async def instances(client: Client, group: str) -> list[dict[str, Any]]:
    return [one for one in (await client.status())["instances"] if one["group"] == group and one["ready"]]


async def bound(client: Client, group: str, count: int) -> bool:
    counts: list[int] = [one["bound"] for one in await instances(client, group)]
    return sum(counts) >= count


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def paired() -> AsyncIterator[LocalPipeline]:
    """One pair for all tests that leave both groups ready: each process of it imports torch. Decode has two."""
    with tempfile.TemporaryDirectory(prefix="e-") as folder:
        async with running(pair(process_groups=replicas(thinker=2)), Path(folder)) as pipeline:
            yield pipeline


# The pair that tests share goes by shm.
@pytest.mark.parametrize("relay", rows(["nixl", "shm", "tcp", "mooncake"], each_run=1))
async def test_blocks_come_from_prefill_over_every_relay_and_from_its_next_life(
    relay: Literal["shm", "tcp", "nixl", "mooncake"], base: Path
) -> None:
    async with running(pair(relay_backend=relay), base) as pipeline, Client(pipeline.url) as client:
        answers = await asyncio.gather(*(ask(client, number) for number in range(1, 9)))
        (prefill,) = await instances(client, "apart")
        assert {one["by"] for one in answers} == {prefill["incarnation"]}

        async def carried() -> bool:
            found = [one for one in await instances(client, "apart") for one in one["transports"]]
            return any(relay in str(one) for one in found)

        await eventually(carried, what=f"the kv edge must be shown with {relay}")
        await killed_on_the_way(pipeline, client, base)


async def killed_on_the_way(pipeline: LocalPipeline, client: Client, base: Path) -> None:
    """Prefill dies with pieces under way, and starts again under its name: decode's rooms fail, and are counted."""

    async def failed() -> float:
        """The number of failed rooms in the last beat."""
        (decode,) = await instances(client, "thinker")
        return float(decode["gauges"].get("control_kv_failed", 0))

    held = [asyncio.create_task(ask(client, number, base / "never")) for number in range(11, 15)]
    await eventually(lambda: bound(client, "apart", 4))
    killed = (await instances(client, "apart"))[0]["incarnation"]
    os.kill(pipeline.pids()["apart"], signal.SIGKILL)
    assert {one["by"] for one in await asyncio.gather(*held)} == {"decode"}
    await pipeline.ready()

    async def used() -> bool:
        by: str = (await ask(client, 15))["by"]
        return by not in ("decode", killed)

    await eventually(used, what="the next life must prefill")

    async def counted() -> bool:
        return await failed() > 0

    await eventually(counted, what="the rooms that failed must be counted")


async def test_a_killed_prefill_costs_no_request_and_its_next_life_is_used(paired: LocalPipeline, base: Path) -> None:
    never = base / "never"
    async with Client(paired.url) as client:
        retried = (await client.metrics())["omnipipeline_requests_retried_total"]
        held = [asyncio.create_task(ask(client, number, never)) for number in range(1, 6)]
        await eventually(lambda: bound(client, "apart", 5))
        killed = (await instances(client, "apart"))[0]["incarnation"]
        os.kill(paired.pids()["apart"], signal.SIGKILL)
        answers = await asyncio.gather(*held)
        assert {one["by"] for one in answers} == {"decode"}
        await paired.ready()

        async def used() -> bool:
            by: str = (await ask(client, 7))["by"]
            return by not in ("decode", killed)

        await eventually(used, what="the next life must prefill")
        assert (await client.metrics())["omnipipeline_requests_retried_total"] == retried


async def test_a_frozen_prefill_costs_no_request_and_what_it_sends_later_lands_nowhere(
    paired: LocalPipeline, base: Path
) -> None:
    go_on = base / "go on"
    async with Client(paired.url) as client:
        held = [asyncio.create_task(ask(client, number, go_on)) for number in range(1, 6)]
        await eventually(lambda: bound(client, "apart", 5))
        frozen = paired.pids()["apart"]
        os.kill(frozen, signal.SIGSTOP)
        try:
            answers = await asyncio.gather(*held)
        finally:
            go_on.touch()
            os.kill(frozen, signal.SIGCONT)
        assert {one["by"] for one in answers} == {"decode"}

        async def used() -> bool:
            by: str = (await ask(client, 7))["by"]
            return by != "decode"

        await eventually(used, what="the thawed process must prefill again, under a new name")


async def test_a_killed_decode_leaves_no_room_open_at_prefill(paired: LocalPipeline, base: Path) -> None:
    go_on = base / "go on"
    async with Client(paired.url) as client:
        held = [asyncio.create_task(ask(client, number, go_on)) for number in range(1, 7)]
        await eventually(lambda: bound(client, "apart", 6))
        killed = paired.pids()["thinker"]
        os.kill(killed, signal.SIGKILL)
        await eventually(lambda: paired.pids().get("thinker", killed) != killed)
        await paired.ready()
        go_on.touch()
        await asyncio.gather(*held)
        async with asyncio.timeout(60):  # its drain ends when no room is open
            await paired.scale("apart", 0)
        assert (await ask(client, 8))["by"] == "decode"
        await paired.scale("apart", 1)


async def test_prefill_is_scaled_to_none_and_back_under_load_without_a_failure(paired: LocalPipeline) -> None:
    async with Client(paired.url) as client:
        answers: list[dict[str, Any]] = []
        over = asyncio.Event()

        async def load(start: int) -> None:
            number = start
            while not over.is_set():
                answers.append(await ask(client, number % 1000 + 1))
                number += 4

        tasks = [asyncio.create_task(load(start)) for start in range(4)]
        await eventually(lambda: len(answers) > 10)
        await paired.scale("apart", 0)
        since = len(answers)
        await eventually(lambda: len(answers) > since + 10)
        assert {one["by"] for one in answers[since + 4 :]} == {"decode"}
        await paired.scale("apart", 2)
        since = len(answers)
        await eventually(lambda: len({one["by"] for one in answers[since + 4 :]}) >= 2)
        over.set()
        await asyncio.gather(*tasks)
        assert len(await instances(client, "apart")) == 2
        await paired.scale("apart", 1)
