"""A profile's start and stop: what the coordinator records of a request, every stage records too."""

from __future__ import annotations

import asyncio
from pathlib import Path

from stage_runtime.coordinator.clocks import Clocks
from stage_runtime.coordinator.profiling import PipelineProfiling
from stage_runtime.profiler.recorder import Recorder
from stage_runtime.profiler.session import STARTED, STOPPED, ProfileSession
from stage_runtime.wire.messages import Message, ProfilerReply, ProfilerStart, ProfilerStop
from stage_runtime.wire.parts import Member

MEMBER = Member("aa", "a", "a-0", "r", "tcp://127.0.0.1:1", {}, ("front", "back"), True)


class Stages:
    """A process that answers profiler messages, and notes what the coordinator records meanwhile."""

    def __init__(self, root: Path) -> None:
        self.session = ProfileSession(root, ["coordinator"], incarnation=lambda: "cc", recorder=Recorder())
        self.noted: list[tuple[str, str | None]] = []
        loop = asyncio.get_running_loop()
        self.profiling = PipelineProfiling(self.session, lambda: {"aa": MEMBER}, self._take, loop, Clocks())

    def _take(self, instance: str, message: Message) -> bool:
        states = {}
        if isinstance(message, ProfilerStart | ProfilerStop):
            self.noted.append((type(message).__name__, self.session.recording))
            state = STARTED if isinstance(message, ProfilerStart) else STOPPED
            states = dict.fromkeys(MEMBER.stages, state)
        reply = ProfilerReply(message.call_id, 1, 2, stages=states)  # type: ignore[union-attr]
        asyncio.get_running_loop().call_soon(self.profiling.replied, instance, reply)
        return True

    async def start(self) -> dict[str, str]:
        answer = await self.profiling.start(
            run_id="run", event_dir=None, template=None, config={}, torch=False, max_seconds=None
        )
        return {each.stage: each.state for each in answer.stages}


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
