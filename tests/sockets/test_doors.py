"""At the limit of descriptors nobody is let in at a Unix socket, what is connected goes on, and later all may come."""

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

from stage_runtime.sockets import doors
from stage_runtime.sockets.doors import Doors

PATIENCE_S = 60.0
HUB = """
import asyncio, resource, sys
from tests.sockets.peers import End, introduce

async def main(folder):
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    hub, leaf = End("hub", f"ipc://{folder}/hub"), End("leaf", f"ipc://{folder}/leaf")
    introduce(hub, leaf)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while word := (await lines.readline()).decode().strip():  # each takes the loop a few turns
        hub.send("leaf", word)
        await leaf.listener.until(lambda: leaf.listener.received_words[-1:] == [word])
        print(word, flush=True)
    hub.channels.close()
    leaf.channels.close()

asyncio.run(main(sys.argv[1]))
"""
RELAY = """
import asyncio, resource, sys
import numpy as np
from stage_runtime.payloads import encoding
from stage_runtime.relays.context import RelaySettings
from stage_runtime.relays.dispatch import Relays
from stage_runtime.sockets.doors import Doors

async def main(folder):
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    loop = asyncio.get_running_loop()
    def relays(name):
        def release(peer, transfer):
            ends[peer].released(name, transfer)
        settings = RelaySettings(bind=f"ipc://{folder}/{name}", arena_bytes=1 << 20, prefault_bytes=0)
        return Relays(loop=loop, incarnation=name, on_release=release, settings=settings, doors=Doors(loop))
    ends = {name: relays(name) for name in ("hub", "leaf")}
    ends["hub"].open("leaf", ends["leaf"].facts())
    ends["leaf"].open("hub", ends["hub"].facts())
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while word := (await lines.readline()).decode().strip():
        sent = ends["leaf"].put(encoding.extract(np.ones(9000)), request_id=word, peer="hub", backend="tcp")
        await ends["hub"].get(sent.metadata, request_id=word, peer="leaf").wait_for_completion(60)
        print(word, flush=True)
    for end in ends.values():
        end.close()

asyncio.run(main(sys.argv[1]))
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="omni") as path:
        yield Path(path)


class Hub:
    """A process that listens, and sends something for each word that it reads before it prints it."""

    def __init__(self, folder: Path, script: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", script, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        self._words = 0

    def speaks(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._words += 1
        self._process.stdin.write(f"w{self._words}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == f"w{self._words}\n", f"it has ended: {self._process.poll()}"

    def end(self) -> str:
        """What it has logged."""
        log = self._process.communicate(timeout=PATIENCE_S)[1]
        assert self._process.returncode == 0, log
        return log


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
    assert log.count("new peers are refused: the process may open 256 descriptors (RLIMIT_NOFILE)") == 1, log
    assert sorted(os.listdir(folder)) == ["hub", "leaf"]


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
