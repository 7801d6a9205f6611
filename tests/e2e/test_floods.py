"""Idle connections, more than a process may open, at each socket of a running pipeline: what runs goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e import descriptors
from tests.e2e.local_pipelines import PATIENCE_S, TOGETHER, Client, diamond, running

FLOOD = 400
LIMIT = 256


def unix_sockets(folder: Path) -> list[str]:
    """Those that anybody listens at, in ``folder`` or below it."""
    found = [path for path in folder.rglob("*") if path.is_socket()]
    return [str(path) for path in found]


def flood(family: socket.AddressFamily, address: str | tuple[str, int], peers: contextlib.ExitStack) -> None:
    """Connections that say nothing. Those that find no room wait in the kernel, or are refused."""
    for _ in range(FLOOD):
        peer = peers.enter_context(socket.socket(family))
        peer.setblocking(False)
        with contextlib.suppress(OSError):
            peer.connect(address)


@pytest.mark.long
@pytest.mark.proves("no-descriptors")
async def test_a_flood_at_any_socket_of_a_pipeline_ends_no_process_and_no_request(base: Path) -> None:
    async with running(diamond(), base) as pipeline, Client(pipeline.url, connections=1, keep_s=None) as client:
        for _ in range(3):  # every edge has moved a large payload
            await client.answer("before", size=1 << 20)
        pids = pipeline.pids()
        for pid in pids.values():
            await descriptors.allow(pid, LIMIT, LIMIT)
        paths = unix_sockets(base)
        assert len(paths) >= 2 * len(pids), "of the control plane and of the relay tcp, and the coordinator publishes"
        host, _, port = pipeline.url.removeprefix("http://").rpartition(":")
        places = [(socket.AF_UNIX, path) for path in paths] + [(socket.AF_INET, (host, int(port)))]
        for family, address in places:
            with contextlib.ExitStack() as peers:
                flood(family, address, peers)
                await client.answer("a short one")
                await client.answer("a large one", size=1 << 20)
                words = [word["data"] for name, word in await client.streamed("a stream") if name == "chunk"]
                assert words == ["A", "STREAM"]
        assert pipeline.pids() == pids, "none has ended"
        async with Client(pipeline.url) as another:
            await another.answer("after", size=1 << 20)

        async with asyncio.timeout(PATIENCE_S):
            while not all(os.path.exists(path) for path in paths):
                await client.answer("until all are open again")


#: Connects to Unix sockets and leaves, for ever.
COMES_AND_GOES = """
import socket, sys
while True:
    for path in sys.argv[1:]:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.setblocking(False)
            try:
                peer.connect(path)
            except OSError:
                pass
"""


@pytest.mark.long
@pytest.mark.proves("no-descriptors")
async def test_a_burst_of_clients_leaves_descriptors_for_peers_that_connect_at_the_same_moment(base: Path) -> None:
    """libzmq aborts the process when it accepts a peer at a Unix socket and no descriptor is left."""
    async with running(diamond(TOGETHER), base) as pipeline, Client(pipeline.url, connections=1, keep_s=None) as client:
        await client.answer("before")
        pids = pipeline.pids()
        await descriptors.allow(pids["coordinator"], LIMIT, LIMIT)
        paths = [path for path in unix_sockets(base) if "coordinator" in path]
        host, _, port = pipeline.url.removeprefix("http://").rpartition(":")
        peers = [subprocess.Popen([sys.executable, "-c", COMES_AND_GOES, *paths]) for _ in range(2)]
        try:
            for _ in range(30):
                with contextlib.ExitStack() as clients:
                    flood(socket.AF_INET, (host, int(port)), clients)
                    await client.answer("meanwhile")
        finally:
            for peer in peers:
                peer.kill()
                peer.wait()
        assert pipeline.pids() == pids, "none has ended"
