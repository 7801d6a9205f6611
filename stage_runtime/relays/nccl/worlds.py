"""A world of two processes, made by torch.distributed: rank 0 receives, rank 1 sends. Its death harms no other world.

The process's default group is not touched: authors may use it. Bytes go in pieces, so that progress is seen; a piece
that does not move within `STALL_S` ends the world. Methods block, without the GIL; they are for threads of the relay.
"""

from __future__ import annotations

import datetime
import socket
import time
from typing import Any, Final, Literal

from stage_runtime.errors import ConfigurationError

RECEIVER: Final = 0
SENDER: Final = 1
PIECE_NBYTES: Final = 16 << 20  # in STALL_S: 1.6 MB/s are enough to be no stalled transfer
STALL_S: Final = 10.0
JOIN_S: Final = 5.0
TAG: Final = 0
NO_TAG: Final = 1  #: Nothing is ever sent under it.
POLL_S: Final = 50e-6

Backend = Literal["gloo", "nccl"]


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


def gpu() -> str:
    """The device that NCCL would use here; empty when there is none."""
    import torch

    if not (torch.cuda.is_available() and distributed().is_nccl_available()):
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


class Store:
    """The TCPStore by which the worlds of one sender find each other; listens on a port of ``host``."""

    def __init__(self, host: str) -> None:
        """Raises: ConfigurationError: no such address is here."""
        dist = distributed()
        try:
            listening = socket.create_server((host, 0), family=_family(host))
        except OSError as error:
            raise ConfigurationError(f"relay 'nccl': {host}: {error}") from error
        self.port: int = listening.getsockname()[1]
        timeout = datetime.timedelta(seconds=JOIN_S)
        self._store = dist.TCPStore(
            host, self.port, None, True, timeout, wait_for_workers=False, master_listen_fd=listening.detach()
        )


class World:
    """One world, from `join` to `close`."""

    def __init__(self, group: Any, backend: Backend, other: int) -> None:
        self._group = group
        self._backend = backend
        self._other = other
        self._is_over = False

    @classmethod
    def join(cls, name: str, backend: Backend, rank: int, *, host: str, store: tuple[str, int]) -> World:
        """Be ``rank`` of the world ``name``, with the process that is the other rank. host: our own address.

        Raises: Broken: the other does not come.
        """
        dist = distributed()
        timeout = datetime.timedelta(seconds=JOIN_S)
        try:
            found = dist.TCPStore(store[0], store[1], None, False, timeout, wait_for_workers=False)
            prefixed = dist.PrefixStore(name, found)
            if backend == "nccl":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = datetime.timedelta(seconds=STALL_S)
                return cls(dist.ProcessGroupNCCL(prefixed, rank, 2, options), backend, 1 - rank)
            options = dist.ProcessGroupGloo._Options()
            options._timeout = timeout
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            return cls(dist.ProcessGroupGloo(prefixed, rank, 2, options), backend, 1 - rank)
        except RuntimeError as error:  # DistError is one
            raise Broken(str(error).partition("\n")[0]) from None

    def post_send(self, array: Any) -> Work:
        """Begin to send an array of bytes, which nothing may write to before `Work.wait`."""
        tensor = self._tensor(array)
        if self._backend == "nccl":
            tensor = tensor.cuda()
        return Work(self, self._begun(self._group.send, tensor, TAG), tensor, None)

    def post_receive(self, array: Any) -> Work:
        """Begin to receive into an array of bytes, which is written to until `Work.wait` returns or raises."""
        import torch

        tensor = self._tensor(array)
        target = torch.empty_like(tensor, device="cuda") if self._backend == "nccl" else tensor
        return Work(self, self._begun(self._group.recv, target, TAG), target, tensor)

    def abort(self) -> None:
        """End it: what waits in another thread raises `Broken`, and when that has happened nothing moves any more."""
        if self._is_over:
            return
        self._is_over = True
        group = self._group
        try:
            if self._backend == "nccl":
                group.abort()
            else:
                # Gloo has no abort. A receive that times out closes the connection, and with it ends all that waits.
                import torch

                late = group.recv([torch.zeros(1, dtype=torch.uint8)], self._other, NO_TAG)
                late.wait(datetime.timedelta(milliseconds=1))
        except RuntimeError:
            pass  # which is what is wanted of gloo; or it has ended before

    def _begun(self, call: Any, tensor: Any, tag: int) -> Any:
        if self._is_over:
            raise Broken("it was given up")
        try:
            return call([tensor], self._other, tag)
        except RuntimeError as error:
            raise Broken(str(error).partition("\n")[0]) from None

    def _tensor(self, array: Any) -> Any:
        import torch

        return torch.from_numpy(array)


class Work:
    """One piece on its way. The library lets go of its memory when this object dies, at the latest."""

    __slots__ = ("_host", "_tensor", "_work", "_world")

    def __init__(self, world: World, work: Any, tensor: Any, host: Any) -> None:
        """host: where a received tensor is copied to when it is another's."""
        self._world = world
        self._work = work
        self._tensor = tensor
        self._host = host

    def wait(self) -> None:
        """Raises: Broken: it does not move, or its peer is gone; the world is over then."""
        try:
            if self._world._backend == "gloo":
                self._work.wait(datetime.timedelta(seconds=STALL_S))
            else:
                self._poll()
        except RuntimeError as error:
            self._world.abort()
            raise Broken(_plain(str(error))) from None
        finally:
            self._work = None
        if self._host is not None and self._host is not self._tensor:
            self._host.copy_(self._tensor)

    def _poll(self) -> None:
        """Of NCCL, whose `wait` makes a stream wait, not this thread."""
        end = time.monotonic() + STALL_S
        while not self._work.is_completed():
            if time.monotonic() > end or self._world._is_over:
                raise RuntimeError("it does not move")
            time.sleep(POLL_S)
        self._work.wait()


def _plain(reason: str) -> str:
    """Without the library's source file and advice."""
    return reason.partition("\n")[0].partition("] ")[2].partition(". This is")[0] or reason[:200]


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
