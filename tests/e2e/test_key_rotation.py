"""API keys are read again when their file changes: a rotation under load fails no request."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import httpx

from tests.e2e.local_pipelines import HELLO, PATIENCE_S, eventually, running

QUESTION = {"inputs": "good morning"}


def write(path: Path, *keys: str) -> None:
    """Write as a kubelet does: the file is whole at every moment."""
    fresh = path.with_name("fresh")
    fresh.write_text("\n".join(keys))
    os.replace(fresh, path)


async def test_a_rotation_under_load_fails_no_request(base: Path, tmp_path: Path) -> None:
    given = tmp_path / "keys"
    write(given, "old")
    async with (
        running(HELLO, base, api_key_file=given) as pipeline,
        httpx.AsyncClient(base_url=pipeline.url, timeout=PATIENCE_S) as http,
    ):
        watched = pipeline.key_file
        assert watched is not None

        async def status(key: str) -> int:
            return (
                await http.post("/v1/pipeline", json=QUESTION, headers={"authorization": f"Bearer {key}"})
            ).status_code

        using, answered, ended = "old", [], asyncio.Event()

        async def load() -> None:
            while not ended.is_set():
                answered.append(await status(using))

        clients = [asyncio.create_task(load()) for _ in range(4)]
        assert await status("new") == 401

        async def known(key: str, code: int) -> bool:
            return await status(key) == code

        write(watched, "old", "new")
        await eventually(lambda: known("new", 200))
        using = "new"
        await eventually(lambda: asyncio.sleep(0, len(answered) > 50))
        write(watched)  # a mistake: nobody is let in by it, and nobody is locked out
        write(watched, "two words")
        write(watched, "new")
        await eventually(lambda: known("old", 401))
        ended.set()
        await asyncio.gather(*clients)
        assert set(answered) == {200}
