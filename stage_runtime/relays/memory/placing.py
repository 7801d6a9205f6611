"""The place of a pack that is sent from the arena: in a slot of its own, or in that of its author's tensor.

Used by the relays whose receivers are given, or are to read, what lies in the sender's arena.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from stage_runtime.payloads.pack import ALIGNMENT, Pack
from stage_runtime.relays.memory.arena import Arena
from stage_runtime.relays.memory.filling import Filling
from stage_runtime.relays.memory.slots import Slot


class Placed(NamedTuple):
    """A slot that has one receiver more."""

    slot: Slot
    offset: int  #: The offset in the arena at which the pack begins.
    copied_nbytes: int  #: Bytes that were copied for this receiver.
    filling: Filling | None = None  #: It is filled later.

    @property
    def is_filled(self) -> bool:
        return self.filling is None or self.filling.is_over


class Placing:
    """Places packs in ``arena``. Any thread may call this."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.copied_bytes = 0

    def place(self, pack: Pack, shared: Placed | None = None) -> Placed | None:
        """None when it finds no room. shared: where the same pack lies for another receiver."""
        if shared is not None and self._arena.share(shared[0]):
            return shared._replace(copied_nbytes=0)
        return self._in_place(pack) or self._copied(pack)

    def place_early(self, pack: Pack, shared: Placed | None, freed: Callable[[], None]) -> Placed | None:
        """The same as `place`, but a copy is left to `Filling.fill`. freed: called when the slot became free then."""
        if shared is not None and self._arena.share(shared[0]):
            return shared._replace(copied_nbytes=0)
        return self._in_place(pack) or self._reserved(pack, freed)

    def has_room(self, packs: Iterable[Pack]) -> bool:
        """Whether `place` would find room for all of these now."""
        copied = [pack for pack in packs if self._found(pack) is None]
        return self._arena.has_room((pack.nbytes, pack.parts[0] if pack.parts else None) for pack in copied)

    def _copied(self, pack: Pack) -> Placed | None:
        slot = self._allocated(pack)
        if slot is None:
            return None
        for part, offset in zip(pack.parts, pack.offsets, strict=True):
            self._arena.write(slot, offset, part)
        self.copied_bytes += pack.nbytes
        self._arena.send_copy(slot)
        return Placed(slot, slot.offset, pack.nbytes)

    def _reserved(self, pack: Pack, freed: Callable[[], None]) -> Placed | None:
        slot = self._allocated(pack)
        if slot is None:
            return None
        self.copied_bytes += pack.nbytes
        self._arena.sent(slot)
        return Placed(slot, slot.offset, pack.nbytes, Filling(self._arena, slot, pack, freed))

    def _allocated(self, pack: Pack) -> Slot | None:
        return self._arena.allocate(pack.nbytes, source=pack.parts[0] if pack.parts else None)

    def _in_place(self, pack: Pack) -> Placed | None:
        """The slot of a pack whose largest part is an author's tensor in our arena; the rest is copied behind it."""
        found = self._found(pack)
        if found is None:
            return None
        slot, start = found
        rest = pack.parts[1:]
        if rest and not self._arena.claim_tail(slot):
            return None
        copied = 0
        for part, offset in zip(rest, pack.offsets[1:], strict=True):
            self._arena.write(slot, start + offset, part)
            copied += len(part)
        if not self._arena.sent_in_place(slot):
            return None
        self.copied_bytes += copied
        if len(pack.private) < len(pack.parts):  # its author may write into it again
            self._arena.lend(slot)
        return Placed(slot, slot.offset + start, copied)

    def _found(self, pack: Pack) -> tuple[Slot, int] | None:
        """The slot of an author's tensor in which the pack can lie, and where in its data it would begin."""
        found = self._arena.find(pack.parts[0]) if pack.parts else None
        if found is None:
            return None
        slot, start = found
        if start % ALIGNMENT or pack.offsets[0] or start + pack.nbytes > slot.start + slot.size - slot.offset:
            return None
        if len(pack.parts) > 1 and (slot.tail_used or start + pack.offsets[1] < slot.nbytes):
            return None
        return found
