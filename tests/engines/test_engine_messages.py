"""Frames of an engine's messages: two ways for tensors, hostile frames, buffers that are used again."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.engines.autoregressive.process.messages.buffers import BufferPool
from stage_runtime.engines.autoregressive.process.messages.serial import (
    INLINE_BELOW,
    TENSOR,
    MsgpackDecoder,
    MsgpackEncoder,
)
from stage_runtime.errors import ProtocolError, ValueRefused


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    rows: torch.Tensor | None = None
    others: list[Any] = []


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0,), (), (3,), (2, 0, 3), (7, 9), (40, 50)], ids=str)
def test_a_tensor_arrives_as_it_was_sent(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    sent = torch.arange(int(np.prod(shape))).reshape(shape).to(dtype)
    frames = MsgpackEncoder().encode(Sample(name="a", rows=sent))
    found = MsgpackDecoder(Sample).decode([bytes(frame) for frame in frames])
    assert found.rows is not None and found.rows.dtype == dtype and found.rows.shape == shape
    assert torch.equal(found.rows.view(torch.uint8) if shape else found.rows, sent.view(torch.uint8) if shape else sent)


def test_small_tensors_are_inline_and_larger_ones_are_frames_of_their_own_memory() -> None:
    small = torch.zeros(INLINE_BELOW - 1, dtype=torch.uint8)
    large = torch.arange(INLINE_BELOW, dtype=torch.uint8)
    array = np.arange(100, dtype=np.float64)
    frames = MsgpackEncoder().encode(Sample(name="a", rows=small, others=[large, array]))
    assert [len(frame) for frame in frames[1:]] == [INLINE_BELOW, 800]
    large[0] = 77
    assert memoryview(frames[1])[0] == 77
    found = MsgpackDecoder(Sample).decode(frames)
    assert torch.equal(found.others[0], large) and np.array_equal(found.others[1], array)
    assert found.others[1].ctypes.data == array.ctypes.data
    assert found.rows is not None and torch.equal(found.rows, small)


@pytest.mark.parametrize(
    "value", [object(), torch.zeros(3).to_sparse(), np.array(["a"]), 1 << 70], ids=lambda value: type(value).__name__
)
def test_what_cannot_travel_is_refused_at_the_sender_and_the_encoder_goes_on(value: Any) -> None:
    encoder = MsgpackEncoder()
    with pytest.raises(ValueRefused):
        encoder.encode([torch.zeros(300), value])
    assert len(encoder.encode([torch.zeros(300)])) == 2


def _tensor(*fields: Any) -> bytes:
    return msgspec.msgpack.encode([msgspec.msgpack.Ext(TENSOR, msgspec.msgpack.encode(fields))])


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\xff" * 9],
        [b"\x91" * 100_000],
        [msgspec.msgpack.encode([msgspec.msgpack.Ext(9, b"")])],
        [msgspec.msgpack.encode([msgspec.msgpack.Ext(TENSOR, b"\xc1")])],
        [_tensor("torch", "float32", [2], b"1234567")],
        [_tensor("torch", "float33", [2], b"12345678")],
        [_tensor("torch", "float32", [-2], b"12345678")],
        [_tensor("torch", "float32", [2], 1)],
        [_tensor("torch", "float32", [2], 0), b"12345678"],
        [_tensor("torch", "float32", [2], -1), b"12345678"],
        [_tensor("torch", "float32", [2**62], 1), b"12345678"],
        [_tensor("torch", "float32", [2], {"at": 0})],
        [_tensor("numpy", "bfloat16", [4], b"12345678")],
        [_tensor("bytes", "uint8", [8], b"12345678")],
        [_tensor("pickle", "uint8", [8], b"12345678")],
    ],
    ids=str,
)
def test_hostile_frames_raise_a_protocol_error(frames: list[bytes]) -> None:
    decoder = MsgpackDecoder(list)
    with pytest.raises(ProtocolError):
        decoder.decode(frames)
    assert decoder.decode([msgspec.msgpack.encode([1])]) == [1]


@given(st.lists(st.binary(max_size=60), max_size=4))
def test_no_bytes_raise_anything_but_a_protocol_error(frames: list[bytes]) -> None:
    try:
        MsgpackDecoder(Sample).decode(frames)
    except ProtocolError:
        pass


class Tracker:
    def __init__(self) -> None:
        self.done = False


def test_a_buffer_is_lent_again_only_when_its_message_is_sent() -> None:
    pool = BufferPool(most=2)
    first, tracker = pool.take(), Tracker()
    pool.sent(tracker, first)
    second = pool.take()
    assert second is not first and pool.pending == 1
    pool.sent(None, second)
    assert pool.take() is second
    tracker.done = True
    assert pool.take() is first
    assert (pool.free, pool.pending) == (0, 0)


def test_a_pool_keeps_no_more_than_its_bound() -> None:
    pool = BufferPool(most=2)
    for one in [pool.take() for _ in range(5)]:
        pool.sent(None, one)
    assert pool.free == 2
