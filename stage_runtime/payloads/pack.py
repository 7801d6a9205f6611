"""The parts of a payload as one flat buffer, with the offset of each. Made by `encoding`, moved by relays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from stage_runtime.payloads import buffers, streams, tensors
from stage_runtime.payloads.streams import DeviceStreams, StreamHandover
from stage_runtime.payloads.tensors import FlatPart
from stage_runtime.wire.parts import INLINE_LIMIT
from stage_runtime.wire.tensorrefs import TensorRef

ALIGNMENT = 64  # a cache line: what torch's vectorised kernels and every backend's DMA are happy with


class OnDevice(msgspec.Struct, frozen=True, eq=False):
    """The parts of a pack that lie on one GPU: behind all others in the flat buffer, from ``start`` on.

    device: torch's name of the GPU in this process. tensors: flat and contiguous, of ``uint8``; tensor k is at
        ``offsets[k]`` of the flat buffer.
    """

    device: str
    start: int
    tensors: Sequence[Any]
    offsets: Sequence[int]


class Arrived(msgspec.Struct, frozen=True, eq=False):
    """The end of a flat buffer that arrived on a GPU: what begins at ``start``, as a flat tensor of ``uint8``."""

    start: int
    flat: Any
    handover: StreamHandover | None = None  #: The handover of a copy that another thread made.

    def copied(self, on: DeviceStreams = streams.CUDA) -> Arrived:
        """A copy in memory of this process. A thread calls `taken` of it before it reads it."""
        copy = self.flat.clone()
        return Arrived(self.start, copy, streams.given(copy, on))

    def taken(self) -> None:
        if self.handover is not None:
            self.handover.take()


class Pack(msgspec.Struct, frozen=True):
    """Buffers that travel as one flat buffer: part k is at ``offsets[k]`` (aligned), ``nbytes`` in all.

    parts: C-contiguous byte buffers (``memoryview`` with format B). Their owner may write into them as soon as `put`
        has returned: a relay that reads them later copies them first, all but those of ``private``.
    private: indices of the parts that are not written any more: immutable bytes, and copies made on the way here.
    on_device: parts beyond ``parts`` that lie on a GPU; None in all that `dispatch` gives a relay without GPU memory.
    """

    parts: Sequence[memoryview]
    offsets: Sequence[int]
    nbytes: int
    private: frozenset[int] = frozenset()
    on_device: OnDevice | None = None

    def on_host(self) -> Pack:
        """The same flat buffer, all of it in the host's memory: what lies on a GPU is copied."""
        there = self.on_device
        if there is None:
            return self
        copies = [tensors.host_bytes(tensor) for tensor in there.tensors]
        parts, offsets = [*self.parts, *copies], [*self.offsets, *there.offsets]
        return Pack(parts, offsets, self.nbytes, self.private | frozenset(range(len(self.parts), len(parts))))

    def host_part(self) -> Pack:
        """The part that lies in the host's memory, which is the beginning of the flat buffer."""
        there = self.on_device
        return self if there is None else Pack(self.parts, self.offsets, there.start, self.private)


#: Up to here bytes and encoded values are not part of their own.
INLINE_NBYTES: Final = 16 * 1024


NOTHING: Final = memoryview(b"")
_FIRST: Final = frozenset([0])
_NONE: Final[frozenset[int]] = frozenset()


class Extracted(msgspec.Struct):
    """A value ready to travel.

    value_bytes: its MessagePack; empty when it is long and so a part itself (the last ref, of kind ``value``).
    refs: one per part, in the order that placeholders count. pack: the parts; None without parts.
    """

    value_bytes: bytes
    refs: tuple[TensorRef, ...]
    pack: Pack | None
    #: Operations under way with this pack, by relay: so several receivers can share one slot.
    placed: dict[str, Any] = {}
    _on_host: Pack | None = None  #: The host's copy of a pack that lies on a GPU in part.

    @property
    def nbytes(self) -> int:
        """Bytes that a relay would move."""
        return self.pack.nbytes if self.pack is not None else 0

    @property
    def held_nbytes(self) -> int:
        """Bytes that it keeps in memory."""
        return len(self.value_bytes) + self.nbytes

    @property
    def is_inline(self) -> bool:
        """True when the parts are small enough to ride in the control message (`flat`)."""
        return self.pack is None or len(self.value_bytes) + self.pack.nbytes <= INLINE_LIMIT

    def on_host(self) -> Pack | None:
        """The pack as relays without GPU memory send it; copied from the GPU once."""
        pack = self.pack
        if pack is None or pack.on_device is None:
            return pack
        if self._on_host is None:
            self._on_host = pack.on_host()
        return self._on_host

    def hold(self) -> None:
        """Copy what its giver may write into again: it will be sent later, from the host's memory."""
        pack = self.pack = self.on_host()
        if pack is not None and len(pack.private) < len(pack.parts):
            parts = [part if k in pack.private else buffers.copied(part) for k, part in enumerate(pack.parts)]
            self.pack = Pack(parts, pack.offsets, pack.nbytes, frozenset(range(len(parts))))

    def flat(self) -> memoryview:
        """The parts as one buffer, for the control message; empty without parts.

        A single part is not copied: the message must be written before its giver may write into it again.
        """
        pack = self.on_host()
        return NOTHING if pack is None else flatten(pack)


def flatten(pack: Pack) -> memoryview:
    """The parts of a pack in one buffer, each at its offset."""
    if len(pack.parts) == 1:
        return pack.parts[0]
    flat = bytearray(pack.nbytes)
    for part, offset in zip(pack.parts, pack.offsets, strict=True):
        flat[offset : offset + len(part)] = part
    return memoryview(flat)


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


def packed_with_device(encoded: bytes, found: list[FlatPart], where: str) -> Extracted:
    """The same as `packed`, for leaves some of which lie on GPUs. Those of one GPU stay there; others are copied."""
    device = next(part.device for part in found if part.on_device is not None)
    if len(encoded) > INLINE_NBYTES:
        found.append(FlatPart(where, (len(encoded),), "uint8", "value", memoryview(encoded), encoded, True))
        encoded = b""
    there = {index: part for index, part in enumerate(found) if part.on_device is not None and part.device == device}
    for index, part in enumerate(found):
        if part.on_device is not None and index not in there:
            part.data, part.private, part.on_device = tensors.host_bytes(part.on_device), True, None
    near = _placed(encoded, [part for index, part in enumerate(found) if index not in there])
    assert near.pack is not None
    start = end = near.pack.nbytes + -near.pack.nbytes % ALIGNMENT
    offsets, known = list[int](), iter(near.refs)
    refs = []
    for index, part in enumerate(found):
        if index not in there:
            refs.append(next(known))
            continue
        nbytes = len(part.on_device)
        refs.append(TensorRef(part.path, part.shape, part.dtype, end, nbytes, part.kind, part.device))
        offsets.append(end)
        end += nbytes + -nbytes % ALIGNMENT
    flats = [part.on_device for part in there.values()]
    pack = Pack(near.pack.parts, near.pack.offsets, end, near.pack.private, OnDevice(device, start, flats, offsets))
    return Extracted(encoded, tuple(refs), pack)


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
        refs[index] = TensorRef(part.path, part.shape, part.dtype, start, nbytes, part.kind, part.device)
    return Extracted(encoded, tuple(refs), Pack(parts, offsets, end, frozenset(private)))
