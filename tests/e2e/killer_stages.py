"""A chat stage that a request's text ends: ``die`` kills its process, ``wait FILE`` waits for a file, others answer."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import stage_runtime as omni


def front() -> Any:
    def run(payload: omni.StagePayload) -> Any:
        return payload.data

    return run


def chat(broken: str = "") -> Any:
    """broken: a file that lets it not load while it is there."""
    if broken and Path(broken).exists():
        raise RuntimeError("it cannot load")

    async def run(session: Any) -> AsyncIterator[omni.Chunk]:
        payload = await session.payload()
        word, _, rest = payload.request.last_text().partition(" ")
        if word == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "begin":
            yield omni.Chunk(omni.Text("first "))
        while word in ("wait", "begin") and not Path(rest).exists():
            await asyncio.sleep(0.01)
        yield omni.Chunk(omni.Text(f"heard {word}"))

    return omni.Streaming(run)


def look() -> Any:
    return lambda payload: payload.data


def think() -> Any:
    """Streams a word, and the rest when the file that the request names is there."""

    async def run(session: Any) -> AsyncIterator[omni.Chunk]:
        payload = await session.payload()
        yield omni.Chunk("first")
        while not Path(payload.request.inputs["thought"]).exists():
            await asyncio.sleep(0.01)
        yield omni.Chunk("last")

    return omni.Streaming(run)


def speak() -> Any:
    """Streams what it hears, then ``heard all`` once it has the payload, too. It ends when the file that the request
    names is there.
    """

    async def run(session: Any) -> AsyncIterator[omni.Chunk | omni.Result]:
        words = []
        async for chunk in session.chunks():
            words.append(chunk.data)
            yield omni.Chunk(chunk.data)
        inputs = (await session.payload()).request.inputs
        yield omni.Chunk("heard all")  # now the coordinator knows that nothing more of its source is needed
        while not Path(inputs["spoken"]).exists():
            await asyncio.sleep(0.01)
        yield omni.Result(words)

    return omni.Streaming(run)
