"""Parts that the tests of `engine="openvino"` and `engine="vllm"` share: functions of a stage, and ends of requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import stage_runtime as omni
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreRequest
from stage_runtime.engines.autoregressive.external import client
from stage_runtime.engines.autoregressive.external.client import ExternalClient
from stage_runtime.engines.autoregressive.stage.process_engine import EngineClient, ProcessEngine
from stage_runtime.rules.autoregressive.requests import FinishReason
from tests.engines.engine_kit import Rig
from tests.engines.generation_kit import tiny_tokenizer

#: Parameters of real runs, unless a request says otherwise.
GREEDY_12: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


def prompt(defaults: dict[str, Any]) -> Callable[[omni.StagePayload], omni.Prompt]:
    """A prompt function for requests with token ids and, if they want, parameters."""
    return lambda payload: omni.Prompt(
        tokens=payload.data["tokens"], params={**defaults, **payload.data.get("params", {})}
    )


def deliver(payload: omni.StagePayload, generation: omni.Generation) -> Iterator[omni.Chunk | omni.Result]:
    """A chunk when the answer begins, and how it ends. Raises: ValueError: the request says so."""
    if generation.tokens and payload.data.get("raises"):
        raise ValueError("cannot say that")
    if generation.begins:
        yield omni.Chunk("begins")
    if generation.finish is not None:
        yield omni.Result([generation.finish, generation.completion_tokens])


def engine(made: EngineClient) -> ProcessEngine:
    """A stage over ``made``: greedy answers of 5 tokens."""
    asked = prompt({"temperature": 0, "max_tokens": 5})
    spec = omni.Autoregressive(model="", prompt=asked, deliver=deliver, params={"max_tokens": 100_000})
    return ProcessEngine(spec, made, tiny_tokenizer(), None)


class Dictated(ExternalClient):
    """A client whose engine gives what the test says, also of a request that was aborted: it had left by then."""

    def __init__(self) -> None:
        super().__init__()
        self.added: SimpleQueue[str] = SimpleQueue()  #: Names of requests.

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self._began(request)
        self.added.put(request.request_id)

    async def abort_requests_async(self, request_ids: Iterable[str]) -> None:
        for name in request_ids:
            self.reqs_in_flight.pop(name, None)

    async def close(self, *, drain_s: float = 0.0) -> None:
        self._end("the test is over")

    def says(self, name: str, tokens: Sequence[int], finish: FinishReason | None = None, **others: Any) -> None:
        self._loop.call_soon_threadsafe(self._give, [client.output(name, tokens, finish, **others)])


def ends(rig: Rig, count: int) -> dict[str, tuple[Any, ...]]:
    """How ``count`` requests end."""
    found: dict[str, tuple[Any, ...]] = {}
    while len(found) < count:
        name, kind, *rest = rig.outbox.next()
        if kind != "chunk":
            assert name not in found
            found[name] = (kind, *rest)
    return found


def save(model: Any, folder: Path) -> Path:
    """A checkpoint of ``model``, with the tiny tokenizer."""
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
