"""Asking the author's `terminalStagesFn` on threads of its own: one that blocks holds up its own request alone.

Called by the request manager before a request is admitted. What the answer means is `admission`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from omnipipeline_spec.types.pods import COORDINATOR
from stage_runtime.errors import RequestError, ValueRefused
from stage_runtime.payloads import isolating
from stage_runtime.profiler.recorder import set_active_stage
from stage_runtime.wire.values import OmniRequest

HOOK: Final = "terminal_stages_fn"
AT_ONCE: Final = 32  # threads; one that never returns keeps its place, and the rest wait until their deadlines


class TerminalStagesResult(msgspec.Struct, frozen=True):
    """What the function gave or raised for one request, and how long that took."""

    returned: Any
    error: BaseException | None
    took_s: float

    def value(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.returned


class TerminalStagesCaller:
    """Calls one function, for many requests at once. To be made inside the running loop."""

    def __init__(self, function: Callable[[OmniRequest], Any]) -> None:
        self._function = function
        self._places = asyncio.Semaphore(AT_ONCE)

    async def call(self, request: OmniRequest, timeout_s: float) -> TerminalStagesResult:
        """The function gets a request of its own: what it writes into it reaches no stage.

        Raises: RequestError: deadline.
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

        try:
            async with asyncio.timeout(timeout_s):
                await self._places.acquire()
                threading.Thread(target=run, name="omni-terminal-stages", daemon=True).start()
                return await future
        except TimeoutError:
            message = f"{HOOK} has not answered within {timeout_s:g} s"
            raise RequestError("deadline", message, hook=HOOK, request_id=request.id) from None
