"""An operation of engines as commands ask a coordinator for it: `omni call` and `kubectl omni call`.

Here: the body of POST /operations, and its answer as lines. Not here: how the coordinator is reached. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple, NoReturn

from omnipipeline_spec.types.errors import printable

ROUTE: Final = "/operations"
ANSWER_S: Final = 30.0  # of the coordinator, after the last of the instances
MAX_TIMEOUT_S: Final = 3600.0


class Line(NamedTuple):
    """The answer of one process."""

    text: str
    failed: bool


def arguments(text: str) -> dict[str, Any]:
    """The arguments of an operation, as JSON. Raises: ValueError: it is not JSON object, or no request can carry it."""
    try:
        given = json.loads(text, parse_constant=_no_json)
        json.dumps(given, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError("a JSON object is expected, as in '{\"level\": 1}'")
    return given


def body(stage: str, operation: str, given: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
    """The body of the request. given: its arguments."""
    return {"operation": operation, "stages": [stage], "arguments": given, "timeout_seconds": timeout_s}


def lines(answer: Mapping[str, Any]) -> Iterator[Line]:
    """An answer, a line for each process. Raises: LookupError, TypeError: it is not a coordinator's."""
    for one in answer["results"]:
        failed = one["error"] is not None
        rank = f" rank {one['rank']}" if one["rank"] else ""
        shown = one["error"] if failed else json.dumps(one["value"], ensure_ascii=False)
        yield Line(printable(f"{one['group']} {one['instance']}{rank}: {shown}"), failed)


def _no_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number of JSON's")
