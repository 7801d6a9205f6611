"""A stage whose engines are processes of their own: its answers, and what becomes of requests when engines end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import psutil
import pytest

import stage_runtime as omni
from stage_runtime.engines import events
from stage_runtime.engines.autoregressive.clients.async_mp import AsyncMPClient
from stage_runtime.engines.autoregressive.clients.data_parallel import DPLBAsyncMPClient
from stage_runtime.engines.autoregressive.data_parallel.dp_coordinator import DPCoordinator
from stage_runtime.engines.autoregressive.process.launching import EngineLaunch
from stage_runtime.engines.autoregressive.stage import factory
from stage_runtime.engines.autoregressive.stage.process_engine import ProcessEngine
from stage_runtime.errors import EngineDeadError
from stage_runtime.metrics import catalog
from tests.engines.counting_core import LAUNCHED
from tests.engines.engine_kit import Rig, running
from tests.engines.generation_kit import alone, tiny_model, tiny_tokenizer

PATIENCE_S = 100.0  # how long a test waits before it fails, on a machine that others use
SLOW = 200
LAUNCH = EngineLaunch(factory=LAUNCHED, kwargs={"step_s": 0.001, "slow": SLOW}, frozen_after_s=5.0)


def prompt(payload: omni.StagePayload) -> omni.Prompt:
    data = payload.data
    params = {"max_tokens": data.get("count", 3), "temperature": 0}
    where = {name: data[name] for name in ("pin", "data_parallel_rank") if name in data}
    return omni.Prompt(tokens=data["tokens"], params=params, **where)


def deliver(payload: omni.StagePayload, generation: omni.Generation) -> Iterator[omni.Chunk | omni.Result]:
    if payload.data.get("raises") == generation.completion_tokens:
        raise ValueError("cannot say that")
    if generation.finish is not None:
        yield omni.Result([generation.finish, generation.completion_tokens])


def engine(client: AsyncMPClient) -> ProcessEngine:
    spec = omni.Autoregressive(model="", prompt=prompt, deliver=deliver, params={"max_tokens": 100_000})
    return ProcessEngine(spec, client, tiny_tokenizer(), None)


@contextmanager
def replaced_by(client: DPLBAsyncMPClient, launch: EngineLaunch) -> Iterator[None]:
    """Engines that are started meanwhile are ``launch``'s."""
    usual, client.launch = client.launch, launch
    try:
        yield
    finally:
        client.launch = usual


@contextmanager
def one(launch: EngineLaunch = LAUNCH) -> Iterator[tuple[Rig, AsyncMPClient]]:
    client = AsyncMPClient(launch)
    with running(engine(client)) as rig:
        yield rig, client


@contextmanager
def two(launch: EngineLaunch = LAUNCH) -> Iterator[tuple[Rig, DPLBAsyncMPClient]]:
    client = DPLBAsyncMPClient(launch, DPCoordinator(2), elastic=True)
    with running(engine(client)) as rig:
        yield rig, client


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def answers(rig: Rig, count: int) -> dict[str, tuple[Any, ...]]:
    return {output[0]: output[1:] for output in rig.outbox.several(count)}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_an_engine_that_cannot_be_replaced_is_tried_again_after_a_rest(caplog: pytest.LogCaptureFixture) -> None:
    client = DPLBAsyncMPClient(LAUNCH, DPCoordinator(2), elastic=True)
    stage = engine(client)
    with running(stage) as rig:
        with replaced_by(client, msgspec.structs.replace(LAUNCH, factory="nowhere:nothing")):
            os.kill(client.pids_by_rank()[1], signal.SIGKILL)
            until(lambda: client.lost == {1})
            rig.start("a", {"tokens": [7]})
            until(lambda: "tries again in 5 s" in caplog.text and not stage._busy)
            assert set(answers(rig, 1)) == {"a"}
            for name in "bc":
                rig.start(name, {"tokens": [7]})
                assert set(answers(rig, 1)) == {name}
            assert (stage._busy, caplog.text.count("could not be replaced")) == (False, 1)
        count = 0
        while client.lost:
            count += 1
            rig.start(f"again {count}", {"tokens": [7]})
            assert rig.outbox.several(1)[0][1] == "done"
        assert len(client.pids) == 2


@pytest.mark.nightly  # each time: test_engine_storms.py has one engine, e2e/test_engines_apart.py two
@pytest.mark.parametrize("where", [{"data_parallel_size": 2}, {"own_process": True}])
def test_engines_in_processes_give_the_tokens_that_transformers_gives_alone(
    checkpoint: Path, where: dict[str, Any]
) -> None:
    def tokens(payload: omni.StagePayload, generation: omni.Generation) -> Iterator[omni.Chunk | omni.Result]:
        if generation.tokens:
            yield omni.Chunk(list(generation.tokens))
        if generation.finish is not None:
            yield omni.Result(generation.prompt_tokens)

    def factory(**settings: Any) -> omni.Autoregressive:
        params = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
        return omni.Autoregressive(
            model=str(checkpoint), deliver=tokens, params=params, max_chunk=5, block_size=4, threads=1, **where
        )

    texts = ["a", "the quick brown fox", "the quick brown cat", "zzz" * 9]
    found = omni.testing.run_stage(factory, texts, threads=1)
    for text, one in zip(texts, found, strict=True):
        assert [token for piece in one.data for token in piece] == alone(
            "llama", tiny_tokenizer()(text)["input_ids"], 12
        )
        assert one.result == len(text)


def test_an_idle_engine_s_numbers_are_reported_after_its_last_request_is_aborted() -> None:
    with one(msgspec.structs.replace(LAUNCH, kwargs={"step_s": 0.2})) as (rig, _client):
        rig.start("a", {"tokens": [7], "count": 400})
        until(lambda: rig.inbox.gauges.get("running") == 1)
        rig.abort("a")
        until(lambda: (rig.inbox.gauges["running"], rig.inbox.gauges["kv_blocks_used"]) == (0, 0))


def test_what_is_wrong_with_a_request_fails_it_alone_and_the_engines_numbers_are_reported() -> None:
    with one() as (rig, _client):
        rig.start("a", {"tokens": [1] * 600})
        rig.start("b", {"tokens": [9999]})
        rig.start("c", {"tokens": [7], "count": -1})
        rig.start("d", {"tokens": [7], "raises": 2})
        rig.start("e", {"tokens": [7]})
        found = answers(rig, 5)
        until(lambda: rig.inbox.gauges.get("steps_total", 0) >= 3)
        assert set(rig.inbox.gauges) == set(catalog.ENGINE)
        assert rig.outbox.began_ids == ["d", "e"]
    assert {name: output[0] for name, output in found.items()} == {**dict.fromkeys("abcd", "failed"), "e": "done"}
    assert "your messages resulted in 600 tokens" in found["a"][1]
    assert found["e"] == ("done", ["length", 3])


def test_prompts_with_one_pin_go_to_one_engine_and_a_rank_names_its_engine() -> None:
    with two() as (rig, client):
        chosen: list[int] = []
        for index, where in enumerate([{"pin": "a"}] * 4 + [{"data_parallel_rank": rank} for rank in (0, 1, 1)]):
            name = str(index)
            rig.start(name, {"tokens": [1], "count": 100_000, **where})
            until(lambda name=name: name in client.reqs_in_flight)  # type: ignore[misc]
            chosen.append(client.reqs_in_flight[name])
            rig.abort(name)
        rig.start("none", {"tokens": [1], "data_parallel_rank": 7})
        assert answers(rig, 1)["none"] == ("failed", "InvalidRequest: data_parallel_rank is 7; engines: 0, 1")
    assert len(set(chosen[:4])) == 1
    assert chosen[4:] == [0, 1, 1]


@pytest.mark.long
def test_a_prompt_goes_to_the_engine_that_has_its_beginning_unless_that_one_is_busy_or_was_replaced() -> None:
    document = [token % 90 for token in range(320)]
    lasting = msgspec.structs.replace(LAUNCH, kwargs={"step_s": 0.2})  # no answer ends before it is aborted
    with two(lasting) as (rig, client):

        def asked(name: str, tokens: list[int], **where: Any) -> int:
            rig.start(name, {"tokens": tokens, "count": 100_000, **where})
            until(lambda: name in client.reqs_in_flight)
            chosen = client.reqs_in_flight[name]
            until(lambda: sum(map(sum, client.counts)) == sum(running for _, running in client.counts))
            until(lambda: sum(running for _, running in client.counts) == len(client.reqs_in_flight))
            return chosen

        def rested(*names: str) -> None:
            for name in names:
                rig.abort(name)
            until(lambda: client.counts == [(0, 0), (0, 0)])

        def cached(rank: int) -> bool:
            return rank in client.stats and client.stats[rank].kv_blocks_cached > 0

        assert asked("first", document, data_parallel_rank=1) == 1
        until(lambda: cached(1))
        rested("first")
        assert asked("other", document[::-1]) == 0  # it begins otherwise: idle engines are taken from the first one on
        rested("other")
        assert asked("second", [*document, 7]) == 1
        until(lambda: client.stats[1].prefix_hit_tokens == 320)
        for index in range(4):
            asked(f"busy{index}", [index], data_parallel_rank=1)
        assert client.counts == [(0, 0), (0, 5)]
        assert asked("third", [*document, 8]) == 0
        rested("second", "third", *(f"busy{index}" for index in range(4)))
        dead = client._engines[0].pid
        os.kill(dead, signal.SIGKILL)
        until(lambda: dead not in client.pids and len(client.pids) == 2 and not client.lost)
        assert asked("another", [5] * 40, data_parallel_rank=0) == 0
        until(lambda: cached(0))  # but not the document
        rested("another")
        assert asked("fourth", [*document, 9]) == 1


def test_an_aborted_request_is_computed_no_further() -> None:
    with one(msgspec.structs.replace(LAUNCH, kwargs={"step_s": 0.5})) as (rig, client):
        rig.start("a", {"tokens": [1], "count": 400})  # it would be computed for longer than the test waits
        until(lambda: bool(client.reqs_in_flight))
        rig.abort("a")
        until(lambda: not client.reqs_in_flight)
        rig.start("b", {"tokens": [7]})
        assert answers(rig, 1) == {"b": ("done", ["length", 3])}
        until(lambda: client.stats[0].running == 0)


def test_a_stage_waits_at_a_gate_while_all_its_requests_wait_for_rows_and_not_while_one_is_computed() -> None:
    def begin(payload: omni.StagePayload) -> omni.Prompt:
        return omni.Prompt(tokens=[3], params={"max_tokens": 3})

    spec = omni.Autoregressive(model="", prompt=begin, stream=lambda chunk: chunk.data)
    client = AsyncMPClient(LAUNCH)
    stage = ProcessEngine(spec, client, tiny_tokenizer(), None, ("a",))
    with pytest.raises(EngineDeadError), running(stage) as rig:
        parking = rig.inbox.parking
        rig.chunk("held", [4])
        until(lambda: parking.at_gates == 1)
        assert list(client.reqs_in_flight) == ["held"]
        rig.chunk("computed", [SLOW], index=0)
        rig.done("computed")
        until(lambda: parking.at_gates == 0 and client.stats[0].running == 1)
        left = parking.left
        until(lambda: client.stats[0].held == 1)
        assert (parking.at_gates, parking.left) == (0, left)
        os.kill(client.pids[0], signal.SIGKILL)
        rig.thread.join(PATIENCE_S)


@pytest.mark.parametrize(("number", "reason"), [(signal.SIGKILL, "has ended"), (signal.SIGSTOP, "no sign of life")])
def test_a_stage_crashes_when_its_only_engine_is_killed_or_frozen(number: int, reason: str) -> None:
    with pytest.raises(EngineDeadError, match=reason), one() as (rig, client):
        rig.start("a", {"tokens": [SLOW]})
        until(lambda: bool(client.reqs_in_flight))
        os.kill(client.pids[0], number)
        rig.thread.join(PATIENCE_S)
        assert not rig.thread.is_alive()
    assert client.pids == []


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_one_of_two_engines_that_ends_takes_its_requests_alone_and_is_replaced(number: int) -> None:
    with two() as (rig, client):
        rig.start("a", {"tokens": [SLOW]})
        rig.start("b", {"tokens": [SLOW]})
        until(lambda: set(client.reqs_in_flight.values()) == {0, 1})
        dead, alive = client.reqs_in_flight["a"], client.reqs_in_flight["b"]
        pids = client.pids
        os.kill(client._engines[dead].pid, number)
        name, *output = rig.outbox.next()
        assert (name, output[0]) == ("a", "failed")
        assert output[1].startswith(f"RequestError: engine {dead} ")
        until(lambda: len(client.pids) == 2 and not client.lost)
        assert client.reqs_in_flight == {"b": alive}
        rig.start("c", {"tokens": [7]})
        assert answers(rig, 1) == {"c": ("done", ["length", 3])}
        os.kill(client._engines[alive].pid, signal.SIGKILL)  # its step has no end
        assert rig.outbox.next()[:2] == ("b", "failed")
        until(lambda: len(client.pids) == 2 and not client.lost)
        assert not set(pids) & set(client.pids)


def test_a_stage_crashes_when_the_coordinator_of_its_engines_is_killed() -> None:
    with pytest.raises(EngineDeadError, match="coordinator"), two() as (rig, client):
        rig.start("a", {"tokens": [SLOW]})
        until(lambda: bool(client.reqs_in_flight))
        assert client._coordinator is not None
        os.kill(client._coordinator.pid, signal.SIGKILL)
        rig.thread.join(PATIENCE_S)
        assert not rig.thread.is_alive()
    assert client.pids == []


@pytest.mark.parametrize(
    ("processors", "engines", "expected"),
    [
        ([0, 1], 2, ((0,), (1,))),
        ([4, 5, 6, 7, 8], 2, ((4, 5), (6, 7))),
        ([3], 2, ((3,), (3,))),
    ],
)
def test_processors_are_divided_among_engines(
    processors: list[int], engines: int, expected: tuple[tuple[int, ...], ...]
) -> None:
    assert factory.divided(processors, engines) == expected


def test_an_operation_is_carried_out_by_every_engine_and_utilities_of_clients_are_none() -> None:
    replies: SimpleQueue[Any] = SimpleQueue()
    with two() as (rig, _client):
        for rank in (0, 1):
            rig.start(f"r{rank}", {"tokens": [7] * 33, "data_parallel_rank": rank})
        answers(rig, 2)
        found = []
        for operation in ("reset_prefix_cache", "reset_prefix_cache", "echo"):
            rig.inbox.put(events.Admin("call", operation, {}, replies.put))
            found.append(replies.get(timeout=PATIENCE_S))
    assert found[:2] == [4, 0]  # two blocks of each engine
    assert "there is reset_prefix_cache" in str(found[2])


def scaled(rig: Rig, engines: Any, **others: Any) -> Any:
    replies: SimpleQueue[Any] = SimpleQueue()
    rig.inbox.put(events.Admin("call", "scale_engines", {"engines": engines, **others}, replies.put))
    return replies.get(timeout=PATIENCE_S)


def test_an_operation_adds_and_removes_engines_while_they_answer() -> None:
    with two() as (rig, client):
        rig.start("during", {"tokens": [1], "params": {"max_tokens": 300}})
        assert scaled(rig, 3) == 3 and len(client.pids) == 3
        rig.start("on the third", {"tokens": [1], "data_parallel_rank": 2})
        assert scaled(rig, 1) == 1 and len(client.pids) == 1
        answers(rig, 2)
        for wrong in (0, 65, True, "2", None):
            assert "from 1 to 64" in str(scaled(rig, wrong))
        assert "from 1 to 64" in str(scaled(rig, 2, drain=0))
    with one() as (rig, _client):
        assert "data_parallel_size is 2 or more" in str(scaled(rig, 2))


def test_the_only_engine_that_computes_is_not_removed(caplog: pytest.LogCaptureFixture) -> None:
    client = DPLBAsyncMPClient(LAUNCH, DPCoordinator(2), elastic=True)
    stage = engine(client)
    with running(stage) as rig:
        with replaced_by(client, msgspec.structs.replace(LAUNCH, factory="nowhere:nothing")):
            os.kill(client.pids_by_rank()[0], signal.SIGKILL)
            until(lambda: client.lost == {0})
            rig.start("a", {"tokens": [7]})
            until(lambda: "tries again in 5 s" in caplog.text and not stage._busy)
            assert "those that would stay have ended and were not replaced yet" in str(scaled(rig, 1))
        rig.start("b", {"tokens": [7]})
        assert set(answers(rig, 2)) == {"a", "b"}
    assert rig.crash is None


def test_engines_that_an_operation_starts_while_their_stage_ends_end_with_it() -> None:
    replies: SimpleQueue[Any] = SimpleQueue()
    before = set(psutil.Process().children())
    with two() as (rig, _client):
        rig.inbox.put(events.Admin("call", "scale_engines", {"engines": 3}, replies.put))
    assert rig.crash is None
    assert replies.get(timeout=PATIENCE_S) == 3
    assert set(psutil.Process().children()) == before


def test_an_operation_that_no_engine_has_answered_when_its_stage_ends_fails() -> None:
    replies: SimpleQueue[Any] = SimpleQueue()
    with one() as (rig, client):
        rig.start("a", {"tokens": [SLOW]})
        until(lambda: client.stats[0].running == 1 if client.stats else False)
        rig.inbox.put(events.Admin("call", "reset_prefix_cache", {}, replies.put))
        until(lambda: bool(client._results))
        rig.abort("a")
    assert isinstance(replies.get_nowait(), EngineDeadError)
