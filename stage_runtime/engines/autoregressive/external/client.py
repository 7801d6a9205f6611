"""The common part of the clients of other engines: requests under way, and outputs for the event loop of the stage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreOutput, EngineCoreRequest
from stage_runtime.engines.autoregressive.process.messages.engine_messages import (
    EngineCoreOutputs,
    Refused,
    SchedulerStats,
)
from stage_runtime.engines.autoregressive.sampling.model_output import TokenLogprobs
from stage_runtime.engines.autoregressive.text.prompts.prompt_rows import Extension
from stage_runtime.errors import EngineDeadError, InvalidRequest
from stage_runtime.rules.autoregressive.requests import FinishReason, Reason


class ExternalClient:
    """`process_engine.EngineClient`. Every call on the event loop, after `attach`, but for `_post` and `_post_dead`."""

    def __init__(self) -> None:
        self.reqs_in_flight: dict[str, int] = {}  #: Each with its number of tokens so far.
        self.stats: dict[int, SchedulerStats] = {}
        self.on_scheduled: Callable[[Sequence[tuple[str, int]]], None] = lambda scheduled: None
        self.on_stats: Callable[[], None] = lambda: None  #: Called when ``stats`` has changed.
        self._prompt_tokens = 0
        self._hit_tokens = 0
        self._generated_tokens = 0
        self._steps = 0
        self._dead: EngineDeadError | None = None
        self._outputs: asyncio.Queue[EngineCoreOutputs | EngineDeadError] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop

    @property
    def dead(self) -> bool:
        """Nothing more is computed."""
        return self._dead is not None

    def attach(self) -> None:
        """Serve the running loop from now on."""
        self._loop = asyncio.get_running_loop()

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Raises: EngineDeadError; RequestError: this request alone."""
        raise NotImplementedError

    async def extend_request_async(self, request_id: str, more: Extension) -> None:
        raise AssertionError("the setting stream is refused when the stage is loaded")

    async def abort_requests_async(self, request_ids: Iterable[str]) -> None:
        """Idempotent."""
        raise NotImplementedError

    async def close(self, *, drain_s: float = 0.0) -> None:
        """End the engine; ``drain_s``: how long it may finish what is under way."""
        raise NotImplementedError

    async def get_output_async(self) -> EngineCoreOutputs:
        """Wait for outputs. Raises: EngineDeadError, for every waiter."""
        given = await self._outputs.get()
        if isinstance(given, EngineDeadError):
            self._outputs.put_nowait(given)  # for the next waiter
            raise given
        return given

    async def call_each_async(self, method: str, *arguments: Any) -> list[Any]:
        """Raises: InvalidRequest."""
        raise InvalidRequest(f"{method}: only engine='own' offers it")

    def ensure_alive(self) -> None:
        """Raises: EngineDeadError."""
        if self._dead is not None:
            raise self._dead

    def _began(self, request: EngineCoreRequest) -> None:
        self.reqs_in_flight[request.request_id] = 0
        self._prompt_tokens += len(request.prompt_token_ids)

    def _give(self, outputs: Sequence[EngineCoreOutput], refused: Sequence[Refused] = ()) -> None:
        """Hand on what came of one step. Output of a request that was aborted meanwhile is dropped."""
        given = [one for one in outputs if one.request_id in self.reqs_in_flight]
        fresh = [(one.request_id, one.cached_tokens) for one in given if self.reqs_in_flight[one.request_id] == 0]
        if fresh:
            self._hit_tokens += sum(count for _name, count in fresh)
            self.on_scheduled(fresh)
        for one in given:
            self.reqs_in_flight[one.request_id] += len(one.new_token_ids)
            self._generated_tokens += len(one.new_token_ids)
            if one.finish is not None:
                del self.reqs_in_flight[one.request_id]
        for other in refused:
            self.reqs_in_flight.pop(other.request_id, None)
        self._report()
        self._outputs.put_nowait(EngineCoreOutputs(outputs=tuple(given), refused=tuple(refused)))

    def _report(self) -> None:
        """The known facts of the engine, for `/metrics`."""
        begun = sum(count > 0 for count in self.reqs_in_flight.values())
        self.stats[0] = SchedulerStats(
            waiting=len(self.reqs_in_flight) - begun,
            running=begun,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            prefix_hit_tokens=self._hit_tokens,
            generated_tokens=self._generated_tokens,
        )
        self.on_stats()

    def _end(self, reason: str) -> None:
        """Nothing more is computed: all callers that wait are notified."""
        if self._dead is None:
            self._dead = EngineDeadError(reason)
            self._outputs.put_nowait(self._dead)


def output(
    request_id: str,
    tokens: Sequence[int],
    finish: FinishReason | None = None,
    *,
    reason: Reason = None,
    logprobs: Sequence[TokenLogprobs] = (),
    prompt_logprobs: Sequence[TokenLogprobs] = (),
    cached_tokens: int = 0,
) -> EngineCoreOutput:
    """reason: None takes the last token of an answer that a token has stopped, as the own engine does."""
    if finish is FinishReason.STOP and reason is None and tokens:
        reason = tokens[-1]
    return EngineCoreOutput(
        request_id=request_id,
        new_token_ids=tuple(tokens),
        finish=finish,
        reason=reason,
        logprobs=tuple(logprobs),
        prompt_logprobs=tuple(prompt_logprobs),
        cached_tokens=cached_tokens,
    )
