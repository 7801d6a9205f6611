"""Steady load on a pipeline, and the outcome of every request for its client.

Here: clients that retry nothing, half of them streaming, each request with unique words; a list of outcomes. Not here:
what is done to the pipeline meanwhile. Used by the end-to-end tests.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections import Counter
from types import TracebackType

import httpx
import msgspec


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One request, ended."""

    id: str
    streamed: bool
    outcome: str  #: ``ok``, ``wrong``, or why not: ``503 unavailable``, ``ReadError``…
    replica: str = ""  #: The replica that signed the answer.


class Load:
    """Runs from ``async with`` until `stop`; ``entries`` has one line per request.

    slow: so many of the clients ask what takes 6 s, longer than a pod waits before it begins to drain.
    tls:  what the clients trust. Every second one connects anew for each request then.
    """

    def __init__(self, url: str, *, clients: int = 4, slow: int = 0, tls: ssl.SSLContext | None = None) -> None:
        self.entries: list[Entry] = []
        self._url = url
        self._clients = clients
        self._slow = slow
        self._tls = tls
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(self._client(number)) for number in range(self._clients)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """No new requests; those that are open end as they do."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def some(self, count: int, *, timeout_s: float = 500.0) -> None:
        """Wait until ``count`` more requests have ended."""
        goal = len(self.entries) + count
        async with asyncio.timeout(timeout_s):
            while len(self.entries) < goal:
                await asyncio.sleep(0.05)

    def failures(self) -> Counter[str]:
        return Counter(entry.outcome for entry in self.entries if entry.outcome != "ok")

    def replicas(self) -> Counter[str]:
        return Counter(entry.replica for entry in self.entries if entry.replica)

    async def _client(self, number: int) -> None:
        kept = 0 if self._tls is not None and number % 2 else None
        limits, trusted = httpx.Limits(max_keepalive_connections=kept), self._tls or True
        async with httpx.AsyncClient(base_url=self._url, timeout=120.0, limits=limits, verify=trusted) as client:
            count = 0
            while not self._stopping:
                count += 1
                name, streamed = f"c{number}-{count}", (number + count) % 2 == 0
                words = (
                    [f"slow-{name}-{i}" for i in range(20)] if number < self._slow else [f"{name}-{i}" for i in (0, 1)]
                )
                try:
                    text = await _ask(client, words, streamed)
                    outcome = "ok" if _is_answer(text, words) else "wrong"
                    replica = (text.split() or [""])[-1]
                    self.entries.append(Entry(id=name, streamed=streamed, outcome=outcome, replica=replica))
                except _Failed as error:
                    self.entries.append(Entry(id=name, streamed=streamed, outcome=str(error)))
                except httpx.HTTPError as error:
                    self.entries.append(Entry(id=name, streamed=streamed, outcome=type(error).__name__))


class _Failed(Exception):
    """The pipeline answered with an error."""


def _is_answer(text: str, words: list[str]) -> bool:
    """Its own words, complete and in order: an answer never holds another request's content."""
    answer = text.split()
    return answer[:-2] == [word.upper() for word in words] and answer[-2] == "--"


async def _ask(client: httpx.AsyncClient, words: list[str], streamed: bool) -> str:
    content = " ".join(words)
    body = {"model": "choir", "messages": [{"role": "user", "content": content}], "stream": streamed}
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            failure = json.loads(await answer.aread())["error"]
            raise _Failed(f"{answer.status_code} {failure.get('code')}: {failure.get('message')}")
        if not streamed:
            return str(json.loads(await answer.aread())["choices"][0]["message"]["content"])
        return await _joined(answer)


async def _joined(answer: httpx.Response) -> str:
    text = ""
    async for line in answer.aiter_lines():
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            return text
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise _Failed(f"in the stream: {event['error'].get('code')}: {event['error'].get('message')}")
        for choice in event["choices"]:
            text += choice["delta"].get("content") or ""
    raise _Failed("the stream ended without [DONE]")
