"""The parts of a payload as one flat buffer, with the offset of each. Made by `encoding`, moved by relays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from stage_runtime.payloads import buffers
from stage_runtime.payloads.tensors import FlatPart
from stage_runtime.wire.tensorrefs import TensorRef

ALIGNMENT = 64  # a cache line: what torch's vectorised kernels and every backend's DMA are happy with


class Pack(msgspec.Struct, frozen=True):
    """Buffers that travel as one flat buffer: part k is at ``offsets[k]`` (aligned), ``nbytes`` in all.

    parts: C-contiguous byte buffers (``memoryview`` with format B). Their owner may write into them as soon as `put`
        has returned: a relay that reads them later copies them first, all but those of ``private``.
    private: indices of the parts that are not written any more: immutable bytes, and copies made on the way here.
    """

    parts: Sequence[memoryview]
    offsets: Sequence[int]
    nbytes: int
    private: frozenset[int] = frozenset()


#: Up to here a payload rides in its control message: one acknowledgement and one slot less.
INLINE_NBYTES: Final = 16 * 1024


_FIRST: Final = frozenset([0])
_NONE: Final[frozenset[int]] = frozenset()


class Extracted(msgspec.Struct):
    """A value ready to travel.

    value_bytes: its MessagePack; empty when it is long and so a part itself (the last ref, of kind ``value``).
    refs: one per part, in the order that placeholders count. pack: the parts; None when there are none.
    """

    value_bytes: bytes
    refs: tuple[TensorRef, ...]
    pack: Pack | None
    #: Operations under way with this pack, by relay: so several receivers can share one slot.
    placed: dict[str, Any] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that a relay would move."""
        return self.pack.nbytes if self.pack is not None else 0

    @property
    def is_inline(self) -> bool:
        """True when the parts are small enough to ride in the control message (`flat`)."""
        return self.pack is None or len(self.value_bytes) + self.pack.nbytes <= INLINE_NBYTES

    def hold(self) -> None:
        """Copy what its giver may write into again: it will be sent later."""
        pack = self.pack
        if pack is not None and len(pack.private) < len(pack.parts):
            parts = [part if k in pack.private else buffers.copied(part) for k, part in enumerate(pack.parts)]
            self.pack = Pack(parts, pack.offsets, pack.nbytes, frozenset(range(len(parts))))

    def flat(self) -> bytes:
        """The parts as one buffer, for the control message; empty when there are none."""
        return b"" if self.pack is None else flatten(self.pack)


def flatten(pack: Pack) -> bytes:
    """The parts of a pack in one buffer, each at its offset."""
    if len(pack.parts) == 1:
        return bytes(pack.parts[0])
    flat = bytearray(pack.nbytes)
    for part, offset in zip(pack.parts, pack.offsets, strict=True):
        flat[offset : offset + len(part)] = part
    return bytes(flat)


def packed(encoded: bytes, found: list[FlatPart], where: str) -> Extracted:
    """Give every leaf its place in the flat buffer: the largest first, for it may lie in the arena already.

    Leaves on the same memory have one place: a stage that passes on what it got sends its request's inputs, too.
    """
    if len(encoded) > INLINE_NBYTES:
        found.append(FlatPart(where, (len(encoded),), "uint8", "value", memoryview(encoded), encoded, True))
        encoded = b""
    first = found[0].data
    if len(found) == 1 or (len(found) == 2 and _is_same(first, found[1].data)):  # nearly all
        nbytes = len(first)
        refs = tuple([TensorRef(part.path, part.shape, part.dtype, 0, nbytes, part.kind) for part in found])
        private = _FIRST if found[0].private and found[-1].private else _NONE
        return Extracted(encoded, refs, Pack((first,), (0,), nbytes, private))
    return _placed(encoded, found)


def _is_same(one: memoryview, other: memoryview) -> bool:
    """Whether both are the same memory, and some."""
    return 0 < len(one) == len(other) and buffers.address(one) == buffers.address(other)


def _placed(encoded: bytes, found: list[FlatPart]) -> Extracted:
    order = sorted(range(len(found)), key=lambda index: -len(found[index].data))
    refs: list[Any] = [None] * len(found)
    parts: list[memoryview] = []
    offsets: list[int] = []
    private = []
    placed: dict[tuple[int, int], int] = {}  # (address, nbytes) of a part -> its place
    end = 0
    for index in order:
        part = found[index]
        nbytes = len(part.data)
        memory_of = (buffers.address(part.data), nbytes) if nbytes else (0, 0)
        start = placed.get(memory_of, -1)
        if start < 0:
            start = end + -end % ALIGNMENT
            end = start + nbytes
            if part.private:
                private.append(len(parts))
            parts.append(part.data)
            offsets.append(start)
            if nbytes:
                placed[memory_of] = start
        refs[index] = TensorRef(part.path, part.shape, part.dtype, start, nbytes, part.kind)
    return Extracted(encoded, tuple(refs), Pack(parts, offsets, end, frozenset(private)))
