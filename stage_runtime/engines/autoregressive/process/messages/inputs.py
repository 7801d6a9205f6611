"""The input thread of an engine process: reads, decodes and checks what clients and the coordinator send.

The checks and the hashing of prompts run here, beside the step that is computed. A fault of a message ends
that message alone: its request is refused, or it is dropped and counted.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Final

from stage_runtime.engines.autoregressive.connectors.crossing import ToEngine
from stage_runtime.engines.autoregressive.core.busy_loop import RequestType
from stage_runtime.engines.autoregressive.core.engine_core import EngineCore
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreRequest
from stage_runtime.engines.autoregressive.process.messages.engine_messages import (
    READY,
    AddHeader,
    Attach,
    EngineCoreRequestType,
    Refused,
    StartWave,
    UtilityCall,
    UtilityOutput,
    refused,
)
from stage_runtime.engines.autoregressive.process.messages.serial import MsgpackDecoder
from stage_runtime.engines.autoregressive.text.prompts.prompt_rows import Extension
from stage_runtime.errors import ProtocolError, describe
from stage_runtime.sockets import multipart

log = logging.getLogger(__name__)

JOIN_S: Final = 5.0


class Inputs:
    """The inputs for the loop, and the thread that reads them. ``queue``: in order of arrival."""

    def __init__(
        self,
        core: EngineCore,
        *,
        refuse: Callable[[int, Refused], None],
        answer: Callable[[int, UtilityOutput], None],
        utilities: Callable[[str], Callable[..., Any] | None],
        clients: int,
        on_client: Callable[[int, bool], None] = lambda client, there: None,
        on_kv: Callable[[ToEngine], None] = lambda message: None,
    ) -> None:
        """refuse, answer: to a client, by its index. utilities: a function by its name. on_client: a further client
        is there, or its process has ended. on_kv: takes messages of the stage about blocks that cross.
        """
        #: The queue that `get` reads.
        self.queue: SimpleQueue[tuple[RequestType, Any]] = SimpleQueue()
        self.owners: dict[str, int] = {}  #: Client of every request that is not over.
        self.draining = False  #: Requests that come now are refused.
        self.dropped = 0  #: Messages that could not be understood.
        self.on_start_wave: Callable[[StartWave], None] = lambda wave: None  #: Called on the loop's thread.
        self._core = core
        self._refuse = refuse
        self._answer = answer
        self._utilities = utilities
        self._clients = clients
        self._headers = MsgpackDecoder(AddHeader)
        self._requests = MsgpackDecoder(EngineCoreRequest)
        self._extensions = MsgpackDecoder(Extension)
        self._ids = MsgpackDecoder(list[str])
        self._calls = MsgpackDecoder(UtilityCall)
        self._arguments: MsgpackDecoder[list[Any]] = MsgpackDecoder(list)
        self._waves = MsgpackDecoder(StartWave)
        self._attaches = MsgpackDecoder(Attach)
        self._kv = MsgpackDecoder[ToEngine](ToEngine)  # type: ignore[arg-type]  # a union is not a type for mypy
        self._on_kv = on_kv
        self._poller = multipart.Poller()
        self._on_client = on_client
        self._attached: dict[int, int] = {}  #: pidfd of each further client.
        self._stop = os.eventfd(0)
        self._identity = b""
        self._coordinated = threading.Event()
        self._thread: threading.Thread | None = None

    def start(
        self,
        context: multipart.SocketContext,
        endpoints: Sequence[str],
        identity: bytes,
        *,
        coordinator: str | None = None,
        failed: Callable[[Exception], None],
    ) -> None:
        """Connect and read, on a thread of its own. failed: the thread has ended by an error.

        Raises: TimeoutError: the coordinator is silent.
        """
        self._identity = identity
        if coordinator is None:
            self._coordinated.set()

        def read() -> None:
            sockets = [context.connect("DEALER", endpoint, identity=identity) for endpoint in endpoints]
            try:
                for socket in sockets:
                    socket.send([b""], block=True)  # the client's socket learns this engine's identity
                if coordinator is not None:
                    sockets.append(context.connect("XSUB", coordinator))
                    sockets[-1].subscribe()
                self._read(sockets)
            except Exception as error:
                log.exception("the engine's input thread failed")
                failed(error)
            finally:
                for socket in sockets:
                    socket.close()

        self._thread = threading.Thread(target=read, name="engine-input", daemon=True)
        self._thread.start()
        if not self._coordinated.wait(30.0):
            raise TimeoutError("the coordinator of the engines does not answer")

    def stop(self) -> None:
        os.eventfd_write(self._stop, 1)
        if self._thread is not None:
            self._thread.join(JOIN_S)

    def get(self, block: bool) -> tuple[RequestType, Any] | None:
        """`busy_loop.InputQueue`."""
        if not block and self.queue.empty():
            return None
        return self.queue.get()

    def wake(self) -> None:
        """Let a blocked `get` return. Any thread, or a signal handler, may call this."""
        self.queue.put((RequestType.WAKEUP, None))

    def _read(self, sockets: Sequence[multipart.FrameSocket]) -> None:
        poller = self._poller = multipart.Poller(self._stop, *sockets)
        stopped = multipart.Poller(self._stop)
        while poller.wait() and not stopped.wait(0):
            for socket in sockets:
                while (frames := socket.receive()) is not None:
                    self.take(frames)
            for client in list(self._attached):
                self._look_after(client)

    def take(self, frames: Sequence[memoryview]) -> None:
        """One message, whatever it holds."""
        try:
            self._take(bytes(frames[0]), frames[1:])
        except Exception as error:
            self.dropped += 1
            log.warning("dropped a message of %d frames: %s", len(frames), describe(error))

    def _take(self, kind: bytes, frames: Sequence[memoryview]) -> None:
        if kind == READY:
            if frames and bytes(frames[0]) == self._identity:
                self._coordinated.set()
            return
        try:
            known = EngineCoreRequestType(kind)
        except ValueError:
            raise ProtocolError(f"no type of request: {kind[:8]!r}") from None
        match known:
            case EngineCoreRequestType.ADD:
                self._take_add(self._headers.decode(frames[:1]), frames[1:])
            case EngineCoreRequestType.EXTEND:
                self._take_extension(self._headers.decode(frames[:1]), frames[1:])
            case EngineCoreRequestType.ABORT:
                self._take_abort(self._ids.decode(frames))
            case EngineCoreRequestType.UTILITY:
                self._take_call(self._calls.decode(frames[:1]), frames[1:])
            case EngineCoreRequestType.RELEASE:
                for name in self._ids.decode(frames):
                    self.queue.put((RequestType.RELEASE, name))
            case EngineCoreRequestType.KV:
                self._on_kv(self._kv.decode(frames))
            case EngineCoreRequestType.ATTACH:
                self._take_attach(self._attaches.decode(frames))
            case EngineCoreRequestType.START_DP_WAVE:
                wave = self._waves.decode(frames)
                self.queue.put((RequestType.UTILITY, lambda core: self.on_start_wave(wave)))
            case EngineCoreRequestType.WAKEUP:
                self.wake()

    def _take_add(self, header: AddHeader, body: Sequence[memoryview]) -> None:
        name, client = header.request_id, header.client_index
        if client >= self._clients:
            raise ProtocolError(f"a request of client {client}, and there are {self._clients}")
        if name in self.owners:
            self._refuse(client, Refused(name, "duplicate_request", "a request with this id is being computed"))
            return
        if self.draining:
            self._refuse(client, Refused(name, "unavailable", "the engine is shutting down"))
            return
        try:
            request = self._requests.decode(body)
            if request.request_id != name:
                raise ProtocolError(f"the request calls itself {request.request_id[:80]!r}")
            prepared = self._core.preprocess_add_request(request)
        except Exception as error:
            self._refuse(client, refused(name, error))
            return
        self.owners[name] = client
        self.queue.put((RequestType.ADD, (request, prepared)))

    def _take_extension(self, header: AddHeader, body: Sequence[memoryview]) -> None:
        name, client = header.request_id, header.client_index
        if self.owners.get(name) != client:
            return  # it has ended meanwhile
        try:
            more = self._extensions.decode(body)
            placed = self._core.preprocess_extension(more)
        except Exception as error:
            self._end(client, refused(name, error))
        else:
            self.queue.put((RequestType.EXTEND, (name, placed, more.last)))

    def _end(self, client: int, refused: Refused) -> None:
        """A request that is being computed cannot go on."""
        self._take_abort([refused.request_id])
        self._refuse(client, refused)

    def _take_abort(self, names: list[str]) -> None:
        """Puts the ids into both queues: the step that is computed drops these requests at its end, and the queue of
        messages keeps the order.
        """
        for name in names:
            if self.owners.pop(name, None) is not None:
                self._core.aborts_queue.put(name)
        self.queue.put((RequestType.ABORT, names))

    def _take_attach(self, attach: Attach) -> None:
        client = attach.client_index
        if not 0 < client < self._clients or client in self._attached:
            raise ProtocolError(f"client {client} attaches, of {self._clients}: it is there, or is not expected")
        self._attached[client] = os.pidfd_open(attach.pid)
        self._poller.register(self._attached[client])
        self._on_client(client, True)

    def _look_after(self, client: int) -> None:
        """Abort the requests of a further client whose process has ended."""
        pidfd = self._attached[client]
        if not multipart.wait_for_exit([pidfd], 0):
            return
        self._poller.unregister(pidfd)
        os.close(pidfd)
        del self._attached[client]
        self._on_client(client, False)
        self._take_abort([name for name, owner in self.owners.copy().items() if owner == client])

    def _take_call(self, call: UtilityCall, body: Sequence[memoryview]) -> None:
        client = call.client_index
        if client >= self._clients:
            raise ProtocolError(f"a call of client {client}, and there are {self._clients}")
        try:
            function = self._utilities(call.method)
            if function is None:
                raise ProtocolError(f"no utility {call.method!r}")
            arguments = self._arguments.decode(body)
        except ProtocolError as error:
            self._answer(client, UtilityOutput(call.call_id, failure=describe(error)))
            return

        def run(core: EngineCore) -> None:
            try:
                result = function(core, *arguments)
            except Exception as error:
                self._answer(client, UtilityOutput(call.call_id, failure=describe(error)))
                return
            if isinstance(result, Future):  # it goes on beside the steps
                result.add_done_callback(lambda done: self._answer(client, _output_of(call.call_id, done)))
            else:
                self._answer(client, UtilityOutput(call.call_id, result))

        self.queue.put((RequestType.UTILITY, run))


def _output_of(call_id: int, done: Future[Any]) -> UtilityOutput:
    error = done.exception()
    return UtilityOutput(call_id, done.result() if error is None else None, None if error is None else describe(error))
