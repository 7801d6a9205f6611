"""The client's question, checked and put into the example's own words. No models. Called by the stages.

Everything refused here is the client's fault, and says which part of the request is meant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import stage_runtime as omni
from stage_models.voice.audio import Samples
from stage_models.voice.conversation import Heard, Question, Script, Turn, Utterance
from stage_models.voice.synthesis import MAX_SPEED, MIN_SPEED

#: Sound file to speech: decoded, resampled, silence cut off; empty when nobody speaks.
ReadSpeech = Callable[[bytes], Samples]


def aloud(request: omni.OmniRequest) -> bool:
    """Whether the answer is to be spoken: by the modalities asked for; a pipeline request that names none wants all."""
    return "audio" in request.modalities or (request.kind == "pipeline" and not request.modalities)


def understand(request: omni.OmniRequest, read_speech: ReadSpeech) -> Heard | Question | Script:
    """The request as what the next stage works on.

    Raises: InvalidRequest: no question, no speech in the sound that should hold it, or a part that is not understood.
    """
    if request.kind == "speech":
        return _script(request)
    if request.kind in ("transcription", "translation"):
        return _dictation(request, read_speech)
    return _conversation(_messages(request), read_speech, aloud=aloud(request))


def reading(request: omni.OmniRequest) -> tuple[str | None, float]:
    """Voice (None: the stage's own) and speed in which an answer is to be read."""
    voice = request.params.get("voice")
    if voice is not None and not isinstance(voice, str):
        raise omni.InvalidRequest(f"voice must be a name, not {voice!r:.80}", param="voice")
    return voice, _speed(_given(request.params, "speed", 1.0))


def _script(request: omni.OmniRequest) -> Script:
    inputs = request.inputs
    if not str(inputs.get("text") or "").strip():
        raise omni.InvalidRequest("expected a text to read", param="input")
    return Script(text=inputs["text"], voice=inputs.get("voice"), speed=_speed(_given(inputs, "speed", 1.0)))


def _dictation(request: omni.OmniRequest, read_speech: ReadSpeech) -> Heard:
    """A recording to write down. Silence is not a fault here: its transcript is empty."""
    inputs = request.inputs
    speech = read_speech(inputs["audio"])
    return Heard(
        task="translate" if request.kind == "translation" else "transcribe",
        aloud=False,
        turns=[Turn(role="user", text="")],
        utterances=[Utterance(turn=0, samples=speech)] if speech.size else [],
        hint=inputs.get("prompt"),
        language=inputs.get("language"),
    )


def _messages(request: omni.OmniRequest) -> list[dict[str, Any]]:
    """Chat messages, also of a pipeline request: a string, ``{text}``, ``{audio}`` (perhaps both) or ``{messages}``."""
    if isinstance(request.inputs, Mapping) and request.inputs.get("messages"):
        check_messages(request.inputs["messages"])
        return request.messages()
    inputs = {"text": request.inputs} if isinstance(request.inputs, str) else request.inputs
    if not isinstance(inputs, Mapping):
        raise omni.InvalidRequest("inputs must be a text, or hold text, audio or messages", param="inputs")
    parts: list[dict[str, Any]] = []
    if inputs.get("text"):
        parts.append({"type": "text", "text": checked_text(inputs["text"], "inputs.text", "inputs")})
    if inputs.get("audio"):
        parts.append({"type": "audio", "data": inputs["audio"]})
    return [{"role": "user", "content": parts}]


def check_messages(messages: Any) -> None:
    """A pipeline request may have anything here. Raises: InvalidRequest: they are not messages; says where."""
    if not isinstance(messages, list) or not messages:
        raise omni.InvalidRequest("messages: expected a list of messages", param="messages")
    for index, item in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(item, Mapping) or not isinstance(item.get("role"), str):
            raise omni.InvalidRequest(f"{where}: expected an object with a role and a content", param="messages")
        content = item.get("content")
        if content is None or isinstance(content, str):
            continue
        if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
            raise omni.InvalidRequest(f"{where}.content: expected a text or a list of parts", param="messages")
        for at, part in enumerate(content):
            if part.get("type") == "text":
                checked_text(part.get("text", ""), f"{where}.content[{at}].text", "messages")


def checked_text(given: Any, where: str, param: str) -> str:
    """Raises: InvalidRequest: it is not a text; its printed form would be answered as one."""
    if not isinstance(given, str):
        raise omni.InvalidRequest(f"{where}: expected a text, got {type(given).__name__}", param=param)
    return given


def _conversation(messages: list[dict[str, Any]], read_speech: ReadSpeech, *, aloud: bool) -> Heard | Question:
    turns: list[Turn] = []
    utterances: list[Utterance] = []
    for index, item in enumerate(messages):
        turns.append(Turn(role=item["role"], text=_text(item["content"])))
        for part in item["content"]:
            if part.get("type") == "audio":
                speech = _speech(part.get("data"), read_speech, index)
                if speech.size:
                    utterances.append(Utterance(turn=index, samples=speech))
            elif part.get("type") != "text":
                raise omni.InvalidRequest(
                    f"messages[{index}] holds a part of type {part.get('type')!r}; this pipeline takes text and audio",
                    param="messages",
                )
    if not turns or turns[-1].role != "user":
        raise omni.InvalidRequest("the last message must be the user's", param="messages")
    spoken = any(part["type"] == "audio" for part in messages[-1]["content"])
    if spoken and not any(utterance.turn == len(turns) - 1 for utterance in utterances):
        raise omni.InvalidRequest("nobody speaks in the audio", param="messages")
    if utterances:
        return Heard(task="answer", aloud=aloud, turns=turns, utterances=utterances)
    if not turns[-1].text:
        raise omni.InvalidRequest("the last message holds no question", param="messages")
    return Question(task="answer", aloud=aloud, turns=turns)


def _text(parts: list[dict[str, Any]]) -> str:
    return " ".join(str(part.get("text", "")).strip() for part in parts if part.get("type") == "text").strip()


def _speech(data: Any, read_speech: ReadSpeech, index: int) -> Samples:
    if not isinstance(data, bytes | bytearray | memoryview):
        raise omni.InvalidRequest(f"messages[{index}]: the audio is not a file", param="messages")
    return read_speech(bytes(data))


def _speed(value: Any) -> float:
    return _number(value, "speed", MIN_SPEED, MAX_SPEED)


def _given(settings: Mapping[str, Any], name: str, default: Any) -> Any:
    value = settings.get(name)
    return default if value is None else value


def _number(value: Any, name: str, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise omni.InvalidRequest(f"{name} must be a number from {low:g} to {high:g}, not {value!r}", param=name)
    return float(value)
