"""Room for profiles' files: what a stage reports is checked before anything is written."""

from __future__ import annotations

import pytest

from stage_runtime.errors import ConfigurationError
from stage_runtime.web.handlers.administration.profile_room import BLOCK, Room

PLENTY = 1 << 60


def test_a_file_that_is_larger_than_the_room_is_refused_with_both_sizes() -> None:
    with Room(10 * BLOCK).part() as part:
        part.take(4 * BLOCK, free=PLENTY)
        with pytest.raises(
            ConfigurationError, match=rf"{7 * BLOCK} bytes, and the coordinator has room for {6 * BLOCK}"
        ):
            part.take(7 * BLOCK, free=PLENTY)
        part.take(6 * BLOCK, free=PLENTY)


def test_answers_at_the_same_time_share_the_room_and_give_it_back() -> None:
    room = Room(4 * BLOCK)
    with room.part() as first:
        first.take(3 * BLOCK, free=PLENTY)
        with room.part() as second, pytest.raises(ConfigurationError):
            second.take(2 * BLOCK, free=PLENTY)
    with room.part() as third:
        third.take(4 * BLOCK, free=PLENTY)


@pytest.mark.parametrize("nbytes", [0, -(1 << 62)])
def test_no_reported_size_makes_more_room(nbytes: int) -> None:
    with Room(2 * BLOCK).part() as part:
        part.take(nbytes, free=PLENTY)
        part.take(nbytes, free=PLENTY)
        with pytest.raises(ConfigurationError):
            part.take(1, free=PLENTY)


def test_half_of_what_the_disk_has_free_stays_free() -> None:
    with Room(PLENTY).part() as part, pytest.raises(ConfigurationError, match=f"room for {BLOCK}"):
        part.take(BLOCK + 1, free=2 * BLOCK)
