"""A beat that comes again byte for byte is decoded once and received each time, as long as its link is the same."""

from __future__ import annotations

import asyncio

from stage_runtime.sockets.frames.repeats import LIMIT
from stage_runtime.wire.messages import Beat, Message
from tests.sockets.peers import End, Listener, ends, introduce

TCP = "tcp://127.0.0.1:*"


class Beats(Listener):
    """The beats that came."""

    @property
    def beats(self) -> list[Message]:
        return [message for _, message in self.messages if isinstance(message, Beat)]


async def settled(a: End, b: End) -> None:
    """Both know each other's session, and neither owes an ack."""
    a.send("bb", "word")
    b.send("aa", "word")
    await b.listener.until(lambda: b.listener.received_words[-1:] == ["word"])
    await a.listener.until(lambda: a.listener.received_words[-1:] == ["word"])
    assert await a.channels.settled(60.0) and await b.channels.settled(60.0)


async def test_equal_beats_are_decoded_once_and_each_is_received() -> None:
    heard = Beats()
    a, b = End("aa", TCP), End("bb", TCP, listener=heard)
    async with ends(a, b):
        introduce(a, b)
        await settled(a, b)
        sent = [Beat({"s": load}, {}, {}) for load in (0, 0, 0, 1, 0, 0)]
        for beat in sent:
            a.channels.hint("bb", beat)
        await heard.until(lambda: len(heard.beats) == len(sent))
        assert heard.beats == sent
        first, second, third, fourth, fifth, sixth = heard.beats
        assert first is second is third and fifth is sixth
        assert fourth is not first and fifth is not first


async def test_a_beat_that_is_large_is_decoded_each_time() -> None:
    heard = Beats()
    a, b = End("aa", TCP), End("bb", TCP, listener=heard)
    async with ends(a, b):
        introduce(a, b)
        await settled(a, b)
        large = Beat({}, {}, {}, {"n" * LIMIT: 1.0})
        a.channels.hint("bb", large)
        a.channels.hint("bb", large)
        await heard.until(lambda: len(heard.beats) == 2)
        first, second = heard.beats
        assert first == second == large and first is not second


async def test_a_beat_on_a_link_that_was_dropped_is_that_of_a_stranger_though_it_came_before() -> None:
    heard = Beats()
    a, b = End("aa", TCP), End("bb", TCP, listener=heard)
    async with ends(a, b):
        introduce(a, b)
        await settled(a, b)
        beat = Beat({"s": 1}, {}, {})
        a.channels.hint("bb", beat)
        a.channels.hint("bb", beat)
        await heard.until(lambda: len(heard.beats) == 2)
        b.channels.drop("aa")
        a.channels.hint("bb", beat)
        await heard.until(lambda: heard.strangers == ["aa"])
        b.channels.connect("aa", a.endpoint)
        b.send("aa", "a new session")
        await a.listener.until(lambda: [peer for peer, _ in a.listener.lost_peers] == ["bb"])
        introduce(a, b)
        await settled(a, b)
        assert len(heard.beats) == 2
        a.channels.hint("bb", beat)
        await heard.until(lambda: len(heard.beats) == 3)


async def test_a_repeated_beat_keeps_its_link_in_use() -> None:
    a, b = End("aa", TCP), End("bb", TCP, listener=Beats())
    async with ends(a, b):
        introduce(a, b)
        await settled(a, b)
        link = b.channels.link("aa")
        assert link is not None
        for _ in range(3):
            link.used = False
            a.channels.hint("bb", Beat({}, {}, {}))
            async with asyncio.timeout(60):
                while not link.used:
                    await asyncio.sleep(0.001)
