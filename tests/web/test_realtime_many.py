"""Many sessions of `/v1/realtime`, and long ones: what they keep. Clients are bare sockets, which keep little."""

from __future__ import annotations

import asyncio
import base64
import gc
import itertools
import socket
import struct
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest

from stage_runtime.web.realtime.effects import Answer, Listen
from stage_runtime.web.realtime.session import Session, SessionFacts
from stage_runtime.web.sound.codecs.resampling import Resampler
from stage_runtime.wire.values import Note, Text, Usage
from tests.e2e.local_pipelines import eventually
from tests.web.running import ALL, PATIENCE_S, Running, start
from tests.web.scripted_manager import chunk, play

SESSIONS = 100
RESTING_NBYTES = 100 << 10
SILENCE = base64.b64encode(bytes(24_000)).decode()  # half a second
WINDOWS = 256  # with scores of their own, in one piece of sound
PIECE_S = WINDOWS * 32 // 1000
TELEPHONE_PIECE = base64.b64encode(bytes([255]) * (WINDOWS * 32 * 8)).decode()
HOUR_S = 3600


class Socket:
    """A WebSocket of a client, by hand."""

    def __init__(self, running: Running) -> None:
        self._socket = socket.create_connection(("127.0.0.1", running.server.port), timeout=PATIENCE_S)
        self._file = self._socket.makefile("rb")
        lines = ["GET /v1/realtime HTTP/1.1", f"host: 127.0.0.1:{running.server.port}", "connection: Upgrade"]
        lines += ["upgrade: websocket", "sec-websocket-version: 13", "sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA=="]
        self._socket.sendall("\r\n".join([*lines, "", ""]).encode())
        assert b"101" in self._file.readline()
        while self._file.readline().strip():
            pass

    def send(self, type: str, **fields: Any) -> None:
        body = msgspec.json.encode({"type": type, **fields})
        length = struct.pack("!BH", 254, len(body)) if len(body) < 1 << 16 else struct.pack("!BQ", 255, len(body))
        self._socket.sendall(b"\x81" + length + bytes(4) + body)  # masked, by zeros

    def until(self, type: str) -> None:
        read = None
        while read != type:
            nbytes = self._file.read(2)[1]
            if nbytes > 125:
                nbytes = int.from_bytes(self._file.read(2 if nbytes == 126 else 8), "big")
            read = msgspec.json.decode(self._file.read(nbytes))["type"]

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def opened(running: Running, count: int) -> list[Socket]:
    """Sessions that have heard some silence, all of them asked something at once, and answered."""
    sockets = [Socket(running) for _ in range(count)]
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}
    for one in sockets:
        one.send("input_audio_buffer.append", audio=SILENCE)
        one.send("session.update", session={"type": "realtime", "output_modalities": ["text"]})
        one.send("conversation.item.create", item=item)
        one.send("response.create")
    for one in sockets:
        one.until("response.done")
    return sockets


async def test_a_hundred_sessions_are_answered_at_once_and_cost_little_and_no_timer_while_they_rest() -> None:
    async with start(play(chunk(Text("Good day."))), ALL, cap=SESSIONS) as running:
        sockets = await asyncio.to_thread(opened, running, 5)  # what is loaded at the first use
        try:
            before, timers = _held(), await _most_timers()
            sockets += await asyncio.to_thread(opened, running, SESSIONS)
            found = (0, 0, 0.0)

            async def rest() -> bool:
                nonlocal found
                in_flight, more = len(running.manager.in_flight), _timers() - timers
                found = (in_flight, more, (_held() - before) / SESSIONS)
                return not in_flight and more <= 0 and found[2] <= RESTING_NBYTES

            await eventually(rest, what=lambda: f"requests, more timers, bytes of each session: {found}")
        finally:
            tracemalloc.stop()
            for one in sockets:
                one.close()


def _held() -> int:
    gc.collect()
    if not tracemalloc.is_tracing():
        tracemalloc.start()
    return tracemalloc.get_traced_memory()[0]


async def _most_timers() -> int:
    """Those of the server's own, which has none at all between the end of a wait and the beginning of the next one."""
    most = 0
    for _ in range(10):
        most = max(most, _timers())
        await asyncio.sleep(0)
    return most


def _timers() -> int:
    loop: Any = asyncio.get_running_loop()
    return sum(not handle.cancelled() for handle in loop._scheduled)


def test_a_resampler_keeps_its_window_and_not_what_it_was_given() -> None:
    made = [Resampler(24_000, 16_000, 1) for _ in range(20)]
    tracemalloc.start()
    try:
        for one in made:
            one.take(np.ones((24_000, 1), np.float32))
        assert tracemalloc.get_traced_memory()[0] / len(made) < 2_000
    finally:
        tracemalloc.stop()


@pytest.mark.long
def test_a_session_of_an_hour_does_not_grow() -> None:
    """Once its history is full, an hour by the clock of its sound: a turn and an answer every minute."""
    ids = itertools.count()
    session = Session(SessionFacts(model="hello", detects=True), lambda prefix: f"{prefix}_{next(ids):08}")
    telephone = {"type": "realtime", "audio": {"input": {"format": {"type": "audio/pcmu"}}}}
    session.receive(msgspec.json.encode({"type": "session.update", "session": telephone}))
    said = [{"type": "output_text", "text": "what was said " * 10}]
    item = {"type": "message", "role": "assistant", "content": said}
    tracemalloc.start()
    try:
        for _ in range(1024):  # as many items as a history may have
            session.receive(msgspec.json.encode({"type": "conversation.item.create", "item": item}))
        _turn(session, seconds=60)
        before = _held()
        for _ in range(HOUR_S // 60):
            _turn(session, seconds=60)
        grown = _held() - before
    finally:
        tracemalloc.stop()
    assert grown < 64 << 10  # a kilobyte for each turn, beyond the items that take the place of others


def _turn(session: Session, *, seconds: int) -> None:
    """Speech, silence, an answer and its transcript."""
    key = None
    for score in (0.9, *[0.05] * (seconds // PIECE_S)):
        event = msgspec.json.encode({"type": "input_audio_buffer.append", "audio": TELEPHONE_PIECE})
        assert any(isinstance(effect, Listen) for effect in session.receive(event))
        for effect in session.heard([score] * WINDOWS):
            key = effect.key if isinstance(effect, Answer) else key
    assert key is not None
    session.noted(key, Note("transcript", "what was said " * 8))
    session.text(key, "what was answered " * 8)
    session.sound(key, bytes(4800))
    session.completed(key, Usage(), "stop")
