"""Environment variables that an author may not set, in one list.

Here: the reserved names, and the faults of a spec that sets one: in ``env``, in ``envDefaults``, or in the ``env`` of
a generated container through ``podTemplate``. Not here: the values (the operator's pod builder and `omni up` write
them). Called by `deployment` and `celrules`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from omnipipeline_spec.pipeline import PipelineConfig
from omnipipeline_spec.types.errors import Fault
from omnipipeline_spec.types.pods import COORDINATOR

PREFIX: Final = "OMNI_"
#: The settings of the runtime that an author may choose; every other variable with the prefix is the operator's.
TUNABLE: Final = frozenset(
    {
        "OMNI_ARENA_MB",
        "OMNI_DEBUG_VALUES",
        "OMNI_HTTP_ANSWERS_MB",
        "OMNI_HTTP_BODIES_MB",
        "OMNI_HTTP_HOSTS",
        "OMNI_HTTP_QUIET_S",
        "OMNI_LOG_FORMAT",
        "OMNI_LOG_LEVEL",
    }
)
#: Set by the device plugin or by the process itself: with another value a pod would use GPUs that are not its own.
DEVICES: Final = frozenset({"CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"})
RANKS: Final = frozenset({"LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"})
TRACING: Final = frozenset({"OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"})
JOINED: Final = "PYTHONPATH"  # the operator puts its own folder before the author's
CONTAINERS: Final = ("stage", COORDINATOR)  # names of the generated containers


def faults(spec: PipelineConfig) -> Iterator[Fault]:
    """A fault for every reserved variable that the spec sets."""
    for index, variable in enumerate(spec.env):
        yield from _taken(variable.name, f"env[{index}].name", spec)
        if variable.name == JOINED and variable.value_from is not None and spec.code and spec.code.config_map_ref:
            message = f"{JOINED!r} is joined with the folder of code.configMapRef, so it must be a plain value"
            yield Fault(path=f"env[{index}].valueFrom", message=message, names=(JOINED,))
    for name in sorted(spec.env_defaults):
        yield from _no_default(name, f"envDefaults.{name}", spec)
    templates = [(f"processGroups[{at}]", group.pod_template) for at, group in enumerate(spec.process_groups)]
    for path, template in [*templates, ("coordinator", spec.coordinator.pod_template)]:
        yield from _in_template(template, f"{path}.podTemplate", spec)


def taken(name: str, spec: PipelineConfig) -> str | None:
    """Why an author may not set the variable; None when it is free."""
    if name.startswith(PREFIX) and name not in TUNABLE:
        return "is set by the operator itself"
    if name in DEVICES:
        return "is derived from the stages' gpu"
    if name in RANKS and any(stage.tp_size > 1 for stage in spec.stages):
        return "is set for each rank of a stage with tpSize > 1"
    if name == "HF_HOME" and spec.model_cache.type in ("EmptyDir", "PersistentVolumeClaim"):
        return "is set by modelCache"
    if name == "HF_HUB_CACHE" and spec.model_cache.type == "Node":
        return "is set by modelCache"
    tracing = spec.observability.tracing
    if name in TRACING and tracing is not None and tracing.endpoint:
        return "is set by observability.tracing"
    return None


def _taken(name: str, path: str, spec: PipelineConfig) -> Iterator[Fault]:
    why = taken(name, spec)
    if why is not None:
        yield Fault(path=path, message=f"{name!r} {why}", names=(name,))


def _no_default(name: str, path: str, spec: PipelineConfig) -> Iterator[Fault]:
    """``envDefaults`` is applied in the running process: too late for variables of the interpreter and the runtime."""
    if name == JOINED or name in TUNABLE:
        yield Fault(path=path, message=f"{name!r} is read before envDefaults is applied: set it in env", names=(name,))
    else:
        yield from _taken(name, path, spec)


def _in_template(template: Any, path: str, spec: PipelineConfig) -> Iterator[Fault]:
    pod = template.get("spec") if isinstance(template, Mapping) else None
    containers = pod.get("containers") if isinstance(pod, Mapping) else None
    for index, container in enumerate(containers if isinstance(containers, list | tuple) else ()):
        if not isinstance(container, Mapping) or container.get("name") not in CONTAINERS or "env" not in container:
            continue
        where = f"{path}.spec.containers[{index}].env"
        given = container["env"]
        if not isinstance(given, list | tuple) or not all(isinstance(one, Mapping) and "name" in one for one in given):
            message = "must be a list of variables with names: anything else would replace the operator's own"
            yield Fault(path=where, message=message)
            continue
        for at, variable in enumerate(given):
            name = str(variable["name"])
            if name == JOINED:
                message = f"{name!r} can only be set in env, where it is joined with the operator's own value"
                yield Fault(path=f"{where}[{at}].name", message=message, names=(name,))
            else:
                yield from _taken(name, f"{where}[{at}].name", spec)
