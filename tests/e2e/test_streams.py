"""Streams whose ends do not meet, between real processes: nobody waits for what cannot come, and nothing is held up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from omnipipeline_spec.cluster import Control, ProcessGroup
from omnipipeline_spec.pipeline import PipelineConfig, StageConfig
from stage_runtime.processes.one_machine.local import LocalPipeline
from stage_runtime.rules.flow.streams import STREAM_WINDOW
from stage_runtime.rules.requests.readers import EACH
from tests.e2e.local_pipelines import (
    HEARTBEAT_S,
    PATIENCE_S,
    Client,
    at_rest,
    bound_so_far,
    eventually,
    holds,
    resident,
    running,
)

STUCK_AFTER_S = 4


def stream_join() -> PipelineConfig:
    """route → pa → a ⇒ reader, route → pb → b ⇒ reader, route → speaker: a and b stream, and give enda and endb."""

    def stage(name: str, factory: str, **fields: Any) -> StageConfig:
        process = name if name in ("a", "b", "reader", "speaker") else "others"
        return StageConfig(name=name, process=process, factory=f"stream_join_stages:{factory}", **fields)

    return PipelineConfig(
        name="stream-join",
        stages=[
            stage("route", "route", next=["pa", "pb", "speaker"], route_fn="stream_join_stages:route_fn"),
            stage("pa", "later", factory_args={"name": "a"}, next="a"),
            stage("pb", "later", factory_args={"name": "b"}, next="b"),
            stage("a", "producer", factory_args={"name": "a"}, next="enda", stream_to="reader"),
            stage("b", "producer", factory_args={"name": "b"}, next="endb", stream_to="reader"),
            stage("reader", "reader", terminal=True),
            stage("enda", "end", terminal=True),
            stage("endb", "end", terminal=True),
            stage("speaker", "speaker", terminal=True),
        ],
        process_groups=[ProcessGroup(name=name, stuck_after_seconds=STUCK_AFTER_S) for name in ("a", "b", "speaker")],
        terminal_stages_fn="stream_join_stages:terminal_stages_fn",
        control=Control(heartbeat_seconds=HEARTBEAT_S),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pipeline() -> AsyncIterator[LocalPipeline]:
    with tempfile.TemporaryDirectory(prefix="e-") as folder:
        async with running(stream_join(), Path(folder)) as one:
            yield one


@pytest_asyncio.fixture(loop_scope="session")
async def client(pipeline: LocalPipeline) -> AsyncIterator[Client]:
    async with Client(pipeline.url, connections=100) as one:
        yield one
        await at_rest(one)


async def ask(client: Client, **inputs: Any) -> Any:
    body = await client.ask("", **inputs)
    return body.get("results", body)


@pytest.mark.proves("skipped-stage")
@pytest.mark.parametrize("read", [0, 1, 300])
async def test_a_reader_that_leaves_early_lets_its_producers_come_to_their_ends(client: Client, read: int) -> None:
    asked = {"to": ["pa", "pb"], "chunks": 2000, "wait": ["enda", "endb", "reader"], "read": read}
    for answer in await asyncio.gather(*(ask(client, **asked) for _ in range(4))):
        assert (answer["enda"], answer["endb"]) == ("through", "through")
        assert sum(answer["reader"].values()) == read


@pytest.mark.proves("skipped-stage")
@pytest.mark.parametrize(("chunks", "size"), [(0, 0), (3, 0), (40, 300_000)])
@pytest.mark.parametrize("only", ["a", "b"])
async def test_a_source_that_the_router_leaves_out_is_not_waited_for(
    client: Client, only: str, chunks: int, size: int
) -> None:
    answer = await ask(client, to=[f"p{only}"], chunks=chunks, size=size, wait=["reader"])
    assert answer == {"reader": {"a": 0, "b": 0} | {only: chunks}}


async def test_an_empty_stream_brings_a_large_request(client: Client) -> None:
    answer = await ask(client, to=["pa", "pb"], chunks=0, wait=["reader"], pad="x" * 100_000)
    assert answer == {"reader": {"a": 0, "b": 0}}


async def test_a_terminal_that_nothing_can_reach_fails_who_waits_for_it_at_once(client: Client) -> None:
    answer = await ask(client, to=["pa"], chunks=1, wait=["enda", "endb"])
    assert (answer["error"]["code"], answer["error"]["stage"]) == ("stage_failed", "endb")
    assert "no route leads" in answer["error"]["message"]


@pytest.mark.proves("skipped-stage")
async def test_a_terminal_that_is_left_out_and_streams_all_the_same_holds_up_no_other_request(
    client: Client, tmp_path: Path
) -> None:
    until = tmp_path / "go on"
    long = asyncio.create_task(ask(client, to=["pa", "speaker"], chunks=3000, until=str(until), wait=["enda"]))
    await eventually(lambda: holds(client, "a", 1))
    assert await ask(client, to=["speaker"], chunks=3, wait=["speaker"]) == {"speaker": "said"}
    assert not long.done(), "it still waits, at another stage"
    until.touch()
    assert await long == {"enda": "through"}


@pytest.mark.proves("opposite-orders")
async def test_producers_that_meet_requests_in_opposite_orders_at_a_reader_are_all_served(client: Client) -> None:
    """Each producer and the reader take one request at a time, and each stream is several windows long."""
    asked = {"to": ["pa", "pb"], "chunks": 1500, "wait": ["reader"]}
    answers = await asyncio.gather(*(ask(client, first=first, **asked) for first in "abab"))
    assert answers == [{"reader": {"a": 1500, "b": 1500}}] * 4


@pytest.mark.proves("client-never-reads")
async def test_a_reader_that_never_reads_costs_its_own_request_only(pipeline: LocalPipeline, client: Client) -> None:
    """Its producer waits until its deadline, longer than a stage may stand still: nobody else asks the speaker."""
    before = dict(pipeline.pids())
    where = urlsplit(pipeline.url)
    body = {"inputs": {"to": ["speaker"], "wait": ["speaker"], "chunks": 1_000_000, "size": 10_000}, "stream": True}
    encoded = json.dumps(body).encode()
    head = "POST /v1/pipeline HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(encoded)}\r\n"
    head += f"Connection: close\r\nX-Request-Timeout: {STUCK_AFTER_S * 2}\r\n\r\n"
    known = await bound_so_far(client, "speaker")

    async def bound() -> bool:
        return await bound_so_far(client, "speaker") == known + 1

    with socket.create_connection((where.hostname or "", where.port or 0)) as deaf:
        deaf.sendall(head.encode() + encoded)
        await eventually(bound)
        while await holds(client, "speaker", 1):
            assert await ask(client, to=["pa"], chunks=3, wait=["reader"]) == {"reader": {"a": 3, "b": 0}}
        assert await ask(client, to=["speaker"], chunks=3, wait=["speaker"]) == {"speaker": "said"}
        answer = await asyncio.to_thread(rest_of, deaf, 0.0)
        assert b'"deadline"' in answer[-1000:], "it ended by its deadline alone"
    assert pipeline.pids() == before, "nobody was ended"


@asynccontextmanager
async def readers_that_stop(url: str, count: int, **inputs: Any) -> AsyncIterator[list[socket.socket]]:
    """Clients that ask the speaker for a stream and read none of it; their kernels take little."""
    where = urlsplit(url)
    encoded = json.dumps({"inputs": {"to": ["speaker"], "wait": ["speaker"], **inputs}, "stream": True}).encode()
    head = "POST /v1/pipeline HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Connection: close\r\nContent-Length: {len(encoded)}\r\n\r\n"
    with contextlib.ExitStack() as stack:
        readers = []
        for _ in range(count):
            reader = stack.enter_context(socket.socket())
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
            reader.connect((where.hostname or "", where.port or 0))
            reader.sendall(head.encode() + encoded)
            readers.append(reader)
        yield readers


@pytest.mark.proves("client-never-reads")
async def test_readers_that_stop_reading_hold_up_no_other_request(pipeline: LocalPipeline, client: Client) -> None:
    """The speaker takes one request at a time, and each stream is far longer than what is kept for its reader."""
    before, memory = dict(pipeline.pids()), resident(pipeline.pids())
    known = await bound_so_far(client, "speaker")

    async def all_bound() -> bool:  # some may be over by then
        return await bound_so_far(client, "speaker") == known + 5

    async with readers_that_stop(pipeline.url, 5, chunks=1_000_000, size=10_000) as readers:
        await eventually(all_bound)
        assert await ask(client, to=["speaker"], chunks=3, wait=["speaker"]) == {"speaker": "said"}
        grown = {name: now - memory[name] for name, now in resident(pipeline.pids()).items()}
        assert max(grown.values()) < 256 << 20, grown
        answer = await asyncio.to_thread(rest_of, readers[0], 0.0)
        assert b"its client does not read" in answer[-1000:]
    assert pipeline.pids() == before, "nobody was ended"
    await at_rest(client)


@pytest.mark.long
@pytest.mark.proves("client-never-reads")
async def test_a_slow_reader_gets_its_whole_answer_while_another_request_is_served(
    pipeline: LocalPipeline, client: Client
) -> None:
    """Its answer is several windows long, and less than what is kept for a reader."""
    chunks = STREAM_WINDOW + EACH // 2
    async with readers_that_stop(pipeline.url, 1, chunks=chunks, size=10_000) as [slow]:
        await eventually(lambda: holds(client, "speaker", 1))
        assert await ask(client, to=["speaker"], chunks=3, wait=["speaker"]) == {"speaker": "said"}
        answer = await asyncio.to_thread(rest_of, slow, 0.001)
    numbers = [json.loads(number) for number in re.findall(rb'"number": ?(\d+)', answer)]
    assert numbers == list(range(chunks))
    assert b'"said"' in answer
    await at_rest(client)


def rest_of(reader: socket.socket, nap_s: float) -> bytes:
    """All that comes until the end of the connection, read with pauses."""
    reader.settimeout(PATIENCE_S)
    found = bytearray()
    while piece := reader.recv(64 << 10):
        found += piece
        time.sleep(nap_s)
    return bytes(found)
