"""One function per request: sync, async, generator, async generator."""

from __future__ import annotations

import asyncio
import functools
import queue
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import stage_runtime as omni
from stage_runtime.engines.making.loading import as_engine
from stage_runtime.engines.simple import is_async
from tests.engines.engine_kit import PATIENCE_S, Rig, gate, running

Payload = omni.StagePayload


def upper(payload: Payload) -> str:
    return str(payload.data).upper()


async def upper_async(payload: Payload) -> str:
    await asyncio.sleep(0)
    return str(payload.data).upper()


def pieces(payload: Payload) -> Iterator[Any]:
    for piece in payload.data:
        yield omni.Chunk(piece)
    yield omni.Result(len(payload.data))


async def pieces_async(payload: Payload) -> AsyncIterator[Any]:
    for piece in payload.data:
        await asyncio.sleep(0)
        yield omni.Chunk(piece)
    yield omni.Result(len(payload.data))


@pytest.mark.parametrize("fn", [upper, upper_async, omni.Simple(upper), omni.Simple(upper_async, concurrency=3)])
def test_what_a_function_returns_is_the_result(fn: Any) -> None:
    with running(as_engine(fn)) as rig:
        rig.start("r1", "a")
        rig.start("r2", "b")
        assert sorted(rig.outbox.several(2)) == [("r1", "done", "A"), ("r2", "done", "B")]
        assert rig.outbox.began_ids == ["r1", "r2"]


@pytest.mark.parametrize("fn", [pieces, pieces_async])
def test_a_generator_gives_chunks_and_at_last_its_result(fn: Any) -> None:
    with running(as_engine(fn)) as rig:
        rig.start("r1", "xy")
        assert rig.outbox.several(3) == [("r1", "chunk", "x"), ("r1", "chunk", "y"), ("r1", "done", 2)]


def returns(payload: Payload) -> Generator[Any, None, Any]:
    yield omni.Chunk("x")
    return payload.data


def returns_at_once(payload: Payload) -> Generator[Any, None, Any]:
    if payload.data:
        return payload.data
    yield omni.Chunk("never")


def returns_wrapped(payload: Payload) -> Generator[Any, None, Any]:
    yield omni.Chunk("x")
    return omni.Result(payload.data)


@pytest.mark.parametrize(("fn", "chunks"), [(returns, ["x"]), (returns_at_once, []), (returns_wrapped, ["x"])])
def test_what_a_generator_returns_is_its_result(fn: Any, chunks: list[str]) -> None:
    with running(as_engine(fn)) as rig:
        rig.start("r1", {"n": 1})
        outputs = rig.outbox.several(len(chunks) + 1)
        assert outputs == [*(("r1", "chunk", chunk) for chunk in chunks), ("r1", "done", {"n": 1})]


@pytest.mark.proves("buffer-written-again")
@pytest.mark.parametrize("sync", [True, False])
def test_a_result_is_what_it_was_when_it_was_yielded(sync: bool) -> None:
    """The generator goes on after that, and may write into it: into its containers, arrays and tensors."""

    def fn(payload: Payload) -> Iterator[Any]:
        given: dict[str, Any] = {"list": [1], "array": np.ones(2), "tensor": torch.ones(2)}
        yield omni.Result(given)
        given["list"].append(2)
        given["array"][:] = 3
        given["tensor"].fill_(3)

    async def fn_async(payload: Payload) -> AsyncIterator[Any]:
        for item in fn(payload):
            yield item

    with running(as_engine(fn if sync else fn_async)) as rig:
        rig.start("r1")
        _, kind, data = rig.outbox.next()
        assert (kind, data["list"], data["array"].tolist(), data["tensor"].tolist()) == ("done", [1], [1, 1], [1, 1])


def silent(payload: Payload) -> Iterator[Any]:
    yield omni.Chunk("only")


async def silent_async(payload: Payload) -> AsyncIterator[Any]:
    yield omni.Chunk("only")


@pytest.mark.parametrize("fn", [silent, silent_async])
def test_a_generator_without_a_result_gives_none(fn: Any) -> None:
    with running(as_engine(fn)) as rig:
        rig.start("r1")
        assert rig.outbox.several(2) == [("r1", "chunk", "only"), ("r1", "done")]


def raising(error: BaseException) -> list[Callable[[Payload], Any]]:
    def plain(payload: Payload) -> None:
        raise error

    async def coroutine(payload: Payload) -> None:
        raise error

    def generator(payload: Payload) -> Iterator[Any]:
        yield omni.Chunk(1)
        raise error

    async def async_generator(payload: Payload) -> AsyncIterator[Any]:
        yield omni.Chunk(1)
        raise error

    return [plain, coroutine, generator, async_generator]


@pytest.mark.proves("function-raises")
@pytest.mark.parametrize("index", range(4), ids=["sync", "async", "generator", "async generator"])
@pytest.mark.parametrize("error", [ValueError("no"), SystemExit("no"), KeyboardInterrupt("no"), GeneratorExit("no")])
def test_whatever_user_code_raises_fails_its_request_and_the_next_one_is_served(
    error: BaseException, index: int
) -> None:
    failing = raising(error)[index]
    is_coroutine = is_async(failing)

    def fn(payload: Payload) -> Any:
        return failing(payload) if payload.data == "bad" else payload.data

    async def fn_async(payload: Payload) -> Any:
        if payload.data != "bad":
            return payload.data
        made = failing(payload)
        return [item async for item in made] if hasattr(made, "__aiter__") else await made

    with running(as_engine(fn_async if is_coroutine else fn)) as rig:
        rig.start("r1", "bad")
        rig.start("r2", "good")
        outputs = [one for one in rig.outbox.several(3 if index == 2 else 2) if one[1] != "chunk"]
        assert outputs == [("r1", "failed", f"{type(error).__name__}: no"), ("r2", "done", "good")]


def late_chunk(payload: Payload) -> Iterator[Any]:
    yield omni.Result(1)
    yield omni.Chunk(2)


def two_results(payload: Payload) -> Iterator[Any]:
    yield omni.Result(1)
    yield omni.Result(2)


def result_twice_over(payload: Payload) -> Generator[Any, None, Any]:
    yield omni.Result(1)
    return 2


def generator_returns_chunk(payload: Payload) -> Generator[Any, None, Any]:
    yield omni.Chunk("x")
    return omni.Chunk("y")


def bare_value(payload: Payload) -> Iterator[Any]:
    yield "text"


def returns_chunk(payload: Payload) -> Any:
    return omni.Chunk("text")


def returns_coroutine(payload: Payload) -> Any:
    return upper_async(payload)


@pytest.mark.parametrize(
    ("fn", "problem"),
    [
        (late_chunk, "yielded Chunk after its Result"),
        (two_results, "yielded Result after its Result"),
        (result_twice_over, "yielded its Result and returned int; use one of the two"),
        (bare_value, "yielded str; wrap it"),
        (returns_chunk, "returned a Chunk"),
        (returns_coroutine, "declare it with async def"),
    ],
)
def test_a_function_that_breaks_its_contract_fails_the_request_with_the_reason(fn: Any, problem: str) -> None:
    with running(as_engine(fn)) as rig:
        rig.start("r1")
        kind, message = rig.outbox.next()[1:]
        assert kind == "failed"
        assert problem in message


def test_a_chunk_that_a_generator_returns_is_refused() -> None:
    with running(as_engine(generator_returns_chunk)) as rig:
        rig.start("r1")
        assert rig.outbox.next() == ("r1", "chunk", "x")
        assert "returned a Chunk" in rig.outbox.next()[2]


@pytest.mark.proves("slow-receiver")
@pytest.mark.parametrize("fn", [pieces, pieces_async])
def test_a_lagging_consumer_holds_the_generator_until_its_gate_opens(fn: Any) -> None:
    with running(as_engine(fn)) as rig:
        closed = gate()
        rig.outbox.gates.append(closed)
        rig.start("r1", "xy")
        assert rig.outbox.next() == ("r1", "chunk", "x")
        with pytest.raises(queue.Empty):
            rig.outbox.outputs.get(timeout=0.1)
        closed.set_result(None)
        assert rig.outbox.several(2) == [("r1", "chunk", "y"), ("r1", "done", 2)]


def test_sync_functions_run_as_many_at_once_as_declared() -> None:
    together = threading.Barrier(3)

    def fn(payload: Payload) -> int:
        return together.wait(PATIENCE_S)  # passes only when three are in it

    with running(as_engine(omni.Simple(fn, concurrency=3))) as rig:
        for index in range(3):
            rig.start(f"r{index}")
        assert {one[1] for one in rig.outbox.several(3)} == {"done"}


def test_async_functions_run_at_most_as_many_at_once_as_declared() -> None:
    now, most = 0, 0

    async def fn(payload: Payload) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        while most < 2:  # until the second one has come
            await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)
        now -= 1

    rig = Rig(as_engine(omni.Simple(fn, concurrency=2)))
    for index in range(6):
        rig.start(f"r{index}")
    rig.thread.start()
    assert {one[1] for one in rig.outbox.several(6)} == {"done"}
    rig.close()
    assert most == 2


def test_an_aborted_coroutine_is_cancelled_and_its_place_given_on() -> None:
    begun = threading.Event()
    ended: list[str] = []

    async def fn(payload: Payload) -> str:
        if payload.data == "endless":
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(payload.request.id)
        return "fine"

    with running(as_engine(fn)) as rig:
        rig.start("r1", "endless")
        rig.start("r2")
        rig.start("r3")
        assert begun.wait(PATIENCE_S)
        rig.abort("r3")  # while it waits for its turn
        rig.abort("r1")
        assert rig.outbox.next() == ("r2", "done", "fine")
    assert ended == ["r1"]
    assert rig.outbox.outputs.empty()


def test_an_aborted_generator_stops_at_its_next_chunk_and_is_closed() -> None:
    closed = threading.Event()

    def fn(payload: Payload) -> Iterator[Any]:
        try:
            while True:
                yield omni.Chunk(0)
        finally:
            closed.set()

    with running(as_engine(fn)) as rig:
        rig.start("r1")
        rig.outbox.next()
        rig.abort("r1")
        assert closed.wait(PATIENCE_S)


@pytest.mark.parametrize("fn", [upper, upper_async])
def test_a_payload_that_cannot_be_read_fails_its_request_alone(fn: Any) -> None:
    with running(as_engine(fn)) as rig:
        rig.broken("r1", ValueError("garbage"))
        rig.start("r2", "b")
        assert rig.outbox.several(2) == [("r1", "failed", "ValueError: garbage"), ("r2", "done", "B")]


def test_what_was_aborted_before_its_turn_is_never_opened() -> None:
    with running(as_engine(upper)) as rig:
        rig.work("r1").cancelled = True
        arrival = rig.start("r1", "a")
        rig.start("r2", "b")
        assert rig.outbox.next() == ("r2", "done", "B")
        assert arrival.discarded


@pytest.mark.parametrize("fn", [upper, upper_async])
def test_chunks_for_a_function_that_takes_none_fail_the_request_and_name_the_cure(fn: Any) -> None:
    with running(as_engine(fn)) as rig:
        rig.chunk("r1", "x", source="asr")
        kind, message = rig.outbox.next()[1:]
        assert kind == "failed"
        assert "'asr' streams to this stage" in message
        assert "omni.Streaming" in message


def test_a_running_coroutine_is_finished_when_the_inbox_closes() -> None:
    begun = threading.Event()

    async def fn(payload: Payload) -> str:
        begun.set()
        await asyncio.sleep(0.05)
        return "done"

    with running(as_engine(fn)) as rig:
        rig.start("r1")
        assert begun.wait(PATIENCE_S)
    assert rig.outbox.next() == ("r1", "done", "done")


def test_async_functions_are_seen_through_partials_and_objects() -> None:
    class Called:
        async def __call__(self, payload: Payload) -> None: ...

    assert is_async(partial(upper_async))
    assert is_async(Called())
    assert is_async(pieces_async)
    assert not is_async(partial(upper))
    assert not is_async(pieces)


async def exits() -> None:
    await asyncio.sleep(0)
    raise SystemExit(3)


async def gather_one_that_exits() -> None:
    await asyncio.gather(exits(), asyncio.sleep(0))


async def leave_one_that_exits() -> None:
    left = asyncio.create_task(exits())
    await asyncio.wait([left])
    left.exception()  # heard of, or asyncio would log it


async def exit_in_a_callback() -> None:
    asyncio.get_running_loop().call_soon(sys.exit, 3)
    await asyncio.sleep(0)


async def stop_the_loop() -> None:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0)


async def cancel_all_others() -> None:
    for task in asyncio.all_tasks():
        if task is not asyncio.current_task():
            task.cancel()
    await asyncio.sleep(0)


@pytest.mark.proves("function-raises")
@pytest.mark.parametrize(
    ("hostile", "failure"),
    [
        (gather_one_that_exits, ("failed", "SystemExit: 3")),
        (leave_one_that_exits, ("done", "through")),
        (exit_in_a_callback, ("done", "through")),
        (stop_the_loop, ("done", "through")),
        (cancel_all_others, ("done", "through")),
    ],
)
def test_what_a_request_does_to_the_event_loop_does_not_end_the_stage(
    hostile: Callable[[], Awaitable[None]], failure: tuple[str, str]
) -> None:
    async def fn(payload: omni.StagePayload) -> str:
        if payload.data == "hostile":
            await hostile()
        return "through"

    with running(as_engine(omni.Simple(fn, concurrency=1))) as rig:
        for once in ("a", "b"):
            rig.start(f"{once}1", "hostile")
            assert rig.outbox.next() == (f"{once}1", *failure)
            rig.start(f"{once}2", "good")
            assert rig.outbox.next() == (f"{once}2", "done", "through")
        assert rig.thread.is_alive()


def test_a_request_that_is_cancelled_by_another_one_s_code_before_it_begins_fails() -> None:
    async def fn(payload: omni.StagePayload) -> str:
        await cancel_all_others()
        return "through"

    rig = Rig(as_engine(omni.Simple(fn, concurrency=2)))
    rig.start("r1")
    rig.start("r2")  # both have a task before either takes a step
    rig.thread.start()
    assert sorted(rig.outbox.several(2)) == [("r1", "done", "through"), ("r2", "failed", "CancelledError: ")]
    rig.close()


def passes_on(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that knows nothing of coroutines."""

    @functools.wraps(fn)
    def wrapper(*args: Any, **more: Any) -> Any:
        return fn(*args, **more)

    return wrapper


def runs_it(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that makes a plain function of a coroutine's."""

    @functools.wraps(fn)
    def wrapper(*args: Any, **more: Any) -> Any:
        return asyncio.run(fn(*args, **more))

    return wrapper


def raises_at_once(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def wrapper(*args: Any, **more: Any) -> Any:
        raise StopIteration("no")

    return wrapper


class Decorated:
    @passes_on
    async def __call__(self, payload: Payload) -> str:
        return await upper_async(payload)


@pytest.mark.parametrize(
    "fn",
    [
        passes_on(upper_async),
        passes_on(passes_on(upper_async)),
        torch.inference_mode()(upper_async),
        partial(passes_on(upper_async)),
        passes_on(partial(upper_async)),
        Decorated(),
        Decorated().__call__,
        runs_it(upper_async),
        passes_on(upper),
    ],
)
def test_a_coroutine_function_under_a_decorator_is_awaited(fn: Any) -> None:
    with running(as_engine(fn)) as rig:
        rig.start("r1", "a")
        rig.start("r2", "b")
        assert sorted(rig.outbox.several(2)) == [("r1", "done", "A"), ("r2", "done", "B")]


@pytest.mark.parametrize("fn", [passes_on(pieces_async), torch.inference_mode()(pieces_async), passes_on(pieces)])
def test_an_async_generator_under_a_decorator_gives_its_chunks(fn: Any) -> None:
    with running(as_engine(fn)) as rig:
        rig.start("r1", "xy")
        assert rig.outbox.several(3) == [("r1", "chunk", "x"), ("r1", "chunk", "y"), ("r1", "done", 2)]


def test_a_decorator_of_a_coroutine_function_that_raises_fails_its_request_alone() -> None:
    with running(as_engine(raises_at_once(upper_async))) as rig:
        rig.start("r1", "a")
        rig.start("r2", "b")
        assert sorted(one[:2] for one in rig.outbox.several(2)) == [("r1", "failed"), ("r2", "failed")]
