"""POST /v1/pipeline: bodies of JSON or of a form as an `OmniRequest`; events as plain JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from stage_runtime.coordinator.events import AnswerEvent, ChunkEvent, ResultEvent
from stage_runtime.errors import InvalidRequest
from stage_runtime.web import schemas, strictjson
from stage_runtime.web.multipart import FormPart
from stage_runtime.web.translating import jsonable
from stage_runtime.wire.values import OmniRequest

DECODER: Final = msgspec.json.Decoder(schemas.PipelineBody)
_ANY: Final = msgspec.json.Decoder(Any)


def decode(raw: bytes) -> schemas.PipelineBody:
    return schemas.decode(raw, schemas.PipelineBody, DECODER)


def from_form(parts: Iterable[FormPart]) -> schemas.PipelineBody:
    """Fields are the JSON body's, each as JSON; files go into ``inputs`` by their name, as bytes.

    Several files of one name become a list. What is known of a file (name, media type) is ``metadata["files"]``.
    Raises: InvalidRequest: a field is no JSON or unknown, or ``inputs`` is no object beside files.
    """
    given: dict[str, bytes] = {}
    files: dict[str, list[FormPart]] = {}
    for part in parts:
        if part.filename is not None:
            files.setdefault(part.name, []).append(part)
        elif part.name in given:
            raise InvalidRequest(f"{part.name}: the field occurs twice", param=part.name)
        elif part.name not in schemas.PipelineBody.__struct_fields__:
            raise _hinting(schemas.unknown(part.name, schemas.PipelineBody))
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
    """Collects ``{stage: value}``: a stage's result, or the list of its chunks when it gave none."""

    def __init__(self) -> None:
        self._results: dict[str, Any] = {}
        self._chunks: dict[str, list[Any]] = {}

    def add(self, event: AnswerEvent) -> None:
        match event:
            case ChunkEvent():
                self._chunks.setdefault(event.stage, []).append(jsonable.plain(event.data))
            case ResultEvent(has_data=True):
                self._results[event.stage] = jsonable.plain(event.data)
            case ResultEvent():
                self._results[event.stage] = self._chunks.get(event.stage, [])

    def finish(self) -> dict[str, Any]:
        return self._results


def named(event: AnswerEvent) -> tuple[str, dict[str, Any]]:
    """An event of the stream: its name and its data."""
    match event:
        case ChunkEvent():
            chunk = {"stage": event.stage, "index": event.index, "data": jsonable.plain(event.data)}
            if event.modality is not None:
                chunk["modality"] = event.modality
            if event.metadata:
                chunk["metadata"] = jsonable.plain(event.metadata)
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
