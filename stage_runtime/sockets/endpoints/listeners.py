"""How many connections libzmq accepts at a listener before this process has looked at its descriptors again.

libzmq 4.3.5 accepts as long as somebody connects, in its own thread. It aborts the process at a Unix socket when no
descriptor is left for a connection, and at TCP it tries the same one again and again. It waits for connections by
epoll, whose entries belong to the whole process: `Listener` changes the entry of one listener so that the kernel
reports one connection (EPOLLONESHOT), or none. Others wait in the kernel's queue.

libzmq writes an entry when the listener is bound and deletes it when the socket is closed, and not in between. The
kernel shows the entries in ``/proc/self/fdinfo``. Nothing is found where it does not (gVisor), and libzmq accepts all.

Not here: how many descriptors are left, and what follows from it (`doors`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import select
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

_FDS: Final = Path("/proc/self/fd")
_INFOS: Final = Path("/proc/self/fdinfo")
_EPOLL: Final = "anon_inode:[eventpoll]"
_LOCAL: Final = "ipc://"
_ALL: Final = select.EPOLLIN  # as libzmq asks for
_ONE: Final = select.EPOLLIN | select.EPOLLONESHOT
_NONE: Final = select.EPOLLONESHOT
_MODIFY: Final = 3  # EPOLL_CTL_MOD


class _Event(ctypes.Structure):
    """Linux's ``struct epoll_event``, which is packed on x86-64 alone."""

    _pack_ = 1 if platform.machine() == "x86_64" else 8
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))


_libc = ctypes.CDLL(None, use_errno=True)


class Listener(NamedTuple):
    """A listener of libzmq's. Not to be used when its socket has been closed: its numbers may mean others by then."""

    epoll: int
    descriptor: int
    data: int  #: The value that libzmq gets from the kernel with its events.

    def accept_all(self) -> None:
        self._ask_for(_ALL)

    def accept_one(self) -> None:
        """The one that waits, or the next one that comes."""
        self._ask_for(_ONE)

    def accept_none(self) -> None:
        self._ask_for(_NONE)

    def _ask_for(self, events: int) -> None:
        event = _Event(events, self.data)
        _libc.epoll_ctl(self.epoll, _MODIFY, self.descriptor, ctypes.byref(event))


def find(endpoint: str) -> Listener | None:
    """libzmq's listener at an endpoint that this process has bound. None: libzmq's thread has not begun to wait for it,
    or the kernel shows no entries.
    """
    return next((entry for entry in _entries() if _is_at(entry.descriptor, endpoint)), None)


def _entries() -> Iterator[Listener]:
    for descriptor in os.listdir(_FDS):
        with contextlib.suppress(OSError):  # closed meanwhile, by another thread
            if os.readlink(_FDS / descriptor) == _EPOLL:
                for line in (_INFOS / descriptor).read_text().splitlines():
                    match line.split():
                        case ["tfd:", target, "events:", _, "data:", data, *_]:
                            yield Listener(int(descriptor), int(target), int(data, 16))


def _is_at(descriptor: int, endpoint: str) -> bool:
    with contextlib.suppress(OSError):  # it is not a socket
        borrowed = socket.socket(fileno=descriptor)
        try:
            if not borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return False
            name = borrowed.getsockname()
        finally:
            borrowed.detach()  # libzmq closes it
        if borrowed.family == socket.AF_UNIX:
            return endpoint == f"{_LOCAL}{name}"
        return endpoint.startswith("tcp://") and endpoint.rpartition(":")[2] == str(name[1])
    return False
