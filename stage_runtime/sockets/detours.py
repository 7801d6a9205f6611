"""The first frames of a new link, or of one that has slept: by a coordinator, while the connection is being made.

A connection over TCP takes three round trips until it carries a frame, with CURVE four and a half; by a coordinator,
to which both ends have connections, a frame takes half a round trip more than on an open link. The link keeps these
frames and sends them again when it is connected: its receiver drops what it has. Called by `channels`, on the I/O
thread.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from stage_runtime.sockets.addresses import is_local
from stage_runtime.sockets.links import Link
from stage_runtime.wire.messages import Detour

FRAMES_MOST: Final = 8  # for one connection: the first request's; a coordinator must not carry what its instances send
NBYTES_MOST: Final = 96 << 10  # a message with the largest payload that rides in one, and its neighbours


def send(link: Link, coordinator: Link | None, counters: Counter[str]) -> None:
    """Pass on the frames of ``link`` that wait, if a coordinator is there."""
    if link.connected or is_local(link.endpoint) or coordinator is None or not coordinator.connected:
        return  # to a process of the same machine, a connection is faster
    for frame in link.detours(FRAMES_MOST, NBYTES_MOST):
        counters["detours"] += 1
        coordinator.send_unordered(Detour(link.peer, frame))
