"""The relays between two processes, and what is left when one of them is killed."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stage_runtime.errors import RelayRefused, TransferError
from stage_runtime.payloads import encoding
from stage_runtime.relays import registry
from stage_runtime.relays.base import RelayOperation
from stage_runtime.relays.context import RelaySettings
from stage_runtime.relays.dispatch import Relays
from stage_runtime.relays.registry import RELAYS
from tests import debian
from tests.relays.relay_pairs import MIB, PATIENCE_S, FarEnd
from tests.relays.relay_tables import TABLE
from tests.thoroughness import rows

OPENED = debian.usable(RELAYS)


@pytest.fixture
def far() -> Iterator[FarEnd]:
    end = FarEnd()
    yield end
    end.close()


@pytest.fixture
async def near(far: FarEnd) -> AsyncIterator[Relays]:
    relays = Relays(
        loop=asyncio.get_running_loop(),
        incarnation="near",
        on_release=lambda peer, transfer: None,
        settings=RelaySettings(named=frozenset(OPENED), arena_bytes=256 * MIB, prefault_bytes=0),
        table=TABLE,
    )
    assert relays.open("far", far.facts) == OPENED
    assert far.ask(do="open", facts=relays.facts()) == list(OPENED)
    yield relays
    relays.close()


def put(near: Relays, array: np.ndarray[Any, Any], backend: str) -> RelayOperation:
    operation = near.put(encoding.extract(array), request_id="r", peer="far", backend=backend)
    assert operation is not None
    return operation


def fetch(far: FarEnd, operation: RelayOperation, **options: Any) -> Any:
    return far.ask(do="get", metadata=base64.b64encode(operation.metadata).decode(), **options)


async def until(condition: Callable[[], bool]) -> None:
    """A relay's thread has to see first in some tests that nothing moves any more."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.mark.long
@pytest.mark.parametrize("backend", rows(list(RELAYS), each_run=3))
async def test_bytes_reach_another_process_are_released_from_there_and_come_back(
    near: Relays, far: FarEnd, backend: str
) -> None:
    """All sizes are in one test, because each pair of processes loads every relay's library."""
    for nbytes in (4096, MIB, 40 * MIB + 3):
        array = np.random.default_rng(1).integers(0, 255, nbytes, np.uint8)
        operation = put(near, array, backend)
        assert fetch(far, operation) == {"sha": hashlib.sha256(array.data).hexdigest(), "nbytes": nbytes}
        assert far.ask(do="drop") == [operation.transfer]
        near.released("far", operation.transfer)
        assert operation.done()
        await until(lambda: near.stats()["arena_bytes_in_use"] == 0)
    metadata = base64.b64decode(far.ask(do="put", nbytes=3 * MIB, mark=7, backend=backend))
    buffer = await near.get(metadata, request_id="r", peer="far").wait_for_completion(PATIENCE_S)
    assert bytes(buffer) == b"\7" * (3 * MIB)


@pytest.mark.long
@pytest.mark.proves("killed-while-sending")
@pytest.mark.parametrize("backend", rows(list(RELAYS), each_run=3))
async def test_a_killed_receiver_leaves_nothing_of_ours_in_use(near: Relays, far: FarEnd, backend: str) -> None:
    operations = [put(near, np.ones(MIB, np.uint8), backend) for _ in range(20)]
    for operation in operations[:10]:
        fetch(far, operation)
    far.process.kill()
    far.process.wait(PATIENCE_S)
    near.forget("far")
    assert all(operation.done() for operation in operations)
    stats = near.stats()
    assert (stats[f"{backend}_unreleased_bytes"], stats[f"{backend}_unreleased_transfers"]) == (0, 0)
    await until(lambda: near.stats()["arena_bytes_in_use"] == 0)


async def test_what_a_killed_sender_put_by_shm_can_still_be_read(near: Relays, far: FarEnd) -> None:
    metadata = base64.b64decode(far.ask(do="put", nbytes=3 * MIB, mark=9, backend="shm"))
    buffer = await near.get(metadata, request_id="r", peer="far").wait_for_completion(PATIENCE_S)
    far.process.kill()
    far.process.wait(PATIENCE_S)
    near.forget("far")
    assert bytes(buffer) == b"\x09" * (3 * MIB)
    with pytest.raises(TransferError, match="which is not open"):
        near.get(metadata, request_id="r", peer="far")


def shared_files() -> set[Path]:
    """All of the machine, but for semaphores: those are other programs', we use none."""
    return {path for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.")}


@pytest.mark.proves("killed-while-sending")
async def test_a_killed_process_leaves_no_file_behind(near: Relays, far: FarEnd) -> None:
    before = shared_files()
    far.ask(do="put", nbytes=8 * MIB, mark=9, backend="shm")
    far.process.kill()
    far.process.wait(PATIENCE_S)
    left = shared_files() - before
    await until(lambda: not left & shared_files())  # those of programs beside this test go with them
    assert not Path(f"/proc/{far.process.pid}").exists()


async def test_a_frozen_sender_s_transfer_fails_by_its_deadline_and_never_hangs(near: Relays, far: FarEnd) -> None:
    far.process.send_signal(signal.SIGSTOP)
    try:
        announced = b"tcp:" + bytes.fromhex("92ce00ffffff64")  # a transfer that never comes
        fetching = near.get(announced, request_id="r", peer="far")
        with pytest.raises(TransferError, match=r"not complete after 0\.05 s"):
            await fetching.wait_for_completion(0.05)
    finally:
        far.process.send_signal(signal.SIGCONT)


async def test_a_sender_that_dies_on_the_way_fails_who_waits(near: Relays, far: FarEnd) -> None:
    fetching = near.get(b"tcp:" + bytes.fromhex("92ce00ffffff64"), request_id="r", peer="far")
    waiter = asyncio.ensure_future(fetching.wait_for_completion(PATIENCE_S))
    await asyncio.sleep(0)
    far.process.kill()
    near.forget("far")
    with pytest.raises(TransferError, match="its sender far is gone"):
        await waiter


async def test_a_dead_receiver_holds_up_nobody(near: Relays, far: FarEnd) -> None:
    far.process.kill()
    far.process.wait(PATIENCE_S)
    for _ in range(5):
        assert put(near, np.ones(8 * MIB, np.uint8), "tcp") is not None
    near.forget("far")
    assert near.stats()["tcp_unreleased_bytes"] == 0


IMPOSTORS: tuple[dict[str, Any], ...] = (
    {"boot_id": "another machine"},
    {"pid_namespace": 1},
    {"pid": 2**22 + 1},
    {"fd": 9999},
    {"fd": 0},
    {"token": "00" * 16},
    {"token": "no hex"},
    {"nbytes": 4096},
    {"nbytes": -1},
    {"fd": "../../etc/passwd"},
    {"pid": None},
)


async def test_an_arena_that_is_not_the_one_meant_is_not_mapped(near: Relays, far: FarEnd) -> None:
    for changes in IMPOSTORS:
        assert near.open(f"with {changes}", {"shm": {**far.facts["shm"], **changes}}) == ()


async def test_a_peer_without_our_memory_is_reached_by_tcp(near: Relays, far: FarEnd) -> None:
    facts = {"tcp": far.facts["tcp"], "shm": {**far.facts["shm"], "pid_namespace": 1}}
    assert near.open("elsewhere", facts) == ("tcp",)
    assert near.choose("elsewhere") == "tcp"
    with pytest.raises(RelayRefused, match="relayBackend shm does not reach elsewhere: it is not open there"):
        near.choose("elsewhere", "shm")


async def test_a_peer_with_other_facts_than_ours_is_simply_not_reached(near: Relays) -> None:
    strange: tuple[dict[str, Any], ...] = (
        {},
        {"shm": 3},
        {"tcp": {}},
        {"tcp": {"endpoint": "nonsense", "token": ""}},
        {"nixl": {}},
    )
    for facts in strange:
        assert near.open(f"peer {facts}", facts) == ()
    with pytest.raises(TransferError, match="no relay reaches"):
        near.choose("peer {}")


async def test_the_arena_cannot_be_shrunk_under_its_readers(near: Relays) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(near.arena.fd, 4096)


async def test_unix_sockets_carry_bulk_too(tmp_path: Path) -> None:
    end = FarEnd(bind=f"ipc://{tmp_path}/far.data")
    relays = Relays(
        loop=asyncio.get_running_loop(),
        incarnation="near",
        on_release=lambda peer, transfer: None,
        settings=RelaySettings(arena_bytes=64 * MIB, prefault_bytes=0, bind=f"ipc://{tmp_path}/near.data"),
    )
    try:
        assert relays.open("far", end.facts) == registry.to_open(())
        end.ask(do="open", facts=relays.facts())
        array = np.full(5 * MIB, 3, np.uint8)
        assert fetch(end, put(relays, array, "tcp"))["sha"] == hashlib.sha256(array.data).hexdigest()
    finally:
        relays.close()
        end.close()
