"""cuda_ipc alone promises these: tensors of a GPU are read there by another process, or go by the host's memory.

Host memory stands for the GPU's (`stand_in_gpu`); what CUDA itself does is in the tests with the mark ``gpu``.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from stage_runtime.errors import RelayFailed, RelayRefused, TransferError
from stage_runtime.payloads import encoding
from stage_runtime.relays import registry
from stage_runtime.relays.choice.choosing import PROCESS, ProcessFacts
from stage_runtime.relays.context import RelaySettings
from stage_runtime.relays.cuda_ipc import cuda_ipc_messages
from stage_runtime.relays.cuda_ipc.cuda_ipc_messages import ChunkHandle, CudaIpcMetadata, OnGpu
from stage_runtime.relays.cuda_ipc.memory import CudaMemory, DeviceLost, ends_the_context
from stage_runtime.relays.dispatch import Relays
from stage_runtime.relays.registry import RELAYS
from tests.relays.relay_pairs import MIB, PATIENCE_S, SMALL, FarEnd, Pair, pair
from tests.relays.relay_tables import TABLE
from tests.relays.stand_in_gpu import StandInRelay, on_gpu, restored

STACK_TOO_LARGE = 1 << 47  # bytes: all that a process can address, so that no thread can start
TENSOR = torch.arange(200_000, dtype=torch.int32)
VALUE: dict[str, Any] = {
    "t": TENSOR,
    "name": "x",
    "host": np.arange(70_000),
    "half": torch.ones(9, dtype=torch.bfloat16),
}


@pytest.fixture
async def both() -> AsyncIterator[Pair]:
    with pair("cuda_ipc", settings=msgspec.structs.replace(SMALL, gpu_bytes=8 * MIB)) as ends:
        yield ends


def relay_of(relays: Relays) -> StandInRelay:
    relay = relays._relays["cuda_ipc"]
    assert isinstance(relay, StandInRelay)
    return relay


def equal(value: Any) -> bool:
    same = torch.equal(value["t"], TENSOR) and torch.equal(value["half"], VALUE["half"])
    return same and bool(np.array_equal(value["host"], VALUE["host"])) and value["name"] == "x"


def fetch(both: Pair, metadata: bytes) -> Any:
    return both.b.get(metadata, request_id="r", peer="a")


async def test_what_lies_on_the_gpu_is_read_there_and_the_rest_from_the_arena(both: Pair) -> None:
    extracted = on_gpu(VALUE)
    put = both.put_again(extracted)
    fetched = fetch(both, put.metadata)
    value = restored(extracted, fetched)
    assert equal(value)
    stats = both.a.stats()
    assert stats["cuda_ipc_copied_bytes"] < 600_000 and stats["cuda_ipc_staged_bytes"] == 0  # the array alone
    assert stats["cuda_ipc_gpu_bytes_in_use"] > TENSOR.nbytes
    assert [ref.device for ref in extracted.refs] == ["cuda:0", "cpu", "cuda:0"]
    del fetched, value, extracted
    await put.wait_for_completion(PATIENCE_S)
    await both.until(lambda: both.held() == 0)
    assert both.a.stats()["cuda_ipc_gpu_bytes_in_use"] == 0


@pytest.mark.parametrize("last", ["t", "host"])
async def test_a_transfer_is_released_when_views_of_both_memories_are_dead_and_the_gpu_is_through(
    both: Pair, last: str
) -> None:
    extracted = on_gpu(VALUE)
    put = both.put_again(extracted)
    value = restored(extracted, fetch(both, put.metadata))
    view = value[last][10:]
    del value
    await asyncio.sleep(0.02)
    assert not put.done() and relay_of(both.b).memory.waited == []
    del view
    await put.wait_for_completion(PATIENCE_S)
    assert relay_of(both.b).memory.waited == ["cuda:0"]


async def test_a_transfer_is_not_released_before_a_wait_for_the_gpu_has_succeeded(both: Pair) -> None:
    """A wait fails while a stage captures a CUDA graph, for example: the GPU may still read."""
    memory = relay_of(both.b).memory
    memory.fails = RuntimeError("operation not permitted when stream is capturing")
    extracted = on_gpu(VALUE)
    put = both.put_again(extracted)
    value = restored(extracted, fetch(both, put.metadata))
    del value
    await both.until(lambda: memory.failed > 1)
    assert (both.released, put.done()) == ([], False)
    memory.fails = None
    await put.wait_for_completion(PATIENCE_S)
    assert memory.waited == ["cuda:0"] and memory.entered == 1


async def test_a_transfer_is_released_later_when_no_thread_can_start_to_wait_for_the_gpu(both: Pair) -> None:
    extracted = on_gpu(VALUE)
    put = both.put_again(extracted)
    value = restored(extracted, fetch(both, put.metadata))
    before = threading.stack_size(STACK_TOO_LARGE)
    try:
        del value
        both.b.release_now()
    finally:
        threading.stack_size(before)
    await put.wait_for_completion(PATIENCE_S)
    assert relay_of(both.b).memory.waited == ["cuda:0"]


async def test_a_gpu_whose_context_is_dead_reads_no_more(both: Pair) -> None:
    memory = relay_of(both.b).memory
    memory.fails = DeviceLost("CUDA error: an illegal memory access was encountered")
    extracted = on_gpu(VALUE)
    put = both.put_again(extracted)
    value = restored(extracted, fetch(both, put.metadata))
    del value
    await put.wait_for_completion(PATIENCE_S)
    assert memory.failed == 1


@pytest.mark.parametrize(
    ("error", "is_dead"),
    [
        ("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be", True),
        ("CUDA error: device-side assert triggered", True),
        ("CUDA error: unspecified launch failure", True),
        ("CUDA error: uncorrectable ECC error encountered", True),
        ("CUDA error: operation not permitted when stream is capturing", False),
        ("CUDA error: out of memory", False),
    ],
)
def test_which_errors_of_cuda_end_its_context(error: str, is_dead: bool) -> None:
    assert ends_the_context(error) == is_dead


async def test_what_lies_in_the_host_s_memory_alone_waits_for_no_gpu(both: Pair) -> None:
    _, put = both.put(VALUE)
    buffer = await both.get(put)
    del buffer
    await put.wait_for_completion(PATIENCE_S)
    assert relay_of(both.b).memory.waited == [] and both.a.stats()["cuda_ipc_gpu_bytes_in_use"] == 0


async def test_what_is_written_into_a_tensor_after_its_put_does_not_arrive(both: Pair) -> None:
    tensor = torch.ones(50_000)
    extracted = on_gpu([tensor])
    put = both.put_again(extracted)
    tensor.zero_()
    assert restored(extracted, fetch(both, put.metadata))[0].sum() == 50_000


async def test_several_receivers_share_a_slot_of_the_gpu(both: Pair) -> None:
    extracted = on_gpu(VALUE)
    first, second = both.put_again(extracted), both.put_again(extracted)
    used = both.a.stats()["cuda_ipc_gpu_bytes_in_use"]
    one, two = (restored(extracted, fetch(both, put.metadata)) for put in (first, second))
    assert equal(one) and equal(two) and used < 2 * TENSOR.nbytes
    del one
    await first.wait_for_completion(PATIENCE_S)
    assert both.a.stats()["cuda_ipc_gpu_bytes_in_use"] == used and equal(two)
    del two
    await second.wait_for_completion(PATIENCE_S)
    assert both.a.stats()["cuda_ipc_gpu_bytes_in_use"] == 0


async def test_chunks_are_opened_once(both: Pair) -> None:
    for _ in range(5):
        extracted = on_gpu([TENSOR])
        put = both.put_again(extracted)
        assert torch.equal(restored(extracted, fetch(both, put.metadata))[0], TENSOR)
        await put.wait_for_completion(PATIENCE_S)
    assert relay_of(both.b).memory.opened == 2  # with the one that showed that it can be


@pytest.mark.parametrize("why", ["another GPU", "no room", "too large"])
async def test_what_cannot_stay_on_the_gpu_goes_by_the_host_s_memory(both: Pair, why: str) -> None:
    tensor = torch.arange((9 if why == "too large" else 1) * MIB, dtype=torch.int64).to(torch.uint8)
    held = both.put_again(on_gpu([torch.zeros(15 * MIB // 2, dtype=torch.uint8)])) if why == "no room" else None
    extracted = on_gpu([tensor], "cuda:1" if why == "another GPU" else "cuda:0")
    put = both.put_again(extracted)
    fetched = fetch(both, put.metadata)
    value = encoding.restore(extracted.value_bytes, extracted.refs, fetched.take())
    assert torch.equal(value[0], tensor) and fetched.take_device() is None
    assert both.a.stats()["cuda_ipc_staged_bytes"] == tensor.nbytes and (held is None or not held.done())


async def test_a_relay_without_gpu_memory_gets_all_of_a_payload_in_the_host_s(both: Pair) -> None:
    extracted = on_gpu(VALUE)
    put = both.a.put(extracted, request_id="r", peer="b", backend="shm")
    assert put is not None and put.metadata.startswith(b"shm:")
    view = fetch(both, put.metadata).take()
    assert equal(encoding.restore(extracted.value_bytes, extracted.refs, view))
    assert [ref.device for ref in extracted.refs] == ["cuda:0", "cpu", "cuda:0"]


async def test_a_payload_that_is_cut_goes_by_the_host_s_memory(both: Pair) -> None:
    extracted = on_gpu({**VALUE, "host": np.arange(300_000)})
    put = both.put_again(extracted, slot_nbytes=MIB)
    assert len(put.transfers) > 1
    value = encoding.restore(extracted.value_bytes, extracted.refs, await both.get(put))
    assert torch.equal(value["t"], TENSOR)


async def test_a_slot_of_an_aborted_request_is_not_used_again_before_its_release(both: Pair) -> None:
    extracted = on_gpu([TENSOR])
    put = both.put_again(extracted)
    value = restored(extracted, fetch(both, put.metadata))
    both.a.cleanup("r")
    assert both.a.stats()["cuda_ipc_gpu_quarantined_slots"] == 1
    other = both.put_again(on_gpu([torch.zeros_like(TENSOR)]), "other")
    assert torch.equal(value[0], TENSOR)
    del value
    await put.wait_for_completion(PATIENCE_S)
    stats = both.a.stats()
    assert stats["cuda_ipc_gpu_quarantined_slots"] == 0 and stats["cuda_ipc_gpu_bytes_in_use"] > 0 and not other.done()


async def test_an_aborted_put_is_not_shared_with_further_receivers(both: Pair) -> None:
    extracted = on_gpu([TENSOR])
    first = both.put_again(extracted)
    assert first.metadata
    both.a.cleanup("r")
    second = both.put_again(extracted, "other")
    both.a.released("b", first.transfer)
    assert torch.equal(restored(extracted, fetch(both, second.metadata))[0], TENSOR)


async def test_a_peer_that_is_gone_gives_the_gpu_s_memory_back(both: Pair) -> None:
    extracted = on_gpu([TENSOR])
    put = both.put_again(extracted)
    value = restored(extracted, fetch(both, put.metadata))
    both.a.forget("b")
    both.b.forget("a")
    assert put.done() and both.a.stats()["cuda_ipc_gpu_bytes_in_use"] == 0
    assert torch.equal(value[0], TENSOR)
    del value
    assert both.released == []


def changed(**changes: Any) -> dict[str, Any]:
    return changes


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (changed(gpu="GPU-9"), TransferError, "another GPU"),
        (changed(offset=8 * MIB), TransferError, "not inside its chunk"),
        (changed(nbytes=9 * MIB), TransferError, "not inside its chunk"),
        (changed(chunk=99, handle=b"/nowhere"), RelayFailed, "cannot be opened"),
        (changed(chunk_nbytes=16 * MIB), TransferError, "another one"),
    ],
)
async def test_a_place_that_a_peer_cannot_have_is_refused(
    both: Pair, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    extracted = on_gpu([TENSOR])
    first, put = both.put_again(extracted), both.put_again(extracted)
    fetch(both, first.metadata)  # opens the chunk
    true = msgspec.msgpack.decode(put.metadata.removeprefix(b"cuda_ipc:"), type=CudaIpcMetadata)
    assert true.there is not None
    false = msgspec.structs.replace(true, there=msgspec.structs.replace(true.there, **changes))
    with pytest.raises(error, match=words):
        fetch(both, b"cuda_ipc:" + msgspec.msgpack.encode(false))
    both.b.decline(put.metadata, peer="a")
    assert put.done()


async def test_a_slot_that_has_another_use_by_now_is_refused(both: Pair) -> None:
    put = both.put_again(on_gpu([TENSOR]))
    metadata = put.metadata
    both.a.discard(put)
    both.put_again(on_gpu([TENSOR]))
    with pytest.raises(TransferError, match="its slot was reused"):
        fetch(both, metadata)


async def test_a_peer_makes_this_process_open_few_chunks(both: Pair) -> None:
    put = both.put_again(on_gpu([TENSOR]))
    true = msgspec.msgpack.decode(put.metadata.removeprefix(b"cuda_ipc:"), type=CudaIpcMetadata)
    assert true.there is not None
    with pytest.raises(TransferError, match="more than 64 chunks"):
        for number in range(65):
            there = msgspec.structs.replace(true.there, chunk=number)
            again = msgspec.structs.replace(true, transfer=1000 + number, there=there)
            fetch(both, b"cuda_ipc:" + msgspec.msgpack.encode(again))


HANDLE = ChunkHandle(b"\0" * 65, 4096, 512, b"/torch_123_4", 8, b"\0" * 64, True)


@pytest.mark.parametrize(
    "changes",
    [
        changed(storage_nbytes=4097),
        changed(handle=b""),
        changed(handle=b"\0" * 4097),
        changed(event=b"\0" * 4097),
        changed(counter=b"/etc/passwd"),
        changed(counter=b"/torch_../x"),
        changed(counter=b"torch_1"),
        changed(counter=b"/torch_1\n"),
        changed(counter_offset=-1),
        changed(storage_offset=-1),
    ],
)
def test_a_handle_that_is_none_of_torch_s_is_refused(changes: dict[str, Any]) -> None:
    assert cuda_ipc_messages.handle_of(cuda_ipc_messages.encode(HANDLE), 4096) == HANDLE
    with pytest.raises(ValueError, match=r".+"):
        cuda_ipc_messages.handle_of(cuda_ipc_messages.encode(msgspec.structs.replace(HANDLE, **changes)), 4096)


@pytest.mark.parametrize("garbage", [b"", b"\xc0", b"\x90", b"\x91\xc0", b"x" * 100])
def test_a_handle_that_cannot_be_read_is_refused(garbage: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        cuda_ipc_messages.handle_of(garbage, 4096)


@pytest.mark.parametrize("gpus", [(), (1,)])
async def test_processes_that_share_no_gpu_use_another_relay(gpus: tuple[int, ...]) -> None:
    def relays(name: str, *, own: tuple[int, ...]) -> Relays:
        return Relays(
            loop=asyncio.get_running_loop(),
            incarnation=name,
            on_release=lambda peer, transfer: None,
            settings=msgspec.structs.replace(SMALL, named=frozenset({"cuda_ipc"}), gpus=own),
            table=TABLE if own else RELAYS,
        )

    a, b = relays("a", own=(0,)), relays("b", own=gpus)
    try:
        assert a.open("b", b.facts())[0] == "shm" == b.open("a", a.facts())[0]
        assert a.choose("b") == "shm"
        with pytest.raises(
            RelayRefused, match="cuda_ipc does not reach b: " + ("it cannot connect the two" if gpus else "it did not")
        ):
            a.choose("b", "cuda_ipc")
        assert ("cuda_ipc" in b.process.refused) == (not gpus)
    finally:
        a.close()
        b.close()


def relays_named(name: str) -> Relays:
    return Relays(
        loop=asyncio.get_running_loop(),
        incarnation=name,
        on_release=lambda peer, transfer: None,
        settings=msgspec.structs.replace(SMALL, named=frozenset({"cuda_ipc"}), gpu_bytes=8 * MIB),
        table=TABLE,
    )


@pytest.mark.parametrize("why", ["cannot be opened", "another token", "no token", "its GPU was full", "ours was full"])
async def test_a_peer_whose_memory_on_the_gpu_is_not_reached_is_served_by_another_relay(why: str) -> None:
    """Both may see the same GPU while CUDA refuses to open the other's memory: a MIG slice, a sandbox, a user."""
    a, b = relays_named("a"), relays_named("b")
    try:
        facts = b.facts()
        probes = facts["cuda_ipc"]["probes"]
        assert list(probes) == ["GPU-0"]
        relay_of(a).memory.opens = why != "cannot be opened"
        if why == "another token":
            probes["GPU-0"]["token"] = "00" * 16
        elif why == "no token":
            del facts["cuda_ipc"]["probes"]
        elif why == "its GPU was full":
            facts["cuda_ipc"]["probes"] = {}
        elif why == "ours was full":
            relay_of(a)._probes.clear()
        assert a.open("b", facts) == ("shm", "tcp")
        assert a.choose("b") == "shm"
        with pytest.raises(RelayRefused, match="cuda_ipc does not reach b"):
            a.choose("b", "cuda_ipc")
    finally:
        a.close()
        b.close()


@pytest.mark.parametrize("handle", [b"x" * 9000, b""])
async def test_a_probe_that_is_none_reaches_nobody(handle: bytes) -> None:
    a, b = relays_named("a"), relays_named("b")
    try:
        facts = b.facts()
        facts["cuda_ipc"]["probes"]["GPU-0"]["handle"] = base64.b64encode(handle).decode()
        assert "cuda_ipc" not in a.open("b", facts)
        assert relay_of(a).memory.opened == 0
    finally:
        a.close()
        b.close()


def test_auto_opens_it_where_stages_have_a_gpu() -> None:
    assert "cuda_ipc" not in registry.to_open(())
    assert registry.to_open((), has=ProcessFacts(gpus=("GPU-0",)).has)[0] == "cuda_ipc"


async def test_auto_prefers_it_between_processes_on_one_gpu() -> None:
    table = {**TABLE, "cuda_ipc": msgspec.structs.replace(TABLE["cuda_ipc"], auto=True)}
    a, b = (
        Relays(
            loop=asyncio.get_running_loop(),
            incarnation=name,
            on_release=lambda peer, transfer: None,
            settings=SMALL,
            table=table,
        )
        for name in "ab"
    )
    try:
        a.open("b", b.facts())
        b.open("a", a.facts())
        assert a.transport("b") == ("cuda_ipc", "gpu") == b.transport("a")
        assert msgspec.convert(b.facts()[PROCESS], ProcessFacts).started[0] == "cuda_ipc"
    finally:
        a.close()
        b.close()


@pytest.fixture
def far() -> Iterator[FarEnd]:
    end = FarEnd(relay="cuda_ipc")
    yield end
    end.close()


def near_end(far: FarEnd, settings: RelaySettings, *, real: bool = False) -> Relays:
    relays = Relays(
        loop=asyncio.get_running_loop(),
        incarnation="near",
        on_release=lambda peer, transfer: None,
        settings=settings,
        table=RELAYS if real else TABLE,
    )
    assert "cuda_ipc" in relays.open("far", far.facts)
    far.ask(do="open", facts=relays.facts())
    return relays


SETTINGS = RelaySettings(named=frozenset({"cuda_ipc"}), arena_bytes=64 * MIB, prefault_bytes=0)


async def test_another_process_reads_what_lies_on_the_gpu_and_its_death_gives_it_back(far: FarEnd) -> None:
    near = near_end(far, SETTINGS)
    try:
        extracted = on_gpu(VALUE)
        put = near.put(extracted, request_id="r", peer="far", backend="cuda_ipc")
        assert put is not None and extracted.pack is not None and extracted.pack.on_device is not None
        answer = far.ask(do="get", metadata=base64.b64encode(put.metadata).decode())
        assert answer["gpu_sha"] == hashlib.sha256(_flat_on_gpu(extracted)).hexdigest()
        assert answer["nbytes"] == extracted.pack.on_device.start
        os.kill(far.process.pid, signal.SIGKILL)
        far.process.wait(PATIENCE_S)
        near.forget("far")
        assert put.done() and near.stats()["cuda_ipc_gpu_bytes_in_use"] == 0
    finally:
        near.close()


def _flat_on_gpu(extracted: Any) -> bytes:
    there = extracted.pack.on_device
    flat = bytearray(extracted.pack.nbytes - there.start)
    for offset, tensor in zip(there.offsets, there.tensors, strict=True):
        flat[offset - there.start : offset - there.start + len(tensor)] = tensor.cpu().numpy().tobytes()
    return bytes(flat)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU")
def test_without_a_gpu_the_error_is_one_line() -> None:
    with pytest.raises(Exception, match="torch finds no NVIDIA GPU: install torch with CUDA"):
        CudaMemory()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
async def test_a_tensor_of_a_gpu_is_read_by_another_process_where_it_lies() -> None:
    """The rounds use the same slots again: a release before the receiver's GPU was through would show."""
    far = FarEnd(relay="gpu")
    near = near_end(far, msgspec.structs.replace(SETTINGS, gpus=(0,)), real=True)
    try:
        for mark in range(20):
            tensor = torch.full((4 * MIB,), mark, dtype=torch.uint8, device="cuda:0")
            extracted = encoding.extract({"t": tensor, "host": np.arange(9000)})
            put = near.put(extracted, request_id="r", peer="far")
            assert put is not None and put.backend == "cuda_ipc"
            tensor.fill_(255)
            answer = far.ask(do="get", metadata=base64.b64encode(put.metadata).decode())
            assert answer["gpu"] == "cuda:0"
            assert answer["gpu_sha"] == hashlib.sha256(bytes([mark]) * (4 * MIB)).hexdigest()
            (released,) = far.ask(do="drop")
            assert near._relays["cuda_ipc"].released("far", released)  # type: ignore[arg-type]
        assert near.stats()["cuda_ipc_gpu_bytes_in_use"] == 0 == near.stats()["cuda_ipc_staged_bytes"]
    finally:
        near.close()
        far.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_view_of_a_gpu_keeps_its_owner_as_long_as_its_storage_lives() -> None:
    memory, died = CudaMemory(), []

    class Owner:
        def __del__(self) -> None:
            died.append(self)

    chunk = memory.allocate("cuda:0", MIB)
    memory.write(chunk, [(512, torch.arange(256, dtype=torch.uint8, device="cuda:0"))])
    view = memory.view(chunk, 512, 256, Owner())
    part = view[10:].detach().view(2, 123)
    del view
    assert died == [] and int(part[0, 0]) == 10
    del part
    assert len(died) == 1


def test_a_place_on_a_gpu_is_small_enough_for_a_message() -> None:
    """`transfers.sending.METADATA_LIMIT`."""
    there = OnGpu("GPU-" + "0" * 36, 1 << 20, 1 << 36, cuda_ipc_messages.encode(HANDLE), 1 << 36, 1 << 36)
    metadata = CudaIpcMetadata(1 << 40, 1 << 36, 1 << 36, 1 << 36, 1 << 40, there)
    assert len(b"cuda_ipc:" + msgspec.msgpack.encode(metadata)) < 512
