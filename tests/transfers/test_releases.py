"""Releases: what dies in one turn of the loop is reported in one message to each peer, other threads report alone."""

from __future__ import annotations

import asyncio
import threading

from stage_runtime.transfers.releases import Releases
from stage_runtime.wire.messages import Message, Release


class Link:
    def __init__(self) -> None:
        self.sent: list[tuple[str, Message]] = []

    def send(self, peer: str, message: Message) -> bool:
        self.sent.append((peer, message))
        return True


async def test_releases_of_one_turn_are_one_message_per_peer_in_their_order() -> None:
    link = Link()
    releases = Releases(asyncio.get_running_loop(), link.send)
    for peer, transfer in [("a", 1), ("b", 7), ("a", 2)]:
        releases.add(peer, transfer)
    assert link.sent == []
    await asyncio.sleep(0)
    assert link.sent == [("a", Release((1, 2))), ("b", Release((7,)))]
    releases.add("a", 3)
    await asyncio.sleep(0)
    assert link.sent[2:] == [("a", Release((3,)))]


async def test_a_release_of_another_thread_is_sent_by_that_thread() -> None:
    link = Link()
    releases = Releases(asyncio.get_running_loop(), link.send)
    thread = threading.Thread(target=releases.add, args=("a", 2))
    thread.start()
    thread.join()
    assert link.sent == [("a", Release((2,)))], "without a turn of the loop"


async def test_releases_of_the_incarnation_before_are_not_sent() -> None:
    link = Link()
    releases = Releases(asyncio.get_running_loop(), link.send)
    releases.add("a", 1)
    releases.clear()
    releases.add("a", 2)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert link.sent == [("a", Release((2,)))]
