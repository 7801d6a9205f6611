"""Frames outside the order that come again byte for byte: each is decoded once.

Beats of an instance at rest are equal, and of a thousand instances most are at rest. Not here: what is done with them
(`channels`). It runs on the process's I/O thread.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from stage_runtime.sockets.connections.links import Link
from stage_runtime.wire.frames import Envelope
from stage_runtime.wire.messages import Message

LIMIT: Final = 4096  # bytes of a frame: a link keeps one


class Repeat(NamedTuple):
    """A frame that has come."""

    link: Link
    envelope: Envelope
    message: Message

    def follows(self) -> bool:
        """Whether it is of the session that both ends know, still; then its link is in use. Its ack is known."""
        link, envelope, _ = self
        if not link.incoming.follows(envelope.session, envelope.ack_session, 0):
            return False
        link.used = True
        return True


class Repeats:
    """The last such frame of each link."""

    def __init__(self) -> None:
        self._known: dict[bytes, Repeat] = {}

    def find(self, data: bytes) -> Repeat | None:
        """The message in ``data``, if the same bytes came before."""
        return self._known.get(data) if self._known and len(data) <= LIMIT else None

    def keep(self, link: Link, envelope: Envelope, message: Message) -> None:
        self.forget(link)
        data = envelope.message.obj
        if isinstance(data, bytes) and len(data) <= LIMIT:
            link.repeat = data
            self._known[data] = Repeat(link, envelope, message)

    def forget(self, link: Link) -> None:
        if link.repeat is not None:
            self._known.pop(link.repeat, None)
            link.repeat = None
