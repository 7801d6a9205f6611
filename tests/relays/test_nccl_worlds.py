"""Worlds of NCCL, with a stand-in for torch.distributed: how they are made, and the order in which they end."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from stage_runtime.relays.nccl import worlds
from stage_runtime.relays.nccl.worlds import Broken, World

WATCHED = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING")


class Work:
    """The work of a piece that is through at once, or never."""

    def __init__(self, moves: bool) -> None:
        self.moves = moves

    def is_completed(self) -> bool:
        return self.moves

    def wait(self) -> None: ...


class Group:
    """A ProcessGroupNCCL that writes down what is asked of it."""

    def __init__(self, log: list[str], moves: bool = True, joins: threading.Event | None = None) -> None:
        self.log = log
        self.moves = moves
        self.joins = joins  #: Set when the other end has joined; None: it has.
        self.threads = list[str]()

    def send(self, tensors: list[Any], other: int, tag: int) -> Work:
        self.threads.append(threading.current_thread().name)
        if self.joins is not None:
            self.joins.wait()
        self.log.append(f"send {len(tensors[0])} on {tensors[0].device}")
        return Work(self.moves)

    recv = send

    def abort(self) -> None:
        self.log.append("abort")


class Distributed:
    """`torch.distributed` of a machine with GPUs."""

    def __init__(self) -> None:
        self.options: Any = None
        self.environment: dict[str, str | None] = {}
        outer = self

        class ProcessGroupNCCL(Group):
            class Options:
                _timeout: timedelta | None = None

            def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
                super().__init__([])
                outer.options = options
                outer.environment = {name: os.environ.get(name) for name in WATCHED}

        self.ProcessGroupNCCL = ProcessGroupNCCL

    def TCPStore(self, *_: Any, **__: Any) -> object:
        return object()

    def PrefixStore(self, name: str, store: Any) -> object:
        return object()


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


def world(group: Group, stall_s: float = 60.0) -> World:
    return World(group, "nccl", 1, device="cpu", stall_s=stall_s)


@pytest.mark.parametrize("author", [None, "1"])
def test_torch_s_watchdog_ends_no_process_for_a_world_that_stalls(
    author: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the process when an operation takes longer than the group's time. Our own deadlines are shorter."""
    for name in WATCHED:
        monkeypatch.delenv(name, raising=False)
        if author is not None:
            monkeypatch.setenv(name, author)
    dist = Distributed()
    World.join("w", "nccl", 0, host="127.0.0.1", store=("127.0.0.1", 1), device="cpu", dist=dist).abort()
    assert dist.options._timeout == timedelta(hours=1)
    assert dist.environment == dict.fromkeys(WATCHED, "0")
    assert {name: os.environ.get(name) for name in WATCHED} == dict.fromkeys(WATCHED, author)


def test_a_peer_is_disconnected_before_a_world_that_stalls_is_aborted(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    """An abort that comes first is an error in the peer's library, which may end the peer."""
    ours, theirs = connection
    log = list[str]()

    class Watching(Group):
        def abort(self) -> None:
            log.append(f"abort after {theirs.recv(1)!r}")

    theirs.setblocking(False)
    sending = world(Watching(log, moves=False), stall_s=0.05)
    with pytest.raises(Broken, match="does not move"):
        list(sending.send(np.ones(9, np.uint8), ours, 9))
    assert log == ["send 9 on cpu", "abort after b''"]


def test_a_peer_that_does_not_join_ends_the_world_and_not_its_thread(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    """NCCL makes its communicator in the first send, and waits there for the other end, without a limit."""
    ours, theirs = connection
    joins = threading.Event()
    log = list[str]()
    group = Group(log, joins=joins)
    sending = world(group, stall_s=0.05)
    with pytest.raises(Broken, match="does not join"):
        list(sending.send(np.ones(9, np.uint8), ours, 9))
    assert theirs.recv(1) == b"" and log == []
    sending.abort()
    assert log == []  # not while the library is in a call
    joins.set()
    for thread in threading.enumerate():
        if thread.name in group.threads:
            thread.join()
    assert log == ["send 9 on cpu", "abort"]


def test_pieces_of_a_world_that_has_joined_are_begun_where_they_are_asked_for(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    group = Group([])
    sending = world(group)
    assert list(sending.send(np.ones(3, np.uint8), connection[0], 2)) == [2, 1]
    assert list(sending.receive(np.zeros(5, np.uint8), connection[0], 9)) == [5]
    assert group.threads[1] == threading.current_thread().name != group.threads[0]
    sending.abort()
    assert group.log[-1] == "abort"


class Cuda:
    """`torch.cuda`."""

    def __init__(self, available: bool = True) -> None:
        self.available = available

    def is_available(self) -> bool:
        return self.available

    def current_device(self) -> int:
        return 0

    def get_device_properties(self, number: int) -> Any:
        return type("Properties", (), {"uuid": f"GPU-{number}"})


class Torch:
    def __init__(self, available: bool = True) -> None:
        self.cuda = Cuda(available)


@pytest.mark.parametrize(
    ("gpus", "available", "announced"),
    [((), True, ""), ((1,), True, "GPU-1"), ((2, 3), True, "GPU-2"), ((1,), False, "")],
)
def test_nccl_s_gpu_is_that_of_the_process_s_stage(gpus: tuple[int, ...], available: bool, announced: str) -> None:
    assert worlds.gpu(gpus, torch=Torch(available), has_nccl=True) == announced
    assert worlds.gpu(gpus, torch=Torch(available), has_nccl=False) == ""
