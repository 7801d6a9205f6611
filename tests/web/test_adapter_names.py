"""The ``model`` of requests and answers, and `/v1/models`, with LoRA adapters and without."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from stage_runtime.wire.values import Text
from tests.web.running import PATIENCE_S, start
from tests.web.scripted_manager import Event, ScriptedHandle, chunk

ADAPTERS = {
    "chat.one": {"engine_adapters:chat": 2.0, "engine_adapter_requests_total.sql:chat": 0.0},
    "chat.two": {"engine_adapters:chat": 1.0, "engine_adapter_requests_total.sql:chat": 4.0},
}


async def hello(handle: ScriptedHandle) -> AsyncIterator[Event]:
    yield chunk(Text("hello"))


def bodies(model: str | None) -> dict[str, dict[str, Any]]:
    named = {} if model is None else {"model": model}
    return {
        "/v1/chat/completions": {**named, "messages": [{"role": "user", "content": "hi"}]},
        "/v1/responses": {**named, "input": "hi"},
        "/v1/completions": {**named, "prompt": "hi"},
    }


@pytest.mark.parametrize(
    ("gauges", "model", "given", "shown"),
    [
        (ADAPTERS, "sql", "sql", "sql"),
        (ADAPTERS, "org/hello", "", "org/hello"),
        (ADAPTERS, None, "", "org/hello"),
        (ADAPTERS, "just loaded", "just loaded", "just loaded"),  # its stage refuses what it has not
        ({}, "gpt-4", "gpt-4", "org/hello"),
    ],
)
async def test_stages_get_the_model_that_is_asked_for_and_answers_name_it(
    gauges: dict[str, dict[str, float]], model: str | None, given: str, shown: str
) -> None:
    async with start(hello) as running, httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
        running.manager.gauges = gauges
        for path, body in bodies(model).items():
            answer = await client.post(path, json=body)
            assert (answer.status_code, answer.json().get("model")) == (200, shown), answer.text
            assert running.manager.last.request.model == given


async def test_models_are_the_pipeline_and_the_adapters_that_all_instances_have() -> None:
    async with start(hello) as running, httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
        base = {"id": "org/hello", "object": "model", "created": 1700000000, "owned_by": "omnipipeline"}
        running.manager.gauges = ADAPTERS
        listed = (await client.get("/v1/models")).json()
        assert listed == {"object": "list", "data": [base, {**base, "id": "sql", "parent": "org/hello"}]}
        assert (await client.get("/v1/models/sql")).json() == listed["data"][1]
        missing = await client.get("/v1/models/other")
        assert missing.json()["error"]["message"] == "no model 'other'; there is 'org/hello', 'sql'"
