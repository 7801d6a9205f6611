"""The right to free blocks while keys and values cross between engines, and how far a room is. Pure.

A decode engine takes blocks for a prompt before it asks for it (`Loads`), and keeps them until the request is scheduled
or ends. A prefill engine keeps what it has not copied out (`BlockPool.pin`). A block that has come is known by the hash
of all tokens up to its end, as one that was computed here; so the scheduler finds it as it finds any prefix, and what
has not come is computed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum, IntEnum
from typing import Final

from stage_runtime.errors import IllegalEvent
from stage_runtime.rules.autoregressive.blocks import BlockPool


class KVPoll(IntEnum):
    """How far one room is, as either side sees it."""

    Failed = 0
    Bootstrapping = 1  #: Opened; nobody has said which blocks.
    WaitingForInput = 2  #: The blocks are known, none has crossed.
    Transferring = 3
    Success = 4


class RoomEvent(Enum):
    INIT = "init"  #: Decode has asked, or prefill knows how many blocks are wanted.
    MOVED = "moved"  #: A piece was sent, or has come and was accepted.
    COMPLETE = "complete"  #: The last one was.
    FAILED = "failed"


ROOM: Final[dict[tuple[KVPoll, RoomEvent], KVPoll]] = {
    (KVPoll.Bootstrapping, RoomEvent.INIT): KVPoll.WaitingForInput,
    (KVPoll.Bootstrapping, RoomEvent.FAILED): KVPoll.Failed,
    (KVPoll.WaitingForInput, RoomEvent.MOVED): KVPoll.Transferring,
    (KVPoll.WaitingForInput, RoomEvent.FAILED): KVPoll.Failed,
    (KVPoll.Transferring, RoomEvent.MOVED): KVPoll.Transferring,
    (KVPoll.Transferring, RoomEvent.COMPLETE): KVPoll.Success,
    (KVPoll.Transferring, RoomEvent.FAILED): KVPoll.Failed,
}


def moved(state: KVPoll, event: RoomEvent) -> KVPoll:
    """Raises: IllegalEvent: the table does not list it."""
    after = ROOM.get((state, event))
    if after is None:
        raise IllegalEvent("room", f"{event.value} while it is {state.name}", ())
    return after


class LoadStatus(Enum):
    WAITING = "waiting"  #: The state that waits for room: it has no blocks.
    LOADING = "loading"  #: Others write into its blocks.
    LOADED = "loaded"  #: Nothing more comes. The blocks are kept for the request.


class Load:
    """The blocks of one request that come from afar. Changed by `Loads` alone."""

    __slots__ = ("blocks", "filled", "first", "hashes", "request_id", "status", "total")

    def __init__(self, request_id: str, hashes: Sequence[bytes], total: int) -> None:
        """hashes: of the prompt's first blocks, those included that are here. total: blocks of the whole prompt."""
        self.request_id = request_id
        self.hashes = list(hashes)
        self.total = total
        self.first = 0  #: Blocks before this one are here already.
        self.blocks: list[int] = []  #: Blocks of ``hashes``, in order; empty while it waits.
        self.filled: set[int] = set()  #: Indices that have come.
        self.status = LoadStatus.WAITING

    @property
    def missing(self) -> range:
        """Indices of the blocks that are asked for."""
        return range(self.first, len(self.hashes))

    @property
    def complete(self) -> bool:
        return len(self.filled) == len(self.missing)


class Loads:
    """Loads of all requests of a decode engine.

    Invariants: the prompts of all loads with blocks fit the pool together, so that each of them can be begun when
    nothing else runs. A block of a load has this one as a user until `end`.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._loads: dict[str, Load] = {}
        self._loading: dict[bytes, str] = {}  #: Content that is on its way, and for whom.

    def __len__(self) -> int:
        return len(self._loads)

    def __iter__(self) -> Iterator[Load]:
        return iter(list(self._loads.values()))

    def get(self, request_id: str) -> Load | None:
        return self._loads.get(request_id)

    def loader(self, content: bytes) -> str | None:
        """The request for which a block with this content is on its way."""
        return self._loading.get(content)

    def add(self, load: Load) -> None:
        """Raises: IllegalEvent: its request has one."""
        if load.request_id in self._loads:
            raise IllegalEvent(f"request {load.request_id}", "loaded twice", ())
        self._loads[load.request_id] = load
        for content in load.hashes:
            self._loading.setdefault(content, load.request_id)

    def start(self, spare: int = 0) -> list[Load]:
        """Take blocks for those that wait, in their order, as far as there is room. spare: blocks left to others.

        Returns: the loads that may begin; one that misses nothing any more is complete.
        """
        reserved = sum(one.total for one in self._loads.values() if one.status is not LoadStatus.WAITING)
        started = []
        for load in self._loads.values():
            if load.status is not LoadStatus.WAITING:
                continue
            found = self._pool.find(load.hashes)
            fresh = len(load.hashes) - len(found)
            fits = reserved + load.total <= self._pool.capacity
            if not fits or self._pool.need(found, fresh) + spare > self._pool.free:
                break
            self._pool.share(found)
            load.blocks = [*found, *self._pool.take(fresh)]
            load.first, load.status = len(found), LoadStatus.LOADING
            reserved += load.total
            started.append(load)
        return started

    def fill(self, load: Load, first: int, count: int) -> None:
        """Its blocks ``first .. first + count`` were written. They are not known before `finish`.

        Raises: IllegalEvent: one of them was not asked for, or has come before; nothing is changed then.
        """
        indices = range(first, first + count)
        strange = [one for one in indices if one not in load.missing or one in load.filled]
        if load.status is not LoadStatus.LOADING or strange or not indices:
            raise IllegalEvent(f"request {load.request_id}", f"blocks {first} to {first + count} have come", ())
        load.filled.update(indices)

    def finish(self, load: Load, *, believed: bool = True) -> None:
        """Nothing more comes: what has come is known by its hashes now, and kept until the request is begun.

        believed: False: something of it was wrong, so nothing of it is used.
        """
        if not believed:
            load.filled.clear()
        for index in load.filled:
            self._pool.cache(load.blocks[index], load.hashes[index])
        load.status = LoadStatus.LOADED
        self._forget(load)

    def end(self, request_id: str) -> Load | None:
        """The request has its blocks by itself, or has ended. No write may be under way: see `KVLoads`."""
        load = self._loads.pop(request_id, None)
        if load is None:
            return None
        self._forget(load)
        self._pool.release(load.blocks)
        load.blocks = []
        return load

    def let_go(self) -> bool:
        """Nothing runs, and the next request finds no room: give up what is kept. Returns: whether there was any.

        Blocks that have come stay known until its blocks are taken, and is computed again after that.
        """
        kept = [one.request_id for one in self._loads.values() if one.status is LoadStatus.LOADED]
        for request_id in kept:
            self.end(request_id)
        return bool(kept)

    def _forget(self, load: Load) -> None:
        for content in load.hashes:
            if self._loading.get(content) == load.request_id:
                del self._loading[content]
