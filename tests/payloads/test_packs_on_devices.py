"""Payloads with tensors on GPUs: what stays there, what is copied to the host, and what arrives of both.

Tensors on the CPU stand for those of a GPU (`stand_in_gpu.on_gpu`): the flat buffer is the same.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.errors import ProtocolError
from stage_runtime.payloads import encoding, tensors
from stage_runtime.payloads.pack import ALIGNMENT, Arrived, Extracted, flatten, packed_with_device
from stage_runtime.payloads.tensors import FlatPart
from stage_runtime.transfers.receiving import Fetched
from stage_runtime.wire.parts import Body
from stage_runtime.wire.tensorrefs import TensorRef
from tests.relays.stand_in_gpu import on_gpu

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e5m2, torch.complex64)
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
leaves = st.tuples(st.sampled_from(DTYPES), shapes).map(
    lambda made: torch.arange(int(np.prod(made[1]))).to(made[0]).reshape(made[1])
)
arrays = shapes.map(lambda shape: np.arange(int(np.prod(shape))).reshape(shape))
values = st.lists(st.one_of(leaves, arrays, st.integers(16_000, 17_000).map(bytes), st.text(max_size=5)), max_size=8)


def arrived(extracted: Extracted) -> tuple[bytearray, Arrived]:
    """The buffer that a relay with GPU memory brings."""
    pack = extracted.pack
    assert pack is not None and pack.on_device is not None
    there = pack.on_device
    flat = torch.zeros(pack.nbytes - there.start, dtype=torch.uint8)
    for offset, tensor in zip(there.offsets, there.tensors, strict=True):
        flat[offset - there.start :][: len(tensor)] = tensor
    return bytearray(bytes(flatten(pack.host_part())).ljust(there.start, b"\0")), Arrived(there.start, flat)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bytes_of(one) == bytes_of(other)
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    return bool(one == other)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensors.tensor_bytes(tensor)[0])


@given(values, st.data())
def test_any_payload_arrives_the_same_from_the_gpu_and_from_the_host(value: list[Any], data: st.DataObject) -> None:
    value = [*value, torch.ones(3), {"long": "x" * data.draw(st.sampled_from([0, 20_000]))}]
    extracted = on_gpu(value)
    assert extracted.pack is not None and extracted.pack.on_device is not None
    host, device = arrived(extracted)
    for restored in (
        encoding.restore(extracted.value_bytes, extracted.refs, host, device),
        encoding.restore(extracted.value_bytes, extracted.refs, bytearray(extracted.flat())),
    ):
        assert all(map(same, restored[:-1], value[:-1])) and restored[-1] == value[-1]
    assert all(offset % ALIGNMENT == 0 for offset in extracted.pack.on_device.offsets)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8])
def test_one_element_of_a_column_leaves_the_gpu_as_it_is(dtype: torch.dtype) -> None:
    column = torch.arange(6).to(dtype).reshape(2, 3)[:1, 1]
    flat = tensors.device_bytes(column)
    assert flat.shape == (dtype.itemsize,) and bytes(flat.numpy()) == bytes_of(column)
    assert flat.data_ptr() == column.data_ptr(), "not copied"


@given(values)
def test_a_ref_has_the_device_of_its_leaf(value: list[Any]) -> None:
    extracted = on_gpu([*value, torch.ones(3)], "cuda:5")
    for ref in extracted.refs:
        assert ref.device == ("cuda:5" if ref.kind == "torch" and ref.nbytes else "cpu")


def test_leaves_of_a_second_gpu_are_copied_to_the_host() -> None:
    found = [
        FlatPart(f"[{index}]", (3,), "uint8", "torch", tensors.EMPTY, None, False, device, torch.full((3,), index))
        for index, device in enumerate(("cuda:1", "cuda:0", "cuda:1"))
    ]
    for part in found:
        part.on_device = part.on_device.to(torch.uint8)
    extracted = packed_with_device(b"", found, "payload")
    assert [ref.device for ref in extracted.refs] == ["cuda:1", "cuda:0", "cuda:1"]
    pack = extracted.pack
    assert pack is not None and pack.on_device is not None
    assert (len(pack.parts), len(pack.on_device.tensors), pack.on_device.device) == (1, 2, "cuda:1")
    flat = extracted.flat()
    assert [flat[ref.offset : ref.offset + 3] for ref in extracted.refs] == [bytes([mark]) * 3 for mark in range(3)]


def test_what_waits_to_be_sent_is_in_the_host_s_memory() -> None:
    extracted = on_gpu([torch.ones(9000)])
    extracted.hold()
    assert extracted.pack is not None and extracted.pack.on_device is None
    assert len(extracted.pack.private) == len(extracted.pack.parts)


def test_a_fetched_payload_leaves_both_memories_of_its_sender_when_it_is_to_wait() -> None:
    extracted = on_gpu({"t": torch.ones(9000), "a": np.ones(3000)})
    host, device = arrived(extracted)
    fetched = Fetched(Body(extracted.value_bytes, extracted.refs, transfer=b"cuda_ipc:x"), memoryview(host), device)
    assert extracted.pack is not None and fetched.nbytes == extracted.pack.nbytes
    fetched.copy_out()
    device.flat.zero_()
    host[:] = bytes(len(host))
    opened = fetched.open()
    assert opened["t"].sum() == 9000 and opened["a"].sum() == 3000
    assert fetched.nbytes == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "cpu"}, "not of a GPU"),
        ({"offset": 1 << 20}, "not in a buffer"),
        ({"offset": 1}, "not inside the host's"),
        ({"kind": "numpy", "device": "cpu"}, "not of a GPU"),
        ({"device": "meta"}, "unknown device"),
    ],
)
def test_a_ref_that_does_not_fit_a_buffer_on_a_gpu_is_refused(changes: dict[str, Any], words: str) -> None:
    ref = TensorRef("x", (16,), "float32", 64, 64, "torch", "cuda:0")
    device = Arrived(64, torch.zeros(64, dtype=torch.uint8))
    value = msgspec.msgpack.encode(msgspec.msgpack.Ext(encoding.PART, bytes(4)))
    assert encoding.restore(value, [ref], bytearray(8), device).shape == (16,)
    with pytest.raises(ProtocolError, match=words):
        encoding.restore(value, [msgspec.structs.replace(ref, **changes)], bytearray(8), device)
    with pytest.raises(ProtocolError, match="not of a GPU"):
        encoding.restore(value, [ref], bytearray(8), device, torch=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_tensor_of_a_gpu_stays_there_until_a_relay_without_gpu_memory_sends_it() -> None:
    given_tensor = torch.arange(30_000, device="cuda:0")
    extracted = encoding.extract({"t": given_tensor[::3], "u": given_tensor})
    assert extracted.pack is not None and extracted.pack.on_device is not None
    assert all(tensor.device.type == "cuda" for tensor in extracted.pack.on_device.tensors)
    restored = encoding.restore(extracted.value_bytes, extracted.refs, bytearray(extracted.flat()))
    assert torch.equal(restored["t"], given_tensor[::3].cpu()) and torch.equal(restored["u"], given_tensor.cpu())
