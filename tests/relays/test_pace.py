"""How much is read at once from a peer of any speed."""

from __future__ import annotations

import pytest

from stage_runtime.relays.mooncake import pace, reading
from stage_runtime.relays.mooncake.pace import Pace

MIB = 1 << 20


def test_a_peer_of_unknown_speed_is_asked_for_a_little_and_a_fast_one_for_much() -> None:
    peer = Pace()
    assert peer.next_nbytes() == pace.FIRST_NBYTES
    peer.took(48, 3.0)  # a slot's header
    assert peer.next_nbytes() == pace.FIRST_NBYTES
    peer.took(2 * MIB, 0.002)
    assert peer.next_nbytes() == pace.MOST_NBYTES


@pytest.mark.parametrize("per_s", [30_000, 100_000, 1_000_000, 5 * MIB, 100 * MIB])
def test_a_peer_that_is_slow_all_the_time_is_late_once_at_most(per_s: int) -> None:
    peer, late = Pace(), 0
    for _ in range(10):
        nbytes = peer.next_nbytes()
        if nbytes / per_s > reading.LATE_S:
            late += 1
            peer.gave_up()
        else:
            peer.took(nbytes, nbytes / per_s)
    assert late <= (per_s < pace.FIRST_NBYTES / reading.LATE_S)
    assert peer.next_nbytes() / per_s < reading.LATE_S


def test_a_peer_that_was_slow_for_a_while_is_asked_for_much_again() -> None:
    peer = Pace()
    peer.took(16 * MIB, 4.0)
    assert peer.next_nbytes() == 4 * MIB
    peer.took(4 * MIB, 0.004)
    assert peer.next_nbytes() == 16 * MIB
