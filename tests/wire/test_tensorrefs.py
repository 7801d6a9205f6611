"""Refs from a socket: what is let through, and what is said of the rest."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.errors import ProtocolError
from stage_runtime.wire import tensorrefs
from stage_runtime.wire.tensorrefs import TensorRef


def ref(**changes: Any) -> TensorRef:
    return msgspec.structs.replace(TensorRef("payload.data", (2, 3), "float32", 64, 24), **changes)


@pytest.mark.parametrize(
    "good",
    [
        ref(),
        ref(shape=(), nbytes=4),
        ref(shape=(0, 5), nbytes=0),
        ref(shape=(0, 5), nbytes=0, offset=100),
        ref(offset=76),
        ref(dtype="bfloat16", nbytes=12),
        ref(dtype="float8_e5m2", nbytes=6),
        ref(kind="numpy"),
        ref(kind="bytes", dtype="uint8", shape=(24,)),
        ref(kind="value", dtype="uint8", shape=(24,)),
        ref(device="cuda:0"),
        ref(device="cuda:127"),
    ],
)
def test_a_ref_that_lies_inside_its_buffer_is_let_through(good: TensorRef) -> None:
    assert tensorrefs.validated([good], 100) == [good]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (ref(offset=-64), "bytes -64..-40 are not in a buffer of 100"),
        (ref(nbytes=-24), "are not in a buffer"),
        (ref(offset=77), "bytes 77..101 are not in a buffer of 100"),
        (ref(offset=2**63), "are not in a buffer"),
        (ref(nbytes=20), "float32 of shape [2, 3] is not 20 bytes"),
        (ref(shape=(2, -3), nbytes=24), "impossible shape"),
        (ref(shape=(-2, -3)), "impossible shape"),
        (ref(shape=(1,) * 65, nbytes=4), "impossible shape of 65 dimensions"),
        (ref(shape=(2**62, 2**62)), "is not 24 bytes"),
        (ref(dtype="object"), "unknown dtype 'object'"),
        (ref(dtype="bfloat16", nbytes=12, kind="numpy"), "numpy has no bfloat16"),
        (ref(kind="bytes"), "bytes are flat uint8"),
        (ref(kind="value", dtype="uint8", shape=(4, 6)), "value are flat uint8"),
        (ref(kind="pickle"), "unknown kind 'pickle'"),
        *[
            (ref(device=device), "on an unknown device")
            for device in (
                "",
                "cuda",
                "cuda:",
                "cuda:-1",
                "cuda:1234",
                "cuda:0 ",
                "cuda:0\n",
                "CUDA:0",
                "meta",
                "cpu:0",
            )
        ],
        *[
            (ref(device=device), "on an unknown device")
            for device in ("cuda:\u0660", "cuda:0/../1", "x" * 10_000, "\0")
        ],
        (ref(kind="numpy", device="cuda:0"), "numpy on an unknown device"),
        (ref(kind="value", dtype="uint8", shape=(24,), device="cuda:0"), "value on an unknown device"),
    ],
)
def test_a_false_ref_is_refused_and_named(bad: TensorRef, words: Any) -> None:
    with pytest.raises(ProtocolError) as caught:
        tensorrefs.validated([ref(), bad], 100)
    assert words in str(caught.value)
    assert "tensor ref 1 (payload.data)" in str(caught.value)


def test_refs_may_overlap() -> None:
    both = [ref(), ref(offset=70)]
    assert tensorrefs.validated(both, 100) == both


def test_a_value_part_stands_last_or_is_refused() -> None:
    value = ref(kind="value", dtype="uint8", shape=(24,))
    with pytest.raises(ProtocolError, match="a value must be last"):
        tensorrefs.validated([value, ref()], 100)


@given(
    shape=st.lists(st.integers(-4, 9), max_size=4).map(tuple),
    dtype=st.sampled_from(sorted(tensorrefs.ITEMSIZES)),
    offset=st.integers(-70, 200),
    nbytes=st.integers(-70, 200),
)
def test_what_is_let_through_is_inside_and_of_its_size(
    shape: tuple[int, ...], dtype: Any, offset: int, nbytes: int
) -> None:
    one = TensorRef("x", shape, dtype, offset, nbytes)
    try:
        tensorrefs.validated([one], 128)
    except ProtocolError:
        return
    assert 0 <= offset <= offset + nbytes <= 128
    size = tensorrefs.ITEMSIZES[dtype]
    for count in shape:
        size *= count
    assert size == nbytes and all(count >= 0 for count in shape)
