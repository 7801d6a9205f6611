"""POST /v1/audio/transcriptions and translations: the form as an `OmniRequest`, events as OpenAI's answers. Pure.

Facts that only stages know reach ``verbose_json`` as an `omni.Note` of that name: ``language``, ``duration``,
``segments``, ``words``. A fact that no stage reported is left out, or null where OpenAI's type has it.
"""

from __future__ import annotations

import mimetypes
from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from stage_runtime.coordinator.events import AnswerEvent
from stage_runtime.errors import InvalidRequest
from stage_runtime.web.reading import schemas
from stage_runtime.web.reading.multipart import FormPart
from stage_runtime.web.translating import jsonable
from stage_runtime.web.translating.answer_outputs import Outputs
from stage_runtime.web.translating.audio import subtitles
from stage_runtime.wire.values import Note, OmniRequest, Text

FORMATS: Final = ("json", "text", "verbose_json", *subtitles.FORMATS)
_LISTS: Final = ("timestamp_granularities", "include")
_NOTES: Final = ("segments", "words")
_NO_TYPE: Final = "application/octet-stream"


class TranscriptionCall(msgspec.Struct, frozen=True, kw_only=True):
    """A form, read and checked."""

    file: FormPart
    fields: schemas.TranscriptionFields
    format: str
    translates: bool = False  #: The answer is English, whatever was said.


def read(parts: Iterable[FormPart], *, translates: bool = False) -> TranscriptionCall:
    """The form's file and fields. translates: as of `TranscriptionCall`.

    Raises: InvalidRequest: no file or several, or a field that is unknown, wrong, or asks for what is not there.
    """
    files: list[FormPart] = []
    given: dict[str, Any] = {}
    for part in parts:
        name = part.name.removesuffix("[]")
        if name == "file":
            files.append(part)
        elif name in _LISTS:
            given.setdefault(name, []).append(_text(part))
        elif name in given:
            raise InvalidRequest(f"{name}: the field occurs twice", param=name)
        else:
            given[name] = _text(part)
    if len(files) != 1 or not files[0].data:
        raise InvalidRequest("file: one audio file is required", param="file")
    fields = schemas.convert(given, schemas.TranscriptionFields)
    return TranscriptionCall(file=files[0], fields=fields, format=_checked(fields), translates=translates)


def request(call: TranscriptionCall, request_id: str) -> OmniRequest:
    fields = call.fields
    inputs = {"audio": call.file.data, "mime": _mime(call.file), "language": fields.language, "prompt": fields.prompt}
    params: dict[str, Any] = {"temperature": fields.temperature, "seed": fields.seed}
    if fields.timestamp_granularities:
        params["timestamp_granularities"] = list(fields.timestamp_granularities)
    elif call.format in subtitles.FORMATS:
        params["timestamp_granularities"] = ["segment"]
    return OmniRequest(
        id=request_id,
        kind="translation" if call.translates else "transcription",
        inputs=inputs,
        params={name: value for name, value in params.items() if value is not None},
        modalities=["text"],
        stream=bool(fields.stream),
    )


class Transcript:
    """Collects the text and the notes; yields deltas."""

    def __init__(self) -> None:
        self._outputs = Outputs()
        self._text: dict[str, list[str]] = {}  #: Texts by stage: two terminals' words are not mixed.
        self._notes: dict[str, Any] = {}

    def add(self, event: AnswerEvent) -> Iterator[dict[str, Any]]:
        for shown in self._outputs.take(event):
            match shown:
                case Text():
                    self._text.setdefault(event.stage, []).append(shown.text)
                    yield {"type": "transcript.text.delta", "delta": shown.text}
                case Note():
                    self._notes[shown.name] = jsonable.plain(shown.value)

    def check(self) -> None:
        """Raises: RequestError: stage_failed: the terminals gave nothing that a transcription can show."""
        self._outputs.check("transcription")

    @property
    def text(self) -> str:
        return "".join(piece for pieces in self._text.values() for piece in pieces)

    def done(self) -> dict[str, Any]:
        """The stream's last event."""
        answer = {"type": "transcript.text.done", "text": self.text}
        return {**answer, "usage": {"type": "tokens", **self._outputs.tokens()}} if self._counted() else answer

    def answer(self, call: TranscriptionCall, file_s: float | None) -> dict[str, Any]:
        """``json`` or ``verbose_json``. ``file_s``: the file's duration by its header."""
        duration = self._notes.get("duration", file_s)
        answer: dict[str, Any] = {"text": self.text}
        if self._counted():
            answer["usage"] = {"type": "tokens", **self._outputs.tokens()}
        elif duration is not None:
            answer["usage"] = {"type": "duration", "seconds": duration}
        if call.format == "json":
            return answer
        language = "english" if call.translates else self._notes.get("language", call.fields.language)
        known: dict[str, Any] = {name: self._notes[name] for name in _NOTES if name in self._notes}
        task = "translate" if call.translates else "transcribe"
        return {"task": task, "language": language, "duration": duration, **answer, **known}

    def subtitles(self, call: TranscriptionCall, file_s: float | None) -> str:
        """``srt`` or ``vtt``. Raises: RequestError: stage_failed: as of `subtitles.cues`."""
        found = subtitles.cues(
            segments=self._notes.get("segments"),
            words=self._notes.get("words"),
            text=self.text,
            duration=self._notes.get("duration", file_s),
            by_word="word" in (call.fields.timestamp_granularities or ()),
        )
        return subtitles.srt(found) if call.format == "srt" else subtitles.vtt(found)

    def _counted(self) -> bool:
        return self._outputs.tokens()["total_tokens"] > 0


def _checked(fields: schemas.TranscriptionFields) -> str:
    format = fields.response_format or "json"
    if format not in FORMATS:
        there = ", ".join(FORMATS)
        raise InvalidRequest(
            f"response_format: {format!r} is not available; there are {there}", param="response_format"
        )
    if fields.timestamp_granularities and format not in ("verbose_json", *subtitles.FORMATS):
        problem = "timestamp_granularities: only with verbose_json, srt and vtt"
        raise InvalidRequest(problem, param="timestamp_granularities")
    if fields.stream and format in subtitles.FORMATS:
        raise InvalidRequest(f"response_format: a stream is json, not {format}", param="response_format")
    if fields.include:
        raise InvalidRequest("include: stages give no log probabilities", param="include")
    return format


def _text(part: FormPart) -> str:
    try:
        return part.data.decode()
    except UnicodeDecodeError:
        raise InvalidRequest(f"{part.name}: no UTF-8 text", param=part.name) from None


def _mime(part: FormPart) -> str:
    if part.content_type != _NO_TYPE:
        return part.content_type
    return mimetypes.guess_type(part.filename or "")[0] or _NO_TYPE
