"""Makes an engine of a dotted name: imports, calls the factory with what it accepts, wraps what it returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Set
from typing import Any, Final

from omnipipeline_spec.types.plan import StagePlan
from stage_runtime import imports
from stage_runtime.api import Autoregressive, Batched, Encoder, Simple, StageContext, Streaming
from stage_runtime.engines.base import Engine
from stage_runtime.engines.batched import BatchedEngine
from stage_runtime.engines.custom import CustomEngine
from stage_runtime.engines.gpus import gpudevice
from stage_runtime.engines.making import bars, setting_types
from stage_runtime.engines.making.resolving import resolve, takes
from stage_runtime.engines.simple import (
    AsyncEngine,
    SyncEngine,
    decorates_async,
    is_async,
    is_coroutine_function,
    is_generator,
)
from stage_runtime.engines.streaming import StreamingEngine
from stage_runtime.errors import ConfigurationError


def create(
    stage: StagePlan,
    context: StageContext,
    *,
    model_path: str | None = None,
    model_revision: str | None = None,
    gpu_id: int | None = None,
    on_cpu: bool = False,
) -> Engine:
    """Call the stage's factory and make an engine of what it returns.

    model_path, model_revision, gpu_id: None where the pipeline does not set them; then the factory's own default
    applies. on_cpu: this run has no GPUs, so ``gpu_id`` is None whatever the factory's default.
    Raises: ConfigurationError: the factory's arguments do not fit, or it returned nothing runnable. An exception of the
    factory itself passes through.
    """
    factory = resolve(stage.factory, field=f"stages.{stage.name}.factory")
    return call(
        factory,
        stage,
        context,
        model_path=model_path,
        model_revision=model_revision,
        gpu_id=gpu_id,
        on_cpu=on_cpu,
    )


def call(
    factory: Callable[..., Any],
    stage: StagePlan,
    context: StageContext,
    *,
    model_path: str | None = None,
    model_revision: str | None = None,
    gpu_id: int | None = None,
    on_cpu: bool = False,
) -> Engine:
    """The same as `create`, for a factory that was imported already."""
    offered = {
        "model_path": model_path,
        "model_revision": model_revision,
        "gpu_id": gpu_id,
        "tp_rank": context.tp_rank,
        "tp_size": context.tp_size,
        "context": context,
    }
    undecided = {name for name, value in offered.items() if value is None} - ({"gpu_id"} if on_cpu else set())
    gpudevice.use(gpu_id)
    arguments = _arguments(stage, factory, offered, undecided)
    blame = f"stages.{stage.name}.factory: {stage.factory}"
    with bars.reported(context.progress):
        return as_engine(factory(**arguments), sources=stage.stream_from, blame=blame, context=context)


def check_arguments(stage: StagePlan, factory: Callable[..., Any]) -> None:
    """Whether a factory could be called; it is not.

    Raises: ConfigurationError: its arguments do not fit.
    """
    offered = dict.fromkeys(("model_path", "model_revision", "gpu_id", "tp_rank", "tp_size", "context"))
    _arguments(stage, factory, offered, frozenset())


def as_engine(
    made: Any, *, sources: tuple[str, ...] = (), blame: str = "the factory", context: StageContext | None = None
) -> Engine:
    """Raises: ConfigurationError: ``made`` is nothing that contracts allow a factory to return."""
    if isinstance(made, Simple | Batched | Streaming | Autoregressive | Encoder):
        setting_types.check(made)
    match made:
        case Simple():
            return _simple(made, blame)
        case Batched():
            _at_least_one(blame, "Batched", "max_batch", made.max_batch)
            _takes_one(made.fn, "the list of payloads", blame)
            _refuse(
                is_async(made.fn), blame, "omni.Batched of an async function: the function of a batch is a plain one"
            )
            _refuse(is_generator(made.fn), blame, "omni.Batched of a generator: the function of a batch returns a list")
            return BatchedEngine(made.fn, made.max_batch, made.max_wait_s, made.gauges)
        case Streaming():
            _at_least_one(blame, "Streaming", "concurrency", made.concurrency)
            _takes_one(made.fn, "the session", blame)
            needed = "it needs an async generator, async def fn(session) with yield"
            _refuse(
                is_coroutine_function(made.fn), blame, f"omni.Streaming of an async function without yield: {needed}"
            )
            _refuse(is_generator(made.fn), blame, f"omni.Streaming of a sync generator: {needed}")
            return StreamingEngine(made.fn, made.concurrency, sources)
        case Autoregressive():
            return _autoregressive(made, context, sources)
        case Encoder():
            return _encoder(made, context)
    run = getattr(made, "run", None)
    if callable(run) and (not callable(made) or isinstance(made, type) or takes(run, 3) is None):
        return _custom(made, run, blame)
    if callable(made):
        return _simple(Simple(made), blame)
    raise ConfigurationError(
        f"{blame} returned {type(made).__name__}; expected a function, omni.Simple, Batched, Streaming, "
        f"Autoregressive, Encoder, or an object with run(inbox, outbox, stop){_likely(made)}"
    )


def _likely(made: Any) -> str:
    """The author's probable mistake."""
    if inspect.iscoroutine(made):
        made.close()  # or Python would warn that it is never awaited
        return ". A factory is a plain function; what it returns may be async"
    if made is None:
        return f". Is its return missing? {RETURNS_IT}"
    return f". {RETURNS_IT}"


RETURNS_IT: Final = (
    "A factory is called once, without a payload, and returns the function that is called for each request: "
    "if this is that function, name one that returns it"
)


def _at_least_one(blame: str, kind: str, name: str, value: int) -> None:
    if value < 1:
        raise ConfigurationError(f"{blame} returned omni.{kind}({name}={value}): at least 1")


def _takes_one(fn: Callable[..., Any], what: str, blame: str) -> None:
    """Refuse what would fail at every request."""
    problem = takes(fn, 1)
    if problem is not None:
        raise ConfigurationError(
            f"{blame} returned a function that cannot be called with {what} alone: {problem}"
        ) from problem


def _refuse(wrong: bool, blame: str, problem: str) -> None:
    if wrong:
        raise ConfigurationError(f"{blame} returned {problem}")


def _custom(made: Any, run: Callable[..., Any], blame: str) -> Engine:
    """The low-level engine, whose ``run`` is called once. Raises: ConfigurationError: it is something else."""
    kind = made.__name__ if isinstance(made, type) else type(made).__name__
    _refuse(isinstance(made, type), blame, f"the class {kind}; expected an object of it: {kind}(…)")
    problem = takes(run, 3)
    _refuse(
        problem is not None,
        blame,
        f"a {kind}, whose run cannot be called with inbox, outbox and stop: {problem}. If run is the function that is "
        "called for each request, return it: omni.Simple(made.run)",
    )
    plain = "the engine's run is a plain function, which returns when it is asked to stop"
    _refuse(is_async(run) or is_generator(run), blame, f"a {kind} with an async run or a generator: {plain}")
    return CustomEngine(made)


def _autoregressive(made: Autoregressive, context: StageContext | None, sources: tuple[str, ...]) -> Engine:
    """Load its model. Imports torch and transformers, which other stages do not need."""
    with imports.uncollected():
        from stage_runtime.engines.autoregressive.stage import factory

    return factory.make(made, context, sources)


def _encoder(made: Encoder, context: StageContext | None) -> Engine:
    from stage_runtime.engines import encoding

    device, progress = ("cpu", print) if context is None else (context.device, context.progress)
    model = encoding.load(made, device=device, progress=progress)
    return BatchedEngine(model.run, made.max_requests, 0.0)


def _simple(made: Simple, blame: str) -> Engine:
    _at_least_one(blame, "Simple", "concurrency", made.concurrency)
    _takes_one(made.fn, "the payload", blame)
    decorated = decorates_async(made.fn)
    if decorated or is_async(made.fn):
        return AsyncEngine(made.fn, made.concurrency, decorated=decorated)
    return SyncEngine(made.fn, made.concurrency)


def _arguments(
    stage: StagePlan, factory: Callable[..., Any], offered: Mapping[str, Any], undecided: Set[str]
) -> dict[str, Any]:
    """``factoryArgs``, and of what is offered the names that the signature accepts and that are not set; of those
    that the pipeline does not decide, the ones without a default."""
    arguments = dict(stage.factory_args)
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # a builtin: it takes what it is given
        return arguments
    accepts_all = any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())
    for name, value in offered.items():
        parameter = signature.parameters.get(name)
        if parameter is None or name in arguments or (name in undecided and parameter.default is not parameter.empty):
            continue
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
        hint = "" if stage.factory_args else f". {RETURNS_IT}"
        raise ConfigurationError(f"stages.{stage.name}.factoryArgs: {stage.factory}: {error}{hint}") from error
    return arguments
