"""Files of a profile that nobody waits for any more are not fetched from the stages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import httpx
import pytest

from stage_runtime.coordinator.questions.profile_runs import PipelineProfiling, RunFile
from stage_runtime.web import routes
from stage_runtime.web.app import make_app
from stage_runtime.web.listening import server
from stage_runtime.web.sound.pool import CodecPool
from tests.web.running import ALL, PATIENCE_S
from tests.web.scripted_manager import ScriptedManager, play


class EndlessRun:
    """A run with one file that has no end. ``left``: nobody reads it any more."""

    def __init__(self) -> None:
        self.begun, self.left = asyncio.Event(), asyncio.Event()

    async def files(self, run_id: str) -> list[RunFile]:
        return [RunFile(name="talk.jsonl", instance="talk-1", path="talk.jsonl", nbytes=1)]

    async def content(self, run_id: str, file: RunFile) -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"{}\n"
                self.begun.set()
                await asyncio.sleep(0)
        finally:
            self.left.set()


@pytest.mark.parametrize("path", ["/profiles/demo", "/profiles/demo/report"])
async def test_files_are_fetched_no_further_when_their_client_is_gone(path: str) -> None:
    run = EndlessRun()
    manager: Any = ScriptedManager(play())
    async with CodecPool() as codecs:
        admin = routes.profiler(cast(PipelineProfiling, run))
        app = make_app(manager, ALL, codecs=codecs, admin=admin)
        async with (
            server.Server(app, port=0, drain_s=2.0) as running,
            httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client,
            asyncio.timeout(PATIENCE_S),
        ):
            asked = asyncio.create_task(client.get(path))
            await run.begun.wait()
            asked.cancel()
            await run.left.wait()
