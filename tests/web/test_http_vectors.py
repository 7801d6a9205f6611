"""POST /v1/embeddings, /v1/rerank and /v1/score over a real socket; embeddings judged by the official client."""

from __future__ import annotations

import base64
import math
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import numpy as np
import openai
import pytest
from openai import AsyncOpenAI

from stage_runtime.web.exchanges.memory_budget import MemoryBudget
from stage_runtime.wire.values import RawTensor, Scores, Text, Usage, Vectors
from tests.web.running import ALL, PATIENCE_S, Running, start
from tests.web.scripted_manager import Event, Script, ScriptedHandle, chunk, play

ROWS = np.array([[3, 0, 4], [0, 5, 0]], np.float32)
BF16 = RawTensor("bfloat16", (2, 3), (ROWS.view(np.uint32) >> 16).astype(np.uint16).tobytes())


def client_of(running: Running) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)


def giving(values: Any) -> Script:
    return play(chunk([Vectors(values), Usage(7)]))


@pytest.mark.parametrize("values", [ROWS, RawTensor("float32", (2, 3), ROWS.tobytes()), BF16, ROWS.astype(np.float16)])
@pytest.mark.parametrize("form", [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}])
async def test_vectors_reach_the_client_in_the_order_of_its_inputs(values: Any, form: Any) -> None:
    async with start(giving(values)) as running, client_of(running) as client:
        answer = await client.embeddings.create(model="m", input=["a", "b"], **form)
        request = running.manager.last.request
    assert (request.kind, request.inputs) == ("embedding", {"texts": ["a", "b"]})
    found = [one.embedding for one in answer.data]
    if form.get("encoding_format") == "base64":
        found = [np.frombuffer(base64.b64decode(one), "<f4").tolist() for one in found]  # type: ignore[arg-type]
    assert found == ROWS.tolist()
    assert [one.index for one in answer.data] == [0, 1]
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (7, 7)


async def test_dimensions_cut_vectors_and_give_them_length_one() -> None:
    async with start(giving(ROWS)) as running, client_of(running) as client:
        answer = await client.embeddings.create(model="m", input=["a", "b"], dimensions=2)
        assert [one.embedding for one in answer.data] == [[1, 0], [0, 1]]
        with pytest.raises(openai.BadRequestError, match="the model's vectors have 3, got 4"):
            await client.embeddings.create(model="m", input=["a", "b"], dimensions=4)


@pytest.mark.parametrize(("given", "inputs"), [
    ("a", {"texts": ["a"]}), ([1, 2], {"tokens": [[1, 2]]}), ([[1, 2]], {"tokens": [[1, 2]]}),
])  # fmt: skip
async def test_one_input_is_a_text_or_a_list_of_token_ids(given: Any, inputs: Any) -> None:
    async with start(giving(ROWS[0])) as running, client_of(running) as client:
        await client.embeddings.create(model="m", input=given)
        assert running.manager.last.request.inputs == inputs


@pytest.mark.parametrize("given", [[], "", [""], ["a", [1]], [[1], []], [[-1]], [[True]], ["a"] * 2049])
async def test_what_is_not_an_input_is_refused_before_the_stages(given: Any) -> None:
    async with start(giving(ROWS)) as running, client_of(running) as client:
        with pytest.raises(openai.BadRequestError, match="input: expected"):
            await client.embeddings.create(model="m", input=given)
        assert not running.manager.handles


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        (giving(ROWS[:1]), "expected 2 vectors, one for each input, got 1"),
        (giving(np.array([[math.nan], [1.0]], np.float32)), "expected finite numbers"),
        (giving(np.array([[1e300], [1.0]])), "expected finite numbers"),
        (giving(np.array([[True], [False]])), r"got bool \[2, 1\]"),
        (giving(np.zeros((2, 0), np.float32)), r"got float32 \[2, 0\]"),
        (giving([]), r"got float64 \[0\]"),
        (giving(RawTensor("float8_e4m3fn", (2, 1), b"ab")), "got something else"),
        (giving(RawTensor("float32", (2, 2), b"abc")), "got something else"),
        (play(chunk([Vectors(ROWS[:1]), Vectors(ROWS[:1, :2])])), r"the vectors have several lengths: \[2, 3\]"),
        (play(chunk(Text("a"))), "expected an omni.Vectors from a terminal stage, got Text"),
        (play(), "got nothing"),
    ],
)
async def test_a_stage_that_gives_something_else_is_to_blame(script: Script, problem: str) -> None:
    async with start(script) as running, client_of(running) as client:
        with pytest.raises(openai.InternalServerError, match=problem):
            await client.embeddings.create(model="m", input=["a", "b"])


async def post(running: Running, path: str, body: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as http:
        return await http.post(path, json=body)


async def test_documents_are_ranked_by_their_scores() -> None:
    body = {"query": "q", "documents": ["a", {"text": "b", "title": "skipped"}, "c"], "top_n": 2}
    async with start(play(chunk([Scores([0.1, 0.9, 0.5]), Usage(9)]))) as running:
        answer = (await post(running, "/v1/rerank", body)).json()
        request = running.manager.last.request
        bare = (await post(running, "/v1/rerank", {**body, "return_documents": False, "top_n": 1})).json()
    assert (request.kind, request.inputs) == ("score", {"pairs": [["q", "a"], ["q", "b"], ["q", "c"]]})
    assert answer["results"] == [
        {"index": 1, "relevance_score": 0.9, "document": {"text": "b"}},
        {"index": 2, "relevance_score": 0.5, "document": {"text": "c"}},
    ]
    assert answer["usage"] == {"prompt_tokens": 9, "total_tokens": 9}
    assert bare["results"] == [{"index": 1, "relevance_score": 0.9}]


@pytest.mark.parametrize(("first", "second", "pairs"), [
    ("a", "b", [["a", "b"]]), ("a", ["b", "c"], [["a", "b"], ["a", "c"]]),
    (["a", "b"], ["c", "d"], [["a", "c"], ["b", "d"]]),
])  # fmt: skip
async def test_texts_are_scored_in_pairs(first: Any, second: Any, pairs: Any) -> None:
    async with start(play(chunk(Scores([0.25] * len(pairs))))) as running:
        answer = (await post(running, "/v1/score", {"text_1": first, "text_2": second})).json()
        assert running.manager.last.request.inputs == {"pairs": pairs}
    assert answer["data"] == [{"index": at, "object": "score", "score": 0.25} for at in range(len(pairs))]


async def test_texts_without_a_counterpart_are_refused() -> None:
    async with start(play(chunk(Scores([1.0])))) as running:
        answer = await post(running, "/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "text_2")


@pytest.mark.proves("abusive-client")
@pytest.mark.parametrize(
    ("path", "name", "others"),
    [
        ("/v1/rerank", "query", "documents"),
        ("/v1/score", "text_1", "text_2"),
        ("/v1/completions", "metadata", "prompt"),
    ],
)
async def test_a_value_that_goes_with_many_is_bounded_and_counted_with_its_copies(
    path: str, name: str, others: str
) -> None:
    budget, held = MemoryBudget(1 << 20), list[int]()

    async def script(_: ScriptedHandle) -> AsyncIterator[Event]:
        held.append(budget.held_nbytes)
        yield chunk(Scores([1.0] * 4) if path != "/v1/completions" else Text("ok"))

    long = "q" * 1000
    body = {name: {"a": long} if name == "metadata" else long}
    settings = msgspec.structs.replace(ALL, max_body_bytes=5000)
    async with start(script, settings, budget=budget) as running:
        taken = await post(running, path, {**body, others: ["x"] * 4})
        refused = await post(running, path, {**body, others: ["x"] * 5})
    assert (taken.status_code, refused.status_code) == (200, 413)
    assert refused.json()["error"]["param"] == ("prompt" if name == "metadata" else name)
    assert min(held) > 4000 and budget.held_nbytes == 0
