"""A client under steady load that retries nothing and writes down what became of each request."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import Counter
from collections.abc import Iterable

import httpx
import msgspec

from benchmarks.faultlab import graph

IN_FLIGHT = 200  # beyond it the next request waits: a slow machine shall not be drowned
SLACK_S = 30.0  # beyond its deadline, after which a request without an end is lost: a busy machine reads late


class Entry(msgspec.Struct, kw_only=True):
    """One request. Times are `time.monotonic`'s."""

    id: str
    text: str
    stream: bool
    sent_at: float
    ended_at: float = 0.0
    #: ``completed``, an error's code, ``wrong`` (another's content), ``torn`` (the connection broke), ``lost``.
    outcome: str = "lost"
    message: str = ""
    ends: int = 0  #: How many ends its client received: one.


class Ledger:
    """All requests of one run."""

    def __init__(self, url: str) -> None:
        self.entries: list[Entry] = []
        self._url = url
        self._stop = asyncio.Event()

    async def load(
        self, *, rate: float | None = None, at_once: int | None = None, streams: float = 0.5, count: int | None = None
    ) -> None:
        """Send requests until `stop`, or ``count`` of them; then wait for their ends.

        rate: so many a second. at_once: no more than so many in flight. streams: the share of requests that stream.
        """
        limits = httpx.Limits(max_connections=2000, max_keepalive_connections=100)
        timeout = graph.DEADLINE_S + SLACK_S
        places = asyncio.Semaphore(at_once or IN_FLIGHT)
        async with httpx.AsyncClient(base_url=self._url, timeout=timeout, limits=limits) as http:
            async with asyncio.TaskGroup() as group:
                begun = time.monotonic()
                number = 0
                while not self._stop.is_set() and (count is None or number < count):
                    await places.acquire()
                    number += 1
                    stream = int(number * streams) > int((number - 1) * streams)
                    task = group.create_task(self._one(http, number, stream))
                    task.add_done_callback(lambda _: places.release())
                    if rate is not None:
                        await asyncio.sleep(max(0.0, begun + number / rate - time.monotonic()))

    async def sent(self, count: int) -> None:
        """Wait until so many requests have been sent."""
        while len(self.entries) < count:
            await asyncio.sleep(0.02)

    def stop(self) -> None:
        self._stop.set()

    async def _one(self, http: httpx.AsyncClient, number: int, stream: bool) -> None:
        text = " ".join(f"{secrets.token_hex(3)}n{number}" for _ in range(6))
        entry = Entry(id=f"r{number}-{secrets.token_hex(4)}", text=text, stream=stream, sent_at=time.monotonic())
        self.entries.append(entry)
        body = {"inputs": {"text": text}, "stream": stream, "timeout": graph.DEADLINE_S}
        try:
            async with asyncio.timeout(graph.DEADLINE_S + SLACK_S):
                await (self._streamed if stream else self._whole)(http, entry, body)
        except TimeoutError:
            entry.outcome = "lost"
        except httpx.HTTPError as error:
            entry.outcome, entry.message = "torn", f"{type(error).__name__}: {error}"
        entry.ended_at = time.monotonic()

    async def _whole(self, http: httpx.AsyncClient, entry: Entry, body: dict[str, object]) -> None:
        answer = (await http.post("/v1/pipeline", json=body, headers={"x-request-id": entry.id})).json()
        entry.ends = 1
        if "error" in answer:
            entry.outcome, entry.message = answer["error"]["code"], answer["error"]["message"]
        else:
            right = answer["id"] == entry.id and answer["results"]["tell"] == {"hash": graph.answer_hash(entry.text)}
            entry.outcome = "completed" if right else "wrong"

    async def _streamed(self, http: httpx.AsyncClient, entry: Entry, body: dict[str, object]) -> None:
        headers = {"x-request-id": entry.id}
        words: list[str] = []
        async with http.stream("POST", "/v1/pipeline", json=body, headers=headers) as response:
            if response.status_code != 200:
                error = json.loads(await response.aread())["error"]
                entry.ends, entry.outcome, entry.message = 1, error["code"], error["message"]
                return
            name = ""
            async for line in response.aiter_lines():
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    self._event(entry, words, name, json.loads(line.removeprefix("data: ")))

    @staticmethod
    def _event(entry: Entry, words: list[str], name: str, fields: dict[str, object]) -> None:
        wanted = entry.text.upper().split()
        if name == "chunk":
            words.append(str(fields["data"]))
            if words != wanted[: len(words)]:
                entry.outcome = "wrong"
            return
        entry.ends += 1
        if entry.outcome == "wrong":
            return
        if name == "error":
            error = fields["error"]
            assert isinstance(error, dict)
            entry.outcome, entry.message = error["code"], error["message"]
        else:
            right = words == wanted and fields["data"] == {"hash": graph.answer_hash(entry.text)}
            entry.outcome = "completed" if right else "wrong"

    # --- what it says -------------------------------------------------------------------------------------------

    def failed(self) -> Counter[str]:
        return Counter(entry.outcome for entry in self.entries if entry.outcome != "completed")

    def faults(self) -> list[str]:
        """Everything that may never happen, whatever breaks: lost, torn, wrong, or ended not exactly once."""
        return [
            f"{entry.id}: {entry.outcome}, {entry.ends} ends received, {entry.message}"
            for entry in self.entries
            if entry.outcome in ("lost", "torn", "wrong") or entry.ends != 1
        ]

    def healthy_after(self, moment: float) -> float:
        """Seconds after ``moment`` from which on every request that was sent was served."""
        late = [entry.sent_at - moment for entry in self.entries if entry.outcome != "completed"]
        return max(0.0, *late, 0.0)

    def unstreamed(self) -> Iterable[Entry]:
        return (entry for entry in self.entries if not entry.stream)
