"""A client of one engine process for a program without an event loop. One thread, which waits where it asks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from stage_runtime.engines.autoregressive.clients.abstract import LOOK_EVERY_S, MPClient, result_of
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreRequest
from stage_runtime.engines.autoregressive.process.launching import EngineLaunch
from stage_runtime.engines.autoregressive.process.messages.engine_messages import EngineCoreOutputs, UtilityOutput
from stage_runtime.engines.autoregressive.text.prompts.prompt_rows import Extension
from stage_runtime.sockets import multipart


class SyncMPClient(MPClient):
    def __init__(self, launch: EngineLaunch) -> None:
        super().__init__(launch)
        self._pending: deque[EngineCoreOutputs] = deque()
        self._called: int | None = None  #: The call that is waited for; answers to others are dropped.
        self._result: UtilityOutput | None = None  #: Its answer.
        self._poller = multipart.Poller(self._output, *(one.pidfd for one in self._engines.values()))

    def add_request(self, request: EngineCoreRequest) -> None:
        """Raises: EngineDeadError; ValueRefused, RequestError: this request alone."""
        self._add(request, None, None)

    def extend_request(self, request_id: str, more: Extension) -> None:
        """More of an open request's prompt. Raises: as `add_request`."""
        self._extend(request_id, more)

    def release_requests(self, request_ids: Sequence[str]) -> None:
        """These held requests have what they wait for. Raises: EngineDeadError."""
        self._release(request_ids)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Idempotent."""
        self._abort(request_ids)

    def get_output(self, timeout_s: float | None = None) -> EngineCoreOutputs:
        """Wait for outputs. Raises: EngineDeadError; TimeoutError."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._pending:
            self._poll(deadline)
        return self._note(self._pending.popleft())

    def call_utility(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """The result of the engine's utility of this name. Raises: UtilityFailed, EngineDeadError, TimeoutError."""
        (rank,) = self._ranks() or (0,)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._called = self._call(rank, method, arguments)
        try:
            while self._result is None:
                if deadline is not None and time.monotonic() > deadline:
                    raise TimeoutError("the engine has not answered")
                self._poll(deadline)
            return result_of(self._result)
        finally:
            self._called = self._result = None

    def _on_utility(self, output: UtilityOutput) -> None:
        if output.call_id == self._called:
            self._result = output

    def _poll(self, deadline: float | None) -> None:
        """Take what has come, or wait for something. The outputs of a dead engine come before its end."""
        ended = self._ended()
        taken = self._take(self._on_utility)
        self._pending.extend(taken)
        if taken or self._result is not None:
            return
        for rank in ended:
            self._poller.unregister(self._engines[rank].pidfd)
            self._on_exit(rank)
        self.ensure_alive()
        left = float("inf") if deadline is None else deadline - time.monotonic()
        if self._poller.wait(max(min(left, LOOK_EVERY_S), 0.0)):
            return
        if left <= LOOK_EVERY_S:
            raise TimeoutError("the engine has given nothing")
        self._look()

    def close(self, *, drain_s: float = 0.0) -> None:
        """End the engine; ``drain_s``: how long it may finish what is under way."""
        self._close(drain_s=drain_s)

    def __enter__(self) -> SyncMPClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
