"""Rooms of a pair of stages: what is asked and shipped arrives once, and nothing arrives for a room that is over."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from stage_runtime.api import StagePayload
from stage_runtime.kv_transfer.interface import Piece, Room
from stage_runtime.rules.kv import kvrooms
from stage_runtime.stage.host import Host
from stage_runtime.stage.kv.transport import StageKVTransport
from stage_runtime.wire.messages import KVBeat, KVClose, KVPiece, Members
from stage_runtime.wire.parts import Body, Member
from tests.engines.test_late_threads import no_thread_can_start
from tests.stage.stage_kit import OWNER, World, plan, world

BLOCKS = 3 << 20  # bytes: more than may be under way without a credit


def nothing() -> None: ...


class RecordingSink:
    """`kv_transfer.interface.KVSink` that keeps what it gets."""

    def __init__(self) -> None:
        self.asks: list[tuple[Room, str, bytes, Sequence[Any]]] = []
        self.pieces: list[tuple[Room, bytes, Sequence[Any]]] = []
        self.ends: list[tuple[Room, str | None]] = []
        self.lost: list[bool] = []  #: The entries of each end.
        self.raises = False

    def asked(self, room: Room, peer: str, record: bytes, tensors: Sequence[Any]) -> None:
        if self.raises:
            raise ValueError("not a prompt")
        self.asks.append((room, peer, record, tensors))

    def arrived(self, room: Room, header: bytes, tensors: Sequence[Any]) -> None:
        if self.raises:
            raise ValueError("not a block")
        self.pieces.append((room, header, tensors))

    def closed(self, room: Room, reason: str | None, *, lost: bool = False) -> None:
        self.ends.append((room, reason))
        self.lost.append(lost)


class Pair:
    """A decode and a prefill process that know each other, and one request that waits at decode."""

    def __init__(self, made: World, gate: threading.Event, *, slots: int, attached: str) -> None:
        def wait(payload: StagePayload) -> Any:
            gate.wait()
            return payload.data

        self.world = made
        decode = plan("think", terminal=True, entry=True, kv_role="decode", kv_peer="pre")
        prefill = plan("pre", kv_role="prefill", kv_peer="think")
        self.hosts: dict[str, Host] = {
            "d": made.process("d", [decode], {"think": wait}),
            "p": made.process("p", [prefill], {"pre": wait}, slots=slots),
        }
        self.generation = 0
        self.sinks = {"d": RecordingSink(), "p": RecordingSink()}
        for name in attached:
            self.rooms(name).attach(self.sinks[name])
        self.meet()

    def meet(self) -> None:
        for name, other, stage in (("d", "p", "pre"), ("p", "d", "think")):
            member = Member(other, stage, stage, "u", f"ipc:///{other}", {}, (stage,), True)
            self.world.send(OWNER, name, Members(joined=(member,)))

    def rooms(self, name: str) -> StageKVTransport:
        (transport,) = self.hosts[name].kv.values()
        return transport

    async def room(self) -> Room:
        """A room of the request, asked for."""
        rooms = self.rooms("d")
        await self.world.until(lambda: rooms.peer("r1") == "p")
        self.generation += 1
        room = rooms.room("r1", self.generation)
        assert room is not None
        before = len(self.sinks["p"].asks)
        rooms.ask(room, "p", b"prompt", [torch.arange(4)])
        await self.world.until(lambda: len(self.sinks["p"].asks) > before)
        return room

    def held(self, name: str) -> int:
        """Transfers of the process that its peers hold."""
        return len(self.world.relays[name].held)


@asynccontextmanager
async def pair(*, slots: int = 1000, attached: str = "dp") -> AsyncIterator[Pair]:
    gate = threading.Event()
    async with world() as made:
        opened = Pair(made, gate, slots=slots, attached=attached)
        made.submit("r1", "think", "hi")
        try:
            yield opened
        finally:
            gate.set()


async def test_an_ask_and_its_pieces_arrive_with_their_tensors_and_then_the_room_is_over() -> None:
    async with pair() as made:
        room = await made.room()
        assert (room.owner, room.request_id, room.attempt) == (OWNER, "r1", 1)
        (asked,) = made.sinks["p"].asks
        assert (asked[:3], asked[3][0].tolist()) == ((room, "d", b"prompt"), [0, 1, 2, 3])
        sent: list[int] = []
        blocks = [torch.full((BLOCKS,), number, dtype=torch.uint8) for number in range(3)]
        for number, block in enumerate(blocks):
            piece = Piece(b"%d" % number, [block], lambda number=number: sent.append(number))  # type: ignore[misc]
            made.rooms("p").ship(room, piece)
        await made.world.until(lambda: len(made.sinks["d"].pieces) == 3)
        got = {header: tensors[0] for _, header, tensors in made.sinks["d"].pieces}
        assert all(torch.equal(got[b"%d" % number], block) for number, block in enumerate(blocks))
        await made.world.until(lambda: sorted(sent) == [0, 1, 2])
        made.rooms("d").close(room, None)
        await made.world.until(lambda: made.sinks["p"].ends == [(room, None)])
        assert (made.rooms("d").open_rooms, made.rooms("p").open_rooms, made.sinks["d"].ends) == (0, 0, [])
        got.clear()
        made.sinks["d"].pieces.clear()
        await made.world.until(lambda: made.held("p") == 0)


async def test_a_room_that_no_thread_can_send_for_fails_and_a_later_one_is_sent() -> None:
    async with pair() as made:
        rooms = made.rooms("d")
        await made.world.until(lambda: rooms.peer("r1") == "p")
        room = rooms.room("r1", 1)
        assert room is not None
        with no_thread_can_start():
            rooms.ask(room, "p", b"prompt", [torch.arange(4)])
        assert made.sinks["d"].ends == [(room, "RuntimeError: can't start new thread")]
        assert (rooms.open_rooms, rooms.waiting) == (0, 0)
        made.generation = 1
        later = await made.room()
        assert [asked[0] for asked in made.sinks["p"].asks] == [later]


async def test_a_request_without_prefill_instance_has_no_peer_and_no_room() -> None:
    async with pair() as made:
        await made.world.settle()
        assert (made.rooms("d").peer("other"), made.rooms("d").room("other", 1)) == (None, None)


async def test_a_reader_that_releases_nothing_leaves_the_rest_as_views_with_the_sender() -> None:
    """Three slots are held, one piece waits as a copy in the send queue."""
    async with pair(slots=3) as made:
        room = await made.room()
        sent: list[int] = []
        for number in range(12):
            block = torch.full((BLOCKS,), number, dtype=torch.uint8)
            piece = Piece(b"%d" % number, [block], lambda number=number: sent.append(number))  # type: ignore[misc]
            made.rooms("p").ship(room, piece)
        await made.world.until(lambda: len(made.sinks["d"].pieces) == 3)
        await made.world.until(lambda: made.rooms("p").waiting == 8 and len(sent) == 4)
        await made.world.settle()
        assert (len(made.sinks["d"].pieces), made.rooms("p").waiting) == (3, 8)
        made.sinks["d"].pieces.clear()
        await made.world.until(lambda: len(made.sinks["d"].pieces) == 3)
        made.rooms("d").close(room, "aborted")
        await made.world.until(lambda: made.sinks["p"].ends == [(room, "aborted")])
        await made.world.until(lambda: len(sent) == 12)
        made.sinks["d"].pieces.clear()
        await made.world.until(lambda: made.held("p") == 0)
        assert made.rooms("p").waiting == 0


async def test_a_piece_of_a_closed_room_lands_nowhere_and_is_released() -> None:
    async with pair() as made:
        room = await made.room()
        made.rooms("p").ship(room, Piece(b"late", [torch.zeros(BLOCKS, dtype=torch.uint8)], nothing))
        await made.world.until(lambda: made.held("p") == 1)
        made.rooms("d").close(room, "aborted")
        await made.world.until(lambda: made.held("p") == 0)
        assert made.sinks["d"].pieces == []
        assert made.hosts["d"].process.counters["kv_late"] == 1


async def test_an_earlier_generation_and_another_sender_land_nowhere() -> None:
    async with pair() as made:
        first = await made.room()
        made.rooms("d").close(first, "again")
        second = await made.room()
        assert second.generation > first.generation
        made.rooms("p").ship(first, Piece(b"old", [torch.zeros(4)], nothing))
        made.world.send("p", "d", KVPiece(first, "pre", "think", Body()))
        made.world.known.add("x")
        made.world.send("x", "d", KVPiece(second, "pre", "think", Body()))
        made.world.send("x", "d", KVClose(second, "think", "forged"))
        await made.world.settle()
        assert (made.sinks["d"].pieces, made.sinks["d"].ends) == ([], [])
        assert made.rooms("d").open_rooms == 1


async def test_bytes_that_are_no_piece_fail_their_room_alone() -> None:
    async with pair() as made:
        first, second = await made.room(), await made.room()
        made.world.send("p", "d", KVPiece(first, "pre", "think", Body(b"\xc1garbage")))
        await made.world.until(lambda: bool(made.sinks["d"].ends) and bool(made.sinks["p"].ends))
        assert [room for room, _ in made.sinks["d"].ends] == [first]
        made.rooms("p").ship(second, Piece(b"good", [torch.zeros(4)], nothing))
        await made.world.until(lambda: len(made.sinks["d"].pieces) == 1)


async def test_a_sink_that_raises_fails_its_room_alone_and_both_sides_learn_of_it() -> None:
    async with pair() as made:
        room = await made.room()
        made.sinks["d"].raises = True
        made.rooms("p").ship(room, Piece(b"odd", [torch.zeros(4)], nothing))
        await made.world.until(lambda: bool(made.sinks["p"].ends))
        assert made.sinks["p"].ends == made.sinks["d"].ends == [(room, "ValueError: not a block")]


async def test_a_dead_peer_closes_the_rooms_with_it_at_once() -> None:
    for dead, alive in (("p", "d"), ("d", "p")):
        async with pair() as made:
            room = await made.room()
            made.world.send(OWNER, alive, Members(gone=(dead,)))
            await made.world.until(lambda alive=alive: bool(made.sinks[alive].ends))  # type: ignore[misc]
            assert (made.sinks[alive].ends, made.sinks[alive].lost) == ([(room, "it is gone")], [True])
            assert made.rooms("d").peer("r1") is (None if alive == "d" else "p") or alive == "p"


async def test_a_cut_link_closes_the_rooms_and_what_comes_after_it_is_late() -> None:
    async with pair() as made:
        room = await made.room()
        made.hosts["d"].lost("p")
        assert made.sinks["d"].ends == [(room, "the connection to it broke")]
        made.rooms("p").ship(room, Piece(b"late", [torch.zeros(4)], nothing))
        await made.world.until(lambda: made.hosts["d"].process.counters["kv_late"] == 1)
        assert made.sinks["d"].pieces == []
        made.world.send("d", "p", KVBeat("pre", (room,)))  # prefill's room is renewed by nobody: see leases


async def test_the_death_of_the_coordinator_closes_its_rooms_on_both_sides() -> None:
    async with pair() as made:
        room = await made.room()
        made.hosts["d"].lost(OWNER)
        reason = "the request's coordinator is gone"
        await made.world.until(lambda: bool(made.sinks["p"].ends))
        assert made.sinks["d"].ends == made.sinks["p"].ends == [(room, reason)]


async def test_a_beat_for_a_room_that_is_not_open_closes_it_at_decode() -> None:
    async with pair() as made:
        room = await made.room()
        made.hosts["p"].lost("d")
        made.world.send("d", "p", KVBeat("pre", (room,)))
        await made.world.until(lambda: bool(made.sinks["d"].ends))
        assert made.sinks["d"].ends == [(room, "the room is not open at the other side")]


async def test_a_room_whose_ask_waits_to_be_sent_is_not_renewed() -> None:
    """Prefill does not know it yet, and would end it."""
    async with pair() as made:
        goes, full = await made.room(), made.world.relays["d"]
        full._slots = 0
        waits = made.rooms("d").room("r1", 2)
        assert waits is not None
        made.rooms("d").ask(waits, "p", b"prompt", [torch.zeros(BLOCKS, dtype=torch.uint8)])

        def renewed() -> float:
            return made.hosts["p"].gauges()["engine_kv_leases_renewed_total:pre"]

        before = renewed()
        await made.world.until(lambda: renewed() > before)
        await made.world.settle()
        assert [one[0] for one in made.sinks["p"].asks] == [goes]
        assert (made.sinks["d"].ends, made.rooms("d").open_rooms) == ([], 2)


async def test_leases_are_counted_where_blocks_are_held() -> None:
    async with pair() as made:
        room = await made.room()

        def leases(name: str) -> float:
            return made.hosts["p"].gauges()[f"engine_kv_leases{name}:pre"]

        assert (leases(""), leases("_expired_total")) == (1, 0)
        before = leases("_renewed_total")
        made.world.send("d", "p", KVBeat("pre", (room, Room(OWNER, "r1", 1, 99))))
        await made.world.until(lambda: leases("_renewed_total") > before)  # and by decode's own beats
        # Later at each look: a beat of decode that is still under way renews the lease as well.
        made.rooms("p")._clock = itertools.count(time.monotonic(), kvrooms.LEASE_S + 1).__next__
        await made.world.until(lambda: (leases(""), leases("_expired_total")) == (0, 1))
        assert made.sinks["p"].ends == [(room, "its lease is over")]
        assert not any("kv_leases" in name for name in made.hosts["d"].gauges())


async def test_a_draining_prefill_finishes_its_rooms_and_refuses_new_ones() -> None:
    async with pair() as made:
        room = await made.room()
        made.hosts["p"].deregister("a roll")
        assert not made.hosts["p"].idle
        refused = made.rooms("d").room("r1", 9)
        assert refused is not None
        made.rooms("d").ask(refused, "p", b"prompt", [])
        await made.world.until(lambda: bool(made.sinks["d"].ends))
        assert made.sinks["d"].ends == [(refused, "the prefill instance is draining")]
        assert made.sinks["d"].lost == [False]
        made.rooms("p").ship(room, Piece(b"last", [torch.zeros(4)], nothing))
        await made.world.until(lambda: len(made.sinks["d"].pieces) == 1)
        made.rooms("d").close(room, None)
        made.sinks["d"].pieces.clear()
        await made.world.until(lambda: made.hosts["p"].idle)


async def test_an_ask_reaches_no_stage_that_does_not_prefill_for_it() -> None:
    async with pair() as made:
        room = await made.room()
        backwards = Room(OWNER, "r1", 1, 99)
        made.rooms("p").ask(backwards, "d", b"prompt", [])
        await made.world.until(lambda: (backwards, "think prefills nothing for pre") in made.sinks["p"].ends)
        assert (made.sinks["d"].asks, made.rooms("d").open_rooms) == ([], 1)
        assert room not in [one for one, _ in made.sinks["p"].ends]


async def test_an_ask_before_the_engine_is_ready_is_answered_then() -> None:
    async with pair(attached="d") as made:
        early, over = Room(OWNER, "r1", 1, 1), Room(OWNER, "r1", 1, 2)
        await made.world.until(lambda: made.rooms("d").peer("r1") == "p")
        for room in (early, over):
            made.rooms("d").ask(room, "p", b"early", [])
        await made.world.until(lambda: made.rooms("p").open_rooms == 2)
        made.rooms("d").close(over, "aborted")
        await made.world.until(lambda: made.rooms("p").open_rooms == 1)
        made.rooms("p").attach(made.sinks["p"])
        assert [one[0] for one in made.sinks["p"].asks] == [early]


async def test_a_closed_process_tells_its_peers() -> None:
    async with pair() as made:
        room = await made.room()
        made.rooms("p").stop()
        await made.world.until(lambda: bool(made.sinks["d"].ends))
        assert made.sinks["d"].ends == [(room, "this instance ends")]
        await asyncio.sleep(0)


# --- aborts: nothing that frees memory waits for a clock ----------------------------------------------------------


async def asked(made: Pair, room: Room, sent: list[int]) -> None: ...


async def under_way(made: Pair, room: Room, sent: list[int]) -> None:
    """Three pieces have come, one waits in the send queue and eight in the outbox."""
    for _ in range(12):
        made.rooms("p").ship(room, Piece(b"", [torch.zeros(BLOCKS, dtype=torch.uint8)], lambda: sent.append(1)))
    await made.world.until(lambda: len(made.sinks["d"].pieces) == 3 and made.rooms("p").waiting == 8)


async def all_came(made: Pair, room: Room, sent: list[int]) -> None:
    made.rooms("p").ship(room, Piece(b"", [torch.zeros(BLOCKS, dtype=torch.uint8)], lambda: sent.append(1)))
    await made.world.until(lambda: len(made.sinks["d"].pieces) == 1)


@pytest.mark.parametrize("side", ["d", "p"])
@pytest.mark.parametrize(("state", "pieces"), [(asked, 0), (under_way, 12), (all_came, 1)])
async def test_an_abort_frees_both_sides_while_their_clocks_stand_still(
    state: Callable[[Pair, Room, list[int]], Awaitable[None]], pieces: int, side: str
) -> None:
    """No lease ends and no beat is due: what frees the memory is said at once."""
    async with pair(slots=3) as made:
        for name in "dp":
            made.rooms(name)._clock = lambda: 0.0
        sent: list[int] = []
        room = await made.room()
        await state(made, room, sent)
        made.rooms(side).close(room, "aborted")
        await made.world.until(lambda: made.rooms("d").open_rooms + made.rooms("p").open_rooms == 0)
        await made.world.until(lambda: made.rooms("p").waiting == 0 and len(sent) == pieces)
        made.sinks["d"].pieces.clear()  # decode's engine has let go of them
        await made.world.until(lambda: made.held("p") + made.held("d") == 0)
