"""Every relay promises these, whatever it is made of. The other end in another process: `test_relay_processes`."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import torch

from stage_runtime.errors import TransferError
from stage_runtime.metrics import planes
from stage_runtime.payloads import encoding
from stage_runtime.payloads.pack import ALIGNMENT, Extracted, Pack
from stage_runtime.relays import registry
from stage_runtime.relays.base import Peer
from stage_runtime.relays.context import RelayContext, RelaySettings
from stage_runtime.relays.memory.arena import Arena
from stage_runtime.relays.registry import RELAYS
from tests.relays.relay_pairs import MIB, PATIENCE_S, SMALL, Pair, pair
from tests.relays.relay_tables import TABLE
from tests.relays.stand_in_gpu import on_gpu, restored


@pytest.fixture(params=list(RELAYS))
async def both(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    with pair(request.param) as ends:
        yield ends


async def test_every_number_of_a_relay_has_a_metric(both: Pair) -> None:
    numbers = planes.gauges(relays=both.a.stats(), transfers_in_flight=0, sends_queued=0, events={})
    samples = planes.samples({"talk": numbers})
    assert sum(len(values) for values in samples.values()) == len(numbers)


@pytest.mark.parametrize("nbytes", [0, 1, 63, 5000, 70_000, MIB, 2 * MIB, 5 * MIB + 17])
async def test_bytes_arrive_as_they_were_put(both: Pair, nbytes: int) -> None:
    array = np.random.default_rng(nbytes).integers(0, 255, nbytes, np.uint8)
    assert np.array_equal((await both.carry({"a": array}))["a"], array)


@pytest.mark.parametrize("nbytes", [70_000, 5 * MIB + 17])
async def test_what_is_filled_after_it_was_announced_arrives_whole(both: Pair, nbytes: int) -> None:
    array = np.random.default_rng(nbytes).integers(0, 255, nbytes, np.uint8)
    extracted, operation = both.put({"a": array, "b": array[:30_000]}, early=True)
    arriving = both.b.get(operation.metadata, request_id="r", peer="a")
    operation.fill()
    expected, array[:] = array.copy(), 0
    buffer = await arriving.wait_for_completion(PATIENCE_S)
    arrived = encoding.restore(extracted.value_bytes, extracted.refs, buffer)
    assert np.array_equal(arrived["a"], expected) and np.array_equal(arrived["b"], expected[:30_000])
    del buffer, arrived, arriving, extracted
    await both.until(lambda: both.held() == 0)


@pytest.mark.parametrize("count", [100_000, 3 * MIB])
async def test_an_output_in_the_arena_is_sent_without_a_copy_and_arrives_as_it_was_given(
    both: Pair, count: int
) -> None:
    tensor = both.a.allocate((count,), torch.uint8).fill_(1)
    puts = []

    def give(tensor: torch.Tensor = tensor) -> None:  # in a thread: who writes into what he gave has the next copied
        puts.append(both.put(tensor))
        both.a.settle()

    thread = threading.Thread(target=give)
    thread.start()
    thread.join()
    [(extracted, operation)] = puts
    tensor.fill_(2)
    arrived = encoding.restore(extracted.value_bytes, extracted.refs, await both.get(operation))
    assert (operation.copied_nbytes, arrived.unique().tolist()) == (0, [1])
    del tensor, arrived, extracted, give, puts[:]
    del thread
    await operation.wait_for_completion(PATIENCE_S)
    await both.until(lambda: both.held() == 0)


async def test_many_parts_of_all_sizes_arrive_in_one_transfer(both: Pair) -> None:
    sizes = [3 * MIB, 1, 70_000, 0, 65, 2 * MIB + 1, 300, *range(1, 40)]
    value = [torch.arange(size, dtype=torch.int64).to(torch.uint8) for size in sizes]
    arrived = await both.carry(value)
    assert all(map(torch.equal, arrived, value))


async def test_a_buffer_whose_last_part_ends_before_it_arrives_whole(both: Pair) -> None:
    """A value on a GPU is padded to the alignment: copied to the host, it is a part with a gap behind."""
    value = [torch.ones(25_001, dtype=torch.uint8), torch.arange(7, dtype=torch.uint8)]
    for sent in (value, value[:1]):
        extracted = on_gpu(sent)
        put = both.put_again(extracted)
        fetch = both.b.get(put.metadata, request_id="r", peer="a")
        await fetch.wait(PATIENCE_S)  # type: ignore[attr-defined]
        assert all(map(torch.equal, restored(extracted, fetch), sent))


@pytest.mark.parametrize("offset", [0, 1, 63])
@pytest.mark.parametrize("sizes", [[], [1], [3000, 5], [70_000, 80_000], [300_000], [3 * MIB, 9], [3 * MIB]])
async def test_gaps_before_and_behind_the_parts_arrive_as_gaps(both: Pair, sizes: list[int], offset: int) -> None:
    """A piece that is cut in the gap between two parts has such gaps."""
    parts, offsets, end = [], [], offset
    for mark, size in enumerate(sizes, 1):
        parts.append(memoryview(bytes([mark]) * size))
        offsets.append(end)
        end += size + -size % ALIGNMENT
    given = Pack(parts, offsets, end + 40)
    put = both.put_again(Extracted(b"", (), given))
    view = await both.get(put)
    assert len(view) == given.nbytes
    assert all(bytes(view[at : at + len(part)]) == part for part, at in zip(parts, offsets, strict=True))


async def test_a_put_is_complete_when_the_last_view_at_the_receiver_dies(both: Pair) -> None:
    extracted, operation = both.put({"t": torch.arange(9000), "u": torch.ones(3)})
    arrived = encoding.restore(extracted.value_bytes, extracted.refs, await both.get(operation))
    view = arrived["t"][5:]
    del arrived
    later = await both.release_another()
    assert not operation.done() and both.released == [later]
    with pytest.raises(TransferError, match="not complete after"):
        await operation.wait_for_completion(0.01)
    del view
    await operation.wait_for_completion(PATIENCE_S)
    assert both.released == [later, ("b", "a", operation.transfer)]
    del extracted
    await both.until(lambda: both.held() == 0)


async def test_views_that_die_in_another_thread_release_too(both: Pair) -> None:
    extracted, operation = both.put(np.ones(20_000))
    box = [await both.get(operation)]
    thread = threading.Thread(target=box.clear)
    thread.start()
    await operation.wait_for_completion(PATIENCE_S)
    thread.join()
    assert extracted.nbytes == 160_000


async def test_a_buffer_in_a_reference_cycle_is_released_by_the_garbage_collector(both: Pair) -> None:
    _, operation = both.put(np.ones(20_000))
    cycle: list[Any] = [await both.get(operation)]
    cycle.append(cycle)
    del cycle
    async with asyncio.timeout(60):
        while not operation.done():
            gc.collect()  # does nothing while another thread collects, which lets this one run in a finaliser
            await asyncio.sleep(0)


async def test_late_repeated_and_foreign_releases_change_nothing(both: Pair) -> None:
    _, first = both.put(np.ones(9000))
    both.a.released("c", first.transfer)
    both.a.released("b", 10_000)
    assert not first.done()
    buffer = await both.get(first)
    del buffer
    await first.wait_for_completion(PATIENCE_S)
    _, second = both.put(np.zeros(9000))
    both.a.released("b", first.transfer)
    assert not second.done()
    assert both.a.stats()["late_releases"] == 3


async def test_transfers_in_any_order_do_not_mix(both: Pair) -> None:
    puts = [both.put(np.full(30_000 + mark, mark, np.uint8)) for mark in range(20)]
    for mark in [*range(0, 20, 2), *range(19, 0, -2)]:
        buffer = await both.get(puts[mark][1])
        assert bytes(buffer) == bytes([mark]) * (30_000 + mark)


async def test_a_transfer_is_fetched_once(both: Pair) -> None:
    _, operation = both.put(np.ones(9000))
    buffer = await both.get(operation)
    with pytest.raises(TransferError, match="fetched twice"):
        await both.get(operation)
    assert len(buffer) == 72_000


async def test_a_get_hands_its_buffer_over_once(both: Pair) -> None:
    _, operation = both.put(np.ones(9000))
    fetch = both.b.get(operation.metadata, request_id="r", peer="a")
    await fetch.wait_for_completion(PATIENCE_S)
    with pytest.raises(TransferError, match="taken already"):
        fetch.take()


#: An array of 15, of which the first are numbers and the last is nested without an end.
NESTED = b"\x9f" + b"\x01" * 14 + b"\x91" * 100_000
METADATA = [name.encode() + rest for name in RELAYS for rest in (b":", b":\xc0", b":\x91\x01", b":" + NESTED)]


@pytest.mark.parametrize("metadata", [b"", b"pigeon:x", b"\xff\xfe:x", *METADATA], ids=lambda one: str(one[:40]))
async def test_metadata_that_is_none_is_refused(both: Pair, metadata: bytes) -> None:
    calls: tuple[Callable[[], object], ...] = (
        lambda: both.b.get(metadata, request_id="r", peer="a"),
        lambda: both.b.decline(metadata, peer="a"),
    )
    for call in calls:
        with pytest.raises(TransferError):
            call()


async def test_a_stranger_is_neither_sent_to_nor_fetched_from(both: Pair) -> None:
    extracted, operation = both.put(np.ones(9000))
    with pytest.raises(TransferError, match="no relay reaches"):
        both.a.put(extracted, request_id="r", peer="c", backend=both.backend)
    with pytest.raises(TransferError, match="from c"):
        both.b.get(operation.metadata, request_id="r", peer="c")


async def test_a_thousand_aborted_puts_that_were_never_announced_leave_nothing(both: Pair) -> None:
    for number in range(1000):
        extracted = encoding.extract(np.ones(MIB, np.uint8))
        assert both.a.put(extracted, request_id=f"r{number}", peer="b", backend=both.backend) is not None
        both.a.cleanup(f"r{number}")
        both.b.cleanup(f"r{number}")
    del extracted
    await both.until(lambda: both.held() == 0)


async def test_a_thousand_declined_transfers_leave_nothing(both: Pair) -> None:
    for number in range(1000):
        _, operation = both.put(np.ones(20_000, np.uint8), request_id=f"r{number}")
        metadata = operation.metadata
        both.a.cleanup(f"r{number}")
        assert not operation.done()
        both.b.cleanup(f"r{number}")
        both.b.decline(metadata, peer="a")
        assert operation.done()
    await both.until(lambda: both.held() == 0)
    await both.until(lambda: both.kept() == 0)


async def test_what_was_announced_outlives_the_abort_until_its_receiver_lets_go(both: Pair) -> None:
    _, operation = both.put(np.ones(9000))
    buffer = await both.get(operation)
    both.a.cleanup("r")
    _, other = both.put(np.zeros(9000), request_id="other")
    assert bytes(buffer[:8]) == np.float64(1).tobytes()
    assert not operation.done()
    del buffer
    await operation.wait_for_completion(PATIENCE_S)
    assert not other.done()


async def test_an_abort_during_which_a_put_is_released_leaves_nothing(both: Pair) -> None:
    """A thread that could not announce its put discards it, while the loop aborts its request."""
    relay: Any = both.a._relays[both.backend]
    operation = both.put_again(on_gpu([torch.ones(9000)]))
    assert operation.metadata
    _, announced = relay._ledger.aborted("r")
    both.a.discard(operation)
    for put in announced:
        relay._quarantine(put)
    both.a.cleanup("r")
    await both.until(lambda: both.held() == 0)
    assert operation.done()
    assert [count for name, count in both.a.stats().items() if "quarantined" in name and count] == []


async def test_discarding_a_put_that_was_never_sent_frees_it(both: Pair) -> None:
    _, operation = both.put(np.ones(9000))
    assert operation.metadata
    both.a.discard(operation)
    assert operation.done()
    await both.until(lambda: both.held() == 0)


async def test_forgetting_a_peer_frees_what_it_held_and_fails_who_waits(both: Pair) -> None:
    _, operation = both.put(np.ones(9000))
    buffer = await both.get(operation)
    waiter = asyncio.ensure_future(operation.wait_for_completion(PATIENCE_S))
    await asyncio.sleep(0)
    both.a.forget("b")
    with pytest.raises(TransferError, match="b is gone"):
        await waiter
    await both.until(lambda: both.held() == 0)
    both.b.forget("a")
    assert bytes(buffer[:8]) == np.float64(1).tobytes()  # views of the dead stay readable
    del buffer
    both.introduce()
    assert both.released == [await both.release_another()]


async def test_forgetting_again_and_forgetting_strangers_changes_nothing(both: Pair) -> None:
    for peer in ("b", "b", "nobody"):
        both.a.forget(peer)
    assert both.a.open("b", both.b.facts())


async def test_views_are_counted_by_holder_until_they_die(both: Pair) -> None:
    _, operation = both.put(np.ones(9000))
    buffer = await both.b.get(operation.metadata, request_id="r7", peer="a", holder="talker").wait_for_completion(
        PATIENCE_S
    )
    (pin,) = both.b.pins()
    assert (pin.peer, pin.transfer, pin.request_id, pin.holder, pin.nbytes) == (
        "a",
        operation.transfer,
        "r7",
        "talker",
        72_000,
    )
    assert both.b.stats()[f"{both.backend}_pinned_bytes"] == 72_000
    del buffer
    await operation.wait_for_completion(PATIENCE_S)
    assert both.b.pins() == []


async def test_one_payload_for_two_receivers_is_held_until_both_have_let_go(both: Pair) -> None:
    both.b.open("a2", both.a.facts())
    extracted, first = both.put(np.arange(9000))
    second = both.put_again(extracted)
    one, two = await both.get(first), await both.get(second)
    assert bytes(one) == bytes(two)
    del one
    await first.wait_for_completion(PATIENCE_S)
    assert not second.done()
    assert bytes(two) == np.arange(9000).tobytes()
    del two
    await second.wait_for_completion(PATIENCE_S)
    del extracted
    await both.until(lambda: both.held() == 0)


async def test_puts_from_many_threads_all_arrive(both: Pair) -> None:
    found = []

    def work(mark: int) -> None:
        for _ in range(20):
            found.append((mark, both.put(np.full(40_000, mark, np.uint8))[1]))

    await asyncio.gather(*(asyncio.to_thread(work, mark) for mark in range(4)))
    for mark, operation in found:
        assert bytes(await both.get(operation)) == bytes([mark]) * 40_000


@pytest.mark.proves("slow-receiver")
@pytest.mark.parametrize("name", list(RELAYS))
async def test_a_put_without_room_waits_for_a_release(name: str) -> None:
    with pair(name, settings=settings_with(SMALL, arena_bytes=4 * MIB, unreleased_bytes=4 * MIB)) as both:
        _, first = both.put(np.ones(3 * MIB, np.uint8))
        extracted = encoding.extract(np.ones(2 * MIB, np.uint8))
        assert both.a.put(extracted, request_id="r", peer="b", backend=name) is None
        waiting = asyncio.ensure_future(both.a.put_async(extracted, request_id="r", peer="b", backend=both.backend))
        await both.release_another()
        assert not waiting.done()
        buffer = await both.get(first)
        del buffer
        assert bytes(await both.get(await asyncio.wait_for(waiting, PATIENCE_S))) == b"\1" * (2 * MIB)


@pytest.mark.parametrize("name", list(RELAYS))
@pytest.mark.parametrize("how", ["forgotten", "cleaned up"])
async def test_room_that_comes_back_without_a_release_is_reported_once_to_who_waits_for_it(name: str, how: str) -> None:
    """A send that waits for another peer would wait for a Release that never comes."""
    with pair(name, settings=settings_with(SMALL, room_s=1e6)) as both:
        _, put = both.put(np.ones(9000), "r")
        found: list[bool] = []
        both.a.when_room(lambda: found.append(put.done()))  # False: it was called too early
        if how == "forgotten":
            both.a.forget("b")
        else:
            both.a.cleanup("r")
        await both.until(lambda: bool(found))
        both.a.forget("b")
        both.b.forget("a")
        both.introduce()
        await both.release_another()  # reported to who waits for room, and to nobody else
        assert found == [True]


async def test_room_is_looked_for_where_nothing_reports_it() -> None:
    """An author's tensor dies: nothing reports that."""
    with pair("shm", settings=settings_with(SMALL, arena_bytes=4 * MIB)) as both:
        tensors = [both.a.allocate((3 * MIB,), torch.uint8)]
        extracted = encoding.extract(np.ones(2 * MIB, np.uint8))
        puts = []

        def again() -> None:
            put = both.a.put(extracted, request_id="r", peer="b", backend="shm")
            puts.append(put)
            if put is None:
                both.a.when_room(again)

        again()
        await both.until(lambda: len(puts) > 1)
        assert puts[-1] is None
        tensors.clear()
        await both.until(lambda: puts[-1] is not None)


async def test_closing_ends_waiters_and_can_be_followed_by_deaths_of_views(both: Pair) -> None:
    _, operation = both.put(np.ones(9000))
    buffer = await both.get(operation)
    waiter = asyncio.ensure_future(operation.wait_for_completion(PATIENCE_S))
    await asyncio.sleep(0)
    both.a.close()
    with pytest.raises(TransferError, match="closed"):
        await waiter
    assert bytes(buffer[:8]) == np.float64(1).tobytes()
    both.a.close()


def settings_with(settings: RelaySettings, **changes: Any) -> RelaySettings:
    import msgspec

    return msgspec.structs.replace(settings, **changes)


@pytest.mark.proves("buffer-written-again")
async def test_what_is_written_after_a_put_has_returned_does_not_arrive(both: Pair) -> None:
    """A relay that sends from where the bytes lie, and later, would send what its giver wrote since."""
    sizes = [100, 100_000, 32 * MIB]
    for parts in ([32 * MIB], [2 * MIB], [100_000, 70_000], sizes):
        given = [np.full(size, 1, np.uint8) for size in parts]
        _, operation = both.put(list(given))
        for array in given:
            array[:] = 2
        buffer = await both.get(operation)
        assert sorted({int(value) for value in np.unique(np.frombuffer(buffer, np.uint8))}) in ([1], [0, 1])
        del buffer
        await operation.wait_for_completion(PATIENCE_S)


class Interrupted:
    """Transfer ids. Taking one happens between finding the peer and accounting for the put: there the peer is lost."""

    def __init__(self, lose: Callable[[], None]) -> None:
        self._lose = lose

    def __next__(self) -> int:
        self._lose()
        return 1

    def __iter__(self) -> Interrupted:
        return self


@pytest.mark.parametrize("name", list(RELAYS))
async def test_a_put_during_which_its_peer_is_forgotten_leaves_nothing(name: str) -> None:
    """A stage's thread puts, the I/O thread forgets: what came into the ledger after that would stay for ever."""
    with pair(name) as both:
        memory = Arena(4 * MIB)
        context = RelayContext(
            loop=asyncio.get_running_loop(),
            incarnation=Peer("a"),
            thread=threading.local(),
            on_release=lambda peer, transfer: None,
            failed=lambda peer, relay, reason: None,
            ids=Interrupted(lambda: relay.forget(Peer("b"))),
            arena=memory,
            security=None,
            settings=SMALL,
        )
        relay = registry.load(name, TABLE)(context)
        try:
            assert relay.open(Peer("b"), both.b.facts()[name])
            with pytest.raises(TransferError, match="b is gone"):
                given = encoding.extract(np.ones(9000)).pack
                assert given is not None
                relay.put(given, request_id="r", peer=Peer("b"))
            stats = relay.stats()
            assert (stats["unreleased_transfers"], stats["unreleased_bytes"]) == (0, 0)
            assert memory.stats()["arena_bytes_in_use"] == 0
        finally:
            relay.close()
            memory.close()
