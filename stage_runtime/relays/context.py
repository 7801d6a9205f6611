"""The parts that a relay is made with: the process's loop, name, arena and settings. Made by `dispatch.Relays`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from threading import local
from typing import Any, Literal, Protocol

import msgspec

from stage_runtime.relays.base import OnRelayFailed, OnRelease, Peer
from stage_runtime.relays.memory.arena import Arena
from stage_runtime.relays.memory.locking import MemoryLock


class SocketSecurity(Protocol):
    """The security of TCP sockets (`sockets.endpoints.addresses.Security`)."""

    def server(self, socket: Any) -> None:
        """Called before ``bind``."""

    def client(self, socket: Any) -> None:
        """Called before ``connect``."""

    def guard(self, context: Any) -> Any:
        """Admit members only to that context's server sockets. Returns something with ``stop()``."""


class SocketDoors(Protocol):
    """Lets no new peers in while few descriptors are left (`sockets.endpoints.doors.Doors`). It runs on the loop."""

    def add(self, endpoint: str) -> None:
        """It is bound."""

    def look(self) -> None:
        """A peer was let in."""

    def close(self) -> None:
        """Called before the socket is closed: it is not looked at any more."""


class RelaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and addresses of this process's relays."""

    named: frozenset[str] = frozenset()  #: Relays that the pipeline names; opened beside those of `auto`.
    allow_tcp: bool = True  #: False: what only the network's sockets could carry is refused.
    mooncake_protocol: Literal["tcp", "rdma"] | None = None  #: None: what there is a device for.
    rank: int | None = None  #: The rank in the NCCL world that the pipeline's author laid out.
    world_size: int | None = None
    rdma: tuple[str, ...] | None = None  #: RDMA devices to use; None: those that this process can open.
    memory_lock: MemoryLock | None = None  #: Memory that may be locked for them; None: what the kernel allows.
    pod: str = ""  #: The uid of this process's pod.
    gpus: tuple[int, ...] = ()  #: GPUs of this process's stages, as CUDA numbers them here.
    #: The bound of each GPU: most that may be in flight by cuda_ipc; the rest goes by the host.
    gpu_bytes: int = 512 << 20
    coordinator: bool = False  #: It is a coordinator, which uses the named relay where it can.
    arena_bytes: int = 4 << 30  #: Most that may be in flight by shm; taken from the machine only as it is used.
    prefault_bytes: int = 32 << 20  #: Arena pages taken at the start and kept.
    #: The address of the tcp relay: ``tcp://host:port`` (``*``: any) or ``ipc:///path``.
    bind: str = "tcp://127.0.0.1:*"
    advertise_host: str | None = None  #: The host that is advertised to peers, when ``bind`` has 0.0.0.0.
    piece_bytes: int = 4 << 20  #: The tcp relay cuts transfers over ``whole_bytes`` into pieces of this size.
    #: Up to here a tcp transfer is one frame, which the receiver need not copy. It is below 32 MiB: from there on
    #: glibc takes fresh pages from the system for each frame, at both ends.
    whole_bytes: int = 31 << 20
    unreleased_bytes: int = 2 << 30  #: The bound of tcp: put to all peers and not released; more has to wait.
    unclaimed_bytes: int = 1 << 30  #: The bound of tcp: arrived and not fetched; more is dropped and its request fails.
    unclaimed_s: float = 10.0  #: The deadline of tcp: what was not claimed by then is of a connection that broke.
    transfer_bytes: int = 8 << 30  #: A header with a larger transfer is garbage.
    room_s: float = 0.1  #: How often room is looked for while a put waits for it; nearly all comes with a Release.


class RelayContext(msgspec.Struct, frozen=True, kw_only=True):
    """The parts that a relay is made with."""

    loop: asyncio.AbstractEventLoop
    incarnation: Peer
    on_release: OnRelease  #: Called in any thread.
    failed: OnRelayFailed  #: Called in any thread, by a relay that does not reach a peer which may be alive.
    freed: Callable[[], None] = lambda: None  #: Called in any thread: room came back without a Release.
    thread: local  #: ``lets_go``: this thread drops received buffers now, and reports them next (`base.Relay.let_go`).
    ids: Iterator[int]  #: Transfer ids, shared by all relays of the process.
    arena: Arena
    rdma: tuple[str, ...] = ()  #: RDMA devices of this process.
    memory_lock: MemoryLock = MemoryLock()  #: Memory that a relay may register for them.
    security: SocketSecurity | None
    doors: SocketDoors | None = None  #: The doors of the tcp relay's socket.
    settings: RelaySettings
