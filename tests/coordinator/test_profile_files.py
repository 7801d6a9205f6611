"""Files of a profile that other processes name: their names stay inside the archive, their ends are known."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.coordinator.questions import profile_runs
from stage_runtime.coordinator.questions.clocks import Clocks
from stage_runtime.coordinator.questions.profile_runs import PipelineProfiling, RunFile
from stage_runtime.profiler.recording.session import ProfileSession


@given(st.text(max_size=64), st.text(max_size=64))
@pytest.mark.parametrize("path", ["../../etc/passwd", "/..", "..", "a/..", "/root/events/events_x_1.jsonl", "", "/"])
def test_no_name_leaves_the_folder_of_the_archive(path: str, group: str, other: str) -> None:
    folder = Path("/archive")
    for owner in (group, f"../{group}", f"/{group}"):
        for given_path in (path, other, f"{path}/{other}"):
            name = profile_runs._name(owner, given_path)
            assert ".." not in Path(name).parts
            assert (folder / name).is_relative_to(folder)


async def test_a_file_that_grows_is_fetched_up_to_the_size_it_was_listed_with(tmp_path: Path) -> None:
    path = tmp_path / "events_a_1.jsonl"
    path.write_bytes(b"x" * 1000)
    session = ProfileSession(tmp_path, ["coordinator"], incarnation=lambda: "cc")
    made = PipelineProfiling(session, dict, lambda *_: True, asyncio.get_running_loop(), Clocks())
    listed = RunFile(name="a", instance="", path=str(path), nbytes=600)
    pieces = [piece async for piece in made.content("run", listed)]
    session.close()
    assert b"".join(pieces) == b"x" * 600
