"""A process at the other end: an echo peer that the tests kill, stop and start again; and a proxy that can be cut."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

from stage_runtime.sockets.channels import Channels, LinkTimes
from stage_runtime.sockets.connections.connecting import RECONNECT_GRACE_S
from stage_runtime.sockets.endpoints.addresses import CurveSecurity
from stage_runtime.sockets.frames.resending import DEFAULT_TIMES, ResendTimes
from stage_runtime.wire.frames import RequestRef
from stage_runtime.wire.messages import Deregister, Hello, Message
from stage_runtime.wire.parts import Member
from tests.patience import patience

SECRET = bytes(range(32))
PATIENCE_S = patience(60.0)


class Listener:
    """`sockets.frames.receiving.Handler`: keeps what it hears. Lets anybody in who says Hello."""

    def __init__(self) -> None:
        self.channels: Channels
        self.received_words: list[str] = []
        self.messages: list[tuple[str, Message]] = []
        self.lost_peers: list[tuple[str, float]] = []
        self.strangers: list[str] = []
        self.unread: list[tuple[str, RequestRef | None]] = []
        self.raises: Exception | None = None
        self.changed = asyncio.Event()

    def introduced(self, sender: str, message: Message) -> bool:
        if not isinstance(message, Hello):
            self.strangers.append(sender)
            return False
        self.channels.connect(sender, message.member.endpoint)
        return True

    def received(self, sender: str, message: Message) -> None:
        if self.raises is not None:
            error, self.raises = self.raises, None
            raise error
        self.messages.append((sender, message))
        if isinstance(message, Deregister):
            self.received_words.append(message.reason)
        self.changed.set()

    def unreadable(self, sender: str, request: RequestRef | None, problem: str) -> None:
        self.unread.append((sender, request))
        self.changed.set()

    def lost(self, peer: str) -> None:
        self.lost_peers.append((peer, asyncio.get_running_loop().time()))
        self.changed.set()

    async def until(self, condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
        async with asyncio.timeout(patience_s):
            while not condition():
                self.changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.changed.wait(), 0.05)


class End:
    """One process's worth of control plane, in this one.

    dead_after_s: long, so that a busy machine loses no peer. Tests of a death that only time shows give a short one.
    bounds: others of `Channels`.
    """

    def __init__(
        self,
        name: str,
        endpoint: str,
        *,
        security: CurveSecurity | None = None,
        dead_after_s: float = 60.0,
        idle_after_s: float | None = None,
        reconnect_grace_s: float = RECONNECT_GRACE_S,
        resend: ResendTimes = DEFAULT_TIMES,
        listener: Listener | None = None,
        **bounds: Any,
    ) -> None:
        self.name = name
        self.listener = listener or Listener()
        self.channels = Channels(
            self.listener,
            incarnation=name,
            loop=asyncio.get_running_loop(),
            security=security,
            times=LinkTimes(dead_after_s, reconnect_grace_s, idle_after_s, resend),
            **bounds,
        )
        self.listener.channels = self.channels
        self.endpoint = self.channels.bind(endpoint)

    def member(self) -> Member:
        return Member(self.name, "group", "unit", "rev", self.endpoint, {}, ())

    def send(self, peer: str, word: str) -> None:
        assert self.channels.send(peer, Deregister(word))


def hello(end: End) -> Hello:
    return Hello(end.member(), "1:", "pipeline", "")


@asynccontextmanager
async def ends(*made: End) -> AsyncIterator[None]:
    try:
        yield
    finally:
        for end in made:
            end.channels.close()


def introduce(one: End, other: End, *, via: str | None = None) -> None:
    """Both know each other. via: where ``one`` reaches ``other`` instead of its own endpoint (a proxy)."""
    one.channels.connect(other.name, via or other.endpoint)
    other.channels.connect(one.name, one.endpoint)


class Proxy:
    """Passes bytes to a TCP port, on threads of its own; `cut` resets all connections in mid-flight."""

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host.strip("[]"), int(port))
        self._lock = Lock()
        self._flowing = Event()
        self._flowing.set()
        self._connections: list[socket.socket] = []
        self.held = False  #: Something came since `hold`.
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._threads = [Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"

    def hold(self) -> None:
        """Pass nothing on: from here to the `cut`, everything is under way."""
        self.held = False
        self._flowing.clear()

    def let_go(self) -> None:
        """Pass on what was held, and what comes."""
        self._flowing.set()

    def cut(self) -> None:
        with self._lock:
            connections, self._connections = self._connections, []
        for one in connections:
            with contextlib.suppress(OSError):  # it may have ended by itself
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # no goodbye: a reset
                one.shutdown(socket.SHUT_RDWR)
        self._flowing.set()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(self._target)
                with self._lock:
                    self._connections += [near, far]
                thread = Thread(target=self._serve, args=(near, far), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, near: socket.socket, far: socket.socket) -> None:
        back = Thread(target=self._pass, args=(far, near), daemon=True)
        back.start()
        self._pass(near, far)
        back.join()
        with self._lock:
            self._connections = [one for one in self._connections if one not in (near, far)]
        near.close()
        far.close()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if not self._flowing.is_set():
                    self.held = True
                self._flowing.wait(PATIENCE_S)
                sink.sendall(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


class PeerProcess:
    """`echo_peer.py` in a process of its own: answers every Goodbye with the same word."""

    def __init__(self, name: str, endpoint: str, *, secure: bool = False) -> None:
        script = Path(__file__).with_name("echo_peer.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), name, endpoint, "secure" if secure else "plain"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.endpoint = self.process.stdout.readline().strip()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
