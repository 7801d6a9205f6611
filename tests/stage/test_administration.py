"""Operations that engines cannot take yet, and those that they never answer."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from stage_runtime.stage.control.administration import Administration
from stage_runtime.stage.ranks.tensor_parallel import Leader, LeaderInbox
from stage_runtime.wire import codec
from stage_runtime.wire.messages import AdminCall, AdminReply, Message


def stage(engine: object, *, ranks: int = 1) -> Any:
    made: Any = SimpleNamespace()
    made.puts = []
    made.input = SimpleNamespace(engine=engine)
    made.plan = SimpleNamespace(tp_size=ranks)
    made.inbox = SimpleNamespace(put=made.puts.append)
    return made


def posted_to(sent: list[tuple[str, Message]]) -> Callable[[str, Message], bool]:
    def post(peer: str, message: Message) -> bool:
        sent.append((peer, message))
        return True

    return post


def test_of_a_stage_that_is_still_loading_every_rank_is_answered_for() -> None:
    sent: list[tuple[str, Message]] = []
    Administration({"s": stage(None, ranks=2)}, posted_to(sent)).ask("cc", AdminCall("call", "s", "sleep"))
    problem = "stage 's' has not loaded its engine yet"
    assert sent == [("cc", AdminReply("call", "s", rank, None, problem)) for rank in (0, 1)]


def nested(levels: int) -> list[Any]:
    made: list[Any] = []
    for _ in range(levels):
        made = [made]
    return made


def test_arguments_that_rank_0_cannot_pass_on_are_refused_for_every_rank_before_an_engine_takes_them() -> None:
    call = AdminCall("call", "s", "sleep", {"name": nested(100)})
    codec.check(call)  # a message carries it, and a step of rank 0 does not
    sent: list[tuple[str, Message]] = []
    ranks = stage(SimpleNamespace(takes_admin=True), ranks=2)
    Administration({"s": ranks}, posted_to(sent)).ask("cc", call)
    assert ranks.puts == []
    replies = [reply for _, reply in sent if isinstance(reply, AdminReply)]
    assert [(reply.rank, reply.value) for reply in replies] == [(0, None), (1, None)]
    assert all("operation.arguments" in str(reply.error) for reply in replies)
    assert all("deeper than 64 levels" in str(reply.error) for reply in replies)


def test_arguments_of_any_depth_that_an_engine_is_given_are_passed_on_to_the_other_ranks() -> None:
    given = 0
    for levels in range(70):
        ranks = stage(SimpleNamespace(takes_admin=True), ranks=2)
        Administration({"s": ranks}, posted_to([])).ask("cc", AdminCall("call", "s", "sleep", {"name": nested(levels)}))
        inbox = LeaderInbox(lambda work, error: None, Leader([]).broadcast)
        for event in ranks.puts:
            inbox.put(event)
            assert inbox.get() is event
            given += 1
    assert given > 50


def test_operations_that_are_never_answered_take_no_memory() -> None:
    sent: list[tuple[str, Message]] = []
    forgetful = stage(SimpleNamespace(takes_admin=True))
    made = Administration({"s": forgetful}, posted_to(sent), kept=3)
    for number in range(10):
        made.ask("cc", AdminCall(f"call {number}", "s", "sleep"))
    for event in forgetful.puts:
        event.reply(event.call_id)
    assert [reply.value for _, reply in sent if isinstance(reply, AdminReply)] == ["call 7", "call 8", "call 9"]
