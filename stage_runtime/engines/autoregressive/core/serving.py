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


class Lockstep(Protocol):
    """The passes of engines that compute each one together. They meet before it: who has rows, who has work left, who
    wishes to end.
    """

    leaving: bool  #: This engine wishes to end. Set by the loop.

    @property
    def meetings(self) -> int:
        """How many meetings there were."""

    @property
    def over(self) -> bool:
        """No engine has work left, as the last meeting says."""

    @property
    def some_leave(self) -> bool: ...
    @property
    def all_leave(self) -> bool: ...

    def take_part(self, *, unfinished: bool) -> None:
        """Meet, and compute for the others; this engine has no rows. unfinished: it has work all the same.

        Raises: RankLost (no Exception): another engine is gone.
        """


class Served(NamedTuple):
    """utilities: what clients may call by name, between two steps, with the core and their arguments.
    connect: gives the core its connector, whose calls come by the process's loop; rooms: its way to the stage.
    lockstep: of engines that compute each pass together; None: this one computes alone.
    """

    core: EngineCore
    num_gpu_blocks: int
    utilities: Mapping[str, Callable[..., Any]] = {}
    connect: Connect | None = None
    lockstep: Lockstep | None = None
