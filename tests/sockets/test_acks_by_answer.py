"""Acks by the connection that the peer has opened: who only receives opens none, and loses nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import zmq

from stage_runtime.rules.flow.links import ACK_EVERY
from stage_runtime.sockets.connections.links import Link
from stage_runtime.sockets.endpoints.addresses import CurveSecurity
from stage_runtime.sockets.frames.resending import ResendTimes
from stage_runtime.wire.messages import Deregister, Message
from tests.sockets.peers import PATIENCE_S, SECRET, End, Listener, Proxy, ends

TCP = "tcp://127.0.0.1:*"


def one_way(sender: End, receiver: End, *, via: str | None = None) -> None:
    """The receiver has a link, and opens no connection for it."""
    sender.channels.connect(receiver.name, via or receiver.endpoint)
    receiver.channels.connect(sender.name, sender.endpoint, asleep=True)


@pytest.mark.proves("receives-only")
@pytest.mark.parametrize("curve", [False, True])
async def test_who_only_receives_acknowledges_and_opens_no_connection(curve: bool) -> None:
    security = CurveSecurity(SECRET) if curve else None
    a, b = End("aa", TCP, security=security), End("bb", TCP, security=security)
    async with ends(a, b):
        one_way(a, b)
        for number in range(100):
            a.send("bb", str(number))
            await b.listener.until(lambda number=number: b.listener.received_words[-1:] == [str(number)])  # type: ignore[misc]
        assert await a.channels.settled(PATIENCE_S)
        assert b.listener.received_words == [str(number) for number in range(100)]
        assert (a.channels.counters["connected"], b.channels.counters["connected"]) == (1, 0)


async def test_who_has_only_received_opens_a_connection_when_it_sends() -> None:
    a, b = End("aa", TCP), End("bb", TCP)
    async with ends(a, b):
        one_way(a, b)
        a.send("bb", "there")
        await b.listener.until(lambda: b.listener.received_words == ["there"])
        b.send("aa", "back")
        await a.listener.until(lambda: a.listener.received_words == ["back"])
        assert await a.channels.settled(PATIENCE_S) and await b.channels.settled(PATIENCE_S)
        assert b.channels.counters["connected"] == 1


@pytest.mark.proves("receives-only")
async def test_what_a_broken_connection_has_lost_is_sent_and_acknowledged_on_the_next_one() -> None:
    late: dict[str, Any] = {"reconnect_grace_s": PATIENCE_S}  # on a busy machine it is back late
    a, b = End("aa", TCP, **late), End("bb", TCP, **late)
    proxy = Proxy(b.endpoint)
    async with ends(a, b):
        one_way(a, b, via=proxy.endpoint)
        for turn in range(5):
            for number in range(20):
                a.send("bb", f"{turn}.{number}")
            await b.listener.until(lambda turn=turn: f"{turn}.0" in b.listener.received_words)  # type: ignore[misc]
            proxy.cut()
        assert await a.channels.settled(PATIENCE_S)
        assert b.listener.received_words == [f"{turn}.{number}" for turn in range(5) for number in range(20)]
        assert b.channels.counters["connected"] == 0
        assert a.listener.lost_peers == b.listener.lost_peers == []
    proxy.close()


class Ring(Listener):
    """Passes each word on to the next, so many times."""

    def __init__(self, following: str) -> None:
        super().__init__()
        self.following = following

    def received(self, sender: str, message: Message) -> None:
        super().received(sender, message)
        assert isinstance(message, Deregister)
        if left := int(message.reason):
            self.channels.send(self.following, Deregister(str(left - 1)))


async def test_an_ack_hides_nothing_that_has_come_before_it() -> None:
    """A send on a socket takes the edge on which it is read. One message goes round, and nothing else would wake."""
    times = ResendTimes(first_s=3600.0, later_s=3600.0)
    names = ["aa", "bb", "cc"]
    made = [End(name, TCP, listener=Ring(names[(at + 1) % 3]), resend=times) for at, name in enumerate(names)]
    async with ends(*made):
        for at, end in enumerate(made):
            one_way(end, made[(at + 1) % 3])
        for _ in range(8):
            made[0].send("bb", "1000")
        await asyncio.gather(*(end.listener.until(lambda end=end: len(end.listener.messages) >= 2664) for end in made))  # type: ignore[misc]
        assert [end.channels.counters["resent"] for end in made] == [0, 0, 0]


@pytest.mark.proves("receives-only")
async def test_an_end_that_only_receives_goes_on_when_the_sender_has_dropped_its_link() -> None:
    """It has nothing that could be lost, and the sender has told the coordinator."""
    a, b = End("aa", TCP), End("bb", TCP)
    async with ends(a, b):
        one_way(a, b)
        for word in ("old", "new", "newer"):
            a.send("bb", word)
            await b.listener.until(lambda word=word: b.listener.received_words[-1:] == [word])  # type: ignore[misc]
            assert await a.channels.settled(PATIENCE_S)
            a.channels.drop("bb")
            a.channels.connect("bb", b.endpoint)
        assert b.listener.received_words == ["old", "new", "newer"]
        assert a.listener.lost_peers == b.listener.lost_peers == []


@pytest.mark.parametrize("part", [b"part", b"a longer part", b"", b"\x00part"])
async def test_parts_that_no_peer_sends_hurt_nobody(part: bytes) -> None:
    """The last one looks like what libzmq puts before a frame."""
    a, b = End("aa", TCP), End("bb", TCP)
    async with ends(a, b):
        one_way(a, b)
        a.send("bb", "before")
        await b.listener.until(lambda: b.listener.received_words == ["before"])
        with zmq.Context() as context:
            stranger: zmq.Socket[bytes] = context.socket(zmq.DEALER)
            stranger.linger = 0
            stranger.connect(b.endpoint)
            for count in (2, 3, 7):
                stranger.send_multipart([part] * count)
            await b.listener.until(lambda: b.channels.counters["malformed"] >= 3)
            stranger.close()
        for number in range(20):
            a.send("bb", str(number))
        await b.listener.until(lambda: len(b.listener.received_words) == 21)
        assert await a.channels.settled(PATIENCE_S)
        assert b.listener.received_words == ["before", *(str(number) for number in range(20))]
        assert a.listener.lost_peers == b.listener.lost_peers == []


@asynccontextmanager
async def known() -> AsyncIterator[tuple[End, End, Link]]:
    """The first end has had an ack of the second one. No late ack comes by itself, nothing is sent again."""
    times = ResendTimes(ack_late_s=3600.0, later_s=3600.0)
    a, b = End("aa", TCP, resend=times), End("bb", TCP, resend=times)
    async with ends(a, b):
        one_way(a, b)
        a.send("bb", "first")
        link = a.channels.link("bb")
        assert link is not None
        await a.listener.until(lambda: not link.undelivered)
        yield a, b, link


async def test_who_has_had_an_ack_gets_the_next_one_with_many_frames() -> None:
    async with known() as (a, b, link):
        for number in range(ACK_EVERY - 1):
            a.send("bb", str(number))
        await b.listener.until(lambda: len(b.listener.received_words) == ACK_EVERY)
        later = End("cc", TCP)
        async with ends(later):
            one_way(later, b)
            later.send("bb", "the first of another")  # its ack goes out soon, and after all that are due before
            assert await later.channels.settled(PATIENCE_S)
            assert later.channels.counters["resent"] == 0
        back = b.channels.link("aa")
        assert back is not None and back.incoming.owed == ACK_EVERY - 1
        assert link.undelivered == ACK_EVERY - 1
        a.send("bb", "last")
        await a.listener.until(lambda: not link.undelivered)
        assert a.channels.counters["resent"] == 0


async def test_who_waits_for_acks_gets_them_soon() -> None:
    """Its frames come again, and those are acknowledged soon."""
    async with known() as (a, b, _link):
        a.send("bb", "last")
        await b.listener.until(lambda: b.listener.received_words == ["first", "last"])
        assert await a.channels.settled(PATIENCE_S)
        assert (a.channels.counters["resent"], b.channels.counters["duplicates"]) == (1, 1)
        assert b.listener.received_words == ["first", "last"]
