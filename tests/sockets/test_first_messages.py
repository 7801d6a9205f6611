"""What the first message on a new link costs beyond one on an open link, in round trips, counted over a proxy."""

from __future__ import annotations

import pytest

from benchmarks.scalelab import roundtrips


@pytest.mark.parametrize(
    ("curve", "most"),
    [
        (False, 3.0),  # TCP 1, greetings 1, READY 1: libzmq's own; we add none
        (True, 4.5),  # and CURVE's HELLO, WELCOME, INITIATE
    ],
)
async def test_the_first_message_on_a_new_link_costs_no_round_trip_beyond_the_handshakes(
    curve: bool, most: float
) -> None:
    assert (await roundtrips.measure(curve)).round_trips <= most


@pytest.mark.parametrize("curve", [False, True])
async def test_between_instances_of_a_coordinator_the_first_message_costs_two_round_trips_at_most(curve: bool) -> None:
    """It goes by the coordinator; the new link's handshakes go on meanwhile. Half a round trip, if nothing is late."""
    assert (await roundtrips.measure(curve, detour=True)).round_trips <= 2.0
