"""Registers the process with every coordinator: Hello until Welcome, and again when a coordinator is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from stage_runtime.sockets.channels import Channels
from stage_runtime.wire.messages import Hello, Member, Welcome

log = logging.getLogger(__name__)

HELLO_EVERY_S: Final = 0.1
RESOLVE_EVERY_S: Final = 2.0  # how often a name is resolved for more coordinators: a roll brings a second one

Resolve = Callable[[str], Awaitable[list[str]]]


class Registration:
    """The coordinators that one process is registered with. On the I/O thread."""

    def __init__(
        self,
        channels: Channels,
        *,
        endpoints: Sequence[str],
        resolve: Resolve,
        hello: Callable[[str], Hello],
        welcomed: Callable[[], None],
    ) -> None:
        self.coordinators: dict[str, Member] = {}  #: Those that sent Welcome, by incarnation.
        self._channels = channels
        self._endpoints = endpoints
        self._resolve = resolve
        self._hello = hello
        self._on_welcome = welcomed
        self._known: dict[str, str] = {}  #: endpoint -> incarnation of the coordinator behind it
        self._publishers: dict[str, str] = {}

    async def run(self) -> None:
        """Send Hello to coordinators that have not answered, forever."""
        targets: list[str] = []
        next_resolve = 0.0
        loop = asyncio.get_running_loop()
        while True:
            if loop.time() >= next_resolve:
                next_resolve = loop.time() + RESOLVE_EVERY_S
                found = [endpoint for name in self._endpoints for endpoint in await self._resolve(name)]
                for gone in set(targets) - set(found) - set(self._known):
                    self._channels.drop_unnamed(gone)
                targets = found
            for endpoint in targets:
                if endpoint not in self._known:
                    self._channels.connect("", endpoint).send_unordered(self._hello(endpoint))
            await asyncio.sleep(HELLO_EVERY_S if len(self._known) < len(targets) else RESOLVE_EVERY_S / 4)

    def welcomed(self, sender: str, message: Welcome) -> bool:
        """A coordinator has answered. True when it is one to which Hello was sent."""
        if self._channels.name(message.via, sender) is None:
            return False
        self.coordinators[sender] = message.coordinator
        self._known[message.via] = sender
        self._publishers[sender] = message.publisher
        self._channels.subscribe(message.publisher)
        self._on_welcome()
        log.info("registered with coordinator %s at %s", sender, message.via)
        return True

    def welcomed_again(self, sender: str, message: Welcome) -> None:
        """A coordinator that we know answers at another address (both of a dual-stack host): one link is enough."""
        if sender in self.coordinators and message.via not in self._known:
            self._known[message.via] = sender
            self._channels.drop_unnamed(message.via)

    def lost(self, coordinator: str) -> bool:
        """True when it was a coordinator; Hello is sent to it again from now on."""
        if self.coordinators.pop(coordinator, None) is None:
            return False
        self._known = {endpoint: known for endpoint, known in self._known.items() if known != coordinator}
        publisher = self._publishers.pop(coordinator)
        if publisher not in self._publishers.values():
            self._channels.unsubscribe(publisher)
        return True
