"""Events as OpenAI's `chat.completion` and `chat.completion.chunk` objects. Pure; called by the chat route.

Text is ``content``, whichever terminal it comes from, and once more the audio's transcript when audio was asked for (in
a stream: with the last audio piece, so that a client which shows both shows nothing twice). Sound is encoded elsewhere:
what `Completion.audio` holds, and what `CompletionChunks.add` yields as `Audio`, comes back as bytes of a file.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from stage_runtime.coordinator.events import AnswerEvent
from stage_runtime.web.translating import jsonable
from stage_runtime.web.translating.answer_outputs import Outputs, no_sound
from stage_runtime.web.translating.audio.base64pieces import Base64Pieces
from stage_runtime.web.translating.generation.chat import ChatCall
from stage_runtime.web.translating.generation.token_ids import TokenIds
from stage_runtime.wire.outputs import PROMPT_TOKEN_IDS
from stage_runtime.wire.values import Audio, Note, Reasoning, Text, ToolCall, Usage

AUDIO_LIFE_S = 3600  # OpenAI keeps an answer's audio for an hour; this server keeps none, clients read the field


class Completion:
    """Collects a request's events into one answer."""

    def __init__(self, *, call: ChatCall, request_id: str, model: str, created: int) -> None:
        self._call = call
        self._base = {"id": request_id, "created": created, "model": model}
        self._outputs = Outputs()
        #: Texts by choice and stage: two terminals' words are not mixed.
        self._text: dict[tuple[int, str], list[str]] = {}
        self._reasoning: dict[int, list[str]] = {}  #: Reasoning by choice.
        self._calls: dict[int, list[dict[str, Any]]] = {}  #: Calls by choice.
        self._logprobs: dict[int, list[Any]] = {}  #: Log probabilities by choice.
        self.audio: list[tuple[str, Audio]] = []  #: (stage, sound), if the client requested sound.
        self._notes: list[dict[str, Any]] = []
        self._ids = TokenIds()

    def add(self, event: AnswerEvent) -> None:
        for shown in self._outputs.take(event):
            match shown:
                case Text():
                    self._text.setdefault((shown.choice, event.stage), []).append(shown.text)
                    self._logprobs.setdefault(shown.choice, []).extend(shown.logprobs or ())
                case Reasoning():
                    self._reasoning.setdefault(shown.choice, []).append(shown.text)
                case ToolCall():
                    self._calls.setdefault(shown.choice, []).append(tool_call(shown))
                case Audio():
                    if self._call.audio is not None:
                        self.audio.append((event.stage, shown))
                case Note() if self._call.token_ids and self._ids.take(shown):
                    pass
                case Note():
                    self._notes.append(note(event.stage, shown))

    def check(self) -> None:
        """Raises: RequestError: stage_failed: the terminals gave nothing that this chat can show."""
        self._outputs.check("chat")
        if self._call.needs_sound and not (self.audio or self._calls):
            raise no_sound()

    def finish(self, sound: bytes | None) -> dict[str, Any]:
        """The `chat.completion`. sound: the file made of `audio`; None: the answer has no sound."""
        choices = [self._choice(index, sound) for index in range(self._call.choices)]
        answer = {**self._base, "object": "chat.completion", "choices": choices, "usage": usage(self._outputs)}
        if self._call.token_ids:  # of the prompt: once for all choices
            for choice in choices:
                answer.update({name: choice.pop(name) for name in [PROMPT_TOKEN_IDS] if name in choice})
        return {**answer, "notes": self._notes} if self._notes else answer

    def _choice(self, index: int, sound: bytes | None) -> dict[str, Any]:
        text = "".join(piece for (choice, _stage), all in self._text.items() if choice == index for piece in all)
        calls = self._calls.get(index)
        shown = text if self._call.text and (text or not calls) else None
        message: dict[str, Any] = {"role": "assistant", "content": shown, "refusal": None}
        if self._call.reasoning and index in self._reasoning:
            message |= thought("".join(self._reasoning[index]))
        if calls:
            message["tool_calls"] = calls
        if sound is not None and index == 0:
            message["audio"] = self._sound(sound, text)
        logprobs = {"content": self._logprobs.get(index, []), "refusal": None} if self._call.logprobs else None
        reason = self._outputs.reason(index)
        choice = {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}
        return {**choice, **self._ids.whole(index)} if self._call.token_ids else choice

    def _sound(self, sound: bytes, transcript: str) -> dict[str, Any]:
        return {
            "id": f"audio-{self._base['id']}",
            "data": base64.b64encode(sound).decode(),
            "expires_at": int(str(self._base["created"])) + AUDIO_LIFE_S,
            "transcript": transcript,
        }


class CompletionChunks:
    """Turns a request's events into chunks, one by one."""

    def __init__(self, *, call: ChatCall, request_id: str, model: str, created: int) -> None:
        self._call = call
        self._created = created
        self._audio_id = f"audio-{request_id}"
        self._base = {"id": request_id, "object": "chat.completion.chunk", "created": created, "model": model}
        self._outputs = Outputs()
        self._transcript: list[str] = []
        self._begun: set[int] = set()  #: Choices whose role was sent.
        self._has_sound = self._has_calls = False
        self._sound = Base64Pieces()
        self._ids = TokenIds()
        self._audio_named = False  #: The audio's id was sent.
        #: A chunk of text has nothing that differs from the one before, but the text and log probabilities.
        self._plain = call.text and call.audio is None and not call.token_ids and not call.continuous_usage

    def add(self, event: AnswerEvent) -> Iterator[dict[str, Any] | Audio]:
        """The event's chunks. An `Audio` among them is replaced by those of `sound`, once it is encoded."""
        yield from self._shown(event)
        for choice in self._ids.waiting():  # tokens without text
            yield from self._delta({}, choice=choice)

    def _shown(self, event: AnswerEvent) -> Iterator[dict[str, Any] | Audio]:
        for shown in self._outputs.take(event):
            match shown:
                case Note() if self._call.token_ids and self._ids.take(shown):
                    pass
                case Text():
                    yield from self._text(shown)
                case Reasoning() if self._call.reasoning and shown.text:
                    yield from self._delta(thought(shown.text), choice=shown.choice)
                case ToolCall():
                    self._has_calls = True
                    call = {"index": shown.index, **tool_call(shown)}
                    yield from self._delta({"tool_calls": [call]}, choice=shown.choice)
                case Audio() if self._call.audio is not None:
                    self._has_sound = True
                    yield shown
                case Note():
                    yield from self._delta({}, notes=[note(event.stage, shown)])

    def plain_text(self, event: AnswerEvent) -> Text | None:
        """The event's text, if its one chunk has this text and else what `with_text` has. None: `add` it."""
        if not self._plain or not self._begun:
            return None
        data = event.data
        value = data[0] if type(data) is list and data else data
        if type(value) is not Text or value.choice not in self._begun or (self._call.logprobs and value.logprobs):
            return None
        return self._outputs.only_text(event)

    def with_text(self, choice: int, text: str = "") -> dict[str, Any]:
        """The chunk of a text of a choice whose role was sent."""
        return self._chunk(choice, {"content": text}, None, None, {})

    def sound(self, data: bytes) -> Iterator[dict[str, Any]]:
        """The chunks of bytes of the sound's file; the last of them are `finish`'s."""
        if text := self._sound.add(data):
            yield from self._audio({"data": text})

    def check(self) -> bool:
        """Called at the end. Returns whether there was any sound.

        Raises: RequestError: stage_failed: the terminals gave nothing that this chat can show.
        """
        self._outputs.check("chat")
        if self._call.needs_sound and not (self._has_sound or self._has_calls):
            raise no_sound()
        return self._has_sound

    def finish(self, sound: bytes = b"") -> Iterator[dict[str, Any]]:
        """The last chunks: the audio's end, the reason, the usage if the client requested it.

        sound: the last bytes of its file.
        """
        if text := self._sound.finish(sound):
            yield from self._audio({"data": text})
        if self._has_sound:
            transcript = "".join(self._transcript)
            yield from self._audio({"transcript": transcript, "expires_at": self._created + AUDIO_LIFE_S})
        for choice in range(self._call.choices):
            yield from self._delta({}, reason=self._outputs.reason(choice), choice=choice)
        if self._call.include_usage:
            yield {**self._base, "choices": [], "usage": usage(self._outputs)}

    def _text(self, shown: Text) -> Iterator[dict[str, Any]]:
        if self._call.audio is not None:
            self._transcript.append(shown.text)
        logprobs = {"content": shown.logprobs, "refusal": None} if self._call.logprobs and shown.logprobs else None
        if self._call.text:
            yield from self._delta({"content": shown.text}, choice=shown.choice, logprobs=logprobs)

    def _audio(self, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The first of these has the id, as OpenAI's: clients that add deltas up would join several."""
        named = {} if self._audio_named else {"id": self._audio_id}
        self._audio_named = True
        yield from self._delta({"audio": {**named, **fields}})

    def _delta(
        self,
        delta: dict[str, Any],
        *,
        reason: str | None = None,
        choice: int = 0,
        logprobs: dict[str, Any] | None = None,
        **extra: Any,
    ) -> Iterator[dict[str, Any]]:
        ids = self._ids.next(choice)
        if PROMPT_TOKEN_IDS in ids and not self._begun:  # once for all choices
            extra[PROMPT_TOKEN_IDS] = ids[PROMPT_TOKEN_IDS]
        ids.pop(PROMPT_TOKEN_IDS, None)
        if choice not in self._begun:
            self._begun.add(choice)
            role = {"role": "assistant", "content": "" if self._call.text else None}
            prompt = {name: extra.pop(name) for name in [PROMPT_TOKEN_IDS] if name in extra}
            yield self._chunk(choice, role, None, None, prompt)
        yield self._chunk(choice, delta, reason, logprobs, extra, ids)

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        reason: str | None,
        logprobs: Any,
        extra: dict[str, Any],
        ids: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason, **(ids or {})}
        chunk = {**self._base, "choices": [choice], **extra}
        if self._call.include_usage:  # as OpenAI: every chunk has the field, only the last one a value
            chunk["usage"] = usage(self._outputs) if self._call.continuous_usage else None
        return chunk


def usage(outputs: Outputs) -> dict[str, Any]:
    """Zeros when no terminal gave a `Usage`: clients index into this object without looking."""
    return usage_of([outputs.usage])


def usage_of(counts: Sequence[Usage]) -> dict[str, Any]:
    """The usage of several requests that have one answer."""
    found = Usage(*map(sum, zip(*map(msgspec.structs.astuple, counts), strict=True)))
    prompt, completion = found.prompt_tokens, found.completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": found.cached_tokens, **_of_prompt(found)},
        "completion_tokens_details": {"reasoning_tokens": found.reasoning_tokens, **_of_answer(found)},
    }


def _of_prompt(found: Usage) -> dict[str, int]:
    """Tokens by modality, of a prompt that is not text alone."""
    image, audio = found.prompt_image_tokens, found.prompt_audio_tokens
    if not image and not audio:
        return {}
    of_text = max(found.prompt_tokens - image - audio, 0)
    return {"text_tokens": of_text, "image_tokens": image, "audio_tokens": audio}


def _of_answer(found: Usage) -> dict[str, int]:
    """Tokens by modality, of an answer that is not text alone."""
    audio = found.completion_audio_tokens
    return {"text_tokens": max(found.completion_tokens - audio, 0), "audio_tokens": audio} if audio else {}


def thought(text: str) -> dict[str, str]:
    """The thinking, by both names that clients read: DeepSeek's, which came first, and the one that vLLM gives
    today.
    """
    return {"reasoning_content": text, "reasoning": text}


def tool_call(given: ToolCall) -> dict[str, Any]:
    return {"id": given.id, "type": "function", "function": {"name": given.name, "arguments": given.arguments}}


def note(stage: str, given: Note) -> dict[str, Any]:
    return {"stage": stage, "name": given.name, "value": jsonable.plain(given.value)}
