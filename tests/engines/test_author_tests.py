"""`omni.testing`: one stage in the test's process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import yaml

import stage_runtime as omni
from stage_runtime.engines import events
from stage_runtime.errors import ConfigurationError, ValueRefused
from stage_runtime.testing import run_stage

HELLO = Path(__file__).parents[2] / "examples" / "hello" / "pipeline.yaml"


def echo(**more: Any) -> Callable[[omni.StagePayload], Any]:
    return lambda payload: {"data": payload.data, "id": payload.request.id, **more}


def by_source() -> omni.Streaming:
    async def run(session: omni.Session) -> AsyncIterator[Any]:
        async for chunk in session.chunks():
            yield omni.Chunk([chunk.source, chunk.index, chunk.data], metadata={"n": chunk.index})
        payload = await session.payload()
        yield omni.Result([payload.data, session.request.id])

    return omni.Streaming(run)


def test_payloads_are_values_requests_or_payloads() -> None:
    request = omni.OmniRequest(id="mine", inputs={"text": "a"})
    whole = omni.StagePayload(request=request, data="b")
    assert [one.result for one in run_stage(echo, ["plain", request, whole], extra=1)] == [
        {"data": "plain", "id": "request-0", "extra": 1},
        {"data": {"text": "a"}, "id": "mine", "extra": 1},
        {"data": "b", "id": "mine", "extra": 1},
    ]


def test_chunks_are_numbered_by_source_and_come_with_their_request() -> None:
    chunks = [omni.Chunk("x", source="left"), omni.Chunk("y", source="right"), omni.Chunk("z", source="left")]
    [one] = run_stage(by_source, ["p"], chunks)
    assert one.data == [["left", 0, "x"], ["right", 0, "y"], ["left", 1, "z"]]
    assert [(chunk.index, chunk.metadata) for chunk in one.chunks] == [(0, {"n": 0}), (1, {"n": 0}), (2, {"n": 1})]
    assert one.result == ["p", "request-0"]


def test_chunks_of_several_requests_are_given_by_id() -> None:
    first, second = run_stage(by_source, ["p", "q"], {"request-1": ["late"], "request-0": ["early"]})
    assert first.data == [["source", 0, "early"]]
    assert second.data == [["source", 0, "late"]]
    with pytest.raises(ValueError, match="by request id"):
        run_stage(by_source, ["p", "q"], ["whose"])
    with pytest.raises(ValueError, match="chunks of ghost"):
        run_stage(by_source, ["p"], {"ghost": ["x"]})


def test_a_request_that_failed_cannot_pass_for_one_that_gave_nothing() -> None:
    def make() -> Callable[[omni.StagePayload], float]:
        return lambda payload: 1 / payload.data

    good, bad = run_stage(make, [2, 0])
    assert good.result == 0.5
    assert isinstance(bad.error, ZeroDivisionError)
    for name in ("result", "data"):
        with pytest.raises(ZeroDivisionError):
            getattr(bad, name)


@pytest.mark.parametrize("bad", [{"x": (1, 2)}, {1: "x"}, {"x": {1}}, object()])
def test_what_could_not_travel_is_refused_coming_and_going(bad: Any) -> None:
    def give() -> Callable[[omni.StagePayload], Any]:
        return lambda payload: bad

    def stream() -> Callable[[omni.StagePayload], Iterator[Any]]:
        def run(payload: omni.StagePayload) -> Iterator[Any]:
            yield omni.Chunk(bad)

        return run

    with pytest.raises(ValueRefused, match=r"payload\.data"):
        run_stage(echo, [bad])
    for factory, where in ((give, "result"), (stream, "chunk.data")):
        [one] = run_stage(factory, [None])
        assert isinstance(one.error, ValueRefused)
        assert one.error.path.startswith(where)


def test_what_a_function_gets_shares_no_container_with_the_test() -> None:
    def make() -> Callable[[omni.StagePayload], Any]:
        return lambda payload: payload.data["list"].append(2)

    given = {"list": [1]}
    run_stage(make, [given])
    assert given == {"list": [1]}


def test_a_factory_gets_a_context_and_its_mistakes_are_reported() -> None:
    def make(context: omni.StageContext, tp_size: int) -> Callable[[omni.StagePayload], Any]:
        return lambda payload: [context.name, context.device, tp_size]

    assert run_stage(make, [None])[0].result == ["stage", "cpu", 1]
    with pytest.raises(ConfigurationError, match="takes no colour"):
        run_stage(make, [None], colour="red")
    with pytest.raises(ConfigurationError, match="no module named 'nowhere'"):
        run_stage("nowhere:factory", [None])


def test_chunks_for_a_function_that_takes_none_are_refused() -> None:
    [one] = run_stage(echo, ["x"], ["chunk"])
    assert "takes no chunks" in str(one.error)


def test_an_engine_that_crashes_fails_its_requests_and_one_that_never_answers_is_distinguished() -> None:
    class Crashes:
        def run(self, inbox: Any, outbox: Any, stop: Event) -> None:
            raise RuntimeError("out of memory")

    class Idles:
        def run(self, inbox: Any, outbox: Any, stop: Event) -> None:
            stop.wait(10)

    assert str(run_stage(Crashes, ["x"])[0].error) == "out of memory"
    with pytest.raises(TimeoutError, match="request-0"):
        run_stage(Idles, ["x"], patience_s=0.05)


def test_the_stages_of_the_hello_example_can_be_tested_as_they_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = yaml.safe_load(HELLO.read_text())["spec"]["code"]["inline"]["hello.py"]
    (tmp_path / "hello.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    (split,) = omni.testing.run_stage("hello:split", ["two words"])
    assert split.data == [{"word": "two"}, {"word": "words"}]
    assert split.result == {"count": 2}
    (shout,) = omni.testing.run_stage("hello:shout", [split.result], split.chunks, times=2)
    assert [chunk.data for chunk in shout.chunks] == [
        omni.Text("TWO!! "),
        omni.Text("WORDS!! "),
        omni.Usage(completion_tokens=2),
    ]
    assert not shout.has_result


def test_a_received_array_is_read_only_here_as_well() -> None:
    def factory() -> Any:
        def fn(payload: omni.StagePayload) -> Any:
            payload.data[0] = 1.0

        return fn

    (one,) = run_stage(factory, [np.zeros(3)])
    assert "read-only" in str(one.error)


def test_batches_coroutines_and_loops_run_too() -> None:
    async def slow(payload: omni.StagePayload) -> Any:
        await asyncio.sleep(0)
        return payload.data

    class Loop:
        def run(self, inbox: Any, outbox: Any, stop: Event) -> None:
            for event in inbox:
                outbox.put(events.Done(event.request_id, event.payload.data))

    assert [one.result for one in run_stage(lambda: slow, [1, 2])] == [1, 2]
    assert [one.result for one in run_stage(lambda: omni.Batched(lambda batch: [7] * len(batch)), [1, 2])] == [7, 7]
    assert [one.result for one in run_stage(Loop, [1, 2])] == [1, 2]


def test_a_whole_request_can_be_given() -> None:
    request = omni.OmniRequest(id="mine", kind="chat", inputs={"messages": [{"role": "user", "content": "hi"}]})
    (one,) = run_stage(
        lambda: lambda payload: payload.request.last_text(), [omni.StagePayload(request=request, data=request.inputs)]
    )
    assert (one.request_id, one.result) == ("mine", "hi")


def test_the_light_import_stays_light() -> None:
    """``omni.testing`` is there when it is asked for, and costs nothing before."""
    script = "import sys, stage_runtime; print({'torch', 'zmq', 'fastapi', 'numpy', 'uvloop'} & set(sys.modules))"
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True)
    assert finished.stdout.strip() == "set()"
    with pytest.raises(AttributeError, match="no attribute 'tseting'"):
        getattr(omni, "tseting")  # noqa: B009
