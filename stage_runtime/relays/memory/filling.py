"""A slot that is filled while its transfer is under way already: the copy of a large pack overlaps the way to its
receiver. Used by the relays that send pieces of a slot (`base.Relay.put_early`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from stage_runtime.payloads.pack import Pack
from stage_runtime.relays.memory.arena import Arena
from stage_runtime.relays.memory.slots import Slot

STEP_NBYTES: Final = 1 << 20  # so often ``nbytes`` grows: 50 to 100 µs of copying


class Filling:
    """One slot and what belongs into it. `fill` runs in the thread that has put it; others read ``nbytes``."""

    __slots__ = ("_arena", "_freed", "_pack", "_slot", "nbytes")

    def __init__(self, arena: Arena, slot: Slot, pack: Pack, freed: Callable[[], None]) -> None:
        """The slot is its sender's until `fill` or `give_up`: meanwhile it is not reused, whatever releases it.
        freed: called when it is free then.
        """
        self._arena = arena
        self._slot = slot
        self._pack: Pack | None = pack
        self._freed = freed
        self.nbytes = 0  #: So many bytes from the beginning of the pack are in the slot. Only grows.

    @property
    def is_over(self) -> bool:
        return self._pack is None

    def fill(self) -> None:
        """Copy the pack. A second call changes nothing."""
        pack = self._pack
        if pack is None:
            return
        try:
            for part, offset in zip(pack.parts, pack.offsets, strict=True):
                for start in range(0, len(part), STEP_NBYTES):
                    piece = part[start : start + STEP_NBYTES]
                    self._arena.write(self._slot, offset + start, piece)
                    self.nbytes = offset + start + len(piece)
            self.nbytes = pack.nbytes
        finally:
            self.give_up()

    def give_up(self) -> None:
        """Nothing more is copied."""
        if self._pack is None:
            return
        self._pack = None
        if self._arena.drop(self._slot):
            self._freed()
