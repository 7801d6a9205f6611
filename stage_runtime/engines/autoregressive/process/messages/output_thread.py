"""The output thread of an engine process: encodes outputs and sends them to clients and the coordinator."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Final

import msgspec

from stage_runtime.engines.autoregressive.connectors.crossing import ToStage
from stage_runtime.engines.autoregressive.process.messages.buffers import BufferPool
from stage_runtime.engines.autoregressive.process.messages.engine_messages import (
    COORDINATOR,
    ENGINE_CORE_DEAD,
    KV,
    READY,
    EngineCoreOutputs,
    UtilityOutput,
    identity,
)
from stage_runtime.engines.autoregressive.process.messages.serial import MsgpackEncoder
from stage_runtime.errors import PeerError, ValueRefused
from stage_runtime.sockets import multipart

log = logging.getLogger(__name__)

JOIN_S: Final = 6.0
BEAT_S: Final = 1.0  # so often an engine sends a sign of life


class OutputThread:
    """``put`` in any thread; the rest is the thread's. It waits for a client that reads nothing."""

    def __init__(self, engine_index: int, *, alive: Callable[[], EngineCoreOutputs]) -> None:
        """alive: what every client gets after a second without output; called in the thread."""
        self._engine_index = engine_index
        self._alive = alive
        self._queue: SimpleQueue[tuple[int, EngineCoreOutputs | ToStage] | bytes | None] = SimpleQueue()
        self._encoder = MsgpackEncoder()
        self._thread: threading.Thread | None = None
        self._alive_due = 0.0
        self._attached = {COORDINATOR, 0}  #: Clients that get output. Client 0 has started this process.

    def attach(self, client: int) -> None:
        self._attached.add(client)

    def detach(self, client: int) -> None:
        """Its process has ended: what is for it is dropped."""
        self._attached.discard(client)

    def put(self, client: int, outputs: EngineCoreOutputs | ToStage) -> None:
        self._queue.put((client, outputs))

    def start(self, context: multipart.SocketContext, endpoints: Sequence[str], coordinator: str | None = None) -> None:
        def write() -> None:
            sockets = {client: context.connect("PUSH", endpoint) for client, endpoint in enumerate(endpoints)}
            if coordinator is not None:
                sockets[COORDINATOR] = context.connect("PUSH", coordinator)
            try:
                for socket in sockets.values():
                    # by which the peer knows that it is connected
                    socket.send([READY, os.getpid().to_bytes(8, "little"), identity(self._engine_index)])
                self._write(sockets)
            except Exception:
                log.exception("the engine's output thread failed")
            finally:
                for client, socket in sockets.items():
                    socket.close(linger_ms=multipart.LAST_WORDS_MS if client in self._attached else 0)

        self._thread = threading.Thread(target=write, name="engine-output", daemon=True)
        self._thread.start()

    def stop(self, *, dead: bool = False) -> None:
        """Send what is left; ``dead``: and then that the engine is dead."""
        self._queue.put(ENGINE_CORE_DEAD if dead else None)
        if self._thread is not None:
            self._thread.join(JOIN_S)

    def _write(self, sockets: dict[int, multipart.FrameSocket]) -> None:
        pool = BufferPool(len(sockets) + 1)
        while (item := self._next(sockets)) is not None:
            if isinstance(item, bytes):
                for client, socket in sockets.items():
                    if client != COORDINATOR and client in self._attached:
                        socket.send([item, identity(self._engine_index)], block=True)
                return
            client, outputs = item
            if client not in self._attached:
                continue
            buffer = pool.take()
            if isinstance(outputs, EngineCoreOutputs):
                frames = self._encode(msgspec.structs.replace(outputs, engine_index=self._engine_index), buffer)
            else:
                frames = [KV, identity(self._engine_index), *self._encoder.encode_into(outputs, buffer)]
            pool.sent(sockets[client].send(frames, track=True, block=True), buffer, frames)

    def _next(
        self, sockets: dict[int, multipart.FrameSocket]
    ) -> tuple[int, EngineCoreOutputs | ToStage] | bytes | None:
        """The next item of the queue. Clients get a sign of life now and then, also while blocks alone are sent."""
        while True:
            left = self._alive_due - time.monotonic()
            try:
                if left > 0:
                    return self._queue.get(timeout=left)
                raise Empty
            except Empty:
                self._alive_due = time.monotonic() + BEAT_S
                alive = msgspec.structs.replace(self._alive(), engine_index=self._engine_index)
                frames = self._encoder.encode(alive)
                for client, socket in sockets.items():
                    if client != COORDINATOR and client in self._attached:
                        with contextlib.suppress(PeerError):  # it reads nothing: it has messages enough
                            socket.send(frames)

    def _encode(self, outputs: EngineCoreOutputs, buffer: bytearray) -> list[multipart.Buffer]:
        try:
            return self._encoder.encode_into(outputs, buffer)
        except ValueRefused as refused:
            if outputs.utility_output is None:
                raise
            failed = UtilityOutput(outputs.utility_output.call_id, failure=f"its result cannot be sent: {refused}")
            return self._encoder.encode_into(msgspec.structs.replace(outputs, utility_output=failed), buffer)
