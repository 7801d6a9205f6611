"""`/metrics` has what voice and chat services are judged by, of a real answer."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from omnipipeline_spec.pipeline import PipelineConfig, StageConfig
from omnipipeline_spec.types import metrics
from stage_runtime.metrics import catalog
from tests.e2e.local_pipelines import PATIENCE_S, Client, running

ROUTE = "POST /v1/pipeline"


async def test_a_streamed_answer_with_text_and_audio_gives_every_service_metric_a_value(base: Path) -> None:
    stages = [StageConfig(name="talk", process="talk", factory="service_stages:talk", terminal=True)]
    async with (
        running(PipelineConfig(name="service", stages=stages), base) as pipeline,
        Client(pipeline.url) as client,
        httpx.AsyncClient(base_url=pipeline.url, timeout=PATIENCE_S) as http,
    ):
        came, until = asyncio.Semaphore(0), base / "go on"
        streamed = asyncio.create_task(client.streamed("hello", came=came, until=str(until)))
        for _ in range(4):  # three words, and the sound before the gap
            await came.acquire()
        until.touch()
        await streamed
        assert (await client.post({"inputs": {}})).status_code == 200
        text = (await http.get("/metrics")).text
    found: dict[str, frozenset[str]] = {}
    values: dict[tuple[str, ...], float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = frozenset(sample.labels)
            if "le" not in sample.labels:
                values[sample.name, *sample.labels.values()] = sample.value
    expected = metrics.series(catalog.SERVICE)
    assert {name: labels for name, labels in found.items() if name in expected} == expected
    prefix = "omnipipeline_"
    assert values[f"{prefix}time_to_first_token_seconds_count", ROUTE] == 1
    assert values[f"{prefix}time_to_first_audio_seconds_count", ROUTE] == 1
    assert values[f"{prefix}inter_token_latency_seconds_count", ROUTE] == 2
    assert values[f"{prefix}tokens_total", ROUTE, "prompt"] == 10
    assert values[f"{prefix}tokens_total", ROUTE, "completion"] == 6
    assert values[f"{prefix}audio_underruns_total", ROUTE] == 1
    assert round(values[f"{prefix}audio_seconds_total", ROUTE], 3) == 0.22
    assert values[f"{prefix}real_time_factor_count", ROUTE] == 2
    assert values[f"{prefix}real_time_factor_sum", ROUTE] > 0.1 / 0.11
