"""The items of a session, in order, within a bound. Pure."""

from __future__ import annotations

from typing import Final

from stage_runtime.web.realtime.items import Item
from stage_runtime.web.realtime.speech.input_buffer import RealtimeRefused

MAX_ITEMS: Final = 1024
MAX_NBYTES: Final = 16 << 20  # five minutes of sound that nobody wrote down


class Conversation:
    """The items of a conversation. `added` and `trimmed` keep it within its bound."""

    def __init__(self, *, max_items: int = MAX_ITEMS, max_nbytes: int = MAX_NBYTES) -> None:
        self._max_items = max_items
        self._max_nbytes = max_nbytes
        self.items: list[Item] = []

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)

    def find(self, item_id: object, param: str = "item_id") -> Item:
        """Raises: RealtimeRefused: no item has this id."""
        found = next((item for item in self.items if item.id == item_id), None)
        if found is None:
            problem = f"{param}: no item {str(item_id)[:64]!r} is in the conversation"
            raise RealtimeRefused("item_not_found", problem, param=param)
        return found

    def has(self, item_id: str) -> bool:
        return any(item.id == item_id for item in self.items)

    def add(self, item: Item, after: str | None = None) -> str | None:
        """Put it behind the item ``after`` (None: the last; ``root``: none), and give that item's id.

        Raises: RealtimeRefused: its id is taken, or no item has the id ``after``.
        """
        if self.has(item.id):
            raise RealtimeRefused("item_already_exists", f"item.id: {item.id!r} is taken", param="item.id")
        place = len(self.items) if after is None else 0
        if after not in (None, "root"):
            place = self.items.index(self.find(after, "previous_item_id")) + 1
        self.items.insert(place, item)
        return self.items[place - 1].id if place else None

    def remove(self, item_id: object) -> Item:
        """Raises: RealtimeRefused: no item has this id."""
        item = self.find(item_id)
        self.items.remove(item)
        return item

    def trim(self) -> list[Item]:
        """Take out the oldest items beyond the bound; the last one stays whatever it is."""
        removed: list[Item] = []
        nbytes = self.nbytes
        while len(self.items) > 1 and (len(self.items) > self._max_items or nbytes > self._max_nbytes):
            oldest = self.items.pop(0)
            nbytes -= oldest.nbytes
            removed.append(oldest)
        return removed
