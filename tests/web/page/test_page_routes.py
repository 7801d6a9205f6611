"""The page's files, its events, and who may have them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from importlib import metadata, resources
from typing import Any

import httpx
import msgspec
import pytest

from stage_runtime.coordinator.events import StageNeed
from stage_runtime.web.app import make_admin, make_app, make_probes
from stage_runtime.web.exchanges.apikeys import ApiKeys
from stage_runtime.web.exchanges.memory_budget import MemoryBudget
from stage_runtime.web.exchanges.metrics import CoordinatorMetrics
from stage_runtime.web.listening.server import Server
from stage_runtime.web.page import feed, files
from stage_runtime.web.sound.pool import CodecPool
from tests.web.page.page_pipelines import record, samples, status
from tests.web.running import ALL, PATIENCE_S, Running, start
from tests.web.scripted_manager import ScriptedManager, play

KEYED = msgspec.structs.replace(ALL, api_keys=ApiKeys(("secret",)))
KEY = {"authorization": "Bearer secret"}
GROUPS = {"listen": "ears", "speak": "voice"}
EDGES = [("listen", "speak", "normal")]


def client_of(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=PATIENCE_S)


def show(running: Running) -> None:
    running.manager.shown = status(GROUPS, EDGES)
    running.manager.samples = samples(GROUPS)
    running.manager.records = [record("one", list(GROUPS))]


async def events(answer: httpx.Response) -> AsyncIterator[tuple[str, Any]]:
    name = ""
    async for line in answer.aiter_lines():
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            yield name, json.loads(line[6:])


async def test_the_files_need_no_key_and_hold_nothing_of_the_pipeline() -> None:
    settings = msgspec.structs.replace(KEYED, model="org/secret-model")
    async with start(play(), settings) as running, client_of(running.url) as client:
        show(running)
        answers = {path: await client.get(path) for path in sorted(files.PATHS)}
    assert {answer.status_code for answer in answers.values()} == {200}
    assert not [path for path, answer in answers.items() if "secret" in answer.text.replace("secret key", "")]
    assert {answer.headers["content-security-policy"] for answer in answers.values()} == {files.POLICY}
    assert "unsafe" not in files.POLICY and "http" not in files.POLICY


async def test_the_page_knows_whether_it_must_ask_for_a_key() -> None:
    for settings, word in ((ALL, "no"), (KEYED, "yes")):
        async with start(play(), settings) as running, client_of(running.url) as client:
            assert f'data-keyed="{word}"' in (await client.get("/")).text


def test_no_file_names_another_host_or_makes_markup_of_a_text() -> None:
    for path, (package, name, _) in (files._PAGE | files._DOCS).items():
        text = resources.files(package).joinpath(name).read_text().replace("http://www.w3.org/2000/svg", "")
        found = [
            word for word in ("http:", "https:", "innerHTML", "outerHTML", "insertAdjacent", "eval(") if word in text
        ]
        assert not found, path
        assert "document.write" not in text and " style=" not in text and "onclick=" not in text


@pytest.mark.parametrize("path", ["/page/events", "/page/requests/one", "/version", "/health?stages", "/openapi.json"])
async def test_what_says_something_of_the_pipeline_needs_the_key(path: str) -> None:
    async with start(play(), KEYED) as running, client_of(running.url) as client:
        show(running)
        running.manager.stages = [StageNeed(stage="listen", group="ears", needed=True, instances=1)]
        closed, wrong = await client.get(path), await client.get(path, headers={"authorization": "Bearer other"})
        async with client.stream("GET", path, headers=KEY) as opened:
            assert opened.status_code == 200
    assert (closed.status_code, wrong.status_code) == (401, 401)
    assert "listen" not in closed.text


async def test_events_begin_with_everything_and_end_with_the_coordinators_drain() -> None:
    async with start(play()) as running, client_of(running.url) as client:
        show(running)
        async with client.stream("GET", "/page/events") as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            found = []
            async for name, data in events(answer):
                found.append(name)
                if name == "requests":
                    assert [one["id"] for one in data["changed"]] == ["one"]
                    running.manager.shown = {**status(GROUPS, EDGES), "draining": True}
    assert found == ["pipeline", "load", "instances", "requests", "load"]


async def test_more_pages_than_the_limit_are_refused_and_one_that_is_closed_gives_its_place_back() -> None:
    async with start(play()) as running, client_of(running.url) as client, AsyncExitStack() as all_pages:
        show(running)
        for _ in range(feed.PAGES - 1):
            await all_pages.enter_async_context(client.stream("GET", "/page/events"))
        async with client.stream("GET", "/page/events") as last:
            assert last.status_code == 200
            assert (await client.get("/page/events")).status_code == 429
        async with asyncio.timeout(PATIENCE_S):
            while True:
                async with client.stream("GET", "/page/events") as again:
                    if again.status_code == 200:
                        break


async def test_a_requests_lines_are_those_of_its_waterfall() -> None:
    async with start(play()) as running, client_of(running.url) as client:
        show(running)
        found = (await client.get("/page/requests/one")).json()
        missing = await client.get("/page/requests/other")
    assert [line["label"] for line in found["lines"]] == [
        "coordinator → listen",
        "listen",
        "listen → speak",
        "speak",
        "speak → coordinator",
    ]
    assert found["record"]["id"] == "one"
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")


async def test_in_pods_the_page_is_on_the_admin_port_with_all_routes_and_not_on_that_of_clients() -> None:
    manager = ScriptedManager(play())
    metrics, settings = CoordinatorMetrics(manager), msgspec.structs.replace(KEYED, probes=False)
    budget = MemoryBudget(1 << 20)
    public = make_app(manager, settings, codecs=CodecPool(), metrics=metrics, budget=budget)
    admin = make_admin(manager, settings, codecs=CodecPool(), metrics=metrics, admin=[], budget=budget)
    async with Server(public, port=0) as first, Server(admin, port=0) as second:
        async with client_of(first.url) as clients, client_of(second.url) as people:
            assert (await clients.get("/", headers=KEY)).status_code == 404
            assert (await clients.get("/page/events", headers=KEY)).status_code == 404
            assert (await clients.get("/docs")).status_code == 200
            assert (await people.get("/")).status_code == 200
            models = await people.get("/v1/models", headers=KEY)
            foreign = await people.get("/", headers={"host": "evil.example"})
            assert (await people.get("/v1/models")).status_code == 401
    assert models.json()["data"][0]["id"] == "org/hello"
    assert foreign.status_code == 200  # its files are public, and keys are asked for


async def test_without_keys_a_page_whose_name_was_pointed_here_gets_nothing() -> None:
    settings = msgspec.structs.replace(ALL, local=True)
    async with start(play(), settings) as running, client_of(running.url) as client:
        show(running)
        answers = [await client.get(path, headers={"host": "evil.example"}) for path in ("/", "/page/events")]
    assert [one.status_code for one in answers] == [403, 403]


NEEDS = [
    StageNeed(stage="listen", group="ears", needed=True, instances=1),
    StageNeed(stage="speak", group="voice", needed=True, instances=0),
    StageNeed(stage="draw", group="hand", needed=False, instances=0),
]


async def test_health_names_the_stages_that_every_request_needs_and_lacks() -> None:
    async with start(play(), KEYED) as running, client_of(running.url) as client:
        running.manager.stages = NEEDS
        lacking, plain = await client.get("/health?stages", headers=KEY), await client.get("/health")
        running.manager.stages = [NEEDS[0], NEEDS[2]]
        well = await client.get("/health?stages", headers=KEY)
        running.manager.why_not = "the queue of ears stands"
        stands = await client.get("/health?stages", headers=KEY)
        other = await client.get("/health?stage", headers=KEY)
    assert [one.status_code for one in (lacking, plain, well, stands, other)] == [503, 200, 200, 503, 400]
    assert lacking.json() == {
        "ready": True,
        "problem": None,
        "lacks": ["speak"],
        "stages": [msgspec.to_builtins(one) for one in NEEDS],
    }
    assert (well.json()["lacks"], stands.json()["problem"]) == ([], "the queue of ears stands")


async def test_the_probe_port_names_stages_without_a_key_as_status_does() -> None:
    manager = ScriptedManager(play())
    manager.stages = NEEDS
    async with Server(make_probes(manager, CoordinatorMetrics(manager)), port=0) as probing:
        async with client_of(probing.url) as client:
            answer = await client.get("/health?stages")
    assert (answer.status_code, answer.json()["lacks"]) == (503, ["speak"])


async def test_the_version_is_that_of_the_distribution() -> None:
    async with start(play()) as running, client_of(running.url) as client:
        assert (await client.get("/version")).json() == {"version": metadata.version("omnipipeline")}
