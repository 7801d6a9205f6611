"""Send queues: what waits in one goes on or is given up with a word; it never stays. Real send queues, a fake relay
and link.

How send queues behave in a pipeline is tested in tests/stage and tests/coordinator.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from stage_runtime.errors import NoConnection, RelayFailed, TransferError, ValueRefused
from stage_runtime.payloads import encoding, pack
from stage_runtime.profiler.recording.recorder import recorder
from stage_runtime.transfers.sending import PendingSend, SendQueues
from stage_runtime.wire import codec
from stage_runtime.wire.frames import FRAME_LIMIT
from stage_runtime.wire.messages import Message, Submit
from stage_runtime.wire.parts import Body, Header
from stage_runtime.wire.tensorrefs import PATH_LIMIT

LARGE = np.zeros(120_000, np.uint8)


class Work:
    aborted = False
    owner = "cc"

    def __init__(self, request_id: str, attempt: int = 1) -> None:
        self.request_id = request_id
        self.attempt = attempt


class Put:
    def __init__(self, transfer: int, filled: Callable[[int], None]) -> None:
        self.transfer = transfer
        self.transfers = (transfer,)
        self.backend = "memory"
        self.copied_nbytes = 0
        self.metadata = b"m" * 100
        self._filled = filled

    def fill(self) -> None:
        self._filled(self.transfer)


class Relays:
    """Slots without memory. before: called at each put; what it raises the put raises."""

    def __init__(self, slots: int) -> None:
        self.free = slots
        self.most = 1 << 40
        self.again: Callable[[], None] = lambda: None
        self.before: Callable[[str], None] = lambda request_id: None
        self.refused: Callable[[], None] = lambda: None
        self.filled: list[int] = []
        self._ids = itertools.count(1)

    def put(
        self,
        extracted: pack.Extracted,
        *,
        request_id: str,
        peer: str,
        backend: str,
        slot_nbytes: int | None,
        early: bool,
    ) -> Put | None:
        self.before(request_id.partition("/")[2].partition("#")[0])
        if self.free == 0:
            self.refused()
            return None
        self.free -= 1
        return Put(next(self._ids), self.filled.append)

    def check(self, extracted: pack.Extracted, *, peer: str, backend: str, slot_nbytes: int) -> None:
        if extracted.nbytes > self.most:
            raise ValueRefused("inputs", f"{extracted.nbytes} bytes of at most {self.most}")

    def when_room(self, again: Callable[[], None]) -> None:
        self.again = again

    def released(self, peer: str, transfer: int) -> None:
        self.free += 1

    def discard(self, operation: Put) -> None:
        self.free += 1

    def forget(self, peer: str) -> None: ...


class Made:
    """Send queues, and what came of each pending send."""

    def __init__(self, slots: int = 100, *, shared_nbytes: int = 0) -> None:
        self.relays = Relays(slots)
        self.sent: list[str] = []
        self.copied: list[str] = []  #: Those of them that the receiver must copy at once.
        self.lost: dict[str, BaseException] = {}
        self.refuses: Callable[[str], None] = lambda request_id: None
        self.send_queues = SendQueues(self.relays, self.send, shared_nbytes=shared_nbytes)  # type: ignore[arg-type]

    def send(self, peer: str, message: Message) -> bool:
        assert isinstance(message, Submit)
        codec.check(message)  # as a link does
        self.refuses(message.header.request_id)
        self.sent.append(message.header.request_id)
        if message.body.copy_now:
            self.copied.append(message.header.request_id)
        return True

    def ship(
        self,
        request_id: str,
        value: Any = LARGE,
        *,
        credits: int = 1,
        source: str = "coordinator",
        attempt: int = 1,
    ) -> bool:
        extracted = encoding.extract(value, where="inputs")

        def make(body: Body) -> Message:
            return Submit(Header(request_id, 1, "cc", {}), "entry", body)

        def lost(error: BaseException) -> None:
            self.lost[request_id] = error

        edge = (source, "entry", "peer")
        return self.send_queues.ship(
            edge, PendingSend(Work(request_id, attempt), extracted, make, "auto", lost), credits=credits
        )


def test_a_put_is_filled_after_it_was_announced_and_before_its_giver_goes_on() -> None:
    made = Made()
    before = list[int]()
    made.refuses = lambda request_id: before.extend(made.relays.filled)
    made.ship("a")
    assert (made.sent, before, made.relays.filled) == (["a"], [], [1])


def test_payloads_to_instances_that_are_gone_leave_no_queue_behind() -> None:
    made = Made()

    def gone(request_id: str) -> None:
        raise NoConnection("no connection to peer", "peer")

    made.relays.before = gone
    for number in range(3):
        with pytest.raises(NoConnection):
            made.ship(f"late {number}")
        made.send_queues.forget("peer")
        with pytest.raises(NoConnection):
            made.ship(f"later {number}")
    assert made.send_queues._queues == {}
    made.relays.before = lambda request_id: None
    assert made.ship("first") and made.ship("second")
    made.relays.before = gone
    made.send_queues.released("peer", (1,))
    assert (made.sent, len(made.send_queues._queues)) == (["first"], 1)


def test_what_a_relay_moves_is_announced_by_the_way_that_does_not_wait_for_other_messages() -> None:
    made = Made()
    sent: list[Message] = []

    def send(peer: str, message: Message) -> bool:
        sent.append(message)
        return True

    relays: Any = made.relays
    made.send_queues = SendQueues(relays, send, announce=made.send, shared_nbytes=0)
    assert made.ship("large") and made.ship("small", "inline")
    assert made.sent == ["large"]
    assert [one.header.request_id for one in sent if isinstance(one, Submit)] == ["small"]


def test_a_profile_shows_a_put_as_ended_when_all_of_it_was_copied(tmp_path: Path) -> None:
    made = Made()
    made.refuses = lambda request_id: recorder.emit("announced", request_id)
    made.relays.filled = Recording()
    path = recorder.start("run", tmp_path, "entry")
    try:
        made.ship("a")
    finally:
        recorder.stop()
    names = [msgspec.json.decode(line)["event_name"] for line in path.read_bytes().splitlines()]
    assert names[1:-1] == ["relay_put_start", "announced", "copied", "relay_put_end"]


class Recording(list[int]):
    """Records that a put is filled."""

    def append(self, transfer: int) -> None:
        recorder.emit("copied", "a")


def test_a_put_whose_message_could_not_be_sent_is_filled_too() -> None:
    """Its relay keeps the memory for who fills it."""
    made = Made()

    def refuse(request_id: str) -> None:
        raise TransferError("no link")

    made.refuses = refuse
    with pytest.raises(TransferError):
        made.ship("a")
    assert made.relays.filled == [1]


def test_small_payloads_take_no_credit_while_their_bytes_fit() -> None:
    made = Made(shared_nbytes=2 * len(LARGE))
    for number in range(5):
        made.ship(str(number), credits=2)
    assert (made.sent, made.copied) == (["0", "1", "2", "3"], ["3"]), "two share the bytes, two have a credit"
    made.send_queues.released("peer", (1,))
    assert (made.sent, made.copied) == (["0", "1", "2", "3", "4"], ["3"])
    made.send_queues.released("peer", (2, 3, 4, 5))
    made.ship("larger than all that is shared", np.zeros(3 * len(LARGE), np.uint8))
    assert made.copied == ["3"], "one credit of two"
    numbers = made.send_queues.edges()["coordinator", "entry", "memory"]
    assert (numbers.nbytes, numbers.in_flight) == (5 * len(LARGE) + 3 * len(LARGE), 1)
    made.ship("as large", np.zeros(3 * len(LARGE), np.uint8))
    assert made.copied == ["3", "as large"]
    assert (made.send_queues.queued, made.send_queues.outstanding) == (0, 2)


def test_what_is_sent_for_a_further_attempt_of_its_request_counts_as_a_retry() -> None:
    made = Made()
    for attempt in (1, 2, 3):
        made.ship("r", credits=9, attempt=attempt)
    made.ship("inline", 5, attempt=2)
    numbers = made.send_queues.edges()["coordinator", "entry", "memory"]
    assert (numbers.retries, numbers.in_flight) == (2, 3)


@pytest.mark.proves("unsendable-at-its-turn")
@pytest.mark.parametrize("waits", [False, True], ids=["a credit is free", "none is free"])
def test_a_message_over_the_limit_is_refused_before_it_waits(waits: bool) -> None:
    made = Made()
    if waits:
        made.ship("first")
    with pytest.raises(ValueRefused, match=r"Submit: a control message of \d+ bytes, over"):
        made.ship("large", [np.zeros(20, np.uint8) for _ in range(FRAME_LIMIT // 20)])
    assert (made.send_queues.queued, made.send_queues.outstanding) == (0, 1 if waits else 0)
    assert made.relays.free == (99 if waits else 100)
    made.ship("next")
    made.send_queues.released("peer", (1,))
    assert made.sent == (["first", "next"] if waits else ["next"])


FAULTS = [ValueRefused("Submit", "too large"), MemoryError(), OSError(28, "no space"), SystemExit(1), KeyError("x")]


@pytest.mark.proves("unsendable-at-its-turn")
def test_what_waited_for_a_relay_that_then_has_no_socket_left_fails_its_request() -> None:
    """Its receiver is alive: nothing else would end the request before its deadline."""
    made, error = Made(), RelayFailed("the tcp relay cannot connect to tcp://10.0.0.7:1: Too many open files")
    for request_id in ("first", "bad", "next"):
        made.ship(request_id)

    def no_socket(request_id: str) -> None:
        if request_id == "bad":
            raise error

    made.relays.before = no_socket
    made.send_queues.released("peer", (1,))
    assert made.sent == ["first", "next"]
    assert made.lost == {"bad": error}


@pytest.mark.proves("unsendable-at-its-turn")
@pytest.mark.parametrize("where", ["in the relay", "at the link"])
@pytest.mark.parametrize("error", FAULTS, ids=lambda error: type(error).__name__)
def test_the_head_of_a_send_queue_never_blocks_it(error: BaseException, where: str) -> None:
    made = Made()
    for request_id in ("first", "bad", "next", "last"):
        made.ship(request_id)

    def fault(request_id: str) -> None:
        if request_id == "bad":
            raise error

    made.relays.before, made.refuses = (fault, made.refuses) if where == "in the relay" else (made.relays.before, fault)
    made.send_queues.released("peer", (1,))
    assert made.sent == ["first", "next"]
    assert made.lost == {"bad": error}, "its request learns of it"
    made.send_queues.released("peer", (2 if where == "in the relay" else 3,))
    assert made.sent == ["first", "next", "last"]
    assert made.relays.free == 99, "no slot and no credit is lost with it"


def test_what_nothing_reaches_any_more_makes_room_for_the_next() -> None:
    """The caller that says that the peer is gone ends its request, perhaps by sending it elsewhere: it is not failed
    here.
    """
    made = Made()
    for request_id in ("first", "bad", "next"):
        made.ship(request_id)

    def unreachable(request_id: str) -> None:
        if request_id == "bad":
            raise TransferError("no relay reaches peer")

    made.relays.before = unreachable
    made.send_queues.released("peer", (1,))
    assert made.sent == ["first", "next"]
    assert made.lost == {}


@pytest.mark.proves("unsendable-at-its-turn")
def test_a_slot_that_is_released_while_a_send_queue_asks_for_one_is_not_missed() -> None:
    """The last release comes between the answer "no slot now" and the note that this queue waits: none follows it."""
    made = Made(slots=1)
    made.ship("first", source="another")
    raced: list[bool] = []

    def release_in_between() -> None:
        if not raced:
            raced.append(True)
            made.send_queues.released("peer", (1,))

    made.relays.refused = release_in_between
    made.ship("second")
    assert made.sent == ["first", "second"]


@pytest.mark.proves("payload-too-large")
@pytest.mark.parametrize("waits_for", ["a credit", "a slot", "its turn"])
def test_what_is_larger_than_a_relay_ever_carries_fails_at_once_whatever_it_would_wait_for(waits_for: str) -> None:
    made = Made(slots=1 if waits_for == "a slot" else 100)
    made.ship("first", source="another" if waits_for == "a slot" else "coordinator")
    if waits_for == "its turn":
        made.ship("second")
    waiting = made.send_queues.queued
    made.relays.most = len(LARGE)
    with pytest.raises(ValueRefused, match="240000 bytes of at most 120000"):
        made.ship("large", np.zeros(2 * len(LARGE), np.uint8))
    assert made.send_queues.queued == waiting
    made.ship("next")
    for transfer in (1, 2, 3):
        made.send_queues.released("peer", (transfer,))
    assert made.sent == ["first", *(["second"] if waiting else []), "next"]


def test_what_is_found_too_large_while_it_waits_makes_room_for_the_next() -> None:
    """Its relay has failed, and the next one carries less."""
    made = Made()
    for request_id in ("first", "large", "next"):
        made.ship(request_id)
    refused = ValueRefused("inputs", "too large")

    def put(request_id: str) -> None:
        if request_id == "large":
            raise refused

    made.relays.before = put
    made.send_queues.released("peer", (1,))
    assert (made.sent, made.lost) == (["first", "next"], {"large": refused})


@pytest.mark.proves("payload-too-large")
@pytest.mark.parametrize("attempts", [1, 2])
def test_behind_a_head_that_is_aborted_the_next_one_goes(attempts: int) -> None:
    """Its slot was too large for what is free, the next one's is not: no release need come."""
    made = Made()
    made.ship("first", source="another")
    sizes = {"large": 2 * len(LARGE), "next": len(LARGE)}

    def room(request_id: str) -> None:
        made.relays.free = 0 if request_id == "large" else 1

    made.relays.before = room
    made.ship("large", np.zeros(sizes["large"], np.uint8), attempt=attempts)
    made.ship("next")
    assert (made.sent, made.send_queues.queued) == (["first"], 2)
    made.send_queues.abort("cc", "large", attempts)
    assert (made.sent, made.send_queues.queued) == (["first", "next"], 0)


def test_a_release_of_what_was_sent_before_a_connection_broke_makes_room_for_what_is_sent_since() -> None:
    made = Made(slots=1)
    made.ship("before")
    made.send_queues.cut("peer")
    made.ship("since")
    assert made.sent == ["before"]
    made.send_queues.released("peer", (1,))
    assert (made.sent, made.send_queues.queued) == (["before", "since"], 0)


def test_edges_that_wait_for_a_slot_take_turns() -> None:
    """Each release is of the edge that had the last slot: it would have the next one, too, while it has more."""
    made = Made(slots=1)
    for request_id in ("a0", "a1", "a2", "a3", "b0", "b1", "c0"):
        made.ship(request_id, credits=9, source=request_id[0])
    for transfer in range(1, 7):
        made.send_queues.released("peer", (transfer,))
    assert made.sent == ["a0", "a1", "b0", "c0", "a2", "b1", "a3"]


def test_an_edge_goes_on_when_another_one_s_request_cannot_be_failed() -> None:
    made = Made(slots=1)
    for request_id in ("first", "bad", "next", "other"):
        made.ship(request_id, credits=9, source="another" if request_id == "other" else "coordinator")

    def fault(request_id: str) -> None:
        if request_id == "bad":
            raise MemoryError

    class Unfailing(dict[str, BaseException]):
        def __setitem__(self, request_id: str, error: BaseException) -> None:
            raise KeyError(request_id)

    made.relays.before, made.lost = fault, Unfailing()
    for transfer in (1, 2):
        made.send_queues.released("peer", (transfer,))
    assert made.sent == ["first", "next", "other"]


def test_what_its_link_does_not_take_is_not_counted_as_sent() -> None:
    made = Made()

    def no_link(request_id: str) -> None:
        if request_id == "bad":
            raise ConnectionError

    made.refuses = no_link
    for request_id in ("good", "bad"):
        with contextlib.suppress(ConnectionError):
            made.ship(request_id, credits=9)
    numbers = made.send_queues.edges()["coordinator", "entry", "memory"]
    assert (numbers.nbytes, numbers.in_flight) == (len(LARGE), 1)


def test_room_that_comes_back_without_a_release_is_used() -> None:
    """A relay frees a slot when nothing moves any more, an author's tensor dies: no message announces that."""
    made = Made(slots=1)
    made.ship("first", source="another")
    for request_id in ("second", "third"):
        made.ship(request_id)
    for free in (0, 1, 0):
        made.relays.free += free
        again, made.relays.again = made.relays.again, lambda: None
        again()
    assert (made.sent, made.send_queues.queued) == (["first", "second"], 1)
    assert made.send_queues._starved == {}, "the third waits for a credit: no room is looked for"


def test_the_path_of_a_part_is_as_long_as_people_read_whatever_its_key() -> None:
    keys = ["k" * 100_000, "\0" * 100_000, "日" * 100_000]
    extracted = encoding.extract({"inputs": [{key: np.zeros(9)} for key in keys]})
    assert len(extracted.refs) == len(keys) + 1, "the parts, and the value itself, whose keys are long"
    assert max(len(ref.path) for ref in extracted.refs) <= PATH_LIMIT
    with pytest.raises(ValueRefused) as refused:
        encoding.extract({"k" * 100_000: object()})
    assert len(str(refused.value)) < 300
