"""Operations of engines: whom a coordinator asks, and what it makes of each answer and of none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import pytest

from stage_runtime.coordinator.questions.stage_operations import OperationResult, Operations
from stage_runtime.errors import RequestError
from stage_runtime.wire.messages import AdminCall, AdminReply, Message
from stage_runtime.wire.parts import Member

PATIENCE_S = 100.0  # how long a test waits before it fails, on a machine that others use
#: How an instance answers a call: with replies of its ranks.
Answering = Callable[[AdminCall], Sequence[AdminReply]]


def member(name: str, *stages: str, ranks: int = 1) -> Member:
    return Member(
        incarnation=name,
        group=name.rstrip("0123456789"),
        unit="u",
        revision="r",
        endpoint="",
        relays={},
        stages=stages,
        ready=True,
        ranks=ranks,
    )


def silent(call: AdminCall) -> Sequence[AdminReply]:
    return ()


class Fleet:
    """Operations, and instances whose answers a test sets."""

    def __init__(self, members: Sequence[Member], answering: Mapping[str, Answering | None]) -> None:
        """answering: None: the instance cannot be sent to; missing: it says nothing."""
        self.sent: list[tuple[str, AdminCall]] = []
        self._answering = answering
        self._loop = asyncio.get_running_loop()
        by_name = {one.incarnation: one for one in members}
        self.operations = Operations(lambda: by_name, lambda: ["talker", "thinker"], self._send, self._loop)

    def _send(self, instance: str, message: Message) -> bool:
        assert isinstance(message, AdminCall)
        self.sent.append((instance, message))
        answering = self._answering.get(instance, silent)
        if answering is None:
            return False
        for reply in answering(message):
            self._loop.call_soon(self.operations.replied, instance, reply)
        return True


def says(value: object, *, ranks: int = 1) -> Answering:
    return lambda call: [AdminReply(call.call_id, call.stage, rank, [rank, value]) for rank in range(ranks)]


async def test_every_rank_of_every_instance_of_the_stages_is_asked_once_and_answers_for_itself() -> None:
    members = [member("th1", "thinker", ranks=2), member("th2", "thinker", "talker"), member("v1", "vocoder")]
    fleet = Fleet(members, {"th1": says("a", ranks=2), "th2": says("b"), "v1": says("never")})
    found = await fleet.operations.ask("sleep", ["thinker", "talker", "thinker"], {"level": 1}, timeout_s=PATIENCE_S)
    assert [(one.stage, one.instance, one.rank, one.value) for one in found.results] == [
        ("thinker", "th1", 0, [0, "a"]),
        ("thinker", "th1", 1, [1, "a"]),
        ("thinker", "th2", 0, [0, "b"]),
        ("talker", "th2", 0, [0, "b"]),
    ]
    assert (found.operation, found.failed) == ("sleep", 0)
    assert [(instance, call.stage) for instance, call in fleet.sent] == [
        ("th1", "thinker"),
        ("th2", "thinker"),
        ("th2", "talker"),
    ]
    assert {(call.operation, call.arguments["level"]) for _, call in fleet.sent} == {("sleep", 1)}


async def test_who_fails_is_silent_is_gone_or_goes_meanwhile_is_named_and_hides_nobody_s_answer() -> None:
    def dies(call: AdminCall) -> Sequence[AdminReply]:
        fleet._loop.call_soon(fleet.operations.lost, "th4")
        return ()

    members = [member(f"th{number}", "thinker") for number in range(1, 6)]
    fleet = Fleet(
        members,
        {
            "th1": lambda call: [AdminReply(call.call_id, "thinker", 0, None, "no memory")],
            "th3": None,
            "th4": dies,
            "th5": says("awake"),
        },
    )
    found = await fleet.operations.ask("wake", ["thinker"], {}, timeout_s=0.05)
    errors = {one.instance: one.error for one in found.results}
    assert errors == {
        "th1": "no memory",
        "th2": "no answer within 0.05 s",
        "th3": "no answer: the process is gone",
        "th4": "no answer: the process is gone",
        "th5": None,
    }
    assert found.failed == 4
    assert found.results[-1] == OperationResult(stage="thinker", group="th", instance="th5", value=[0, "awake"])


async def test_answers_of_others_late_ones_and_second_ones_change_nothing() -> None:
    def answer(call: AdminCall) -> Sequence[AdminReply]:
        calls.append(call)
        fleet.operations.replied("th2", AdminReply(call.call_id, "thinker", 0, "of another process"))
        return [
            AdminReply(call.call_id, "talker", 0, "of another stage"),
            AdminReply(call.call_id, "thinker", 7, "of another rank"),
            AdminReply(call.call_id, "thinker", 0, "first"),
            AdminReply(call.call_id, "thinker", 0, "second"),
        ]

    calls: list[AdminCall] = []
    fleet = Fleet([member("th1", "thinker")], {"th1": answer})
    found = await fleet.operations.ask("flush", ["thinker"], {}, timeout_s=PATIENCE_S)
    assert [one.value for one in found.results] == ["first"]
    fleet.operations.replied("th1", AdminReply(calls[0].call_id, "thinker", 0, "late"))
    fleet.operations.replied("th1", AdminReply("never asked", "thinker", 0, "late"))


@pytest.mark.parametrize(
    ("stage", "code", "problem"),
    [
        ("thinkre", "not_found", "'thinkre' is not a stage: the pipeline has talker, thinker"),
        ("talker", "unavailable", "stage 'talker' has no instance now"),
    ],
)
async def test_a_stage_that_is_not_there_is_named_and_nobody_is_asked(stage: str, code: str, problem: str) -> None:
    fleet = Fleet([member("th1", "thinker")], {"th1": says("asked")})
    with pytest.raises(RequestError, match=problem) as refused:
        await fleet.operations.ask("sleep", ["thinker", stage], {}, timeout_s=PATIENCE_S)
    assert refused.value.code == code
    assert fleet.sent == []
