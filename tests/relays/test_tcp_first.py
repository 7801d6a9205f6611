"""The first transfer between two processes by the tcp relay: its connection, and the message that names its sender."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from stage_runtime.payloads import encoding
from stage_runtime.relays.dispatch import Relays
from tests.relays.relay_pairs import PATIENCE_S, SMALL, pair
from tests.sockets.peers import Proxy

NBYTES = 100_000


@pytest.mark.proves("first-large-payload")
async def test_a_peer_is_connected_to_before_anything_is_put_where_that_is_expected() -> None:
    with pair("tcp") as both:
        facts = both.b.facts()
        proxy = Proxy(facts["tcp"]["endpoint"])
        try:
            proxy.hold()
            facts["tcp"]["endpoint"] = proxy.endpoint
            both.a.forget("b")
            assert "tcp" in both.a.open("b", facts)
            both.a.prepare("b", "tcp")
            both.a.prepare("nobody", "tcp")
            await both.until(lambda: proxy.held, 60.0)
            proxy.let_go()
            array = np.arange(NBYTES, dtype=np.uint8)
            _, put = both.put(array)
            assert bytes(await both.get(put, timeout=PATIENCE_S)) == array.tobytes()
        finally:
            proxy.close()


@pytest.mark.proves("early-tcp-transfer")
async def test_a_transfer_that_is_here_before_its_sender_is_known_is_kept_for_it() -> None:
    """Its connection may be faster than the message that introduces the sender to the receiver."""
    with pair("tcp") as both:
        newcomer = Relays(
            loop=asyncio.get_running_loop(),
            incarnation="new",
            on_release=lambda peer, transfer: both.b.released("new", transfer),
            settings=msgspec.structs.replace(SMALL, named=frozenset({"tcp"})),
        )
        try:
            both.b.open("new", newcomer.facts())
            array = np.arange(NBYTES, dtype=np.uint8)
            put = both.b.put(encoding.extract(array), request_id="r", peer="new", backend="tcp")
            assert put is not None
            await both.until(lambda: newcomer.stats()["tcp_received_transfers"] == 1, 60.0)
            newcomer.open("b", both.b.facts())
            got = newcomer.get(put.metadata, request_id="r", peer="b")
            assert bytes(await got.wait_for_completion(PATIENCE_S)) == array.tobytes()
        finally:
            newcomer.close()
