"""The first frames of a link whose connection is still being made come by a coordinator: each once, and in order."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from stage_runtime.rules.flow.links import LinkReceiver
from stage_runtime.sockets.connections import detours
from stage_runtime.sockets.connections.links import Link
from stage_runtime.sockets.frames.resending import ResendTimes
from stage_runtime.wire import codec
from stage_runtime.wire.messages import Deregister, Detour, Message, Skip
from stage_runtime.wire.parts import Header
from tests.sockets.peers import End, Listener, Proxy, ends, introduce

TCP = "tcp://127.0.0.1:*"


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="omni"))
    yield path
    shutil.rmtree(path)


class Passing(Listener):
    """A coordinator passes detours on, an instance takes them."""

    passed: bytes = b""  #: The last frame that was passed on.
    of_request: bytes = b""  #: The last one of those that are a request's.

    def received(self, sender: str, message: Message) -> None:
        if not isinstance(message, Detour):
            super().received(sender, message)
        elif message.receiver == self.channels.incarnation:
            self.channels.detoured(message.frame)
        else:
            self.passed = message.frame
            if codec.opened(message.frame).request is not None:
                self.of_request = message.frame
            self.channels.hint(message.receiver, message)


class Three(NamedTuple):
    one: End
    other: End
    coordinator: End
    proxy: Proxy  #: The proxy from ``one`` to ``other``. Nothing passes.


@contextlib.asynccontextmanager
async def three(**bounds: Any) -> AsyncIterator[Three]:
    """Both have open links to the coordinator, and ``one`` a link to ``other`` whose connection is held."""
    made = [End(name, TCP, listener=Passing(), dead_after_s=60.0, **bounds) for name in ("one", "other", "c")]
    one, other, coordinator = made
    proxy = Proxy(other.endpoint)
    try:
        async with ends(*made):
            for end in (one, other):
                introduce(end, coordinator)
                end.send("c", "here")
                coordinator.send(end.name, "there")
                await end.listener.until(lambda end=end: end.listener.received_words == ["there"])  # type: ignore[misc]
                end.listener.received_words.clear()
            await coordinator.listener.until(lambda: len(coordinator.listener.received_words) == 2)
            one.channels.detours = other.channels.detours = lambda: ["c"]
            proxy.hold()
            introduce(one, other, via=proxy.endpoint)
            yield Three(one, other, coordinator, proxy)
    finally:
        proxy.close()


@pytest.mark.proves("first-frames")
async def test_frames_come_by_the_coordinator_while_the_connection_is_held_and_all_come_once_and_in_order() -> None:
    async with three() as (one, other, _, proxy):
        words = [f"word {number}" for number in range(3 * detours.FRAMES_MOST)]
        for word in words:
            one.send("other", word)
        await other.listener.until(lambda: len(other.listener.received_words) >= detours.FRAMES_MOST)
        link = one.channels.link("other")
        assert link is not None and not link.connected
        assert other.listener.received_words == words[: detours.FRAMES_MOST]
        proxy.let_go()
        await other.listener.until(lambda: len(other.listener.received_words) >= len(words))
        await one.listener.until(lambda: not link.undelivered)
        assert other.listener.received_words == words


@pytest.mark.parametrize("owner", ["c", "d"])
async def test_the_frame_of_a_request_comes_by_the_coordinator_that_owns_it(owner: str) -> None:
    never_again = ResendTimes(first_s=3600.0)  # a frame that is sent again may come by the other one
    async with three(resend=never_again) as (one, other, coordinator, _):
        second = End("d", TCP, listener=Passing(), dead_after_s=60.0)
        async with ends(second):
            introduce(one, second)
            introduce(other, second)
            for end in (one, other):
                second.send(end.name, "there")
                end.send("d", "here")
            await second.listener.until(lambda: len(second.listener.received_words) == 2)
            link = one.channels.link("d")
            await one.listener.until(lambda: link is not None and link.connected)
            one.channels.detours = lambda: ["c", "d"]
            passing = {end.name: end.listener for end in (coordinator, second) if isinstance(end.listener, Passing)}
            one.channels.send("other", Skip(Header("r", 1, owner, {}), "a", "b"))
            await other.listener.until(lambda: any(isinstance(got, Skip) for _, got in other.listener.messages))
            assert [name for name, listener in passing.items() if listener.of_request] == [owner]


def test_frames_of_no_request_are_spread_over_the_coordinators_by_their_receivers() -> None:
    coordinators = ["c0", "c1", "c2", "c3"]
    found = {f"p{number}": detours.choose(None, f"p{number}", coordinators) for number in range(400)}
    assert all(60 <= count <= 140 for count in Counter(found.values()).values())
    assert set(found.values()) == set(coordinators)
    for peer, coordinator in found.items():
        assert detours.choose(None, peer, coordinators) == coordinator
        assert detours.choose("c2", peer, coordinators) == "c2"
        assert detours.choose("gone", peer, coordinators) == coordinator


@pytest.mark.proves("first-frames")
async def test_when_the_coordinator_is_gone_the_frames_come_by_their_own_connection() -> None:
    async with three() as (one, other, coordinator, proxy):
        coordinator.channels.close()
        one.send("other", "first")
        proxy.let_go()
        await other.listener.until(lambda: bool(other.listener.received_words))
        one.send("other", "second")
        await other.listener.until(lambda: len(other.listener.received_words) == 2)
        assert other.listener.received_words == ["first", "second"]


async def test_a_detour_within_another_is_dropped_and_the_next_frame_is_taken() -> None:
    async with three() as (one, other, coordinator, _proxy):
        one.send("other", "first")
        await other.listener.until(lambda: other.listener.received_words == ["first"])
        assert isinstance(coordinator.listener, Passing)
        frame = coordinator.listener.passed
        unordered = msgspec.structs.replace(codec.decode(frame), seq=0)
        for _ in range(1000):
            frame = codec.encode(msgspec.structs.replace(unordered, message=Detour("other", frame)))
        other.channels.detoured(frame)
        assert other.channels.counters["malformed"] == 1
        assert other.channels.counters["handler_errors"] == 0
        one.send("other", "second")
        await other.listener.until(lambda: other.listener.received_words == ["first", "second"])


async def test_on_one_machine_nothing_goes_by_the_coordinator(folder: Path) -> None:
    one, other, coordinator = (End(name, f"ipc://{folder}/{name}") for name in ("one", "other", "c"))
    async with ends(one, other, coordinator):
        introduce(one, coordinator)
        link = one.channels.link("c")
        assert link is not None
        await one.listener.until(lambda: link.connected)
        one.channels.detours = lambda: ["c"]
        introduce(one, other)
        one.send("other", "first")
        await other.listener.until(lambda: other.listener.received_words == ["first"])
        assert one.channels.counters["detours"] == 0


@pytest.fixture
def link() -> Iterator[Link]:
    made = Link("aa", "bb", "tcp://b:1", LinkReceiver(1), stalled=lambda link: None, watch=lambda link: None)
    yield made
    made.close()


def words(frames: list[bytes]) -> list[str]:
    found = [codec.decode(frame).message for frame in frames]
    return [one.reason for one in found if isinstance(one, Deregister)]


def test_each_frame_is_given_once_up_to_a_number_and_a_size(link: Link) -> None:
    for word in "abc":
        link.send(Deregister(word))
    assert words(link.detours(4, 1000)) == ["a", "b", "c"]
    link.send(Deregister("d"))
    link.send(Deregister("e"))
    assert words(link.detours(4, 1000)) == ["d"]
    assert link.detours(4, 1000) == []


def test_what_is_too_large_and_all_behind_it_waits_for_the_connection(link: Link) -> None:
    for word in ("a", "b" * 500, "c"):
        link.send(Deregister(word))
    assert words(link.detours(8, 400)) == ["a"]
    assert link.detours(8, 400) == []


def test_what_the_peer_has_is_not_given_again_and_a_link_that_has_slept_begins_anew(link: Link) -> None:
    for word in "ab":
        link.send(Deregister(word))
    assert link.acked(1)
    assert words(link.detours(2, 1000)) == ["b"]
    assert link.acked(2)
    link.send(Deregister("c"))
    assert link.detours(2, 1000) == []
    assert link.acked(3)
    link.sleep()
    link.send(Deregister("d"))
    assert words(link.detours(2, 1000)) == ["d"]


def test_a_closed_link_gives_none(link: Link) -> None:
    link.send(Deregister("a"))
    link.close()
    assert link.detours(8, 1000) == []
