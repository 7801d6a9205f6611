"""Makes the engine of a stage from its `omni.Autoregressive`: in the stage's own thread, or in engine processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from stage_runtime.api import Autoregressive, StageContext
from stage_runtime.engines.autoregressive.clients import making
from stage_runtime.engines.autoregressive.connectors import registry
from stage_runtime.engines.autoregressive.lora import settings as lora_settings
from stage_runtime.engines.autoregressive.process.launching import EngineLaunch
from stage_runtime.engines.autoregressive.stage.process_engine import MOST_ENGINES, EngineClient, ProcessEngine
from stage_runtime.engines.base import Engine
from stage_runtime.engines.gpus import gpumemory
from stage_runtime.errors import ConfigurationError

if TYPE_CHECKING:
    from stage_runtime.engines.autoregressive.loading.loader import Loaded
    from stage_runtime.engines.autoregressive.stage.thread_engine import AutoregressiveEngine

FACTORY: Final = "stage_runtime.engines.autoregressive.process.served:autoregressive"
#: Engines that share experts are on one machine, and torch takes a GPU that it sees for theirs.
MEET_HERE: Final = {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
#: Fields that an engine process does not need: the author's functions, and those that its client acts on.
_OF_THE_STAGE: Final = frozenset(
    {
        "prompt",
        "deliver",
        "stream",
        "params",
        "tool_calls",
        "reasoning",
        "control_strings",
        "hidden_rows",
        "own_process",
        "data_parallel_size",
        "cores",
        "frozen_after_s",
    }
)


def make(spec: Autoregressive, context: StageContext | None, sources: Sequence[str] = ()) -> Engine:
    """Load the model, here or in its processes. Raises: ConfigurationError: it cannot be loaded, or values do not fit.

    Blocks until all is loaded. sources: upstream stages that stream into this one.
    """
    from stage_runtime.engines.autoregressive.loading import decoders, loader

    name, role = ("", "") if context is None else (context.name, context.kv_role)
    loader.check(spec)
    registry.check(spec, role)
    device = "cpu" if context is None else context.device
    progress = (lambda text: None) if context is None else context.progress
    if not 1 <= spec.data_parallel_size <= MOST_ENGINES:
        raise ConfigurationError(
            f"omni.Autoregressive(data_parallel_size={spec.data_parallel_size}): from 1 to {MOST_ENGINES}"
        )
    if spec.engine != "own":
        return _external(spec, context)
    if context is not None and context.tp_size > 1:
        return _rank(spec, context, sources)
    if not spec.own_process and spec.data_parallel_size == 1 and not spec.enable_expert_parallel:
        loaded = loader.load(spec, device=device, progress=progress, digest=registry.crosses(spec, role))
        return _answering(spec, loaded, context, sources)
    if spec.enable_expert_parallel:
        _check_experts(spec, context, device)
    tokenizer = decoders.tokenizer_of(spec)
    progress(f"starting {spec.data_parallel_size} engine processes with {spec.model}")
    launch = launch_of(spec, device, name=name, kv_role=role)
    client = making.make_client(launch, engines=spec.data_parallel_size, lockstep=spec.enable_expert_parallel)
    engine = ProcessEngine(spec, client, tokenizer, context, sources)
    if context is not None and role:
        engine.pair(client, context.kv, role, context)
    return engine


def _check_experts(spec: Autoregressive, context: StageContext | None, device: str) -> None:
    """Raises: ConfigurationError: a setting does not go with ``enable_expert_parallel``."""
    name = "omni.Autoregressive(enable_expert_parallel=True)"
    if spec.data_parallel_size < 2:
        raise ConfigurationError(f"{name}: data_parallel_size must be 2 or more: its engines share the experts")
    if device != "cpu":
        raise ConfigurationError(
            f"{name}: this works on CPUs only: a stage's engines share one GPU. tpSize shares experts among GPUs"
        )
    pair = context is not None and bool(context.kv_role)
    refused = {"kv_folder": bool(spec.kv_folder), "disaggregation": pair}
    refused |= {"overlap=True": spec.overlap is True, "compile": spec.compile}
    for what, given in refused.items():
        if given:
            raise ConfigurationError(f"{name}: does not go with {what}")


def _answering(
    spec: Autoregressive, loaded: Loaded, context: StageContext | None, sources: Sequence[str]
) -> AutoregressiveEngine:
    """The engine in the stage's thread: of the only rank, or of rank 0."""
    from stage_runtime.engines.autoregressive.stage.thread_engine import AutoregressiveEngine

    engine = AutoregressiveEngine(spec, loaded.core, loaded.tokenizer, context, sources)
    engine.connect(spec, loaded, context)
    return engine


def _external(spec: Autoregressive, context: StageContext | None) -> Engine:
    """Another engine under the same stage."""
    from stage_runtime.engines.autoregressive.external import openvino, vllm

    if context is not None and context.tp_size > 1:
        raise ConfigurationError(f"omni.Autoregressive(engine={spec.engine!r}): tpSize is for engine='own'")
    if context is not None and context.device != "cpu":
        raise ConfigurationError(f"omni.Autoregressive(engine={spec.engine!r}): runs on CPUs, not on {context.device}")
    load: Callable[[Autoregressive, StageContext | None], tuple[EngineClient, Any]]
    load = {"openvino": openvino.load, "vllm": vllm.load}[spec.engine]
    client, tokenizer = load(spec, context)
    return ProcessEngine(spec, client, tokenizer, context)


def _rank(spec: Autoregressive, context: StageContext, sources: Sequence[str]) -> Engine:
    """One rank of a TP stage (``tpSize``); the other ranks are processes of the same instance."""
    from stage_runtime.engines.autoregressive.loading import loader
    from stage_runtime.engines.autoregressive.stage.following import FollowingEngine
    from stage_runtime.engines.autoregressive.tensor_parallel.ranks import Ranks

    if spec.own_process or spec.data_parallel_size > 1:
        raise ConfigurationError("omni.Autoregressive: tpSize goes with neither own_process nor data_parallel_size")
    ranks = Ranks(context.tp_rank, context.tp_size)
    crosses = registry.crosses(spec, context.kv_role)
    loaded = loader.load(spec, device=context.device, progress=context.progress, ranks=ranks, digest=crosses)
    if context.tp_rank > 0:
        return FollowingEngine(loaded.runner, ranks, takes_chunks=spec.stream is not None)
    return _answering(spec, loaded, context, sources)


def launch_of(spec: Autoregressive, device: str, *, name: str = "", kv_role: str = "") -> EngineLaunch:
    """How the engine processes of ``spec`` are started. name, kv_role: the stage's."""
    fields = {name: getattr(spec, name) for name in spec.__struct_fields__ if name not in _OF_THE_STAGE}
    cores = tuple(tuple(one) for one in spec.cores)
    if not cores and device == "cpu" and spec.data_parallel_size > 1:
        cores = divided(sorted(os.sched_getaffinity(0)), spec.data_parallel_size)
    if cores and spec.threads is None:
        fields["threads"] = len(cores[0])
    fields["device"] = device
    if kv_role:
        fields["kv_role"] = kv_role
    if (adapters := lora_settings.checked(spec)) is not None:
        fields["max_loras"] = adapters.most  # also of an engine that starts with fewer, or more, than are listed now
    if device != "cpu":  # engines that would each take what they find free would take it twice
        fields["gpu_share"] = (gpumemory.share_of_stage() or 1.0) / spec.data_parallel_size
    env = MEET_HERE if spec.enable_expert_parallel else {}
    return EngineLaunch(
        factory=FACTORY, name=name, kwargs=fields, env=env, cores=cores, frozen_after_s=spec.frozen_after_s
    )


def divided(processors: Sequence[int], engines: int) -> tuple[tuple[int, ...], ...]:
    """Processors for each engine, as many for each: with more threads than processors, engines are many times slower.

    Fewer processors than engines: they share.
    """
    each = len(processors) // engines
    if each == 0:
        return tuple((processors[rank % len(processors)],) for rank in range(engines))
    return tuple(tuple(processors[rank * each : (rank + 1) * each]) for rank in range(engines))
