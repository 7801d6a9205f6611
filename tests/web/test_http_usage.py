"""Tokens so far: in every chunk where they are asked for, in log lines, and in whole results."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import pytest

from stage_runtime.coordinator.answering.token_counts import TokenCounts
from stage_runtime.coordinator.events import ChunkEvent, ResultEvent
from stage_runtime.wire.outputs import USAGE_SO_FAR
from stage_runtime.wire.values import Finish, Note, Text, Usage
from tests.web.running import PATIENCE_S, start
from tests.web.scripted_manager import play

ASK = {"model": "any", "messages": [{"role": "user", "content": "hi"}], "stream": True}


def said(index: int, text: str, tokens: int) -> ChunkEvent:
    metadata = {USAGE_SO_FAR: [7, tokens, 2]}
    return ChunkEvent(stage="talk", index=index, data=Text(text), metadata=metadata)


END = ResultEvent(stage="talk", data=[Usage(7, 4, 2), Finish("stop")])
TWO = (said(0, "a", 1), said(1, "b", 3))


async def events_of(options: dict[str, Any], *script: Any) -> list[Any]:
    async with start(play(*script)) as running, httpx.AsyncClient(timeout=PATIENCE_S) as client:
        answer = await client.post(running.url + "/v1/chat/completions", json={**ASK, "stream_options": options})
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


async def test_every_chunk_has_the_usage_so_far_where_that_is_asked_for() -> None:
    events = await events_of({"include_usage": True, "continuous_usage_stats": True}, *TWO, END)
    assert [one["usage"]["completion_tokens"] for one in events] == [1, 1, 3, 4, 4]
    assert {one["usage"]["prompt_tokens"] for one in events} == {7}
    assert events[-1]["choices"] == []


async def test_the_usage_comes_once_where_that_is_not_asked_for() -> None:
    events = await events_of({"include_usage": True}, *TWO, END)
    assert [one["usage"] and one["usage"]["total_tokens"] for one in events] == [None] * 4 + [11]
    assert all("usage" not in one for one in await events_of({"continuous_usage_stats": True}, *TWO, END))


async def test_the_log_line_of_a_request_has_its_tokens(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        await events_of({}, *TWO, END)
    (line,) = [one for one in caplog.messages if "POST /v1/chat/completions" in one]
    assert "prompt_tokens=7 completion_tokens=4" in line


def test_a_stream_that_stopped_counts_what_its_chunks_have_carried() -> None:
    counts = TokenCounts()
    assert counts.shown() is None
    for one in TWO:
        counts.take(one)
    assert counts.total == Usage(7, 3, 2)
    counts.take(END)
    assert counts.total == Usage(7, 4, 2)


@pytest.mark.parametrize("carried", [None, 5, [1, 2], [1, 2, -3], [True, 1, 1], ["a", "b", "c"], {}])
def test_what_an_author_writes_into_the_same_metadata_counts_nothing_and_breaks_nothing(carried: Any) -> None:
    counts = TokenCounts()
    counts.take(ChunkEvent(stage="talk", index=0, data=Text("a"), metadata={USAGE_SO_FAR: carried}))
    assert counts.shown() is None


async def results_of(*script: Any) -> Any:
    async with start(play(*script)) as running, httpx.AsyncClient(timeout=PATIENCE_S) as client:
        answer = await client.post(running.url + "/v1/pipeline", json={"inputs": "hi"})
    return answer.json()["results"]


async def test_a_whole_answer_of_a_generating_stage_holds_its_text() -> None:
    assert await results_of(*TWO, END) == {
        "talk": [
            {"type": "text", "text": "ab"},
            {"type": "usage", "prompt_tokens": 7, "completion_tokens": 4, "cached_tokens": 2},
            {"type": "finish", "reason": "stop"},
        ]
    }


async def test_the_texts_of_several_choices_are_kept_apart() -> None:
    script = [
        ChunkEvent(stage="talk", index=0, data=Text("a", 0)),
        ChunkEvent(stage="talk", index=1, data=Text("x", 1)),
        ChunkEvent(stage="talk", index=2, data=[Usage(5, 1), Finish("stop", 0)]),
        ChunkEvent(stage="talk", index=3, data=Text("y", 1)),
        ResultEvent(stage="talk", data=[Usage(0, 2), Finish("length", 1)]),
    ]
    assert await results_of(*script) == {
        "talk": [
            {"type": "text", "text": "a"},
            {"type": "text", "text": "xy", "choice": 1},
            {"type": "usage", "prompt_tokens": 5, "completion_tokens": 3},
            {"type": "finish", "reason": "stop"},
            {"type": "finish", "reason": "length", "choice": 1},
        ]
    }


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        ({"finish": "stop"}, {"finish": "stop"}),
        (Text("ab"), {"type": "text", "text": "ab"}),
        ([Text("ab"), Note("n", 1)], [{"type": "text", "text": "ab"}, {"type": "note", "name": "n", "value": 1}]),
        (None, None),
    ],
)
async def test_a_result_that_is_whole_by_itself_stays_what_it_is(result: Any, shown: Any) -> None:
    assert await results_of(*TWO, ResultEvent(stage="talk", data=result)) == {"talk": shown}


async def test_counts_in_metadata_are_not_shown_to_clients() -> None:
    async with start(play(*TWO, END)) as running, httpx.AsyncClient(timeout=PATIENCE_S) as client:
        answer = await client.post(running.url + "/v1/pipeline", json={"inputs": "hi", "stream": True})
    assert "metadata" not in answer.text and USAGE_SO_FAR not in answer.text


async def test_usage_shows_the_tokens_of_each_modality_where_there_are_others_than_text() -> None:
    script = [
        ResultEvent(stage="think", data=Usage(20, 6, 2, prompt_image_tokens=8, prompt_audio_tokens=5)),
        ResultEvent(stage="speak", data=Usage(completion_tokens=4, completion_audio_tokens=4)),
    ]
    async with start(play(*script)) as running, httpx.AsyncClient(timeout=PATIENCE_S) as client:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        answer = await client.post(running.url + "/v1/chat/completions", json=body)
    assert answer.json()["usage"] == {
        "prompt_tokens": 20,
        "completion_tokens": 10,
        "total_tokens": 30,
        "prompt_tokens_details": {"cached_tokens": 2, "text_tokens": 7, "image_tokens": 8, "audio_tokens": 5},
        "completion_tokens_details": {"reasoning_tokens": 0, "text_tokens": 6, "audio_tokens": 4},
    }


async def test_counts_of_modalities_above_the_whole_give_no_negative_count() -> None:
    script = ResultEvent(stage="think", data=Usage(1, 1, prompt_image_tokens=8, completion_audio_tokens=5))
    async with start(play(script)) as running, httpx.AsyncClient(timeout=PATIENCE_S) as client:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        found = (await client.post(running.url + "/v1/chat/completions", json=body)).json()["usage"]
    assert (found["prompt_tokens_details"]["text_tokens"], found["completion_tokens_details"]["text_tokens"]) == (0, 0)
