"""Requests of real processes as OpenTelemetry traces, at a collector that the test runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from omnipipeline_spec.cluster import Observability, Tracing
from tests.e2e.local_pipelines import APART, Client, diamond, eventually, running
from tests.telemetry import collector

pytest.importorskip("opentelemetry.proto.trace.v1.trace_pb2")

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY: dict[str, Any] = {"inputs": {"text": "the quick fox"}}


def traced(url: str, ratio: float) -> Observability:
    return Observability(tracing=Tracing(endpoint=url, sample_ratio=ratio))


async def test_a_request_is_a_trace_of_its_stages_and_hops_and_a_child_of_its_clients_span(base: Path) -> None:
    with collector.running() as taking:
        spec = diamond(APART, observability=traced(taking.url, 0.0))
        async with running(spec, base) as pipeline, httpx.AsyncClient(base_url=pipeline.url, timeout=40) as http:
            for flag in ("00", "01"):  # the client's decision holds
                headers = {"traceparent": f"00-{TRACE}-{PARENT}-{flag}", "x-request-id": f"mine-{flag}"}
                assert (await http.post("/v1/pipeline", json=BODY, headers=headers)).status_code == 200
            assert (await http.post("/v1/pipeline", json=BODY)).status_code == 200  # of its own: a ratio of 0
            failing = {"inputs": {**BODY["inputs"], "fail": "left"}}
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "broken"}
            assert (await http.post("/v1/pipeline", json=failing, headers=headers)).status_code == 500
            await eventually(lambda: {"mine-01", "broken"} <= set(_requests(taking)))
            metrics = (await http.get("/metrics")).text
    requests = _requests(taking)
    assert set(requests) == {"mine-01", "broken"}
    root, broken = requests["mine-01"], requests["broken"]
    assert {span.trace_id.hex() for span in taking.spans} == {TRACE}
    assert (root.parent_span_id.hex(), root.kind, root.status.code) == (PARENT, 2, 0)
    children = {span.name: span for span in taking.spans if span.parent_span_id == root.span_id}
    assert set(children) == {
        *APART,
        "coordinator to take",
        "take to left",
        "take to right",
        "left to join",
        "right to join",
        "join to write",
        "write to speak",
        "speak to coordinator",
    }
    for span in children.values():
        slack_ns = 1_000_000
        assert root.start_time_unix_nano - slack_ns <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= root.end_time_unix_nano + slack_ns
    assert collector.attributes(children["left"].attributes)["omni.stage"] == "left"
    assert (broken.status.code, "left was told to" in broken.status.message) == (2, True)
    [failed] = [span for span in taking.spans if span.parent_span_id == broken.span_id and span.name == "left"]
    assert failed.status.code == 2
    assert taking.resources[0]["service.name"] == "diamond"
    assert "omnipipeline_traces_sent_total 2.0" in metrics


def _requests(taking: collector.Collector) -> dict[str, Any]:
    """Request id -> its own span."""
    own = ((collector.attributes(span.attributes), span) for span in list(taking.spans))
    return {facts["omni.request.id"]: span for facts, span in own if "omni.request.id" in facts}


async def test_requests_are_served_while_the_collector_is_away_or_its_address_is_wrong(base: Path) -> None:
    for url in ("http://127.0.0.1:9", "collector:4317"):
        spec = diamond(dict.fromkeys(APART, "all"), observability=traced(url, 1.0))
        async with running(spec, base) as pipeline, Client(pipeline.url) as client:
            for _ in range(3):
                await client.answer("the quick fox")
    lines = [line for line in (base / "log").read_text().splitlines() if "traces" in line]
    assert sum("no traces reach" in line for line in lines) <= 1
    [wrong] = [line for line in lines if "no traces are sent" in line]
    assert "OTEL_EXPORTER_OTLP_ENDPOINT: 'collector:4317' is no http:// or https:// URL" in wrong
