"""The I/O around a realtime session, over a socket in memory whose client reads when the test lets it."""

from __future__ import annotations

import asyncio
import base64
import itertools
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from stage_runtime.web.endpoints import AdapterNames, HandlerContext
from stage_runtime.web.exchanges.exchange import CLIENT, Exchange
from stage_runtime.web.exchanges.memory_budget import MemoryBudget, MemoryReservation
from stage_runtime.web.exchanges.web_sockets import WebSocket
from stage_runtime.web.reading.fetching import Fetcher
from stage_runtime.web.realtime.room import Realtime, Room
from stage_runtime.web.realtime.session import Session, SessionFacts
from stage_runtime.web.realtime.speech.detection import Detector
from stage_runtime.web.sound.pool import CodecPool
from stage_runtime.wire.values import Note, Text
from tests.web.running import ALL, PATIENCE_S
from tests.web.scripted_manager import ScriptedManager, chunk, play

STACK_TOO_LARGE = 1 << 47  # bytes: all that a process can address, so that no thread can start


class SlowClient:
    """A client that stops to read before the first event of one type, until ``reads`` is set."""

    def __init__(self, stops_at: str = "") -> None:
        self.reads = asyncio.Event()
        self.stopped = asyncio.Event()
        self.said: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.got: list[dict[str, Any]] = []
        self._stops_at = stops_at

    def watch_end(self, ending: Callable[[], object] | None) -> None:
        """The server does not drain."""

    def say(self, type: str, **fields: Any) -> None:
        text = msgspec.json.encode({"type": type, **fields}).decode()
        self.said.put_nowait({"type": "websocket.receive", "text": text})

    def leave(self) -> None:
        self.said.put_nowait({"type": "websocket.disconnect"})

    async def receive(self) -> Any:
        return await self.said.get()

    async def send(self, message: Any) -> None:
        """It waits before it writes, and writes all or nothing, as uvicorn does."""
        if message["type"] != "websocket.send":
            return
        event = msgspec.json.decode(message["text"])
        if event["type"] == self._stops_at:
            self.stopped.set()
            await self.reads.wait()
        self.got.append(event)
        if event["type"] == "response.done":
            self.leave()


async def converse(
    client: SlowClient, manager: ScriptedManager, budget: MemoryBudget, facts: SessionFacts | None = None
) -> None:
    scope = {"type": "websocket", "method": "GET", "path": "/v1/realtime", "headers": [], CLIENT: client}
    exchange = Exchange(scope, client.receive, client.send, MemoryReservation(budget))
    async with CodecPool() as codecs:
        context = HandlerContext(
            manager=manager, settings=ALL, fetcher=Fetcher(ALL), codecs=codecs, adapter_names=AdapterNames(manager)
        )
        socket, numbers = WebSocket(exchange, client.receive, client.send), itertools.count()
        if facts is None:
            await Realtime(context).converse(socket)
        else:
            session = Session(facts, lambda prefix: f"{prefix}_{next(numbers)}")
            await Room(context, socket, session, Detector(), beta=False).run()


async def test_a_response_that_is_cancelled_while_its_client_does_not_read_is_told_from_its_begin_to_its_end() -> None:
    client = SlowClient(stops_at="response.output_item.added")
    manager = ScriptedManager(play(chunk(Text("Hel")), asyncio.Event()))
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(converse(client, manager, MemoryBudget(1 << 30)))
        client.say("response.create", response={"output_modalities": ["text"]})
        await client.stopped.wait()
        client.say("response.cancel")
        await manager.last.ended.wait()
        client.reads.set()
    assert [event["type"] for event in client.got] == [
        "session.created",
        "response.created",
        "response.output_item.added",
        "conversation.item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "conversation.item.done",
        "response.done",
    ]


async def test_sound_that_was_written_down_takes_no_memory_of_others() -> None:
    client, budget = SlowClient(), MemoryBudget(1 << 30)
    manager = ScriptedManager(play(chunk(Note("transcript", "what is it")), chunk(Text("It."))))
    client.say("session.update", session={"type": "realtime", "audio": {"input": {"turn_detection": None}}})
    client.say("input_audio_buffer.append", audio=base64.b64encode(bytes(1 << 20)).decode())
    client.say("input_audio_buffer.commit")
    client.say("response.create")
    async with asyncio.timeout(PATIENCE_S):
        await converse(client, manager, budget)
    assert client.got[-1]["type"] == "response.done"
    assert 0 < budget.held_nbytes < 1 << 16


async def test_sound_that_no_thread_can_listen_to_is_refused_and_the_session_lives_on() -> None:
    client, manager = SlowClient(), ScriptedManager(play(chunk(Text("It."))))
    client.say("input_audio_buffer.append", audio=base64.b64encode(bytes(9600)).decode())
    client.say("input_audio_buffer.commit")
    client.say("response.create", response={"output_modalities": ["text"]})
    before = threading.stack_size(STACK_TOO_LARGE)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await converse(client, manager, MemoryBudget(1 << 30), SessionFacts(model="hello", detects=True))
    finally:
        threading.stack_size(before)
    told = [event for event in client.got if event["type"] in ("error", "response.done")]
    assert [(event["type"], event.get("error", {}).get("code")) for event in told] == [
        ("error", "unavailable"),
        ("response.done", None),
    ]
