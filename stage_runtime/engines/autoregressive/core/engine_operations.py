"""Operations of the engine for operators of the pipeline (`omni call`). Each runs between two steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final, NamedTuple

from stage_runtime.engines.autoregressive.core.engine_core import EngineCore
from stage_runtime.engines.autoregressive.lora.registry import Adapters
from stage_runtime.engines.events import Admin
from stage_runtime.errors import InvalidRequest
from stage_runtime.rules.members.adapters import LIST, LOAD, UNLOAD


def reset_prefix_cache(core: EngineCore) -> int:
    """Forget the prompts of all requests, so that none is found again. Returns: how many cached blocks there were."""
    cached = core.scheduler.pool.cached
    core.scheduler.pool.forget_all()
    return cached


def load_adapter(core: EngineCore, name: object, path: object) -> list[str] | Future[list[str]]:
    """Steps go on while its files are read, if the core has a loop that takes calls between them.

    Returns: the names of all adapters, or these to come. Raises: InvalidRequest: it cannot be loaded.
    """
    adapters = _adapters_of(core, LOAD)
    adapters.drop_unused(core.adapters_in_use())
    return adapters.load(name, path) if core.post is None else adapters.begin(name, path, core.post)


def unload_adapter(core: EngineCore, name: object) -> list[str]:
    """Returns: the names of the others. Requests under way keep it to their ends. Raises: InvalidRequest."""
    return _adapters_of(core, UNLOAD).unload(name, core.adapters_in_use())


def list_adapters(core: EngineCore) -> dict[str, str]:
    """Returns: the folders of all adapters, by name."""
    return _adapters_of(core, LIST).paths


def _adapters_of(core: EngineCore, operation: str) -> Adapters:
    if core.adapters is None:
        raise InvalidRequest(f"{operation}: this stage takes no adapters: set max_loras or lora_modules")
    return core.adapters


class Operation(NamedTuple):
    """arguments: the names of all that it takes, in order."""

    function: Callable[..., Any]
    arguments: Sequence[str] = ()


TABLE: Final[Mapping[str, Operation]] = {
    "reset_prefix_cache": Operation(reset_prefix_cache),
    LOAD: Operation(load_adapter, ("name", "path")),
    UNLOAD: Operation(unload_adapter, ("name",)),
    LIST: Operation(list_adapters),
}
#: The functions that are utilities of an engine process.
OPERATIONS: Final[Mapping[str, Callable[..., Any]]] = {name: one.function for name, one in TABLE.items()}


def checked(event: Admin) -> tuple[Any, ...]:
    """The operation's arguments, in order. Raises: InvalidRequest: it is not one of these, or takes other arguments."""
    if event.operation not in TABLE:
        raise InvalidRequest(f"no operation {event.operation!r}: there is {', '.join(TABLE)}")
    wanted = TABLE[event.operation].arguments
    if set(event.arguments) != set(wanted):
        takes = f"takes {' and '.join(wanted)}" if wanted else "takes no arguments"
        raise InvalidRequest(f"{event.operation} {takes}")
    return tuple(event.arguments[name] for name in wanted)


def carry_out(event: Admin, core: EngineCore) -> None:
    """Runs an operation and replies with its result or error. The engine's thread calls it."""
    try:
        arguments = checked(event)
        result = TABLE[event.operation].function(core, *arguments)
    except Exception as error:
        event.reply(error)
        return
    if isinstance(result, Future):
        result.add_done_callback(lambda done: event.reply(done.exception() or done.result()))
    else:
        event.reply(result)


def joined(results: Sequence[Any]) -> Any:
    """The answers of several engines as one: numbers added up, of lists and maps what all have."""
    if all(isinstance(one, dict) for one in results):
        return dict(sorted(set[tuple[str, Any]].intersection(*(set(one.items()) for one in results))))
    if all(isinstance(one, list) for one in results):
        return sorted(set[str].intersection(*(set(one) for one in results)))
    return sum(results)
