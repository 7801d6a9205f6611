from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import stage_runtime as omni
from stage_models.voice import requests, routing
from stage_models.voice.audio import Samples
from stage_models.voice.conversation import (
    Answer,
    Fact,
    Facts,
    Grounded,
    Heard,
    Question,
    Script,
    Turn,
    Utterance,
)

SPEECH = np.ones(4, np.float32)


def read_speech(data: bytes) -> Samples:
    """Somebody speaks unless the file says otherwise."""
    return SPEECH[:0] if data == b"silence" else SPEECH


def ask(kind: Any, inputs: Any, **rest: Any) -> omni.OmniRequest:
    return omni.OmniRequest(id="r", kind=kind, inputs=inputs, **rest)


def chat(*contents: Any, modalities: tuple[str, ...] = ("text",)) -> omni.OmniRequest:
    roles = ["user" if index % 2 == 0 else "assistant" for index in range(len(contents))]
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    return ask("chat", {"messages": messages}, modalities=modalities)


AUDIO = {"type": "audio", "mime": "audio/wav", "data": b"wav"}


def test_a_typed_question_needs_nobody_to_listen() -> None:
    question = requests.understand(chat("Hello?"), read_speech)
    assert question == Question(task="answer", aloud=False, turns=[Turn(role="user", text="Hello?")])
    assert routing.after_listen("r", question) == ["retrieve", "prompt"]


def test_a_spoken_question_goes_to_the_recogniser_with_its_whole_conversation() -> None:
    request = chat("Hi.", "Hello.", [{"type": "text", "text": "And:"}, AUDIO], modalities=("text", "audio"))
    heard = requests.understand(request, read_speech)
    assert isinstance(heard, Heard)
    assert heard.turns == [
        Turn(role="user", text="Hi."),
        Turn(role="assistant", text="Hello."),
        Turn(role="user", text="And:"),
    ]
    assert [utterance.turn for utterance in heard.utterances] == [2]
    assert (heard.task, heard.aloud) == ("answer", True)
    assert routing.after_listen("r", heard) == ["recognise"]


def test_a_transcription_is_written_and_silence_has_an_empty_one() -> None:
    heard = requests.understand(ask("transcription", {"audio": b"wav", "prompt": "Ada"}), read_speech)
    assert isinstance(heard, Heard)
    assert (heard.task, heard.hint, len(heard.utterances)) == ("transcribe", "Ada", 1)
    foreign = requests.understand(ask("translation", {"audio": b"wav", "language": "es"}), read_speech)
    assert isinstance(foreign, Heard)
    assert (foreign.task, foreign.language) == ("translate", "es")
    assert routing.after_recognise("r", Question(task="translate", aloud=False, turns=foreign.turns)) == ["write"]
    silent = requests.understand(ask("transcription", {"audio": b"silence"}), read_speech)
    assert silent == Heard(task="transcribe", aloud=False, turns=[Turn(role="user", text="")], utterances=[])
    written = Question(task="transcribe", aloud=False, turns=[Turn(role="user", text="hello")])
    assert routing.after_recognise("r", written) == ["write"]


def test_a_text_to_read_goes_straight_to_the_voice() -> None:
    script = requests.understand(ask("speech", {"text": "Hello.", "voice": "joe", "speed": 2}), read_speech)
    assert script == Script(text="Hello.", voice="joe", speed=2.0)
    assert routing.after_listen("r", script) == ["speak"]


@pytest.mark.parametrize(
    "inputs", ["Hello?", {"text": "Hello?"}, {"messages": [{"role": "user", "content": "Hello?"}]}]
)
def test_a_pipeline_request_may_put_its_question_in_three_ways(inputs: Any) -> None:
    assert requests.understand(ask("pipeline", inputs), read_speech) == Question(
        task="answer", aloud=True, turns=[Turn(role="user", text="Hello?")]
    )


def test_a_pipeline_request_may_bring_a_file() -> None:
    heard = requests.understand(ask("pipeline", {"audio": b"wav"}, modalities=("text",)), read_speech)
    assert isinstance(heard, Heard)
    assert not heard.aloud
    assert [type(utterance) for utterance in heard.utterances] == [Utterance]


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        (chat([{**AUDIO, "data": b"silence"}]), "nobody speaks"),
        (chat([{"type": "image", "mime": "image/png", "data": b"x"}]), r"messages\[0\].*'image'"),
        (chat("Hi", "Hello"), "last message must be the user's"),
        (chat(""), "no question"),
        (ask("pipeline", {}), "no question"),
        (ask("pipeline", 5), "inputs must be"),
        (ask("pipeline", {"audio": "a path"}), "not a file"),
        (ask("pipeline", {"messages": 5}), "messages: expected a list"),
        (ask("pipeline", {"messages": [5]}), r"messages\[0\]: expected an object with a role"),
        (ask("pipeline", {"messages": [{"content": "Hi"}]}), r"messages\[0\]: expected an object with a role"),
        (ask("pipeline", {"messages": [{"role": "user", "content": 5}]}), r"messages\[0\].content: expected a text"),
        (ask("pipeline", {"messages": [{"role": "user", "content": [{"text": "Hi"}]}]}), r"messages\[0\].*None"),
        (ask("pipeline", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}), "no question"),
        (ask("pipeline", {"messages": [{"role": "user", "content": [{"type": "audio"}]}]}), "not a file"),
        (ask("speech", {"text": "  "}), "expected a text to read"),
        (ask("speech", {"text": "x", "speed": 9}), "speed must be a number from 0.25 to 4"),
    ],
)
def test_what_cannot_be_answered_is_the_clients_fault_and_named(request_: omni.OmniRequest, problem: str) -> None:
    with pytest.raises(omni.InvalidRequest, match=problem):
        requests.understand(request_, read_speech)


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (chat("Hi"), ["write"]),
        (chat("Hi", modalities=("text", "audio")), ["write", "speak"]),
        (ask("speech", {"text": "x"}), ["speak"]),
        (ask("transcription", {"audio": b""}), ["write"]),
        (ask("translation", {"audio": b""}), ["write"]),
        (ask("pipeline", "x"), ["write", "speak"]),
        (ask("pipeline", "x", modalities=("text",)), ["write"]),
    ],
)
def test_a_request_ends_where_its_kind_and_modalities_say(request_: omni.OmniRequest, expected: list[str]) -> None:
    assert routing.terminals(request_) == expected


def test_an_answer_that_is_only_to_be_read_is_not_spoken() -> None:
    answer = Answer(text="x", aloud=False, prompt_tokens=1, completion_tokens=1, finish="stop")
    assert routing.after_chat("r", answer) == ["write"]


def test_the_fan_in_waits_for_the_facts_and_for_whoever_has_the_question() -> None:
    request = chat("Hi")
    question = Question(task="answer", aloud=False, turns=[Turn(role="user", text="Hi")])
    facts = [Fact(text="a", score=1.0)]
    asked = omni.StagePayload(request=request, data=question)
    found = omni.StagePayload(request=request, data=Facts(facts=facts))
    assert routing.question_and_facts("r", "retrieve", found) is None
    assert routing.question_and_facts("r", "listen", asked) == ["listen", "retrieve"]
    assert routing.question_and_facts("r", "recognise", asked) == ["recognise", "retrieve"]
    for source in ("listen", "recognise"):
        assert routing.ground({source: asked, "retrieve": found}) == Grounded(question=question, facts=facts)


def test_silence_in_an_earlier_message_is_no_fault() -> None:
    silence = [{**AUDIO, "data": b"silence"}]
    heard = requests.understand(chat(silence, "Yes?", [AUDIO]), read_speech)
    assert isinstance(heard, Heard)
    assert [utterance.turn for utterance in heard.utterances] == [2]
    typed = requests.understand(chat(silence, "Yes?", "Hello?"), read_speech)
    assert isinstance(typed, Question)


@pytest.mark.parametrize("voice", [["joe"], {"id": "joe"}, 5])
def test_a_voice_that_is_not_a_name_is_the_fault_of_the_client(voice: Any) -> None:
    """`speak` looks it up by its name."""
    with pytest.raises(omni.InvalidRequest, match="voice must be a name"):
        requests.reading(ask("pipeline", "Hello?", params={"voice": voice}))


@pytest.mark.parametrize("given", [None, 5, ["x"], {"a": 1}])
def test_a_text_of_another_type_is_refused_with_its_place_and_never_read_as_its_printed_form(given: Any) -> None:
    parts = [{"type": "text", "text": given}, {"type": "text", "text": "Hello?"}]
    with pytest.raises(omni.InvalidRequest, match=r"messages\[0\]\.content\[0\]\.text: expected a text"):
        requests.understand(ask("pipeline", {"messages": [{"role": "user", "content": parts}]}), read_speech)
    if given is not None:
        with pytest.raises(omni.InvalidRequest, match=r"inputs\.text: expected a text"):
            requests.understand(ask("pipeline", {"text": given}), read_speech)
