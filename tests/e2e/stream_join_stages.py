"""The stages of the stream-join pipeline: two producers whose streams meet at a reader, each in a process of its own.

A request's inputs: ``to`` (whom the router sends it to), ``wait`` (the terminals that it waits for), ``chunks`` and
``size`` of each producer's stream, ``first`` (the producer that gets it at once; the other one later), ``until`` (a
file that must be there before `a` and `b` get it), ``read`` (how many chunks the reader takes; None: all).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import stage_runtime as omni


def route() -> Any:
    return lambda payload: payload.data


def producer(name: str) -> Any:
    """One request at a time."""

    def run(payload: omni.StagePayload) -> Iterator[Any]:
        data = payload.data
        for number in range(data["chunks"]):
            yield omni.Chunk({"from": name, "number": number, "pad": b"x" * data.get("size", 0)})
        yield omni.Result(data)

    return run


def later(name: str) -> Any:
    """A stage before a producer: it lets one request pass at once, and the other a little later."""

    async def run(payload: omni.StagePayload) -> Any:
        import asyncio

        if payload.data.get("first", name) != name:
            await asyncio.sleep(0.5)
        while "until" in payload.data and not Path(payload.data["until"]).exists():
            await asyncio.sleep(0.01)
        return payload.data

    return omni.Simple(run, concurrency=16)


def reader() -> Any:
    """One request at a time; to the end of all its streams, unless the request makes it leave early."""

    async def run(session: omni.Session) -> AsyncIterator[Any]:
        wanted = session.request.inputs.get("read")
        counts = {"a": 0, "b": 0}
        if wanted != 0:
            async for chunk in session.chunks():
                counts[chunk.data["from"]] += 1
                if wanted is not None and sum(counts.values()) >= wanted:
                    break
        yield omni.Result(counts)

    return omni.Streaming(run, concurrency=1)


def end() -> Any:
    return lambda payload: "through"


def speaker() -> Any:
    """A terminal that streams to the client; one request at a time."""

    def run(payload: omni.StagePayload) -> Iterator[Any]:
        for number in range(payload.data["chunks"]):
            yield omni.Chunk({"number": number, "pad": b"x" * payload.data.get("size", 0)})
        yield omni.Result("said")

    return run


def route_fn(request_id: str, output: Any) -> list[str]:
    return list(output["to"])


def terminal_stages_fn(request: omni.OmniRequest) -> list[str]:
    return list(request.inputs["wait"])
