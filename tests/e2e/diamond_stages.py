"""The stages of the end-to-end pipelines: on their processes' path as `diamond`; each request's inputs control them.

A request's inputs are ``text`` and, all optional: ``fail`` (the hook that shall raise), ``nap`` (seconds at the
entry), ``hold`` (the same, holding the GIL), ``size`` (bytes of the tensors that go along), ``slow`` (seconds per
chunk at the end), ``until`` (stage -> a file: `take` waits at its start, and `speak` before its second chunk, until it
is there), ``odd`` (the stage that shall give what cannot be encoded), ``keep`` and ``unpickle`` (positive controls).

The answer is the text's words shouted, one chunk each, and a digest of what came through.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import pickle
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import stage_runtime as omni

#: Values that a request made `left` ``keep``, each a view of its sender's slot.
KEPT: list[Any] = []


class Broken(Exception):
    """The error that a hook raises on request."""


def trip(data: Any, hook: str) -> None:
    if isinstance(data, dict) and data.get("fail") == hook:
        raise Broken(f"{hook} fails on request")


def waits(data: Any, stage: str) -> bool:
    """Whether the request still waits at this stage for a file."""
    file = data.get("until", {}).get(stage)
    return file is not None and not Path(file).exists()


# --- factories --------------------------------------------------------------------------------------------------


def take() -> Any:
    """The entry: sends the inputs on, with a tensor of the wanted size."""

    def run(payload: omni.StagePayload) -> Any:
        data = payload.data
        trip(data, "take")
        if data.get("unpickle"):
            pickle.loads(pickle.dumps(Broken))
        if "hold" in data:
            _hold_the_gil(data["hold"])
        _nap(payload.request, data.get("nap", 0))
        while waits(data, "take") and not payload.request.cancelled():
            time.sleep(0.01)
        return {**data, "tensor": np.full(data.get("size", 4), len(data["text"]) % 251, np.uint8)}

    return omni.Simple(run, concurrency=8)


def _hold_the_gil(seconds: float) -> None:
    """Hold the lock as a C extension that computes and never lets go: sleep by a foreign function that keeps it."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def _nap(request: omni.OmniRequest, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and not request.cancelled():
        time.sleep(0.01)


def side(name: str) -> Any:
    """One branch between the fan-out and the fan-in: looks at the tensor and passes a digest on."""

    def run(payload: omni.StagePayload) -> Any:
        data = payload.data
        trip(data, name)
        if data.get("odd") == name:
            return {"nested": [{"value": {1, 2}}]}
        if "keep" in data and name == "left":
            KEPT[:] = [data["tensor"]] if data["keep"] else []
        digest = hashlib.sha256(memoryview(data["tensor"])).hexdigest()
        return {**{key: value for key, value in data.items() if key != "tensor"}, name: f"{name}:{digest}"}

    return run


def join() -> Any:
    """The stage behind the fan-in. Batched, so that every kind of engine takes part."""

    def run(payloads: list[omni.StagePayload]) -> list[Any]:
        return [_tripped(payload.data, "join") or payload.data for payload in payloads]

    return omni.Batched(run, max_batch=4, max_wait_s=0.001)


def _tripped(data: Any, hook: str) -> Exception | None:
    try:
        trip(data, hook)
    except Broken as error:
        return error
    return None


def write() -> Any:
    """The producer of the stream: a chunk per word, then the result."""

    def run(payload: omni.StagePayload) -> Iterator[Any]:
        data = payload.data
        trip(data, "write")
        for word in data["text"].split():
            yield omni.Chunk({"word": word, "pad": np.full(data.get("size", 4), len(word), np.uint8)})
            trip(data, "write in mid-stream")
        if data.get("odd") == "chunk":
            yield omni.Chunk({"value": object()})
        yield omni.Result({**data, "words": len(data["text"].split())})

    return omni.Simple(run, concurrency=8)


def speak() -> Any:
    """The consumer of the stream, and the terminal: shouts each word, and ends with the digest."""

    async def run(session: omni.Session) -> AsyncIterator[Any]:
        async for chunk in session.chunks():
            trip(session.request.inputs, "speak" if chunk.index == 0 else "speak in mid-stream")
            assert int(chunk.data["pad"].max()) == len(chunk.data["word"])
            await asyncio.sleep(session.request.inputs.get("slow", 0))
            while chunk.index == 1 and waits(session.request.inputs, "speak"):
                await asyncio.sleep(0.01)
            yield omni.Chunk(chunk.data["word"].upper())
        data = (await session.payload()).data
        inputs = f"{data['left']} {data['right']} {data['words']} {data['project']}"
        yield omni.Result(
            {"text": session.request.inputs["text"], "digest": hashlib.sha256(inputs.encode()).hexdigest()}
        )

    return omni.Streaming(run)


def aside() -> Any:
    """A second terminal, that only some requests want."""
    return lambda payload: {"aside": payload.data["text"][::-1]}


# --- hooks ------------------------------------------------------------------------------------------------------


def route_fn(request_id: str, output: Any) -> Any:
    trip(output, "route_fn")
    return ["left", "right"] if output["text"].count(" ") else ["right"]


def wait_for_fn(request_id: str, source: str, payload: omni.StagePayload) -> list[str]:
    trip(payload.data, "wait_for_fn")
    return ["left", "right"] if payload.data["text"].count(" ") else ["right"]


def merge_fn(inputs: dict[str, omni.StagePayload]) -> Any:
    merged = {"left": "none", **{key: value for one in inputs.values() for key, value in one.data.items()}}
    trip(merged, "merge_fn")
    return merged


def project(payload: omni.StagePayload) -> Any:
    trip(payload.data, "project_payload[speak]")
    return {**payload.data, "project": "projected"}


def stream_done_to_fn(request_id: str, output: Any) -> list[str]:
    trip(output, "stream_done_to_fn")
    return ["speak"]


def terminal_stages_fn(request: omni.OmniRequest) -> list[str]:
    trip(request.inputs, "terminal_stages_fn")
    return ["speak"] if request.inputs.get("plain", True) else ["speak", "aside"]


# --- other pipelines --------------------------------------------------------------------------------------------


def torch_source() -> Any:
    import torch

    return lambda payload: {"tensor": torch.zeros(25_000), "write": payload.data.get("write")}


def one_buffer(context: Any) -> Any:
    """Writes each chunk over the one before it, in memory of its own and in the arena."""
    import torch

    own, arena = np.empty(1 << 18, np.uint8), context.allocate((1 << 16,), torch.float32)

    def run(payload: omni.StagePayload) -> Any:
        for number in range(payload.data["chunks"]):
            own[:] = number
            arena.fill_(number)
            yield omni.Chunk({"own": own, "arena": arena})
        own[:] = 255
        arena.fill_(255)
        return {"own": own[:100_000], "arena": arena}

    return run


def what_came() -> Any:
    """Reads no chunk before the producer is through."""

    async def run(session: omni.Session) -> Any:
        last = (await session.payload()).data
        seen = [
            [np.unique(chunk.data["own"]).tolist(), chunk.data["arena"].unique().tolist()]
            async for chunk in session.chunks()
        ]
        yield omni.Result([*seen, [np.unique(last["own"]).tolist(), last["arena"].unique().tolist()]])

    return omni.Streaming(run)


def torch_writer(name: str) -> Any:
    """Breaks the read-only contract when the request names it."""

    def run(payload: omni.StagePayload) -> Any:
        if payload.data["write"] == name:
            payload.data["tensor"][0] = 1.0
        return payload.data

    return run


def ranks(context: Any, tp_rank: int, tp_size: int) -> Any:
    """A TP stage on gloo: all ranks add up what each makes of its share of the values."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=context.rendezvous, rank=tp_rank, world_size=tp_size)

    def run(payload: omni.StagePayload) -> Any:
        data = payload.data
        if data.get("fail") in ("all", tp_rank):
            raise Broken(f"rank {tp_rank} fails on request")
        own = torch.tensor(data["values"], dtype=torch.float64)[tp_rank::tp_size].sum()
        dist.all_reduce(own)
        return {"sum": float(own), "ranks": dist.get_world_size()}

    return run
