"""The stages of `test_busy`: of every kind, each busy with one request until nobody waits for that one.

A request's inputs: ``kind`` (the stage that it goes to), ``hold`` (whether it keeps that stage busy) and ``pad``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from threading import Event
from typing import Any

import stage_runtime as omni
from stage_runtime.engines import events

KINDS = ("sync", "batch", "coroutine", "early", "engine", "join")


def hold(payload: omni.StagePayload) -> None:
    while payload.data["hold"] and not payload.request.cancelled():
        time.sleep(0.01)


def take() -> Any:
    """The entry: streams a part of the pad ahead where that is wanted, and passes all of it on."""

    def run(payload: omni.StagePayload) -> Iterator[Any]:
        data = payload.data
        if data["kind"] == "early":
            for _ in range(4):
                yield omni.Chunk(data["pad"][: len(data["pad"]) // 4], to="early")
        yield omni.Result(data)

    return omni.Simple(run, concurrency=64)


def side() -> Any:
    return omni.Simple(lambda payload: payload.data, concurrency=64)


def sync() -> Any:
    def run(payload: omni.StagePayload) -> str:
        hold(payload)
        return "held"

    return run


def batch() -> Any:
    def run(payloads: list[omni.StagePayload]) -> list[str]:
        for payload in payloads:
            hold(payload)
        return ["held"] * len(payloads)

    return omni.Batched(run, max_batch=2, max_wait_s=0)


def coroutine() -> Any:
    async def run(payload: omni.StagePayload) -> str:
        while payload.data["hold"]:
            await asyncio.sleep(0.01)
        return "held"

    return omni.Simple(run, concurrency=1)


def early() -> Any:
    """Large values come in chunks, which nobody takes before it is the request's turn."""

    async def run(session: omni.Session) -> AsyncIterator[Any]:
        async for _ in session.chunks():
            while session.request.inputs["hold"]:
                await asyncio.sleep(0.01)
        yield omni.Result("held")

    return omni.Streaming(run, concurrency=1)


def engine() -> Any:
    class Engine:
        def run(self, inbox: Any, outbox: Any, stop: Event) -> None:
            for event in inbox:
                if isinstance(event, events.Start):
                    hold(event.payload)
                    outbox.put(events.Done(event.request_id, "held"))

    return Engine()


def join() -> Any:
    return lambda payload: "held"


def merge_fn(inputs: dict[str, omni.StagePayload]) -> Any:
    hold(inputs["take"])
    return {}


def route_fn(request_id: str, output: Any) -> Any:
    return ["join", "side"] if output["kind"] == "join" else output["kind"]


def done_fn(request_id: str, output: Any) -> list[str]:
    return ["early"] if output["kind"] == "early" else []


def terminal_stages_fn(request: omni.OmniRequest) -> list[str]:
    return [request.inputs["kind"]]
