"""A value for another stage of the same process: checked as one that travels, containers fresh, tensors shared."""

from __future__ import annotations

from typing import Any

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


class Isolation(checking.Walk):
    """Gives fresh containers around leaves that share their memory."""

    rebuild = True
    plain = frozenset([type(None), bool, float, bytes])
    walkers = {
        dict: checking.Walk.walk_dict,
        list: checking.Walk.walk_list,
        int: checking.check_int,
        str: checking.check_str,
    }

    __slots__ = ("seen",)

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, Any] = {}  #: An object that is there twice arrives as one, as from another process.

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
        return fresh

    def raw(self, value: values.RawTensor) -> Any:
        return value
