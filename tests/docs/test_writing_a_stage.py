"""docs/writing-a-stage.md: its modules are written to a folder, its tests are run, its pipeline is checked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest

import stage_runtime as omni
from omnipipeline_spec import loading, planning
from stage_runtime.engines.making import resolving
from tests.cli.test_up import PATIENCE_S, base
from tests.docs.blocks import ROOT, blocks
from tests.e2e.local_pipelines import running

__all__ = ["base"]

PAGE = "docs/writing-a-stage.md"


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every Python block, in the file that its first line names."""
    for block in blocks(PAGE, "python"):
        (tmp_path / block.splitlines()[0].removeprefix("# ")).write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_the_test_that_it_shows_passes(written: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_captions.py"]
    finished = subprocess.run(command, cwd=written, capture_output=True, text=True, timeout=100)
    assert finished.returncode == 0, finished.stdout
    assert "2 passed" in finished.stdout


def test_its_streaming_stage_speaks_every_word(written: Path) -> None:
    chunks = [omni.Chunk({"caption": "a red"}), omni.Chunk({"caption": "car"})]
    [one] = omni.testing.run_stage("speech:speak", ["p"], chunks)
    assert [sound.samples.size for sound in one.data] == [160, 480, 480]
    assert all(np.isclose(sound.samples, 0.1).all() for sound in one.data)
    assert {chunk.modality for chunk in one.chunks} == {"audio"}
    assert one.result == {"spoken": "request-0"}


def test_its_own_type_travels(written: Path) -> None:
    [one] = omni.testing.run_stage("shapes:find", [["cat"]])
    assert [(type(box).__name__, box.label) for box in one.result] == [("Box", "cat")]


def test_its_pipeline_plans_two_processes() -> None:
    pipeline, _ = blocks(PAGE, "yaml")
    planned = planning.plan(loading.loads(pipeline).spec)
    assert [group.name for unit in planned.units for group in unit.groups] == ["front", "model"]


@pytest.mark.parametrize(("ways", "counted"), [(["left"], {"left": 2}), (["left", "right"], {"left": 2, "right": 2})])
async def test_its_routes_and_joins_give_what_each_way_has_counted(
    ways: list[str], counted: dict[str, int], written: Path, base: Path
) -> None:
    (written / "ways.yaml").write_text(blocks(PAGE, "yaml")[1])
    async with running(written / "ways.yaml", base) as pipeline:
        async with httpx.AsyncClient(base_url=pipeline.url, timeout=PATIENCE_S) as client:
            answer = await client.post("/v1/pipeline", json={"inputs": {"text": "hello you", "ways": ways}})
    assert answer.json()["results"] == {"join": counted}, answer.text


def test_its_table_of_hooks_has_the_arguments_that_are_checked() -> None:
    page = (ROOT / PAGE).read_text()
    for hook, arguments in resolving.HOOKS.items():
        [row] = [line for line in page.splitlines() if line.startswith(f"| `{hook}")]
        assert f"`({', '.join(arguments)})`" in row
