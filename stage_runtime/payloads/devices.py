"""Tensors between a GPU and the host: where a payload's tensors lie when a stage gets them.

All relays but cuda_ipc move host memory, so a tensor of a GPU is copied to the host at its sender and to the receiver's
GPU at its receiver, each way through pinned memory, from which the GPU copies by itself. A tensor that is on the right
device already stays where it is by cuda_ipc, and between stages of one process. Not tried on a GPU so far (the tests
with the mark ``gpu``).
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import msgspec

from omnipipeline_spec.types.plan import StagePlan
from stage_runtime.payloads import tensors


def of_stage(plan: StagePlan, rank: int = 0) -> str:
    """The device of the tensors that arrive at a stage: ``relay.device``, else the placement of its rank."""
    if plan.relay.device == "cpu" or not plan.gpus:
        return "cpu"
    return f"cuda:{plan.gpus[rank]}"


def moved(value: Any, device: str) -> Any:
    """``value`` with its tensors on ``device``. Its containers are the stage's own: dicts and lists are changed in
    place. Arrays and bytes stay: only torch has devices.
    """
    torch = sys.modules.get("torch")
    if torch is None or (device == "cpu" and not torch.cuda.is_initialized()):
        return value  # no tensor can be anywhere else
    if device.startswith("cuda") and not _has_cuda():
        return value  # a machine that only pretends to have GPUs; the stage itself computes on the CPU
    return _moved(value, torch.device(device), {})


def _moved(value: Any, device: Any, seen: dict[int, tuple[Any, Any]]) -> Any:
    """seen: each tensor that was moved, by id, and what it became: one that is there twice arrives as one."""
    if tensors.is_tensor(value):
        if value.device == device:
            return value
        known = seen.get(id(value))
        if known is None:
            known = seen[id(value)] = (value, _copied(value, device))
        return known[1]
    kind = type(value)
    if kind is dict:
        for key, item in value.items():
            value[key] = _moved(item, device, seen)
    elif kind is list:
        value[:] = [_moved(item, device, seen) for item in value]
    elif kind is tuple:
        return tuple(_moved(item, device, seen) for item in value)
    elif isinstance(value, msgspec.Struct):
        return _struct(value, device, seen)
    return value


def _struct(value: msgspec.Struct, device: Any, seen: dict[int, tuple[Any, Any]]) -> Any:
    changes = {}
    for name in value.__struct_fields__:
        item = getattr(value, name)
        new = _moved(item, device, seen)
        if new is not item:
            changes[name] = new
    return msgspec.structs.replace(value, **changes) if changes else value


def _copied(tensor: Any, device: Any) -> Any:
    if tensor.device.type == "cuda" and device.type == "cpu":
        return tensors.host_copy(tensor)
    if tensor.device.type == "cpu" and device.type == "cuda":
        # torch keeps the pinned copy until the GPU has read it.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@functools.cache
def _has_cuda() -> bool:
    return bool(sys.modules["torch"].cuda.is_available())
