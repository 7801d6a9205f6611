"""The inputs of one request that a stage may still receive, edge by edge, so that it never waits for an input in vain.

Every source ends each edge: a normal edge with a payload or `Skip`; a stream with the done signal or `Skip`. A payload,
a chunk or a done signal begins the request at the stage; a skip does not. When all edges have ended and the request has
not begun, the stage itself is skipped and sends `Skip` to its targets. So a branch that a router did not take ends
along its whole length. Pure: the caller passes events in any order.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum

import msgspec


class Outlook(Enum):
    """The inputs that a stage can still expect of a request."""

    OPEN = "open"  #: Something may come.
    NO_PAYLOAD = "no payload"  #: It has begun, by a stream; no payload can come.
    SKIPPED = "skipped"  #: It has not begun, and nothing can begin it.


class Expecting(msgspec.Struct, eq=False):
    """One request's edges into one stage. A Struct, because one is made per visit.

    Invariants: ``begun`` never becomes False again; after SKIPPED nothing but SKIPPED is answered.
    """

    _inputs: Collection[str]  #: Sources of normal edges whose payload may still come.
    _streams: Collection[str]  #: Sources of stream edges whose stream has not ended.
    begun: bool = False  #: A payload is complete, or a chunk or a done signal has come.
    _payload: bool = False  #: It is complete.

    def payload(self) -> None:
        """The payload is complete; of a fan-in, merged."""
        self._payload = self.begun = True

    def begin(self) -> None:
        """A chunk or a done signal has come."""
        self.begun = True

    def skip(self, source: str) -> None:
        """``source`` sends no payload. One of the others may, unless they are joined: then see `no_payload`."""
        self._inputs = [one for one in self._inputs if one != source]

    def no_payload(self) -> None:
        """A fan-in lacks a source that was skipped: it cannot be complete."""
        self._inputs = ()

    def ended(self, source: str) -> None:
        """The stream of ``source`` has ended, and all its chunks have come."""
        self._streams = [one for one in self._streams if one != source]

    @property
    def complete(self) -> bool:
        """All that it needs has come: its payload, or none can, and every stream to its end."""
        return self.begun and not self._streams and (self._payload or not self._inputs)

    @property
    def outlook(self) -> Outlook:
        if self._payload or self._inputs:
            return Outlook.OPEN
        if self.begun:
            return Outlook.NO_PAYLOAD
        return Outlook.OPEN if self._streams else Outlook.SKIPPED
