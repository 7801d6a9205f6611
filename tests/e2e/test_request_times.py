"""``GET /v1/requests/{id}`` says where the time of a request of real processes went, without a profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.local_pipelines import APART, PATIENCE_S, SPREAD, TOGETHER, Client, diamond, running
from tests.thoroughness import rows

WORDS = "the quick brown fox"


@pytest.mark.long
@pytest.mark.parametrize("processes", rows([APART, TOGETHER, SPREAD], each_run=2))
async def test_each_stage_and_each_hop_has_a_start_and_an_end(base: Path, processes: dict[str, str]) -> None:
    async with running(diamond(processes), base) as pipeline, Client(pipeline.url) as client:
        body = {"inputs": {"text": WORDS, "nap": 0.05}}
        assert (await client.post(body, request_id="plain")).status_code == 200
        assert (await client.post({**body, "stream": True}, request_id="streamed")).status_code == 200
        async with httpx.AsyncClient(base_url=pipeline.url, timeout=PATIENCE_S) as http:
            records = [(await http.get(f"/v1/requests/{each}")).json() for each in ("plain", "streamed")]
            graph = (await http.get("/status")).json()
    expected = {
        ("coordinator", "take", "payload"),
        ("take", "left", "payload"),
        ("take", "right", "payload"),
        ("left", "join", "payload"),
        ("right", "join", "payload"),
        ("join", "write", "payload"),
        ("write", "speak", "payload"),
        ("write", "speak", "stream"),
        ("speak", "coordinator", "payload"),
        ("speak", "coordinator", "stream"),
    }
    for record in records:
        assert {(hop["source"], hop["target"], hop["kind"]) for hop in record["hops"]} == expected
        _check_times(record)
    assert set(graph["stages"]) == set(APART)
    assert ["write", "speak", "stream"] in graph["edges"]


def _check_times(record: dict[str, Any]) -> None:
    """Times are in the order in which things happen, and all within the request's."""
    stages, total_ms = record["stages"], record["total_ms"]
    assert set(stages) == set(APART)
    assert stages["take"]["run_ms"] >= 50
    for stage in stages.values():
        assert stage["end_ms"] - stage["start_ms"] == pytest.approx(stage["queue_ms"] + stage["run_ms"], abs=0.01)
    for hop in record["hops"]:
        assert -0.01 <= hop["start_ms"] <= hop["end_ms"] <= total_ms + 1
        if hop["source"] in stages:
            source = stages[hop["source"]]
            assert source["start_ms"] <= hop["start_ms"] <= source["end_ms"] + 0.01
        if hop["target"] in stages:
            assert stages[hop["target"]]["start_ms"] <= hop["end_ms"] + 0.01
