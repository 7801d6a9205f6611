"""Nothing that comes over a socket is unpickled: an audit hook in every process counts 0."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e.local_pipelines import APART, HERE, Client, diamond, running


def audited(folder: Path, pids: dict[str, int]) -> dict[str, list[str]]:
    """The names that each process has unpickled. Fails for one that is not being listened to."""
    found = {}
    for name, pid in pids.items():
        first, *unpickled = (folder / str(pid)).read_text().splitlines()
        assert first == "audited"
        found[name] = unpickled
    return found


@pytest.mark.proves("never-unpickled")
async def test_no_process_unpickles_anything(base: Path) -> None:
    folder = base / "audit"
    folder.mkdir()
    path = os.pathsep.join([str(HERE / "audit"), str(HERE)])
    environ = {"PYTHONPATH": path, "AUDIT_FOLDER": str(folder)}
    async with running(diamond(APART), base, environ=environ) as pipeline, Client(pipeline.url) as client:
        for size in (4, 1 << 20):
            assert (await client.answer("one two", size=size))["text"] == "one two"
            await client.streamed("one two", size=size)
        assert "error" in await client.ask("one two", fail="merge_fn")
        assert audited(folder, pipeline.pids()) == {name: [] for name in pipeline.pids()}
        await client.answer("one two", unpickle=True)  # the positive control
        assert audited(folder, pipeline.pids())["front"] == ["diamond_stages.Broken"]
