"""Prefill and decode apart: which stages a spec with ``disaggregation`` really has, and the faults of that field.

Here: the expansion of one declared stage to its decode stage and its prefill stage, and which stage has which role.
Not here: processes and GPUs of the expanded stages (`placement`), the graph, which has no prefill stages (`graph`).
Called by `topology`, `placement`, `transports` and `planning`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Literal, TypeAlias

import msgspec

from omnipipeline_spec.pipeline import PipelineConfig, StageConfig
from omnipipeline_spec.types.errors import Fault
from omnipipeline_spec.types.quantities import MAX_NAME, MAX_STAGES

Role: TypeAlias = Literal["", "prefill", "decode"]

SUFFIX: Final = "-prefill"


class Part(msgspec.Struct, frozen=True):
    """The part that one stage has in a pair."""

    role: Role = ""
    peer: str = ""  #: The stage of the other role.


def prefill_name(stage: str) -> str:
    """The prefill stage of a decode stage."""
    return f"{stage}{SUFFIX}"


def parts(spec: PipelineConfig) -> Mapping[str, Part]:
    """Stage -> its part, of both stages of each pair."""
    found: dict[str, Part] = {}
    for stage in spec.stages:
        if stage.disaggregation is not None:
            found[stage.name] = Part("decode", prefill_name(stage.name))
            found[prefill_name(stage.name)] = Part("prefill", stage.name)
    return found


def pairs(spec: PipelineConfig) -> Mapping[str, tuple[str, ...]]:
    """Prefill stage -> its decode stage."""
    return {prefill_name(stage.name): (stage.name,) for stage in spec.stages if stage.disaggregation is not None}


def expanded(spec: PipelineConfig) -> PipelineConfig:
    """The spec with a stage for each role: decode stages in their declared places, prefill stages behind all others.

    A spec without disaggregation is returned as it is.
    """
    apart = [stage for stage in spec.stages if stage.disaggregation is not None]
    if not apart:
        return spec
    given = spec.runtime_overrides
    overrides = given | {prefill_name(one.name): given[one.name] for one in apart if one.name in given}
    stages = (*(_decode(stage) for stage in spec.stages), *(_prefill(stage) for stage in apart))
    return msgspec.structs.replace(spec, stages=stages, runtime_overrides=overrides)


def declared_path(spec: PipelineConfig, path: str) -> str:
    """The path in ``spec`` of a path in its expansion."""
    apart = [index for index, stage in enumerate(spec.stages) if stage.disaggregation is not None]
    for place, index in enumerate(apart):
        own = f"stages[{len(spec.stages) + place}]"
        if path == own or path.startswith(f"{own}."):
            return f"stages[{index}].disaggregation.prefill{path.removeprefix(own)}"
    return path


def faults(spec: PipelineConfig) -> Iterator[Fault]:
    """Faults of the field itself, of the declared spec."""
    names = {stage.name for stage in spec.stages}
    apart = [stage for stage in spec.stages if stage.disaggregation is not None]
    for index, stage in enumerate(spec.stages):
        if stage.disaggregation is None:
            continue
        path = f"stages[{index}]"
        yield from _name(stage, names, path)
        yield from _said_twice(stage, path)
        yield from _groups_of_their_own(spec, stage, path)
    if apart and len(spec.stages) + len(apart) > MAX_STAGES:
        message = f"are {len(spec.stages)}, and {len(apart)} more for prefill; at most {MAX_STAGES} are allowed"
        yield Fault(path="stages", message=message)
    yield from _fused(spec)
    yield from _no_replicas(spec)


def _decode(stage: StageConfig) -> StageConfig:
    if stage.disaggregation is None:
        return stage
    given = stage.disaggregation.decode
    stage = msgspec.structs.replace(stage, disaggregation=None)
    if given is None:
        return stage
    return msgspec.structs.replace(
        stage,
        process=given.process or stage.process,
        gpu=given.gpus or stage.gpu,
        tp_size=given.tp_size if given.tp_size > 1 else stage.tp_size,
    )


def _prefill(stage: StageConfig) -> StageConfig:
    assert stage.disaggregation is not None
    given = stage.disaggregation.prefill
    return StageConfig(
        name=prefill_name(stage.name),
        factory=stage.factory,
        process=given.process,
        factory_args={**stage.factory_args, **given.factory_args},
        gpu=given.gpus,
        tp_size=given.tp_size,
        gpu_memory=stage.gpu_memory if given.gpus else None,
        # A rank in the author's NCCL world is one process's.
        relay=stage.relay and msgspec.structs.replace(stage.relay, rank=None, world_size=None),
    )


def _name(stage: StageConfig, names: set[str], path: str) -> Iterator[Fault]:
    derived = prefill_name(stage.name)
    if derived in names:
        message = f"of {stage.name!r} adds the stage {derived!r}, and a stage of that name is declared"
        yield Fault(path=f"{path}.disaggregation", message=message, names=(stage.name, derived))
    if len(derived) > MAX_NAME:
        message = f"{stage.name!r} is too long for its prefill stage {derived!r}: at most {MAX_NAME} characters"
        yield Fault(path=f"{path}.name", message=message, names=(stage.name,))


def _said_twice(stage: StageConfig, path: str) -> Iterator[Fault]:
    """A value of the decode group that the stage itself states otherwise."""
    given = stage.disaggregation.decode if stage.disaggregation is not None else None
    if given is None:
        return
    stated = (
        ("process", stage.process, given.process),
        ("gpu", stage.gpus or None, given.gpus or None),
        ("tpSize", stage.tp_size if stage.tp_size > 1 else None, given.tp_size if given.tp_size > 1 else None),
    )
    for field, own, decode in stated:
        if own is not None and decode is not None and own != decode:
            message = f"of {stage.name!r} is set twice, with different values: here and in disaggregation.decode"
            yield Fault(path=f"{path}.{field}", message=message, names=(stage.name,))


def _groups_of_their_own(spec: PipelineConfig, stage: StageConfig, path: str) -> Iterator[Fault]:
    """Both roles scale apart, so the prefill group has no other stage."""
    assert stage.disaggregation is not None
    where = f"{path}.disaggregation.prefill.process"
    process = stage.disaggregation.prefill.process
    others = [
        one.name for one in expanded(spec).stages if one.group == process and one.name != prefill_name(stage.name)
    ]
    if others:
        message = (
            f"{process!r} is the process of {', '.join(map(repr, others))} too; prefill of {stage.name!r} needs a "
        )
        message += "process of its own, so that it scales apart"
        yield Fault(path=where, message=message, names=(stage.name, *others))


def _fused(spec: PipelineConfig) -> Iterator[Fault]:
    apart = {stage.name for stage in spec.stages if stage.disaggregation is not None}
    for index, fused in enumerate(spec.fused_stages):
        for name in fused:
            if name in apart:
                message = f"{name!r} has disaggregation and cannot be fused: its process scales apart"
                yield Fault(path=f"fusedStages[{index}]", message=message, names=(name,))


def _no_replicas(spec: PipelineConfig) -> Iterator[Fault]:
    prefill = {stage.group for stage in expanded(spec).stages[len(spec.stages) :]}
    for index, group in enumerate(spec.process_groups):
        if group.replicas == 0 and group.name not in prefill:
            message = f"of {group.name!r} must be at least 1: only a prefill group may have 0"
            yield Fault(path=f"processGroups[{index}].replicas", message=message, names=(group.name,))
