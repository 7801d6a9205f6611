"""The OpenAPI document, made from the types that read the bodies. Called by `app`."""

from __future__ import annotations

from typing import Any

import msgspec

from stage_runtime.coordinator.events import RequestRecord
from stage_runtime.errors import CODES
from stage_runtime.web import schemas
from stage_runtime.web.settings import WebSettings

_REF = "#/components/schemas/{name}"
_TYPES = (
    schemas.ChatBody,
    schemas.SpeechBody,
    schemas.TranscriptionFields,
    schemas.PipelineBody,
    RequestRecord,
)


def document(settings: WebSettings) -> dict[str, Any]:
    """Only the routes that this pipeline serves."""
    bodies, components = msgspec.json.schema_components(_TYPES, ref_template=_REF)
    chat, speech, transcription, pipeline, record = bodies
    components["Error"] = _ERROR
    _with_file(components["TranscriptionFields"])
    paths: dict[str, Any] = {
        "/v1/pipeline": {"post": _operation("Run the pipeline", pipeline, also="multipart/form-data")},
        "/v1/requests/{id}": {
            "get": _operation("What is known of a request", None, answer=record, path="id"),
            "delete": _operation("Cancel a request", None, path="id"),
        },
        "/v1/models": {"get": _operation("The model", None)},
    }
    if "chat" in settings.serves:
        paths["/v1/chat/completions"] = {"post": _operation("OpenAI's chat completions", chat)}
    if "speech" in settings.serves:
        paths["/v1/audio/speech"] = {"post": _operation("OpenAI's speech", speech)}
    if "transcription" in settings.serves:
        operation = _operation("OpenAI's transcriptions", transcription, only="multipart/form-data")
        paths["/v1/audio/transcriptions"] = {"post": operation}
    info = {"title": settings.model, "version": "v1"}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}


_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code", "param", "stage", "request_id"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "code": {"enum": sorted(CODES)},
                "param": {"type": ["string", "null"]},
                "stage": {"type": ["string", "null"]},
                "hook": {"type": "string"},
                "request_id": {"type": ["string", "null"]},
            },
        }
    },
}


def _operation(
    summary: str,
    body: dict[str, Any] | None,
    *,
    answer: dict[str, Any] | None = None,
    path: str | None = None,
    only: str = "application/json",
    also: str | None = None,
) -> dict[str, Any]:
    problem = {"content": {"application/json": {"schema": {"$ref": _REF.format(name="Error")}}}}
    success: dict[str, Any] = {"description": "as the route answers"}
    if answer is not None:
        success["content"] = {"application/json": {"schema": answer}}
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": success, "default": {"description": "an error", **problem}},
    }
    if path is not None:
        operation["parameters"] = [{"name": path, "in": "path", "required": True, "schema": {"type": "string"}}]
    if body is not None:
        types = [only] if also is None else [only, also]
        operation["requestBody"] = {"required": True, "content": {name: {"schema": body} for name in types}}
    return operation


def _with_file(component: dict[str, Any]) -> None:
    component["properties"]["file"] = {"type": "string", "format": "binary"}
    component["required"] = ["file"]
