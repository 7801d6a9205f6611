"""A coordinator that drains beside another one costs clients that keep their connections no request."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.e2e.local_pipelines import APART, PATIENCE_S, Client, diamond, eventually
from tests.e2e.pod_pipelines import Pods, pods

CLIENTS = 24
KEPT = httpx.Limits(keepalive_expiry=None)
NEXT = {"old": "new", "new": "old"}


class KeptConnection:
    """A client with one connection, which goes to the other coordinator when it is told that the connection ends.

    A Service does that for new connections.
    """

    def __init__(self, made: Pods, *, streams: bool, pause_s: float) -> None:
        self.outcomes: Counter[str] = Counter()
        self.told = 0
        self._made, self._streams, self._pause_s = made, streams, pause_s

    async def run(self, stopped: asyncio.Event) -> None:
        at = "old"
        while not stopped.is_set():
            async with httpx.AsyncClient(base_url=self._made.url(at), timeout=PATIENCE_S, limits=KEPT) as http:
                while not stopped.is_set() and not await self._ask(http):
                    await asyncio.sleep(self._pause_s)
            at = NEXT[at]

    async def _ask(self, http: httpx.AsyncClient) -> bool:
        """Whether its connection ends."""
        body = {"inputs": {"text": "a b", "slow": 0.05}, "stream": self._streams}
        try:
            answer = await http.post("/v1/pipeline", json=body)
        except httpx.HTTPError as error:
            self.outcomes[type(error).__name__] += 1
            return True
        whole = not self._streams or "event: result" in answer.text
        self.outcomes[str(answer.status_code) if whole else "torn"] += 1
        told = answer.headers.get("connection") == "close"
        self.told += told
        return bool(told)


@pytest.mark.long
async def test_clients_that_keep_connections_lose_nothing_when_their_coordinator_ends(base: Path) -> None:
    async with pods(diamond(APART), base, "old", "new") as made:
        async with Client(made.url("old")) as old, Client(made.url("new")) as new:
            for client in (old, new):
                await eventually(partial(complete, client))
        stopped = asyncio.Event()
        clients = [
            KeptConnection(made, streams=n % 2 == 0, pause_s=(0.0, 0.05, 0.3, 1.0)[n % 4]) for n in range(CLIENTS)
        ]
        running = [asyncio.create_task(client.run(stopped)) for client in clients]
        await eventually(lambda: asyncio.sleep(0, all(sum(one.outcomes.values()) > 2 for one in clients)))
        ending = asyncio.create_task(made.end("old"))
        await ending
        stopped.set()
        await asyncio.gather(*running)
    outcomes = sum((client.outcomes for client in clients), Counter[str]())
    assert set(outcomes) == {"200"}, outcomes
    assert [client.told for client in clients] == [1] * CLIENTS, "each was told once, by the old one"


async def complete(client: Client) -> bool:
    return bool((await client.status())["complete"])
