"""The engine process's side of a factory: a core, and what clients may ask it for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from stage_runtime.engines.autoregressive.core.engine_core import EngineCore
from stage_runtime.engines.autoregressive.core.kv_connector import Post
from stage_runtime.kv_transfer.interface import KVRooms


class EngineKV(KVRooms, Protocol):
    """`KVRooms` of an engine process."""

    def tell(self, event: str, name: str, **metadata: Any) -> None:
        """An event for the profiler. name: of the engine's request."""


class Connect(Protocol):
    def __call__(self, *, post: Post, rooms: EngineKV) -> None: ...


class Served(NamedTuple):
    """utilities: what clients may call by name, between two steps, with the core and their arguments.
    dummy_batch: computes a step without requests, for engines in lockstep. connect: gives the core its connector, whose
    calls come by the process's loop; rooms: its way to the stage.
    """

    core: EngineCore
    num_gpu_blocks: int
    utilities: Mapping[str, Callable[..., Any]] = {}
    dummy_batch: Callable[[], None] = lambda: None
    connect: Connect | None = None
