"""The pipeline that is hurt: an entry that fans out, a fan-in, a stream's producer, its consumer, a terminal.

Every answer is a function of its request's text alone, and names it: an answer with another request's content shows.
"""

from __future__ import annotations

import hashlib

from omnipipeline_spec.cluster import Control, ProcessGroup
from omnipipeline_spec.pipeline import Code, PipelineConfig, StageConfig

#: The process groups, by what their stage is in the graph.
MEMBERS = ("entry", "fan-in", "producer", "consumer", "terminal")
DEADLINE_S = 15.0
HEARTBEAT_S = 0.25

CODE = """
import asyncio
import hashlib

import numpy as np
import stage_runtime as omni


def pad(text, size):
    return np.frombuffer((text * (size // len(text) + 1))[:size].encode(), np.uint8)


def entry(size):
    async def run(payload):
        return {"text": payload.data["text"], "pad": pad(payload.data["text"], size)}
    return omni.Simple(run, concurrency=16)


def branch():
    def run(payload):
        return {"hash": hashlib.sha256(memoryview(payload.data["pad"])).hexdigest(), "text": payload.data["text"]}
    return run


def merge(inputs):
    entry, branch = inputs["entry"].data, inputs["branch"].data
    assert entry["text"] == branch["text"], "two requests were joined"
    assert hashlib.sha256(memoryview(entry["pad"])).hexdigest() == branch["hash"], "the bytes are not what was sent"
    return {"text": entry["text"]}


def join():
    return lambda payload: payload.data


def produce(size, pause_s):
    async def run(payload):
        for word in payload.data["text"].split():
            yield omni.Chunk({"word": word, "pad": pad(word, size)})
            await asyncio.sleep(pause_s)
        yield omni.Result(payload.data)
    return omni.Simple(run, concurrency=64)


def consume():
    async def run(session):
        async for chunk in session.chunks():
            assert bytes(chunk.data["pad"][: len(chunk.data["word"])]).decode() == chunk.data["word"]
            yield omni.Chunk({"word": chunk.data["word"].upper()})
        yield omni.Result((await session.payload()).data)
    return omni.Streaming(run)


def finish():
    async def run(session):
        words = []
        async for chunk in session.chunks():
            words.append(chunk.data["word"])
            yield omni.Chunk(chunk.data["word"])
        text = (await session.payload()).data["text"]
        joined = " ".join(words) + "|" + text
        yield omni.Result({"hash": hashlib.sha256(joined.encode()).hexdigest()})
    return omni.Streaming(run)
"""


def answer_hash(text: str) -> str:
    """The terminal's right answer to ``text``."""
    return hashlib.sha256(f"{text.upper()}|{text}".encode()).hexdigest()


def spec(*, replicas: int = 1, relay: str = "auto", size: int = 96 << 10, pause_s: float = 0.02) -> PipelineConfig:
    """replicas: of every group. size: bytes of each tensor on the way. pause_s: between a stream's chunks."""
    groups = {"entry": "entry", "branch": "entry", "join": "fan-in", "write": "producer", "read": "consumer"}

    def stage(name: str, factory: str, **fields: object) -> StageConfig:
        process = groups.get(name, "terminal")
        return StageConfig(name=name, process=process, factory=f"hurt:{factory}", **fields)  # type: ignore[arg-type]

    return PipelineConfig(
        name="hurt",
        code=Code(inline={"hurt.py": CODE}),
        relay_backend=relay,  # type: ignore[arg-type]
        stages=[
            stage("entry", "entry", next=["branch", "join"], factory_args={"size": size}),
            stage("branch", "branch", next="join"),
            stage("join", "join", wait_for=["entry", "branch"], merge_fn="hurt:merge", next="write"),
            stage("write", "produce", next="read", stream_to="read", factory_args={"size": size, "pause_s": pause_s}),
            stage("read", "consume", next="tell", stream_to="tell"),
            stage("tell", "finish", terminal=True),
        ],
        process_groups=[ProcessGroup(name=name, replicas=replicas) for name in MEMBERS],
        control=Control(heartbeat_seconds=HEARTBEAT_S),
    )
