"""The types of settings, checked when the stage is made: YAML's ``"no"`` is a text, and would count as true.

Here: fields of one number, truth or text, how many threads there may be, and how functions are called. Not here: which
other values are allowed, and fields of several values (`autoregressive.loading.loader`, `encoding`). Called by
`loading`.
"""

from __future__ import annotations

import functools
import math
import numbers
import os
import types
import typing
from typing import Any, Final

import msgspec

from stage_runtime.api import Batched, Simple, Streaming
from stage_runtime.engines.making.resolving import takes
from stage_runtime.engines.simple import is_async, is_generator
from stage_runtime.errors import ConfigurationError

#: The settings that are functions, each with the arguments that it gets and what it returns.
FUNCTIONS: Final = {
    "prompt": (("payload",), "omni.Prompt"),
    "deliver": (("payload", "generation"), "an iterable of omni.Chunk and omni.Result, or is a generator of them"),
    "stream": (("chunk",), "token ids, a tensor or None"),
    "gauges": ((), "numbers by name"),
}
MOST_THREADS: Final = 1024  # torch ends the process where the machine cannot start so many
_PLAIN: Final = frozenset({bool, int, float, str, type(None)})


def check(made: msgspec.Struct) -> None:
    """A number of numpy is a number, and a path is a text. Raises: ConfigurationError: a value has another type."""
    for name, kind in _plain_fields(type(made)).items():
        value = getattr(made, name)
        try:
            given = msgspec.convert(_as_plain(value), kind)
        except msgspec.ValidationError as error:
            raise _refused(made, name, value, str(error).replace("Expected", "expected").replace("`", "")) from None
        if isinstance(given, float) and math.isnan(given):
            raise _refused(made, name, value, "expected a number")
        if name == "max_wait_s" and not 0 <= given < math.inf:
            raise _refused(made, name, value, "expected a number of seconds, 0 or more")
        if name == "threads" and given is not None and not 1 <= given <= MOST_THREADS:
            raise _refused(made, name, value, f"None, or from 1 to {MOST_THREADS}")
    if isinstance(made, Simple | Batched | Streaming) and not callable(made.fn):
        raise _refused(made, "fn", made.fn, f"expected a function, got {type(made.fn).__name__}")
    for name in FUNCTIONS.keys() & set(made.__struct_fields__):
        if (value := getattr(made, name)) is not None and (problem := _misfit(name, value)):
            arguments, gives = FUNCTIONS[name]
            wanted = f"expected a plain function ({', '.join(arguments)}) that returns {gives}"
            raise _refused(made, name, value, f"{problem}; {wanted}")


def _misfit(name: str, function: Any) -> str:
    """Why no request could call it; empty where one can."""
    if not callable(function):
        return f"it is of type {type(function).__name__}"
    if is_async(function) or (name != "deliver" and is_generator(function)):
        return "it is async" if is_async(function) else "it is a generator"
    problem = takes(function, len(FUNCTIONS[name][0]))
    return "" if problem is None else f"it cannot be called: {problem}"


def _refused(made: msgspec.Struct, name: str, value: Any, why: str) -> ConfigurationError:
    shown = f"{value!r:.80}" if type(value) in _PLAIN else "…"  # the author's own type may fail to be printed
    return ConfigurationError(f"omni.{type(made).__name__}({name}={shown}): {why}")


def _as_plain(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    return os.fspath(value) if isinstance(value, os.PathLike) else value


@functools.cache
def _plain_fields(struct: type[msgspec.Struct]) -> dict[str, Any]:
    found = {}
    for name, kind in typing.get_type_hints(struct).items():
        members = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
        if _PLAIN.issuperset(members):
            found[name] = kind
    return found
