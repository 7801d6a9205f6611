"""A value for another stage of the same process: checked as one that travels, containers fresh, tensors shared."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import numpy as np

from stage_runtime.payloads import checking, tensors
from stage_runtime.wire import values


def isolate(value: Any, *, where: str = "payload.data", as_fields: bool = False) -> Any:
    """``value`` as another stage of this process may have it: checked as `extract` does, containers fresh.

    Tensors and arrays are fresh objects, as from afar, on the memory of the given ones: both are read-only by contract.
    A copy where they are not contiguous.
    Raises: ValueRefused: as `extract`.
    """
    return Isolation().run(value, where, as_fields=as_fields)


#: Bytes that an item of a list counts: those of a float in MessagePack. The items of small lists do not matter.
ITEM_NBYTES: Final = 9


class Isolation(checking.ValueWalk):
    """Gives fresh containers around leaves that share their memory."""

    rebuild = True
    plain = frozenset([type(None), bool, float])

    __slots__ = ("nbytes", "seen")

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0  #: Bytes, about as many as would travel to another process; tensors and arrays exactly.
        self.seen: dict[int, Any] = {}  #: An object that is there twice arrives as one, as from another process.

    def walk_list(self, value: list[Any]) -> list[Any]:
        self.nbytes += ITEM_NBYTES * len(value)
        return checking.ValueWalk.walk_list(self, value)

    def walk_str(self, value: str) -> str:
        self.nbytes += len(value)
        return checking.check_str(self, value)

    def walk_bytes(self, value: bytes) -> bytes:
        self.nbytes += len(value)
        return value

    def walk_struct(self, value: msgspec.Struct) -> Any:
        return type(value)(**self.struct_fields(value))

    def tensor(self, value: Any) -> Any:
        known = self.seen.get(id(value))
        return known if known is not None else self._fresh(value, tensors.plain_tensor(value))

    def array(self, value: np.ndarray[Any, Any]) -> Any:
        known = self.seen.get(id(value))
        return known if known is not None else self._fresh(value, tensors.read_only(value))

    def _fresh(self, value: Any, fresh: Any) -> Any:
        self.seen[id(value)] = fresh
        self.nbytes += fresh.nbytes
        return fresh

    def raw(self, value: values.RawTensor) -> Any:
        self.nbytes += memoryview(value.data).nbytes
        return value

    walkers = {
        dict: checking.ValueWalk.walk_dict,
        list: walk_list,
        int: checking.check_int,
        str: walk_str,
        bytes: walk_bytes,
    }
