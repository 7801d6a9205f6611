"""References to the parts of a flat buffer: offset, shape, dtype. Written by `payloads.encoding`.

Pure: dtypes are names, nothing here knows torch, numpy or memory. Refs come from sockets: `validated` is the gate
that they pass before anybody makes a view from one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from stage_runtime.errors import ProtocolError

TensorKind = Literal["torch", "numpy", "bytes", "value"]

#: Bytes per element, by torch's name without the prefix. Quantised types are missing: their scale would be lost.
ITEMSIZES: Final[dict[str, int]] = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16", "bits16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32", "complex32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
    "complex128": 16,
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("float4_e2m1fn_x2", "bits8", "bits1x8", "bits2x4", "bits4x2"), 1),
    **dict.fromkeys((f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)), 1),
}

#: Types that numpy has, under the names that both share.
NUMPY_DTYPES: Final = frozenset(
    ["bool", "float16", "float32", "float64", "complex64", "complex128"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)

HOST: Final = "cpu"
_GPU: Final = re.compile(r"cuda:[0-9]{1,3}")

PATH_LIMIT: Final = 200  # characters; a path is for people, and keys are as long as clients like
MAX_DIMENSIONS: Final = 64  # torch's and numpy's own limit


class TensorRef(msgspec.Struct, frozen=True, array_like=True):
    """One part of a flat buffer.

    path: where the sender had it, for messages (``payload.data['hidden']``). offset, nbytes: in the flat buffer.
    kind: what it becomes; ``bytes`` and ``value`` (the MessagePack of the value itself) are flat ``uint8``.
    device: where it lay at its sender: ``cpu``, or ``cuda:`` and the sender's number of a GPU.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int
    kind: TensorKind = "torch"
    device: str = HOST


def validated(refs: Sequence[TensorRef], nbytes: int) -> Sequence[TensorRef]:
    """``refs``, if every one is inside a buffer of ``nbytes`` and complete. They may overlap.

    Raises: ProtocolError: names the ref and what is wrong with it.
    """
    for index, ref in enumerate(refs):
        problem = _problem(ref, nbytes)
        if problem is not None:
            raise ProtocolError(f"tensor ref {index} ({ref.path[:200]}): {problem}")
        if ref.kind == "value" and index != len(refs) - 1:
            raise ProtocolError(f"tensor ref {index}: a value must be last")
    return refs


def _problem(ref: TensorRef, nbytes: int) -> str | None:
    if ref.offset < 0 or ref.nbytes < 0 or ref.offset + ref.nbytes > nbytes:
        return f"bytes {ref.offset}..{ref.offset + ref.nbytes} are not in a buffer of {nbytes}"
    itemsize = ITEMSIZES.get(ref.dtype)
    if itemsize is None:
        return f"unknown dtype {ref.dtype[:40]!r}"
    shape = ref.shape
    if len(shape) > MAX_DIMENSIONS or min(shape, default=0) < 0:
        return f"impossible shape of {len(shape)} dimensions"
    if math.prod(shape) * itemsize != ref.nbytes:
        return f"{ref.dtype} of shape {list(shape)[:8]} is not {ref.nbytes} bytes"
    if ref.device != HOST and (ref.kind != "torch" or _GPU.fullmatch(ref.device) is None):
        return f"{ref.kind[:40]} on an unknown device {ref.device[:40]!r}"
    match ref.kind:
        case "torch":
            return None
        case "numpy":
            return None if ref.dtype in NUMPY_DTYPES else f"numpy has no {ref.dtype}"
        case "bytes" | "value":
            return None if ref.dtype == "uint8" and len(ref.shape) == 1 else f"{ref.kind} are flat uint8"
    return f"unknown kind {ref.kind!r}"
