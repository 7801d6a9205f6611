"""The stages of the backpressure pipeline: a producer far faster than who listens, and a branch beside it that is
healthy.

A request's inputs: ``to`` (``slow`` or ``fine``), ``chunks`` and ``size`` (bytes of each, and of the payload's
tensor), ``pace`` (seconds that the slow one takes for each).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np

import stage_runtime as omni


def tap() -> Any:
    """The producer: streams as fast as it is let, then gives its result."""

    def run(payload: omni.StagePayload) -> Iterator[Any]:
        data = payload.data
        for number in range(data.get("chunks", 0)):
            yield omni.Chunk({"number": number, "pad": np.full(data["size"], number % 251, np.uint8)})
        yield omni.Result({**data, "pad": np.full(data["size"], 7, np.uint8)})

    return omni.Simple(run, concurrency=64)


def slow() -> Any:
    """The consumer of the stream, in its own time."""

    async def run(session: omni.Session) -> AsyncIterator[Any]:
        pace = session.request.inputs["pace"]
        async for _ in session.chunks():
            await asyncio.sleep(pace)
        await session.payload()
        await asyncio.sleep(pace)
        yield omni.Result({"to": "slow"})

    return omni.Streaming(run, concurrency=2)


def fine() -> Any:
    """The healthy branch: streams as many chunks as asked, straight to the client."""

    def run(payload: omni.StagePayload) -> Iterator[Any]:
        data = payload.data
        for number in range(data.get("gush", 0)):
            yield omni.Chunk({"number": number, "pad": b"x" * data["piece"]})
        yield omni.Result({"to": "fine", "sum": int(data["pad"].sum()), "at": time.monotonic()})

    return omni.Simple(run, concurrency=64)


def route_fn(request_id: str, output: Any) -> str:
    return str(output["to"])


def done_fn(request_id: str, output: Any) -> list[str]:
    return ["slow"] if output["to"] == "slow" else []


def terminal_stages_fn(request: omni.OmniRequest) -> list[str]:
    return [request.inputs["to"]]
