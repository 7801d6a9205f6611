"""Whether anybody listens at an endpoint: a refusal is reported, and nothing else is taken for one."""

from __future__ import annotations

import asyncio
import functools
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from stage_runtime.sockets.endpoints.refusals import Refusals
from tests.sockets.peers import End, ends

TRIES = 20  # a machine that stalls for the whole grace loses the peer by that


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A socket's path has 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="r-") as folder:
        yield Path(folder)


@pytest.fixture
async def refusals() -> AsyncIterator[Refusals]:
    refusals = Refusals(asyncio.get_running_loop())
    yield refusals
    refusals.close()


def bound(kind: str, folder: Path) -> tuple[socket.socket, str]:
    """A socket that does not listen: the kernel refuses connections, and nobody else gets its address."""
    if kind == "ipc":
        found = socket.socket(socket.AF_UNIX)
        found.bind(str(folder / "s"))
        return found, f"ipc://{folder}/s"
    host, family = ("::1", socket.AF_INET6) if kind == "tcp6" else ("127.0.0.1", socket.AF_INET)
    found = socket.socket(family)
    found.bind((host, 0))
    port = found.getsockname()[1]
    return found, f"tcp://[{host}]:{port}" if kind == "tcp6" else f"tcp://{host}:{port}"


@pytest.mark.parametrize("kind", ["ipc", "tcp", "tcp6"])
async def test_an_endpoint_where_nobody_listens_refuses(kind: str, short_path: Path, refusals: Refusals) -> None:
    held, endpoint = bound(kind, short_path)
    refused = asyncio.Event()
    with held:
        refusals.ask(endpoint, refused.set)
        await asyncio.wait_for(refused.wait(), 60)


@pytest.mark.parametrize("kind", ["ipc", "tcp", "tcp6"])
async def test_an_end_that_listens_has_not_refused_and_the_question_leaves_no_connection(
    kind: str, short_path: Path, refusals: Refusals
) -> None:
    listener, endpoint = bound(kind, short_path)
    listener.listen()
    listener.setblocking(False)
    loop = asyncio.get_running_loop()
    calls: list[str] = []
    with listener:
        refusals.ask(endpoint, lambda: calls.append("refused"))
        connection, _ = await loop.sock_accept(listener)
        with connection:
            connection.setblocking(False)
            assert await loop.sock_recv(connection, 1) == b""
    assert calls == []


@pytest.mark.parametrize("endpoint", ["ipc:///no/such/socket", "tcp://a-name:7", "tcp://127.0.0.1:none"])
async def test_what_cannot_be_asked_has_not_refused(endpoint: str, refusals: Refusals) -> None:
    calls: list[str] = []
    refusals.ask(endpoint, lambda: calls.append("refused"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert calls == []


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
async def test_a_peer_whose_endpoint_refuses_is_lost_before_its_grace_is_over(kind: str, short_path: Path) -> None:
    a = End("aa", "tcp://127.0.0.1:*")
    async with ends(a):
        for number in range(TRIES):
            place = "tcp://127.0.0.1:*" if kind == "tcp" else f"ipc://{short_path}/{number}"
            b = End(f"b{number}", place)
            async with ends(b):
                link = a.channels.connect(b.name, b.endpoint)
                await a.listener.until(functools.partial(getattr, link, "connected"))
            await a.listener.until(lambda count=number + 1: len(a.listener.lost_peers) == count)  # type: ignore[misc]
            if a.channels.counters["refused"]:
                return
    raise AssertionError(f"{TRIES} peers were lost by their grace")
