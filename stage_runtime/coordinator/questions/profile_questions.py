"""The questions of a coordinator to processes about profiles, and their answers. Each answer also measures a clock.

Here: calls, their answers, what is made of none. Not here: what a run is (`profile_runs`). This runs on the I/O thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol, TypeAlias

import msgspec

from omnipipeline_spec.types.pods import COORDINATOR
from stage_runtime.coordinator.questions.clocks import Clocks
from stage_runtime.errors import ConfigurationError
from stage_runtime.profiler import events
from stage_runtime.profiler.recording.recorder import recorder
from stage_runtime.wire.messages import Message, ProfilerRead, ProfilerReply, ProfilerStart, ProfilerStop, RankQuestion
from stage_runtime.wire.parts import Member

Question: TypeAlias = ProfilerStart | ProfilerStop | ProfilerRead

FAILED: Final = "failed"
ANSWER_S: Final = 120.0  # of a process that lives: torch takes seconds to start a trace, and longer to write one
CLOCK_QUESTIONS: Final = 8  # at the start and at the end of a run
CLOCKS_MOST_S: Final = 1.0


class Participants(Protocol):
    """The processes that take part now, by incarnation."""

    def __call__(self) -> Mapping[str, Member]: ...


class StageState(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of one stage of one process."""

    stage: str
    group: str
    instance: str
    state: str  #: ``started``, ``stopped``, ``not recording``, ``failed``, ``no answer``
    error: str | None = None
    rank: int = 0  #: The rank, among a TP stage's processes.


class AskedProcess(NamedTuple):
    """The process that is asked. Ranks 1.. of a TP stage are not members: rank 0 passes on what they are asked and
    answer.
    """

    instance: str
    rank: int = 0

    @property
    def name(self) -> str:
        """The name that the process has in event files and clocks."""
        return f"{self.instance}.rank{self.rank}" if self.rank else self.instance


class Questions:
    """Sends profiler messages to all processes of the pipeline and collects the replies."""

    def __init__(
        self,
        members: Participants,
        send: Callable[[str, Message], bool],
        loop: asyncio.AbstractEventLoop,
        clocks: Clocks,
    ) -> None:
        """clocks: gets what is measured."""
        self._members = members
        self._send = send
        self._loop = loop
        self._clocks = clocks
        self._calls: dict[
            str, tuple[AskedProcess, int, asyncio.Future[ProfilerReply]]
        ] = {}  #: call -> (asked, sent at, …)
        self._numbers = itertools.count(1)

    async def measure_clocks(self) -> None:
        """Several times: of the measurements the most certain one counts, and a busy process is not always busy."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOCKS_MOST_S):
                for _ in range(CLOCK_QUESTIONS):
                    await self.replies(processes(self._members()), clock_question)

    async def ask_all(self, make: Callable[[str], Question]) -> list[StageState]:
        members = dict(self._members())
        states = []
        for process, reply in (await self.replies(processes(members), make)).items():
            member = members[process.instance]
            if isinstance(reply, ProfilerReply):
                answered = {stage: reply.stages.get(stage, "") for stage in member.stages}
                if reply.error is not None:
                    answered = dict.fromkeys(member.stages, f"failed: {reply.error}")
            else:
                answered = dict.fromkeys(member.stages, reply)
            states += [state_of(stage, member.group, process, answer) for stage, answer in answered.items()]
        return states

    async def replies(
        self, processes: Sequence[AskedProcess], make: Callable[[str], Question]
    ) -> dict[AskedProcess, ProfilerReply | str]:
        """Each process's answer, or why it has none."""
        answers = await asyncio.gather(*(self.call(process, make) for process in processes))
        return dict(zip(processes, answers, strict=True))

    async def call(self, process: AskedProcess, make: Callable[[str], Question]) -> ProfilerReply | str:
        call_id = f"profile-{next(self._numbers)}"
        future: asyncio.Future[ProfilerReply] = self._loop.create_future()
        self._calls[call_id] = (process, time.time_ns(), future)
        question = make(call_id)
        try:
            if not self._send(
                process.instance, RankQuestion(process.rank, process.name, question) if process.rank else question
            ):
                return "no answer: the process is gone"
            async with asyncio.timeout(ANSWER_S):
                return await future
        except ConfigurationError as error:
            return f"no answer: {error}"
        except TimeoutError:
            return f"no answer within {ANSWER_S:g} s"
        finally:
            self._calls.pop(call_id, None)

    def replied(self, sender: str, message: ProfilerReply) -> None:
        """A process has answered."""
        known = self._calls.get(message.call_id)
        if known is None or known[0].instance != sender:
            return
        process, sent_ns, future = self._calls.pop(message.call_id)
        self._note_clock(process.name, sent_ns, message)
        if not future.done():
            future.set_result(message)

    def lost(self, instance: str) -> None:
        """A process is gone: end the waits for its answers."""
        for call_id, (process, _, future) in list(self._calls.items()):
            if process.instance == instance:
                del self._calls[call_id]
                if not future.done():
                    future.set_exception(ConfigurationError("the process is gone"))

    def _note_clock(self, name: str, sent_ns: int, reply: ProfilerReply) -> None:
        """How far the process's clock is from ours, for records of requests and for readers of its events."""
        distance = self._clocks.measured(
            name,
            sent_ns=sent_ns,
            there_received_ns=reply.received_ns,
            there_sent_ns=reply.sent_ns,
            received_ns=time.time_ns(),
        )
        if distance is None:
            return
        facts = {
            "incarnation": name,
            "offset_ns": distance.offset_ns,
            "uncertainty_ns": distance.uncertainty_ns,
            "reference": COORDINATOR,
        }
        recorder.emit(events.CLOCK_OFFSET, "", COORDINATOR, facts)


def processes(members: Mapping[str, Member]) -> list[AskedProcess]:
    """All ranks of all members."""
    return [AskedProcess(instance, rank) for instance, member in members.items() for rank in range(member.ranks)]


def state_of(stage: str, group: str, process: AskedProcess, answer: str) -> StageState:
    word, _, why = answer.partition(": ")
    state, error = word, None
    if word == FAILED:
        error = why
    elif word.startswith("no answer"):
        state, error = "no answer", why or word
    return StageState(stage=stage, group=group, instance=process.instance, state=state, error=error, rank=process.rank)


def clock_question(call_id: str) -> Question:
    """Any question does: each answer carries the process's time."""
    return ProfilerRead(call_id, "")
