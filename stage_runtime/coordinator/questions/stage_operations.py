"""Operations of stages' own engines: asked of every rank of every instance of a stage, answers collected.

Here: calls, their answers, the result of a process that does not answer. Not here: what an operation does: each engine
defines its own (`engines.events.Admin`). This runs on the I/O thread.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from stage_runtime.coordinator.questions.profile_questions import Participants
from stage_runtime.errors import RequestError
from stage_runtime.wire.messages import AdminCall, AdminReply, Message
from stage_runtime.wire.parts import Member

GONE: Final = "no answer: the process is gone"
LATE_MOST: Final = 256  # calls whose answers may come late; the oldest is forgotten


class OperationResult(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of one process."""

    stage: str
    group: str
    instance: str
    rank: int = 0  #: The rank, among a TP stage's processes.
    value: Any = None
    error: str | None = None  #: Why the value is missing; None: ``value`` has it.


class OperationResults(msgspec.Struct, frozen=True, kw_only=True):
    """The answers of all processes."""

    operation: str
    failed: int  #: Results with an error.
    results: list[OperationResult]


class _Target(NamedTuple):
    """One process, for one of its stages. Rank 0 passes the operation on to ranks 1.., which are not members."""

    instance: str
    stage: str
    rank: int


class _OperationAnswer(NamedTuple):
    value: Any
    error: str | None


Late: TypeAlias = Callable[[str, str], None]  #: Called with an instance and its stage.


class Operations:
    """Sends operations to stages and collects the replies."""

    def __init__(
        self,
        members: Participants,
        stages: Callable[[], Sequence[str]],
        send: Callable[[str, Message], bool],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """stages: all of the pipeline, those without an instance too."""
        self._members = members
        self._stages = stages
        self._send = send
        self._loop = loop
        self.on_done: Callable[[OperationResults, Mapping[str, Any]], None] = lambda results, arguments: None
        self._calls: dict[str, dict[_Target, asyncio.Future[_OperationAnswer]]] = {}
        #: Calls that were not waited for to the end: who has not answered, and what to do when one carries it out yet.
        self._late: dict[str, tuple[set[_Target], Late]] = {}

    async def ask(
        self,
        operation: str,
        stages: Sequence[str],
        arguments: Mapping[str, Any],
        *,
        timeout_s: float,
        only: str | None = None,
        noted: bool = True,
        late: Late | None = None,
    ) -> OperationResults:
        """Ask all instances of ``stages``, and wait for each until it has answered, is gone, or ``timeout_s`` is over.

        only: one instance is asked. noted: `on_done` is called with the results. late: called for an instance that was
        not waited for any longer and has carried it out then.

        Raises: RequestError: not_found: no such stage; unavailable: a stage has no instance. Then no process was asked.
            ValueRefused: an argument cannot be encoded.
        """
        members = {name: one for name, one in self._members().items() if only in (None, name)}
        self._check(stages, members)
        call_id = uuid.uuid4().hex
        targets = [
            _Target(instance, stage, rank)
            for stage in dict.fromkeys(stages)
            for instance, member in sorted(members.items())
            if stage in member.stages
            for rank in range(member.ranks)
        ]
        answers: dict[_Target, asyncio.Future[_OperationAnswer]]
        answers = self._calls[call_id] = {one: self._loop.create_future() for one in targets}
        try:
            for one in targets:
                question = AdminCall(call_id, one.stage, operation, dict(arguments))
                if not one.rank and not self._send(one.instance, question):
                    self.lost(one.instance)
            await asyncio.wait(answers.values(), timeout=timeout_s)
        finally:
            del self._calls[call_id]
            if late is not None:
                self._wait_on(call_id, {one for one in targets if not (one.rank or answers[one].done())}, late)
        problem = f"no answer within {timeout_s:g} s"
        results = [_result(one, members[one.instance], answers[one], problem) for one in targets]
        found = OperationResults(
            operation=operation, failed=sum(one.error is not None for one in results), results=results
        )
        if noted:
            self.on_done(found, arguments)
        return found

    def tell(self, instance: str, stage: str, operation: str, arguments: Mapping[str, Any]) -> None:
        """Ask one instance, and do not wait for its answer."""
        self._send(instance, AdminCall(uuid.uuid4().hex, stage, operation, dict(arguments)))

    def served(self) -> list[str]:
        """The stages that have an instance now."""
        return sorted({stage for member in self._members().values() for stage in member.stages})

    def replied(self, sender: str, message: AdminReply) -> None:
        """A rank of this process has answered."""
        target = _Target(sender, message.stage, message.rank)
        answer = self._calls.get(message.call_id, {}).get(target)
        if answer is not None and not answer.done():
            answer.set_result(_OperationAnswer(message.value, message.error))
        waiting, late = self._late.get(message.call_id, (set(), None))
        if late is not None and target in waiting:
            waiting.remove(target)
            if not waiting:
                del self._late[message.call_id]
            if message.error is None:
                late(sender, message.stage)

    def lost(self, instance: str) -> None:
        """A process is gone: fail the wait for its answer."""
        for targets in self._calls.values():
            for one, answer in targets.items():
                if one.instance == instance and not answer.done():
                    answer.set_result(_OperationAnswer(None, GONE))
        for call_id, (waiting, _late) in list(self._late.items()):
            waiting -= {one for one in waiting if one.instance == instance}
            if not waiting:
                del self._late[call_id]

    def _wait_on(self, call_id: str, waiting: set[_Target], late: Late) -> None:
        if waiting:
            self._late[call_id] = waiting, late
        if len(self._late) > LATE_MOST:
            del self._late[next(iter(self._late))]

    def _check(self, stages: Sequence[str], members: Mapping[str, Member]) -> None:
        known = self._stages()
        served = {stage for member in members.values() for stage in member.stages}
        for stage in stages:
            if stage not in known and stage not in served:
                raise RequestError("not_found", f"{stage!r} is not a stage: the pipeline has {', '.join(known)}")
            if stage not in served:
                raise RequestError("unavailable", f"stage {stage!r} has no instance now")


def _result(one: _Target, member: Member, answer: asyncio.Future[_OperationAnswer], late: str) -> OperationResult:
    value, error = answer.result() if answer.done() else (None, late)
    return OperationResult(
        stage=one.stage, group=member.group, instance=one.instance, rank=one.rank, value=value, error=error
    )
