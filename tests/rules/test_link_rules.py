"""Exactly once and in order between two ends, over a connection that loses what it likes."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stage_runtime.rules.flow.links import LinkReceiver, LinkSender, Standing, Verdict
from tests.thoroughness import examples


class Wire:
    """One direction of a link over a connection that may break: what is under way is lost then, as with ZeroMQ."""

    def __init__(self) -> None:
        self.outgoing = LinkSender()
        self.incoming = LinkReceiver(1)
        self.under_way: deque[tuple[int, bytes]] = deque()
        self.acks: deque[tuple[int, bool]] = deque()
        self.delivered: list[bytes] = []
        self.sent: list[bytes] = []

    def send(self) -> None:
        seq = self.outgoing.number()
        frame = b"%d" % seq
        self.outgoing.keep(frame)
        self.sent.append(frame)

    def flush(self) -> None:
        while frames := self.outgoing.next(3, 4):  # numbers of one digit go by three, of two by two
            self.under_way.extend((int(frame), frame) for frame in frames)
            self.outgoing.sent(len(frames))

    def receive(self) -> None:
        if not self.under_way:
            return
        seq, frame = self.under_way.popleft()
        verdict = self.incoming.accept(seq)
        if verdict is Verdict.DELIVER:
            self.delivered.append(frame)
        if verdict is not Verdict.ASKED:
            self.acks.append((self.incoming.acked(), verdict is Verdict.GAP))

    def acknowledge(self) -> None:
        if self.acks:
            ack, gap = self.acks.popleft()
            self.outgoing.acked(ack)
            if gap:
                self.outgoing.rewind()

    def lose_one(self) -> None:
        if self.under_way:
            self.under_way.popleft()

    def duplicate(self) -> None:
        if self.under_way:
            self.under_way.append(self.under_way[0])

    def lose_ack(self) -> None:
        if self.acks:
            self.acks.popleft()

    def reconnect(self) -> None:
        self.under_way.clear()
        self.outgoing.rewind()

    def race(self) -> None:
        """The connection is back and new frames go out on it before the old ones are sent again."""
        self.under_way.clear()
        self.send()
        self.flush()
        self.outgoing.rewind()


STEPS = [
    "send",
    "send",
    "flush",
    "receive",
    "receive",
    "acknowledge",
    "lose_one",
    "duplicate",
    "lose_ack",
    "reconnect",
    "race",
]


@pytest.mark.proves("connection-breaks")
@settings(max_examples=examples(300))
@given(st.lists(st.sampled_from(STEPS), max_size=120))
def test_every_message_is_delivered_once_and_in_order_whatever_is_lost(steps: list[str]) -> None:
    wire = Wire()
    for step in steps:
        getattr(wire, step)()
        assert wire.delivered == wire.sent[: len(wire.delivered)]
    for _ in range(3):  # the connection holds at last; the timer sends again what nobody has heard
        wire.outgoing.rewind()
        wire.flush()
        while wire.under_way:
            wire.receive()
        while wire.acks:
            wire.acknowledge()
    assert wire.delivered == wire.sent
    assert (wire.outgoing.unacked, wire.outgoing.backlog) == (0, 0)


def test_without_acknowledgements_a_lost_frame_stays_lost() -> None:
    """The positive control of the property above: it is the rewind that saves."""
    wire = Wire()
    for _ in range(3):
        wire.send()
    wire.flush()
    wire.lose_one()
    while wire.under_way:
        wire.receive()
    assert wire.delivered == []


def test_a_frame_that_was_never_written_leaves_no_hole() -> None:
    outgoing = LinkSender()
    abandoned = outgoing.number()  # its message could not be encoded
    assert outgoing.number() == abandoned == 1
    outgoing.keep(b"one")
    assert outgoing.number() == 2


def test_a_gap_is_asked_for_once_until_it_is_filled() -> None:
    incoming = LinkReceiver(1)
    verdicts = [incoming.accept(seq) for seq in (1, 3, 4, 5, 2, 3, 5)]
    deliver, gap, asked = Verdict.DELIVER, Verdict.GAP, Verdict.ASKED
    assert verdicts == [deliver, gap, asked, asked, deliver, deliver, gap]


def test_a_link_is_acknowledged_with_the_first_ack_of_a_frame() -> None:
    incoming = LinkReceiver(1)
    assert (incoming.acked(), incoming.acknowledged) == (0, False)  # as any first frame of ours says
    incoming.accept(1)
    assert not incoming.acknowledged
    assert (incoming.acked(), incoming.acknowledged) == (1, True)


def test_frames_outside_the_order_are_always_delivered_and_owe_nothing() -> None:
    incoming = LinkReceiver(1)
    assert [incoming.accept(0) for _ in range(3)] == [Verdict.DELIVER] * 3
    assert (incoming.last_received, incoming.owed) == (0, 0)


@given(st.integers(0, 5), st.integers(6, 2**63))
def test_an_ack_of_what_was_never_sent_frees_nothing(sent: int, ack: int) -> None:
    outgoing = LinkSender()
    for _ in range(sent):
        outgoing.keep(b"x")
    assert outgoing.acked(ack) is False
    assert outgoing.backlog == sent


def test_an_ack_may_be_for_a_frame_that_waits_to_be_sent_again() -> None:
    outgoing = LinkSender()
    for seq in (1, 2, 3):
        outgoing.keep(b"%d" % seq)
        outgoing.sent()
    outgoing.rewind()
    assert outgoing.acked(2) is True
    assert list(outgoing.frames()) == [b"3"]


@pytest.mark.parametrize(
    ("before", "session", "ack_session", "standing"),
    [
        ([], 5, 0, Standing.CURRENT),  # the first word fixes which link of theirs we hear
        ([], 5, 2, Standing.CURRENT),
        ([], 5, 1, Standing.LAGGING),  # they speak to the link that we had before
        ([(5, 0)], 5, 2, Standing.CURRENT),
        ([(5, 0)], 6, 0, Standing.RENEWED),
        ([(5, 0)], 4, 0, Standing.OLD),
        ([(5, 0)], 5, 1, Standing.LAGGING),
        ([(5, 0)], 0, 0, Standing.CURRENT),  # an introduction belongs to no link
        ([(0, 0)], 5, 0, Standing.CURRENT),
        ([(5, 0)], 6, 1, Standing.RENEWED),  # it has given up the link that we hear, whichever of ours it hears
        ([(5, 1)], 6, 0, Standing.CURRENT),  # nothing is learned from who speaks to a link that is gone
    ],
)
def test_a_frame_is_placed_by_both_ends_numbers(
    before: list[tuple[int, int]], session: int, ack_session: int, standing: Standing
) -> None:
    incoming = LinkReceiver(2)
    for earlier in before:
        incoming.stand(*earlier)
    assert incoming.stand(session, ack_session) is standing


def test_frames_sent_before_the_peer_received_anything_are_void_once_the_link_was_given_up() -> None:
    first = LinkReceiver(1)
    assert first.stand(7, 0) is Standing.CURRENT
    assert first.accept(1) is Verdict.DELIVER
    assert first.stand(7, 1) is Standing.CURRENT, "it hears us"
    later = LinkReceiver(3, LinkReceiver(2, first))
    assert later.stand(7, 0) is Standing.LAGGING
    assert later.stand(8, 0) is Standing.CURRENT
    assert later.accept(1) is Verdict.DELIVER


def test_a_peer_that_never_noticed_the_dropped_link_goes_on_where_it_was() -> None:
    first = LinkReceiver(1)
    assert first.stand(7, 0) is Standing.CURRENT
    assert [first.accept(seq) for seq in (1, 2)] == [Verdict.DELIVER] * 2
    later = LinkReceiver(3, LinkReceiver(2, first))
    assert later.stand(7, 0) is Standing.CURRENT
    assert [later.accept(seq) for seq in (1, 2, 3)] == [Verdict.DUPLICATE] * 2 + [Verdict.DELIVER]
    anew = LinkReceiver(3, LinkReceiver(2, first))
    assert anew.stand(8, 0) is Standing.CURRENT
    assert anew.accept(1) is Verdict.DELIVER


class End:
    """One end of a pair that may give its link up at any time."""

    def __init__(self) -> None:
        self.session = 1
        self.incoming = LinkReceiver(1)
        self.sent: list[tuple[int, int]] = []  #: (session, ack_session) of what may be said again, late.

    def renew(self) -> None:
        self.session += 1
        self.incoming = LinkReceiver(self.session, self.incoming)

    def word(self) -> tuple[int, int]:
        self.sent.append((self.session, self.incoming.peer_session))
        return self.sent[-1]


STEPS = ["renew a", "renew b", "a speaks", "b speaks", "a again", "b again"]


@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 30)), max_size=40))
# An old word fixed a link of a's that a had given up, and each end then spoke to a link that the other had not.
@example([(step, 0) for step in ("a speaks", "renew b", "renew a", "b speaks", "renew b", "a again")])
def test_two_ends_that_gave_up_apart_come_together_again(
    steps: list[tuple[str, int]],
) -> None:
    """Both ends hear each other's present link a few words later, whatever happened, and whatever old words came late,
    and nobody gives up any more.
    """
    a, b = End(), End()

    def speak(sender: End, receiver: End, word: tuple[int, int] | None = None) -> Standing:
        standing = receiver.incoming.stand(*(word or sender.word()))
        if standing is Standing.RENEWED:
            receiver.renew()
        return standing

    for step, which in [*steps, *[("a speaks", 0), ("b speaks", 0)] * 4]:
        match step:
            case "renew a":
                a.renew()
            case "renew b":
                b.renew()
            case "a speaks":
                speak(a, b)
            case "b speaks":
                speak(b, a)
            case "a again" if a.sent:
                speak(a, b, a.sent[which % len(a.sent)])
            case "b again" if b.sent:
                speak(b, a, b.sent[which % len(b.sent)])
    assert [speak(a, b), speak(b, a)] == [Standing.CURRENT] * 2
    assert (a.incoming.peer_session, b.incoming.peer_session) == (b.session, a.session)


def test_frames_that_leave_together_are_bounded_by_number_and_bytes_and_at_least_one() -> None:
    outgoing = LinkSender()
    for frame in (b"1234567", b"8", b"9", b"10"):
        outgoing.keep(frame)
    assert outgoing.next(3, 2) == [b"1234567"]
    outgoing.sent()
    assert outgoing.next(3, 2) == [b"8", b"9"]
    assert outgoing.next(3, 4) == [b"8", b"9", b"10"]
    assert outgoing.next(2, 4) == [b"8", b"9"]
    outgoing.sent(3)
    assert outgoing.next(3, 4) == []


def test_after_an_ack_the_frames_that_were_not_sent_are_next() -> None:
    outgoing = LinkSender()
    for number in range(1, 5):
        outgoing.keep(b"%d" % number, sent=number <= 3)
    assert outgoing.acked(2) is True
    assert (outgoing.unacked, outgoing.backlog, outgoing.next()) == (1, 1, [b"4"])
    assert list(outgoing.after(3)) == [(4, b"4")]
