"""Factories that the loading tests name by dotted path."""

from __future__ import annotations

from typing import Any

NUMBER = 7


def plain() -> Any:
    return lambda payload: payload.data


def picky(times: int, *, voice: str = "alba", context: Any = None, tp_rank: int = -1) -> Any:
    return lambda payload: (times, voice, context.name, tp_rank)


def greedy(**everything: Any) -> Any:
    return lambda payload: sorted(everything)


def nothing() -> None: ...


def raising() -> Any:
    raise OSError("no such checkpoint")


class Maker:
    @staticmethod
    def make() -> Any:
        return plain()


def defaulting(model_path="default-model", gpu_id=7, model_revision="main", tp_rank=9, context="none") -> Any:  # type: ignore[no-untyped-def]
    made = [model_path, gpu_id, model_revision, tp_rank, context == "none"]
    return lambda payload: made


def needing(model_path: str | None, *, gpu_id: int | None) -> Any:
    return lambda payload: [model_path, gpu_id]


def pinned(model_path: str, model_revision: str) -> Any:
    return lambda payload: [model_path, model_revision]


def stage_function(payload: Any) -> Any:
    return payload.data


async def not_plain() -> Any:
    return stage_function


def yielding() -> Any:
    yield 1


def deaf() -> Any:
    return lambda: 1
