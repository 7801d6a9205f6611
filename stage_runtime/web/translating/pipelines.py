"""POST /v1/pipeline: bodies of JSON or of a form as an `OmniRequest`; events as plain JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec
from msgspec.structs import astuple

from stage_runtime.coordinator.events import AnswerEvent, ChunkEvent, ResultEvent
from stage_runtime.errors import InvalidRequest
from stage_runtime.web.reading import schemas, strictjson
from stage_runtime.web.reading.multipart import FormPart
from stage_runtime.web.translating import jsonable
from stage_runtime.web.translating.answer_outputs import StreamedKinds
from stage_runtime.wire import outputs
from stage_runtime.wire.outputs import USAGE_SO_FAR
from stage_runtime.wire.values import Audio, OmniRequest, Reasoning, Text, ToolCall, Usage

DECODER: Final = msgspec.json.Decoder(schemas.PipelineBody)
_ANY: Final = msgspec.json.Decoder(Any)


def decode(raw: bytes) -> schemas.PipelineBody:
    return schemas.decode(raw, schemas.PipelineBody, DECODER)


def from_form(parts: Iterable[FormPart]) -> schemas.PipelineBody:
    """Fields are the JSON body's, each as JSON; files go into ``inputs`` by their name, as bytes.

    Several files of one name become a list. ``metadata["files"]`` has what is known of a file (name, media type).
    Raises: InvalidRequest: a field is not JSON or unknown, or ``inputs`` is not an object beside files.
    """
    given: dict[str, bytes] = {}
    files: dict[str, list[FormPart]] = {}
    for part in parts:
        if part.filename is not None:
            files.setdefault(part.name, []).append(part)
        elif part.name in given:
            raise InvalidRequest(f"{part.name}: the field occurs twice", param=part.name)
        elif part.name not in schemas.PipelineBody.__struct_fields__:
            error = schemas.unknown(part.name, schemas.PipelineBody)
            where = f"a value for the stages goes into the field inputs, a JSON object with the key {part.name[:64]!r}"
            raise _hinting(InvalidRequest(f"{error.message}; {where}", param=error.param))
        else:
            given[part.name] = part.data
    fields = _decoded(given)
    fields.setdefault("inputs", {})
    body = schemas.convert(fields, schemas.PipelineBody)
    return _with_files(body, files) if files else body


def request(body: schemas.PipelineBody, request_id: str) -> OmniRequest:
    return OmniRequest(
        id=request_id,
        kind="pipeline",
        inputs=body.inputs,
        params=body.params or {},
        modalities=body.modalities or [],
        stream=bool(body.stream),
        metadata=body.metadata or {},
    )


class Results:
    """Collects ``{stage: value}``: a stage's result, or the list of its chunks when it gave none.

    The result is what follows the chunks where both are outputs for a client (`omni.Text`, `omni.Usage`, …): a stage
    that generates streams its text and ends with its usage.
    """

    def __init__(self) -> None:
        self._results: dict[str, Any] = {}
        self._chunks: dict[str, list[Any]] = {}
        self._streamed = StreamedKinds()

    def add(self, event: AnswerEvent) -> None:
        match event:
            case ChunkEvent():
                self._chunks.setdefault(event.stage, []).append(event.data)
                for value in _values(event.data):
                    self._streamed.repeats(event, type(value))
            case ResultEvent(has_data=True):
                chunks = self._chunks.pop(event.stage, [])
                values = [value for data in chunks for value in _values(data)]
                rest = [one for one in _values(event.data) if not self._is_whole(event, one)]
                if values and rest and outputs.unshown([*values, *rest]) is None:
                    self._results[event.stage] = jsonable.plain(_joined([*values, *rest]))
                else:
                    self._results[event.stage] = jsonable.plain(event.data)
            case ResultEvent():
                chunks = self._chunks.pop(event.stage, [])
                self._results[event.stage] = [jsonable.plain(data) for data in chunks]

    def _is_whole(self, event: ResultEvent, value: Any) -> bool:
        """Whether the chunks had it already, in pieces."""
        return isinstance(value, Text | Reasoning | Audio | ToolCall) and self._streamed.repeats(event, type(value))

    def finish(self) -> dict[str, Any]:
        return self._results


def _values(data: Any) -> list[Any]:
    return data if type(data) is list else [] if data is None else [data]


def _joined(values: list[Any]) -> list[Any]:
    """The text of each choice as one, where its first piece was; the usage added up."""
    made: list[Any] = []
    places: dict[Any, int] = {}
    for value in values:
        place = places.setdefault((type(value), getattr(value, "choice", 0)), len(made))
        match value:
            case Text() if place < len(made):
                made[place] = _longer(made[place], value)
            case Reasoning() if place < len(made):
                made[place] = Reasoning(made[place].text + value.text, value.choice)
            case Usage() if place < len(made):
                made[place] = Usage(*(sum(pair) for pair in zip(astuple(made[place]), astuple(value), strict=True)))
            case _:
                made.append(value)
    return made


def _longer(text: Text, more: Text) -> Text:
    both = text.logprobs is not None or more.logprobs is not None
    logprobs = [*(text.logprobs or ()), *(more.logprobs or ())] if both else None
    return Text(text.text + more.text, text.choice, logprobs)


def named(event: AnswerEvent) -> tuple[str, dict[str, Any]]:
    """An event of the stream: its name and its data."""
    match event:
        case ChunkEvent():
            chunk = {"stage": event.stage, "index": event.index, "data": jsonable.plain(event.data)}
            if event.modality is not None:
                chunk["modality"] = event.modality
            if metadata := {key: value for key, value in (event.metadata or {}).items() if key != USAGE_SO_FAR}:
                chunk["metadata"] = jsonable.plain(metadata)
            return "chunk", chunk
        case ResultEvent(has_data=True):
            return "result", {"stage": event.stage, "data": jsonable.plain(event.data)}
    return "result", {"stage": event.stage}


def _decoded(given: dict[str, bytes]) -> dict[str, Any]:
    try:
        return strictjson.decode_fields(given, _ANY)
    except InvalidRequest as error:
        raise _hinting(error) from None


def _hinting(error: InvalidRequest) -> InvalidRequest:
    hint = "a form's fields are JSON, its files need a file name"
    return InvalidRequest(f"{error.message}; {hint}", param=error.param)


def _with_files(body: schemas.PipelineBody, files: dict[str, list[FormPart]]) -> schemas.PipelineBody:
    if not isinstance(body.inputs, dict):
        raise InvalidRequest("inputs: must be an object where files come with it", param="inputs")
    both = sorted(body.inputs.keys() & files.keys())
    if both:
        raise InvalidRequest(f"inputs.{both[0]}: given in inputs and as a file", param=f"inputs.{both[0]}")
    data = {name: found[0].data if len(found) == 1 else [part.data for part in found] for name, found in files.items()}
    facts = {
        name: [{"filename": part.filename, "mime": part.content_type} for part in found]
        for name, found in files.items()
    }
    inputs, metadata = {**body.inputs, **data}, {**(body.metadata or {}), "files": facts}
    return msgspec.structs.replace(body, inputs=inputs, metadata=metadata)
