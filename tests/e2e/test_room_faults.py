"""Prefill, decode or their coordinator is killed, stopped or cut off while a room is at each of its states.

Real processes in network namespaces, the library's own rooms, a toy for the cache. A request gets the right answer, or,
where the coordinator itself went, a clear error; no room is open afterwards, and nothing of a relay is in use.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from benchmarks.faultlab import network
from benchmarks.faultlab.experiments import TOLD
from benchmarks.faultlab.network import NetPipeline
from omnipipeline_spec.cluster import Control
from omnipipeline_spec.pipeline import Code, Disaggregation, PipelineConfig, PrefillPlacement, StageConfig
from stage_runtime.rules.kv.handover import KVPoll
from tests.e2e import room_stages
from tests.e2e.local_pipelines import Client, at_rest, eventually, replicas
from tests.thoroughness import THOROUGH

pytestmark = [
    pytest.mark.netns,
    pytest.mark.debian("iproute2"),
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not network.possible() and not os.environ.get("CI"), reason="needs root, to make network namespaces"
    ),
]

STATES = tuple(KVPoll)
VICTIMS = ("prefill", "decode", "coordinator")
FAULTS = ("SIGKILL", "SIGSTOP", "cut")
CASES = list(itertools.product(VICTIMS, FAULTS, STATES))
#: One of each victim, with another fault at another state.
OFTEN = [
    ("prefill", "cut", KVPoll.Transferring),
    ("decode", "SIGKILL", KVPoll.WaitingForInput),
    ("coordinator", "SIGSTOP", KVPoll.Bootstrapping),
]


def spec() -> PipelineConfig:
    think = StageConfig(
        name="think",
        process="thinker",
        factory="room_stages:make",
        terminal=True,
        disaggregation=Disaggregation(prefill=PrefillPlacement(process="apart")),
    )
    return PipelineConfig(
        name="rooms",
        stages=[think],
        relay_backend="tcp",
        code=Code(inline={"room_stages.py": Path(room_stages.__file__).read_text()}),
        control=Control(heartbeat_seconds=0.25),
        process_groups=replicas(thinker=2),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def machines() -> AsyncIterator[NetPipeline]:
    """Each process of it on a machine of its own."""
    with tempfile.TemporaryDirectory(prefix="e-") as folder:
        log = Path(folder, "log")
        async with NetPipeline(spec(), log=log) as pipeline:
            yield pipeline
        print(log.read_text()[-12_000:])


async def ask(client: Client, number: int, state: KVPoll | None = None, folder: str = "") -> dict[str, Any]:
    """The body of the answer, or of an error; ``{"error": …}`` where the coordinator went with its connection."""
    inputs = {"number": number, "state": "" if state is None else state.name, "folder": folder}
    try:
        body: dict[str, Any] = (await client.post({"inputs": inputs})).json()
    except httpx.TransportError as error:
        return {"error": {"code": "unavailable", "message": repr(error)}}
    return body


async def hurt(pipeline: NetPipeline, fault: str, member: str, noticed: asyncio.Event) -> None:
    """Do the fault again and again until ``noticed``; a kill is done once."""
    pid = pipeline.pids()[member]
    if fault == "SIGKILL":
        os.kill(pid, signal.SIGKILL)
        # It counts as ready until its death is noticed.
        await eventually(lambda: pipeline.pids().get(member) != pid, what=f"the death of {member} must be noticed")
        return
    if fault == "SIGSTOP":
        os.kill(pid, signal.SIGSTOP)
    else:
        pipeline.network.cut(member)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(6.0):  # a coordinator's client learns nothing before it is there again
                await noticed.wait()
    finally:
        if fault == "SIGSTOP":
            os.kill(pid, signal.SIGCONT)
        else:
            pipeline.network.mend(member)


def reached(folder: Path) -> bool:
    return (folder / "reached").exists() and (folder / "decode").exists()


@pytest.mark.long
@pytest.mark.parametrize(("victim", "fault", "state"), CASES if THOROUGH else OFTEN)
async def test_whoever_goes_at_any_state_of_a_room_the_answer_is_right(
    machines: NetPipeline, tmp_path: Path, victim: str, fault: str, state: KVPoll
) -> None:
    number = 1 + CASES.index((victim, fault, state))
    async with Client(machines.url) as client:
        asked = asyncio.create_task(ask(client, number, state, str(tmp_path)))
        await eventually(lambda: reached(tmp_path), what=f"the room must be {state.name}")
        assert (tmp_path / "reached").read_text() == state.name
        names = {pid: name for name, pid in machines.pids().items()}
        member = {"prefill": "apart", "coordinator": "coordinator"}.get(
            victim, names[int((tmp_path / "decode").read_text())]
        )
        noticed = asyncio.Event()
        asked.add_done_callback(lambda _: noticed.set())
        hurting = asyncio.create_task(hurt(machines, fault, member, noticed))
        if state in (KVPoll.Bootstrapping, KVPoll.Success, KVPoll.Failed) and victim == "prefill":
            (tmp_path / "go").touch()  # decode goes on without it
        await hurting
        (tmp_path / "go").touch()
        answer = await asked
        if victim == "coordinator" and "error" in answer:
            assert answer["error"]["code"] in TOLD, answer
        else:
            assert answer["results"]["think"]["sum"] == room_stages.total(number), answer
    async with Client(machines.url) as client:
        await machines.ready()
        others = await asyncio.gather(*(ask(client, number) for number in range(1000, 1008)))
        sums = [one["results"]["think"]["sum"] for one in others]
        assert sums == [room_stages.total(number) for number in range(1000, 1008)]
        await at_rest(client)

        async def none_open() -> bool:
            gauges = [one["gauges"] for one in (await client.status())["instances"]]
            return not any(count for one in gauges for name, count in one.items() if "kv_leases:" in name)

        await eventually(none_open, what="no room may be open at prefill")
