"""Operations of engines, asked by HTTP and by `omni call`: of replicas, of ranks, of processes that die of them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest_asyncio

from omnipipeline_spec.cluster import Control
from omnipipeline_spec.pipeline import PipelineConfig, StageConfig
from stage_runtime.processes.one_machine.local import LocalPipeline
from tests.e2e.local_pipelines import HEARTBEAT_S, PATIENCE_S, replicas, running

SPEC = PipelineConfig(
    name="operated",
    stages=[
        StageConfig(name="first", factory="operated_stages:alone", process="first", next="ranks"),
        StageConfig(name="ranks", factory="operated_stages:ranks", gpu=[0, 1], tp_size=2, next="last"),
        StageConfig(name="last", factory="operated_stages:plain", process="last", terminal=True),
    ],
    process_groups=replicas(first=2),
    control=Control(heartbeat_seconds=HEARTBEAT_S),
)


async def ask(http: httpx.AsyncClient, operation: str, *stages: str, **arguments: Any) -> list[dict[str, Any]]:
    body = {"operation": operation, "stages": stages, "arguments": arguments}
    answer = await http.post("/operations", json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["failed"] == sum(one["error"] is not None for one in found["results"])
    return list(found["results"])


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def operated() -> AsyncIterator[LocalPipeline]:
    with tempfile.TemporaryDirectory(prefix="e-") as folder:
        async with running(SPEC, Path(folder), cpu=True) as pipeline:
            yield pipeline


async def test_every_process_of_a_stage_answers_for_itself(operated: LocalPipeline) -> None:
    async with httpx.AsyncClient(base_url=operated.url, timeout=PATIENCE_S) as http:
        echoed = await ask(http, "echo", "first", level=[1, "two", None])
        assert [one["value"] for one in echoed] == [{"level": [1, "two", None]}] * 2
        assert len({one["instance"] for one in echoed}) == 2
        answers = await ask(http, "rank", "ranks", "first")
        assert [(one["stage"], one["rank"], one["value"]) for one in answers] == [
            ("ranks", 0, 0),
            ("ranks", 1, 1),
            ("first", 0, 0),
            ("first", 0, 0),
        ]
        odd = await ask(http, "odd", "ranks")
        assert all("object" in one["error"] for one in odd) and [one["rank"] for one in odd] == [0, 1]
        numbered = await ask(http, "numbered", "first")
        assert [one["value"] for one in numbered] == [None, None] and all(one["error"] for one in numbered)
        refused = await ask(http, "refuse", "ranks")
        assert [one["error"] for one in refused] == ["ValueError: rank 0 will not", "ValueError: rank 1 will not"]
        (plain,) = await ask(http, "echo", "last")
        assert plain["error"] == "stage 'last' takes no operations"
        missing = await http.post("/operations", json={"operation": "echo", "stages": ["firts"]})
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
        for body in (
            {"stages": ["first"]},
            {"operation": "echo", "stages": []},
            {"operation": "", "stages": ["first"]},
            {"operation": "o" * 65, "stages": ["first"]},  # no message to a process has longer names
            {"operation": "echo", "stages": ["first"], "timeout_seconds": 0},
        ):
            assert (await http.post("/operations", json=body)).status_code == 400
        huge = {"operation": "echo", "stages": ["first"], "arguments": {"v": 1 << 70}}
        too_large = await http.post("/operations", json=huge)
        assert (too_large.status_code, too_large.json()["error"]["param"]) == (400, "arguments")
        late = await http.post(
            "/operations", content=b'{"operation":"unknown","stages":["first"],"timeout_seconds":0.2}'
        )
        assert [one["error"] for one in late.json()["results"]] == ["no answer within 0.2 s"] * 2
        assert (await http.post("/v1/pipeline", json={"inputs": {}})).status_code == 200

        shown = await _omni(operated.url, "call", "ranks", "rank")
        assert shown.returncode == 0, shown.stderr
        first, second = shown.stdout.splitlines()
        assert first.endswith(": 0") and second.endswith(" rank 1: 1")
        failed = await _omni(operated.url, "call", "ranks", "refuse", "--arguments", json.dumps({"a": 1}))
        assert (failed.returncode, failed.stdout) == (1, "") and "rank 1 will not" in failed.stderr
        wrong = await _omni(operated.url, "call", "ranks", "rank", "--arguments", "[1]")
        assert wrong.returncode == 2 and "JSON object" in wrong.stderr


async def test_a_process_that_dies_of_an_operation_is_named_at_once_and_replaced(operated: LocalPipeline) -> None:
    async with httpx.AsyncClient(base_url=operated.url, timeout=PATIENCE_S) as http:
        gone = await ask(http, "die", "first")
        assert [one["error"] for one in gone] == ["no answer: the process is gone"] * 2
        async with asyncio.timeout(PATIENCE_S):
            while (await http.post("/v1/pipeline", json={"inputs": {}})).status_code != 200:
                await asyncio.sleep(0.2)
        assert [one["error"] for one in await ask(http, "echo", "first")][:1] == [None]
        await operated.ready()


async def _omni(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from stage_runtime.cli import main; main()", *arguments, "--url", url]
    return await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
