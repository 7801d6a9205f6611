"""Admin operations on a process's engines, each answered exactly once by every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import msgspec

from omnipipeline_spec.types.errors import clipped
from stage_runtime.engines.events import Admin
from stage_runtime.errors import ValueRefused, describe
from stage_runtime.payloads import encoding
from stage_runtime.stage.stage import Stage
from stage_runtime.wire.messages import AdminCall, AdminReply, Message, ProfilerStart, ProfilerStop

ASKED_KEPT: Final = 4096  # an engine may forget operations, and their callers have given up long ago


class Administration:
    """Knows which operations wait for their engine. Ranks 1.. answer for themselves (`follower`)."""

    def __init__(
        self,
        stages: Mapping[str, Stage],
        send: Callable[[str, Message], bool],
        *,
        done: Callable[[AdminCall], object] = lambda call: None,
        kept: int = ASKED_KEPT,
    ) -> None:
        """done: called in any thread, before the answer, with a call that an engine has carried out. kept: operations
        without an answer; beyond it the oldest is forgotten.
        """
        self._stages = stages
        self._send = send
        self._done = done
        self._kept = kept
        #: (coordinator, call, stage) that engines have not answered, oldest first.
        self._asked: dict[tuple[str, str, str], AdminCall] = {}

    def ask(self, sender: str, message: AdminCall) -> None:
        """Hand it to the engine. ``sender`` gets one answer, whatever becomes of it, unless the engine forgets it."""
        stage = self._stages.get(message.stage)
        problem = _refusal(message, stage)
        if stage is None or problem is not None:
            for rank in range(1 if stage is None else stage.plan.tp_size):
                self._send(sender, AdminReply(message.call_id, message.stage, rank, None, problem))
            return
        call = (sender, message.call_id, message.stage)
        self._asked[call] = message
        if len(self._asked) > self._kept:
            self._asked.pop(next(iter(self._asked)), None)  # its engine may be answering it now
        stage.inbox.put(
            Admin(message.call_id, message.operation, message.arguments, partial(self._answer, call), sender)
        )

    def profile(self, message: ProfilerStart | ProfilerStop) -> None:
        """Notify every engine that takes operations that a profile starts or stops: it may record more of its own."""
        operation = "profiler_start" if isinstance(message, ProfilerStart) else "profiler_stop"
        arguments: Mapping[str, Any] = {name: getattr(message, name) for name in message.__struct_fields__}
        for stage in self._stages.values():
            if stage.input.engine is not None and stage.input.engine.takes_admin:
                stage.inbox.put(Admin("", operation, dict(arguments), lambda _: None))

    def crashed(self, stage: str, error: BaseException) -> None:
        """The engine has stopped: answer its open operations. It runs on the engine's thread."""
        for call in [one for one in list(self._asked) if one[2] == stage]:
            self._answer(call, None, clipped(f"the engine crashed: {describe(error)}"))

    def _answer(self, call: tuple[str, str, str], value: Any, error: str | None = None) -> None:
        """Replies to a call. Any thread may call it; the first answer counts."""
        sender, call_id, stage = call
        try:
            asked = self._asked.pop(call)
        except KeyError:
            return
        if error is None and not isinstance(value, Exception):
            self._done(asked)
        answer(lambda reply: self._send(sender, reply), AdminReply(call_id, stage, 0, value, error))


def _refusal(message: AdminCall, stage: Stage | None) -> str | None:
    """Why the operation cannot be sent; None: it can."""
    name = message.stage
    if stage is None:
        return f"no stage {name!r} here"
    if stage.input.engine is None:
        return f"stage {name!r} has not loaded its engine yet"
    if not stage.input.engine.takes_admin:
        return f"stage {name!r} takes no operations"
    if stage.plan.tp_size > 1:
        try:  # as a step for the other ranks: rank 0's engine would end by one that it cannot pass on
            encoding.extract({"arguments": message.arguments}, where="operation", as_fields=True)
        except ValueRefused as refused:
            return clipped(str(refused))
    return None


def answer(send: Callable[[AdminReply], object], reply: AdminReply) -> None:
    """Send it; where its value is an exception or cannot be encoded, that as its error."""
    replace = msgspec.structs.replace
    if isinstance(reply.value, Exception):
        reply = replace(reply, value=None, error=clipped(describe(reply.value)))
    try:
        send(reply)
    except ValueRefused as refused:
        send(replace(reply, value=None, error=clipped(str(refused))))
