"""Refused messages are counted each time, logged once a reason, and no kind keeps another one out of the log."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import pytest

from stage_runtime.sockets.frames.reading import LOGGED_MOST, Reading


@pytest.fixture
def reading() -> Iterator[Reading]:
    loop = asyncio.new_event_loop()
    yield Reading(loop, Counter())
    loop.close()


def words() -> Iterator[str]:
    """Words without digits, endless."""
    for number in range(10_000):
        yield "".join(chr(ord("a") + int(digit)) for digit in str(number))


def test_a_kind_with_many_reasons_leaves_the_others_their_lines(
    reading: Reading, caplog: pytest.LogCaptureFixture
) -> None:
    for word in words():
        reading.refuse("malformed", f"odd {word}")
    assert len(caplog.messages) == LOGGED_MOST + 1
    assert caplog.messages[-1] == "dropped (malformed): further reasons are counted, not logged"
    reading.refuse("limits", "no descriptor is left")
    assert caplog.messages[-1] == "dropped (limits): no descriptor is left"


def test_a_reason_is_logged_once_whoever_the_peer_is_and_whatever_the_numbers_are(
    reading: Reading, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(1000):
        reading.refuse("unknown_peers", "Beat of a process without a link", peer=f"p{number}")
        reading.refuse("limits", f"{number} MiB are in use")
    assert caplog.messages == [
        "dropped (unknown_peers): Beat of a process without a link; peer: 'p0'",
        "dropped (limits): 0 MiB are in use",
    ]


def test_each_refusal_is_counted_logged_or_not() -> None:
    loop, counters = asyncio.new_event_loop(), Counter[str]()
    reading = Reading(loop, counters)
    for word in words():
        reading.refuse("malformed", word)
    reading.refuse("limits", "no descriptor is left", peer="a")
    loop.close()
    assert counters == {"malformed": 10_000, "limits": 1}
