"""The first frames of a new link, or of one that has slept: by a coordinator, while the connection is being made.

A connection over TCP takes three round trips until it carries a frame, with CURVE four and a half; by a coordinator,
to which both ends have connections, a frame takes half a round trip more than on an open link. The link keeps these
frames and sends them again when it is connected: its receiver drops what it has. Called by `channels`, on the I/O
thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final
from zlib import crc32

from stage_runtime.sockets.connections.links import Link
from stage_runtime.sockets.endpoints.addresses import is_local
from stage_runtime.wire import codec
from stage_runtime.wire.messages import Detour

FRAMES_MOST: Final = 8  # for one connection: the first request's; a coordinator must not carry what its instances send
NBYTES_MOST: Final = 96 << 10  # a message with the largest payload that rides in one, and its neighbours


def send(link: Link, coordinators: Mapping[str, Link], counters: Counter[str]) -> None:
    """Pass on the frames of ``link`` that wait, if a coordinator is connected.

    coordinators: their links, by incarnation.
    """
    if link.connected or is_local(link.endpoint):
        return  # to a process of the same machine, a connection is faster
    connected = sorted(name for name, one in coordinators.items() if one.connected)
    if not connected:
        return
    for frame in link.detours(FRAMES_MOST, NBYTES_MOST):
        request = codec.opened(frame).request
        coordinator = choose(request.owner if request is not None else None, link.peer, connected)
        counters["detours"] += 1
        coordinators[coordinator].send_unordered(Detour(link.peer, frame))


def choose(owner: str | None, peer: str, coordinators: Sequence[str]) -> str:
    """The coordinator by which a frame to ``peer`` goes: the owner of its request, which has bound it to both ends.

    owner: None, or none of them: all frames to one peer by the same coordinator, those to different ones by all.
    """
    if owner is not None and owner in coordinators:
        return owner
    return coordinators[crc32(peer.encode()) % len(coordinators)]
