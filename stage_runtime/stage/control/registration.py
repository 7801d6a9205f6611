"""Registers the process with every coordinator: Hello until Welcome, and again when a coordinator is gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from random import uniform
from typing import Final

from stage_runtime.errors import LimitReached
from stage_runtime.rules.flow import ticks
from stage_runtime.sockets.channels import Channels
from stage_runtime.wire.messages import Hello, Welcome
from stage_runtime.wire.parts import Member

log = logging.getLogger(__name__)

HELLO_EVERY_S: Final = 0.1  # at first
HELLO_FACTOR: Final = 1.5
HELLO_MOST_S: Final = 2.0
REFUSED_S: Final = 5.0  # until a coordinator that refused is asked again; meanwhile it has no connection to hold
SPREAD_MOST_S: Final = 8.0  # over which the processes of a pipeline send Hello to a coordinator that comes back
UNANSWERED_S: Final = 15.0  # without a coordinator until that is logged: pods that start together take less
UNANSWERED_MOST_S: Final = 300.0  # between two such lines, each after twice the time of the one before
RESOLVE_EVERY_S: Final = 2.0  # how often a name is resolved for more coordinators: a roll brings a second one

Resolve = Callable[[str], Awaitable[list[str]]]


class HelloTimes:
    """When one process sends Hello to one coordinator. Pure.

    All processes find a new coordinator at once; what is sent before it has answered only delays the answers.
    """

    def __init__(self, now: float, *, spread_s: float, random: Callable[[float, float], float] = uniform) -> None:
        """spread_s: the first one comes within it."""
        self._random = random
        self._next = now + (random(0.0, spread_s) if spread_s else 0.0)
        self._delay_s = HELLO_EVERY_S
        self._resting = False  #: It was refused a moment ago.

    def refused(self, now: float) -> None:
        """The coordinator does not take the process."""
        self._next = now + REFUSED_S * self._random(0.75, 1.25)
        self._delay_s = HELLO_EVERY_S
        self._resting = True

    def rested(self, now: float) -> bool:
        """Whether to connect to it; False: not yet."""
        self._resting = self._resting and now < self._next
        return not self._resting

    def due(self, now: float) -> bool:
        """Whether to send it now; the next one follows later."""
        if now < self._next:
            return False
        self._next = now + self._delay_s * self._random(0.75, 1.25)
        self._delay_s = min(self._delay_s * HELLO_FACTOR, HELLO_MOST_S)
        return True


class Unanswered:
    """When to log that no coordinator answers. Pure."""

    def __init__(self, now: float, *, patience_s: float) -> None:
        self._since = now
        self._patience_s = self._delay_s = patience_s
        self._next = now + patience_s

    def due(self, now: float, *, answered: bool) -> float | None:
        """The seconds since the last answer, if they are to be logged now. answered: a coordinator is registered."""
        if answered:
            self._since, self._delay_s = now, self._patience_s
            self._next = now + self._patience_s
            return None
        if now < self._next:
            return None
        self._delay_s = min(2 * self._delay_s, UNANSWERED_MOST_S)
        self._next = now + self._delay_s
        return now - self._since


class Registration:
    """The coordinators that one process is registered with. It runs on the I/O thread."""

    def __init__(
        self,
        channels: Channels,
        *,
        endpoints: Sequence[str],
        resolve: Resolve,
        hello: Callable[[str], Hello],
        welcomed: Callable[[], None],
        patience_s: float = UNANSWERED_S,
    ) -> None:
        """patience_s: how long no coordinator may answer until that is logged."""
        self.coordinators: dict[str, Member] = {}  #: Those that sent Welcome, by incarnation.
        self._channels = channels
        self._endpoints = endpoints
        self._resolve = resolve
        self._hello = hello
        self._on_welcome = welcomed
        self._patience_s = patience_s
        self._beats: dict[str, float] = {}  #: The shortest time between two beats that each of them asks for.
        self._known: dict[str, str] = {}  #: endpoint -> incarnation of the coordinator behind it
        self._publishers: dict[str, str] = {}
        self._times: dict[str, HelloTimes] = {}  #: When to send Hello again, by endpoint.
        self._lost = asyncio.Event()  #: A coordinator is gone since the last look.
        self._limited = False  #: That this process is at a limit was logged.
        self._spread_s = 0.0  #: The seconds over which the processes of this pipeline send Hello to a new coordinator.

    async def run(self) -> None:
        """Send Hello to coordinators that have not answered, forever."""
        targets: list[str] = []
        next_resolve = 0.0
        loop = asyncio.get_running_loop()
        unanswered = Unanswered(loop.time(), patience_s=self._patience_s)
        while True:
            if loop.time() >= next_resolve:
                next_resolve = loop.time() + 0.75 * RESOLVE_EVERY_S  # at every second tick of `_rest`
                found = [endpoint for name in self._endpoints for endpoint in await self._resolve(name)]
                for gone in set(targets) - set(found) - set(self._known):
                    self._channels.drop_unnamed(gone)
                targets = found
            for endpoint in targets:
                self._ask(endpoint, loop.time())
            silent_s = unanswered.due(loop.time(), answered=bool(self.coordinators))
            if silent_s is not None:
                self._log_silence(silent_s, targets)
            if len(self._known) < len(targets):
                await asyncio.sleep(HELLO_EVERY_S)
            else:
                await self._rest(ticks.next_s(time.time(), RESOLVE_EVERY_S / 2))

    def _log_silence(self, silent_s: float, targets: Sequence[str]) -> None:
        """The only sign of a network that lets nothing through: the process has loaded, and is not ready."""
        asked = f"asked {', '.join(targets)}" if targets else f"{', '.join(self._endpoints)}: the name has no address"
        log.warning(
            "no coordinator has answered for %.0f s, so this process gets no request (%s); does one run, and does a "
            "NetworkPolicy keep the pods of the pipeline from each other or from DNS?",
            silent_s,
            asked,
        )

    async def _rest(self, most_s: float) -> None:
        """Wait until a coordinator is lost, for ``most_s`` at most."""
        self._lost.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await self._lost.wait()

    def _ask(self, endpoint: str, now: float) -> None:
        """Send Hello there when it is due: ever less often, and not all processes at once."""
        if endpoint in self._known:
            self._times.pop(endpoint, None)
            return
        times = self._times.get(endpoint)
        if times is not None and not times.rested(now):
            return
        try:
            link = self._channels.connect("", endpoint)
        except LimitReached as error:
            if not self._limited:
                self._limited = True
                log.error("no link to the coordinator at %s: %s", endpoint, error)
            return
        self._limited = False
        if not link.connected:
            return  # it would be lost
        if times is None:
            times = self._times[endpoint] = HelloTimes(now, spread_s=self._spread_s)
        if times.due(now):
            link.send_unordered(self._hello(endpoint))

    def welcomed(self, sender: str, message: Welcome) -> bool:
        """A coordinator has answered. True when it is one to which Hello was sent."""
        if self._channels.name(message.via, sender) is None:
            return False
        self.coordinators[sender] = message.coordinator
        self.ask_beats(sender, message.beat_s)
        self._known[message.via] = sender
        self._publishers[sender] = message.publisher
        self._channels.subscribe(message.publisher)
        self._on_welcome()
        log.info("registered with coordinator %s at %s", sender, message.via)
        return True

    @property
    def beat_s(self) -> float:
        """The shortest time between two beats that all coordinators allow. A beat goes to each of them."""
        return max(self._beats.values(), default=0.0)

    def ask_beats(self, coordinator: str, beat_s: float) -> None:
        """A coordinator asks for beats that are so far apart; one that knows few members for more than others do."""
        if coordinator in self.coordinators:
            self._beats[coordinator] = beat_s
            self._spread_s = min(self.beat_s, SPREAD_MOST_S)

    def welcomed_again(self, sender: str, message: Welcome) -> None:
        """A coordinator that we know answers at another address (both of a dual-stack host): one link is enough."""
        if sender in self.coordinators and message.via not in self._known:
            self._known[message.via] = sender
            self._channels.drop_unnamed(message.via)

    def refused(self, endpoint: str) -> None:
        """The coordinator there does not take this process: its connection is closed, and it is asked again later.

        One that is at a limit would otherwise have a descriptor less for each process that it refuses.
        """
        times = self._times.get(endpoint)
        if times is not None:
            times.refused(asyncio.get_running_loop().time())
            self._channels.drop_unnamed(endpoint)

    def lost(self, coordinator: str) -> bool:
        """True when it was a coordinator; Hello is sent to it again from now on."""
        if self.coordinators.pop(coordinator, None) is None:
            return False
        self._beats.pop(coordinator, None)
        self._lost.set()
        self._known = {endpoint: known for endpoint, known in self._known.items() if known != coordinator}
        publisher = self._publishers.pop(coordinator)
        if publisher not in self._publishers.values():
            self._channels.unsubscribe(publisher)
        return True
