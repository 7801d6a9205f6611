"""The parameters of generation that routes hand to the stages: what each needs, and what is refused. Pure.

One rule for all routes that generate text. The parameters themselves, their bounds and what each needs, are fields of
`reading.generation_fields`.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, Final

import msgspec

from stage_runtime.errors import InvalidRequest
from stage_runtime.web.reading import generation_fields
from stage_runtime.web.reading.generation_fields import Handling

#: vLLM's older names of what ``structured_outputs`` holds.
GUIDED: Final = {f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")}


def check(body: msgspec.Struct, accepts: Set[str]) -> None:
    """accepts: the parameters that the pipeline's stages honour. Raises: InvalidRequest: names the parameter."""
    known = generation_fields.handlings(type(body))
    for name, handling in known.items():
        value = getattr(body, name)
        if value is not None and value not in handling.idle and not _reaches(handling, accepts):
            raise InvalidRequest(f"{name}: {handling.problem}", param=name)
    guided = [name for name in GUIDED if getattr(body, name, None) is not None]
    if guided and "structured_outputs" not in accepts:
        problem = known["structured_outputs"].problem
        raise InvalidRequest(f"{guided[0]}: {problem}", param=guided[0])
    if guided and (len(guided) > 1 or getattr(body, "structured_outputs", None)):
        other = guided[1] if len(guided) > 1 else "structured_outputs"
        raise InvalidRequest(f"{guided[0]}: only one form of an answer can be asked for, got {other}", param=guided[0])


def refuse(body: msgspec.Struct, refused: Mapping[str, tuple[tuple[Any, ...], str]]) -> None:
    """refused: name -> (default values, why any other is refused). Raises: InvalidRequest."""
    for name, (idle, reason) in refused.items():
        value = getattr(body, name)
        if value is not None and value not in idle:
            raise InvalidRequest(f"{name}: {reason}", param=name)


def handed_on(body: msgspec.Struct, accepts: Set[str]) -> dict[str, Any]:
    """`OmniRequest.params` of a body that `check` has taken."""
    known = generation_fields.handlings(type(body))
    names = [name for name, handling in known.items() if _reaches(handling, accepts)]
    found = {name: value for name in names if (value := getattr(body, name)) is not None}
    for name, form in GUIDED.items():
        if (value := getattr(body, name, None)) is not None:
            found["structured_outputs"] = {form: value}
    return found


def _reaches(handling: Handling, accepts: Set[str]) -> bool:
    return handling.needs is None or handling.needs in accepts
