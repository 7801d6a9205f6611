"""The OpenAPI document, made from the table of routes and the types of their bodies and answers. Called by `app`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from stage_runtime.errors import CODES
from stage_runtime.web.answers import EVENTS, JSON, ResponseType
from stage_runtime.web.routing import Route

_REF = "#/components/schemas/{name}"


def document(title: str, routes: Sequence[Route], *, keyed: bool, without_key: Collection[str]) -> dict[str, Any]:
    """The document of an application that serves ``routes``. keyed: an API key is needed, but for the paths
    ``without_key``.
    """
    types = list(dict.fromkeys(kind for one in routes for kind in _types(one)))
    made, components = msgspec.json.schema_components(types, ref_template=_REF)
    schemas = dict(zip(types, made, strict=True))
    components["Error"] = _ERROR
    paths: dict[str, Any] = {}
    for one in routes:
        path = re.sub(r"{(\w+):\w+}", r"{\1}", one.path)
        operation = paths.setdefault(path, {})[one.method.lower()] = _operation(one, schemas)
        if keyed and one.path in without_key:
            operation["security"] = []
        if one.file is not None:
            _add_file(components[one.body.__name__], one.file)
    info = {"title": title, "version": "v1"}
    made_components: dict[str, Any] = {"schemas": components}
    whole: dict[str, Any] = {"openapi": "3.1.0", "info": info, "paths": paths, "components": made_components}
    if keyed:
        made_components["securitySchemes"] = {"bearerAuth": {"type": "http", "scheme": "bearer"}}
        whole["security"] = [{"bearerAuth": []}]
    return whole


_ERROR_REF = {"$ref": _REF.format(name="Error")}
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


#: Headers of a request to the stages. docs/http-api.md has what they mean.
_HEADERS: list[dict[str, Any]] = [
    {
        "name": "X-Request-Id",
        "in": "header",
        "description": "The request's id; returned in the answer.",
        "schema": {"type": "string", "maxLength": 128},
    },
    {
        "name": "X-Request-Timeout",
        "in": "header",
        "description": "Seconds until the request fails.",
        "schema": {"type": "number", "exclusiveMinimum": 0},
    },
    {
        "name": "Idempotency-Key",
        "in": "header",
        "description": "A repeat under the same key gets the same answer, or 409 while the first request runs.",
        "schema": {"type": "string", "minLength": 1, "maxLength": 255},
    },
]


def _types(route: Route) -> list[Any]:
    body = [] if route.body is None else [route.body]
    return [*body, *(kind for answer in route.answers for kind in answer.types)]


def _operation(route: Route, schemas: Mapping[Any, dict[str, Any]]) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    for answer in route.answers:
        described = {"description": "as the route answers", "content": {}}
        content = responses.setdefault(str(answer.status), described)["content"]
        content[answer.media] = {"schema": _schema(answer, schemas)}
    responses["default"] = {"description": "an error", "content": {JSON: {"schema": _ERROR_REF}}}
    operation: dict[str, Any] = {"summary": route.summary, "responses": responses}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in route.parameters
    ]
    if route.ids is not None:
        parameters += _HEADERS
    if route.text_query is not None:
        parameters += _query(route.text_query)
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        content = {media: {"schema": schemas[route.body]} for media in route.media}
        if route.text_query is not None:
            content["text/plain"] = {"schema": {"type": "string"}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _query(kind: Any) -> list[dict[str, Any]]:
    """The parameters of a query that goes with a body of plain text. Its type's fields have no types of their own."""
    schema = msgspec.json.schema(kind)
    properties = schema["$defs"][kind.__name__]["properties"]
    note = "beside a body of text/plain"
    return [{"name": name, "in": "query", "description": note, "schema": of} for name, of in properties.items()]


def _schema(answer: ResponseType, schemas: Mapping[Any, dict[str, Any]]) -> dict[str, Any]:
    """The schema of an answer, or of the data of a stream's events; OpenAPI 3.1 has no other place for it."""
    if not answer.types:
        text = answer.media.startswith("text/")
        return {"type": "string"} if text else {"type": "string", "format": "binary"}
    known = [schemas[kind] for kind in answer.types]
    if answer.media == EVENTS:
        known.append(_ERROR_REF)
    return known[0] if len(known) == 1 else {"anyOf": known}


def _add_file(component: dict[str, Any], name: str) -> None:
    component["properties"][name] = {"type": "string", "format": "binary"}
    component["required"] = [name]
