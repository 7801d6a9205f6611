"""Clients that keep their connections, through rolls of the coordinator and of the control key."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import httpx
import pytest

from tests.cluster.installing import Installed, pipeline, url, wait_for, wait_ready

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900, func_only=True)]

CODE = """
import asyncio
import stage_runtime as omni

async def say(payload):
    for word in payload.request.last_text().split():
        await asyncio.sleep(0.05)
        yield omni.Chunk(omni.Text(word + " "))

def echo():
    return say
"""
NAME = "kept"
CLIENTS = 32
PAUSES_S = (0.0, 0.1, 0.5, 2.0)
KEPT = httpx.Limits(max_connections=1, keepalive_expiry=None)


@pytest.fixture
def kept(installed: Installed) -> Iterator[str]:
    """URL of a pipeline of one stage."""
    stages: list[dict[str, object]] = [{"name": "echo", "process": "echo", "factory": "made:echo", "terminal": True}]
    installed.apply(pipeline(NAME, stages, code=CODE))
    wait_ready(installed.cluster, installed.namespace, NAME)
    yield url(installed.cluster, installed.namespace, NAME)
    installed.kubectl("delete", "omnipipeline", NAME, "--timeout=60s")


@asynccontextmanager
async def clients(at: str) -> AsyncIterator[Counter[str]]:
    """The outcomes of so many clients with a connection each, which they keep; complete at the end of the block."""
    outcomes: Counter[str] = Counter()
    ended = asyncio.Event()

    async def run(number: int) -> None:
        body = {"messages": [{"role": "user", "content": "a b c"}], "stream": number % 2 == 0}
        async with httpx.AsyncClient(base_url=at, timeout=60, limits=KEPT) as http:
            while not ended.is_set():
                outcomes[await _outcome(http, body)] += 1
                await asyncio.sleep(PAUSES_S[number % len(PAUSES_S)])

    async with asyncio.TaskGroup() as running:
        for number in range(CLIENTS):
            running.create_task(run(number))
        while sum(outcomes.values()) < 2 * CLIENTS:
            await asyncio.sleep(0.1)
        try:
            yield outcomes
        finally:
            ended.set()


async def _outcome(http: httpx.AsyncClient, body: dict[str, object]) -> str:
    try:
        answer = await http.post("/v1/chat/completions", json=body)
    except httpx.HTTPError as error:
        return type(error).__name__
    whole = answer.text.endswith("data: [DONE]\n\n") if body["stream"] else "a b c" in answer.text
    return f"{answer.status_code}{'' if whole else ' torn'}"


async def test_rolls_of_the_coordinator_cost_kept_connections_nothing(installed: Installed, kept: str) -> None:
    async with clients(kept) as outcomes:
        for timeout_s in (601, 602):
            before = _coordinators(installed)
            installed.patch(NAME, {"coordinator": {"http": {"requestTimeoutSeconds": timeout_s}}})
            await asyncio.to_thread(_replaced, installed, before)
    assert set(outcomes) == {"200"}, outcomes


async def test_a_rotation_of_the_control_key_costs_nothing_and_leaves_one_key(installed: Installed, kept: str) -> None:
    before, [old] = installed.uids(NAME), _keys(installed)
    async with clients(kept) as outcomes:
        rotated = await asyncio.to_thread(installed.plugin, "rotate-key", NAME, "--wait", "--timeout=4m")
        assert rotated.returncode == 0, rotated.stdout + rotated.stderr
        await asyncio.to_thread(
            wait_for, f"no pod with {old}", lambda: installed.uids(NAME).isdisjoint(before) or None, timeout_s=200
        )
        served = outcomes["200"]
        while outcomes["200"] < served + 2 * CLIENTS:
            await asyncio.sleep(0.1)
    assert set(outcomes) == {"200"}, outcomes
    [new] = _keys(installed)
    assert new != old and f"Secret {old} is deleted" in rotated.stdout


def _coordinators(installed: Installed) -> set[str]:
    return {str(pod["metadata"]["uid"]) for pod in installed.pods(NAME, "coordinator")}


def _replaced(installed: Installed, before: set[str]) -> None:
    wait_for("another coordinator", lambda: _coordinators(installed).isdisjoint(before) or None, timeout_s=200)


def _keys(installed: Installed) -> list[str]:
    return [one["metadata"]["name"] for one in installed.all("secrets", f"omnipipeline.dev/pipeline={NAME}")]
