"""From a dotted name to an engine: import, call the factory with what it accepts, wrap what it returns."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from omnipipeline_spec.plan import StagePlan
from stage_runtime.api import Batched, Simple, StageContext, Streaming
from stage_runtime.engines.base import Engine
from stage_runtime.engines.batched import BatchedEngine
from stage_runtime.engines.custom import CustomEngine
from stage_runtime.engines.simple import AsyncEngine, SyncEngine, is_async
from stage_runtime.engines.streaming import StreamingEngine
from stage_runtime.errors import ConfigurationError


def resolve(name: str, *, field: str) -> Callable[..., Any]:
    """The function that ``pkg.mod:fn`` or ``pkg.mod.fn`` names.

    field: what to blame (``stages.thinker.factory``).
    Raises: ConfigurationError: no such module or attribute, or nothing callable. An error inside the module itself
        passes through, with its own traceback.
    """
    module_name, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    if not module_name or module_name.startswith(".") or not attribute:
        raise ConfigurationError(f"{field}: {name!r} is no pkg.mod:function")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ConfigurationError(f"{field}: no module named {error.name!r} (in {name!r})") from error
        raise
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigurationError(f"{field}: {module_name!r} has no {attribute!r}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigurationError(f"{field}: {name!r} is a {type(found).__name__}, no function")
    return found  # type: ignore[no-any-return]


def create(
    stage: StagePlan,
    context: StageContext,
    *,
    model_path: str | None = None,
    model_revision: str | None = None,
    gpu_id: int | None = None,
) -> Engine:
    """Call the stage's factory and make an engine of what it returns.

    Raises: ConfigurationError: the factory's arguments do not fit, or it returned nothing runnable. What the
        factory itself raises passes through.
    """
    factory = resolve(stage.factory, field=f"stages.{stage.name}.factory")
    return call(factory, stage, context, model_path=model_path, model_revision=model_revision, gpu_id=gpu_id)


def call(
    factory: Callable[..., Any],
    stage: StagePlan,
    context: StageContext,
    *,
    model_path: str | None = None,
    model_revision: str | None = None,
    gpu_id: int | None = None,
) -> Engine:
    """As `create`, of a factory that is at hand."""
    offered = {
        "model_path": model_path,
        "model_revision": model_revision,
        "gpu_id": gpu_id,
        "tp_rank": context.tp_rank,
        "tp_size": context.tp_size,
        "context": context,
    }
    made = factory(**_arguments(stage, factory, offered))
    return as_engine(made, sources=stage.stream_from, blame=f"stages.{stage.name}.factory: {stage.factory}")


def as_engine(made: Any, *, sources: tuple[str, ...] = (), blame: str = "the factory") -> Engine:
    """Raises: ConfigurationError: ``made`` is nothing that contracts allow a factory to return."""
    match made:
        case Simple():
            return _simple(made, blame)
        case Batched():
            _at_least_one(blame, "Batched", "max_batch", made.max_batch)
            return BatchedEngine(made.fn, made.max_batch, made.max_wait_s)
        case Streaming():
            _at_least_one(blame, "Streaming", "concurrency", made.concurrency)
            return StreamingEngine(made.fn, made.concurrency, sources)
    if callable(getattr(made, "run", None)):
        return CustomEngine(made)
    if callable(made):
        return _simple(Simple(made), blame)
    raise ConfigurationError(
        f"{blame} returned {type(made).__name__}; wanted a function, omni.Simple, Batched, Streaming, "
        "or an object with run(inbox, outbox, stop)"
    )


def _at_least_one(blame: str, kind: str, name: str, value: int) -> None:
    if value < 1:
        raise ConfigurationError(f"{blame} returned omni.{kind}({name}={value}): at least 1")


def _simple(made: Simple, blame: str) -> Engine:
    _at_least_one(blame, "Simple", "concurrency", made.concurrency)
    return AsyncEngine(made.fn, made.concurrency) if is_async(made.fn) else SyncEngine(made.fn, made.concurrency)


def _arguments(stage: StagePlan, factory: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """``factoryArgs``, and of what is offered the names that the signature accepts and that are not set."""
    arguments = dict(stage.factory_args)
    try:
        signature = inspect.signature(factory)
    except ValueError:  # a builtin: it takes what it is given
        return arguments
    accepts_all = any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())
    for name, value in offered.items():
        if name in signature.parameters and name not in arguments:
            arguments[name] = value
    unknown = sorted(set(stage.factory_args) - set(signature.parameters)) if not accepts_all else []
    if unknown:
        raise ConfigurationError(
            f"stages.{stage.name}.factoryArgs: {stage.factory} takes no {', '.join(unknown)}; "
            f"it takes {', '.join(signature.parameters) or 'nothing'}"
        )
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ConfigurationError(f"stages.{stage.name}.factoryArgs: {stage.factory}: {error}") from error
    return arguments
