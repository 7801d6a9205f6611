"""A stage and a hook that cancel a task of their own process, as a fault of ours would end it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

import stage_runtime as omni


def stage() -> Callable[[omni.StagePayload], str]:
    def run(payload: omni.StagePayload) -> str:
        cancel(str(payload.data))
        return str(payload.data)

    return run


def terminal_stages_fn(request: omni.OmniRequest) -> None:
    """The hook that runs in the coordinator's process, on a thread of its own."""
    cancel(str(request.inputs))


def cancel(wanted: str) -> None:
    gc.unfreeze()  # a coordinator freezes what exists when it begins to serve
    for one in gc.get_objects():
        if issubclass(type(one), asyncio.Task) and one.get_name() == wanted and not one.done():
            one.get_loop().call_soon_threadsafe(one.cancel)
