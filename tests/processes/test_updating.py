"""`omni up --watch`: only what has changed restarts, requests in flight finish, a mistake changes nothing."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Any

import httpx
import pytest

from omnipipeline_spec import planning
from omnipipeline_spec.pipeline import PipelineConfig, StageConfig
from omnipipeline_spec.types.errors import SpecError
from omnipipeline_spec.types.plan import PipelinePlan
from stage_runtime.processes.one_machine import updating
from stage_runtime.processes.one_machine.local import LocalOptions, LocalPipeline
from stage_runtime.processes.one_machine.preparing import imports_beside
from stage_runtime.processes.supervision.startup_failures import StartupFailed

NOBODY = 65534  # a user without rights


def planned(**more: Any) -> PipelinePlan:
    stages = [
        StageConfig(name="a", process="a", factory="one:make", next="b"),
        StageConfig(name="b", process="b", factory="pack.two:make", terminal=True, **more),
    ]
    return planning.plan(PipelineConfig(name="p", stages=stages))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pack").mkdir()
    for name, text in {
        "one.py": "import shared",
        "shared.py": "x = 1",
        "pack/__init__.py": "",
        "pack/two.py": "from . import three\nfrom pack.four import y",
        "pack/three.py": "(",
        "pack/four.py": "import shared.nothing",
        "alone.py": "",
    }.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(("file", "units"), [
    ("one.py", ("a",)), ("shared.py", ("a", "b")), ("pack/two.py", ("b",)), ("pack/three.py", ("b",)),
    ("pack/__init__.py", ("b",)), ("pack/four.py", ("b",)), ("alone.py", ()),
])  # fmt: skip
def test_a_file_concerns_the_units_that_import_it(folder: Path, file: str, units: tuple[str, ...]) -> None:
    plan = planned()
    assert updating.change(plan, plan, {folder / file}, folder).begin == units


def test_a_folder_to_which_links_lead_is_looked_into_once(folder: Path) -> None:
    plain = set(imports_beside.files(folder))
    for name in ("pack/up", "here", "there"):
        (folder / name).symlink_to(folder)
    assert sorted(imports_beside.files(folder)) == sorted(plain)


def test_a_folder_that_may_not_be_read_hides_no_other_file() -> None:
    with tempfile.TemporaryDirectory(prefix="t-") as made:
        os.chmod(made, 0o755)
        for name in ("a", "locked"):
            (Path(made) / name).mkdir()
            (Path(made) / name / "one.py").touch()
        os.chmod(Path(made) / "locked", 0)
        effective = os.geteuid()
        try:
            if not effective:
                os.seteuid(NOBODY)
            assert updating.state(Path(made) / "pipeline.yaml").keys() == {Path(made) / "a/one.py"}
        finally:
            os.seteuid(effective)
            os.chmod(Path(made) / "locked", 0o700)


def test_other_arguments_concern_their_unit_alone() -> None:
    found = updating.change(planned(), planned(factory_args={"x": 1}), set(), None)
    assert (found.begin, found.end, found.limits, found.at_start) == (("b",), ("b",), (), False)
    assert found.told({}) == "restarted b"
    same = updating.change(planned(), planned(), set(), None)
    assert (same.begin, same.end, same.told({"b": 3})) == ((), (), "b has 3 instances")


async def test_a_change_is_seen_once_it_is_whole(folder: Path) -> None:
    file = folder / "one.py"
    known = updating.state(file)
    assert len(known) == 7 == len(list(imports_beside.files(folder)))
    waiting = asyncio.create_task(updating.changed(file, known, look_s=0.0))
    os.utime(folder / "shared.py", (1, 1))
    assert updating.differing(known, await waiting) == {folder / "shared.py"}


YAML = """
name: watched
stages:
- {name: a, process: a, factory: "first:make", next: [b]}
- {name: b, process: b, factory: "second:make", factoryArgs: {mark: "%s"}, terminal: true}
"""
FIRST = "def make():\n    return lambda payload: payload.data['text']\n"
SECOND = """
import time
def make(mark):
    def run(payload):
        if payload.data == "slow":
            time.sleep(1.0)
        return payload.data + mark
    return run
"""


async def test_only_what_changed_restarts_and_a_mistake_changes_nothing() -> None:
    with tempfile.TemporaryDirectory(prefix="w-") as name:
        folder = Path(name).resolve()
        file = folder / "pipeline.yaml"
        file.write_text(YAML % "1")
        (folder / "first.py").write_text(FIRST)
        (folder / "second.py").write_text(SECOND)
        options = LocalOptions(port=0, no_auth=True)
        async with (
            LocalPipeline(file, overrides=[f"endpoints.basePath={folder}"], options=options) as running,
            httpx.AsyncClient(base_url=running.url, timeout=60) as http,
        ):

            async def ask(text: str) -> Any:
                answer = await http.post("/v1/pipeline", json={"inputs": {"text": text}})
                return answer.json()["results"]["b"]

            def pids() -> dict[str, int]:
                return {process.partition(".")[0]: pid for process, pid in running.pids().items()}

            before = pids()
            assert await ask("x") == "x1"
            slow = asyncio.create_task(ask("slow"))
            file.write_text(YAML % "2")
            assert await running.update({file}) == "restarted b"
            assert (await slow)[:4] == "slow"
            assert await ask("x") == "x2"
            after = pids()
            assert (after["a"], after["coordinator"]) == (before["a"], before["coordinator"])
            assert before["b"] not in after.values()

            file.write_text(YAML.replace("next:", "nxt:") % "3")
            with pytest.raises(SpecError, match="nxt"):
                await running.update({file})
            file.write_text(YAML.replace("second:make", "second:mkae") % "3")
            with pytest.raises(StartupFailed, match="mkae"):
                await running.update({file})
            assert await ask("x") == "x2" and pids() == after

            file.write_text(YAML % "2")
            (folder / "first.py").write_text(FIRST.replace("['text']", "['text'].upper()"))
            assert await running.update({folder / "first.py"}) == "restarted a"
            assert await ask("x") == "X2"
            assert await running.update({file}) == "nothing that runs has changed"
            file.write_text((YAML % "2").replace("mark:", "odd: null, mark:"))
            assert await running.update({file}) == "nothing that runs has changed"
            (notice,) = running.notices
            assert "factoryArgs.odd: null sets nothing here" in notice

            file.write_text((YAML % "4").replace("watched", "renamed"))
            told = await running.update({file})
            assert told.startswith("restarted b; the name, serves, accepts and coordinator are read when")
            assert await ask("x") == "X4"
            file.write_text((YAML % "5").replace("watched", "renamed"))
            assert await running.update({file}) == "restarted b"
