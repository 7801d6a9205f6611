"""A profile's start and stop: what the coordinator records of a request, every stage records too."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from stage_runtime.coordinator.questions.clocks import Clocks
from stage_runtime.coordinator.questions.profile_runs import PipelineProfiling
from stage_runtime.errors import ConfigurationError, RequestError
from stage_runtime.profiler.recording.recorder import Recorder
from stage_runtime.profiler.recording.session import STARTED, STOPPED, ProfileSession
from stage_runtime.wire import codec
from stage_runtime.wire.messages import Message, ProfilerRead, ProfilerReply, ProfilerStart, ProfilerStop
from stage_runtime.wire.parts import Member

MEMBER = Member("aa", "a", "a-0", "r", "tcp://127.0.0.1:1", {}, ("front", "back"), True)


class Loop:
    """The running loop, whose time stands still until a test moves it on."""

    def __init__(self) -> None:
        self.later_s = 0.0
        self._loop = asyncio.get_running_loop()

    def time(self) -> float:
        return 1e9 + self.later_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


class Stages:
    """A process that answers profiler messages, and notes what the coordinator records meanwhile."""

    def __init__(self, root: Path) -> None:
        self.session = ProfileSession(root, ["coordinator"], incarnation=lambda: "cc", recorder=Recorder())
        self.noted: list[tuple[str, str | None]] = []
        self.requests: list[Message] = []
        self.states = STOPPED  #: The answer to a stop.
        self.loop = cast(Any, Loop())
        self.profiling = PipelineProfiling(self.session, lambda: {"aa": MEMBER}, self._take, self.loop, Clocks())

    def _take(self, instance: str, message: Message) -> bool:
        states = {}
        codec.check(message)
        self.requests.append(message)
        if isinstance(message, ProfilerStart | ProfilerStop):
            self.noted.append((type(message).__name__, self.session.recording))
            state = STARTED if isinstance(message, ProfilerStart) else self.states
            states = dict.fromkeys(MEMBER.stages, state)
        reply = ProfilerReply(message.call_id, 1, 2, stages=states)  # type: ignore[union-attr]
        asyncio.get_running_loop().call_soon(self.profiling.replied, instance, reply)
        return True

    async def start(self, run_id: str = "run", *, max_seconds: int | None = None) -> dict[str, str]:
        answer = await self.profiling.start(
            run_id=run_id, event_dir=None, template=None, config={}, torch=False, max_seconds=max_seconds
        )
        return {each.stage: each.state for each in answer.stages}

    async def joined(self) -> Message:
        """The request to a process that joins now."""
        self.requests.clear()
        self.profiling.joined("aa")
        while not self.requests:
            await asyncio.sleep(0)
        return self.requests[0]

    def runs(self) -> dict[str, bool]:
        return {run.run_id: run.recording for run in self.profiling.runs()}


async def test_the_coordinator_starts_last_and_stops_first(tmp_path: Path) -> None:
    stages = Stages(tmp_path)
    assert await stages.start() == dict.fromkeys(("coordinator", "front", "back"), STARTED)
    assert stages.session.recording == "run"
    stopped = await stages.profiling.stop("run")
    stages.session.close()
    assert stopped.complete
    assert stages.noted == [("ProfilerStart", None), ("ProfilerStop", None)]


async def test_stages_are_stopped_where_the_coordinator_cannot_start(tmp_path: Path) -> None:
    root = tmp_path / "profiles"
    stages = Stages(root)
    root.write_text("a file where the folder should be")
    assert await stages.start() == {"coordinator": "failed", "front": STOPPED, "back": STOPPED}
    assert stages.profiling.runs() == []
    root.unlink()
    assert await stages.start() == dict.fromkeys(("coordinator", "front", "back"), STARTED)
    stages.session.close()


async def test_a_template_that_no_message_can_carry_is_refused_before_anything_is_recorded(tmp_path: Path) -> None:
    stages = Stages(tmp_path)
    template = "{incarnation}" * 400  # its path is short, as each name that it stands for
    with pytest.raises(ConfigurationError, match=r"^torch_template: Expected `str` of length <= 4096$"):
        await stages.profiling.start(run_id="run", event_dir=None, template=template, config={}, torch=True)
    assert (stages.session.recording, stages.requests) == (None, [])
    assert await stages.start() == dict.fromkeys(("coordinator", "front", "back"), STARTED)
    stages.session.close()


async def test_a_run_that_ends_by_its_time_limit_is_over_for_the_coordinator_too(tmp_path: Path) -> None:
    stages = Stages(tmp_path)
    await stages.start(max_seconds=60)
    stages.session.stop(why="its time is over")
    stages.profiling.beat()
    assert stages.runs() == {"run": False}
    assert isinstance(await stages.joined(), ProfilerRead)
    stages.session.close()


async def test_a_run_is_over_when_the_next_one_starts_before_a_beat(tmp_path: Path) -> None:
    stages = Stages(tmp_path)
    await stages.start(max_seconds=60)
    stages.session.stop(why="its time is over")
    await stages.start("next")
    assert stages.runs() == {"next": True, "run": False}
    stages.session.stop(why="its time is over")
    await stages.profiling.stop(None)
    assert stages.runs() == {"next": False, "run": False}
    stages.session.close()


@pytest.mark.parametrize(("later_s", "left"), [(0.0, 60), (20.5, 40), (59.9, 1), (60.0, None), (1e6, None)])
async def test_a_process_that_joins_records_for_the_time_that_is_left(
    tmp_path: Path, later_s: float, left: int | None
) -> None:
    stages = Stages(tmp_path)
    await stages.start(max_seconds=60)
    stages.loop.later_s = later_s
    requests = await stages.joined()
    assert (requests.max_seconds if isinstance(requests, ProfilerStart) else None) == left
    stages.session.close()


async def test_a_process_that_joins_a_run_without_an_end_records_without_one(tmp_path: Path) -> None:
    stages = Stages(tmp_path)
    await stages.start()
    stages.loop.later_s = 1e6
    requests = await stages.joined()
    assert isinstance(requests, ProfilerStart) and (requests.run_id, requests.max_seconds) == ("run", 0)
    stages.session.close()


async def test_stopping_another_run_does_not_end_the_one_that_is_recorded(tmp_path: Path) -> None:
    stages = Stages(tmp_path)
    await stages.start("old")
    await stages.profiling.stop("old")
    await stages.start()
    await stages.profiling.stop("old")
    assert isinstance(await stages.joined(), ProfilerStart)
    stages.states = "not recording"
    with pytest.raises(RequestError, match="no profile run 'never'"):
        await stages.profiling.stop("never")
    stages.states = STOPPED
    stages.profiling.beat()
    assert isinstance(await stages.joined(), ProfilerStart)
    assert stages.runs() == {"run": True, "old": False}
    assert (await stages.profiling.stop("run")).complete
    assert isinstance(await stages.joined(), ProfilerRead)
    stages.session.close()


async def test_a_run_that_is_recorded_again_is_the_newest(tmp_path: Path) -> None:
    stages = Stages(tmp_path)
    for run_id in ("one", "two", "one"):
        await stages.start(run_id)
        await stages.profiling.stop(None)
    assert list(stages.runs()) == ["one", "two"]
    stages.session.close()
