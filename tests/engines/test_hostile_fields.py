"""A client's value in a field of a chat request hurts that request alone.

The tests run over HTTP, against examples/chat as it stands with a tiny model: the request fails with a code of the
closed list, or is answered; and the next one gets the answer that it gets alone, by the same processes.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stage_runtime.errors import CODES
from stage_runtime.processes.one_machine.local import LocalOptions, LocalPipeline
from stage_runtime.web.reading.generation_fields import ChatFields, handlings
from tests.engines.generation_kit import tiny_model, tiny_tokenizer
from tests.thoroughness import examples

EXAMPLE = Path(__file__).parents[2] / "examples/chat/pipeline.yaml"
GOOD = {"model": '"chat"', "messages": '[{"role":"user","content":"hi"}]', "max_tokens": "4"}
DEADLINE_S = 60.0

FIELDS = (
    *handlings(ChatFields),
    *(
        "max_completion_tokens",
        "stream",
        "stream_options",
        "messages",
        "model",
        "data_parallel_rank",
        "best_of",
        "echo",
    ),
)
NUMBERS = (
    "NaN",
    "Infinity",
    "1e999",
    "-1",
    "0",
    "0.5",
    "1",
    "1.5",
    "-1e308",
    str(2**31),
    str(2**64),
    "1" * 400,
    "1" * 5000,
)
TEXTS = (
    '""',
    '"x"',
    '"1"',
    '"\\u0000"',
    '"\\ud800"',
    '"\\ud83d\\ude00"',
    '"required"',
    '"auto"',
    '"' + "a" * 2000 + '"',
)
SCHEMAS = (
    '{"$ref":"#"}',
    '{"type":"odd"}',
    '{"enum":[]}',
    '{"const":NaN}',
    '{"type":"string","pattern":"("}',
    '{"type":"string","minLength":-1}',
    '{"type":"array","minItems":1000000000}',
    '{"type":"integer","minimum":5,"maximum":1}',
)
LEAVES = st.sampled_from((*NUMBERS, *TEXTS, "true", "false", "null", "[]", "{}", "[" * 200 + "]" * 200))
NAMES = st.sampled_from(['"1"', '"-1"', '"999999"', '"type"', '"name"', '"٣"', '""'])
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda parts: f"[{','.join(parts)}]"),
        st.lists(st.tuples(NAMES, inner), max_size=2).map(
            lambda pairs: "{" + ",".join(f"{name}:{value}" for name, value in pairs) + "}"
        ),
    ),
    max_leaves=4,
)
FORMATS = st.sampled_from(SCHEMAS).map(
    lambda schema: '{"type":"json_schema","json_schema":{"name":"x","schema":' + schema + "}}"
)
TOOLS = st.sampled_from(SCHEMAS).map(
    lambda schema: '[{"type":"function","function":{"name":"f","parameters":' + schema + "}}]"
)
CASES = st.one_of(
    st.tuples(st.sampled_from(FIELDS), VALUES),
    st.tuples(st.just("response_format"), FORMATS),
    st.tuples(st.just("tools"), TOOLS),
)


# Engines in processes of their own fail a request alone each time: test_process_stage.py.
@pytest.mark.long
@pytest.mark.parametrize("engines", [1, pytest.param(2, marks=pytest.mark.nightly)])
async def test_any_value_of_any_field_of_a_chat_request_hurts_that_request_alone(engines: int) -> None:
    """The chats are answered by an engine in the stage's process, and by two in processes of their own."""
    with tempfile.TemporaryDirectory(prefix="c-") as folder:
        tiny_model("llama").save_pretrained(f"{folder}/model")
        tiny_tokenizer().save_pretrained(f"{folder}/model")
        values = {"model": f"{folder}/model", "threads": 1, "engines": engines, "max_tokens": 20}
        overrides = [f"stages.chat.factoryArgs.{name}={value}" for name, value in values.items()]
        overrides.append(f"endpoints.basePath={folder}")
        async with LocalPipeline(EXAMPLE, overrides=overrides, options=LocalOptions(port=0)) as running:
            await asyncio.to_thread(attack, running.url)


def attack(url: str) -> None:
    with httpx.Client(base_url=url, timeout=DEADLINE_S) as http:
        expected = answered(ask(http))

        @settings(max_examples=examples(40), deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
        @given(case=CASES)
        def hurts_itself(case: tuple[str, str]) -> None:
            field, value = case
            needed = {"logprobs": "true"} if field == "top_logprobs" else {}
            given = ask(http, **needed, **{field: value})
            if given.status_code != 200:
                error: Any = given.json()["error"]
                assert (given.status_code, error["code"] in CODES) == (400, True), error
            assert answered(ask(http)) == expected, "the next request"

        hurts_itself()


def ask(http: httpx.Client, **fields: str) -> httpx.Response:
    """The good request with other fields, each in JSON."""
    body = ",".join(f'"{name}":{value}' for name, value in {**GOOD, **fields}.items())
    headers = {"content-type": "application/json"}
    return http.post("/v1/chat/completions", content=f"{{{body}}}".encode(), headers=headers)


def answered(response: httpx.Response) -> str:
    assert response.status_code == 200
    return str(response.json()["choices"][0]["message"]["content"])
