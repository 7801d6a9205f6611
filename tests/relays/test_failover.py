"""A relay that fails between two living processes: the next one takes over, counted, and nothing hangs."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest

from stage_runtime.errors import RelayFailed, TransferError
from stage_runtime.payloads import encoding
from stage_runtime.payloads.pack import Pack
from stage_runtime.relays.base import Peer, RelayOperation, TransferId
from stage_runtime.relays.context import RelayContext
from stage_runtime.relays.dispatch import Relays
from stage_runtime.relays.moving.pending_transfers import GetOperation, PutOperation, TransferCompletion
from stage_runtime.relays.registry import RELAYS, RelayEntry
from stage_runtime.relays.shm.relay import ShmRelay
from stage_runtime.transfers.receiving import Fetched, Fetching
from stage_runtime.wire.parts import Body
from tests.relays.relay_pairs import MIB, PATIENCE_S, SMALL, FarEnd

ARRAY = np.arange(3 * MIB, dtype=np.uint8)


class Refusing(ShmRelay):
    """A relay whose puts find their peer unreachable."""

    name = "refusing"

    def put(
        self, pack: Pack, *, request_id: str, peer: Peer, like: RelayOperation | None = None
    ) -> PutOperation | None:
        raise RelayFailed("its socket is closed")


class Silent(ShmRelay):
    """A relay whose bytes never come."""

    name = "silent"

    def get(self, metadata: bytes, *, request_id: str, peer: Peer, holder: str = "") -> GetOperation:
        announced = self._decoded(metadata, peer)
        return GetOperation(TransferCompletion(self._loop), TransferId(announced.transfer), peer, metadata)


def refusing(context: RelayContext) -> Refusing:
    return Refusing(context)


def silent(context: RelayContext) -> Silent:
    return Silent(context)


TABLE: Mapping[str, RelayEntry] = {
    "refusing": RelayEntry(factory=f"{__name__}:refusing", auto=False),
    "silent": RelayEntry(factory=f"{__name__}:silent", auto=False),
    "shm": RELAYS["shm"],
    "tcp": RELAYS["tcp"],
}


class Two:
    """``a`` and ``b`` in this process; a failure that one reports reaches the other at once."""

    def __init__(self, *names: str) -> None:
        """names: of the relays of `TABLE` that both have; none: all."""
        self._table = {name: TABLE[name] for name in names or TABLE}
        self.failed_over: list[tuple[str, str]] = []
        self.a, self.b = (self._end(name, other) for name, other in ("ab", "ba"))
        self.a.open("b", self.b.facts())
        self.b.open("a", self.a.facts())

    def _end(self, name: str, other: str) -> Relays:
        def failed(peer: str, relay: str, reason: str) -> None:
            self.failed_over.append((name, relay))
            {"a": self.a, "b": self.b}[peer].fail(name, relay, reason, notify=False)

        return Relays(
            loop=asyncio.get_running_loop(),
            incarnation=name,
            on_release=lambda peer, transfer: self.a.released("b", transfer),
            on_failed=failed,
            settings=msgspec.structs.replace(SMALL, named=frozenset({"refusing", "silent"} & self._table.keys())),
            table=self._table,
        )

    def put(self, backend: str) -> RelayOperation:
        operation = self.a.put(encoding.extract(ARRAY), request_id="r", peer="b", backend=backend)
        assert operation is not None
        return operation

    def close(self) -> None:
        self.a.close()
        self.b.close()


@pytest.mark.proves("relay-fails")
async def test_a_put_that_fails_goes_by_the_next_relay_and_both_ends_know(caplog: pytest.LogCaptureFixture) -> None:
    two = Two()
    try:
        assert (two.a.choose("b", "refusing"), two.b.choose("a", "refusing")) == ("refusing", "refusing")
        put = two.put("refusing")
        assert put.metadata.startswith(b"shm:")
        view = await two.b.get(put.metadata, request_id="r", peer="a").wait_for_completion(PATIENCE_S)
        assert bytes(view) == ARRAY.tobytes()
        assert (two.a.choose("b", "refusing"), two.b.choose("a", "refusing")) == ("shm", "shm")
        assert two.failed_over == [("a", "refusing")]
        for _ in range(3):
            two.put("refusing")
        async with asyncio.timeout(PATIENCE_S):
            while not two.a.stats()["refusing_failovers"]:
                await asyncio.sleep(0.01)
        logged = [record.message for record in caplog.records if "refusing to b failed" in record.message]
        assert logged == ["relay refusing to b failed: its socket is closed; using shm"]
        del view
    finally:
        two.close()


async def test_a_put_that_fails_where_no_other_relay_reaches_its_peer_says_so() -> None:
    two = Two("refusing")
    try:
        with pytest.raises(RelayFailed, match="its socket is closed"):
            two.put("refusing")
    finally:
        two.close()


@pytest.mark.proves("relay-fails")
async def test_bytes_that_do_not_come_fail_their_request_and_the_next_one_goes_by_another_relay() -> None:
    two = Two()
    fetching = Fetching(two.b, asyncio.get_running_loop(), stalled_s=0.1)
    over: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    try:
        put = two.put("silent")

        def fetch(transfer: bytes) -> None:
            fetching.fetch("a", Body(b"", (), transfer=transfer), "r", over.set_result, over.set_result)

        fetch(put.metadata)
        failure = await asyncio.wait_for(over, PATIENCE_S)
        assert isinstance(failure, TransferError) and "without progress" in str(failure)
        assert two.failed_over == [("b", "silent")]
        over = asyncio.get_running_loop().create_future()
        fetch(two.put("silent").metadata)
        fetched = await asyncio.wait_for(over, PATIENCE_S)
        assert isinstance(fetched, Fetched) and fetched.nbytes == ARRAY.nbytes
        fetched.discard()
    finally:
        fetching.close()
        two.close()


async def test_the_last_relay_is_never_given_up(caplog: pytest.LogCaptureFixture) -> None:
    two = Two()
    try:
        for relay in ("shm", "tcp", "tcp"):
            two.a.fail("b", relay, "it stalled")
        assert two.a.choose("b") == "tcp"
        assert two.failed_over == [("a", "shm")]
        assert "relay tcp to b failed: it stalled; no other one reaches it" in caplog.text
    finally:
        two.close()


@pytest.mark.proves("relay-fails")
@pytest.mark.parametrize("backend", ["mooncake", "nixl"])
async def test_a_library_that_cannot_reach_a_living_peer_is_replaced(backend: str) -> None:
    """The far end is alive, and what it announced of its backend leads nowhere."""
    far = FarEnd(relay=backend)
    near = Relays(
        loop=asyncio.get_running_loop(),
        incarnation="near",
        on_release=lambda peer, transfer: None,
        settings=msgspec.structs.replace(SMALL, named=frozenset({backend})),
    )
    try:
        facts = dict(far.facts)
        facts[backend] = NOWHERE[backend](dict(facts[backend]))
        near.open("far", facts)
        far.ask(do="open", facts=near.facts())
        # The library needs seconds for its first work on a busy machine: that is not a peer from which nothing comes.
        fetching = Fetching(near, asyncio.get_running_loop(), stalled_s=2 * PATIENCE_S)
        over: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        metadata = base64.b64decode(far.ask(do="put", nbytes=MIB, mark=3, backend=backend))
        assert near.choose("far", backend) == backend
        fetching.fetch("far", Body(b"", (), transfer=metadata), "r", over.set_result, over.set_result)
        assert isinstance(await asyncio.wait_for(over, PATIENCE_S), RelayFailed)
        assert near.choose("far", backend) == "shm"
        again = near.put(encoding.extract(ARRAY), request_id="r", peer="far", backend=backend)
        assert again is not None
        got = far.ask(do="get", metadata=base64.b64encode(again.metadata).decode())
        assert got["sha"] == hashlib.sha256(ARRAY.data).hexdigest()
        fetching.close()
    finally:
        near.close()
        far.close()


def _closed_session(facts: dict[str, Any]) -> dict[str, Any]:
    return {**facts, "session": "127.0.0.1:1"}


def _other_metadata(facts: dict[str, Any]) -> dict[str, Any]:
    return {**facts, "metadata": "00" * 64}


NOWHERE = {"mooncake": _closed_session, "nixl": _other_metadata}
