"""A stage process's incarnations, one after the other. The stages and their engines outlive them.

A coordinator that has declared the process dead notifies it: then the process drops all requests, takes a new
incarnation and opens both planes anew. Called by `processes.stages.stage_process`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable
from typing import Any

from stage_runtime.wire.parts import Incarnation

log = logging.getLogger(__name__)


def fresh() -> Incarnation:
    """An incarnation that was never used."""
    return Incarnation(secrets.token_hex(8))


class Incarnations:
    """Runs until ``over`` is done. It is made inside the running loop."""

    def __init__(self, over: asyncio.Future[int]) -> None:
        self.current = fresh()
        self._over = over
        self._fenced = asyncio.Event()  #: The current one was declared dead.

    def fence(self) -> None:
        """A coordinator has declared the current incarnation dead."""
        self._fenced.set()

    async def run(
        self, begin: Callable[[contextlib.AsyncExitStack], None], renew: Callable[[Incarnation], None]
    ) -> None:
        """begin: opens the planes of the current incarnation; the stack closes them. renew: drops what the one before
        was requested, and takes the new one.
        """
        await self._live(begin)
        while not self._over.done():
            self.current = fresh()
            log.warning("declared dead by a coordinator: going on as %s", self.current)
            renew(self.current)
            await self._live(begin)

    async def _live(self, begin: Callable[[contextlib.AsyncExitStack], None]) -> None:
        """Runs one incarnation, until the process ends or the incarnation is fenced."""
        self._fenced = asyncio.Event()
        fenced = asyncio.ensure_future(self._fenced.wait())
        async with contextlib.AsyncExitStack() as stack:
            begin(stack)
            ends: list[asyncio.Future[Any]] = [self._over, fenced]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            fenced.cancel()
