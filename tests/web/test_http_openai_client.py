"""The official openai client as the judge: a table of calls and fields, over a real socket, nothing retried."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
import openai
import pytest
import soundfile
from openai import AsyncOpenAI

from stage_runtime.coordinator.events import ResultEvent
from stage_runtime.errors import CODES, RequestError
from stage_runtime.web.reading import generation_fields
from stage_runtime.wire.values import Audio, Finish, Note, OmniRequest, Text, ToolCall, Usage
from tests.web.running import ALL, PATIENCE_S, Running, start
from tests.web.scripted_manager import ScriptedManager, chunk, play

USER: Any = [{"role": "user", "content": "hi"}]
TONE = np.sin(np.arange(12_000) * 2 * np.pi * 440 / 24_000).astype(np.float32) / 2
WAV = io.BytesIO()
soundfile.write(WAV, TONE, 24_000, format="WAV")
WAV_BASE64 = base64.b64encode(WAV.getvalue()).decode()
PNG = b"\x89PNG\r\n\x1a\n"
PNG_URL = "data:image/png;base64," + base64.b64encode(PNG).decode()


def client_of(running: Running, **options: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, **options)


async def asked(**body: Any) -> OmniRequest:
    """The request that the request manager gets of a chat call."""
    async with start(play(chunk(Text("ok")))) as running, client_of(running) as client:
        await client.chat.completions.create(model="any", **{"messages": USER, **body})
        return running.manager.last.request


@pytest.mark.parametrize(
    ("body", "params"),
    [
        ({}, {}),
        ({"temperature": 0.5, "top_p": 0.9, "seed": 7}, {"temperature": 0.5, "top_p": 0.9, "seed": 7}),
        ({"max_tokens": 9}, {"max_tokens": 9}),
        ({"max_tokens": 9, "max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"stop": "x"}, {"stop": "x"}),
        ({"stop": ["x", "y"]}, {"stop": ["x", "y"]}),
        ({"frequency_penalty": 1, "presence_penalty": -1}, {"frequency_penalty": 1.0, "presence_penalty": -1.0}),
        ({"logit_bias": {"5": 1}}, {"logit_bias": {"5": 1.0}}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ({"extra_body": {"top_k": 5, "min_p": 0.1}}, {"top_k": 5, "min_p": 0.1}),
        ({"user": "u", "store": False, "n": 1, "service_tier": "auto", "parallel_tool_calls": False}, {}),
        ({"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "logprobs": False}, {}),
        ({"audio": {"voice": "alloy", "format": "wav"}}, {"voice": "alloy"}),
    ],
)
async def test_parameters_reach_the_stages_as_given(body: dict[str, Any], params: dict[str, Any]) -> None:
    request = await asked(**body)
    assert (request.kind, request.params, request.modalities) == ("chat", params, ["text"])


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("hi", [{"type": "text", "text": "hi"}]),
        ([{"type": "text", "text": "hi"}], [{"type": "text", "text": "hi"}]),
        (
            [{"type": "input_audio", "input_audio": {"data": WAV_BASE64, "format": "wav"}}],
            [{"type": "audio", "mime": "audio/wav", "data": WAV.getvalue()}],
        ),
        (
            [{"type": "input_audio", "input_audio": {"data": "aGk=", "format": "mp3"}}],
            [{"type": "audio", "mime": "audio/mpeg", "data": b"hi"}],
        ),
        (
            [{"type": "image_url", "image_url": {"url": PNG_URL, "detail": "low"}}],
            [{"type": "image", "mime": "image/png", "data": PNG}],
        ),
        (
            [{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,aGk="}}],
            [{"type": "video", "mime": "video/mp4", "data": b"hi"}],
        ),
    ],
)
async def test_content_reaches_the_stages_as_parts(content: Any, parts: list[Any]) -> None:
    request = await asked(messages=[{"role": "system", "content": "be kind"}, {"role": "user", "content": content}])
    assert request.inputs == {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "be kind"}]},
            {"role": "user", "content": parts},
        ]
    }


@pytest.mark.parametrize(
    "options",
    [
        {"include_usage": None},
        {"include_usage": False, "continuous_usage_stats": False, "include_obfuscation": None},
        {"continuous_usage_stats": None},
    ],
)
async def test_stream_options_that_ask_for_nothing_are_accepted(options: dict[str, Any]) -> None:
    async with start(play(chunk(Text("ok")))) as running, client_of(running) as client:
        asked: Any = {"messages": USER, "stream": True, "stream_options": options}
        events = [one async for one in await client.chat.completions.create(model="any", **asked)]
    assert [one.usage for one in events] == [None] * len(events)
    assert "".join(one.choices[0].delta.content or "" for one in events) == "ok"


async def test_an_answer_of_this_server_may_be_sent_back_as_history() -> None:
    async with start(play(chunk(Text("ok")))) as running, client_of(running) as client:
        first = await client.chat.completions.create(model="any", messages=USER)
        history = [*USER, first.choices[0].message, *USER]
        await client.chat.completions.create(model="any", messages=history)
    roles = [(item["role"], item["content"][0]["text"]) for item in running.manager.last.request.messages()]
    assert roles == [("user", "hi"), ("assistant", "ok"), ("user", "hi")]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"messages": []}, "messages", "messages: expected `array` of length >= 1"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", None),
        (
            {"messages": [{"role": "boss", "content": "x"}]},
            "messages[0].role",
            "messages[0].role: invalid enum value 'boss'; known are assistant, developer, function, system, tool, user",
        ),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "messages[0].content: required"),
        ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "messages[0].content[0].type", None),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", None),
        ({"temperature": 3}, "temperature", "temperature: expected `float` <= 2.0"),
        ({"extra_body": {"temprature": 1}}, "temprature", "temprature: unknown parameter; did you mean 'temperature'?"),
        ({"n": 2}, "n", "n: one choice per request"),
        ({"n": 129}, "n", "n: expected `int` <= 128"),  # each is made by the coordinator, whatever stages give
        ({"store": True}, "store", "store: nothing is stored"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "tools: tools cannot be called"),
        ({"logprobs": True}, "logprobs", None),
        ({"extra_body": {"prompt_logprobs": 1}}, "prompt_logprobs", None),
        ({"extra_body": {"chat_template_kwargs": {"a": 1}}}, "chat_template_kwargs", None),
        ({"extra_body": {"min_tokens": 1}}, "min_tokens", None),
        ({"extra_body": {"stop_token_ids": [1]}}, "stop_token_ids", None),
        ({"extra_body": {"ignore_eos": True}}, "ignore_eos", None),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice: tools cannot be called"),
        ({"response_format": {"type": "json_object"}}, "response_format", "response_format: only {'type': 'text'}"),
        ({"modalities": ["text", "smell"]}, "modalities[1]", None),
        ({"modalities": ["audio"], "audio": {"voice": "a", "format": "aac"}}, "audio.format", None),
        ({"modalities": ["audio"], "audio": {"voice": "a", "format": "mp3"}, "stream": True}, "audio.format", None),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b.png"}}]}
                ]
            },
            "messages[0].content[0].image_url.url",
            "messages[0].content[0].image_url.url: its host 'a' is not one of the pipeline's mediaHosts",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:text/html,x"}}]}
                ]
            },
            "messages[0].content[0].image_url.url",
            None,
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "input_audio", "input_audio": {"data": "?", "format": "wav"}}],
                    }
                ]
            },
            "messages[0].content[0].input_audio.data",
            None,
        ),
        ({"extra_body": {"timeout": 0}}, "timeout", None),
        ({"extra_headers": {"x-request-timeout": "soon"}}, "x-request-timeout", None),
    ],
)
async def test_what_cannot_be_done_is_refused_by_its_name(
    body: dict[str, Any], param: str, message: str | None
) -> None:
    async with start(play(chunk(Text("ok")))) as running, client_of(running) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="any", **{"messages": USER, **body})
    assert (caught.value.code, caught.value.param) == ("invalid_request", param)
    facts: Any = caught.value.body
    assert facts["message"].startswith(f"{param}: ")
    assert message is None or facts["message"] == message
    assert running.manager.handles == []


async def test_what_a_pipeline_accepts_reaches_its_stages_and_their_answers_the_client() -> None:
    settings = msgspec.structs.replace(ALL, accepts=frozenset(["tools", "n", "logprobs", "min_tokens"]))
    logprobs = [{"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": []}]
    script = play(
        chunk(Text("a", 0, logprobs)),
        chunk(Text("b", 1)),
        chunk(ToolCall("call_1", "f", "{}", 0, 1)),
        chunk(Finish("tool_calls", 1)),
        chunk([Usage(3, 4), Finish("length")]),
    )
    tool = {"type": "function", "function": {"name": "f"}}
    extra: Any = {"tools": [tool], "n": 2, "logprobs": True, "extra_body": {"min_tokens": 2}}
    back: Any = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
    ]
    async with start(script, settings) as running, client_of(running) as client:
        answer = await client.chat.completions.create(model="any", messages=back, **extra)
        stream = await client.chat.completions.create(model="any", messages=USER, stream=True, **extra)
        deltas = [one async for event in stream for one in event.choices]
        with pytest.raises(openai.BadRequestError, match="only with logprobs"):
            await client.chat.completions.create(model="any", messages=USER, top_logprobs=2)
        with pytest.raises(openai.BadRequestError, match="text"):
            await client.chat.completions.create(model="any", messages=USER, response_format={"type": "json_object"})
    first, second = answer.choices
    assert (first.message.content, first.finish_reason) == ("a", "length")
    assert first.logprobs is not None and first.logprobs.content is not None
    assert [one.token for one in first.logprobs.content] == ["a"]
    assert (second.message.content, second.finish_reason) == ("b", "tool_calls")
    assert second.message.tool_calls is not None
    assert [one.id for one in second.message.tool_calls] == ["call_1"]
    assert [(one.index, one.delta.content) for one in deltas if one.delta.content] == [(0, "a"), (1, "b")]
    assert [one.index for one in deltas if one.delta.tool_calls] == [1]
    assert [(one.index, one.finish_reason) for one in deltas if one.finish_reason] == [(0, "length"), (1, "tool_calls")]
    given = running.manager.handles[0].request
    assert given.params == {"tools": [tool], "n": 2, "logprobs": True, "min_tokens": 2}
    assert given.inputs["messages"][2] == {
        "role": "tool",
        "content": [{"type": "text", "text": "x"}],
        "tool_call_id": "1",
    }


@pytest.mark.parametrize(
    "given",
    [
        {"tool_choice": "none"},
        {"tool_choice": "auto", "parallel_tool_calls": False},
        {"tools": [], "response_format": {"type": "text"}},
        {"n": 1, "logprobs": False, "top_logprobs": 0},
        {"extra_body": {"min_tokens": 0, "stop_token_ids": [], "chat_template_kwargs": {}, "prompt_logprobs": 0}},
        {"extra_body": {"ignore_eos": False}},
    ],
    ids=lambda given: "-".join(given),
)
async def test_what_asks_for_nothing_reaches_the_stages_that_accept_it_as_it_is(given: dict[str, Any]) -> None:
    """It may be against a default of the stage, and ``tool_choice: none`` hides the tools from the model."""
    settings = msgspec.structs.replace(ALL, accepts=generation_fields.names_of_accepts())
    tools: Any = {"tools": [{"type": "function", "function": {"name": "f"}}]} if "tools" not in given else {}
    async with start(play(chunk(Text("ok"))), settings) as running, client_of(running) as client:
        await client.chat.completions.create(model="any", messages=USER, **tools, **given)
        params = running.manager.last.request.params
    named = {name: value for name, value in given.items() if name != "extra_body"} | given.get("extra_body", {})
    assert params == {**tools, **named}


async def test_text_and_audio_of_two_terminals_are_one_message() -> None:
    script = play(
        chunk(Text("Hel"), stage="think"),
        chunk(Audio(TONE[:6000], 24_000), stage="voice"),
        chunk(Text("lo"), stage="think", index=1),
        ResultEvent(stage="think", data=[Text("Hello"), Usage(4, 2, 3)]),
        chunk([Audio(TONE[6000:], 24_000), Note("voice", "amy")], stage="voice", index=1),
        ResultEvent(stage="voice", data=Usage(0, 10, 1)),
    )
    async with start(script) as running, client_of(running) as client:
        answer = await client.chat.completions.create(
            model="any", messages=USER, modalities=["text", "audio"], audio={"voice": "amy", "format": "flac"}
        )
    message = answer.choices[0].message
    assert message.audio is not None and answer.usage is not None
    back, rate = soundfile.read(io.BytesIO(base64.b64decode(message.audio.data)), dtype="float32")
    np.testing.assert_allclose(back, TONE, atol=1e-4)
    assert rate == 24_000
    assert (message.content, message.audio.transcript, message.audio.id) == ("Hello", "Hello", f"audio-{answer.id}")
    assert message.audio.expires_at > answer.created
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (4, 12, 16)
    cached = answer.usage.prompt_tokens_details
    assert cached is not None and cached.cached_tokens == 4
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model_extra == {"notes": [{"stage": "voice", "name": "voice", "value": "amy"}]}
    assert running.manager.last.request.modalities == ["text", "audio"]


async def test_a_stream_of_text_and_audio_adds_up_to_the_answer() -> None:
    script = play(
        chunk(Text("Hel"), stage="think"),
        chunk(Audio(TONE[:6000], 24_000), stage="voice"),
        chunk(Text("lo"), stage="think", index=1),
        chunk(Audio(TONE[6000:], 24_000), stage="voice", index=1),
    )
    text, transcript, pcm, last, ids = "", "", b"", 0, []
    async with start(script) as running, client_of(running) as client:
        stream = await client.chat.completions.create(
            model="any",
            messages=USER,
            modalities=["text", "audio"],
            audio={"voice": "a", "format": "pcm16"},
            stream=True,
        )
        async for piece in stream:
            delta = piece.choices[0].delta
            text += delta.content or ""
            if delta.audio is not None:
                ids += [delta.audio.id] if delta.audio.id is not None else []
                pcm += base64.b64decode(delta.audio.data or "")
                transcript += delta.audio.transcript or ""
                last = delta.audio.expires_at or last
    assert (text, transcript, ids) == ("Hello", "Hello", [f"audio-{piece.id}"])
    np.testing.assert_allclose(np.frombuffer(pcm, "<i2") / 32767, TONE, atol=1e-4)
    assert last > 0


async def test_audio_that_was_not_asked_for_is_not_sent_and_audio_alone_has_its_words_as_transcript() -> None:
    script = play(chunk(Text("Hi")), chunk(Audio(TONE, 24_000), index=1))
    async with start(script) as running, client_of(running) as client:
        plain = await client.chat.completions.create(model="any", messages=USER)
        heard = await client.chat.completions.create(model="any", messages=USER, extra_body={"modalities": ["audio"]})
    assert (plain.choices[0].message.content, plain.choices[0].message.audio) == ("Hi", None)
    assert heard.choices[0].message.content is None
    assert heard.choices[0].message.audio is not None
    assert heard.choices[0].message.audio.transcript == "Hi"


async def test_without_usage_and_reason_clients_find_zeros_and_stop() -> None:
    async with start(play(chunk(Text("Hi")))) as running, client_of(running) as client:
        answer = await client.chat.completions.create(model="any", messages=USER)
    assert answer.usage is not None
    assert (answer.usage.total_tokens, answer.choices[0].finish_reason) == (0, "stop")


async def test_a_request_cut_short_by_any_stage_was_cut_short() -> None:
    script = play(chunk([Finish("length")], stage="think"), chunk([Text("x"), Finish("stop")], stage="voice"))
    async with start(script) as running, client_of(running) as client:
        answer = await client.chat.completions.create(model="any", messages=USER)
    assert answer.choices[0].finish_reason == "length"


async def test_a_terminal_that_gives_no_client_output_is_named() -> None:
    script = play(ResultEvent(stage="think", data={"words": 2}))
    async with start(script) as running, client_of(running) as client:
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError) as caught:
                await client.chat.completions.create(model="any", messages=USER, stream=stream)
            facts: Any = caught.value.body
            assert (facts["code"], facts["stage"]) == ("stage_failed", "think")
            assert "stage 'think' sent the client a dict" in facts["message"]


@pytest.mark.parametrize(("code", "status"), CODES.items())
async def test_every_code_of_the_closed_list_has_its_status_and_shape(code: str, status: int) -> None:
    script = play(RequestError(code, "because", stage="talk"))
    async with start(script) as running, client_of(running) as client:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(model="any", messages=USER, extra_headers={"x-request-id": "r-9"})
    error = caught.value
    facts: Any = error.body
    assert error.status_code == status
    assert set(facts) == {"message", "type", "code", "param", "stage", "request_id"}
    assert (facts["message"], facts["code"], facts["stage"], facts["request_id"]) == ("because", code, "talk", "r-9")
    assert error.response.headers["x-request-id"] == "r-9"
    assert error.response.headers.get("retry-after") == ("1" if status in (429, 503) else None)
    assert error.response.headers.get("x-should-retry") == ("false" if code in ("stage_failed", "deadline") else None)


async def test_an_error_after_the_first_chunk_reaches_the_reader_of_the_stream() -> None:
    script = play(chunk(Text("Hi")), RequestError("transport_failed", "lost", stage="talk"))
    seen = []
    async with start(script) as running, client_of(running) as client:
        stream = await client.chat.completions.create(model="any", messages=USER, stream=True)
        with pytest.raises(openai.APIError, match="lost") as caught:
            async for piece in stream:
                seen.append(piece.choices[0].delta.content)
    assert seen == ["", "Hi"]
    assert caught.value.code == "transport_failed"


async def test_a_stage_that_failed_is_not_asked_again_by_the_client_and_one_that_is_busy_is() -> None:
    async with start(play(RequestError("stage_failed", "no"))) as running:
        async with AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=2) as client:
            with pytest.raises(openai.InternalServerError):
                await client.chat.completions.create(model="any", messages=USER)
    assert len(running.manager.handles) == 1
    async with start(play(RequestError("unavailable", "no", retry_after_s=0.1))) as running:
        async with AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=1) as client:
            with pytest.raises(openai.InternalServerError):
                await client.chat.completions.create(model="any", messages=USER)
    assert len(running.manager.handles) == 2


async def test_the_synchronous_client_sees_the_same() -> None:
    def call(url: str) -> tuple[str | None, str]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            whole = client.chat.completions.create(model="any", messages=USER)
            pieces = client.chat.completions.create(model="any", messages=USER, stream=True)
            return whole.choices[0].message.content, "".join(piece.choices[0].delta.content or "" for piece in pieces)

    async with start(play(chunk(Text("a")), chunk(Text("b"), index=1))) as running:
        assert await asyncio.to_thread(call, running.url) == ("ab", "ab")


@pytest.mark.parametrize("format", ["mp3", "opus", "flac", "wav", "pcm", None])
async def test_speech_is_the_sound_in_the_format_asked_for_and_mp3_by_default(format: Any) -> None:
    script = play(chunk(Audio(TONE[:6000], 24_000)), chunk(Audio(TONE[6000:], 24_000), index=1))
    asked_for: Any = {} if format is None else {"response_format": format}
    async with start(script) as running, client_of(running) as client:
        answer = await client.audio.speech.create(model="any", voice="amy", input="hi", speed=1.5, **asked_for)
    types = {"mp3": "audio/mpeg", "opus": "audio/ogg", "flac": "audio/flac", "wav": "audio/wav", "pcm": "audio/pcm"}
    assert answer.response.headers["content-type"] == types[format or "mp3"]
    options: Any = (
        {"format": "RAW", "samplerate": 24_000, "channels": 1, "subtype": "PCM_16"} if format == "pcm" else {}
    )
    with soundfile.SoundFile(io.BytesIO(answer.content), **options) as file:
        back = np.concatenate(list(file.blocks(2048, dtype="float32")))
        assert file.format == {"mp3": "MP3", "opus": "OGG", "flac": "FLAC", "wav": "WAV", "pcm": "RAW"}[format or "mp3"]
    assert 0.5 <= len(back) / 24_000 < 0.6
    assert np.sqrt(np.mean(back**2)) == pytest.approx(0.35, rel=0.2)
    request = running.manager.last.request
    assert request.inputs == {"text": "hi", "voice": "amy", "format": format or "mp3", "speed": 1.5}
    assert (request.kind, request.modalities, request.stream) == ("speech", ["audio"], True)


@pytest.mark.parametrize("format", ["wav", "pcm", "mp3"])
async def test_the_first_sound_arrives_before_the_last_is_made(format: Any) -> None:
    gate = asyncio.Event()
    script = play(chunk(Audio(TONE, 24_000)), gate, chunk(Audio(TONE, 24_000), index=1))
    async with start(script) as running, client_of(running) as client:
        speech = client.audio.speech.with_streaming_response
        async with speech.create(model="any", voice="amy", input="hi", response_format=format) as answer:
            pieces = answer.iter_bytes(256)
            first = await asyncio.wait_for(anext(pieces), PATIENCE_S)
            gate.set()
            rest = [piece async for piece in pieces]
    assert len(first) == 256
    assert len(b"".join(rest)) > 1000


async def test_speech_as_events_adds_up_to_the_file() -> None:
    script = play(chunk(Audio(TONE[:6000], 24_000)), chunk([Audio(TONE[6000:], 24_000), Usage(3, 9)], index=1))
    async with start(script) as running, client_of(running) as client:
        answer = await client.audio.speech.create(
            model="any", voice="a", input="hi", response_format="pcm", stream_format="sse"
        )
    from tests.web.test_http_chat import frames

    *deltas, done, mark = frames(answer.text)
    pcm = b"".join(base64.b64decode(item["audio"]) for item in deltas)
    assert {item["type"] for item in deltas} == {"speech.audio.delta"}
    assert len(pcm) == 24_000
    usage = {"input_tokens": 3, "output_tokens": 9, "total_tokens": 12}
    assert (done, mark) == ({"type": "speech.audio.done", "usage": usage}, "[DONE]")


async def test_speech_refuses_aac_and_fails_when_nobody_made_a_sound() -> None:
    async with start(play(chunk(Text("no sound")))) as running, client_of(running) as client:
        with pytest.raises(openai.BadRequestError, match="there are mp3, opus, flac, wav, pcm"):
            await client.audio.speech.create(model="any", voice="a", input="hi", response_format="aac")
        with pytest.raises(openai.InternalServerError, match=r"no terminal stage gave an omni\.Audio"):
            await client.audio.speech.create(model="any", voice="a", input="hi")


async def test_sound_that_breaks_off_is_seen_to_be_torn() -> None:
    script = play(chunk(Audio(TONE, 24_000)), RequestError("stage_failed", "no", stage="voice"))
    async with start(script) as running, client_of(running) as client:
        with pytest.raises(openai.APIConnectionError):
            await client.audio.speech.create(model="any", voice="a", input="hi", response_format="pcm")


Call = Callable[[AsyncOpenAI], Awaitable[Any]]
FILE = ("q.wav", WAV.getvalue(), "audio/wav")


async def transcribed(call: Call) -> tuple[Any, ScriptedManager]:
    notes = [Note("language", "english"), Note("segments", [{"id": 0, "start": 0.0, "end": 0.5, "text": "hello you"}])]
    script = play(chunk(Text("hello ")), chunk(Text("you"), index=1), ResultEvent(stage="talk", data=notes))
    async with start(script) as running, client_of(running) as client:
        return await call(client), running.manager


async def test_a_transcription_is_text_and_says_the_length_of_the_file() -> None:
    answer, manager = await transcribed(
        lambda client: client.audio.transcriptions.create(
            model="any", file=FILE, language="en", prompt="names", temperature=0.2
        )
    )
    assert answer.text == "hello you"
    assert (answer.usage.type, answer.usage.seconds) == ("duration", 0.5)
    request = manager.last.request
    assert request.inputs == {"audio": WAV.getvalue(), "mime": "audio/wav", "language": "en", "prompt": "names"}
    assert (request.kind, request.params, request.stream) == ("transcription", {"temperature": 0.2}, False)


async def test_a_transcription_may_be_bare_text() -> None:
    answer, _ = await transcribed(
        lambda client: client.audio.transcriptions.create(model="any", file=FILE, response_format="text")
    )
    assert answer == "hello you"


@pytest.mark.parametrize(
    ("format", "wanted"),
    [
        ("srt", "1\n00:00:00,000 --> 00:00:00,500\nhello you\n"),
        ("vtt", "WEBVTT\n\n00:00:00.000 --> 00:00:00.500\nhello you\n"),
    ],
)
async def test_a_transcription_may_be_subtitles(format: Any, wanted: str) -> None:
    answer, manager = await transcribed(
        lambda client: client.audio.transcriptions.create(model="any", file=FILE, response_format=format)
    )
    assert answer == wanted
    assert manager.last.request.params == {"timestamp_granularities": ["segment"]}


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # by this client's newest versions
async def test_a_translation_is_a_request_of_its_own_kind() -> None:
    answer, manager = await transcribed(
        lambda client: client.audio.translations.create(model="any", file=FILE, response_format="verbose_json")
    )
    assert (answer.text, answer.language, answer.duration) == ("hello you", "english", 0.5)
    request = manager.last.request
    assert (request.kind, request.media("audio")[0].data) == ("translation", WAV.getvalue())


async def test_a_verbose_transcription_says_what_stages_know_and_no_more() -> None:
    answer, manager = await transcribed(
        lambda client: client.audio.transcriptions.create(
            model="any", file=FILE, response_format="verbose_json", timestamp_granularities=["segment"]
        )
    )
    assert (answer.text, answer.language, answer.duration) == ("hello you", "english", 0.5)
    assert (answer.segments[0].text, answer.words) == ("hello you", None)
    assert manager.last.request.params == {"timestamp_granularities": ["segment"]}


async def test_a_transcription_streams_deltas_and_ends_with_the_whole() -> None:
    async def call(client: AsyncOpenAI) -> list[Any]:
        stream = await client.audio.transcriptions.create(model="any", file=FILE, stream=True)
        return [event.to_dict() async for event in stream]

    events, manager = await transcribed(call)
    assert events == [
        {"type": "transcript.text.delta", "delta": "hello "},
        {"type": "transcript.text.delta", "delta": "you"},
        {"type": "transcript.text.done", "text": "hello you"},
    ]
    assert manager.last.request.stream


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": "ass"}, "response_format"),
        ({"response_format": "srt", "stream": True}, "response_format"),
        ({"temperature": 7}, "temperature"),
        ({"include": ["logprobs"]}, "include"),
        ({"extra_body": {"chunking_strategy": "server_vad"}}, "chunking_strategy"),
        ({"timestamp_granularities": ["word"]}, "timestamp_granularities"),
        ({"extra_body": {"langage": "en"}}, "langage"),
        ({"file": ("q.wav", b"", "audio/wav")}, "file"),
    ],
)
async def test_a_transcription_that_cannot_be_had_is_refused_by_its_name(body: dict[str, Any], param: str) -> None:
    async with start(play(chunk(Text("x")))) as running, client_of(running) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.audio.transcriptions.create(**{"model": "any", "file": FILE, **body})
    assert (caught.value.code, caught.value.param) == ("invalid_request", param)


async def test_there_is_one_model_whose_id_may_hold_slashes() -> None:
    async with start(play()) as running, client_of(running) as client:
        models = (await client.models.list()).data
        one = await client.models.retrieve("org/hello")
        with pytest.raises(openai.NotFoundError, match="there is 'org/hello'"):
            await client.models.retrieve("org/other")
    assert [model.to_dict() for model in models] == [one.to_dict()]
    assert one.to_dict() == {"id": "org/hello", "object": "model", "created": 1700000000, "owned_by": "omnipipeline"}
