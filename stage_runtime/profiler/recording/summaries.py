"""Metadata as JSON takes them: any value of an author becomes a small plain one. Pure.

`summarised` is for the thread that records: it leaves plain metadata as they are. `plain` and `brief` are for the
writer, of metadata that turned out to be no JSON, or too long.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any, Final

from stage_runtime.profiler import events

MAX_TEXT: Final = 2_000  # characters of one string in the metadata
MAX_ITEMS: Final = 100  # of one list or mapping in the metadata
MAX_DEPTH: Final = 3  # of lists and mappings in each other
SHORT: Final = 200  # characters of a string that too long metadata keep
_INTEGERS: Final = range(-1 << 63, 1 << 64)  # that JSON's encoder takes

_SCALARS: Final = frozenset((int, float, bool, type(None)))


def summarised(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """``metadata`` as JSON takes it; on the caller's thread, so that no tensor is held by the queue."""
    for value in metadata.values():
        kind = type(value)
        if kind not in _SCALARS and not (kind is str and len(value) <= MAX_TEXT):
            return plain(metadata)
    return metadata


def plain(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Each value small and plain. Reads no tensor's contents."""
    return {_key(key): _summary(value, 0) for key, value in islice(metadata.items(), MAX_ITEMS)}


def brief(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The part of too long metadata that pairs an event with others."""
    kept = {key: _summary(metadata[key], MAX_DEPTH) for key in events.DISTINCT_BY if key in metadata}
    short = {
        key: value
        for key, value in kept.items()
        if type(value) in _SCALARS or (isinstance(value, str) and len(value) <= SHORT)
    }
    return {**short, "omitted": f"{len(metadata) - len(short)} too long"}


def text(value: str) -> str:
    """A plain string that UTF-8 takes, which half a surrogate pair is not."""
    return str.__getitem__(value, slice(MAX_TEXT)).encode("utf-8", "replace").decode()


def _summary(value: Any, depth: int) -> Any:
    """Scalars stay scalars. The conversions that their subclasses define are not called."""
    try:
        match value:
            case None | bool():
                return value
            case int():
                number = int.__int__(value)
                return number if number in _INTEGERS else text(repr(number))
            case float():
                return float.__float__(value)
            case str():
                return text(value)
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            return _of_array(value, depth)
        if isinstance(value, bytes | bytearray | memoryview):
            return f"<{len(value)} bytes>"
        if isinstance(value, Mapping | list | tuple | set | frozenset):
            return _of_items(value, depth)
        return text(repr(value))
    except Exception as error:  # an author's object that cannot even be described
        return f"<{type(value).__name__}: {type(error).__name__}>"


def _of_array(value: Any, depth: int) -> Any:
    shape = [int(size) for size in value.shape]
    device = text(str(getattr(value, "device", "cpu")))
    if not shape and device == "cpu" and depth < MAX_DEPTH:
        item = value.item()
        return text(repr(item)) if type(item) is type(value) else _summary(item, depth + 1)
    return {
        "__tensor_summary__": True,
        "type": f"{type(value).__module__.partition('.')[0]}.{type(value).__qualname__}",
        "shape": shape,
        "dtype": text(str(value.dtype)),
        "device": device,
    }


def _of_items(value: Any, depth: int) -> Any:
    if depth >= MAX_DEPTH:
        return f"<{type(value).__name__} of {len(value)}>"
    if isinstance(value, Mapping):
        return {_key(key): _summary(item, depth + 1) for key, item in islice(value.items(), MAX_ITEMS)}
    return [_summary(item, depth + 1) for item in islice(value, MAX_ITEMS)]


def _key(key: Any) -> str:
    if isinstance(key, str):
        return text(key)
    try:
        return text(str(key))
    except Exception as error:
        return f"<{type(key).__name__}: {type(error).__name__}>"
