"""A run that ends by its time limit ends for the process's engines, too."""

from __future__ import annotations

import asyncio
from pathlib import Path

from stage_runtime.profiler.recording.recorder import Recorder
from stage_runtime.profiler.recording.session import ProfileSession
from stage_runtime.stage.control.process_profiling import ProcessProfiling
from stage_runtime.wire.messages import Message, ProfilerReply, ProfilerStart, ProfilerStop


async def test_engines_learn_once_that_a_run_has_reached_its_time_limit(tmp_path: Path) -> None:
    times = [0.0]
    answered: asyncio.Queue[Message] = asyncio.Queue()
    received: asyncio.Queue[ProfilerStart | ProfilerStop] = asyncio.Queue()
    session = ProfileSession(
        tmp_path, ["a"], incarnation=lambda: "aa", recorder=Recorder(), monotonic=lambda: times[-1]
    )

    def send(_: str, message: Message) -> bool:
        answered.put_nowait(message)
        return True

    profiling = ProcessProfiling(session, send, asyncio.get_running_loop(), received.put_nowait)
    start = ProfilerStart("call", "run", "run/events", None, {}, 60)
    profiling.handlers[ProfilerStart]("coordinator", start)
    assert isinstance(await answered.get(), ProfilerReply)
    assert await received.get() == start
    for now_s in (59.0, 60.0, 61.0):
        times.append(now_s)
        profiling.beat()
        profiling.beat()
    await asyncio.get_running_loop().run_in_executor(session.thread, lambda: None)
    stop = await received.get()
    assert isinstance(stop, ProfilerStop) and stop.run_id == "run"
    profiling.handlers[ProfilerStop]("coordinator", ProfilerStop("late", "run"))
    await answered.get()
    assert received.empty()
    session.close()


async def test_engines_learn_that_a_run_is_over_though_its_trace_cannot_be_written(tmp_path: Path) -> None:
    answered: asyncio.Queue[Message] = asyncio.Queue()
    received: asyncio.Queue[ProfilerStart | ProfilerStop] = asyncio.Queue()
    session = ProfileSession(tmp_path, ["a"], incarnation=lambda: "aa", recorder=Recorder())

    def send(_: str, message: Message) -> bool:
        answered.put_nowait(message)
        return True

    profiling = ProcessProfiling(session, send, asyncio.get_running_loop(), received.put_nowait)
    profiling.handlers[ProfilerStart]("coordinator", ProfilerStart("call", "run", "events", "traces/{pid}", {}, 0))
    await answered.get()
    (tmp_path / "traces").rmdir()
    (tmp_path / "traces").write_text("a file where the folder was")
    stop = ProfilerStop("stop", "run")
    profiling.handlers[ProfilerStop]("coordinator", stop)
    reply = await answered.get()
    assert isinstance(reply, ProfilerReply) and reply.stages["a"].startswith("failed: ")
    session.close()
    assert [await received.get() for _ in range(2)][1] == stop


async def test_engines_learn_that_a_run_has_ended_because_another_one_starts(tmp_path: Path) -> None:
    """The coordinator of the first one is gone."""
    answered: asyncio.Queue[Message] = asyncio.Queue()
    received: asyncio.Queue[ProfilerStart | ProfilerStop] = asyncio.Queue()
    session = ProfileSession(tmp_path, ["a"], incarnation=lambda: "aa", recorder=Recorder())

    def send(_: str, message: Message) -> bool:
        answered.put_nowait(message)
        return True

    profiling = ProcessProfiling(session, send, asyncio.get_running_loop(), received.put_nowait)
    first, second = (ProfilerStart("call", name, f"{name}/events", None, {}, 0) for name in ("old", "new"))
    for sender, start in (("gone", first), ("coordinator", second)):
        profiling.handlers[ProfilerStart](sender, start)
        reply = await answered.get()
        assert isinstance(reply, ProfilerReply) and reply.stages == {"a": "started"}
    session.close()
    assert [await received.get() for _ in range(3)] == [first, ProfilerStop("", "old"), second]
