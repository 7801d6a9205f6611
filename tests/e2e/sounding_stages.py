"""A language model that streams, and a stage that makes sound of it: each records events of its own, by `emit`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import stage_runtime as omni
from stage_runtime.profiler import emit

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


def words(model: str, data_parallel_size: int = 1) -> omni.Autoregressive:
    """Each token as a chunk."""

    def deliver(payload: omni.StagePayload, generation: omni.Generation) -> Iterator[omni.Chunk | omni.Result]:
        if generation.tokens:
            yield omni.Chunk(list(generation.tokens))
        if generation.finish is not None:
            yield omni.Result(generation.finish)

    return omni.Autoregressive(
        model=model,
        prompt=lambda payload: omni.Prompt(text=payload.data["text"]),
        deliver=deliver,
        params=GREEDY,
        threads=1,
        block_size=4,
        max_chunk=8,
        kernels="torch",
        data_parallel_size=data_parallel_size,
    )


def sound() -> omni.Streaming:
    """Records its first sound as `examples/voice` does."""

    async def run(session: omni.Session) -> AsyncIterator[Any]:
        heard: list[int] = []
        async for chunk in session.chunks():
            if not heard:
                emit("code2wav_first_audio", session.request.id)
            heard += chunk.data
            yield omni.Chunk(chunk.data)
        await session.payload()
        yield omni.Result(heard)

    return omni.Streaming(run)
