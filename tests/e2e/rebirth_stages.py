"""The stages of `test_rebirth`: a tensor from the arena, and its sum."""

from __future__ import annotations

from typing import Any


def give(context: Any) -> Any:
    import torch

    def run(payload: Any) -> Any:
        tensor = context.allocate((payload.data["size"],), torch.uint8)
        tensor.fill_(1)
        return {"tensor": tensor}

    return run


def take() -> Any:
    return lambda payload: int(payload.data["tensor"].sum())
