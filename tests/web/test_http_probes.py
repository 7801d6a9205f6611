"""Probes, metrics and the OpenAPI document, on the public port and on one of their own."""

from __future__ import annotations

import httpx
import msgspec
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from omnipipeline_spec.types.routes import ROUTES, SOCKETS
from stage_runtime.coordinator.events import ResultEvent
from stage_runtime.errors import InvalidRequest
from stage_runtime.metrics import catalog
from stage_runtime.metrics.samples import Buckets, Samples
from stage_runtime.web.app import make_admin, make_app, make_probes
from stage_runtime.web.exchanges.apikeys import ApiKeys
from stage_runtime.web.exchanges.exchange import Exchange
from stage_runtime.web.exchanges.memory_budget import MemoryBudget
from stage_runtime.web.exchanges.metrics import CoordinatorMetrics
from stage_runtime.web.listening.server import Server
from stage_runtime.web.routing import Route
from stage_runtime.web.sound.pool import CodecPool
from stage_runtime.wire.values import Audio, Text
from tests.web.running import ALL, PATIENCE_S, start
from tests.web.scripted_manager import ScriptedManager, chunk, play

OK = play(ResultEvent(stage="talk", data=Text("ok")))
SAMPLES: Samples = {
    catalog.REQUESTS: {("chat", "completed"): 3, ("pipeline", "deadline"): 1},
    catalog.REQUESTS_IN_FLIGHT: {(): 2},
    catalog.STAGE_WAITING: {("talk",): 1},
    catalog.STAGE_RUN_TIME: {("talk",): Buckets((1,) * 9 + (2,) * 7 + (3,), 4.5)},
    catalog.ARENA_SLOTS: {("coordinator", "filling"): 1},
}


def samples(text: str) -> dict[str, float]:
    """``name{label=value}`` -> number, as Prometheus reads them."""
    return {
        sample.name + "".join(f",{key}={value}" for key, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_what_the_request_manager_counts_is_what_prometheus_reads() -> None:
    async with start(OK) as running, httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
        running.manager.samples = SAMPLES
        answer = await client.get("/metrics")
    found = {name: value for name, value in samples(answer.text).items() if "_http_" not in name}
    buckets = {name: value for name, value in found.items() if "_bucket" in name}
    assert {name: value for name, value in found.items() if name not in buckets} == {
        "omnipipeline_requests_total,kind=chat,outcome=completed": 3,
        "omnipipeline_requests_total,kind=pipeline,outcome=deadline": 1,
        "omnipipeline_requests_in_flight": 2,
        "omnipipeline_stage_waiting,stage=talk": 1,
        "omnipipeline_stage_run_seconds_count,stage=talk": 3,
        "omnipipeline_stage_run_seconds_sum,stage=talk": 4.5,
        "omnipipeline_arena_slots,process=coordinator,state=filling": 1,
    }
    assert list(buckets.values()) == [1] * 9 + [2] * 7 + [3]
    assert list(buckets)[-1] == "omnipipeline_stage_run_seconds_bucket,le=+Inf,stage=talk"


@pytest.mark.parametrize("where", ["here", "in pods"])
async def test_the_numbers_of_all_processes_are_served_where_no_pod_serves_them(where: str) -> None:
    manager = ScriptedManager(OK)
    manager.gauges = {"front.f1": {"relay_shm_sent_bytes": 5.0, "control_resent": 2.0}}
    text = CoordinatorMetrics(manager, of_members=where == "here").render().decode()
    assert samples(text) == (
        {
            "omnipipeline_relay_sent_bytes_total,process=front.f1,relay=shm": 5,
            "omnipipeline_control_events_total,event=resent,process=front.f1": 2,
        }
        if where == "here"
        else {}
    )


async def test_answers_are_counted_by_pattern_and_never_by_what_a_client_wrote() -> None:
    async with start(OK) as running, httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
        sent = await client.post("/v1/pipeline", json={"inputs": 1})
        await client.get("/v1/requests/one")
        await client.get("/v1/requests/two")
        await client.get("/any/thing")
        found = samples((await client.get("/metrics")).text)
    prefix = "omnipipeline_http_"
    assert found[f"{prefix}requests_total,outcome=completed,route=POST /v1/pipeline,status=200"] == 1
    assert found[f"{prefix}requests_total,outcome=not_found,route=GET /v1/requests/{{id}},status=404"] == 2
    assert found[f"{prefix}requests_total,outcome=unsupported_endpoint,route=unknown,status=404"] == 1
    assert found[f"{prefix}sent_bytes_total,route=POST /v1/pipeline"] == len(sent.content)
    assert found[f"{prefix}first_byte_seconds_count,route=POST /v1/pipeline"] == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_audio_is_counted_once_and_only_where_the_client_gets_it(stream: bool) -> None:
    def sound(frames: int) -> Audio:
        return Audio(np.zeros(frames, np.float32), 24_000)

    script = play(chunk([Text("a"), sound(2400)]), ResultEvent(stage="talk", data=[Text("a"), sound(2400)]))
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": stream}
    async with start(script) as running, httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
        assert (
            await client.post("/v1/audio/speech", json={"input": "hi", "response_format": "pcm"})
        ).status_code == 200
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        assert (await client.post("/v1/pipeline", json={"inputs": 1, "stream": stream})).status_code == 200
        found = samples((await client.get("/metrics")).text)
    audio = {name.partition("=")[2]: value for name, value in found.items() if "audio_seconds_total" in name}
    assert audio == {"POST /v1/audio/speech": 0.1, "POST /v1/pipeline": 0.1}


async def test_ready_follows_the_request_manager_and_live_does_not() -> None:
    async with start(OK) as running, httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
        ready = await client.get("/readyz")
        running.manager.is_ready = False
        waiting, live, status = await client.get("/readyz"), await client.get("/livez"), await client.get("/status")
    assert (ready.status_code, waiting.status_code, live.status_code) == (200, 503, 200)
    assert "/status" in waiting.text
    assert status.json() == {"in_flight": 0}


async def test_a_balancer_learns_that_no_request_can_be_served_and_a_kubelet_does_not() -> None:
    manager = ScriptedManager(OK)
    manager.why_not = "no instance of voice is left, and none is expected"
    metrics = CoordinatorMetrics(manager)
    public = make_app(manager, msgspec.structs.replace(ALL, probes=False), codecs=CodecPool(), metrics=metrics)
    async with Server(public, port=0) as first, Server(make_probes(manager, metrics), port=0) as second:
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            answers = [await client.get(f"{first.url}{path}") for path in ("/health", "/readyz", "/livez")]
            of_kubelet = await client.get(f"{second.url}/readyz")
    assert [(one.status_code, one.text) for one in answers] == [
        (503, "no request can be served\n"),
        (503, "no request can be served\n"),
        (200, "ok\n"),
    ]
    assert of_kubelet.status_code == 200


async def test_probes_may_have_a_port_of_their_own_which_counts_for_both() -> None:
    manager = ScriptedManager(OK)
    metrics = CoordinatorMetrics(manager)
    public = make_app(manager, msgspec.structs.replace(ALL, probes=False), codecs=CodecPool(), metrics=metrics)
    async with Server(public, port=0) as first, Server(make_probes(manager, metrics), port=0) as second:
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            assert (await client.get(f"{first.url}/metrics")).status_code == 404
            assert (await client.get(f"{first.url}/status")).status_code == 404
            assert (await client.get(f"{second.url}/v1/models")).status_code == 404
            await client.post(f"{first.url}/v1/pipeline", json={"inputs": 1})
            text = (await client.get(f"{second.url}/metrics")).text
    assert samples(text)["omnipipeline_http_sent_bytes_total,route=POST /v1/pipeline"] > 0


@pytest.mark.parametrize("probes", [False, True])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_load_balancers_find_probes_on_the_port_of_their_traffic_without_a_key(probes: bool, method: str) -> None:
    settings = msgspec.structs.replace(ALL, probes=probes, api_keys=ApiKeys(("k",)))
    paths = ("/livez", "/readyz", "/health")
    async with start(OK, settings) as running, httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
        well = [await client.request(method, path) for path in paths]
        running.manager.is_ready = False
        waiting = [await client.request(method, path) for path in paths]
        closed = [await client.request(method, path) for path in ("/status", "/metrics")]
    assert [answer.status_code for answer in well] == [200, 200, 200]
    assert [answer.status_code for answer in waiting] == [200, 503, 503]
    assert {answer.headers["content-type"] for answer in (*well, *waiting)} == {"text/plain"}
    assert all(("/status" in answer.text) <= probes for answer in waiting)  # only where it is
    assert [answer.status_code for answer in closed] == [401, 401]


async def test_admin_routes_are_behind_the_keys_on_either_port() -> None:
    async def begin(exchange: Exchange) -> None:
        raise InvalidRequest("run_id: x", param="run_id")

    settings = msgspec.structs.replace(ALL, api_keys=ApiKeys(("k",)))
    admin = [Route("POST", "/start_profile", "Begin", begin)]
    manager = ScriptedManager(OK)
    metrics, budget = CoordinatorMetrics(manager), MemoryBudget(1 << 20)
    own = make_admin(manager, settings, codecs=CodecPool(), metrics=metrics, admin=admin, budget=budget)
    for app in (make_app(manager, settings, codecs=CodecPool(), admin=admin), own):
        async with Server(app, port=0) as server, httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
            closed = await client.post("/start_profile")
            client.headers["authorization"] = "Bearer k"
            refused, missing = await client.post("/start_profile"), await client.post("/stop_all")
        assert closed.status_code == 401
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "run_id")
        assert missing.status_code == 404


@pytest.mark.parametrize("serves", [(), ("chat",), ("chat", "speech", "transcription")])
async def test_the_document_has_the_routes_that_are_served_and_no_dangling_reference(serves: tuple[str, ...]) -> None:
    async with start(OK, msgspec.structs.replace(ALL, serves=serves)) as running:
        async with httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
            document = (await client.get("/openapi.json")).json()
    always = {"/v1/pipeline", "/v1/requests/{id}", "/v1/models", "/v1/models/{id}"}
    always |= {"/livez", "/readyz", "/health", "/status", "/metrics", "/version"}
    always |= {"/page/events", "/page/requests/{id}"}
    served = {one.path for one in ROUTES if one.serves in serves} | {
        one.path for one in SOCKETS if one.serves in serves
    }
    assert set(document["paths"]) == always | served
    schemas = document["components"]["schemas"]
    used = {item.removeprefix("#/components/schemas/") for item in references(document)}
    assert used - set(schemas) == set()
    assert ("temperature" in schemas.get("ChatBody", {"properties": ()})["properties"]) == ("chat" in serves)


def references(node: object) -> set[str]:
    if isinstance(node, list):
        return set().union(*map(references, node))
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*map(references, node.values()))
    return set()
