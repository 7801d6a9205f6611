"""Requests that are bound to two instances which have lost their connection. Called by `coordinator`."""

from __future__ import annotations

import asyncio
from typing import Final

from stage_runtime.coordinator.answering.request_handles import RequestHandle
from stage_runtime.coordinator.binding.bindings import Bindings
from stage_runtime.coordinator.following import Following
from stage_runtime.wire.parts import Failure

RECONNECT_S: Final = 1.0  # after two instances lost their connection: wait so long for a death or a reconnect


class BrokenConnections:
    """Gives up the attempts that wait for messages which were lost between two instances."""

    def __init__(self, following: Following, bindings: Bindings, loop: asyncio.AbstractEventLoop) -> None:
        self._following = following
        self._bindings = bindings
        self._loop = loop

    def peer_unreachable(self, sender: str, peer: str) -> None:
        """The connection between two instances broke; messages in transit between them may be lost.

        If one of them is dead, that is known soon and its requests are bound elsewhere. Else they would wait for each
        other until their deadlines.
        """
        attempts = [(handle, handle.tracked.attempt) for handle in self._bindings.between(sender, peer)]
        if attempts:
            self._loop.call_later(RECONNECT_S, self._give_up, attempts, peer)

    def _give_up(self, attempts: list[tuple[RequestHandle, int]], peer: str) -> None:
        """Fail those of ``attempts`` that are still under way: they wait for messages lost at ``peer``."""
        for handle, attempt in attempts:
            if handle.tracked.accepts(attempt) and peer in handle.bindings.values():
                stage = next(stage for stage, bound in handle.bindings.items() if bound == peer)
                problem = "the connection to it broke"
                self._following.failed(handle, attempt, Failure("transport_failed", problem, stage, unreachable=peer))
