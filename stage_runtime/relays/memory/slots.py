"""The owners of an arena's parts: the allocator of extents and the life of a slot, as a table.

Pure: no memory is touched here (`arena` owns it), nothing is locked (`arena` does).
"""

from __future__ import annotations

import bisect
from enum import Enum
from typing import Final

import msgspec


class SlotState(Enum):
    FREE = "free"
    FILLING = "filling"  #: Bytes are being written; no other process knows of it.
    IN_FLIGHT = "in_flight"  #: Some receiver may read it.
    ACKED = "acked"  #: No receiver has it; its author may still hold the tensor that is in it.
    QUARANTINED = "quarantined"  #: Its request is gone, but a receiver may still read: not to be reused.

    __hash__ = object.__hash__  # an Enum's own is a Python function, which each look into the table would call


class SlotEvent(Enum):
    ALLOCATED = "allocated"
    SENT = "sent"  #: Put to one more receiver.
    RELEASED = "released"  #: The last receiver has released it, or is proven gone.
    ABORTED = "aborted"  #: The request is over while receivers have it.
    DROPPED = "dropped"  #: The sender has released it.

    __hash__ = object.__hash__


TRANSITIONS: Final[dict[SlotState, dict[SlotEvent, SlotState]]] = {
    SlotState.FREE: {SlotEvent.ALLOCATED: SlotState.FILLING},
    SlotState.FILLING: {SlotEvent.SENT: SlotState.IN_FLIGHT, SlotEvent.DROPPED: SlotState.FREE},
    SlotState.IN_FLIGHT: {
        SlotEvent.SENT: SlotState.IN_FLIGHT,
        SlotEvent.RELEASED: SlotState.ACKED,
        SlotEvent.ABORTED: SlotState.QUARANTINED,
    },
    SlotState.ACKED: {SlotEvent.SENT: SlotState.IN_FLIGHT, SlotEvent.DROPPED: SlotState.FREE},
    SlotState.QUARANTINED: {
        SlotEvent.SENT: SlotState.QUARANTINED,
        SlotEvent.RELEASED: SlotState.ACKED,
        SlotEvent.ABORTED: SlotState.QUARANTINED,
    },
}


class IllegalTransition(Exception):
    """An event that cannot happen in the slot's state: a fault of this program."""


class Slot(msgspec.Struct, eq=False):
    """One extent in use. A Struct, because one is made per transfer: its fields are set in C.

    start, size: the extent, header and slack included. offset, nbytes: the data inside. generation: unique per use.
    """

    start: int
    size: int
    offset: int
    nbytes: int
    generation: int
    state: SlotState = SlotState.FREE
    receivers: int = 0  #: Transfers that are not released.
    owned: bool = True  #: The sender still holds it: it is filling it, or an author's tensor is in it.
    given: bool = (
        False  #: Sent from where its author's tensor lies; what the author writes since stays in this process.
    )
    tail_used: bool = False  #: Something was appended behind an author's tensor.

    def take(self, event: SlotEvent) -> SlotState:
        """Take a transition.

        Raises: IllegalTransition: and nothing has changed.
        """
        after = TRANSITIONS[self.state].get(event)
        if after is None:
            raise IllegalTransition(f"slot at {self.start} is {self.state.value}: it cannot be {event.value}")
        self.state = after
        return after


class Extents:
    """A first-fit allocator that always takes the lowest address, so that the same pages stay in use and warm.

    Freed extents are merged with their neighbours at once.
    """

    def __init__(self, start: int, end: int, unit: int) -> None:
        """``start`` and ``end`` are multiples of ``unit``, and so is all that is given out."""
        self._unit = unit
        #: Starts of the free extents, ascending, and the end of each: never touching, never empty.
        self._starts = [start] if end > start else []
        self._ends = [end] if end > start else []

    def allocate(self, nbytes: int) -> tuple[int, int] | None:
        """``(start, size)`` of the lowest free extent that holds ``nbytes``; None when all free ones are smaller."""
        size = max(nbytes, 1)
        size += -size % self._unit
        for index, start in enumerate(self._starts):
            rest = self._ends[index] - start - size
            if rest > 0:
                self._starts[index] = start + size
                return start, size
            if rest == 0:
                del self._starts[index], self._ends[index]
                return start, size
        return None

    def free(self, start: int, size: int) -> None:
        """Take back what `allocate` gave.

        Raises: ValueError: part of it is free already; nothing has changed.
        """
        end = start + size
        index = bisect.bisect_right(self._starts, start)
        if (index and self._ends[index - 1] > start) or (index < len(self._starts) and self._starts[index] < end):
            raise ValueError(f"extent {start}..{end} is free already")
        joins_before = index > 0 and self._ends[index - 1] == start
        joins_after = index < len(self._starts) and self._starts[index] == end
        if joins_before and joins_after:
            self._ends[index - 1] = self._ends[index]
            del self._starts[index], self._ends[index]
        elif joins_before:
            self._ends[index - 1] = end
        elif joins_after:
            self._starts[index] = start
        else:
            self._starts.insert(index, start)
            self._ends.insert(index, end)

    def free_extents(self) -> list[tuple[int, int]]:
        """``(start, end)`` of all that is free, ascending."""
        return list(zip(self._starts, self._ends, strict=True))
