"""Forwards aborts of requests that another coordinator owns: in a roll, a DELETE may reach the wrong coordinator.

Instances know all coordinators and pass the abort on (`rules.requests.forwarding`). This runs on the I/O thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from stage_runtime.errors import ValueRefused
from stage_runtime.rules.requests.forwarding import Inquiry
from stage_runtime.wire import codec
from stage_runtime.wire.messages import ForwardAbort, ForwardAbortReply, Message

ANSWER_S: Final = 2.0  # an owner that is alive answers in milliseconds; one that is dead is known to be after 4 s
OPEN_MOST: Final = 64  # at once: each question costs a message to every instance


class AbortForwarding:
    """Forwarded aborts that wait for an answer."""

    def __init__(self, me: str, send: Callable[[str, Message], bool]) -> None:
        self._me = me
        self._send = send
        self._open: dict[str, tuple[Inquiry, asyncio.Event]] = {}  #: Inquiries by request id.

    async def abort(self, request_id: str, reason: str, instances: Iterable[str]) -> bool:
        """Have another coordinator abort it. False: none has it in flight, or none answers in time."""
        if request_id not in self._open:
            if len(self._open) >= OPEN_MOST:
                return False
            question = ForwardAbort(request_id, self._me, reason)
            try:
                codec.check(question)
            except ValueRefused:
                return False  # no request has such an id
            inquiry = Inquiry([one for one in instances if self._send(one, question)])
            self._open[request_id] = (inquiry, asyncio.Event())
        inquiry, changed = self._open[request_id]
        try:
            async with asyncio.timeout(ANSWER_S):
                while inquiry.outcome is None:
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            return False
        finally:
            self._open.pop(request_id, None)
        return inquiry.outcome

    def answered(self, sender: str, message: ForwardAbortReply) -> None:
        """An instance returns an owner's answer."""
        if message.request_id in self._open:
            inquiry, changed = self._open[message.request_id]
            inquiry.answered(sender, aborted=message.aborted, owners=message.owners)
            changed.set()

    def forget(self, instance: str) -> None:
        """The instance is gone: expect no answer from it."""
        for inquiry, changed in self._open.values():
            inquiry.gone(instance)
            changed.set()
