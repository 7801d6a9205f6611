"""One large piece of memory per process that peers on the same machine may map, and its slots.

An anonymous file (memfd): nothing is left behind when the process is killed, and no ``/dev/shm`` limits it. It is
sparse and much larger than what is used: pages come with use, lowest address first, so the same ones stay warm; what
lies far above recent use is given back (`trim`). Sealed against shrinking, or a peer that reads could be killed by it.
The states of slots are `slots`' table; what is sent to whom is the relay's business.
"""

from __future__ import annotations

import collections
import fcntl
import itertools
import logging
import mmap
import os
import secrets
import struct
import threading
import weakref
from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from stage_runtime.errors import ConfigurationError
from stage_runtime.payloads import buffers
from stage_runtime.payloads.pack import ALIGNMENT
from stage_runtime.relays.memory import pages
from stage_runtime.relays.memory.slots import Extents, Slot, SlotEvent, SlotState

log = logging.getLogger(__name__)

PAGE: Final = 4096
MAGIC: Final = b"omni-arena-1\0\0\0\0"
TOKEN_NBYTES: Final = 16
HEADER: Final = struct.Struct("<QQ")  # of a slot: generation (0: free), size; padded to ALIGNMENT
SLOT_EXTRA_NBYTES: Final = 2 * PAGE  # of a slot beside its data, at most: header, shift, the rest of its last page
TAIL_NBYTES: Final = 64 << 10  # room behind an author's tensor for the small rest of its payload


class Arena:
    """This process's arena. Every method may be called from any thread."""

    def __init__(self, nbytes: int, *, prefault_nbytes: int = 0) -> None:
        """nbytes: most that can be in use at once; taken from the machine only as it is used.

        Raises: ConfigurationError: the system gives no such memory.
        """
        self.nbytes = nbytes + -nbytes % PAGE + PAGE
        try:
            self.fd, self._map = _create(self.nbytes)
        except OSError as error:
            raise ConfigurationError(f"relay arena of {nbytes} bytes: {error.strerror}") from error
        #: Closes the file, at the latest when nobody has the arena: a relay may not start after it made one.
        self._closing = weakref.finalize(self, os.close, self.fd)
        self._closing.atexit = False
        self.token = secrets.token_bytes(TOKEN_NBYTES)
        self._map[: len(MAGIC) + TOKEN_NBYTES] = MAGIC + self.token
        self._view = memoryview(self._map)
        self._bytes: np.ndarray[Any, Any] = np.frombuffer(self._map, np.uint8)
        self._address = self._bytes.ctypes.data
        self._kept = min(PAGE + prefault_nbytes, self.nbytes)  #: Never given back.
        pages.populate(self._map, self._kept)
        self._lock = threading.Lock()
        self._extents = Extents(PAGE, self.nbytes, PAGE)
        self._generations = itertools.count(1)
        self._slots: dict[int, Slot] = {}  #: Slots by start: all that are not FREE.
        self._in_use = 0
        self._peak = PAGE  #: Highest end in use since the last `trim`.
        self._touched = self._kept  #: The size above which no page of the file exists.
        #: Slots whose author's tensor died. Weak references fill it: at any moment, in any thread, without the lock.
        self._orphans: collections.deque[Slot] = collections.deque()
        self._unread: collections.deque[tuple[int, Slot]] = collections.deque()  #: The same for views of `read_region`.
        #: Regions of authors and of the tcp relay, by the start of their slots: keeps the weak references alive.
        self._regions: dict[int, weakref.ref[Any]] = {}
        self._reading: dict[int, weakref.ref[Any]] = {}  #: Views that `read_region` has given, by number.
        self._numbers = itertools.count()
        self._again: mmap.mmap | None = None  #: The mapping in which that lies.
        self._lent = threading.local()  #: ``slots``: lent since the last `settle`; ``holds``: an author kept one.

    def pin(self) -> None:
        """A device has been given these pages: all of them are in memory, and none is given back from now on. Others
        that took their place would be unknown to the device.
        """
        with self._lock:
            self._touched = self._kept = self.nbytes

    @property
    def address(self) -> int:
        """The address where this process has mapped it."""
        return self._address

    @property
    def in_use(self) -> int:
        """Bytes of all slots."""
        with self._lock:
            self._reap()
            return self._in_use

    def map_again(self) -> mmap.mmap:
        """A second mapping: it shows what peers that map the file see, also where `settle` gave an author pages of his
        own. Transports that read by address use it.
        """
        return mmap.mmap(self.fd, self.nbytes)

    def allocate(self, nbytes: int, *, tail_nbytes: int = 0, source: memoryview | None = None) -> Slot | None:
        """A FILLING slot with room for ``nbytes``; None when it finds no room now.

        source: the largest part of what will be copied into it.
        """
        shift = self._shift(source)
        with self._lock:
            if self._orphans or self._unread:
                self._reap()
            extent = self._extents.allocate(ALIGNMENT + shift + nbytes + tail_nbytes)
            if extent is None:
                return None
            start, size = extent
            slot = Slot(start, size, start + ALIGNMENT + shift, nbytes, next(self._generations))
            slot.take(SlotEvent.ALLOCATED)
            self._slots[start] = slot
            self._in_use += size
            end = start + size
            self._peak = max(self._peak, end)
            self._touched = max(self._touched, end)
        HEADER.pack_into(self._map, start, slot.generation, size)
        return slot

    def has_room(self, wanted: Iterable[tuple[int, memoryview | None]]) -> bool:
        """Whether `allocate` has slots for all of these now: bytes and source of each. Nothing is allocated."""
        sizes = [ALIGNMENT + self._shift(source) + nbytes for nbytes, source in wanted]
        extents = list[tuple[int, int]]()
        with self._lock:
            self._reap()
            try:
                for size in sizes:
                    extent = self._extents.allocate(size)
                    if extent is None:
                        return False
                    extents.append(extent)
            finally:
                for start, size in extents:
                    self._extents.free(start, size)
        return True

    def most_nbytes(self, slots: int) -> int:
        """Most bytes of which an empty arena holds so many slots, whatever their sizes and sources."""
        return self.nbytes - PAGE - slots * SLOT_EXTRA_NBYTES

    def write(self, slot: Slot, at: int, part: memoryview) -> None:
        """Copy ``part`` to ``at`` bytes behind the slot's beginning of data. Long copies run without the GIL."""
        start = slot.offset + at
        nbytes = len(part)
        if nbytes < buffers.NOGIL_NBYTES:
            self._view[start : start + nbytes] = part
        else:
            self._bytes[start : start + nbytes] = np.frombuffer(part, np.uint8)

    def sent(self, slot: Slot) -> None:
        """One more receiver has the slot."""
        with self._lock:
            slot.take(SlotEvent.SENT)
            slot.receivers += 1

    def sent_in_place(self, slot: Slot) -> bool:
        """The same as `sent`, for the slot of an author's tensor that `find` gave. False: another thread has sent it
        and gone on, so what was written there since is seen by this process alone.
        """
        with self._lock:
            if slot.given:
                return False
            slot.take(SlotEvent.SENT)
            slot.receivers += 1
            return True

    def send_copy(self, slot: Slot) -> None:
        """Does what `sent` and then `drop` do: the slot is its receiver's alone."""
        with self._lock:
            slot.take(SlotEvent.SENT)
            slot.receivers += 1
            slot.owned = False

    def lend(self, slot: Slot) -> None:
        """The slot is sent without a copy of its author's tensor, by this thread: `settle` follows."""
        pending: list[Slot] | None = getattr(self._lent, "slots", None)
        if pending is None:
            pending = self._lent.slots = []
        pending.append(slot)

    def settle(self) -> None:
        """Call it before this thread's authors continue. A tensor that was sent without a copy, and that code here
        still holds, gets pages of its own for what is written from now on, as after a fork: its receivers keep reading
        what it held when it was given. That costs more than a copy, so such an author's next tensors are copied.
        """
        pending: list[Slot] | None = getattr(self._lent, "slots", None)
        if not pending:
            return
        self._lent.slots = []
        with self._lock:
            self._reap()
            for slot in pending:
                if slot.owned and not slot.given and self._slots.get(slot.start) is slot:
                    self._lent.holds = True
                    try:
                        pages.remap(self._address, slot.start, slot.size, self.fd, private=True)
                        slot.given = True
                    except OSError as error:
                        log.error(
                            "cannot give a sent tensor its own pages; later writes by its author reach receivers: %s",
                            error,
                        )

    def share(self, slot: Slot) -> bool:
        """The same as `sent`, for a slot that was sent before. False: it is free, or its request was aborted."""
        with self._lock:
            if slot.state not in (SlotState.IN_FLIGHT, SlotState.ACKED):
                return False
            slot.take(SlotEvent.SENT)
            slot.receivers += 1
            return True

    def released(self, slot: Slot) -> bool:
        """One receiver less. True when the slot is free now."""
        with self._lock:
            if self._orphans or self._unread:
                self._reap()
            return self._released(slot)

    def aborted(self, slot: Slot) -> None:
        """The request is over, and it is unknown whether the receivers still read. The last one may have released the
        slot meanwhile.
        """
        with self._lock:
            if slot.receivers:
                slot.take(SlotEvent.ABORTED)

    def drop(self, slot: Slot) -> bool:
        """The sender no longer needs the slot. True when it is free now; else the last receiver frees it."""
        with self._lock:
            self._reap()
            slot.owned = False
            return self._free_unless_held(slot)

    def allocate_region(
        self, nbytes: int, *, tail_nbytes: int = 0, source: memoryview | None = None
    ) -> np.ndarray[Any, Any] | None:
        """A slot as an array of bytes, whose last view's death frees it, once no receiver has it. None when it
        finds no room. Parts of it that are sent are not copied. source: as of `allocate`.
        """
        slot = self.allocate(nbytes, tail_nbytes=tail_nbytes, source=source)
        if slot is None:
            return None
        region = pages.region(self._map, slot.offset, nbytes)
        with self._lock:
            self._regions[slot.start] = weakref.ref(region, lambda _: self._orphans.append(slot))
        return region

    def allocate_tensor(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """The same as `allocate_region`, as a torch tensor, with room behind it for the small rest of its payload.

        Raises: what `torch.empty` raises for a shape or dtype that no tensor has.
        """
        import torch

        wanted = torch.empty(shape, dtype=dtype, device="meta")
        if not wanted.nbytes:
            return torch.empty(shape, dtype=dtype, device="cpu")
        region = self.allocate_region(wanted.nbytes, tail_nbytes=TAIL_NBYTES)
        if region is None:
            return None
        return torch.frombuffer(buffers.view(region), dtype=torch.uint8).view(dtype).view(wanted.shape)

    def find(self, part: memoryview) -> tuple[Slot, int] | None:
        """The slot of an author's tensor in which ``part`` lies, and where in its data; None when it lies elsewhere, or
        is not to be sent from there.
        """
        if not self._regions or getattr(self._lent, "holds", mmap.PAGESIZE > PAGE):
            return None
        offset = buffers.address(part) - self._address
        if not 0 <= offset < self.nbytes:
            return None
        with self._lock:
            for start in self._regions:
                slot = self._slots.get(start)
                if (
                    slot is not None
                    and not slot.given
                    and slot.offset <= offset
                    and offset + len(part) <= slot.offset + slot.nbytes
                ):
                    return slot, offset - slot.offset
        return None

    def read_region(self, part: memoryview) -> np.ndarray[Any, Any] | None:
        """The value of ``part`` of an author's tensor now, for a transport of this process that reads it later;
        `settle` follows. The slot stays taken until the last view of it has died. None: ``part`` lies elsewhere, or is
        not to be sent from there, or this process has no descriptor or memory left for the mapping.
        """
        found = self.find(part)
        if found is None:
            return None
        slot, start = found
        with self._lock:
            if slot.given:
                return None
            if self._again is None:
                try:
                    self._again = self.map_again()
                except OSError:
                    return None
            region = pages.region(self._again, slot.offset + start, len(part))
            slot.take(SlotEvent.SENT)
            slot.receivers += 1
            number = next(self._numbers)
            self._reading[number] = weakref.ref(region, lambda _: self._unread.append((number, slot)))
        self.lend(slot)
        return region

    def claim_tail(self, slot: Slot) -> bool:
        """True for the first caller: only one payload's rest can lie behind an author's tensor."""
        with self._lock:
            first = not slot.tail_used
            slot.tail_used = True
            return first

    def trim(self, most_nbytes: int = 256 << 20) -> int:
        """Give back pages above all recent use, at most ``most_nbytes`` at once, for it holds the GIL. It is called
        every few seconds. Returns: bytes given back.
        """
        with self._lock:
            self._reap()
            above = max(self._peak, self._kept)
            self._peak = max((slot.start + slot.size for slot in self._slots.values()), default=PAGE)
            start = max(above, self._touched - most_nbytes)
            nbytes = self._touched - start
            if nbytes > 0:
                self._map.madvise(mmap.MADV_REMOVE, start, nbytes)
                self._touched = start
            return max(nbytes, 0)

    def stats(self) -> dict[str, int]:
        with self._lock:
            self._reap()
            states = collections.Counter(slot.state for slot in self._slots.values())
            return {
                "arena_bytes": self.nbytes - PAGE,
                "arena_bytes_in_use": self._in_use,
                "arena_bytes_resident": self._touched,
                **{f"slots_{state.value}": states[state] for state in SlotState if state is not SlotState.FREE},
            }

    def close(self) -> None:
        """Give up the file. Memory that tensors still lie in stays until they die."""
        self._closing()
        self.fd = -1

    def _shift(self, source: memoryview | None) -> int:
        """The offset in a page at which to begin, so that a copy from ``source`` goes half a page beside it: a store
        that shares the low 12 bits of its address with loads soon to come stalls them, and such copies take four times
        as long.
        """
        if source is None or len(source) < buffers.LARGE_NBYTES:
            return 0
        wanted = buffers.address(source) + PAGE // 2 - self._address - ALIGNMENT
        return wanted % PAGE // ALIGNMENT * ALIGNMENT

    def _free_unless_held(self, slot: Slot) -> bool:
        if slot.owned or slot.receivers:
            return False
        if slot.given:
            try:
                pages.remap(self._address, slot.start, slot.size, self.fd, private=False)
            except OSError:
                return False  # other processes could not see what is written there: it is not used again
        slot.take(SlotEvent.DROPPED)
        self._extents.free(slot.start, slot.size)
        del self._slots[slot.start]
        self._regions.pop(slot.start, None)
        self._in_use -= slot.size
        HEADER.pack_into(self._map, slot.start, 0, 0)
        return True

    def _reap(self) -> None:
        """Drop what authors have let go of, and what was read. The caller holds the lock."""
        while self._orphans:
            slot = self._orphans.popleft()
            slot.owned = False
            self._free_unless_held(slot)
        while self._unread:
            number, slot = self._unread.popleft()
            del self._reading[number]
            self._released(slot)

    def _released(self, slot: Slot) -> bool:
        """One receiver less. True when the slot is free now. The caller holds the lock."""
        slot.receivers -= 1
        if slot.receivers:
            return False
        slot.take(SlotEvent.RELEASED)
        return self._free_unless_held(slot)


def _create(nbytes: int) -> tuple[int, mmap.mmap]:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create("omni-arena", flags | pages.MFD_NOEXEC_SEAL)
    except OSError:  # before Linux 6.3
        fd = os.memfd_create("omni-arena", flags)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return fd, mmap.mmap(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
