"""The stages of `test_same_ids`: of every kind, each passes the request's word on with a tensor made of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np

import stage_runtime as omni
from stage_runtime.engines import events

SIZE = 128 << 10


def checked(data: Any) -> dict[str, Any]:
    """The value for the next stage. Raises: AssertionError: the tensor is another request's."""
    word = data["word"]
    if "tensor" in data:
        assert int(data["tensor"].min()) == int(data["tensor"].max()) == len(word), "another request's tensor"
    return {"word": word, "until": data["until"], "tensor": np.full(SIZE, len(word), np.uint8)}


def sync() -> Any:
    def run(payload: omni.StagePayload) -> Any:
        assert payload.request.inputs["word"] == payload.data["word"]
        return checked(payload.data)

    return omni.Simple(run, concurrency=8)


def batch() -> Any:
    return omni.Batched(lambda payloads: [checked(payload.data) for payload in payloads], max_batch=4, max_wait_s=0.01)


def engine() -> Any:
    """Gathers requests by the ids in their inputs, and answers in the opposite order."""

    class Engine:
        def run(self, inbox: Any, outbox: Any, stop: Event) -> None:
            held: dict[str, Any] = {}
            since = time.monotonic()
            while not stop.is_set():
                match inbox.get(timeout=0.005):
                    case events.Start() as event:
                        assert event.request_id not in held, "one id for two live requests"
                        held[event.request_id] = event.payload.data
                        del event  # at rest it would hold the last request's tensor, and with it its sender's slot
                    case events.Abort() as event:
                        held.pop(event.request_id, None)
                if time.monotonic() - since > 0.03:
                    for request_id in reversed(held):
                        outbox.put(events.Done(request_id, checked(held[request_id])))
                    held.clear()
                    since = time.monotonic()

    return Engine()


def produce() -> Any:
    def run(payload: omni.StagePayload) -> Iterator[Any]:
        made = checked(payload.data)
        for letter in made["word"]:
            yield omni.Chunk({"letter": letter, "pad": np.full(SIZE, ord(letter), np.uint8)})
        yield omni.Result(made)

    return omni.Simple(run, concurrency=8)


def collect() -> Any:
    async def run(session: omni.Session) -> AsyncIterator[Any]:
        letters = []
        async for chunk in session.chunks():
            assert int(chunk.data["pad"].max()) == ord(chunk.data["letter"])
            letters.append(chunk.data["letter"])
        data = checked((await session.payload()).data)
        while data["until"] is not None and not Path(data["until"]).exists():
            await asyncio.sleep(0.01)
        yield omni.Result({"word": data["word"], "letters": "".join(letters)})

    return omni.Streaming(run)
