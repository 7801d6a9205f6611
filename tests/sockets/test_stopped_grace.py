"""A process that was stopped while a connection was to come back gives it another grace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from stage_runtime.sockets.connections.connecting import Connecting, ConnectionEvents
from tests.coordinator.set_clock import SetClock

GRACE_S = 0.25
DEAD_AFTER_S = 4.0


class Connection:
    """`dialing.Connection` to an end that accepts nothing, and its dialers."""

    endpoint = "tcp://10.0.0.7:5550"

    def __init__(self) -> None:
        self.connected = False
        self.reached = False
        self.breaks = 0
        self.changed: Callable[[bool], None] = lambda connected: None

    def dial(self, endpoint: str, watcher: Callable[[bool], None], factor: float) -> Connection:
        self.changed = watcher
        return self

    def look(self) -> None: ...


class Link:
    """`links.Link` to a coordinator."""

    peer, endpoint, keep_awake = "cc", Connection.endpoint, True

    def __init__(self) -> None:
        self.connection: Any = None


class Made:
    """One link, and whether its peer was given up."""

    def __init__(self) -> None:
        self.clock, self.connection = SetClock(), Connection()
        self.gone = 0
        events = ConnectionEvents(
            current=lambda link: True, connected=lambda link: None, flush=lambda link: None, gone=self._on_gone
        )
        connecting = Connecting(
            self.clock,  # type: ignore[arg-type]
            self.connection,  # type: ignore[arg-type]
            Counter(),
            dead_after_s=DEAD_AFTER_S,
            reconnect_grace_s=GRACE_S,
            events=events,
        )
        connecting.dial(Link())  # type: ignore[arg-type]

    def _on_gone(self, link: Any) -> None:
        self.gone += 1

    def interrupt(self) -> None:
        self.connection.connected = True
        self.connection.changed(True)
        self.connection.connected = False
        self.connection.breaks += 1
        self.connection.changed(False)


@pytest.mark.parametrize("comes_back", [True, False])
@pytest.mark.parametrize("connected_before", [True, False])
async def test_a_peer_is_not_given_up_for_a_time_in_which_this_process_was_stopped(
    connected_before: bool, comes_back: bool
) -> None:
    made = Made()
    if connected_before:
        made.interrupt()
    made.clock.stop(60.0)
    made.clock.advance(0.0)
    assert made.gone == 0
    if comes_back:
        made.connection.connected = True
    made.clock.advance(GRACE_S)
    assert made.gone == (0 if comes_back else 1)


async def test_a_peer_is_given_up_when_its_grace_is_over_and_this_process_ran() -> None:
    made = Made()
    made.clock.advance(DEAD_AFTER_S - 0.01)
    assert made.gone == 0
    made.clock.advance(0.02)
    assert made.gone == 1
