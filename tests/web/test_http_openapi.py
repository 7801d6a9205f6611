"""/openapi.json against what the server does: each answer of a kind is of the documented type and fits its schema."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from omnipipeline_spec.types.routes import ROUTES
from stage_runtime.web.exchanges.apikeys import ApiKeys
from stage_runtime.wire.values import Audio, Note, Scores, Text, ToolCall, Usage, Vectors
from tests.web.running import ALL, PATIENCE_S, start
from tests.web.scripted_manager import chunk, play

KEYED = msgspec.structs.replace(ALL, api_keys=ApiKeys(("k",)), accepts=frozenset(["tools", "logprobs"]))
LOGPROBS = [{"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": []}]
SCRIPT = play(
    chunk([Text("a", 0, LOGPROBS), ToolCall("c", "f", "{}"), Usage(1, 2), Note("voice", "amy")]),
    chunk(Audio(np.zeros(2400, np.float32), 24_000), index=1),
    chunk([Vectors(np.zeros((1, 3), np.float32)), Scores([0.5])], index=2),
)
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "modalities": ["text", "audio"],
    "logprobs": True,
}
WAV = {"file": ("a.wav", b"RIFF", "audio/wav")}


async def document(client: httpx.AsyncClient) -> dict[str, Any]:
    found: dict[str, Any] = (await client.get("/openapi.json")).json()
    return found


def fits(value: Any, schema: dict[str, Any], whole: dict[str, Any], where: str = "$") -> None:
    """Raise unless the value is of the schema: the part of JSON schema that the document uses, and closed objects."""
    if "$ref" in schema:
        fits(value, whole["components"]["schemas"][schema["$ref"].rpartition("/")[2]], whole, where)
        return
    if "anyOf" in schema or "oneOf" in schema:
        problems = []
        for one in schema.get("anyOf") or schema["oneOf"]:
            try:
                fits(value, one, whole, where)
                return
            except AssertionError as problem:
                problems.append(problem)
        raise AssertionError(f"{where}: {value!r} is not one of these: {problems}")
    if "const" in schema:
        assert value == schema["const"], f"{where}: {value!r} is not {schema['const']!r}"
    if "enum" in schema:
        assert value in schema["enum"], f"{where}: {value!r} is not one of {schema['enum']}"
    kinds = {
        "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool,
        "null": type(None),
    }  # fmt: skip
    named = schema.get("type")
    if named is not None:
        names = named if isinstance(named, list) else [named]
        assert any(isinstance(value, kinds[name]) for name in names), f"{where}: {value!r} is not a {named}"  # type: ignore[arg-type]
    if isinstance(value, dict) and "properties" in schema:
        missing = set(schema.get("required", ())) - set(value)
        assert not missing, f"{where}: lacks {missing}"
        unknown = set(value) - set(schema["properties"])
        assert not unknown, f"{where}: {unknown} are not in the document"
        for name, inner in value.items():
            fits(inner, schema["properties"][name], whole, f"{where}.{name}")
    if isinstance(value, dict) and isinstance(schema.get("additionalProperties"), dict):
        for name, inner in value.items():
            fits(inner, schema["additionalProperties"], whole, f"{where}.{name}")
    if isinstance(value, list) and "items" in schema:
        for at, inner in enumerate(value):
            fits(inner, schema["items"], whole, f"{where}[{at}]")


@pytest.mark.parametrize(
    ("method", "path", "route", "body"),
    [
        ("POST", "/v1/chat/completions", None, {"json": CHAT}),
        ("POST", "/v1/chat/completions", None, {"json": {**CHAT, "stream": True}}),
        ("POST", "/v1/chat/completions", None, {"json": {**CHAT, "modalities": ["text"]}}),
        ("POST", "/v1/completions", None, {"json": {"prompt": "hi", "logprobs": 1}}),
        ("POST", "/v1/completions", None, {"json": {"prompt": "hi", "stream": True}}),
        ("POST", "/v1/embeddings", None, {"json": {"input": "hi"}}),
        ("POST", "/v1/embeddings", None, {"json": {"input": "hi", "encoding_format": "base64"}}),
        ("POST", "/v1/rerank", None, {"json": {"query": "q", "documents": ["d"]}}),
        ("POST", "/v1/score", None, {"json": {"text_1": "q", "text_2": "d"}}),
        ("POST", "/v1/audio/speech", None, {"json": {"input": "hi"}}),
        ("POST", "/v1/audio/speech", None, {"json": {"input": "hi", "response_format": "wav"}}),
        ("POST", "/v1/audio/speech", None, {"json": {"input": "hi", "stream_format": "sse"}}),
        ("POST", "/v1/audio/transcriptions", None, {"files": WAV}),
        ("POST", "/v1/audio/transcriptions", None, {"files": WAV, "data": {"response_format": "verbose_json"}}),
        ("POST", "/v1/audio/transcriptions", None, {"files": WAV, "data": {"response_format": "text"}}),
        ("POST", "/v1/audio/transcriptions", None, {"files": WAV, "data": {"stream": "true"}}),
        ("GET", "/v1/models", None, {}),
        ("GET", "/v1/models/org/hello", "/v1/models/{id}", {}),
        ("POST", "/v1/pipeline", None, {"json": {"inputs": 1}}),
        ("POST", "/v1/pipeline", None, {"json": {"inputs": 1, "stream": True}}),
        ("GET", "/v1/requests/r-1", "/v1/requests/{id}", {}),
        ("DELETE", "/v1/requests/r-1", "/v1/requests/{id}", {}),
        ("GET", "/livez", None, {}),
        ("GET", "/readyz", None, {}),
        ("GET", "/health", None, {}),
        ("GET", "/status", None, {}),
        ("GET", "/metrics", None, {}),
        ("POST", "/v1/pipeline", None, {"json": {"input": 1}}),
    ],
)
async def test_each_answer_is_of_a_documented_type_and_fits_its_schema(
    method: str, path: str, route: str | None, body: dict[str, Any]
) -> None:
    async with start(SCRIPT, KEYED) as running:
        headers = {"authorization": "Bearer k"}
        async with httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S, headers=headers) as client:
            whole = await document(client)
            await client.post("/v1/pipeline", json={"inputs": 1}, headers={"x-request-id": "r-1"})
            answer = await client.request(method, path, **body)
    responses = whole["paths"][route or path][method.lower()]["responses"]
    content = responses[str(answer.status_code) if str(answer.status_code) in responses else "default"]["content"]
    media = answer.headers["content-type"].partition(";")[0]
    assert media in content
    if media == "application/json":
        fits(answer.json(), content[media]["schema"], whole)
    elif media == "text/event-stream":
        events = [line.partition("data: ")[2] for line in answer.text.split("\n\n") if line]
        for event in events:
            if event != "[DONE]":
                fits(msgspec.json.decode(event), content[media]["schema"], whole)


@pytest.mark.parametrize("keys", [(), ("k",)])
async def test_the_document_names_the_key_where_one_is_needed(keys: tuple[str, ...]) -> None:
    settings = msgspec.structs.replace(ALL, api_keys=ApiKeys(keys))
    async with start(SCRIPT, settings) as running:
        headers = {"authorization": "Bearer k"}
        async with httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S, headers=headers) as client:
            whole = await document(client)
    schemes = whole["components"].get("securitySchemes")
    assert schemes == ({"bearerAuth": {"type": "http", "scheme": "bearer"}} if keys else None)
    assert whole.get("security") == ([{"bearerAuth": []}] if keys else None)
    without = {path for path, item in whole["paths"].items() for one in item.values() if one.get("security") == []}
    assert without == ({"/livez", "/readyz", "/health"} if keys else set())


async def test_the_document_names_the_headers_of_a_request() -> None:
    async with start(SCRIPT) as running, httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
        paths = (await document(client))["paths"]
    named = {
        path: [one["name"] for one in item["post"].get("parameters", ()) if one["in"] == "header"]
        for path, item in paths.items()
        if "post" in item
    }
    assert set(named) == {"/v1/pipeline", *(one.path for one in ROUTES)}
    assert set(map(tuple, named.values())) == {("X-Request-Id", "X-Request-Timeout", "Idempotency-Key")}
