"""All old processes of a pipeline end before the new ones start, as under `Recreate`: requests wait for these."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import httpx
import msgspec
import pytest

from omnipipeline_spec.cluster import Coordinator, Hold
from tests.e2e.local_pipelines import APART, PATIENCE_S, Client, diamond, eventually
from tests.e2e.pod_pipelines import pods

CLIENTS = 8
HOLD_S = 2.0  # much shorter than all new processes take to start


async def ask(url: str, outcomes: Counter[str], stopped: asyncio.Event, *, streams: bool) -> None:
    """One client that asks again and again."""
    body = {"inputs": {"text": "a b", "slow": 0.02}, "stream": streams}
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
        while not stopped.is_set():
            answer = await http.post("/v1/pipeline", json=body)
            whole = not streams or "event: result" in answer.text
            outcomes["ok" if answer.status_code == 200 and whole else answer.text] += 1


@pytest.mark.long
@pytest.mark.proves("roll-out")
async def test_requests_wait_for_the_new_processes_longer_than_they_are_held_otherwise(base: Path) -> None:
    spec = diamond(APART, coordinator=Coordinator(hold=Hold(seconds=HOLD_S)))
    edited = msgspec.structs.replace(spec, env_defaults={"CHANGED": "1"})
    outcomes, stopped = Counter[str](), asyncio.Event()
    async with pods(spec, base) as made, Client(made.url("coordinator")) as client:
        url = made.url("coordinator")

        async def known() -> bool:
            return len((await client.status())["revisions"]) == 2

        async def waiting() -> bool:
            found = await client.metrics()
            return sum(value for name, value in found.items() if name.startswith("omnipipeline_requests_waiting")) > 0

        clients = [asyncio.create_task(ask(url, outcomes, stopped, streams=bool(one % 2))) for one in range(CLIENTS)]
        await eventually(lambda: outcomes["ok"] > CLIENTS)
        plan = made.announce(edited, awaited=[group.name for unit in made.plan.units for group in unit.groups])
        await eventually(known)
        await made.end_all()
        await eventually(waiting)
        await asyncio.sleep(2 * HOLD_S)
        assert outcomes.keys() == {"ok"}, outcomes
        before = outcomes["ok"]
        await made.begin(plan)
        await eventually(lambda: outcomes["ok"] > before + 2 * CLIENTS)
        stopped.set()
        await asyncio.gather(*clients)
    assert outcomes.keys() == {"ok"}, outcomes
