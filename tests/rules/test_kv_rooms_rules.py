"""Rooms: opened once, ended once, and under a lease that only their own peer renews."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from stage_runtime.rules.kv.kvrooms import LEASE_S, RENEW_S, Rooms
from stage_runtime.wire.parts import Room


def room(generation: int) -> Room:
    return Room("cc", "r1", 1, generation)


def test_a_room_that_has_ended_is_not_opened_again() -> None:
    rooms = Rooms()
    assert rooms.open(room(1), "d", 0.0)
    assert not rooms.open(room(1), "d", 0.0)
    assert (rooms.end(room(1)), rooms.end(room(1))) == ("d", None)
    assert not rooms.open(room(1), "x", 1.0)
    assert rooms.open(room(2), "d", 1.0)


def test_every_expired_lease_is_found_behind_live_ones_too() -> None:
    rooms = Rooms()
    for generation in range(6):
        rooms.open(room(generation), "d", 0.0)
    for live in (0, 2, 4):
        assert rooms.renew(room(live), "d", LEASE_S)
    assert rooms.expired(LEASE_S) == []
    assert rooms.expired(LEASE_S + RENEW_S) == [room(1), room(3), room(5)]


def test_a_lease_is_renewed_by_its_own_peer_alone() -> None:
    rooms = Rooms()
    rooms.open(room(1), "d", 0.0)
    assert not rooms.renew(room(1), "x", LEASE_S)
    assert not rooms.renew(room(2), "d", LEASE_S)
    assert rooms.expired(LEASE_S + 1) == [room(1)]


class RoomsMachine(RuleBasedStateMachine):
    """No room is open twice, and what ends is never open again."""

    opened = Bundle("opened")

    def __init__(self) -> None:
        super().__init__()
        self.rooms = Rooms()
        self.open: dict[Room, tuple[str, float]] = {}
        self.ended: set[Room] = set()
        self.now = 0.0

    @rule(target=opened, generation=st.integers(0, 5), peer=st.sampled_from("ab"))
    def begin(self, generation: int, peer: str) -> Room:
        one = room(generation)
        assert self.rooms.open(one, peer, self.now) == (one not in self.open and one not in self.ended)
        if one not in self.ended:
            self.open.setdefault(one, (peer, self.now))
        return one

    @rule(one=opened)
    def finish(self, one: Room) -> None:
        peer, _ = self.open.pop(one, (None, 0.0))
        assert self.rooms.end(one) == peer
        self.ended.add(one)

    @rule(one=opened, peer=st.sampled_from("ab"))
    def renew(self, one: Room, peer: str) -> None:
        is_its_own = self.open.get(one, ("", 0.0))[0] == peer
        assert self.rooms.renew(one, peer, self.now) == is_its_own
        if is_its_own:
            self.open[one] = (peer, self.now)

    @rule(seconds=st.floats(0, LEASE_S))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def leases_are_exact(self) -> None:
        assert set(self.rooms.expired(self.now)) == {
            one for one, (_, renewed) in self.open.items() if self.now - renewed > LEASE_S
        }
        assert len(self.rooms) == len(self.open)


TestRooms = RoomsMachine.TestCase
