"""One function for several requests at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

import stage_runtime as omni
from stage_runtime.engines.making.loading import as_engine
from tests.engines.engine_kit import PATIENCE_S, Rig, running

Payload = omni.StagePayload


class Doubling:
    """Doubles; holds its first batch until `go` is set, so that the next requests gather in one batch."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []
        self.go = threading.Event()

    def __call__(self, payloads: list[Payload]) -> list[Any]:
        self.batches.append([payload.data for payload in payloads])
        assert self.go.wait(PATIENCE_S)
        return [payload.data * 2 for payload in payloads]


def test_requests_that_wait_go_together_up_to_the_limit() -> None:
    fn = Doubling()
    with running(as_engine(omni.Batched(fn, max_batch=3, max_wait_s=0.0))) as rig:
        rig.start("r0", 0)
        while not fn.batches:
            pass
        for index in range(1, 6):
            rig.start(f"r{index}", index)
        fn.go.set()
        assert sorted(rig.outbox.several(6)) == [(f"r{index}", "done", index * 2) for index in range(6)]
    assert [len(batch) for batch in fn.batches] == [1, 3, 2]


def test_the_first_request_waits_for_company_only_so_long() -> None:
    with running(as_engine(omni.Batched(lambda payloads: [len(payloads)], max_batch=8, max_wait_s=0.01))) as rig:
        rig.start("r1")
        assert rig.outbox.next() == ("r1", "done", 1)


def test_a_full_batch_does_not_wait() -> None:
    with running(as_engine(omni.Batched(lambda payloads: [0] * len(payloads), max_batch=2, max_wait_s=1000))) as rig:
        rig.start("r1")
        rig.start("r2")
        assert sorted(rig.outbox.several(2)) == [("r1", "done", 0), ("r2", "done", 0)]


def batch_of(fn: Any, data: list[Any]) -> list[tuple[Any, ...]]:
    """The outputs of one batch."""
    with running(as_engine(omni.Batched(fn, max_batch=len(data), max_wait_s=1000))) as rig:
        for index, item in enumerate(data):
            rig.start(f"r{index}", item)
        return sorted(rig.outbox.several(len(data)))


@pytest.mark.parametrize(
    ("returned", "got"),
    [([], "returned 0 results"), ([1], "returned 1 results"), ((1, 2), "returned tuple"), (None, "NoneType")],
)
def test_a_wrong_number_of_results_fails_the_batch(returned: Any, got: str) -> None:
    outputs = batch_of(lambda payloads: returned, [1, 2])
    assert [one[:2] for one in outputs] == [("r0", "failed"), ("r1", "failed")]
    assert all(got in one[2] and "a batch of 2" in one[2] for one in outputs)


def test_an_exception_in_one_slot_fails_that_request_alone() -> None:
    outputs = batch_of(lambda payloads: ["ok", ValueError("bad voice"), "fine"], [1, 2, 3])
    assert outputs == [("r0", "done", "ok"), ("r1", "failed", "ValueError: bad voice"), ("r2", "done", "fine")]


def test_a_chunk_in_one_slot_fails_that_request_alone() -> None:
    outputs = batch_of(lambda payloads: [omni.Chunk(1), omni.Result("fine")], [1, 2])
    assert outputs[0][:2] == ("r0", "failed")
    assert outputs[1] == ("r1", "done", "fine")


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit("no")])
def test_a_batch_that_raises_fails_and_the_next_one_is_served(error: BaseException) -> None:
    def fn(payloads: list[Payload]) -> list[Any]:
        if payloads[0].data == "bad":
            raise error
        return [payload.data for payload in payloads]

    with running(as_engine(omni.Batched(fn, max_batch=1))) as rig:
        rig.start("r1", "bad")
        rig.start("r2", "good")
        assert rig.outbox.several(2) == [("r1", "failed", f"{type(error).__name__}: no"), ("r2", "done", "good")]


def test_a_request_aborted_while_its_batch_gathers_is_not_computed() -> None:
    seen: list[Any] = []

    def fn(payloads: list[Payload]) -> list[Any]:
        seen.extend(payload.data for payload in payloads)
        return [None] * len(payloads)

    with running(as_engine(omni.Batched(fn, max_batch=2, max_wait_s=1000))) as rig:
        rig.start("r1", "first")
        wait_until_taken(rig, 1)
        rig.abort("r1")
        rig.start("r2", "second")
        assert rig.outbox.next() == ("r2", "done", None)
    assert seen == ["second"]


def wait_until_taken(rig: Rig, count: int) -> None:
    while rig.inbox.taken < count:
        pass


def test_what_waits_when_the_inbox_closes_is_still_computed() -> None:
    rig = Rig(as_engine(omni.Batched(lambda payloads: [payload.data for payload in payloads], max_batch=2)))
    for index in range(5):
        rig.start(f"r{index}", index)
    rig.inbox.close()
    rig.thread.start()
    rig.thread.join(PATIENCE_S)
    assert not rig.thread.is_alive()
    assert sorted(rig.outbox.several(5)) == [(f"r{index}", "done", index) for index in range(5)]


class LyingLength(list[Any]):
    def __len__(self) -> int:
        return 1


class Unreadable(list[Any]):
    def __iter__(self) -> Iterator[Any]:
        raise SystemExit("not to be read")


@pytest.mark.parametrize(
    ("results", "failure"),
    [
        (
            LyingLength(),
            "TypeError: returned 0 results for a batch of 1; expected a list with one per payload, in order",
        ),
        (
            LyingLength([1, 2]),
            "TypeError: returned 2 results for a batch of 1; expected a list with one per payload, in order",
        ),
        (Unreadable([1]), "SystemExit: not to be read"),
    ],
)
def test_a_list_that_is_not_what_it_says_fails_its_batch_alone(results: list[Any], failure: str) -> None:
    def fn(payloads: list[Payload]) -> list[Any]:
        return results if payloads[0].data == "bad" else [payload.data for payload in payloads]

    with running(as_engine(omni.Batched(fn, max_batch=1))) as rig:
        rig.start("r1", "bad")
        rig.start("r2", "good")
        assert rig.outbox.several(2) == [("r1", "failed", failure), ("r2", "done", "good")]


def test_a_batch_function_that_gives_a_coroutine_fails_with_the_reason() -> None:
    async def results() -> list[Any]:
        return [1]

    made: Any = omni
    with running(as_engine(made.Batched(lambda payloads: results()))) as rig:
        rig.start("r1")
        assert "returned a coroutine; the function of a batch is a plain one, without async" in rig.outbox.next()[2]


def test_an_author_s_numbers_are_read_after_each_batch_and_odd_ones_end_no_stage() -> None:
    answers: list[Any] = [{"cache_hits_total": 1}, {"cache_hits_total": 2.5}, {"cache_hits_total": "many"}, None]
    with running(as_engine(omni.Batched(lambda given: [0] * len(given), gauges=lambda: answers.pop(0)))) as rig:
        for index in range(4):
            rig.start(f"r{index}")
            assert rig.outbox.next() == (f"r{index}", "done", 0)
    assert rig.inbox.gauges == {"cache_hits_total": 2.5}

    assert len(answers) == 1, "it was asked no more"


def test_gauges_of_other_names_than_a_caches_reach_no_beat() -> None:
    """A name that no message can carry would end the process with its next beat; ``kv_blocks`` means something."""
    numbers = {"cache_bytes": 3, "half \udc80": 1, "kv_blocks": 5, "adapters": 1}
    with running(as_engine(omni.Batched(lambda given: [0] * len(given), gauges=lambda: numbers))) as rig:
        rig.start("one")
        assert rig.outbox.next() == ("one", "done", 0)
    assert rig.inbox.gauges == {"cache_bytes": 3.0}
