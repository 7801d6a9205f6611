"""A client of an engine core in its own process and thread: no messages, no threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stage_runtime.engines.autoregressive.clients.abstract import UtilityFailed
from stage_runtime.engines.autoregressive.core.engine_operations import OPERATIONS
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreRequest
from stage_runtime.engines.autoregressive.core.serving import Served
from stage_runtime.engines.autoregressive.process.launching import EngineLaunch
from stage_runtime.engines.autoregressive.process.messages.engine_messages import EngineCoreOutputs, Refused, refused
from stage_runtime.engines.autoregressive.process.reporting import stats_of
from stage_runtime.engines.autoregressive.text.prompts.prompt_rows import Extension
from stage_runtime.engines.making.resolving import resolve
from stage_runtime.errors import ConfigurationError, RequestError, describe


class InprocClient:
    """`get_output` computes one step."""

    def __init__(self, launch: EngineLaunch) -> None:
        served: Any = resolve(launch.factory, field="factory")(**launch.kwargs)
        if not isinstance(served, Served):
            raise ConfigurationError(f"{launch.factory}: expected a Served, got a {type(served).__name__}")
        self.reqs_in_flight: dict[str, int] = {}
        self._utilities: dict[str, Callable[..., Any]] = {"stats": stats_of, **OPERATIONS, **served.utilities}
        self._refused: list[Refused] = []
        self.engine_core = served.core
        self.num_gpu_blocks = {0: served.num_gpu_blocks}

    def add_request(self, request: EngineCoreRequest) -> None:
        """`get_output` returns what the engine refuses, as from another process.

        Raises: RequestError: its id is in use; the request that is being computed goes on.
        """
        name = request.request_id
        if name in self.reqs_in_flight:
            raise RequestError("duplicate_request", "a request with this id is being computed", request_id=name)
        self.reqs_in_flight[name] = 0
        try:
            self.engine_core.add_request(request, self.engine_core.preprocess_add_request(request))
        except Exception as error:
            self._refused.append(refused(name, error))

    def extend_request(self, request_id: str, more: Extension) -> None:
        """More of an open request's prompt; nothing, if it has ended."""
        if request_id not in self.reqs_in_flight:
            return
        try:
            placed = self.engine_core.preprocess_extension(more)
            self.engine_core.extend_request(request_id, placed, last=more.last)
        except Exception as error:
            self.engine_core.abort_requests([request_id])
            self._refused.append(refused(request_id, error))

    def release_requests(self, request_ids: Sequence[str]) -> None:
        """These held requests have what they wait for."""
        for name in self.reqs_in_flight.keys() & set(request_ids):
            self.engine_core.release(name)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Idempotent."""
        for name in request_ids:
            self.reqs_in_flight.pop(name, None)
        self.engine_core.abort_requests(request_ids)

    def get_output(self, timeout_s: float | None = None) -> EngineCoreOutputs:
        """The outputs of one step; empty, if no request needs one."""
        if self._refused:
            given, self._refused = tuple(self._refused), []
            for one in given:
                self.reqs_in_flight.pop(one.request_id, None)
            return EngineCoreOutputs(refused=given)
        outputs, _executed = self.engine_core.step_fn()
        for output in outputs:
            if output.finish is not None:
                self.reqs_in_flight.pop(output.request_id, None)
        return EngineCoreOutputs(outputs=tuple(outputs), scheduler_stats=stats_of(self.engine_core))

    def call_utility(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Raises: UtilityFailed."""
        function = self._utilities.get(method)
        if function is None:
            raise UtilityFailed(f"no utility {method!r}")
        try:
            return function(self.engine_core, *arguments)
        except Exception as error:
            raise UtilityFailed(describe(error)) from error

    def close(self, *, drain_s: float = 0.0) -> None:
        self.engine_core.shutdown()
