"""Work on another thread: what takes so long that other requests would wait for it. Called by all of `web`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from stage_runtime.errors import RequestError

Returned = TypeVar("Returned")


async def call(function: Callable[..., Returned], *arguments: object) -> Returned:
    """Call ``function`` on a thread of the loop's.

    Raises: RequestError: unavailable: no thread can start, and all that there are work; what the function raises.
    """
    try:
        called = asyncio.get_running_loop().run_in_executor(None, function, *arguments)
    except RuntimeError as error:  # the machine has no thread or no memory left for one
        raise RequestError("unavailable", f"the coordinator: {error}", retry_after_s=1.0) from error
    return await called
