"""Work on a GPU that a value's tensors wait for when they pass from one thread of this process to another.

A tensor may be there before its values are: they are computed on the stream of the thread that gave it, and its taker
may use another one. So the giver leaves an event behind its work, the taker's stream waits for that, and torch hears
that the taker's stream uses the memory, too. Called by `stage.inputs.arrivals` and `pack`; costs nothing where
no GPU is used.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

import msgspec

from stage_runtime.payloads import tensors


class DeviceStreams(Protocol):
    """The streams that threads compute on; each has a current one for each GPU."""

    def in_use(self) -> bool:
        """Whether this process uses GPUs at all."""

    def is_there(self, tensor: Any) -> bool:
        """Whether it lies on a GPU."""

    def record(self, device: Any) -> Any:
        """An event behind all that this thread's stream was given."""

    def wait(self, device: Any, event: Any) -> None:
        """Let this thread's stream wait for it; not the thread."""

    def keep(self, tensor: Any) -> None:
        """Its memory is not used again before this thread's stream has done what it was given."""


class CudaStreams:
    """NVIDIA's, by torch."""

    def in_use(self) -> bool:
        torch = sys.modules.get("torch")
        return torch is not None and torch.cuda.is_initialized()

    def is_there(self, tensor: Any) -> bool:
        return bool(tensor.is_cuda)

    def record(self, device: Any) -> Any:
        return sys.modules["torch"].cuda.current_stream(device).record_event()

    def wait(self, device: Any, event: Any) -> None:
        sys.modules["torch"].cuda.current_stream(device).wait_event(event)

    def keep(self, tensor: Any) -> None:
        tensor.record_stream(sys.modules["torch"].cuda.current_stream(tensor.device))


CUDA: Final = CudaStreams()


class StreamHandover:
    """The event that the taker of a value waits for."""

    __slots__ = ("_events", "_streams", "_tensors")

    def __init__(self, given: list[Any], streams: DeviceStreams) -> None:
        self._streams = streams
        self._tensors = given
        self._events = {device: streams.record(device) for device in {one.device for one in given}}

    def take(self) -> None:
        """The thread that gets a value calls it before it uses the value."""
        for device, event in self._events.items():
            self._streams.wait(device, event)
        for tensor in self._tensors:
            self._streams.keep(tensor)
        self._tensors, self._events = [], {}


def given(value: Any, streams: DeviceStreams = CUDA) -> StreamHandover | None:
    """The handover of a value; the thread that gives it calls this after all work on it was submitted to the GPU.

    Returns: None: nothing of it lies on a GPU.
    """
    if not streams.in_use():
        return None
    there = [tensor for tensor in found(value) if streams.is_there(tensor)]
    return StreamHandover(there, streams) if there else None


def found(value: Any) -> Iterator[Any]:
    """The tensors in a value."""
    if tensors.is_tensor(value):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from found(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from found(item)
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from found(getattr(value, name))
