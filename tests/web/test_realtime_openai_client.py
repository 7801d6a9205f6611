"""`/v1/realtime` with the official client over a real socket: each event sent to it is of the client's own types."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import numpy as np
import openai
import pydantic
import pytest
import websockets
from openai.resources.realtime.realtime import AsyncRealtimeConnection
from openai.types.realtime.realtime_server_event import RealtimeServerEvent
from prometheus_client.parser import text_string_to_metric_families

from stage_runtime.errors import RequestError
from stage_runtime.web.exchanges.apikeys import ApiKeys
from stage_runtime.web.settings import WebSettings
from stage_runtime.wire.values import Audio, Finish, Note, Text, ToolCall, Usage
from tests.web.running import ALL, PATIENCE_S, Running, start
from tests.web.scripted_manager import Script, chunk, play

SERVER_EVENT: Any = pydantic.TypeAdapter(RealtimeServerEvent)
SOUND = Audio(np.full(2400, 0.5, np.float32), 24_000)
SPOKEN = play(
    chunk([Text("Good "), Text("day.")]), chunk(SOUND, index=1), chunk([Usage(5, 7), Finish("stop")], index=2)
)
NO_VAD: Any = {"type": "realtime", "audio": {"input": {"turn_detection": None}}}


class Talk:
    """A connection of the official client, and what it was sent."""

    def __init__(self, connection: AsyncRealtimeConnection, running: Running) -> None:
        self.connection = connection
        self.running = running
        self.events: list[Any] = []

    async def until(self, type: str) -> Any:
        """Read up to an event of a type."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                raw = await self.connection.recv_bytes()
                checked = SERVER_EVENT.validate_json(raw, strict=True)
                self.events.append(checked)
                if checked.type == type:
                    return checked

    async def ask(self, text: str) -> None:
        item: Any = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
        await self.connection.conversation.item.create(item=item)
        await self.connection.response.create()

    def types(self) -> list[str]:
        return [event.type for event in self.events]


@asynccontextmanager
async def talk(script: Script = SPOKEN, settings: WebSettings = ALL, key: str = "none") -> AsyncIterator[Talk]:
    async with start(script, settings) as running:
        client = openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0)
        async with client, client.realtime.connect(model="hello") as connection:
            yield Talk(connection, running)


async def test_a_text_is_answered_with_sound_and_transcript_in_the_documented_order() -> None:
    async with talk() as one:
        await one.ask("Hello")
        done = await one.until("response.done")
    assert one.types() == [
        "session.created",
        "conversation.item.added",
        "conversation.item.done",
        "response.created",
        "response.output_item.added",
        "conversation.item.added",
        "response.content_part.added",
        "response.output_audio_transcript.delta",
        "response.output_audio_transcript.delta",
        "response.output_audio.delta",
        "response.output_audio.done",
        "response.output_audio_transcript.done",
        "response.content_part.done",
        "response.output_item.done",
        "conversation.item.done",
        "response.done",
    ]
    assert done.response.status == "completed"
    assert done.response.output[0].content[0].transcript == "Good day."
    assert (done.response.usage.input_tokens, done.response.usage.output_tokens) == (5, 7)
    sound = next(event for event in one.events if event.type == "response.output_audio.delta")
    assert len(base64.b64decode(sound.delta)) == 4800
    request = one.running.manager.last.request
    assert request.kind == "chat"
    assert request.inputs == {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]}
    assert request.modalities == ["text", "audio"]


async def test_a_text_answer_has_no_sound_and_telephones_get_their_codes() -> None:
    async with talk() as one:
        await one.connection.session.update(session={"type": "realtime", "output_modalities": ["text"]})
        await one.ask("Hello")
        await one.until("response.done")
        assert "response.output_text.delta" in one.types()
        assert not [type for type in one.types() if "audio" in type]
        assert one.running.manager.last.request.modalities == ["text"]
        spoken: Any = {"audio": {"output": {"format": {"type": "audio/pcmu"}}}, "output_modalities": ["audio"]}
        await one.connection.response.create(response=spoken)
        await one.until("response.done")
    deltas = [event.delta for event in one.events if event.type == "response.output_audio.delta"]
    assert len(b"".join(map(base64.b64decode, deltas))) == 800


async def test_sound_that_is_committed_reaches_the_entry_stage_as_a_file() -> None:
    async with talk() as one:
        await one.connection.session.update(session=NO_VAD)
        pcm = (np.sin(np.arange(4800) / 10) * 9000).astype("<i2").tobytes()
        for at in range(0, len(pcm), 1000):
            await one.connection.input_audio_buffer.append(audio=base64.b64encode(pcm[at : at + 1000]).decode())
        await one.connection.input_audio_buffer.commit()
        await one.connection.response.create()
        await one.until("response.done")
        [part] = one.running.manager.last.request.inputs["messages"][0]["content"]
        assert (part["type"], part["mime"], part["data"][44:]) == ("audio", "audio/wav", pcm)
        async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
            text = (await http.get(f"{one.running.url}/metrics")).text
    counted = {sample.name: sample.value for each in text_string_to_metric_families(text) for sample in each.samples}
    expected = {"sessions": 1, "turns_total": 1, "barge_ins_total": 0, "first_sound_seconds_count": 1}
    assert {name: counted[f"omnipipeline_realtime_{name}"] for name in expected} == expected


async def test_a_function_is_called_and_its_output_answered() -> None:
    tooled = msgspec.structs.replace(ALL, accepts=frozenset({"tools"}))
    called = play(chunk([ToolCall("call_7", "weather", '{"city": "Rome"}'), Usage(3, 4)]))
    tool: Any = {"type": "function", "name": "weather", "description": "", "parameters": {"type": "object"}}
    async with talk(called, tooled) as one:
        await one.connection.session.update(session={"type": "realtime", "tools": [tool]})
        await one.ask("How is the weather?")
        await one.until("response.done")
        done = next(event for event in one.events if event.type == "response.function_call_arguments.done")
        assert (done.call_id, done.arguments) == ("call_7", '{"city": "Rome"}')
        output: Any = {"type": "function_call_output", "call_id": "call_7", "output": "sunny"}
        await one.connection.conversation.item.create(item=output)
        await one.connection.response.create()
        await one.until("response.done")
        request = one.running.manager.last.request
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert request.inputs["messages"][1:] == [
        {
            "role": "assistant",
            "content": [],
            "tool_calls": [{"id": "call_7", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_7", "content": [{"type": "text", "text": "sunny"}]},
    ]
    assert request.params["tools"][0] == {
        "type": "function",
        "function": {"name": "weather", "description": "", "parameters": {"type": "object"}},
    }


async def test_a_cancelled_response_ends_its_request_and_sends_nothing_more() -> None:
    gate = asyncio.Event()
    async with talk(play(chunk(Text("One ")), chunk(SOUND, index=1), gate, chunk(Text("two"), index=2))) as one:
        await one.ask("Count")
        await one.until("response.output_audio.delta")
        await one.connection.response.cancel()
        done = await one.until("response.done")
        assert (done.response.status, done.response.status_details.reason) == ("cancelled", "client_cancelled")
        handle = one.running.manager.last
        assert (handle.outcome, one.running.manager.in_flight) == ("cancelled", {})
        gate.set()
        await one.connection.session.update(session={"type": "realtime"})
        await one.until("session.updated")
    assert one.types().count("response.done") == 1
    assert one.types()[-2:] == ["response.done", "session.updated"]


async def test_a_session_lives_on_after_whatever_it_cannot_read() -> None:
    async with talk() as one:
        bad: list[tuple[Any, str]] = [
            ("{", "invalid_request"),
            ("[]", "invalid_request"),
            ('{"type": "no.such.event", "event_id": "e1"}', "unknown_event"),
            ('{"type": "session.update", "session": {"speeed": 1}}', "invalid_request"),
            ('{"type": "response.cancel"}', "response_cancel_not_active"),
            ('{"type": "input_audio_buffer.commit"}', "input_audio_buffer_commit_empty"),
            ('{"type": "input_audio_buffer.append", "audio": "é"}', "invalid_request"),
            (f'{{"type": "input_audio_buffer.append", "audio": "{"A" * (23 << 20)}"}}', "too_large"),
        ]
        for raw, code in bad:
            await one.connection.send_raw(raw)
            error = await one.until("error")
            assert error.error.code == code, raw[:80]
        assert [event.error.event_id for event in one.events if event.type == "error"][2] == "e1"
        await one.ask("Hello")
        assert (await one.until("response.done")).response.status == "completed"


async def test_a_session_prefers_the_instances_that_answered_it_last() -> None:
    async with talk() as one:
        for _ in range(3):
            await one.ask("Hello")
            await one.until("response.done")
        preferred = [handle.preferred for handle in one.running.manager.handles]
    assert preferred == [set(), {"talk-1"}, {"talk-2"}]


async def test_a_request_that_fails_is_one_failed_response() -> None:
    error = RequestError("stage_failed", "the stage broke", stage="talk")
    async with talk(play(chunk(Text("Well")), error)) as one:
        await one.ask("Hello")
        done = await one.until("response.done")
        assert (done.response.status, done.response.status_details.error.code) == ("failed", "stage_failed")
        assert done.response.output[0].status == "incomplete"
        await one.ask("Again")
        await one.until("response.done")
    assert one.types().count("response.done") == 2


async def test_a_transcript_that_a_stage_notes_is_sent_and_replaces_the_sound() -> None:
    without = msgspec.structs.replace(ALL, serves=("realtime",))
    async with talk(play(chunk(Note("transcript", "what is it")), chunk(Text("It."))), without) as one:
        session: Any = {"type": "realtime", "audio": {"input": {"turn_detection": None, "transcription": {}}}}
        await one.connection.session.update(session=session)
        await one.connection.input_audio_buffer.append(audio=base64.b64encode(bytes(9600)).decode())
        await one.connection.input_audio_buffer.commit()
        await one.connection.response.create()
        await one.until("response.done")
        heard = next(event for event in one.events if event.type.endswith("transcription.completed"))
        assert heard.transcript == "what is it"
        await one.ask("And now?")
        await one.until("response.done")
        messages = one.running.manager.last.request.inputs["messages"]
    assert messages[0]["content"] == [{"type": "text", "text": "what is it"}]


@pytest.mark.parametrize("step", ["opening", "response"])
async def test_a_client_that_leaves_gives_its_place_back(step: str) -> None:
    gate = asyncio.Event()
    steps: Any = (gate,) if step == "opening" else (chunk(SOUND), gate)
    async with talk(play(*steps)) as one:
        await one.ask("Hello")
        await one.until("response.created" if step == "opening" else "response.output_audio.delta")
        await one.connection.close()
        async with asyncio.timeout(PATIENCE_S):
            await one.running.manager.last.ended.wait()
        assert one.running.manager.last.outcome == "cancelled"
        assert one.running.manager.in_flight == {}
        client = openai.AsyncOpenAI(base_url=f"{one.running.url}/v1", api_key="none")
        async with client, client.realtime.connect(model="hello") as connection:
            other = Talk(connection, one.running)
            await other.connection.session.update(session={"type": "realtime"})
            await other.until("session.updated")
            assert other.types() == ["session.created", "session.updated"]


async def test_an_address_that_asks_for_words_alone_gets_a_session_of_transcriptions() -> None:
    wanted: Any = {"intent": "transcription"}
    headers = {"OpenAI-Beta": "realtime=v1"}
    sound = base64.b64encode(bytes(48 * 200)).decode()
    async with start(play(chunk(Text("who is there"))), ALL) as running:
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
            connecting = client.realtime.connect(model="m", extra_query=wanted, extra_headers=headers)
            async with connecting as connection, asyncio.timeout(PATIENCE_S):
                first = json.loads(await connection.recv_bytes())
                await connection.send({"type": "input_audio_buffer.append", "audio": sound})
                await connection.send({"type": "input_audio_buffer.commit"})
                while "transcript" not in (event := json.loads(await connection.recv_bytes())):
                    assert event["type"] != "error", event
        kinds = [handle.request.kind for handle in running.manager.handles]
    assert (first["type"], event["transcript"], kinds) == (
        "transcription_session.created",
        "who is there",
        ["transcription"],
    )


async def test_an_address_that_asks_for_words_alone_is_refused_where_nothing_writes_them_down() -> None:
    settings = msgspec.structs.replace(ALL, serves=("chat", "realtime"))
    upgrade = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    async with start(SPOKEN, settings) as running, httpx.AsyncClient(timeout=PATIENCE_S) as client:
        path = f"{running.url}/v1/realtime?model=m&intent=transcription"
        answer = await client.get(path, headers={**upgrade, "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ=="})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "intent")


async def test_a_beta_client_reads_the_beta_s_names() -> None:
    async with start(SPOKEN, ALL) as running:
        client = openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none")
        headers = {"OpenAI-Beta": "realtime=v1"}
        async with client, client.realtime.connect(model="hello", extra_headers=headers) as connection:
            update: dict[str, Any] = {"voice": "amy", "input_audio_format": "g711_ulaw", "turn_detection": None}
            await connection.send_raw(msgspec.json.encode({"type": "session.update", "session": update}).decode())
            await connection.send_raw('{"type": "response.create", "response": {"modalities": ["text", "audio"]}}')
            seen: list[dict[str, Any]] = []
            async with asyncio.timeout(PATIENCE_S):
                while not seen or seen[-1]["type"] != "response.done":
                    seen.append(msgspec.json.decode(await connection.recv_bytes()))
    assert seen[0]["session"]["input_audio_format"] == "pcm16"
    assert [one["type"] for one in seen][1:5] == [
        "conversation.created",
        "session.updated",
        "response.created",
        "response.output_item.added",
    ]
    assert {"response.audio.delta", "response.audio_transcript.delta"} <= {one["type"] for one in seen}
    assert seen[2]["session"] == {**seen[0]["session"], **update}
    assert running.manager.last.request.params == {"voice": "amy"}


@pytest.mark.parametrize(
    ("key", "protocols", "opens"),
    [
        ("wrong", (), False),
        ("", ("realtime", "openai-insecure-api-key.right"), True),
        ("", ("realtime", "openai-insecure-api-key.wrong"), False),
        ("right", (), True),
    ],
)
async def test_a_handshake_needs_a_key_in_its_header_or_subprotocols(
    key: str, protocols: tuple[str, ...], opens: bool
) -> None:
    keyed = msgspec.structs.replace(ALL, api_keys=ApiKeys(("right",)))
    async with start(SPOKEN, keyed) as running:
        assert await _handshake(running, {"authorization": f"Bearer {key}"} if key else {}, protocols) == (
            101 if opens else 401
        )


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "{url}"}, 101),
        ({"origin": "https://friend.example"}, 101),
        ({}, 101),
    ],
)
async def test_a_page_of_another_origin_opens_no_socket(headers: dict[str, str], status: int) -> None:
    async with start(SPOKEN, msgspec.structs.replace(ALL, hosts=("friend.example",))) as running:
        sent = {name: value.replace("{url}", running.url) for name, value in headers.items()}
        assert await _handshake(running, sent, ()) == status


async def test_a_path_that_is_not_served_or_not_asked_for_a_socket_is_refused_over_http() -> None:
    async with start(SPOKEN, msgspec.structs.replace(ALL, serves=("chat",))) as running:
        assert await _handshake(running, {}, ()) == 404
    async with start(SPOKEN, ALL) as running:
        client = openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        async with client:
            with pytest.raises(openai.APIStatusError) as refused:
                await client.get("/realtime", cast_to=object)
        assert refused.value.status_code == 426


async def test_a_draining_server_lets_a_turn_end_and_closes_the_session_then() -> None:
    gate = asyncio.Event()
    async with talk(play(chunk(Text("One ")), gate, chunk(Text("two"), index=1))) as one:
        await one.ask("Count")
        await one.until("response.output_audio_transcript.delta")
        draining = asyncio.create_task(one.running.server.drain(quiet_s=0.0))
        gate.set()
        assert (await one.until("response.done")).response.status == "completed"
        with pytest.raises(Exception, match="1001"):
            await one.until("error")
        async with asyncio.timeout(PATIENCE_S):
            await draining


async def test_a_client_that_does_not_read_holds_up_nobody_else() -> None:
    piece = chunk(Audio(np.zeros(1 << 18, np.float32), 24_000))
    async with talk(play(*[piece] * 64)) as slow:
        slow.connection._connection.transport.pause_reading()
        await slow.ask("Hello")
        client = openai.AsyncOpenAI(base_url=f"{slow.running.url}/v1", api_key="none")
        async with client, client.realtime.connect(model="hello") as connection:
            other = Talk(connection, slow.running)
            await other.connection.session.update(session={"type": "realtime"})
            await other.until("session.updated")
        await slow.connection.response.cancel()
        async with asyncio.timeout(PATIENCE_S):
            await slow.running.manager.last.ended.wait()
        assert slow.running.manager.last.pulled < 64


@pytest.mark.parametrize(
    ("path", "offered", "chosen"),
    [
        ("/v1/realtime", ["realtime", "openai-insecure-api-key.right"], "realtime"),
        ("/v1/realtime", ["openai-insecure-api-key.right", "realtime", "other"], "realtime"),
        ("/v1/realtime", ["openai-insecure-api-key.right", "openai-beta.realtime-v1"], "openai-beta.realtime-v1"),
        ("/v1/audio/speech/stream", ["openai-insecure-api-key.right", "speech"], "speech"),
        ("/v1/audio/speech/stream", ["openai-insecure-api-key.right"], "openai-insecure-api-key.right"),
    ],
)
async def test_a_browser_gets_one_of_the_subprotocols_that_it_offers(
    path: str, offered: list[Any], chosen: str
) -> None:
    settings = msgspec.structs.replace(ALL, api_keys=ApiKeys(("right",)))
    async with start(SPOKEN, settings) as running:
        url = f"{running.url.replace('http', 'ws', 1)}{path}"
        async with websockets.connect(url, subprotocols=offered) as connection:
            assert connection.subprotocol == chosen


async def _handshake(running: Running, headers: dict[str, str], protocols: tuple[str, ...]) -> int:
    """The status of a bare handshake."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.server.port)
    lines = [
        "GET /v1/realtime?model=hello HTTP/1.1",
        f"host: 127.0.0.1:{running.server.port}",
        "connection: keep-alive, Upgrade",
        "upgrade: websocket",
        "sec-websocket-version: 13",
        "sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==",
        *(f"{name}: {value}" for name, value in headers.items()),
        *([f"sec-websocket-protocol: {', '.join(protocols)}"] if protocols else []),
    ]
    writer.write("\r\n".join([*lines, "", ""]).encode())
    async with asyncio.timeout(PATIENCE_S):
        status = (await reader.readline()).split()[1]
    writer.close()
    return int(status)


async def test_a_response_whose_sound_is_none_fails_alone_and_is_ended_at_its_stages() -> None:
    never = asyncio.Event()
    broken = Audio(np.zeros((3, 3, 3), np.float32), 24_000)
    async with talk(play(chunk(broken), never)) as one:
        await one.ask("Hello")
        done = await one.until("response.done")
        assert done.response.status == "failed"
        handle = one.running.manager.last
        async with asyncio.timeout(PATIENCE_S):
            await handle.ended.wait()
        assert handle.outcome == "cancelled"
        await one.connection.session.update(session=NO_VAD)
        await one.until("session.updated")
