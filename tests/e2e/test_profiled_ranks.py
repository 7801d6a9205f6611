"""Profiles of a TP stage of two ranks, in processes of their own: each rank answers, records and is fetched."""

from __future__ import annotations

import gzip
import io
import json
import os
import signal
import tarfile
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from omnipipeline_spec.cluster import Control
from omnipipeline_spec.pipeline import PipelineConfig, StageConfig
from stage_runtime.processes.one_machine.local import LocalPipeline
from tests.e2e.local_pipelines import HEARTBEAT_S, PATIENCE_S, eventually, running

SPEC = PipelineConfig(
    name="ranks",
    stages=[StageConfig(name="adder", factory="diamond_stages:ranks", gpu=[0, 1], tp_size=2, terminal=True)],
    control=Control(heartbeat_seconds=HEARTBEAT_S),
)
BODY = {"inputs": {"values": [1, 2, 3, 4]}}


def states(answer: httpx.Response) -> set[tuple[str, int, str]]:
    assert answer.status_code == 200, answer.text
    return {(each["stage"], each["rank"], each["state"]) for each in answer.json()["stages"]}


def everywhere(state: str) -> set[tuple[str, int, str]]:
    return {("coordinator", 0, state), ("adder", 0, state), ("adder", 1, state)}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def ranks() -> AsyncIterator[LocalPipeline]:
    """One pipeline for both tests: each of its ranks imports torch."""
    with tempfile.TemporaryDirectory(prefix="e-") as folder:
        environ = {"OMNI_PROFILE_ROOT": str(Path(folder, "profiles"))}
        async with running(SPEC, Path(folder), cpu=True, environ=environ) as pipeline:
            yield pipeline


async def test_each_rank_answers_for_itself_and_its_events_and_traces_are_fetched(ranks: LocalPipeline) -> None:
    async with httpx.AsyncClient(base_url=ranks.url, timeout=PATIENCE_S) as http:
        template = "deep/{stage}-{rank}"
        started = await http.post("/start_profile", json={"run_id": "deep", "trace_path_template": template})
        assert states(started) == everywhere("started")
        for _ in range(3):
            assert (await http.post("/v1/pipeline", json=BODY)).status_code == 200
        assert states(await http.post("/stop_profile", json={})) == everywhere("stopped")
        assert states(await http.post("/stop_profile", json={"run_id": "deep"})) == everywhere("not recording")
        report = (await http.get("/profiles/deep/report")).json()
        with tarfile.open(fileobj=io.BytesIO((await http.get("/profiles/deep")).content)) as files:
            content = {name: (files.extractfile(name) or io.BytesIO()).read() for name in files.getnames()}
        again = await http.post("/start_request_profile", json={"run_id": "again"})
        assert states(again) == everywhere("started")
        series = await _planes(http)
        assert states(await http.post("/stop_request_profile", json={})) == everywhere("stopped")
    runs = {
        each["stage"]: each["count"] for each in report["stage_breakdown"] if each["close_event"] == "stage_run_end"
    }
    assert runs == {"adder": 3, "adder rank 1": 3}
    assert sorted(each["rank"] for each in report["processes"]) == [0, 0, 1]
    assert report["unpaired_hops"] == {}
    traces = {Path(name).name[:7]: each for name, each in content.items() if name.endswith(".trace.json.gz")}
    assert set(traces) == {"adder-0", "adder-1"}
    assert all(json.loads(gzip.decompress(each))["traceEvents"] for each in traces.values())
    assert sum(name.endswith(".jsonl") for name in content) == 3
    assert {each.rpartition(".")[2] for each in series if each.startswith("adder.")} > {"rank1"}


async def _planes(http: httpx.AsyncClient) -> set[str]:
    """The processes whose arenas /metrics knows, once they have all beaten."""
    found: set[str] = set()

    async def known() -> bool:
        for family in text_string_to_metric_families((await http.get("/metrics")).text):
            found.update(each.labels["process"] for each in family.samples if "process" in each.labels)
        return len(found) == 3

    await eventually(known)
    return found


@pytest.mark.long
@pytest.mark.proves("profile-faults")
async def test_a_rank_that_dies_in_the_middle_ends_no_profile(ranks: LocalPipeline) -> None:
    async with httpx.AsyncClient(base_url=ranks.url, timeout=PATIENCE_S) as http:
        assert states(await http.post("/start_request_profile", json={"run_id": "run"})) == everywhere("started")
        before = ranks.pids()
        os.kill(before["adder_tp1"], signal.SIGKILL)

        async def replaced() -> bool:
            now = ranks.pids()
            return now.get("adder_tp1", before["adder_tp1"]) != before["adder_tp1"]

        await eventually(replaced)
        await ranks.ready()
        assert (await http.post("/v1/pipeline", json=BODY)).status_code == 200
        assert states(await http.post("/stop_profile", json={"run_id": "run"})) == everywhere("stopped")
        report: dict[str, Any] = (await http.get("/profiles/run/report")).json()
    assert sorted(each["rank"] for each in report["processes"]) == [0, 0, 0, 1, 1]
    assert sorted(each["complete"] for each in report["processes"]) == [False, False, True, True, True]
