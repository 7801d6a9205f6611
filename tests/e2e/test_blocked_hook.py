"""A terminalStagesFn that blocks, or writes into its request, costs its own request alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.e2e.local_pipelines import PATIENCE_S, running

PIPELINE = """
apiVersion: omnipipeline.dev/v1alpha1
kind: OmniPipeline
metadata: {name: choosy}
spec:
  terminalStagesFn: "choosy:terminals"
  code:
    inline:
      choosy.py: |
        import time

        def terminals(request):
            if request.inputs["text"] == "block":
                time.sleep(3600)
            request.inputs["text"] = "written by the hook"
            return ["echo"]

        def echo():
            return lambda payload: payload.data["text"]
  stages:
  - {name: echo, process: only, factory: "choosy:echo", terminal: true}
"""


@pytest.mark.proves("blocked-hook")
async def test_a_blocked_terminal_stages_fn_costs_its_own_request_alone(base: Path, tmp_path: Path) -> None:
    file = tmp_path / "choosy.yaml"
    file.write_text(PIPELINE)
    async with running(file, base) as pipeline, httpx.AsyncClient(base_url=pipeline.url, timeout=PATIENCE_S) as http:
        before = pipeline.pids()

        async def ask(text: str, **headers: str) -> httpx.Response:
            return await http.post("/v1/pipeline", json={"inputs": {"text": text}}, headers=headers)

        blocked = [asyncio.create_task(ask("block")) for _ in range(2)]
        ending = [asyncio.create_task(ask("block", **{"x-request-timeout": "2"})) for _ in range(2)]
        answers = await asyncio.gather(*(ask(f"hello {number}") for number in range(10)))
        assert not any(task.done() for task in blocked), "they were answered meanwhile"
        assert [answer.json()["results"]["echo"] for answer in answers] == [f"hello {n}" for n in range(10)]
        for task in ending:
            refused = await task
            assert refused.status_code == 504, refused.text
            assert refused.json()["error"]["code"] == "deadline"
        left, waiting = blocked
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        assert pipeline.pids() == before
        await pipeline.stop()  # neither the client that left nor the one that waits is waited for
        refused = await waiting
        assert refused.status_code == 503, refused.text
        assert refused.json()["error"]["message"] == "the coordinator is draining"
