"""This process's memory on GPUs, out of which it sends: chunks, each shared with a peer once, and their slots.

It is to GPUs what `arena` is to the host: slots have the states of `slots`, and what was aborted is quarantined until
its receivers are through.
The first chunk of a GPU is allocated at the start, further ones when they are needed; all are kept: their peers have
them open.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from stage_runtime.payloads.pack import OnDevice
from stage_runtime.relays.base import Peer
from stage_runtime.relays.cuda_ipc.memory import DeviceMemory, Unshared
from stage_runtime.relays.memory.slots import Extents, Slot, SlotEvent, SlotState

CHUNK_NBYTES: Final = 64 << 20  # the least: peers open few handles, and small payloads share one
#: Seconds after the GPU had no room for a chunk. Each try takes long: torch's allocator gives all that it keeps back
#: first, which the stages miss.
RETRY_S: Final = 30.0
UNIT: Final = 512  # what CUDA's own allocations are aligned to


class GpuChunk:
    """A piece of a GPU's memory."""

    __slots__ = ("device", "extents", "handles", "memory", "nbytes", "number")

    def __init__(self, number: int, device: str, memory: Any, nbytes: int) -> None:
        self.number = number  #: Its name towards peers.
        self.device = device
        self.memory = memory
        self.nbytes = nbytes
        self.extents = Extents(0, nbytes, UNIT)
        self.handles: dict[Peer, bytes] = {}


class GpuPlace(NamedTuple):
    """A slot on a GPU that has one receiver more."""

    chunk: GpuChunk
    slot: Slot


class ChunkPool:
    """All chunks of a process. Every method may be called from any thread."""

    def __init__(
        self,
        memory: DeviceMemory,
        most_nbytes: int,
        devices: Iterable[str] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """most_nbytes: of each GPU. devices: GPUs of which a chunk is taken now, if there is room."""
        self._memory = memory
        self._most_nbytes = most_nbytes
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._chunks: list[GpuChunk] = []
        self._in_use = 0
        self._quarantined = 0
        self._clock = clock
        self._full_since: dict[str, float] = {}  #: The time at which each GPU last had no room for a chunk.
        for device in devices:
            try:
                self._grow(device, 0)
            except Unshared:
                continue

    def place(self, there: OnDevice, nbytes: int) -> GpuPlace | None:
        """A copy of what lies on the GPU, ``nbytes`` with its gaps; complete. None when it finds no room."""
        try:
            with self._lock:
                place = self._allocated(there.device, nbytes)
            if place is None:
                return None
            start = place.slot.start - there.start
            parts = [(start + offset, tensor) for offset, tensor in zip(there.offsets, there.tensors, strict=True)]
            complete = False
            try:
                self._memory.write(place.chunk.memory, parts)
                complete = True
            finally:
                with self._lock:
                    place.slot.take(SlotEvent.SENT if complete else SlotEvent.DROPPED)
                    place.slot.receivers = int(complete)
                    if not complete:
                        self._free(place)
        except Unshared:
            return None
        return place

    def handle(self, chunk: GpuChunk, peer: Peer) -> bytes:
        """How ``peer`` opens it; the same each time. Raises: Unshared."""
        with self._lock:
            known = chunk.handles.get(peer)
            if known is None:
                known = chunk.handles[peer] = self._memory.share(chunk.memory)
            return known

    def share(self, place: GpuPlace) -> bool:
        """One receiver more. False when the slot is free, or its request was aborted."""
        slot = place.slot
        with self._lock:
            if not slot.receivers or slot.state is SlotState.QUARANTINED:
                return False
            slot.take(SlotEvent.SENT)
            slot.receivers += 1
            return True

    def released(self, place: GpuPlace) -> None:
        """One receiver less; the last one frees the slot."""
        slot = place.slot
        with self._lock:
            slot.receivers -= 1
            if not slot.receivers:
                self._quarantined -= slot.state is SlotState.QUARANTINED
                slot.take(SlotEvent.RELEASED)
                slot.take(SlotEvent.DROPPED)
                self._free(place)

    def aborted(self, place: GpuPlace) -> None:
        """The request is over, and it is unknown whether the receivers still read. The last one may have released the
        slot meanwhile.
        """
        with self._lock:
            if place.slot.receivers:
                self._quarantined += place.slot.state is not SlotState.QUARANTINED
                place.slot.take(SlotEvent.ABORTED)

    def forget(self, peer: Peer) -> None:
        """It is gone."""
        with self._lock:
            for chunk in self._chunks:
                chunk.handles.pop(peer, None)

    def stats(self) -> dict[str, int]:
        with self._lock:
            return {
                "gpu_bytes": sum(chunk.nbytes for chunk in self._chunks),
                "gpu_bytes_in_use": self._in_use,
                "gpu_quarantined_slots": self._quarantined,
            }

    def close(self) -> None:
        with self._lock:
            self._chunks.clear()

    # --- under the lock -----------------------------------------------------------------------------------------

    def _allocated(self, device: str, nbytes: int) -> GpuPlace | None:
        of_device = [chunk for chunk in self._chunks if chunk.device == device]
        found = next((place for chunk in of_device if (place := self._slot(chunk, nbytes)) is not None), None)
        if found is not None:
            return found
        if self._clock() - self._full_since.get(device, float("-inf")) < RETRY_S:
            return None
        chunk = self._grow(device, nbytes)
        return self._slot(chunk, nbytes) if chunk is not None else None

    def _grow(self, device: str, nbytes: int) -> GpuChunk | None:
        """A new chunk with room for so much; None: the GPU's share is used up. Raises: Unshared: it has no memory."""
        used = sum(chunk.nbytes for chunk in self._chunks if chunk.device == device)
        wanted = min(max(CHUNK_NBYTES, nbytes + -nbytes % UNIT), self._most_nbytes - used) // UNIT * UNIT
        if wanted < nbytes or wanted <= 0:
            return None
        try:
            memory = self._memory.allocate(device, wanted)
        except Unshared:
            self._full_since[device] = self._clock()
            raise
        chunk = GpuChunk(next(self._numbers), device, memory, wanted)
        self._chunks.append(chunk)
        return chunk

    def _slot(self, chunk: GpuChunk, nbytes: int) -> GpuPlace | None:
        extent = chunk.extents.allocate(nbytes)
        if extent is None:
            return None
        start, size = extent
        slot = Slot(start, size, start, nbytes, 0, owned=False)
        slot.take(SlotEvent.ALLOCATED)
        self._in_use += size
        return GpuPlace(chunk, slot)

    def _free(self, place: GpuPlace) -> None:
        place.chunk.extents.free(place.slot.start, place.slot.size)
        self._in_use -= place.slot.size
