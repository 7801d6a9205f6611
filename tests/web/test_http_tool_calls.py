"""`omni.ToolCall`s of an author's own stage, whole and streamed."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest
from openai import AsyncOpenAI

from stage_runtime.coordinator.events import ResultEvent
from stage_runtime.wire.values import Finish, Text, ToolCall
from tests.web.running import ALL, PATIENCE_S, Running, start
from tests.web.scripted_manager import Event, chunk, play

USER: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
SETTINGS = msgspec.structs.replace(ALL, accepts=frozenset(["tools", "n"]))
F, G = ToolCall("c1", "f", "{}"), ToolCall("c2", "g", "[]")


async def choices(running: Running, stream: bool, n: int = 1) -> list[Any]:
    """The choices, as the official client puts them together."""
    options: Any = {"model": "any", "messages": USER, "tools": TOOLS, "n": n}
    async with AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        if not stream:
            return list((await client.chat.completions.create(**options)).choices)
        async with client.chat.completions.stream(**options) as events:
            async for _ in events:
                pass
            return list(events.current_completion_snapshot.choices)


def calls(choice: Any) -> list[tuple[str, str, str]]:
    return [(one.id, one.function.name, one.function.arguments) for one in choice.message.tool_calls or ()]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("events", "made", "reason"),
    [
        ([chunk(F)], [F], "tool_calls"),
        ([chunk([Text("x"), F])], [F], "tool_calls"),
        ([ResultEvent(stage="talk", data=[Text("x"), F])], [F], "tool_calls"),
        ([chunk(F), chunk(Finish("stop"))], [F], "stop"),
        ([chunk(F), chunk(Finish("length"))], [F], "length"),
        ([chunk(F), ResultEvent(stage="talk", data=[Text("x"), F])], [F], "tool_calls"),
        ([chunk(F), ResultEvent(stage="talk", data=[F, G])], [F, G], "tool_calls"),
        (
            [chunk(F, stage="a"), ResultEvent(stage="talk", data=[ToolCall("c1", "g", "[]")])],
            [F, ToolCall("c1", "g", "[]")],
            "tool_calls",
        ),
        ([chunk([F, G])], [F, G], "tool_calls"),  # both say that they are the first
        ([chunk(F), chunk(G, stage="other")], [F, G], "tool_calls"),
        ([chunk(Text("x"))], [], "stop"),
    ],
)
async def test_calls_come_once_each_in_their_order_and_are_the_reason(
    stream: bool, events: list[Event], made: list[ToolCall], reason: str
) -> None:
    async with start(play(*events), SETTINGS) as running:
        (only,) = await choices(running, stream)
    assert calls(only) == [(one.id, one.name, one.arguments) for one in made]
    assert only.finish_reason == reason


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_is_the_reason_of_its_own_choice_only(stream: bool) -> None:
    second = ToolCall("c1", "f", "{}", choice=1)
    script = play(chunk(Text("x")), chunk(second), ResultEvent(stage="talk", data=[F, second]))
    async with start(script, SETTINGS) as running:
        first, other = await choices(running, stream, n=2)
    assert (calls(first), first.finish_reason) == ([("c1", "f", "{}")], "tool_calls")
    assert (calls(other), other.finish_reason) == ([("c1", "f", "{}")], "tool_calls")
    async with start(play(chunk(Text("x")), chunk(second)), SETTINGS) as running:
        first, other = await choices(running, stream, n=2)
    assert [first.finish_reason, other.finish_reason] == ["stop", "tool_calls"]


async def test_a_calls_place_in_a_stream_is_its_place_in_the_answer() -> None:
    script = play(chunk(F), chunk([G, ToolCall("c3", "h", "{}", 7)]), ResultEvent(stage="talk", data=[F]))
    async with (
        start(script, SETTINGS) as running,
        httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client,
    ):
        body = {"messages": USER, "tools": TOOLS, "stream": True}
        answer = await client.post("/v1/chat/completions", json=body)
    deltas = [msgspec.json.decode(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    made = [call for one in deltas for call in one["choices"][0]["delta"].get("tool_calls", ())]
    assert [(call["index"], call["id"]) for call in made] == [(0, "c1"), (1, "c2"), (2, "c3")]
