"""Requests of real processes as OpenTelemetry traces, at a collector that the test runs."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import httpx
import pytest

from omnipipeline_spec.cluster import Observability, Tracing
from omnipipeline_spec.pipeline import PipelineConfig, StageConfig
from stage_runtime.processes.starting import launching
from tests.e2e.local_pipelines import APART, PATIENCE_S, Client, diamond, eventually, running
from tests.e2e.pod_pipelines import pods
from tests.telemetry import collector
from tests.thoroughness import THOROUGH

pytest.importorskip("opentelemetry.proto.trace.v1.trace_pb2")

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY: dict[str, Any] = {"inputs": {"text": "the quick fox"}}


def traced(url: str, ratio: float) -> Observability:
    return Observability(tracing=Tracing(endpoint=url, sample_ratio=ratio))


async def test_a_request_is_a_trace_of_its_stages_and_hops_and_a_child_of_its_clients_span(base: Path) -> None:
    with collector.running() as taking:
        spec = diamond(APART, observability=traced(taking.url, 0.0))
        async with (
            running(spec, base) as pipeline,
            httpx.AsyncClient(base_url=pipeline.url, timeout=PATIENCE_S) as http,
        ):
            for flag in ("00", "01"):  # the client's decision holds
                headers = {"traceparent": f"00-{TRACE}-{PARENT}-{flag}", "x-request-id": f"mine-{flag}"}
                assert (await http.post("/v1/pipeline", json=BODY, headers=headers)).status_code == 200
            assert (await http.post("/v1/pipeline", json=BODY)).status_code == 200  # of its own: a ratio of 0
            failing = {"inputs": {**BODY["inputs"], "fail": "left"}}
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "broken"}
            assert (await http.post("/v1/pipeline", json=failing, headers=headers)).status_code == 500
            await eventually(lambda: {"mine-01", "broken"} <= set(_requests(taking)))

            async def counted() -> bool:  # when the collector has answered
                return "omnipipeline_traces_sent_total 2.0" in (await http.get("/metrics")).text

            await eventually(counted)
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
    assert (broken.status.code, "left fails on request" in broken.status.message) == (2, True)
    [failed] = [span for span in taking.spans if span.parent_span_id == broken.span_id and span.name == "left"]
    assert failed.status.code == 2
    assert taking.resources[0]["service.name"] == "diamond"


async def test_pods_send_spans_of_authors_too_and_keep_the_clients_tracestate(base: Path) -> None:
    """TCP, CURVE, and a disk of its own for every process, as pods have them."""
    spec = PipelineConfig(
        name="traced",
        stages=[
            StageConfig(name="look", factory="traced_stages:look", process="one", next="say"),
            StageConfig(name="say", factory="traced_stages:say", process="two", terminal=True),
        ],
    )
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1,other=a b"}
    with collector.running() as taking:
        tracing = launching.tracing(Tracing(endpoint=taking.url, sample_ratio=0.0))
        environments = {
            name: {**tracing, "OMNI_PROFILE_ROOT": str(base / "disks" / name)} for name in ("coordinator", "one", "two")
        }
        async with (
            pods(spec, base, environments=environments) as running_pods,
            httpx.AsyncClient(base_url=running_pods.url("coordinator"), timeout=PATIENCE_S) as http,
        ):
            # Each torch trace takes an import of torch; test_profiled_ranks.py has some each time.
            started = await http.post("/start_profile", json={"run_id": "run", "enable_torch": THOROUGH})
            assert started.json()["complete"], started.text
            for text, status in (("hello", 200), ("broken", 500)):
                asked = await http.post(
                    "/v1/pipeline", json={"inputs": text}, headers={**headers, "x-request-id": text}
                )
                assert asked.status_code == status
            assert (await http.post("/v1/pipeline", json={"inputs": "unsampled"})).status_code == 200
            assert (await http.post("/stop_profile", json={})).json()["complete"]
            report = (await http.get("/profiles/run/report")).json()
            archive = await http.get("/profiles/run")
            await eventually(lambda: sum(span.name in ("page", "voice") for span in list(taking.spans)) == 4)
            await eventually(lambda: {"hello", "broken"} <= set(_roots(taking)))
    roots, found = _roots(taking), {}
    for span in taking.spans:
        facts = collector.attributes(span.attributes)
        if span.name in ("scan", "page", "voice"):
            found[span.name, facts["omni.request.id"]] = span
    for name in ("hello", "broken"):
        [stage] = [span for span in taking.spans if span.parent_span_id == roots[name].span_id and span.name == "say"]
        assert found["voice", name].parent_span_id == stage.span_id
        assert found["page", name].parent_span_id == found["scan", name].span_id
    assert found["voice", "broken"].status.message == "ValueError"
    assert collector.attributes(found["scan", "hello"].attributes)["pages"] == 3
    assert {span.trace_state for span in roots.values()} == {headers["tracestate"]}
    assert {span.trace_id.hex() for span in taking.spans} == {TRACE}
    spans = {(each["stage"], each["open_event"]): each["count"] for each in report["stage_breakdown"]}
    assert (spans["look", "page_start"], spans["say", "voice_start"]) == (3, 3)
    assert report["unpaired_hops"] == {}
    with tarfile.open(fileobj=io.BytesIO(archive.content)) as files:
        names = files.getnames()
    assert sum(name.endswith(".trace.json.gz") for name in names) == (2 if THOROUGH else 0)
    assert sum(name.endswith(".jsonl") for name in names) == 3


def _roots(taking: collector.Collector) -> dict[str, Any]:
    return {name: span for name, span in _requests(taking).items() if span.parent_span_id.hex() == PARENT}


def _requests(taking: collector.Collector) -> dict[str, Any]:
    """Request id -> its own span."""
    own = ((collector.attributes(span.attributes), span) for span in list(taking.spans))
    return {facts["omni.request.id"]: span for facts, span in own if "omni.request.kind" in facts}


@pytest.mark.proves("collector-away")
async def test_requests_are_served_while_the_collector_is_away_or_its_address_is_wrong(base: Path) -> None:
    for url in ("http://127.0.0.1:9", "collector:4317"):
        spec = diamond(dict.fromkeys(APART, "all"), observability=traced(url, 1.0))
        async with running(spec, base) as pipeline, Client(pipeline.url) as client:
            for _ in range(3):
                await client.answer("the quick fox")
    lines = [line for line in (base / "log").read_text().splitlines() if "traces" in line]
    assert sum("no traces reach" in line for line in lines) <= 1
    [wrong] = [line for line in lines if "no traces are sent" in line]
    assert "OTEL_EXPORTER_OTLP_ENDPOINT: 'collector:4317' is not an http:// or https:// URL" in wrong
