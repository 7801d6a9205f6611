"""Events that an author's function records belong to its stage, whatever runs the function."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import stage_runtime as omni
from stage_runtime import profiler
from stage_runtime.coordinator.admitting.terminal_stages import TerminalStagesCaller
from stage_runtime.profiler.recording.recorder import recorder
from stage_runtime.stage.observing.recorded import MOST_SETS, OutputEvents
from stage_runtime.stage.work import begun
from stage_runtime.wire.parts import Header
from tests.stage.stage_kit import plan, world


def note(payload: omni.StagePayload) -> Any:
    with profiler.span("model", payload.request.id):
        return payload.data


async def wait(payload: omni.StagePayload) -> Any:
    await asyncio.sleep(0)
    return await asyncio.to_thread(note, payload)


async def execute(payload: omni.StagePayload) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, note, payload)


def produce(payload: omni.StagePayload) -> Iterator[Any]:
    yield omni.Result(note(payload))


async def stream(session: omni.Session) -> AsyncIterator[Any]:
    yield omni.Result(note(await session.payload()))


KINDS: dict[str, Any] = {
    "one worker": omni.Simple(note),
    "workers": omni.Simple(note, concurrency=3),
    "generators": omni.Simple(produce, concurrency=2),
    "tasks": omni.Simple(wait, concurrency=2),
    "executor calls": omni.Simple(execute, concurrency=2),
    "batches": omni.Batched(lambda payloads: [note(payload) for payload in payloads]),
    "streams": omni.Streaming(stream),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_events_without_a_stage_are_of_the_stage_that_computes(kind: str, tmp_path: Path) -> None:
    path = recorder.start("run", tmp_path, "first")
    try:
        async with world() as made:
            made.process("p", [plan("a", terminal=True)], {"a": KINDS[kind]})
            for number in range(4):
                made.submit(f"r{number}", "a", number)
            await made.until(lambda: len(made.results()) == 4)
    finally:
        recorder.stop()
    events = [json.loads(line) for line in path.read_text().splitlines()]
    found = [(each["request_id"], each["stage"]) for each in events if each["event_name"] == "model_start"]
    assert sorted(found) == [(f"r{number}", "a") for number in range(4)]


def route(request_id: str, output: Any) -> list[str]:
    omni.emit("route", request_id)
    return ["join"]


def project(payload: omni.StagePayload) -> omni.StagePayload:
    omni.emit("project", payload.request.id)
    return payload


def wait_for(request_id: str, source: str, payload: omni.StagePayload) -> list[str]:
    omni.emit("wait_for", request_id)
    return ["a", "b"]


def merge(inputs: dict[str, omni.StagePayload]) -> Any:
    with omni.span("merge", next(iter(inputs.values())).request.id):
        return {name: payload.data for name, payload in inputs.items()}


class KnownRequests:
    """`recorder.Traces`: a span is sent where its request is known at its stage."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, str], str | None] = {}
        self.sent: list[tuple[str, str, str]] = []

    def working(self, request_id: str, stage: str, traceparent: str | None) -> None:
        self.known[request_id, stage] = traceparent

    def begin(self, name: str, request_id: str, stage: str, metadata: Mapping[str, Any]) -> None:
        if (request_id, stage) in self.known:
            self.sent.append((name, request_id, stage))


async def test_events_and_spans_of_hooks_are_of_their_stage(tmp_path: Path) -> None:
    recorder.traces = traces = KnownRequests()
    path = recorder.start("run", tmp_path, "first")
    here = __name__
    hooks = {"route_fn": f"{here}:route", "project_payload": {"join": f"{here}:project"}}
    joins = {"wait_for": ("a", "b"), "wait_for_fn": f"{here}:wait_for", "merge_fn": f"{here}:merge"}
    try:
        async with world() as made:
            made.process("pa", [plan("a", next=("join",), **hooks)], {"a": lambda payload: payload.data})
            made.process("pb", [plan("b", next=("join",))], {"b": lambda payload: payload.data})
            join = plan("join", inputs_from=("a", "b"), terminal=True, **joins)
            made.process("pj", [join], {"join": lambda payload: payload.data})
            made.submit("r", "a", 1)
            made.submit("r", "b", 2)
            await made.until(lambda: bool(made.results()))
    finally:
        recorder.traces = None
        recorder.stop()
    events = [json.loads(line) for line in path.read_text().splitlines()]
    names = {"route", "project", "wait_for", "merge_start", "merge_end"}
    assert {(each["event_name"], each["stage"]) for each in events if each["event_name"] in names} == {
        ("route", "a"),
        ("project", "a"),
        ("wait_for", "join"),
        ("merge_start", "join"),
        ("merge_end", "join"),
    }
    assert traces.sent == [("merge", "r", "join")]


async def test_events_of_terminal_stages_fn_are_of_the_coordinator(tmp_path: Path) -> None:
    def choose(request: omni.OmniRequest) -> None:
        omni.emit("choose", request.id)

    path = recorder.start("run", tmp_path, "coordinator")
    try:
        await TerminalStagesCaller(choose).call(omni.OmniRequest(id="r"), 60.0)
    finally:
        recorder.stop()
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert [each["stage"] for each in events if each["event_name"] == "choose"] == ["coordinator"]


def to_x(request_id: str, output: Any) -> str:
    return "x"


def to_nobody(request_id: str, output: Any) -> None:
    return None


@pytest.mark.parametrize(
    ("hook", "bound", "expected"),
    [
        (None, ("x", "y"), [["x", "y"]]),
        (None, ("y",), [["y"]]),  # the request meets no other
        ("to_x", ("x", "y"), [["x"]]),
        ("to_x", ("y",), [[]]),
        ("to_nobody", ("x", "y"), []),  # it fails
    ],
)
async def test_a_complete_stage_says_which_stages_get_its_result(
    tmp_path: Path, hook: str | None, bound: tuple[str, ...], expected: list[list[str]]
) -> None:
    path = recorder.start("run", tmp_path, "first")
    targets = [plan(name, inputs_from=("a",), terminal=True) for name in ("x", "y")]
    try:
        async with world() as made:
            route_fn = None if hook is None else f"{__name__}:{hook}"
            made.process("pa", [plan("a", next=("x", "y"), route_fn=route_fn)], {"a": lambda payload: payload.data})
            made.process("pb", targets, {target.name: lambda payload: payload.data for target in targets})
            for target in {"x", "y"} - set(bound):
                del made.stage_of[target]
            made.submit("r", "a", 1)
            await made.until(lambda: bool(made.ended()))
    finally:
        recorder.stop()
    events = [json.loads(line) for line in path.read_text().splitlines()]
    complete = [each["metadata"] for each in events if (each["event_name"], each["stage"]) == ("stage_complete", "a")]
    assert complete == [{"terminal": False, "next": names, "attempt": 1} for names in expected]


async def test_a_stage_with_more_sets_of_targets_than_templates_records_them_all(tmp_path: Path) -> None:
    path = recorder.start("run", tmp_path, "first")
    names = tuple(f"t{number}" for number in range(MOST_SETS + 2))
    recorded = OutputEvents(plan("a", next=names))
    work = begun(Header("r", 3, "cc", {}), gathering=None, sources=())
    try:
        for name in names:
            recorded.note_complete(work, 7, [name])
    finally:
        recorder.stop()
    events = [json.loads(line) for line in path.read_text().splitlines()]
    found = [(each["metadata"], each["timestamp_ns"]) for each in events if each["event_name"] == "stage_complete"]
    assert sorted(metadata["next"] for metadata, _ in found) == sorted([name] for name in names)
    assert {(metadata["attempt"], at) for metadata, at in found} == {(3, 8)}  # the run has ended at 7
