"""A Unix socket lets nobody in at the limit of descriptors, what is connected goes on, and later all may come."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stage_runtime.sockets.endpoints import doors
from stage_runtime.sockets.endpoints.doors import Doors

PATIENCE_S = 60.0
#: The last is ZMTP 3.0, without the READY that follows.
UNFINISHED = (b"", b"\xff", b"GET / HTTP/1.1\r\n\r\n", b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL" + bytes(48))
SPARE = 4  # descriptors that a process may open between a look and the connection after it
HUB = """
import asyncio, resource, sys
from tests.sockets.peers import End, introduce

async def main(folder, endpoint):
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    hub, leaf = End("hub", endpoint), End("leaf", f"ipc://{folder}/leaf")
    introduce(hub, leaf)
    print(hub.endpoint, flush=True)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while word := (await lines.readline()).decode().strip():  # each takes the loop a few turns
        hub.send("leaf", word)
        await leaf.listener.until(lambda: leaf.listener.received_words[-1:] == [word])
        print(word, flush=True)
    hub.channels.close()
    leaf.channels.close()

asyncio.run(main(*sys.argv[1:]))
"""
RELAY = """
import asyncio, resource, sys
import numpy as np
from stage_runtime.payloads import encoding
from stage_runtime.relays.context import RelaySettings
from stage_runtime.relays.dispatch import Relays
from stage_runtime.sockets.endpoints.doors import Doors

async def main(folder, endpoint):
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    loop = asyncio.get_running_loop()
    def relays(name, bind):
        def release(peer, transfer):
            ends[peer].released(name, transfer)
        settings = RelaySettings(bind=bind, arena_bytes=1 << 20, prefault_bytes=0)
        return Relays(loop=loop, incarnation=name, on_release=release, settings=settings, doors=Doors(loop))
    ends = {"hub": relays("hub", endpoint), "leaf": relays("leaf", f"ipc://{folder}/leaf")}
    ends["hub"].open("leaf", ends["leaf"].facts())
    ends["leaf"].open("hub", ends["hub"].facts())
    print(ends["hub"].facts()["tcp"]["endpoint"], flush=True)
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while word := (await lines.readline()).decode().strip():
        sent = ends["leaf"].put(encoding.extract(np.ones(9000)), request_id=word, peer="hub", backend="tcp")
        await ends["hub"].get(sent.metadata, request_id=word, peer="leaf").wait_for_completion(60)
        print(word, flush=True)
    for end in ends.values():
        end.close()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="omni") as path:
        yield Path(path)


class Hub:
    """A process that listens, and sends something for each word that it reads before it prints it."""

    def __init__(self, folder: Path, script: str, endpoint: str | None = None) -> None:
        """endpoint: to listen at; else the file ``hub`` in ``folder``."""
        self._process = subprocess.Popen(
            [sys.executable, "-c", script, str(folder), endpoint or f"ipc://{folder}/hub"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        self._words = 0
        assert self._process.stdout is not None
        self.endpoint = self._process.stdout.readline().strip()  #: The endpoint as bound.

    def descriptors(self) -> int:
        """That it has open."""
        return len(os.listdir(f"/proc/{self._process.pid}/fd"))

    def speaks(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._words += 1
        self._process.stdin.write(f"w{self._words}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == f"w{self._words}\n", f"it has ended: {self._process.poll()}"

    def end(self) -> str:
        """The process's log, after its end."""
        log = self._process.communicate(timeout=PATIENCE_S)[1]
        assert self._process.returncode == 0, log
        return log


@pytest.mark.proves("no-descriptors")
@pytest.mark.parametrize("script", [HUB, RELAY], ids=["control plane", "tcp relay"])
def test_a_process_without_descriptors_for_new_peers_refuses_them_lives_on_and_takes_them_later(
    folder: Path, script: str
) -> None:
    hub = Hub(folder, script)
    hub.speaks()
    mode = (folder / "hub").stat().st_mode
    with contextlib.ExitStack() as peers:
        with pytest.raises(FileNotFoundError):
            for _ in range(300):
                connect(folder / "hub", peers)
                hub.speaks()
        hub.speaks()
    deadline = time.monotonic() + PATIENCE_S
    while not (folder / "hub").exists():
        assert time.monotonic() < deadline
        hub.speaks()
    assert (folder / "hub").stat().st_mode == mode
    with contextlib.ExitStack() as peers:
        connect(folder / "hub", peers)
        hub.speaks()
    log = hub.end()
    # Dead connections that the kernel still holds for it may fill the process once more.
    refused = log.count("new peers are refused: the process may open 256 descriptors (RLIMIT_NOFILE)")
    assert 1 <= refused <= 3, log
    assert sorted(os.listdir(folder)) == ["hub", "leaf"]


@pytest.mark.long
@pytest.mark.proves("no-descriptors")
@pytest.mark.parametrize("script", [HUB, RELAY], ids=["control plane", "tcp relay"])
@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_a_flood_of_connections_ends_nothing_and_takes_no_descriptor_that_is_kept(
    folder: Path, kind: str, script: str
) -> None:
    hub = Hub(folder, script, None if kind == "ipc" else "tcp://127.0.0.1:*")
    hub.speaks()
    with contextlib.ExitStack() as peers:
        flood = [begin(hub.endpoint, peers) for _ in range(400)]  # more than it may open; none of them says a word
        for peer in flood:
            peer.settimeout(PATIENCE_S)
            with contextlib.suppress(OSError):  # it was refused
                peer.recv(1)  # libzmq greets when it accepts
            assert hub.descriptors() <= 256 - doors.SHUT_BELOW + SPARE
        hub.speaks()
    hub.speaks()
    hub.end()


@pytest.mark.proves("no-descriptors")
@pytest.mark.parametrize("script", [HUB, RELAY], ids=["control plane", "tcp relay"])
@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_a_connection_that_never_finishes_its_handshake_is_ended(folder: Path, kind: str, script: str) -> None:
    hub = Hub(folder, script, None if kind == "ipc" else "tcp://127.0.0.1:*")
    with contextlib.ExitStack() as peers:
        opened = [begin(hub.endpoint, peers) for _ in UNFINISHED]
        for peer, said in zip(opened, UNFINISHED, strict=True):
            peer.settimeout(25)  # libzmq's own limit is 30 s
            peer.sendall(said)
        for peer in opened:
            with contextlib.suppress(ConnectionResetError):
                while peer.recv(4096):
                    pass
    hub.speaks()
    hub.end()


def begin(endpoint: str, peers: contextlib.ExitStack) -> socket.socket:
    """A connection to there. It is not waited for, and may be refused."""
    scheme, _, place = endpoint.partition("://")
    peer = peers.enter_context(socket.socket(socket.AF_UNIX if scheme == "ipc" else socket.AF_INET))
    peer.setblocking(False)
    with contextlib.suppress(OSError):
        peer.connect(place if scheme == "ipc" else ("127.0.0.1", int(place.rpartition(":")[2])))
    peer.setblocking(True)
    return peer


def connect(path: Path, peers: contextlib.ExitStack) -> None:
    peers.enter_context(socket.socket(socket.AF_UNIX)).connect(str(path))


async def test_what_a_process_opens_by_itself_shuts_its_doors_as_well_and_closing_leaves_no_file(folder: Path) -> None:
    (folder / "a").touch()
    made = Doors(asyncio.get_running_loop())
    made.add(f"ipc://{folder}/a")
    made.add("tcp://127.0.0.1:1")
    assert os.listdir(folder) == ["a"]
    with few_left():
        made.look()
        assert os.listdir(folder) == ["a" + doors.SHUT]
        made.look()
    made.look()
    assert os.listdir(folder) == ["a"]
    with few_left():
        made.look()
    made.close()
    assert os.listdir(folder) == ["a"]


@contextlib.contextmanager
def few_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
