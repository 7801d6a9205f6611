"""An engine core with its loop, between an input and an output thread. Names follow vLLM's `EngineCoreProc`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from stage_runtime.engines.autoregressive.connectors.crossing import CrossingRooms
from stage_runtime.engines.autoregressive.core.busy_loop import BusyLoop, RequestType
from stage_runtime.engines.autoregressive.core.engine_core import EngineCore
from stage_runtime.engines.autoregressive.core.engine_operations import OPERATIONS
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreOutput
from stage_runtime.engines.autoregressive.core.serving import Served
from stage_runtime.engines.autoregressive.process.messages.engine_messages import (
    EngineCoreOutputs,
    Init,
    Refused,
    SchedulerStats,
    UtilityOutput,
    identity,
    refused,
)
from stage_runtime.engines.autoregressive.process.messages.inputs import Inputs
from stage_runtime.engines.autoregressive.process.messages.output_thread import OutputThread
from stage_runtime.engines.autoregressive.process.reporting import stats_of
from stage_runtime.engines.autoregressive.process.tracing import EngineTrace
from stage_runtime.rules.autoregressive.requests import Request
from stage_runtime.rules.autoregressive.steps import SchedulerOutput
from stage_runtime.sockets import multipart

log = logging.getLogger(__name__)


class EngineCoreProc:
    """Made and run on the process's main thread; `request_shutdown` also in a signal handler."""

    def __init__(self, served: Served, init: Init, *, engine_index: int = 0) -> None:
        self.engine_index = engine_index
        self.step_counter = 0
        self._core = served.core
        self._trace = EngineTrace()
        self._utilities: dict[str, Callable[..., Any]] = {
            "stats": lambda core: self.stats(),
            **OPERATIONS,
            **served.utilities,
            **self._trace.utilities,
        }
        self._init = init
        self._context = multipart.SocketContext()
        self.outputs = OutputThread(engine_index, alive=lambda: EngineCoreOutputs(scheduler_stats=self.stats()))
        self.rooms = CrossingRooms(lambda message: self.outputs.put(0, message))
        self._announced: dict[str, Request] = {}  #: Requests of which clients know that they are computed.
        self.inputs = Inputs(
            served.core,
            refuse=lambda client, refused: self.outputs.put(client, EngineCoreOutputs(refused=(refused,))),
            answer=self._answer,
            utilities=self._utilities.get,
            clients=len(init.inputs),
            on_client=lambda client, there: (self.outputs.attach if there else self.outputs.detach)(client),
            on_kv=lambda message: self.rooms.take(message, draining=self.inputs.draining),
        )
        served.core.on_scheduled = self._on_scheduled
        served.core.post = self._post
        if served.connect is not None:
            served.connect(post=self._post, rooms=self.rooms)
        self.loop = self._make_loop()

    def _post(self, function: Callable[[], None]) -> None:
        """Have it called between two steps. Any thread may call this."""
        self.inputs.queue.put((RequestType.UTILITY, lambda _core: function()))

    def _make_loop(self) -> BusyLoop:
        return BusyLoop(self._core, self.inputs, self.deliver, self._refuse, wake=self.inputs.wake)

    def start(self) -> None:
        """Connect. Raises: TimeoutError: the coordinator is silent."""
        init = self._init
        coordination = init.coordination
        self.outputs.start(self._context, init.outputs, coordination.output if coordination else None)
        self.inputs.start(
            self._context,
            init.inputs,
            identity(self.engine_index),
            coordinator=coordination.input if coordination else None,
            failed=self._fail,
        )

    def run_busy_loop(self) -> None:
        """Runs the loop until the shutdown is completed. An error that ends it is sent to every client and raised."""
        dead = True
        try:
            self.loop.run_busy_loop()
            dead = False
        finally:
            self.inputs.draining = True
            self.inputs.stop()
            for name, client in list(self.inputs.owners.items()):
                if not dead:  # it came after the loop had ended
                    refused = Refused(name, "unavailable", "the engine is shutting down")
                    self.outputs.put(client, EngineCoreOutputs(refused=(refused,)))
            self.outputs.stop(dead=dead)
            self._context.close()
            self._trace.close()  # last: clients learn at once that it ends

    def request_shutdown(self, *, drain: bool = True) -> None:
        """drain: finish what is under way; what comes now is refused."""
        self.inputs.draining = True
        self.loop.request_shutdown(drain=drain)

    def _on_scheduled(self, step: SchedulerOutput) -> None:
        """Tell clients which requests are computed for the first time."""
        for name in step.finished:
            self._announced.pop(name, None)
        by_client: dict[int, list[tuple[str, int]]] = {}
        for row in step.rows:
            request = row.request
            if row.place == 0 and self._announced.get(request.id) is not request:
                self._announced[request.id] = request
                client = self.inputs.owners.get(request.id)
                if client is not None:
                    by_client.setdefault(client, []).append((request.id, request.hit_tokens))
        for client, scheduled in by_client.items():
            self.outputs.put(client, EngineCoreOutputs(scheduled=tuple(scheduled)))

    def deliver(self, outputs: Sequence[EngineCoreOutput]) -> list[str]:
        """A step's outputs, to the clients that asked; those of aborted requests are dropped."""
        owners = self.inputs.owners
        by_client: dict[int, list[EngineCoreOutput]] = {}
        for output in outputs:
            client = owners.get(output.request_id)
            if client is None:
                continue
            by_client.setdefault(client, []).append(output)
            if output.finish is not None:
                owners.pop(output.request_id, None)
        if by_client:
            stats, now = self.stats(), time.monotonic()
            for client, given in by_client.items():
                made = EngineCoreOutputs(outputs=tuple(given), scheduler_stats=stats, timestamp=now)
                self.outputs.put(client, made)
        return []

    def stats(self) -> SchedulerStats:
        """The engine's counts now. Any thread may call it: it reads single numbers."""
        return stats_of(self._core, step_counter=self.step_counter)

    def _answer(self, client: int, output: UtilityOutput) -> None:
        self.outputs.put(client, EngineCoreOutputs(utility_output=output))

    def _refuse(self, request_id: str, error: Exception) -> None:
        client = self.inputs.owners.pop(request_id, None)
        if client is not None:
            self.outputs.put(client, EngineCoreOutputs(refused=(refused(request_id, error),)))

    def _fail(self, error: Exception) -> None:
        """A thread of this process has ended: so does the loop."""

        def end(core: EngineCore) -> None:
            raise error

        self.inputs.queue.put((RequestType.UTILITY, end))
