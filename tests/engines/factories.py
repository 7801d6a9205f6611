"""What the loading tests name by dotted path."""

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


def pinned(model_path: str, model_revision: str) -> Any:
    return lambda payload: [model_path, model_revision]
