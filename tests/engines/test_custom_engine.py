"""An author's own loop: ``run(inbox, outbox, stop)``."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import Any

import pytest

import stage_runtime as omni
from stage_runtime.engines import events
from stage_runtime.engines.making.loading import as_engine
from stage_runtime.errors import HookError, ValueRefused
from tests.engines.engine_kit import PATIENCE_S, Rig, gate, running


class Loop:
    """Hands each event to ``step``."""

    def __init__(self, step: Callable[[Any, Any], None]) -> None:
        self._step = step

    def run(self, inbox: Any, outbox: Any, stop: Event) -> None:
        for event in inbox:
            self._step(event, outbox)


def echo(event: Any, outbox: Any) -> None:
    match event:
        case events.Start():
            outbox.put(events.Emit(event.request_id, omni.Chunk("working")))
            outbox.put(events.Done(event.request_id, event.payload.data))
        case events.ChunkIn():
            outbox.put(events.Emit(event.request_id, omni.Chunk(event.chunk.data)))


def test_a_loop_takes_starts_and_chunks_and_says_emits_and_dones() -> None:
    with running(as_engine(Loop(echo))) as rig:
        rig.chunk("r1", 7)
        rig.start("r1", "x")
        assert rig.outbox.several(3) == [("r1", "chunk", 7), ("r1", "chunk", "working"), ("r1", "done", "x")]
        assert rig.outbox.taken == [("r1", "a")]
        assert rig.outbox.began_ids == ["r1"]


@pytest.mark.parametrize(("error", "message"), [(ValueError("no"), "ValueError: no"), ("no", "RuntimeError: no")])
def test_a_loop_may_fail_a_request_with_an_exception_or_words(error: Any, message: str) -> None:
    with running(as_engine(Loop(lambda event, outbox: outbox.put(events.Failed(event.request_id, error))))) as rig:
        rig.start("r1")
        assert rig.outbox.next() == ("r1", "failed", message)


def test_what_is_said_of_a_request_that_is_over_or_unknown_goes_nowhere() -> None:
    def step(event: Any, outbox: Any) -> None:
        outbox.put(events.Done("ghost"))
        outbox.put(events.Done(event.request_id, 1))
        outbox.put(events.Done(event.request_id, 2))
        outbox.put(events.Emit(event.request_id, omni.Chunk("late")))

    with running(as_engine(Loop(step))) as rig:
        rig.start("r1")
        assert rig.outbox.next() == ("r1", "done", 1)
    assert rig.outbox.outputs.empty()


@pytest.mark.parametrize("named", [None, "r1", events.Done(["r1"]), events.Done(1)])  # type: ignore[arg-type]
def test_what_names_no_request_reaches_none(named: Any) -> None:
    def step(event: Any, outbox: Any) -> None:
        try:
            outbox.put(named)
            outcome = "discarded"
        except TypeError as error:
            outcome = str(error)
        outbox.put(events.Done(event.request_id, outcome))

    words = (
        "discarded"
        if isinstance(named, events.Done)
        else f"outbox.put takes Emit, Done or Failed, not {type(named).__name__}"
    )
    with running(as_engine(Loop(step))) as rig:
        rig.start("r1")
        assert rig.outbox.next() == ("r1", "done", words)


def test_an_event_that_is_no_answer_fails_its_request_and_not_the_loop() -> None:
    aborted: list[str] = []

    def step(event: Any, outbox: Any) -> None:
        if isinstance(event, events.Abort):
            aborted.append(event.request_id)
        else:
            outbox.put(event)
            outbox.put(events.Done(event.request_id, "late"))

    with running(as_engine(Loop(step))) as rig:
        for request_id in ("r1", "r2"):
            rig.start(request_id)
            failed = (request_id, "failed", "TypeError: outbox.put takes Emit, Done or Failed, not Start")
            assert rig.outbox.next() == failed
    assert rig.outbox.outputs.empty()
    assert aborted == ["r1", "r2"]


def test_a_chunk_that_cannot_be_sent_fails_its_request_and_not_the_loop() -> None:
    with running(as_engine(Loop(echo))) as rig:
        rig.outbox.refuses = HookError("talker", "chunk", "a chunk to 'ghost'")
        rig.start("r1")
        assert rig.outbox.next() == ("r1", "failed", "HookError: talker.chunk: a chunk to 'ghost'")
        rig.outbox.refuses = None
        rig.start("r2", "x")
        assert rig.outbox.several(2) == [("r2", "chunk", "working"), ("r2", "done", "x")]


def test_a_loop_gets_the_abort_of_a_request_whose_chunk_cannot_be_sent() -> None:
    """It keeps the state of its requests until it has ended them or is sent an Abort."""
    states: dict[str, Any] = {}

    def step(event: Any, outbox: Any) -> None:
        match event:
            case events.Start():
                states[event.request_id] = event.payload.data
                outbox.put(events.Emit(event.request_id, omni.Chunk(object())))
                outbox.put(events.Emit(event.request_id, omni.Chunk("late")))
            case events.Abort():
                del states[event.request_id]

    with running(as_engine(Loop(step))) as rig:
        rig.outbox.refuses = ValueRefused("chunk.data", "object of type object")
        for _ in range(2):  # a client that uses its id again
            rig.start("r1")
            assert rig.outbox.next()[:2] == ("r1", "failed")
            del rig.works["r1"]
    assert states == {}
    assert rig.outbox.outputs.empty()


def test_a_loop_is_notified_when_a_consumer_lags() -> None:
    seen: list[Any] = []

    def step(event: Any, outbox: Any) -> None:
        seen.append(outbox.put(events.Emit(event.request_id, omni.Chunk(1))))
        outbox.put(events.Done(event.request_id))

    with running(as_engine(Loop(step))) as rig:
        closed = gate()
        rig.outbox.gates.append(closed)
        rig.start("r1")
        rig.start("r2")
        rig.outbox.several(4)
    assert seen == [closed, None]


def test_a_loop_gets_an_abort() -> None:
    events_seen: list[str] = []

    def step(event: Any, outbox: Any) -> None:
        if isinstance(event, events.Abort):
            events_seen.append(event.request_id)
            outbox.put(events.Done(event.request_id, "too late"))
            outbox.put(events.Done("r2", "next"))

    with running(as_engine(Loop(step))) as rig:
        rig.start("r2")
        rig.start("r1")
        while rig.inbox.taken < 2:
            pass
        rig.abort("r1")
        assert rig.outbox.next() == ("r2", "done", "next")
    assert events_seen == ["r1"]


def test_two_live_requests_of_one_id_have_ids_of_their_own_and_each_gets_its_own_answer() -> None:
    """Two coordinators may carry one client's id at the same time."""
    held: dict[str, Any] = {}

    def step(event: Any, outbox: Any) -> None:
        match event:
            case events.Start():
                held[event.request_id] = (event.payload.request.id, event.payload.data)
            case events.ChunkIn():
                held[event.request_id] = (*held[event.request_id], event.chunk.data)
        if sum(len(one) for one in held.values()) == 6:
            for request_id, (_, data, chunk) in reversed(held.items()):
                outbox.put(events.Done(request_id, [data, chunk]))

    with running(as_engine(Loop(step))) as rig:
        rig.start("r1", "ours")
        first = rig.works.pop("r1")
        rig.start("r1", "theirs")
        second = rig.works["r1"]
        rig.chunk("r1", "their chunk")
        rig.works["r1"] = first
        rig.chunk("r1", "our chunk")
        assert rig.outbox.several(2) == [
            ("r1", "done", ["theirs", "their chunk"]),
            ("r1", "done", ["ours", "our chunk"]),
        ]
        assert first.over and second.over
    assert list(held) == ["r1", "r1~2"]
    assert {one[0] for one in held.values()} == {"r1"}, "the request itself says the client's id"


def test_the_abort_of_one_of_two_requests_of_one_id_ends_that_one_alone() -> None:
    events_seen: list[str] = []

    def step(event: Any, outbox: Any) -> None:
        if isinstance(event, events.Abort):
            events_seen.append(event.request_id)
            outbox.put(events.Done("r1", "of the first"))
            outbox.put(events.Done("r1~2", "of the second"))

    with running(as_engine(Loop(step))) as rig:
        rig.start("r1")
        first = rig.works.pop("r1")
        rig.start("r1")
        rig.works["r1"] = first
        while rig.inbox.taken < 2:
            pass
        rig.abort("r1")
        assert rig.outbox.next() == ("r1", "done", "of the second")
    assert events_seen == ["r1"]


def test_what_a_loop_still_says_of_an_aborted_request_reaches_no_later_one_of_its_id() -> None:
    def step(event: Any, outbox: Any) -> None:
        if isinstance(event, events.Start) and event.payload.data == "second":
            outbox.put(events.Done("r1", "computed for the first"))  # a loop that has not looked for aborts yet
            outbox.put(events.Done(event.request_id, "computed for the second"))

    with running(as_engine(Loop(step))) as rig:
        rig.start("r1", "first")
        while rig.inbox.taken < 1:
            pass
        rig.abort("r1")
        del rig.works["r1"]
        rig.start("r1", "second")
        assert rig.outbox.next() == ("r1", "done", "computed for the second")


def test_an_id_is_used_again_once_the_loop_has_ended_its_request() -> None:
    seen: list[str] = []

    def step(event: Any, outbox: Any) -> None:
        seen.append(event.request_id)
        outbox.put(events.Done(event.request_id))

    with running(as_engine(Loop(step))) as rig:
        for _ in range(3):
            rig.start("r1")
            rig.outbox.next()
            del rig.works["r1"]
    assert seen == ["r1"] * 3


def test_a_loop_may_poll() -> None:
    found_nothing = Event()

    class Poller:
        def run(self, inbox: Any, outbox: Any, stop: Event) -> None:
            assert inbox.get_nowait() is None
            assert inbox.get(timeout=0.001) is None
            found_nothing.set()
            outbox.put(events.Done(inbox.get(timeout=PATIENCE_S).request_id, "polled"))
            assert stop.wait(PATIENCE_S)

    with running(as_engine(Poller())) as rig:
        assert found_nothing.wait(PATIENCE_S)
        rig.start("r1")
        assert rig.outbox.next() == ("r1", "done", "polled")


def test_a_loop_that_returns_before_it_is_stopped_has_crashed() -> None:
    class Ends:
        def run(self, inbox: Any, outbox: Any, stop: Event) -> None: ...

    rig = Rig(as_engine(Ends()))
    rig.thread.start()
    rig.thread.join(PATIENCE_S)
    assert "before it was asked to stop" in str(rig.crash)


def test_a_loop_that_raises_ends_with_its_error() -> None:
    def step(event: Any, outbox: Any) -> None:
        raise ValueError("broken loop")

    rig = Rig(as_engine(Loop(step)))
    rig.thread.start()
    rig.start("r1")
    rig.thread.join(PATIENCE_S)
    assert isinstance(rig.crash, ValueError)


def test_an_admin_operation_is_answered() -> None:
    def step(event: Any, outbox: Any) -> None:
        assert isinstance(event, events.Admin)
        event.reply({event.operation: event.arguments})

    replies: list[Any] = []
    with running(as_engine(Loop(step))) as rig:
        rig.inbox.put(events.Admin("call", "flush", {"all": True}, replies.append))
    assert replies == [{"flush": {"all": True}}]
