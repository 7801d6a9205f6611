"""Keys that clients of other servers send: taken with their default value, else refused by a useful name."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest

from stage_runtime.coordinator.events import ResultEvent
from stage_runtime.wire.values import Text, Vectors
from tests.web.running import PATIENCE_S, start
from tests.web.scripted_manager import chunk, play

ASK = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}


async def answered(body: dict[str, Any], path: str = "/v1/chat/completions") -> httpx.Response:
    async with start(play(chunk(Text("ok")))) as running, httpx.AsyncClient(timeout=PATIENCE_S) as client:
        return await client.post(running.url + path, json=body)


@pytest.mark.parametrize(
    "more",
    [
        {"add_generation_prompt": True, "skip_special_tokens": True, "echo": False, "best_of": 1},
        {"length_penalty": 1.0, "priority": 0, "bad_words": [], "use_beam_search": False, "include_reasoning": True},
        {"continue_final_message": False, "structured_outputs": {}, "return_token_ids": False, "guided_regex": None},
        {"guided_json": None, "whatever": None, "documents": None},
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"stream_options": {"nobody_knows": None}},
        {"audio": {"nobody_knows": None}},
        {"separate_reasoning": True, "stream_reasoning": True, "no_stop_trim": False, "return_hidden_states": False},
        {"add_special_tokens": False},
    ],
)
async def test_what_asks_for_nothing_is_accepted(more: dict[str, Any]) -> None:
    answer = await answered(ASK | more)
    assert (answer.status_code, answer.json()["choices"][0]["message"]["content"]) == (200, "ok")


@pytest.mark.parametrize(
    ("more", "param", "message"),
    [
        ({"echo": True}, "echo", "echo: unknown parameter"),
        ({"echo": 0}, "echo", "echo: unknown parameter"),
        (
            {"no_stop_trim": True},
            "no_stop_trim",
            "no_stop_trim: unknown parameter; here it is include_stop_str_in_output",
        ),
        (
            {"regex": "[0-9]+"},
            "regex",
            "regex: unknown parameter; here it is structured_outputs.regex",
        ),
        (
            {"guided_json": {}},
            "guided_json",
            "guided_json: stages follow no grammars of this form; see response_format",
        ),
        ({"cache_salt": "a"}, "cache_salt", "cache_salt: stages do not divide their caches"),
        ({"skip_special_tokens": False}, "skip_special_tokens", "skip_special_tokens: stages leave special tokens out"),
        ({"max_new_tokens": 5}, "max_new_tokens", "max_new_tokens: unknown parameter; here it is max_tokens"),
        ({"best_of": 2, "echo": False}, "best_of", "best_of: unknown parameter; here it is n"),
        ({"temprature": 1, "echo": None}, "temprature", "temprature: unknown parameter; did you mean 'temperature'?"),
        ({"echo": None, "top_p": 7}, "top_p", "top_p: expected `float` <= 1.0"),
        (
            {"stream_options": {"sometimes": True}},
            "stream_options.sometimes",
            "stream_options.sometimes: unknown parameter",
        ),
        (
            {"modalities": ["smell"]},
            "modalities[0]",
            "modalities[0]: invalid enum value 'smell'; known are audio, text",
        ),
        ({"max_tokens": 10**10}, "max_tokens", "max_tokens: expected `int` <= 1000000000"),
        (
            {"max_completion_tokens": 10**10},
            "max_completion_tokens",
            "max_completion_tokens: expected `int` <= 1000000000",
        ),
    ],
)
async def test_what_asks_for_something_is_refused_by_its_own_name(
    more: dict[str, Any], param: str, message: str
) -> None:
    answer = await answered(ASK | more)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["message"]) == (400, param, message)


async def test_a_null_in_a_pipelines_body_is_not_inside_its_inputs() -> None:
    answer = await answered({"inputs": {"a": None}, "whatever": None}, "/v1/pipeline")
    assert answer.status_code == 200
    assert (await answered({"inputs": {}, "whatever": 1}, "/v1/pipeline")).status_code == 400


async def test_other_routes_list_the_values_that_they_know() -> None:
    answer = await answered({"input": "x", "stream_format": "odd"}, "/v1/audio/speech")
    assert answer.json()["error"]["message"] == "stream_format: invalid enum value 'odd'; known are audio, sse"


async def test_so_many_unknown_keys_are_dropped_and_no_more() -> None:
    asked = [ASK | {f"key_{number}": None for number in range(count)} for count in (64, 65)]
    taken, refused = [await answered(body) for body in asked]
    error = refused.json()["error"]
    assert (taken.status_code, refused.status_code, error["message"]) == (200, 400, "key_64: unknown parameter")


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", {"prompt": "hi"}), ("/v1/embeddings", {"input": "hi"})])
async def test_the_special_tokens_of_a_text_are_not_left_out_in_silence(path: str, body: dict[str, Any]) -> None:
    script = play(ResultEvent(stage="talk", data=[Text("ok"), Vectors(np.ones((1, 2), np.float32))]))
    async with start(script) as running, httpx.AsyncClient(timeout=PATIENCE_S) as client:
        taken = await client.post(running.url + path, json={**body, "add_special_tokens": True})
        refused = await client.post(running.url + path, json={**body, "add_special_tokens": False})
    assert taken.status_code == 200, taken.text
    problem = "add_special_tokens: unknown parameter; here it is a list of token ids"
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, problem)
