"""Operations of the engine for operators of the pipeline (`omni call`). Each runs between two steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from stage_runtime.engines.autoregressive.core.engine_core import EngineCore
from stage_runtime.engines.events import Admin
from stage_runtime.errors import InvalidRequest


def reset_prefix_cache(core: EngineCore) -> int:
    """Forget the prompts of all requests, so that none is found again. Returns: how many cached blocks there were."""
    cached = core.scheduler.pool.cached
    core.scheduler.pool.forget_all()
    return cached


OPERATIONS: Final[Mapping[str, Callable[[EngineCore], int]]] = {"reset_prefix_cache": reset_prefix_cache}


def checked(event: Admin) -> str:
    """The operation's name. Raises: InvalidRequest: it is none of these, or was given arguments."""
    if event.operation not in OPERATIONS:
        raise InvalidRequest(f"no operation {event.operation!r}: there is {', '.join(OPERATIONS)}")
    if event.arguments:
        raise InvalidRequest(f"{event.operation} takes no arguments")
    return event.operation


def carry_out(event: Admin, core: EngineCore) -> None:
    """On the engine's thread."""
    try:
        event.reply(OPERATIONS[checked(event)](core))
    except Exception as error:
        event.reply(error)
