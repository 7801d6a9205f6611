"""A world of two processes, made by torch.distributed: rank 0 receives, rank 1 sends. Its death harms no other world.

The process's default group is not touched: authors may use it. Bytes go in pieces, so that progress is seen; a piece
that does not move within `STALL_S` ends the world. Methods block, without the GIL; they are for threads of the relay.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import datetime
import functools
import importlib
import os
import queue
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal

from stage_runtime.errors import ConfigurationError
from stage_runtime.rules.flow.watched_time import WatchedTime

RECEIVER: Final = 0
SENDER: Final = 1
PIECES: Final = 2  # of a transfer, under way at once
STALL_S: Final = 10.0
JOIN_S: Final = 5.0
TAG: Final = 0
NO_TAG: Final = 1  #: Nothing is ever sent under it.
POLL_S: Final = 50e-6
#: Time after which torch's watchdog takes a world of NCCL for dead. It is longer than every wait here, because the
#: watchdog's action would concern the whole process.
WATCHDOG: Final = datetime.timedelta(hours=1)
#: It is not to end the process, nor is the thread that watches it. Read when a group is made, which any of the process
#: may be: set for the moment that takes.
UNWATCHED: Final = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}

_environment = threading.Lock()

CollectiveBackend = Literal["gloo", "nccl"]

_callers: Final[weakref.WeakSet[threading.Thread]] = weakref.WeakSet()


def caller(name: str, target: Callable[..., None], *arguments: object) -> threading.Thread:
    """A thread that calls the library. The process's end waits for it."""
    made = threading.Thread(target=target, args=arguments, name=f"omni-relay-nccl-{name}", daemon=True)
    _callers.add(made)
    return made


@atexit.register
def _settle() -> None:
    """Wait for threads that are in a call of the library: the interpreter's end would end them, and so the process.
    Those of a relay were ended when it was closed, but may be in a call that has no other end than its time.
    """
    deadline = time.monotonic() + STALL_S + JOIN_S
    for thread in list(_callers):
        if thread.is_alive():
            thread.join(max(deadline - time.monotonic(), 0.0))


class Broken(Exception):
    """The world has ended, and its peer with it or not."""


def distributed() -> Any:
    """torch.distributed.

    Raises: ConfigurationError: torch is not installed, or was built without it.
    """
    install = "pip install 'omnipipeline[runtime]'"
    try:
        import torch.distributed as found
    except ImportError as error:
        raise ConfigurationError(f"relay 'nccl' cannot be loaded ({error}): {install}") from error
    if not (found.is_available() and found.is_gloo_available()):
        raise ConfigurationError(f"relay 'nccl': this torch was built without gloo: {install}")
    return found


def gpu(gpus: Sequence[int], *, torch: Any = None, has_nccl: bool | None = None) -> str:
    """The UUID of the GPU that NCCL uses here: the first of the stages' (``gpus``), not torch's current one, which is
    GPU 0 in every thread. Empty: none. torch, has_nccl: as installed.
    """
    torch = torch or importlib.import_module("torch")
    if not gpus or not torch.cuda.is_available():
        return ""
    if not (distributed().is_nccl_available() if has_nccl is None else has_nccl):
        return ""
    return str(torch.cuda.get_device_properties(gpus[0]).uuid)


def device(gpus: Sequence[int]) -> str:
    """torch's name of that GPU."""
    return f"cuda:{gpus[0]}" if gpus else "cpu"


class WorldStore:
    """The TCPStore by which the worlds of one sender find each other; listens on a port of ``host``."""

    def __init__(self, host: str) -> None:
        """Raises: ConfigurationError: no such address is here."""
        dist = distributed()
        try:
            listening = socket.create_server((host, 0), family=_family(host), dualstack_ipv6=host == "::")
        except OSError as error:
            raise ConfigurationError(f"relay 'nccl': {host}: {error}") from error
        self.port: int = listening.getsockname()[1]
        timeout = datetime.timedelta(seconds=JOIN_S)
        self._store = dist.TCPStore(
            host, self.port, None, True, timeout, wait_for_workers=False, master_listen_fd=listening.detach()
        )


class World:
    """One world, from `join` to `abort`, of one thread. Gloo's waits cannot be ended from outside, so another thread
    has them.
    """

    def __init__(
        self, group: Any, backend: CollectiveBackend, other: int, *, device: str = "cpu", stall_s: float = STALL_S
    ) -> None:
        """device: of NCCL, the GPU that it uses here."""
        self._group = group
        self._backend = backend
        self._other = other
        self._device = device if backend == "nccl" else "cpu"
        self._stall_s = stall_s
        self._is_joined = backend != "nccl"  #: Its first send or receive has completed: the other end is there.
        self._is_over = False
        self._works: queue.SimpleQueue[PieceTransfer | None] = queue.SimpleQueue()
        #: A byte for each piece that is over, in the order in which they began.
        self._over, self._ended = socket.socketpair()
        caller("wait", self._wait).start()

    @classmethod
    def join(
        cls,
        name: str,
        backend: CollectiveBackend,
        rank: int,
        *,
        host: str,
        store: tuple[str, int],
        device: str = "cpu",
        dist: Any = None,
    ) -> World:
        """Be ``rank`` of the world ``name``, with the process that is the other rank. host: our own address. device:
        of NCCL, the GPU. dist: torch.distributed.

        Raises: Broken: the other does not come.
        """
        dist = dist or distributed()
        timeout = datetime.timedelta(seconds=JOIN_S)
        try:
            found = dist.TCPStore(store[0], store[1], None, False, timeout, wait_for_workers=False)
            prefixed = dist.PrefixStore(name, found)
            if backend == "nccl":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = WATCHDOG
                with _unwatched():
                    group = dist.ProcessGroupNCCL(prefixed, rank, 2, options)
                return cls(group, backend, 1 - rank, device=device)
            options = dist.ProcessGroupGloo._Options()
            options._timeout = timeout
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            return cls(dist.ProcessGroupGloo(prefixed, rank, 2, options), backend, 1 - rank)
        except RuntimeError as error:  # DistError is one
            raise Broken(_plain(str(error))) from None

    def send(self, array: Any, connection: socket.socket, piece_nbytes: int) -> Iterator[int]:
        """Send an array of bytes, which nothing may write to meanwhile. Yields the size of each completed piece.

        connection: to the other rank; its end is the world's. piece_nbytes: as at the other rank.
        Raises: Broken: it does not move, or its peer is gone; the world is over, and nothing is read any more.
        """
        return self._pieces(self._send, array, connection, piece_nbytes)

    def receive(self, array: Any, connection: socket.socket, piece_nbytes: int) -> Iterator[int]:
        """The same as `send`, but it receives into an array of bytes."""
        return self._pieces(self._receive, array, connection, piece_nbytes)

    def abort(self) -> None:
        """End it. When this returns, the library neither reads nor writes memory for it."""
        if self._is_over:
            return
        self._give_up()
        if self._backend == "nccl":
            self._group.abort()
        else:
            self._abort_gloo()
        # Gloo's threads end with it. One that still held a tensor when the interpreter ends would abort the process.
        self._group = None

    def _give_up(self) -> None:
        self._is_over = True
        self._works.put(None)
        self._over.close()
        self._ended.close()

    def _end(self, connection: socket.socket) -> None:
        """`abort`, after closing the peer's connection: what it waits for fails before its library meets an error."""
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        self.abort()

    def _abort_gloo(self) -> None:
        """Gloo has no abort. A receive that times out closes the connection; a further one raises when that is done."""
        import torch

        nothing = torch.zeros(1, dtype=torch.uint8, device="cpu")
        while True:
            try:
                self._group.recv([nothing], self._other, NO_TAG).wait(datetime.timedelta(milliseconds=1))
            except RuntimeError as error:
                if "Timed out" not in str(error):
                    return

    def _pieces(
        self,
        begin: Callable[[Any, socket.socket], PieceTransfer],
        array: Any,
        connection: socket.socket,
        piece_nbytes: int,
    ) -> Iterator[int]:
        works: collections.deque[PieceTransfer] = collections.deque()
        try:
            for start in range(0, len(array), piece_nbytes):
                works.append(begin(array[start : start + piece_nbytes], connection))
                if len(works) == PIECES:
                    yield self._through(works.popleft(), connection)
            while works:
                yield self._through(works.popleft(), connection)
        finally:
            if works:
                self._end(connection)

    def _through(self, work: PieceTransfer, connection: socket.socket) -> int:
        """Wait for the oldest piece. Returns: its size."""
        looking = select.poll()
        looking.register(self._over, select.POLLIN)
        looking.register(connection, select.POLLRDHUP)
        if self._over.fileno() not in {descriptor for descriptor, _ in looking.poll()}:
            self._end(connection)
            raise Broken("the connection was closed")
        self._over.recv(1)
        if work.reason is not None:
            self._end(connection)
            raise Broken(work.reason)
        return work.take()

    def _send(self, array: Any, connection: socket.socket) -> PieceTransfer:
        import torch

        return self._begun("send", torch.from_numpy(array).to(self._device), None, connection)

    def _receive(self, array: Any, connection: socket.socket) -> PieceTransfer:
        import torch

        tensor = torch.from_numpy(array)
        if self._backend == "nccl":
            return self._begun("recv", torch.empty_like(tensor, device=self._device), tensor, connection)
        return self._begun("recv", tensor, None, connection)

    def _begun(self, call: Literal["send", "recv"], tensor: Any, host: Any, connection: socket.socket) -> PieceTransfer:
        if self._is_over:
            raise Broken("it was given up")
        begin = functools.partial(getattr(self._group, call), [tensor], self._other, TAG)
        try:
            begun = begin() if self._is_joined else self._first(begin, connection)
        except RuntimeError as error:
            self._end(connection)
            raise Broken(_plain(str(error))) from None
        work = PieceTransfer(begun, tensor, host)
        self._works.put(work)
        return work

    def _first(self, begin: Callable[[], Any], connection: socket.socket) -> Any:
        """NCCL makes its communicator in the first call, and waits there for the other end, which may have died: the
        call has a thread of its own. One that is late is left to it, with the GPU's memory and the group; no memory of
        the host is in it.

        Raises: Broken: the other end does not come. RuntimeError: the library's.
        """
        results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        lock = threading.Lock()
        late = False
        group = self._group

        def run() -> None:
            try:
                found = begin()
            except RuntimeError as error:
                found = error
            with lock:
                results.put(found)
                ends = late
            if ends:
                group.abort()

        caller("first", run).start()
        try:
            found = results.get(timeout=self._stall_s)
        except queue.Empty:
            with lock:
                late = results.empty()
            if late:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                self._give_up()
                self._group = None
                raise Broken("its other end does not join") from None
            found = results.get()
        if isinstance(found, RuntimeError):
            raise found
        self._is_joined = True
        return found

    # --- in its other thread --------------------------------------------------------------------------------------

    def _wait(self) -> None:
        while (work := self._works.get()) is not None:
            work.wait(self._poll if self._backend == "nccl" else self._wait_for)
            del work
            try:
                self._ended.send(b"\0")
            except OSError:  # it was aborted
                return

    def _wait_for(self, work: Any) -> None:
        work.wait(datetime.timedelta(seconds=STALL_S))

    def _poll(self, work: Any) -> None:
        """Poll a work of NCCL, whose `wait` makes a stream wait, not this thread."""
        watched, past = WatchedTime(time.monotonic(), POLL_S), 0.0
        while not work.is_completed():
            past += watched.look(time.monotonic())
            if past > self._stall_s or self._is_over:
                raise RuntimeError("it does not move")
            time.sleep(POLL_S)
        work.wait()


class PieceTransfer:
    """One piece on its way."""

    def __init__(self, work: Any, tensor: Any, host: Any) -> None:
        """host: where a received tensor is copied to; None: it is there already."""
        self.reason: str | None = None  #: Why it did not come through.
        self._work = work
        self._tensor = tensor
        self._host = host

    def wait(self, wait: Callable[[Any], None]) -> None:
        """Waits until the piece has completed or failed. The world's other thread calls it."""
        try:
            wait(self._work)
        except RuntimeError as error:
            self.reason = _plain(str(error))
        self._work = None

    def take(self) -> int:
        """It has completed. Returns: its size."""
        if self._host is not None:
            self._host.copy_(self._tensor)
        return len(self._tensor)


@contextlib.contextmanager
def _unwatched() -> Iterator[None]:
    with _environment:
        before = {name: os.environ.get(name) for name in UNWATCHED}
        os.environ.update(UNWATCHED)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _plain(reason: str) -> str:
    """An error's text without the library's source file and advice."""
    return reason.partition("\n")[0].partition("] ")[2].partition(". This is")[0] or reason[:200]


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
