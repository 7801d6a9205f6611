"""Asking the author's `terminalStagesFn` on threads of its own: one that blocks holds up its own request alone.

Called by the request manager before a request is admitted. The meaning of the answer is `admission`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import msgspec

from omnipipeline_spec.types.pods import COORDINATOR
from stage_runtime.errors import RequestError, ValueRefused, describe
from stage_runtime.payloads import isolating
from stage_runtime.profiler.recording.recorder import set_active_stage
from stage_runtime.wire.values import OmniRequest

HOOK: Final = "terminalStagesFn"
#: Takes what to call when the client disconnects.
Watch: TypeAlias = Callable[[Callable[[], object]], None]
AT_ONCE: Final = 32  # threads; one that never returns keeps its place, and the rest wait until their deadlines


class TerminalStagesResult(msgspec.Struct, frozen=True):
    """The value or the error of the function for one request, and how long it took."""

    returned: Any
    error: BaseException | None
    took_s: float

    def value(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.returned


class TerminalStagesCaller:
    """Calls one function, for many requests at once. It is made inside the running loop."""

    def __init__(self, function: Callable[[OmniRequest], Any]) -> None:
        self._function = function
        self._places = asyncio.Semaphore(AT_ONCE)
        self._waits: set[_Wait] = set()

    async def call(self, request: OmniRequest, timeout_s: float, watch: Watch | None = None) -> TerminalStagesResult:
        """The function gets a request of its own: what it writes into it reaches no stage.

        watch: is given what to call when the client disconnects meanwhile.
        Raises: RequestError: deadline; cancelled: the client has disconnected; unavailable: no thread can start; what
            `give_up` was given.
        """
        try:
            own = isolating.isolate(request, where="submitted.request")
        except ValueRefused:
            return TerminalStagesResult(None, None, 0.0)  # `admission` refuses it, with its path
        loop, began = asyncio.get_running_loop(), time.monotonic()
        future: asyncio.Future[TerminalStagesResult] = loop.create_future()

        def settle(result: TerminalStagesResult) -> None:
            self._places.release()
            if not future.done():
                future.set_result(result)

        def run() -> None:
            set_active_stage(COORDINATOR)  # what it records
            returned, raised = None, None
            try:
                returned = self._function(own)
            except BaseException as error:  # SystemExit too: it is one request
                raised = error
            with contextlib.suppress(RuntimeError):  # the loop is closed, and with it the coordinator
                loop.call_soon_threadsafe(settle, TerminalStagesResult(returned, raised, time.monotonic() - began))

        wait = _Wait(asyncio.timeout(timeout_s))
        self._waits.add(wait)
        try:
            async with wait.limit:
                if watch is not None:
                    watch(lambda: wait.end(RequestError("cancelled", "the client disconnected")))
                await self._places.acquire()
                try:
                    threading.Thread(target=run, name="omni-terminal-stages", daemon=True).start()
                except RuntimeError as error:  # the machine has no thread or no memory left for one
                    self._places.release()
                    raise RequestError(
                        "unavailable", f"{HOOK}: {describe(error)}", hook=HOOK, request_id=request.id, retry_after_s=1.0
                    ) from error
                return await future
        except TimeoutError:
            if wait.error is not None:
                raise wait.error from None
            message = f"{HOOK} has not answered within {timeout_s:g} s"
            raise RequestError("deadline", message, hook=HOOK, request_id=request.id) from None
        finally:
            self._waits.discard(wait)
            wait.over = True

    def give_up(self, error: Callable[[], RequestError]) -> None:
        """Wait no longer for any call. Its thread goes on, and keeps its place until it returns."""
        for wait in list(self._waits):
            wait.end(error())


class _Wait:
    """The wait for the answer of one call, and how it is ended early."""

    def __init__(self, limit: asyncio.Timeout) -> None:
        self.limit = limit
        self.error: RequestError | None = None  #: Why it ended, if not by its deadline.
        self.over = False

    def end(self, error: RequestError) -> None:
        if not self.over and self.error is None and not self.limit.expired():
            self.error = error
            self.limit.reschedule(asyncio.get_running_loop().time())
