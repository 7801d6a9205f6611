"""The mooncake relay reads its gets in turns: few threads, and a frozen peer takes none from the others."""

from __future__ import annotations

import asyncio
import collections
import ctypes
import threading
import time
from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.relays.base import Peer, TransferId
from stage_runtime.relays.memory.arena import HEADER, Arena
from stage_runtime.relays.memory.pins import Pins
from stage_runtime.relays.mooncake.engine import ReadId, ReadState
from stage_runtime.relays.mooncake.mooncake_messages import MooncakeFacts, MooncakeMemory, MooncakeMetadata
from stage_runtime.relays.mooncake.reading import MOST_THREADS, THREADS, MooncakeGet, MooncakeReader, MooncakeRoute
from stage_runtime.relays.mooncake.turns import STALL_S, Turns
from stage_runtime.relays.moving.pending_transfers import GetOperation, TransferCompletion

GENERATION = 7
NBYTES = 4096


@dataclass(eq=False)
class Sender:
    """A peer, of whom something came at that time."""

    moved_at: float = 0.0


def begun(turns: Turns[Sender, str], now: float) -> list[str]:
    return [get for _, get in turns.begin(now)]


def test_as_many_as_there_are_threads_are_read_at_once_and_the_next_when_one_is_over() -> None:
    turns: Turns[Sender, str] = Turns(moving=2, most=4)
    peer = Sender()
    for name in "abc":
        turns.add(peer, name)
    assert begun(turns, 100.0) == ["a", "b"]
    assert begun(turns, 100.0) == []
    turns.over(peer)
    assert begun(turns, 100.0) == ["c"]


def test_peers_take_turns() -> None:
    turns: Turns[Sender, str] = Turns(moving=2, most=4)
    one, other = Sender(), Sender()
    for name in "ab":
        turns.add(one, name)
    turns.add(other, "x")
    assert begun(turns, 100.0) == ["a", "x"]


def test_peers_of_which_nothing_comes_leave_the_threads_to_others_and_get_no_more() -> None:
    turns: Turns[Sender, str] = Turns(moving=2, most=4)
    frozen, other = Sender(), Sender()
    for name in "abc":
        turns.add(frozen, name)
    assert begun(turns, 100.0) == ["a", "b"]
    turns.add(other, "x")
    assert begun(turns, 100.0 + STALL_S) == []  # it may only be slow
    assert begun(turns, 100.1 + STALL_S) == ["x"]
    frozen.moved_at = 102.0  # it goes on
    assert begun(turns, 102.0) == []
    turns.over(frozen)
    turns.over(frozen)
    assert begun(turns, 102.0) == ["c"]


def test_the_threads_of_frozen_peers_are_limited() -> None:
    turns: Turns[Sender, str] = Turns(moving=2, most=4)
    for turn in range(3):
        peer = Sender()
        turns.add(peer, "a")
        turns.add(peer, "b")
        assert len(begun(turns, 100.0 * turn)) == (2, 2, 0)[turn]


def test_what_is_withdrawn_has_no_turn() -> None:
    turns: Turns[Sender, str] = Turns(moving=1, most=1)
    one, other = Sender(), Sender()
    for peer, name in ((one, "a"), (one, "b"), (other, "x")):
        turns.add(peer, name)
    assert turns.withdraw(lambda peer, _: peer is one) == [(one, "a"), (one, "b")]
    assert begun(turns, 0.0) == ["x"]
    assert not turns


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["add", "begin", "over", "move"]), st.integers(0, 2), st.floats(0, 1)), max_size=80
    )
)
def test_every_get_has_one_turn_in_its_peers_order_and_threads_are_never_more_than_allowed(
    steps: list[tuple[str, int, float]],
) -> None:
    turns: Turns[Sender, int] = Turns(moving=2, most=3)
    peers = [Sender() for _ in range(3)]
    added: dict[Sender, list[int]] = {peer: [] for peer in peers}
    seen: dict[Sender, list[int]] = {peer: [] for peer in peers}
    reads: collections.Counter[Sender] = collections.Counter()
    now = 0.0
    for number, (step, index, seconds) in enumerate(steps):
        peer = peers[index]
        now += seconds
        if step == "add":
            turns.add(peer, number)
            added[peer].append(number)
        elif step == "begin":
            for way, get in turns.begin(now):
                seen[way].append(get)
                reads[way] += 1
            assert reads.total() <= 3
        elif step == "over" and reads[peer]:
            turns.over(peer)
            reads[peer] -= 1
        elif step == "move":
            peer.moved_at = now
        assert [turns.reads(one) for one in peers] == [reads[one] for one in peers]
    for peer in peers:
        assert seen[peer] == added[peer][: len(seen[peer])]
    assert bool(turns) == (seen != added)


class Sessions:
    """Stands in for Mooncake's engine: what is begun is here, but a frozen session lets nobody connect."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.stuck: list[str] = []

    def begin(self, session: str, ours: int, theirs: int, nbytes: int) -> ReadId:
        if session.startswith("frozen"):
            self.stuck.append(session)
            self.go_on.wait()
        if nbytes == HEADER.size:
            HEADER.pack_into((ctypes.c_char * nbytes).from_address(ours), 0, GENERATION, 0)
        return ReadId(1)

    def state(self, read: ReadId) -> ReadState:
        return ReadState.HERE


class Gets:
    """A `MooncakeReader` of stand-in sessions."""

    def __init__(self) -> None:
        self.sessions = Sessions()
        self.released: list[tuple[str, int]] = []
        loop = asyncio.get_running_loop()
        arena = Arena(64 << 20)
        release: Any = lambda peer, transfer: self.released.append((peer, transfer))  # noqa: E731
        engine: Any = self.sessions
        self.reading = MooncakeReader(loop, engine, arena, Pins(loop, release, threading.local()), release)
        self._transfers = 0

    def route(self, name: str) -> MooncakeRoute:
        return MooncakeRoute(Peer(name), MooncakeFacts(f"{name}:1", MooncakeMemory(0, 1 << 30)))

    def fetch(self, route: MooncakeRoute, request: str = "r") -> GetOperation:
        self._transfers += 1
        transfer = TransferId(self._transfers)
        key = (route.peer, transfer)
        operation = GetOperation(
            TransferCompletion(asyncio.get_running_loop()),
            transfer,
            route.peer,
            b"",
            lambda: self.reading.last_moved(route, key),
        )
        metadata = MooncakeMetadata(transfer, 0, 64, NBYTES, GENERATION)
        self.reading.claim(route, MooncakeGet(operation, metadata, request, ""))
        return operation

    async def close(self) -> None:
        self.sessions.go_on.set()
        while not self.reading.still:
            await asyncio.sleep(0)
        self.reading.close()


async def test_a_frozen_peer_that_has_all_threads_holds_up_no_other() -> None:
    gets = Gets()
    frozen, other = gets.route("frozen"), gets.route("other")
    try:
        stuck = [gets.fetch(frozen) for _ in range(THREADS + 1)]
        assert len(await gets.fetch(other).wait_for_completion()) == NBYTES
        assert not any(operation.done() for operation in stuck)
    finally:
        await gets.close()


async def test_what_waits_for_a_thread_is_not_stalled_unless_its_own_peer_is() -> None:
    gets = Gets()
    frozen = [gets.route(f"frozen{number}") for number in range(MOST_THREADS)]
    other = gets.route("other")
    try:
        stuck = [gets.fetch(route) for route in frozen]
        while len(gets.sessions.stuck) < MOST_THREADS:
            await asyncio.sleep(0.01)
        waits, behind = gets.fetch(other), gets.fetch(frozen[0])
        before = time.monotonic()
        assert gets.reading.last_moved(other, (other.peer, waits.transfer)) >= before
        assert gets.reading.last_moved(frozen[0], (frozen[0].peer, behind.transfer)) < before
        assert not any(operation.done() for operation in stuck)
    finally:
        await gets.close()


async def test_a_get_that_is_given_up_before_its_turn_gives_its_memory_back_at_once() -> None:
    gets = Gets()
    frozen = gets.route("frozen")
    try:
        for _ in range(THREADS):
            gets.fetch(frozen)
        due = gets.fetch(frozen, "late")
        gets.reading.cleanup("late")
        assert due.done()
        assert gets.released == [("frozen", due.transfer)]
        assert gets.reading.stats()["incoming_transfers"] == THREADS
    finally:
        await gets.close()
