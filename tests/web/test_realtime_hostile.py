"""A realtime session answers whatever a client sends: an error or an effect, all that is kept is counted, and
bounded.
"""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage_runtime.errors import RequestError
from stage_runtime.web.realtime import configuration, dialects
from stage_runtime.web.realtime.effects import Answer, Effect, Send
from stage_runtime.web.realtime.session import Session, SessionFacts
from stage_runtime.wire.values import Note, ToolCall, Usage
from tests.thoroughness import examples
from tests.web.test_realtime_session import Driven

MEGABYTE = "x" * (1 << 20)
SOUND = base64.b64encode(bytes(9600)).decode()


@pytest.mark.parametrize(
    "item",
    [
        {"type": "function_call", "name": MEGABYTE, "arguments": "{}"},
        {"type": "function_call", "name": "f", "call_id": MEGABYTE, "arguments": "{}"},
        {"type": "function_call_output", "call_id": MEGABYTE, "output": ""},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": ""}] * 5000},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "\U0001f600" * (1 << 18)}]},
    ],
    ids=["name", "call_id", "call_id of an output", "empty parts", "letters of four bytes"],
)
def test_whatever_an_item_is_made_of_is_counted(item: dict[str, Any]) -> None:
    one = Driven()
    one.tell("conversation.item.create", item=item)
    assert one.session.held_nbytes >= 1 << 20


def test_a_conversation_of_long_names_is_trimmed_as_one_of_long_texts() -> None:
    one = Driven()
    for _ in range(20):
        one.tell("conversation.item.create", item={"type": "function_call", "name": MEGABYTE, "arguments": "{}"})
    assert one.last("conversation.item.deleted")
    assert one.session.held_nbytes < 18 << 20


def test_an_item_that_a_response_refers_to_many_times_counts_as_often() -> None:
    one = Driven()
    said = {"type": "message", "role": "user", "content": [{"type": "input_audio", "audio": MEGABYTE}]}
    one.tell("conversation.item.create", item={**said, "id": "a"})
    reference = {"type": "item_reference", "id": "a"}
    assert one.tell("response.create", response={"input": [reference] * 30}) == ["error"]
    assert (one.last("error")["error"]["code"], one.answers) == ("too_large", {})
    assert one.tell("response.create", response={"input": [reference] * 15}) == ["response.created"]


def test_sound_that_is_being_written_down_is_counted_until_it_is() -> None:
    one = Driven()
    one.tell("transcription_session.update", session={"type": "transcription"})
    for _ in range(30):
        one.tell("input_audio_buffer.append", audio=MEGABYTE)
        one.tell("input_audio_buffer.commit")
    assert one.session.held_nbytes > 30 * len(MEGABYTE) * 3 // 4
    for key in one.answers:
        one.take(one.session.completed(key, Usage(), "stop", "words"))
    assert one.session.held_nbytes < len(MEGABYTE)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "name": "f", "description": MEGABYTE}]},
        {"tracing": {"workflow_name": MEGABYTE}},
        {"audio": {"input": {"transcription": {"prompt": MEGABYTE}}}},
        {"tool_choice": {"name": MEGABYTE}},
        {"audio": {"output": {"voice": MEGABYTE}}},
    ],
    ids=["tools", "tracing", "transcription", "tool_choice", "voice"],
)
def test_a_configuration_that_is_too_large_is_refused_and_changes_nothing(fields: dict[str, Any]) -> None:
    one = Driven()
    before = one.session.held_nbytes
    assert one.tell("session.update", session={"type": "realtime", **fields}) == ["error"]
    assert one.last("error")["error"]["code"] == "too_large"
    assert one.session.held_nbytes == before


def test_a_configuration_is_counted() -> None:
    one = Driven()
    tools = [{"type": "function", "name": "f", "description": MEGABYTE[: configuration.MAX_NBYTES // 2]}]
    assert one.tell("session.update", session={"type": "realtime", "tools": tools}) == ["session.updated"]
    assert one.session.held_nbytes >= configuration.MAX_NBYTES // 2


# ------------------------------------------------------------------------------------------------- any events at all

ATOMS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    | st.sampled_from(["root", "item_3", "item_5", "auto", "none", "inf", "audio", "text", "pcm16", SOUND, "AAA"])
)
PIECES = st.sampled_from(
    [
        {"type": "server_vad"},
        {"type": "semantic_vad", "eagerness": "low"},
        {"type": "none"},
        {"threshold": 1e308},
        {"type": "message", "role": "user", "content": "x"},
        {"type": "message", "role": "user", "content": [{"type": "input_audio", "audio": SOUND}]},
        {"type": "message", "role": "assistant", "content": [{"type": "audio", "transcript": "hm"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": "data:image/png,x"}]},
        {"type": "function_call", "name": "f", "arguments": "{"},
        {"type": "function_call_output", "call_id": "c", "output": "o"},
        [{"type": "item_reference", "id": "item_3"}],
        [{"type": "message", "role": "user", "content": "hm"}],
        [{"type": "function", "name": "f", "parameters": 5}],
        {"input": {"format": {"type": "audio/pcmu"}, "turn_detection": None}},
        {"output": {"format": {"type": "audio/pcma"}, "voice": {"id": "v"}}},
        {"language": 5, "prompt": []},
        ["text", "audio"],
    ]
)
VALUES = st.recursive(
    ATOMS | PIECES, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
)
INNER = {
    "session": (*configuration.SessionPatch.__struct_fields__, "unknown"),
    "response": (*configuration.ResponsePatch.__struct_fields__, "unknown"),
    "item": ("type", "id", "role", "content", "call_id", "name", "arguments", "output", "unknown"),
}
OUTER = ("audio", "item_id", "previous_item_id", "audio_end_ms", "content_index", "response_id", "event_id")
TYPES = (
    *("session.update", "input_audio_buffer.append", "input_audio_buffer.commit", "input_audio_buffer.clear"),
    *("conversation.item.create", "conversation.item.retrieve", "conversation.item.delete"),
    *("conversation.item.truncate", "response.create", "response.cancel", "output_audio_buffer.clear", "unknown"),
)


@st.composite
def events(draw: st.DrawFn) -> bytes:
    event: dict[str, Any] = {"type": draw(st.sampled_from(TYPES) | ATOMS)}
    for name in draw(st.lists(st.sampled_from(OUTER), max_size=3)):
        event[name] = draw(VALUES)
    for name in draw(st.lists(st.sampled_from(sorted(INNER)), max_size=2)):
        fields = st.dictionaries(st.sampled_from(INNER[name]), VALUES, max_size=3)
        event[name] = draw(fields | fields.map(lambda given: {"type": "message", "role": "user", **given}) | VALUES)
    return msgspec.json.encode(event)


OUTPUTS = st.sampled_from(["text", "sound", "call", "note", "completed", "failed"])
STEPS = st.lists(
    events() | events() | events() | st.lists(st.sampled_from([0.0, 1.0]), max_size=40) | OUTPUTS, max_size=25
)


def given_to(session: Session, step: Any, key: str) -> list[Effect]:
    match step:
        case bytes():
            return session.receive(step)
        case list():
            return session.heard(step)
        case "text":
            return session.text(key, "word ")
        case "sound":
            return session.sound(key, bytes(480))
        case "call":
            return session.called(key, ToolCall("c", "f", "{}"))
        case "note":
            return session.noted(key, Note("transcript", "said"))
        case "completed":
            return session.completed(key, Usage(1, 1), "length", "said")
    return session.failed(key, RequestError("stage_failed", "no", stage="talk"))


@given(STEPS, st.booleans(), st.booleans(), st.booleans())
@settings(max_examples=examples(150), deadline=None)
def test_no_event_raises_and_all_that_is_sent_is_json(
    steps: list[Any], beta: bool, transcribes: bool, tools: bool
) -> None:
    numbers = iter(range(1, 10_000))
    facts = SessionFacts(model="m", beta=beta, detects=True, transcribes=transcribes, calls_tools=tools)
    session, key = Session(facts, lambda prefix: f"{prefix}_{next(numbers)}"), "none"
    effects = session.begin()
    for step in steps:
        effects += given_to(session, step, key)
        key = next((one.key for one in reversed(effects) if isinstance(one, Answer)), key)
        assert session.held_nbytes >= 0
    for effect in (*effects, *session.close()):
        if isinstance(effect, Send):
            shown = dialects.beta(effect.event) if beta else effect.event
            if shown is not None:
                msgspec.json.encode(shown).decode()
