"""Slow is not dead: a transfer fails when no byte of its sender's has come for a while, and not before."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import pytest

from stage_runtime.errors import TransferError
from stage_runtime.payloads import encoding
from stage_runtime.transfers.receiving import Fetching
from stage_runtime.wire.parts import Body
from tests.patience import patience
from tests.relays.relay_pairs import MIB, SMALL, Pair
from tests.sockets.peers import Proxy

RATE = 350_000  # bytes a second
PIECE = 16 << 10
STALLED_S = 2.0  # a frame of 1 MiB takes three seconds; a busy machine stops for less
PATIENCE_S = patience(60.0)
SETTINGS = msgspec.structs.replace(SMALL, piece_bytes=256 << 10, whole_bytes=MIB)


class Narrow:
    """A way to the relay at ``endpoint`` through which so many bytes pass in a second, until it is blocked."""

    def __init__(self, endpoint: str) -> None:
        self._host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._port = int(port)
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self.open = asyncio.Event()
        self.open.set()

    async def __aenter__(self) -> Narrow:
        self._server = await asyncio.start_server(self._pass, "127.0.0.1", 0, limit=PIECE)
        self.endpoint = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, out = await asyncio.open_connection(self._host, self._port, limit=PIECE)
        self._writers += [writer, out]
        for source, target in ((reader, out), (back, writer)):
            self._tasks.add(asyncio.create_task(self._carry(source, target)))

    async def _carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(PIECE):
                await self.open.wait()
                target.write(data)
                await target.drain()
                await asyncio.sleep(len(data) / RATE)


@contextlib.asynccontextmanager
async def narrowly() -> AsyncIterator[tuple[Pair, Narrow]]:
    both = Pair("tcp", SETTINGS)
    try:
        facts = both.b.facts()
        async with Narrow(facts["tcp"]["endpoint"]) as link:
            facts["tcp"]["endpoint"] = link.endpoint
            both.a.forget("b")
            both.a.open("b", {"tcp": facts["tcp"]})
            yield both, link
    finally:
        both.close()


def fetchings(both: Pair) -> tuple[Fetching, Fetching]:
    """The first one fails after `STALLED_S`; the second one waits however long the machine stops."""
    loop = asyncio.get_running_loop()
    return Fetching(both.b, loop, stalled_s=STALLED_S), Fetching(both.b, loop, stalled_s=PATIENCE_S)


def fetch(both: Pair, fetching: Fetching, fill: int, nbytes: int) -> asyncio.Future[Any]:
    """Put so many bytes and fetch them as a process does; the future gives what came, or the error."""
    extracted = encoding.extract({"x": np.full(nbytes, fill, np.uint8)})
    operation = both.put_again(extracted)
    body = Body(extracted.value_bytes, tuple(extracted.refs), transfer=operation.metadata)
    came: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    fetching.fetch("a", body, f"r{fill}", lambda fetched: came.set_result(fetched.open()["x"]), came.set_exception)
    return came


@pytest.mark.proves("slow-network")
async def test_what_moves_slowly_or_waits_behind_others_is_not_late() -> None:
    """A whole frame of 1 MiB, one in pieces, and a small one behind them."""
    async with narrowly() as (both, _):
        fetching = Fetching(both.b, asyncio.get_running_loop(), stalled_s=STALLED_S)
        sizes = [MIB - 64, MIB + 100_000, 100_000]
        for fill, came in enumerate([fetch(both, fetching, fill, nbytes) for fill, nbytes in enumerate(sizes)]):
            found = await asyncio.wait_for(came, PATIENCE_S)
            assert (found.nbytes, int(found.min()), int(found.max())) == (sizes[fill], fill, fill)


@pytest.mark.proves("slow-network")
@pytest.mark.parametrize("begun", [True, False])
async def test_what_does_not_move_any_more_fails_alone(begun: bool) -> None:
    """The transfer stops in mid-frame or before its first byte; another peer's transfers go on meanwhile."""
    async with narrowly() as (both, link):
        fetching, patient = fetchings(both)
        assert (await asyncio.wait_for(fetch(both, patient, 1, 100_000), PATIENCE_S)).nbytes == 100_000
        if not begun:
            link.open.clear()
        came = fetch(both, fetching, 2, MIB - 64)
        if begun:
            await asyncio.sleep(0.2)
            link.open.clear()
        with pytest.raises(TransferError, match="without progress"):
            await asyncio.wait_for(came, PATIENCE_S)
        link.open.set()
        assert (await asyncio.wait_for(fetch(both, patient, 3, 100_000), PATIENCE_S)).nbytes == 100_000


@pytest.mark.proves("tcp-relay-reconnects")
async def test_what_was_lost_with_a_connection_fails_while_later_transfers_come() -> None:
    """The sender's socket connects again and goes on behind what was under way. Nothing reports the loss."""
    both = Pair("tcp")
    facts = both.b.facts()
    proxy = Proxy(facts["tcp"]["endpoint"])
    fetching, patient = fetchings(both)
    try:
        facts["tcp"]["endpoint"] = proxy.endpoint
        both.a.forget("b")
        both.a.open("b", {"tcp": facts["tcp"]})
        assert (await asyncio.wait_for(fetch(both, patient, 1, 100_000), PATIENCE_S)).nbytes == 100_000
        proxy.hold()
        lost = fetch(both, fetching, 2, 100_000)
        while not proxy.held:
            await asyncio.sleep(0.01)
        proxy.cut()
        later = []
        async with asyncio.timeout(PATIENCE_S):
            while not lost.done():
                later.append(fetch(both, fetching, 3, 100_000))
                await asyncio.sleep(STALLED_S / 6)
        with pytest.raises(TransferError, match="without progress"):
            await lost
        await asyncio.gather(*later, return_exceptions=True)
    finally:
        proxy.close()
        both.close()
