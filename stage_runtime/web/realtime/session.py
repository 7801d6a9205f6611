"""A realtime session: client events, scores and outputs of requests in; effects out. Pure: no socket, clock or task.

The effect of each event is decided here and nowhere else. One response is made at a time, and each has one
`response.done`. `room` carries the effects out, in order; `asking` makes the requests. One room,
because each event may change the same response.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import msgspec

from stage_runtime.errors import InvalidRequest, RequestError
from stage_runtime.web.exchanges import errors
from stage_runtime.web.reading import strictjson
from stage_runtime.web.realtime import asking, configuration, dialects, formats, items
from stage_runtime.web.realtime.configuration import ResponsePatch, SessionConfig, SessionPatch, TurnDetection
from stage_runtime.web.realtime.conversation import MAX_NBYTES, Conversation
from stage_runtime.web.realtime.effects import Answer, Cancel, Effect, Listen, Send, StopListening
from stage_runtime.web.realtime.items import Item
from stage_runtime.web.realtime.responses import Response
from stage_runtime.web.realtime.speech.input_buffer import InputBuffer, RealtimeRefused
from stage_runtime.web.realtime.speech.turns import SpeechStarted, SpeechStopped, TurnState
from stage_runtime.wire.values import Note, ToolCall, Usage

MAX_EVENT: Final = 22 << 20  # characters: 15 MiB of sound as base64, and what is around it
MAX_TURN_MS: Final = 120_000  # a detected turn that goes on is committed: its sound would not fit any more

_EVENTS: Final = msgspec.json.Decoder(dict[str, Any])


class SessionFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of the pipeline and its client that a session is told."""

    model: str
    beta: bool = False  #: The client reads the beta's events.
    detects: bool = False  #: Turns can be detected.
    transcribes: bool = False  #: The pipeline serves transcription, too.
    calls_tools: bool = False  #: Its stages take tools.
    writes_down: bool = False  #: The client has asked for a session of the type ``transcription`` by the address.


class Session:
    """One client's session. Every method gives the effects that follow, in order."""

    def __init__(self, facts: SessionFacts, new_id: Callable[[str], str]) -> None:
        self._facts = facts
        self._new_id = new_id
        self._id = new_id("sess")
        self._conversation_id = new_id("conv")
        self._count = 0
        self._config = SessionConfig(
            type="transcription" if facts.writes_down else "realtime",
            turn_detection=TurnDetection() if facts.detects else None,
        )
        self._config_nbytes = 0
        self._conversation = Conversation()
        self._buffer = InputBuffer(formats.PCM)
        self._turn = TurnState()
        self._turn_item: str | None = None  #: The item of the turn that is being spoken.
        self._response: Response | None = None
        self._asked_about: Item | None = None  #: The message with sound that the response answers.
        self._next: bool = False  #: A turn has ended while a response was made that it does not interrupt.
        self._transcribing: dict[str, Item] = {}  #: Requests for a transcript alone, by key.
        self._handlers: dict[str, Callable[[dict[str, Any]], Iterator[Effect]]] = {
            "session.update": self._update,
            "input_audio_buffer.append": self._append,
            "input_audio_buffer.commit": self._commit,
            "input_audio_buffer.clear": self._clear,
            "conversation.item.create": self._create_item,
            "conversation.item.retrieve": self._retrieve,
            "conversation.item.delete": self._delete,
            "conversation.item.truncate": self._truncate,
            "response.create": self._create_response,
            "response.cancel": self._cancel_response,
            "output_audio_buffer.clear": lambda _: iter(()),  # of WebRTC alone; some clients send it on any transport
        }

    @property
    def busy(self) -> bool:
        """A turn is under way: something is being said or answered."""
        return self._response is not None or self._turn.speaking or bool(self._transcribing)

    @property
    def held_nbytes(self) -> int:
        """The bytes of its client's data that it keeps, and those of sound that is being written down."""
        written_down = sum(item.nbytes for item in self._transcribing.values())
        return self._buffer.nbytes + self._conversation.nbytes + self._config_nbytes + written_down

    # --- what the client sends ------------------------------------------------------------------------------------

    def begin(self) -> list[Effect]:
        effects: list[Effect] = [self._send("session.created", session=self._shown())]
        if self._facts.beta:
            conversation = {"id": self._conversation_id, "object": "realtime.conversation"}
            effects.append(self._send("conversation.created", conversation=conversation))
        return effects

    def receive(self, raw: str | bytes) -> list[Effect]:
        """A message of the client. One that cannot be carried out is answered by an error, and changes nothing."""
        event_id: str | None = None
        try:
            event = self._decoded(raw)
            given = event.get("event_id")
            event_id = given[:512] if isinstance(given, str) else None
            name = event.get("type")
            handler = self._handlers.get(dialects.CLIENT.get(name, name)) if isinstance(name, str) else None
            if handler is None:
                known = ", ".join(sorted(self._handlers))
                shown = repr(name)[:80]
                raise RealtimeRefused("unknown_event", f"type: expected one of {known}; got {shown}", param="type")
            return list(handler(event))
        except RequestError as error:
            return [self._error(error, event_id)]

    def refused(self, error: RequestError) -> list[Effect]:
        """A message that was not read."""
        return [self._error(error, None)]

    def _decoded(self, raw: str | bytes) -> dict[str, Any]:
        if len(raw) > MAX_EVENT:
            raise RequestError("too_large", f"an event has at most {MAX_EVENT} characters, this one has {len(raw)}")
        try:
            return strictjson.decode(raw.encode() if isinstance(raw, str) else raw, _EVENTS)
        except (msgspec.ValidationError, UnicodeEncodeError) as error:
            raise InvalidRequest(f"an event is a JSON object: {error}") from None

    def _update(self, event: dict[str, Any]) -> Iterator[Effect]:
        patch = _converted(event.get("session"), SessionPatch, "session")
        if event["type"] == dialects.TRANSCRIPTION_UPDATE and patch.type is None:
            patch = msgspec.structs.replace(patch, type="transcription")
        before, config = self._config, configuration.updated(self._config, patch, detects=self._facts.detects)
        if config.tools and not self._facts.calls_tools:
            raise InvalidRequest("session.tools: this pipeline's stages call no tools", param="session.tools")
        if config.type == "transcription" and not self._facts.transcribes:
            problem = "this pipeline does not serve transcription"
            raise InvalidRequest(f"session.type: {problem}", param="session.type")
        nbytes = len(msgspec.json.encode(config))
        if nbytes > configuration.MAX_NBYTES:
            problem = f"its configuration would be {nbytes} bytes, at most {configuration.MAX_NBYTES} are kept"
            raise RequestError("too_large", f"session: {problem}", param="session")
        self._config, self._config_nbytes = config, nbytes
        if config.input_format != before.input_format:
            self._buffer.reformat(formats.FORMATS[config.input_format])
        if config.input_format != before.input_format or (config.turn_detection is None) != (
            before.turn_detection is None
        ):
            yield from self._listen_anew()
        yield self._send("session.updated", session=self._shown())

    def _append(self, event: dict[str, Any]) -> Iterator[Effect]:
        data = self._buffer.append(event.get("audio"))
        if self._config.turn_detection is not None and data:
            yield Listen(data, self._buffer.format)

    def _commit(self, _: dict[str, Any]) -> Iterator[Effect]:
        self._buffer.check_commit()
        item_id = self._turn_item or self._new_id("item")
        sound = self._buffer.take()
        yield from self._listen_anew()
        yield from self._committed(item_id, sound, respond=False)

    def _clear(self, _: dict[str, Any]) -> Iterator[Effect]:
        self._buffer.take()
        yield from self._listen_anew()
        yield self._send("input_audio_buffer.cleared")

    def _create_item(self, event: dict[str, Any]) -> Iterator[Effect]:
        raw = event.get("item")
        item = items.read(raw, self._new_id("item"), self._input_format())
        before = self._conversation.add(item, _optional_id(event, "previous_item_id"))
        yield from self._item_events(item, before)
        yield from self._trimmed()

    def _retrieve(self, event: dict[str, Any]) -> Iterator[Effect]:
        item = self._conversation.find(event.get("item_id"))
        sound = next((one.audio for one in item.content if one.type == "input_audio" and one.audio), None)
        audio = None if sound is None else base64.b64encode(sound).decode()
        shown = items.shown(item, beta=self._facts.beta, audio=audio)
        yield self._send("conversation.item.retrieved", item=shown)

    def _delete(self, event: dict[str, Any]) -> Iterator[Effect]:
        item = self._conversation.remove(event.get("item_id"))
        yield self._send("conversation.item.deleted", item_id=item.id)

    def _truncate(self, event: dict[str, Any]) -> Iterator[Effect]:
        item = self._conversation.find(event.get("item_id"))
        at_ms, index = event.get("audio_end_ms"), event.get("content_index", 0)
        if type(at_ms) is not int or at_ms < 0:
            raise InvalidRequest("audio_end_ms: expected milliseconds, 0 or more", param="audio_end_ms")
        part = item.content[0] if index == 0 and item.role == "assistant" and item.content else None
        if part is None or part.type != "output_audio":
            raise InvalidRequest("item_id: expected a spoken answer, with content_index 0", param="item_id")
        if at_ms > part.audio_ms + 1:
            problem = f"the audio is {part.audio_ms:.0f} ms long, which is before {at_ms}"
            raise RealtimeRefused("invalid_value", f"audio_end_ms: {problem}", param="audio_end_ms")
        items.cut(part, at_ms, whole=item.status == "completed")
        fields = {"item_id": item.id, "content_index": 0, "audio_end_ms": at_ms}
        yield self._send("conversation.item.truncated", **fields)

    def _create_response(self, event: dict[str, Any]) -> Iterator[Effect]:
        patch = _converted(event.get("response") or {}, ResponsePatch, "response")
        if self._config.type == "transcription":
            raise InvalidRequest("response.create: a transcription session makes no responses", param="type")
        if self._response is not None:
            problem = f"Conversation already has an active response in progress: {self._response.id}"
            raise RealtimeRefused("conversation_already_has_active_response", problem)
        config = configuration.spoken(self._config, patch, "response")
        if config.tools and not self._facts.calls_tools:
            raise InvalidRequest("response.tools: this pipeline's stages call no tools", param="response.tools")
        given = None if patch.input is None else [self._given(one, index) for index, one in enumerate(patch.input)]
        if (nbytes := sum(item.nbytes for item in given or ())) > MAX_NBYTES:  # an item may be referred to many times
            problem = f"its items would be {nbytes} bytes, a response has at most {MAX_NBYTES}"
            raise RequestError("too_large", f"response.input: {problem}", param="response.input")
        yield from self._respond(config, patch, given)

    def _given(self, raw: dict[str, Any], index: int) -> Item:
        """An item of a response's own input: new, or one of the conversation."""
        where = f"response.input[{index}]"
        if raw.get("type") == "item_reference":
            return self._conversation.find(raw.get("id"), f"{where}.id")
        return items.read(raw, self._new_id("item"), self._input_format(), where)

    def _cancel_response(self, event: dict[str, Any]) -> Iterator[Effect]:
        wanted = _optional_id(event, "response_id")
        if self._response is None or wanted not in (None, self._response.id):
            problem = "Cancellation failed: no active response found"
            raise RealtimeRefused("response_cancel_not_active", problem, param="response_id")
        self._next = False
        yield from self._cancelled("client_cancelled")

    # --- what the detector hears ----------------------------------------------------------------------------------

    def heard(self, scores: Iterable[float]) -> list[Effect]:
        """Scores of what was appended, in order."""
        return list(self._heard(scores))

    def _heard(self, scores: Iterable[float]) -> Iterator[Effect]:
        for score in scores:
            detection = self._config.turn_detection
            if detection is None:
                return
            match self._turn.take(score, detection.rule()):
                case SpeechStarted(at_ms=at_ms):
                    yield from self._started(max(at_ms - detection.prefix_padding_ms, self._buffer.begin_ms), detection)
                case SpeechStopped(at_ms=at_ms):
                    yield from self._stopped(at_ms, detection)
                case None if not self._turn.speaking:
                    self._buffer.keep_from(self._turn.now_ms - self._turn.loud_ms - detection.prefix_padding_ms)
                case None if self._turn.now_ms - self._buffer.begin_ms >= MAX_TURN_MS:
                    self._turn.speaking = False
                    yield from self._stopped(self._turn.now_ms, detection)

    def _started(self, at_ms: float, detection: TurnDetection) -> Iterator[Effect]:
        self._buffer.keep_from(at_ms)
        self._turn_item = self._new_id("item")
        if detection.interrupt_response and self._response is not None:
            yield from self._cancelled("turn_detected")
        fields = {"audio_start_ms": round(self._buffer.begin_ms), "item_id": self._turn_item}
        yield self._send("input_audio_buffer.speech_started", **fields)

    def _stopped(self, at_ms: int, detection: TurnDetection) -> Iterator[Effect]:
        item_id, self._turn_item = self._turn_item or self._new_id("item"), None
        yield self._send("input_audio_buffer.speech_stopped", audio_end_ms=at_ms, item_id=item_id)
        yield from self._committed(item_id, self._buffer.take(at_ms), respond=detection.create_response)

    def _listen_anew(self) -> Iterator[Effect]:
        """The sound heard so far is not part of a turn that follows."""
        self._turn_item = None
        self._turn.restart(round(self._buffer.end_ms))
        yield StopListening()

    def _committed(self, item_id: str, sound: bytes, *, respond: bool) -> Iterator[Effect]:
        item = items.heard(item_id, sound, self._buffer.format)
        before = self._conversation.add(item)
        yield self._send("input_audio_buffer.committed", previous_item_id=before, item_id=item_id)
        yield from self._item_events(item, before)
        yield from self._trimmed()
        answered = respond and self._config.type == "realtime"
        if not answered:
            yield from self._transcribe(item)
        elif self._response is None:
            yield from self._respond(self._config, ResponsePatch(), None)
        else:
            self._next = True

    # --- what a request gives -------------------------------------------------------------------------------------

    def text(self, key: str, text: str) -> list[Effect]:
        response = self._of(key)
        return [] if response is None else self._sent(response.text(text))

    def sound(self, key: str, data: bytes) -> list[Effect]:
        response = self._of(key)
        return [] if response is None else self._sent(response.sound(data))

    def called(self, key: str, call: ToolCall) -> list[Effect]:
        response = self._of(key)
        return [] if response is None else self._sent(response.call(call))

    def noted(self, key: str, note: Note) -> list[Effect]:
        """A stage's ``transcript`` is what the last message of the user says."""
        item = self._asked_about
        if self._of(key) is None or note.name != "transcript" or not isinstance(note.value, str) or item is None:
            return []
        return list(self._transcribed(item, note.value))

    def completed(self, key: str, usage: Usage, reason: str, text: str = "") -> list[Effect]:
        """The request is over. text: of a request for a transcript."""
        if (item := self._transcribing.pop(key, None)) is not None:
            return list(self._transcribed(item, text))
        response = self._of(key)
        if response is None:
            return []
        effects = self._sent(response.complete(usage, reason))
        return [*effects, *self._over()]

    def failed(self, key: str, error: RequestError) -> list[Effect]:
        shown = _error_shown(error)
        if (item := self._transcribing.pop(key, None)) is not None:
            fields = {"item_id": item.id, "content_index": 0, "error": shown}
            return [self._send("conversation.item.input_audio_transcription.failed", **fields)]
        response = self._of(key)
        if response is None:
            return []
        effects = self._sent(response.fail({name: shown[name] for name in ("type", "code", "message")}))
        return [*effects, *self._over()]

    def close(self) -> list[Effect]:
        """The client is gone."""
        keys = [*self._transcribing, *([] if self._response is None else [self._response.id])]
        self._response, self._asked_about, self._transcribing = None, None, {}
        return [Cancel(key, "the client disconnected") for key in keys]

    def _of(self, key: str) -> Response | None:
        """The response of a request; None: it is over, so that nothing of it is shown."""
        return self._response if self._response is not None and self._response.id == key else None

    def _over(self) -> Iterator[Effect]:
        """The response is done; what has waited for that begins."""
        self._response = self._asked_about = None
        yield from self._trimmed()
        following, self._next = self._next, False
        if following:
            yield from self._respond(self._config, ResponsePatch(), None)

    def _cancelled(self, reason: str) -> Iterator[Effect]:
        response = self._response
        assert response is not None
        yield Cancel(response.id, reason)
        yield from self._sent(response.cancel(reason))
        yield from self._over()

    def _respond(self, config: SessionConfig, patch: ResponsePatch, given: list[Item] | None) -> Iterator[Effect]:
        apart = patch.conversation == "none"
        response = Response(
            self._new_id("resp"),
            config,
            conversation_id=None if apart else self._conversation_id,
            metadata=patch.metadata,
            new_id=self._new_id,
            added=self._conversation.add,
            beta=self._facts.beta,
        )
        asked = self._conversation.items if given is None else given
        self._response = response
        users = [item for item in asked if item.role == "user" and item.type == "message"]
        self._asked_about = users[-1] if users and _is_untranscribed(users[-1]) else None
        yield self._send("response.created", response=response.shown("in_progress"))
        request = asking.answer(response.id, asked, config, patch.metadata)
        encoding = formats.FORMATS[config.output_format].encoding if "audio" in config.modalities else None
        yield Answer(response.id, request, encoding)

    def _transcribe(self, item: Item) -> Iterator[Effect]:
        """Ask for a transcript where no response brings one, and the client wants it."""
        wanted = self._config.transcription is not None or self._config.type == "transcription"
        part = item.content[0]
        if not wanted or not self._facts.transcribes or part.audio is None:
            return
        key = self._new_id("transcription")
        self._transcribing[key] = item
        sound = formats.wav(part.audio, part.format)
        yield Answer(key, asking.transcript(key, sound, self._config.transcription or {}), None)

    def _transcribed(self, item: Item, text: str) -> Iterator[Effect]:
        """The words of a message are known: later requests have them in the sound's place, and it is not kept."""
        part = next(one for one in item.content if one.type == "input_audio")
        if part.transcribed:
            return  # a response and a request for the transcript may both bring it
        part.text, part.transcribed = text, True
        if self._config.type == "transcription" or self._config.transcription is not None:
            usage = {"type": "duration", "seconds": round(part.audio_ms / 1000, 3)}
            fields = {"item_id": item.id, "content_index": 0, "transcript": text, "usage": usage}
            yield self._send("conversation.item.input_audio_transcription.completed", **fields)
        part.audio = None

    # --- events ---------------------------------------------------------------------------------------------------

    def _item_events(self, item: Item, before: str | None) -> Iterator[Effect]:
        shown = items.shown(item, beta=self._facts.beta)
        for name in ("added", "done"):
            yield self._send(f"conversation.item.{name}", previous_item_id=before, item=shown)

    def _trimmed(self) -> Iterator[Effect]:
        for item in self._conversation.trim():
            yield self._send("conversation.item.deleted", item_id=item.id)

    def _input_format(self) -> formats.SoundFormat:
        return formats.FORMATS[self._config.input_format]

    def _shown(self) -> dict[str, Any]:
        return configuration.shown(self._config, session_id=self._id, model=self._facts.model, beta=self._facts.beta)

    def _sent(self, events: Iterable[dict[str, Any]]) -> list[Effect]:
        return [self._send(**event) for event in events]

    def _send(self, type: str, **fields: Any) -> Send:
        self._count += 1
        return Send({"type": type, "event_id": f"event_{self._id[5:]}_{self._count}", **fields})

    def _error(self, error: RequestError, event_id: str | None) -> Effect:
        return self._send("error", error={**_error_shown(error), "event_id": event_id})


def _error_shown(error: RequestError) -> dict[str, Any]:
    """The error as an `error` event shows it, with ``stage`` beside OpenAI's fields."""
    facts = errors.body(error, None)["error"]
    code = error.realtime_code if isinstance(error, RealtimeRefused) else facts["code"]
    shown = {"type": facts["type"], "code": code, "message": facts["message"], "param": facts["param"]}
    return shown if facts["stage"] is None else {**shown, "stage": facts["stage"]}


def _converted(raw: object, type: Any, where: str) -> Any:
    try:
        return msgspec.convert(raw, type)
    except msgspec.ValidationError as error:
        text = str(error).replace("`$.", f"`{where}.").replace("`$`", f"`{where}`")
        raise InvalidRequest(f"{where}: {text}", param=where) from None


def _optional_id(event: dict[str, Any], name: str) -> str | None:
    given = event.get(name)
    if given is not None and not isinstance(given, str):
        raise InvalidRequest(f"{name}: expected an id", param=name)
    return given


def _is_untranscribed(item: Item) -> bool:
    return any(one.type == "input_audio" and not one.transcribed for one in item.content)
