"""Links whose connections are closed while they are not used: over real sockets, with their sessions kept."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from stage_runtime.wire.messages import Deregister
from tests.sockets.peers import PATIENCE_S, End, ends, introduce


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="omni"))
    yield path
    shutil.rmtree(path)


def made(folder: Path, name: str, idle_after_s: float | None = 0.1) -> End:
    return End(name, f"ipc://{folder}/{name}", idle_after_s=idle_after_s)


async def asleep(end: End, peer: str) -> None:
    link = end.channels.link(peer)
    assert link is not None
    await end.listener.until(lambda: link.connection is None)


async def test_a_link_at_rest_sleeps_and_goes_on_where_it_was(folder: Path) -> None:
    a, b = made(folder, "aa"), made(folder, "bb")
    async with ends(a, b):
        introduce(a, b)
        for turn in range(4):
            a.send("bb", f"there {turn}")
            await b.listener.until(lambda turn=turn: f"there {turn}" in b.listener.received_words)  # type: ignore[misc]
            b.send("aa", f"back {turn}")
            await a.listener.until(lambda turn=turn: f"back {turn}" in a.listener.received_words)  # type: ignore[misc]
            await asleep(a, "bb")
            await asleep(b, "aa")
        assert b.listener.received_words == [f"there {turn}" for turn in range(4)]
        assert a.listener.received_words == [f"back {turn}" for turn in range(4)]
        assert a.listener.lost_peers == b.listener.lost_peers == []
        assert a.channels.counters["idle_closed"] >= 4
        assert a.channels.counters["woken"] >= 3


async def test_a_link_that_sleeps_costs_no_descriptor(folder: Path) -> None:
    a = made(folder, "aa", idle_after_s=3.0)
    others = [made(folder, f"p{number}", idle_after_s=None) for number in range(30)]
    async with ends(a, *others):
        before = len(os.listdir("/proc/self/fd"))
        for other in others:
            a.channels.connect(other.name, other.endpoint)

        def connected() -> bool:
            """Links that are used do not sleep, however long the last of them takes to connect."""
            for other in others:
                link = a.channels.link(other.name)
                assert link is not None
                link.used = True
            return a.channels.counters["connected"] == 30

        await a.listener.until(connected)
        assert len(os.listdir("/proc/self/fd")) >= before + 30
        await a.listener.until(lambda: len(os.listdir("/proc/self/fd")) <= before + 5)
        assert len(a.channels.peers) == 30


async def test_a_link_that_is_made_asleep_is_connected_when_it_is_used(folder: Path) -> None:
    a, b = made(folder, "aa", None), made(folder, "bb", None)
    async with ends(a, b):
        a.channels.connect("bb", b.endpoint, asleep=True)
        b.channels.connect("aa", a.endpoint, asleep=True)
        await asyncio.sleep(0)
        assert a.channels.counters["connected"] == 0
        thread = Thread(target=a.channels.send, args=("bb", Deregister("from a thread")))
        thread.start()
        await b.listener.until(lambda: b.listener.received_words == ["from a thread"])
        thread.join()
        assert await a.channels.settled(PATIENCE_S), "the one who receives has woken its own link, to acknowledge"


async def test_a_peer_that_is_gone_when_the_link_is_woken_is_lost(folder: Path) -> None:
    a, b = End("aa", f"ipc://{folder}/aa", dead_after_s=3.0, idle_after_s=0.1), made(folder, "bb", None)
    async with ends(a, b):
        a.channels.connect("bb", b.endpoint)
        await asleep(a, "bb")
        b.channels.close()
        a.send("bb", "is anybody there")
        await a.listener.until(lambda: [peer for peer, _ in a.listener.lost_peers] == ["bb"])
        assert a.channels.link("bb") is None


async def test_a_link_with_unacknowledged_frames_does_not_sleep(folder: Path) -> None:
    a = made(folder, "aa")
    b = made(folder, "bb")
    async with ends(a, b):
        a.channels.connect("bb", b.endpoint)
        a.send("bb", "nobody acknowledges")  # b does not know a
        link = a.channels.link("bb")
        assert link is not None
        await a.listener.until(lambda: a.channels.counters["resent"] >= 3)
        assert link.connection is not None
        b.channels.connect("aa", a.endpoint)
        await asleep(a, "bb")


async def test_whatever_sleeps_in_between_every_message_is_delivered_once_and_in_order(folder: Path) -> None:
    a, b = made(folder, "aa", 0.004), made(folder, "bb", 0.004)
    async with ends(a, b):
        introduce(a, b)

        def speak(end: End, peer: str) -> None:
            for number in range(200):
                assert end.channels.send(peer, Deregister(str(number)))
                if number % 10 == 0:
                    asyncio.run(asyncio.sleep(0.01))

        threads = [Thread(target=speak, args=(a, "bb")), Thread(target=speak, args=(b, "aa"))]
        for thread in threads:
            thread.start()
        wanted = [str(number) for number in range(200)]
        await a.listener.until(lambda: len(a.listener.received_words) >= 200)
        await b.listener.until(lambda: len(b.listener.received_words) >= 200)
        for thread in threads:
            thread.join()
        assert a.listener.received_words == b.listener.received_words == wanted
