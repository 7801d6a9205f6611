"""Outgoing connections over real sockets: many to one socket, shared by endpoint, distinct in events."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from stage_runtime.errors import ConfigurationError, LimitReached
from stage_runtime.rules.members import beats
from stage_runtime.sockets.connections.dialing import canonical
from stage_runtime.sockets.endpoints import opening
from stage_runtime.sockets.endpoints.addresses import CurveSecurity
from tests.sockets.peers import SECRET, End, ends, introduce


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="omni"))
    yield path
    shutil.rmtree(path)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    ("endpoint", "name"),
    [
        ("ipc:///run/x", "ipc:///run/x"),
        ("tcp://10.0.0.7:5550", "tcp://10.0.0.7:5550"),
        ("tcp://[::ffff:10.0.0.7]:5550", "tcp://10.0.0.7:5550"),
        ("tcp://[0:0::1]:5550", "tcp://[::1]:5550"),
        ("tcp://[fe80::1%eth0]:5550", None),
        ("tcp://localhost:5550", None),
    ],
)
def test_an_endpoint_is_named_as_libzmq_names_it_in_events(endpoint: str, name: str | None) -> None:
    assert canonical(endpoint) == name


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
async def test_a_link_costs_at_most_three_descriptors_at_either_end(kind: str, folder: Path) -> None:
    """One for the connection out and one for the connection in; all ends are in this process."""
    count = 40
    hub = End("hub", f"ipc://{folder}/hub" if kind == "ipc" else "tcp://127.0.0.1:*")
    leaves = [
        End(f"p{number}", f"ipc://{folder}/{number}" if kind == "ipc" else "tcp://127.0.0.1:*")
        for number in range(count)
    ]
    async with ends(hub, *leaves):
        introduce(hub, leaves[0])  # what each end opens with its first link
        for leaf in leaves[1:]:
            leaf.channels.connect("nobody", leaf.endpoint)
        await asyncio.sleep(0)
        leaves[0].send("hub", "p0")
        hub.send("p0", "hub")
        await hub.listener.until(lambda: len(hub.listener.messages) == 1 and len(leaves[0].listener.messages) == 1)
        await hub.listener.until(lambda: all(leaf.channels.counters["connected"] for leaf in leaves))
        before = descriptors()
        for leaf in leaves[1:]:
            introduce(hub, leaf)
            leaf.send("hub", leaf.name)
            hub.send(leaf.name, "hub")
        await hub.listener.until(
            lambda: len(hub.listener.messages) == count and all(leaf.listener.messages for leaf in leaves)
        )
        assert descriptors() - before <= (count - 1) * 4  # both ends of each link: two connections, four descriptors


async def test_more_peers_than_a_context_holds_sockets_by_default(folder: Path) -> None:
    hub, leaf = End("hub", f"ipc://{folder}/hub"), End("leaf", f"ipc://{folder}/leaf")
    async with ends(hub, leaf):
        for number in range(1100):
            hub.channels.connect(f"p{number}", f"ipc://{folder}/nobody{number}")
        introduce(hub, leaf)
        hub.send("leaf", "still")
        await leaf.listener.until(lambda: leaf.listener.received_words == ["still"])


async def test_the_next_life_at_an_endpoint_is_reached_while_the_connection_of_the_one_before_closes(
    folder: Path,
) -> None:
    hub = End("hub", f"ipc://{folder}/hub")
    async with ends(hub):
        for life in range(5):
            leaf = End(f"life{life}", f"ipc://{folder}/leaf")
            async with ends(leaf):
                introduce(hub, leaf)
                hub.send(leaf.name, leaf.name)
                await leaf.listener.until(lambda leaf=leaf: leaf.listener.received_words == [leaf.name])  # type: ignore[misc]
                hub.channels.drop(leaf.name)


async def test_a_name_is_connected_to_as_well_as_an_address() -> None:
    hub, leaf = End("hub", "tcp://127.0.0.1:*"), End("leaf", "tcp://127.0.0.1:*")
    async with ends(hub, leaf):
        introduce(hub, leaf, via=leaf.endpoint.replace("[::ffff:127.0.0.1]", "localhost"))
        hub.send("leaf", "by name")
        await leaf.listener.until(lambda: leaf.listener.received_words == ["by name"])


async def test_endpoints_that_cannot_be_connected_to_keep_no_descriptors() -> None:
    end = End("end", "tcp://127.0.0.1:*")
    async with ends(end):
        before, count = descriptors(), 20
        for number in range(count):
            with pytest.raises((LimitReached, ConfigurationError)):
                end.channels.connect(f"p{number}", f"tcp://no such host {number}")
        await end.listener.until(lambda: descriptors() < before + count)  # libzmq closes them in a thread of its own


async def test_a_lost_peer_is_distinguished_from_its_neighbours(folder: Path) -> None:
    hub = End("hub", f"ipc://{folder}/hub")
    leaves = [End(f"p{number}", f"ipc://{folder}/{number}") for number in range(5)]
    async with ends(hub, *leaves):
        for leaf in leaves:
            introduce(hub, leaf)
            hub.send(leaf.name, "here")
            await leaf.listener.until(lambda leaf=leaf: leaf.listener.received_words == ["here"])  # type: ignore[misc]
        leaves[2].channels.close()
        await hub.listener.until(lambda: bool(hub.listener.lost_peers))
        assert [peer for peer, _ in hub.listener.lost_peers] == ["p2"]
        hub.send("p3", "again")
        await leaves[3].listener.until(lambda: leaves[3].listener.received_words == ["here", "again"])


async def test_one_who_uses_other_sockets_is_taken_for_another_protocol() -> None:
    """A program of an earlier protocol pushes; under CURVE libzmq says no more than that it connected and left."""
    security = CurveSecurity(SECRET)
    b = End("bb", "tcp://127.0.0.1:*", security=security)
    context = zmq.Context()
    async with ends(b):
        push: zmq.Socket[bytes] = context.socket(zmq.PUSH)
        push.ipv6 = True
        security.client(push)
        push.connect(b.endpoint)
        began = time.monotonic()
        await b.listener.until(lambda: b.channels.other_protocol_at >= began)
        push.close(linger=0)
    context.term()


@pytest.mark.parametrize("dead_after_s", [0.3, 3.0, 86_400.0])
@pytest.mark.parametrize("factor", [1.0, 2.5, 40.0])
def test_whoever_is_checked_waits_longer_for_a_heartbeat_than_they_are_apart(
    dead_after_s: float, factor: float
) -> None:
    times = opening.heartbeats(dead_after_s, factor)
    assert times.ttl > times.interval or times.ttl == 0
    assert not times.ttl or factor <= beats.RAREST, "a coordinator keeps no timer for each of its members"
    assert times.interval + times.timeout <= dead_after_s * 1000 * (1 + (factor - 1) / 3)
    assert times.rare == (factor > 1)


@pytest.mark.parametrize("dead_after_s", [3.0, 4.7, 18.0, 30.0, 49.1, 49.3, 60.0, 600.0, 86_400.0])
@pytest.mark.parametrize("factor", [1.0, 4.0, 8.0, 40.0])
def test_no_time_is_announced_that_the_other_end_s_libzmq_takes_for_a_shorter_one(
    dead_after_s: float, factor: float
) -> None:
    """Its milliseconds have 16 bits: 80,000 were 14,464, and each heartbeat ended the connection."""
    times = opening.heartbeats(dead_after_s, factor)
    assert times.ttl < 1 << 16
    assert times.ttl == 0 or times.ttl > times.interval
