"""The session's state machine: client events, scores and outputs in; effects out. No socket, no clock."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage_runtime.errors import RequestError
from stage_runtime.metrics import catalog
from stage_runtime.metrics.samples import Buckets
from stage_runtime.web.realtime import dialects
from stage_runtime.web.realtime.counting import SessionCounts
from stage_runtime.web.realtime.effects import Answer, Cancel, Effect, Listen, Send
from stage_runtime.web.realtime.session import Session, SessionFacts
from stage_runtime.wire.values import Note, ToolCall, Usage

FACTS = SessionFacts(model="hello", detects=True, transcribes=True, calls_tools=True)
WINDOW = 32 * 48  # bytes of what a score covers
LOUD, QUIET = 0.9, 0.05


class Driven:
    """A session, and all that it has sent."""

    def __init__(self, facts: SessionFacts = FACTS) -> None:
        numbers = itertools.count(1)
        self.session = Session(facts, lambda prefix: f"{prefix}_{next(numbers)}")
        self.events: list[dict[str, Any]] = []
        self.answers: dict[str, Answer] = {}
        self.cancelled: dict[str, str] = {}
        self.take(self.session.begin())

    def take(self, effects: Iterable[Effect]) -> list[str]:
        """Keep the effects; the types of the events among them."""
        sent = []
        for effect in effects:
            match effect:
                case Send(event=event):
                    sent.append(event["type"])
                    self.events.append(event)
                case Answer():
                    self.answers[effect.key] = effect
                case Cancel():
                    self.cancelled[effect.key] = effect.reason
        return sent

    def tell(self, type: str, **fields: Any) -> list[str]:
        return self.take(self.session.receive(msgspec.json.encode({"type": type, **fields})))

    def hear(self, *scores: float) -> list[str]:
        """Sound of so many windows in one append, and its scores."""
        effects = self.session.receive(
            msgspec.json.encode({"type": "input_audio_buffer.append", "audio": sound(len(scores))})
        )
        assert [type(effect) for effect in effects] == [Listen]
        return self.take(self.session.heard(scores))

    def detection(self, **fields: Any) -> None:
        session = {"type": "realtime", "audio": {"input": {"turn_detection": fields}}}
        assert self.tell("session.update", session=session) == ["session.updated"]

    def last(self, type: str) -> dict[str, Any]:
        return next(event for event in reversed(self.events) if event["type"] == type)

    @property
    def key(self) -> str:
        return list(self.answers)[-1]


def sound(windows: int) -> str:
    return base64.b64encode(bytes(WINDOW * windows)).decode()


TURN = ("input_audio_buffer.speech_stopped", "input_audio_buffer.committed")
ITEM = ("conversation.item.added", "conversation.item.done")
SPOKEN_TURN = [LOUD] * 10 + [QUIET] * 16


def test_a_turn_is_found_committed_and_answered() -> None:
    one = Driven()
    assert one.hear(*[QUIET] * 20) == []
    assert one.hear(*[LOUD] * 3) == []
    assert one.hear(LOUD) == ["input_audio_buffer.speech_started"]
    assert one.last("input_audio_buffer.speech_started")["audio_start_ms"] == 20 * 32 - 300
    assert one.hear(*[QUIET] * 14) == []
    assert one.hear(QUIET) == [*TURN, *ITEM, "response.created"]
    assert one.last("input_audio_buffer.speech_stopped")["audio_end_ms"] == 39 * 32
    [message] = one.answers[one.key].request.inputs["messages"]
    assert len(message["content"][0]["data"]) == 44 + (39 * 32 - (20 * 32 - 300)) * 48


def test_two_utterances_in_one_append_are_two_turns_with_their_own_sound() -> None:
    one = Driven()
    one.detection(silence_duration_ms=300, interrupt_response=False)
    pause = [QUIET] * 16  # 512 ms
    sent = one.hear(*[LOUD] * 12, *pause, *[LOUD] * 20, *pause)
    assert sent.count("input_audio_buffer.committed") == 2
    assert [event["audio_end_ms"] for event in one.events if event["type"].endswith("speech_stopped")] == [
        (12 + 9) * 32,
        (28 + 20 + 9) * 32,
    ]
    assert list(one.answers) == [one.key]  # the second waits for the first
    one.take(one.session.completed(one.key, Usage(), "stop"))
    assert len(one.answers) == 2
    lengths = [len(message["content"][0]["data"]) for message in one.answers[one.key].request.inputs["messages"]]
    assert lengths == [44 + 21 * WINDOW, 44 + (28 + 20 + 9 - 21) * WINDOW]


@pytest.mark.parametrize("windows", [1, 2, 3])
def test_a_blip_interrupts_nothing(windows: int) -> None:
    one = Driven()
    one.hear(*SPOKEN_TURN)
    assert one.hear(*[LOUD] * windows, *[QUIET] * 20, *[LOUD] * windows, *[QUIET] * 20) == []
    assert one.cancelled == {}


def test_speech_cancels_the_response_before_it_says_so_and_nothing_of_it_follows() -> None:
    one = Driven()
    one.hear(*SPOKEN_TURN)
    key = one.key
    one.take(one.session.text(key, "A long answer."))
    one.take(one.session.sound(key, bytes(4800)))
    effects = one.session.receive(
        msgspec.json.encode({"type": "input_audio_buffer.append", "audio": sound(4)})
    ) + one.session.heard([LOUD] * 4)
    assert [type(effect).__name__ for effect in effects[:2]] == ["Listen", "Cancel"]
    assert one.take(effects)[-4:] == [
        "response.output_item.done",
        "conversation.item.done",
        "response.done",
        "input_audio_buffer.speech_started",
    ]
    assert one.cancelled == {key: "turn_detected"}
    assert one.last("response.done")["response"]["status_details"] == {"type": "cancelled", "reason": "turn_detected"}
    late = (
        one.session.sound(key, bytes(480)),
        one.session.text(key, "more"),
        one.session.completed(key, Usage(), "stop"),
    )
    assert late == ([], [], [])
    assert one.session.failed(key, RequestError("cancelled", "turn_detected")) == []


def test_turns_interruptions_and_times_to_the_first_sound_are_counted() -> None:
    one, counts = Driven(), SessionCounts()
    assert counts.samples() == {}
    count, now = counts.begin(), 0.0

    def count_events() -> None:
        nonlocal now
        for event in one.events:
            now += 1.0
            count.sent(event, now)
        one.events.clear()

    one.hear(*SPOKEN_TURN)
    count_events()
    turn_ended_at = now - 3  # its item's two events and `response.created` follow
    for _ in range(2):  # the first sound counts, no other
        one.take(one.session.sound(one.key, bytes(4800)))
    first_sound = next(at for at, event in enumerate(one.events, 1) if event["type"] == "response.output_audio.delta")
    expected_s = now + first_sound - turn_ended_at
    count_events()
    one.hear(*SPOKEN_TURN)  # interrupts, and is a turn, too
    one.tell("response.cancel")  # by the client: no interruption by speech
    count_events()
    samples = counts.samples()
    first = samples[catalog.REALTIME_FIRST_SOUND][()]
    assert isinstance(first, Buckets)
    assert (first.counts[-1], first.sum) == (1, expected_s)
    assert samples[catalog.REALTIME_TURNS] == {(): 2}
    assert samples[catalog.REALTIME_BARGE_INS] == {(): 1}
    assert samples[catalog.REALTIME_SESSIONS] == {(): 1}
    count.close()
    assert counts.samples()[catalog.REALTIME_SESSIONS] == {(): 0}


def test_what_was_not_heard_is_cut_from_the_history() -> None:
    one = Driven()
    one.tell("response.create", response={"input": []})
    one.take(one.session.text(one.key, "one two three four five six seven eight nine ten"))
    one.take(one.session.sound(one.key, bytes(48 * 4000)))
    one.take(one.session.completed(one.key, Usage(), "stop"))
    item_id = one.last("response.output_item.done")["item"]["id"]
    assert one.tell("conversation.item.truncate", item_id=item_id, content_index=0, audio_end_ms=4001) == [
        "conversation.item.truncated"
    ]
    assert one.tell("conversation.item.truncate", item_id=item_id, content_index=0, audio_end_ms=2000) == [
        "conversation.item.truncated"
    ]
    one.tell("response.create")
    [message] = one.answers[one.key].request.inputs["messages"]
    assert message == {"role": "assistant", "content": [{"type": "text", "text": "one two three four five"}]}
    one.tell("conversation.item.truncate", item_id=item_id, content_index=0, audio_end_ms=5000)
    assert one.events[-1]["error"]["code"] == "invalid_value"


def test_an_interrupted_answer_keeps_no_more_words_than_its_sound_can_hold() -> None:
    one = Driven()
    one.tell("response.create", response={"input": []})
    one.take(one.session.text(one.key, "word " * 200))
    one.take(one.session.sound(one.key, bytes(48 * 4000)))
    one.tell("response.cancel")
    item_id = one.last("response.output_item.done")["item"]["id"]
    one.tell("conversation.item.truncate", item_id=item_id, content_index=0, audio_end_ms=2000)
    one.tell("response.create")
    [message] = one.answers[one.key].request.inputs["messages"]
    assert message["content"][0]["text"] == " ".join(["word"] * 6)


def test_a_partial_update_keeps_the_rest() -> None:
    one = Driven()
    one.detection(type="server_vad", threshold=0.7, silence_duration_ms=250)
    one.detection(prefix_padding_ms=100)
    one.tell("session.update", session={"instructions": "Be brief.", "turn_detection": {"create_response": False}})
    shown = one.last("session.updated")["session"]
    assert shown["instructions"] == "Be brief."
    assert shown["audio"]["input"]["turn_detection"] == {
        "type": "server_vad",
        "create_response": False,
        "interrupt_response": True,
        "threshold": 0.7,
        "prefix_padding_ms": 100,
        "silence_duration_ms": 250,
        "idle_timeout_ms": None,
    }


@pytest.mark.parametrize(
    ("session", "param"),
    [
        ({"turn_detection": {"threshold": 2}}, "session.audio.input.turn_detection"),
        ({"turn_detection": {"thresh": 1}}, "session.audio.input.turn_detection.thresh"),
        ({"audio": {"input": {"format": {"type": "audio/mp3"}}}}, "session"),
        ({"audio": {"input": {"format": {"type": "audio/pcm", "rate": 8000}}}}, "session.audio.input.format.rate"),
        ({"tools": [{"type": "mcp"}]}, "session.tools[0].type"),
        ({"input_audio_transcription": {"language": 5}}, "session.audio.input.transcription.language"),
        ({"audio": {"input": {"transcription": {"prompt": ["x"]}}}}, "session.audio.input.transcription.prompt"),
        ({"voice": 3}, "session"),
        ({"unknown": 1}, "session"),
        (None, "session"),
    ],
)
def test_an_update_that_cannot_be_had_changes_nothing(session: Any, param: str) -> None:
    one = Driven()
    before = one.events[0]["session"]
    assert one.tell("session.update", session=session, event_id="mine") == ["error"]
    assert (one.events[-1]["error"]["param"], one.events[-1]["error"]["event_id"]) == (param, "mine")
    one.tell("session.update", session={})
    assert one.last("session.updated")["session"] == before


def test_instructions_changed_in_mid_session_are_those_of_the_next_response() -> None:
    one = Driven()
    one.tell("session.update", session={"instructions": "Be brief."})
    one.tell("response.create")
    first = one.answers[one.key]
    one.tell("session.update", session={"instructions": "Be rude."})
    one.take(one.session.completed(first.key, Usage(), "stop"))
    one.tell("response.create", response={"instructions": "Sing."})
    second = one.answers[one.key]
    one.take(one.session.completed(second.key, Usage(), "stop"))
    one.tell("response.create")
    systems = [answer.request.inputs["messages"][0]["content"][0]["text"] for answer in one.answers.values()]
    assert systems == ["Be brief.", "Sing.", "Be rude."]


def test_sound_appended_after_a_commit_is_the_next_message() -> None:
    one = Driven()
    one.detection(type="none")
    for windows in (5, 7):
        one.tell("input_audio_buffer.append", audio=sound(windows))
        assert one.tell("input_audio_buffer.commit") == ["input_audio_buffer.committed", *ITEM]
    first, second = (event for event in one.events if event["type"] == "input_audio_buffer.committed")
    assert (first["previous_item_id"], second["previous_item_id"]) == (None, first["item_id"])
    one.tell("response.create")
    lengths = [len(message["content"][0]["data"]) for message in one.answers[one.key].request.inputs["messages"]]
    assert lengths == [44 + 5 * WINDOW, 44 + 7 * WINDOW]


@pytest.mark.parametrize("form", ["in lines", "url-safe", "without padding"])
def test_sound_may_be_appended_in_every_form_of_base64(form: str) -> None:
    one = Driven()
    one.detection(type="none")
    data = b"\xfb\xff" * 2401
    of_form = {
        "in lines": base64.encodebytes(data),
        "url-safe": base64.urlsafe_b64encode(data),
        "without padding": base64.b64encode(data).rstrip(b"="),
    }
    assert one.tell("input_audio_buffer.append", audio=of_form[form].decode()) == []
    one.tell("input_audio_buffer.commit")
    one.tell("response.create")
    [message] = one.answers[one.key].request.inputs["messages"]
    assert message["content"][0]["data"][44:] == data
    assert one.tell("input_audio_buffer.append", audio="QUI?") == ["error"]
    assert one.last("error")["error"]["message"].startswith("audio: expected base64, got the character '?'")


def test_detection_off_for_a_minute_and_on_again_hears_what_follows_alone() -> None:
    one = Driven()
    one.detection(type="none")
    for _ in range(60):
        assert one.tell("input_audio_buffer.append", audio=sound(31)) == []
    one.detection(type="server_vad")
    assert one.hear(*[QUIET] * 5) == []
    one.hear(*SPOKEN_TURN)
    started = one.last("input_audio_buffer.speech_started")["audio_start_ms"]
    assert started == 60 * 31 * 32 + 5 * 32 - 300
    [message] = one.answers[one.key].request.inputs["messages"]
    assert len(message["content"][0]["data"]) == 44 + 25 * WINDOW + 300 * 48


def test_a_cleared_buffer_begins_no_turn() -> None:
    one = Driven()
    one.hear(*[LOUD] * 6)
    assert one.tell("input_audio_buffer.clear") == ["input_audio_buffer.cleared"]
    assert one.hear(*[QUIET] * 30) == []
    assert one.answers == {}


def test_a_turn_without_end_is_committed_within_its_bound() -> None:
    one = Driven()
    sent = list(itertools.chain.from_iterable(one.hear(*[LOUD] * 250) for _ in range(32)))
    assert sent.count("input_audio_buffer.committed") == 2
    assert one.session.held_nbytes < 32 << 20


def test_items_are_put_where_they_belong_and_found_again() -> None:
    one = Driven()
    said = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "b"}]}
    one.tell("conversation.item.create", item={**said, "id": "b"})
    one.tell("conversation.item.create", item={**said, "id": "a"}, previous_item_id="root")
    one.tell("conversation.item.create", item={**said, "id": "c"}, previous_item_id="b")
    assert [event["previous_item_id"] for event in one.events if event["type"] == ITEM[0]] == [None, None, "b"]
    one.tell("conversation.item.retrieve", item_id="c")
    assert one.last("conversation.item.retrieved")["item"]["content"] == [{"type": "input_text", "text": "b"}]
    one.tell("conversation.item.delete", item_id="b")
    assert one.last("conversation.item.deleted")["item_id"] == "b"
    for fields in ({"item_id": "b"}, {"item_id": None}, {}):
        one.tell("conversation.item.delete", **fields)
        assert one.events[-1]["error"]["code"] == "item_not_found"
    one.tell("conversation.item.create", item={**said, "id": "a"})
    assert one.events[-1]["error"]["code"] == "item_already_exists"


def test_an_answer_stands_behind_the_same_item_when_it_begins_and_when_it_is_done() -> None:
    one = Driven()
    said = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "b"}]}
    one.tell("conversation.item.create", item={**said, "id": "asked"})
    one.tell("response.create")
    one.take(one.session.text(one.key, "so"))
    one.take(one.session.called(one.key, ToolCall(id="c", name="weather", arguments="{}")))
    one.take(one.session.completed(one.key, Usage(), "stop"))
    places = {name: [event["previous_item_id"] for event in one.events if event["type"] == name] for name in ITEM}
    answer = one.last("response.done")["response"]["output"][0]["id"]
    assert places == {name: [None, "asked", answer] for name in ITEM}


def test_what_an_answer_said_and_called_is_one_message_of_the_next_request() -> None:
    one = Driven()
    one.tell("response.create")
    one.take(one.session.text(one.key, "I look."))
    for id in ("c", "d"):
        one.take(one.session.called(one.key, ToolCall(id=id, name="weather", arguments="{}")))
    one.take(one.session.completed(one.key, Usage(), "tool_calls"))
    for id in ("c", "d"):
        one.tell("conversation.item.create", item={"type": "function_call_output", "call_id": id, "output": "sun"})
    one.tell("response.create")
    messages = one.answers[one.key].request.inputs["messages"]
    assert [one["role"] for one in messages] == ["assistant", "tool", "tool"]
    assert (messages[0]["content"], [call["id"] for call in messages[0]["tool_calls"]]) == (
        [{"type": "text", "text": "I look."}],
        ["c", "d"],
    )


def test_a_response_apart_is_no_part_of_the_conversation() -> None:
    one = Driven()
    given = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Sum it up."}]}]
    one.tell("response.create", response={"conversation": "none", "input": given, "metadata": {"topic": "sum"}})
    one.take(one.session.text(one.key, "So."))
    sent = one.take(one.session.completed(one.key, Usage(), "length"))
    assert not [type for type in sent if type.startswith("conversation")]
    done = one.last("response.done")["response"]
    assert (done["conversation_id"], done["metadata"], done["status"]) == (None, {"topic": "sum"}, "incomplete")
    one.tell("response.create")
    assert one.answers[one.key].request.inputs["messages"] == []


def test_a_transcription_session_writes_down_and_answers_nothing() -> None:
    one = Driven()
    one.tell("transcription_session.update", session={"type": "transcription"})
    one.hear(*SPOKEN_TURN)
    request = one.answers[one.key].request
    assert (request.kind, request.inputs["mime"]) == ("transcription", "audio/wav")
    one.take(one.session.completed(one.key, Usage(), "stop", "what was said"))
    assert one.last("conversation.item.input_audio_transcription.completed")["transcript"] == "what was said"
    assert one.tell("response.create") == ["error"]


def test_a_client_of_the_beta_that_wants_words_alone_says_so_by_the_event_or_the_address() -> None:
    asked = Driven(msgspec.structs.replace(FACTS, beta=True))
    asked.tell("transcription_session.update", session={"input_audio_transcription": {"model": "whisper-1"}})
    came = Driven(msgspec.structs.replace(FACTS, beta=True, writes_down=True))
    for one, name in ((asked, "updated"), (came, "created")):
        shown = dialects.beta(one.last(f"session.{name}")) or {}
        assert (shown["type"], shown["session"]["object"]) == (
            f"transcription_session.{name}",
            "realtime.transcription_session",
        )
        assert "voice" not in shown["session"]
        one.hear(*SPOKEN_TURN)
        assert one.answers[one.key].request.kind == "transcription"
    asked.tell("session.update", session={"type": "realtime"})
    assert asked.last("session.updated")["session"]["object"] == "realtime.session"


def test_a_client_that_leaves_ends_all_that_is_under_way() -> None:
    one = Driven()
    one.hear(*SPOKEN_TURN)
    assert one.session.busy
    one.take(one.session.close())
    assert list(one.cancelled) == [one.key]
    assert one.session.completed(one.key, Usage(), "stop") == []


STEPS = st.one_of(
    st.tuples(st.just("scores"), st.lists(st.sampled_from([LOUD, QUIET, 0.4]), min_size=1, max_size=25)),
    st.tuples(st.just("append"), st.integers(0, 12)),
    st.tuples(st.sampled_from(["text", "sound", "call", "complete", "fail", "note"]), st.none()),
    st.tuples(
        st.just("tell"),
        st.sampled_from(
            [
                {"type": "input_audio_buffer.commit"},
                {"type": "input_audio_buffer.clear"},
                {"type": "response.create"},
                {"type": "response.create", "response": {"conversation": "none"}},
                {"type": "response.cancel"},
                {"type": "session.update", "session": {"turn_detection": None}},
                {"type": "session.update", "session": {"turn_detection": {"interrupt_response": False}}},
                {"type": "session.update", "session": {"turn_detection": {"type": "semantic_vad"}}},
                {"type": "session.update", "session": {"input_audio_format": "g711_ulaw"}},
                {"type": "session.update", "session": {"output_modalities": ["text"]}},
                {"type": "session.update", "session": {"audio": {"input": {"transcription": {}}}}},
            ]
        ),
    ),
)


@given(st.lists(STEPS, max_size=40))
@settings(max_examples=40, deadline=None)
def test_each_response_is_done_once_and_nothing_of_it_follows(steps: list[Any]) -> None:
    one = Driven()
    for step, value in steps:
        _take_step(one, step, value)
    one.take(one.session.close())
    created = [event["response"]["id"] for event in one.events if event["type"] == "response.created"]
    done = [event["response"]["id"] for event in one.events if event["type"] == "response.done"]
    assert len(set(created)) == len(created)
    assert len(set(done)) == len(done)
    assert len(created) - len(done) in (0, 1)  # the one that `close` ended
    assert set(created) - set(done) <= set(one.cancelled)
    over: set[str] = set()
    for event in one.events:
        assert event.get("response_id") not in over
        if event["type"] == "response.done":
            over.add(event["response"]["id"])
            assert all(item["status"] != "in_progress" for item in event["response"]["output"])
    assert len({event["event_id"] for event in one.events}) == len(one.events)


def _take_step(one: Driven, step: str, value: Any) -> None:
    session, key = one.session, next(reversed(one.answers), "none")
    match step:
        case "scores":
            one.take(session.heard(value))
        case "append":
            one.tell("input_audio_buffer.append", audio=sound(value))
        case "tell":
            one.take(session.receive(msgspec.json.encode(value)))
        case "text":
            one.take(session.text(key, "word "))
        case "sound":
            one.take(session.sound(key, bytes(480)))
        case "call":
            one.take(session.called(key, ToolCall("c", "f", "{}")))
        case "note":
            one.take(session.noted(key, Note("transcript", "heard")))
        case "complete":
            one.take(session.completed(key, Usage(1, 1), "stop", "words"))
        case "fail":
            one.take(session.failed(key, RequestError("stage_failed", "broken")))
