"""Sockets of a program's own processes on one machine: an engine, its clients, its coordinator. Frames in and out.

Here: ZeroMQ and file descriptors. Not here: what frames mean (`engines.autoregressive.process`), nor the control plane
between the instances of a pipeline (`channels`, `links`). A folder that only this user may enter is all the security.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from typing import Final, Literal, TypeAlias

import zmq

from stage_runtime import settings
from stage_runtime.errors import PeerError
from stage_runtime.sockets.endpoints.addresses import check
from stage_runtime.sockets.endpoints.opening import closed_on_failure

SocketKind: TypeAlias = Literal["ROUTER", "DEALER", "PUSH", "PULL", "XPUB", "XSUB"]
Buffer: TypeAlias = bytes | bytearray | memoryview

LAST_WORDS_MS: Final = 4000  # for frames that were given to a socket before it was closed
FRAME_MOST: Final = 1 << 31  # bytes of one frame
QUEUED_MOST: Final = 100_000  # messages; libzmq's own 1000 refuses a burst while the peer's thread has no processor
COPY_BELOW: Final = 1 << 16  # bytes; below, libzmq's bookkeeping of a shared buffer costs more than a copy


class FrameSocket:
    """One socket. One thread at a time uses it."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.raw = socket

    def send(self, frames: Sequence[Buffer], *, track: bool = False, block: bool = False) -> zmq.MessageTracker | None:
        """Send one message; long frames are not copied.

        track: Returns what says when no frame is read any more; None: all were copied.
        Raises: PeerError: the peer is gone, or reads nothing, and ``block`` is false.
        """
        parts: list[bytes | zmq.Frame] = []
        shared: list[zmq.Frame] = []
        for frame in frames:
            if len(frame) < COPY_BELOW:
                parts.append(bytes(frame))
            else:
                whole = zmq.Frame(frame, track=track, copy=False)
                parts.append(whole)
                shared.append(whole)
        try:
            self.raw.send_multipart(parts, 0 if block else zmq.NOBLOCK, copy=not shared)
        except zmq.Again as error:
            raise PeerError("the other process reads nothing") from error
        except zmq.ZMQError as error:
            raise PeerError(f"the other process is gone: {error}") from error
        # A tracker of each shared frame: that of the message alone would be the last frame's.
        return zmq.MessageTracker(*shared) if track and shared else None

    def receive(self) -> list[memoryview] | None:
        """The frames of the next message; None: none waits."""
        try:
            return [frame.buffer for frame in self.raw.recv_multipart(zmq.NOBLOCK, copy=False)]
        except zmq.Again:
            return None

    def fileno(self) -> int:
        """Readable at an edge: read until nothing is left."""
        return int(self.raw.getsockopt(zmq.FD))

    def subscribe(self) -> None:
        """Subscribe an XSUB to all that is published."""
        self.raw.send(b"\x01")

    def close(self, *, linger_ms: int = 0) -> None:
        self.raw.close(linger=linger_ms)


class SocketContext:
    """The sockets of one process."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)

    def bind(self, kind: SocketKind, endpoint: str) -> FrameSocket:
        socket = self._make(kind)
        with closed_on_failure(socket):
            socket.bind(check(endpoint))
        return FrameSocket(socket)

    def connect(self, kind: SocketKind, endpoint: str, *, identity: bytes | None = None) -> FrameSocket:
        socket = self._make(kind)
        with closed_on_failure(socket):
            if identity is not None:
                socket.identity = identity
            socket.connect(check(endpoint))
        return FrameSocket(socket)

    def _make(self, kind: SocketKind) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(getattr(zmq, kind))
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = QUEUED_MOST
        socket.maxmsgsize = FRAME_MOST
        if kind == "ROUTER":
            socket.router_mandatory = True  # else frames to a peer that is gone are dropped silently
            socket.router_handover = True  # a peer that takes the place of one that was killed is not a duplicate of it
        if kind == "XPUB":
            socket.xpub_verbose = True  # reports each subscriber, not only the first one
        return socket

    def close(self) -> None:
        """Called after its sockets are closed. Waits until their last messages are sent."""
        self._context.term()


class Poller:
    """Waits for sockets and descriptors."""

    def __init__(self, *sources: FrameSocket | int) -> None:
        self._poller = zmq.Poller()
        for source in sources:
            self.register(source)

    def register(self, source: FrameSocket | int) -> None:
        self._poller.register(source.raw if isinstance(source, FrameSocket) else source, zmq.POLLIN)

    def unregister(self, source: FrameSocket | int) -> None:
        self._poller.unregister(source.raw if isinstance(source, FrameSocket) else source)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether one of them is readable. It returns at once if one is already."""
        return bool(self._poller.poll(None if timeout_s is None else max(int(timeout_s * 1000 + 0.999), 0)))


class Folder:
    """A folder for socket files, which is needed until all have connected."""

    def __init__(self) -> None:
        where, prefix = settings.socket_folders(os.environ)
        self._path = tempfile.mkdtemp(prefix=prefix, dir=where)  # mode 0700
        self._count = 0

    def endpoint(self) -> str:
        self._count += 1
        return f"ipc://{self._path}/{self._count}"

    def file(self, name: str) -> str:
        """A path in it, of a file that another program makes."""
        return f"{self._path}/{name}"

    def remove(self) -> None:
        """Connections that exist stay."""
        shutil.rmtree(self._path, ignore_errors=True)


def wait_for_exit(descriptors: Iterable[int], timeout_s: float) -> bool:
    """Wait until the processes behind these pidfds have ended. False: not in time."""
    left = set(descriptors)
    poller = zmq.Poller()
    for one in left:
        poller.register(one, zmq.POLLIN)
    deadline = time.monotonic() + timeout_s
    while left:
        ended = poller.poll(max(int((deadline - time.monotonic()) * 1000), 0))
        if not ended:
            return False
        for one, _ in ended:
            poller.unregister(one)
            left.discard(int(one))
    return True
