"""The loop around an engine core: take what has come, step, hand on. It blocks while no request needs a step.

Shutdown goes RUNNING → REQUESTED → COMPLETED: after a request for it, what is under way is finished (drained), or
aborted; a WAKEUP lets a loop that is waiting notice.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Protocol

from stage_runtime.engines.autoregressive.core.engine_core import EngineCore
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreOutput, EngineCoreRequest
from stage_runtime.engines.autoregressive.text.prompts.prompt_rows import PlacedRows
from stage_runtime.errors import IllegalEvent
from stage_runtime.rules.autoregressive.requests import Request

log = logging.getLogger(__name__)


class RequestType(Enum):
    ADD = "add"  #: (EngineCoreRequest, Request): checked already.
    EXTEND = "extend"  #: (id, PlacedRows, whether it is the last): more of an open request's prompt.
    ABORT = "abort"  #: Ids.
    RELEASE = "release"  #: An id that was held.
    UTILITY = "utility"  #: A function, called with the core between two steps.
    WAKEUP = "wakeup"


class ShutdownState(Enum):
    RUNNING = 0
    REQUESTED = 1
    COMPLETED = 2


class InputQueue(Protocol):
    """The inputs of the loop, from any thread."""

    def get(self, block: bool) -> tuple[RequestType, Any] | None:
        """The next one; None: none now, or, of one that may block, to look again."""


class BusyLoop:
    """Runs one engine core. Everything here on the loop's thread, but for `request_shutdown`."""

    def __init__(
        self,
        core: EngineCore,
        inputs: InputQueue,
        deliver: Callable[[Sequence[EngineCoreOutput]], Sequence[str]],
        refuse: Callable[[str, Exception], None],
        *,
        wake: Callable[[], None] = lambda: None,
        on_idle: Sequence[Callable[[], None]] = (),
        undelivered: Callable[[], bool] = lambda: False,
    ) -> None:
        """deliver: hands on a step's outputs; returns the ids that are to be aborted. Must not raise.
        undelivered: whether outputs still wait for a reader: a drain waits for them.
        refuse: a request could not be added or extended.
        wake: lets a blocked ``inputs.get`` return; safe in a signal handler.
        """
        self._core = core
        self._inputs = inputs
        self._deliver = deliver
        self._refuse = refuse
        self._wake = wake
        self._on_idle = tuple(on_idle)
        self._undelivered = undelivered
        self._drain = True
        self.shutdown_state = ShutdownState.RUNNING

    def run_busy_loop(self) -> None:
        """Takes input and runs steps until the shutdown is completed.

        Raises: an error that no single request has caused.
        """
        try:
            while self._handle_shutdown():
                self._process_input_queue()
                self._process_engine_step()
        finally:
            self._core.shutdown()

    def request_shutdown(self, *, drain: bool = True) -> None:
        """Any thread or signal handler may call it. drain: requests under way are finished, not aborted."""
        if self.shutdown_state is ShutdownState.RUNNING:
            self._drain = drain
            self.shutdown_state = ShutdownState.REQUESTED
        elif not drain:
            self._drain = False
        self._wake()

    def _handle_shutdown(self) -> bool:
        """Whether the loop goes on."""
        if self.shutdown_state is ShutdownState.RUNNING:
            return True
        if not self._drain:
            self._core.abort_requests([request.id for request in self._core.scheduler])
        if self._core.has_work() or self._unfinished():
            return True
        self.shutdown_state = ShutdownState.COMPLETED
        return False

    def _process_input_queue(self) -> None:
        """Take all that has come; wait for something while no request needs a step."""
        while not self._core.has_work() and self._waits():
            for callback in self._on_idle:
                callback()
            if self._core.aborts_queue.qsize():
                self._core.drain_aborts()  # each came by the input queue, too
            self._handle(self._inputs.get(block=True))
        while (item := self._inputs.get(block=False)) is not None:
            self._handle(item)

    def _waits(self) -> bool:
        """Whether something may still come: after a request for shutdown, only what held requests wait for."""
        if self.shutdown_state is ShutdownState.RUNNING:
            return True
        return self._unfinished()

    def _unfinished(self) -> bool:
        return self._core.scheduler.has_unfinished_requests() or (self._drain and self._undelivered())

    def _handle(self, item: tuple[RequestType, Any] | None) -> None:
        match item:
            case (RequestType.ADD, (EngineCoreRequest() as request, prepared)):
                self._add(request, prepared)
            case (RequestType.EXTEND, (str() as name, more, last)):
                self._extend(name, more, last)
            case (RequestType.ABORT, request_ids):
                self._core.drain_aborts()  # of these ids, too: a later request may have one of them again
                self._core.abort_requests(request_ids)
            case (RequestType.RELEASE, str() as name):
                self._release(name)
            case (RequestType.UTILITY, function):
                function(self._core)

    def _add(self, request: EngineCoreRequest, prepared: Request | None) -> None:
        try:
            self._core.add_request(request, prepared)
        except Exception as error:  # it fails alone, whatever is wrong with it
            self._refuse(request.request_id, error)

    def _extend(self, request_id: str, more: PlacedRows, last: bool) -> None:
        try:
            self._core.extend_request(request_id, more, last=last)
        except Exception as error:  # as of `_add`
            self._core.abort_requests([request_id])
            self._refuse(request_id, error)

    def _release(self, request_id: str) -> None:
        try:
            self._core.release(request_id)
        except IllegalEvent as error:  # its client's error; nothing is changed
            log.warning("dropped a release: %s", error)

    def _process_engine_step(self) -> None:
        outputs, executed = self._core.step_fn()
        if outputs:
            self._core.abort_requests(self._deliver(outputs))
        self.post_step(executed)
        if not executed and self._core.has_work():
            # Others hold what this step waits for: let them run. Held requests are not work, so this is rare.
            threading.Event().wait(0.001)

    def post_step(self, executed: bool) -> None:
        """Called after each step, for subclasses. executed: the step has run the model."""
