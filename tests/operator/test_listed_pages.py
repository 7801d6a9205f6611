"""Reading lists of the API server over a real socket: page by page, and one object in memory at a time."""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio import client as kubernetes_client

from omnipipeline_operator import errors
from omnipipeline_operator.cluster.client import Client
from omnipipeline_operator.kinds import SERVICE


class Unbounded:
    async def take(self) -> None:
        return


@contextlib.asynccontextmanager
async def reading(*pages: str) -> AsyncIterator[tuple[Client, Sequence[str]]]:
    """A client of a server that answers with these pages, one after the other, and the queries that came."""
    queries: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        queries.append(request.query_string)
        return web.Response(text=pages[len(queries) - 1], content_type="application/json")

    application = web.Application()
    application.router.add_get("/api/v1/services", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host = f"http://127.0.0.1:{runner.addresses[0][1]}"
    api = kubernetes_client.ApiClient(kubernetes_client.Configuration(host=host))
    try:
        async with Client(api, Unbounded(), lambda verb, resource, code: None) as client:
            yield client, queries
    finally:
        await runner.cleanup()


def page(items: Any, *, more: str = "") -> str:
    return json.dumps({"kind": "ServiceList", "metadata": {"resourceVersion": "1", "continue": more}, "items": items})


def service(number: int, **more: Any) -> dict[str, Any]:
    return {"metadata": {"name": f"s{number}", "namespace": "a"}, **more}


async def test_each_object_of_all_pages_gets_its_kind() -> None:
    async with reading(page([service(0), service(1)], more="next"), page([service(2)])) as (client, queries):
        found = [each async for each in client.listed(SERVICE, None, "a=b")]
    assert found == [{**service(number), "kind": "Service", "apiVersion": "v1"} for number in range(3)]
    assert queries == ["limit=100&labelSelector=a%3Db", "limit=100&labelSelector=a%3Db&continue=next"]


@pytest.mark.parametrize("items", [[], None])
async def test_an_empty_list_has_no_objects(items: Any) -> None:
    async with reading(page(items)) as (client, _):
        assert [each async for each in client.listed(SERVICE, None)] == []


@pytest.mark.parametrize("text", ["a proxy's page", "[]", '{"items": 3}', page([service(0), 5])])
async def test_a_list_of_another_form_is_an_unavailable_server(text: str) -> None:
    async with reading(text) as (client, _):
        with pytest.raises(errors.Unavailable, match="GET /api/v1/services"):
            [each async for each in client.listed(SERVICE, None)]


async def test_the_objects_of_a_page_are_not_in_memory_together() -> None:
    spec = {"ports": [{"name": f"port-{number}", "port": number} for number in range(100)]}
    text = page([service(number, spec=spec) for number in range(500)])
    async with reading(text) as (client, _):
        tracemalloc.start()
        try:
            names = [each["metadata"]["name"] async for each in client.listed(SERVICE, None)]
            _, highest = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            together = json.loads(text)
            _, all_of_them = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert len(names) == len(together["items"]) == 500
    assert highest < all_of_them / 2, "a page's text is read twice over at most; its objects take ten times as much"
