"""The Hellos that are answered, of a member that repeats them. Pure: the caller passes the time.

A process sends Hello until it has read Welcome. It takes longer where thousands join at once than the time between
two of them, and each answer delays the others. The link to the member repeats a Welcome by itself; another one is
needed only where the member has given up its link. A member that sends Hello without end gets one a second. Called by
`coordinator.membership`.
"""

from __future__ import annotations

from typing import Final

import msgspec

from stage_runtime.wire.messages import Hello

AGAIN_S: Final = 1.0  # after a Welcome; doubled each time
AGAIN_MOST_S: Final = 8.0


class _SentWelcome(msgspec.Struct, frozen=True):
    hello: Hello  #: The message that it answered.
    at: float
    delay_s: float  #: Time until the same Hello is answered again.


class Welcomes:
    """The last Welcome that was sent to each member."""

    def __init__(self) -> None:
        self._sent: dict[str, _SentWelcome] = {}  #: The last Welcome by incarnation.

    def due(self, member: str, hello: Hello, now: float) -> bool:
        """Whether to answer this one; then Welcome is sent. False: the last answer may be under way."""
        last = self._sent.get(member)
        delay_s = AGAIN_S
        if last is not None and last.hello == hello:
            if now < last.at + last.delay_s:
                return False
            delay_s = min(2 * last.delay_s, AGAIN_MOST_S)
        self._sent[member] = _SentWelcome(hello, now, delay_s)
        return True

    def read(self, member: str) -> None:
        """It has read its Welcome: if it sends Hello again, it needs another."""
        last = self._sent.get(member)
        if last is not None:
            self._sent[member] = msgspec.structs.replace(last, delay_s=AGAIN_S)

    def forget(self, member: str) -> None:
        """It is gone."""
        self._sent.pop(member, None)
