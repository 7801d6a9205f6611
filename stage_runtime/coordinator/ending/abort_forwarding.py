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


class _Question:
    """One forwarded abort, for all clients that ask for it at the same time."""

    def __init__(self, inquiry: Inquiry) -> None:
        self.inquiry = inquiry
        self.changed = asyncio.Event()
        self.callers = 0  #: It is open as long as one waits.


class AbortForwarding:
    """Forwarded aborts that wait for an answer."""

    def __init__(self, me: str, send: Callable[[str, Message], bool]) -> None:
        self._me = me
        self._send = send
        self._open: dict[str, _Question] = {}  #: Questions by request id.

    async def abort(self, request_id: str, reason: str, instances: Iterable[str]) -> bool:
        """Have another coordinator abort it. False: none has it in flight, or none answers in time."""
        if request_id not in self._open:
            if len(self._open) >= OPEN_MOST:
                return False
            message = ForwardAbort(request_id, self._me, reason)
            try:
                codec.check(message)
            except ValueRefused:
                return False  # no request has such an id
            self._open[request_id] = _Question(Inquiry([one for one in instances if self._send(one, message)]))
        question = self._open[request_id]
        question.callers += 1
        try:
            async with asyncio.timeout(ANSWER_S):
                while question.inquiry.outcome is None:
                    question.changed.clear()
                    await question.changed.wait()
        except TimeoutError:
            return False
        finally:
            question.callers -= 1
            if not question.callers:
                del self._open[request_id]
        return question.inquiry.outcome

    def answered(self, sender: str, message: ForwardAbortReply) -> None:
        """An instance returns an owner's answer."""
        question = self._open.get(message.request_id)
        if question is not None:
            question.inquiry.answered(sender, aborted=message.aborted, owners=message.owners)
            question.changed.set()

    def forget(self, instance: str) -> None:
        """The instance is gone: expect no answer from it."""
        for question in self._open.values():
            question.inquiry.gone(instance)
            question.changed.set()
