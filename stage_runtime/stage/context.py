"""The context that a factory receives: `api.StageContext`."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from omnipipeline_spec.types.errors import quoted
from omnipipeline_spec.types.plan import StagePlan
from stage_runtime.kv_transfer.interface import KVTransport

Allocate = Callable[[tuple[int, ...], Any], Any]
Progress = Callable[[str, str, float, float, str], None]
EmitEvent = Callable[[str, str, str, Mapping[str, Any]], None]


class Rank(NamedTuple):
    """The place of one process in its stage."""

    number: int = 0
    gpu_id: int | None = None
    rendezvous: str | None = None  #: ``tcp://host:port`` at which the ranks of a TP stage meet.


ONE_RANK: Final = Rank()


class RankContext:
    """One stage, one rank."""

    def __init__(
        self,
        plan: StagePlan,
        *,
        model_path: str | None,
        model_revision: str | None,
        rank: Rank = ONE_RANK,
        allocate: Allocate,
        progress: Progress,
        emit: EmitEvent,
        kv: KVTransport | None = None,
    ) -> None:
        """kv: of a stage with disaggregation."""
        self.kv_role = plan.kv_role
        self.kv = kv
        self.name = plan.name
        self.terminal = plan.terminal
        self.device = "cpu" if rank.gpu_id is None else f"cuda:{rank.gpu_id}"
        self.model_path = model_path
        self.model_revision = model_revision
        self.tp_rank = rank.number
        self.tp_size = plan.tp_size
        self.rendezvous = rank.rendezvous
        self.logger = logging.getLogger(f"stage.{plan.name}")
        self._allocate = allocate
        self._progress = progress
        self._said = ""  #: The message that was logged last.
        self._emit = emit

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return self._allocate(shape, dtype)

    def emit(self, event: str, request_id: str, /, stage: str | None = None, **metadata: Any) -> None:
        self._emit(event, request_id, stage or self.name, metadata)

    def progress(self, message: str, done: float = 0, total: float = 0, unit: str = "") -> None:
        for name, text in (("message", message), ("unit", unit)):
            if not isinstance(text, str):
                raise TypeError(f"context.progress({name}={quoted(text)}): a text")
        for name, number in (("done", done), ("total", total)):
            if not _is_count(number):
                raise ValueError(f"context.progress({name}={quoted(number)}): a finite number from 0")
        message, unit = (
            text.encode(errors="replace").decode() for text in (message, unit)
        )  # halves of surrogate pairs
        self._progress(self.name, message, float(done), float(total), unit)
        if message != self._said:  # one line for a bar, however often it grows
            self._said = message
            self.logger.info("%s", message)


def _is_count(value: Any) -> bool:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return not isinstance(value, str) and 0 <= number < math.inf
