"""The OpenAPI document, made from the table of routes and the types that read their bodies. Called by `app`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from stage_runtime.errors import CODES
from stage_runtime.web.routing import JSON, Route

_REF = "#/components/schemas/{name}"


def document(title: str, routes: Sequence[Route]) -> dict[str, Any]:
    """Of an application that serves ``routes``."""
    types = list(dict.fromkeys(kind for one in routes for kind in (one.body, one.answer) if kind is not None))
    made, components = msgspec.json.schema_components(types, ref_template=_REF)
    schemas = dict(zip(types, made, strict=True))
    components["Error"] = _ERROR
    paths: dict[str, Any] = {}
    for one in routes:
        path = re.sub(r"{(\w+):\w+}", r"{\1}", one.path)
        paths.setdefault(path, {})[one.method.lower()] = _operation(one, schemas)
        if one.file is not None:
            _add_file(components[one.body.__name__], one.file)
    info = {"title": title, "version": "v1"}
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


def _operation(route: Route, schemas: Mapping[Any, dict[str, Any]]) -> dict[str, Any]:
    problem = {"content": {JSON: {"schema": {"$ref": _REF.format(name="Error")}}}}
    success: dict[str, Any] = {"description": "as the route answers"}
    if route.answer is not None:
        success["content"] = {JSON: {"schema": schemas[route.answer]}}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "responses": {"200": success, "default": {"description": "an error", **problem}},
    }
    if route.parameters:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in route.parameters
        ]
    if route.body is not None:
        content = {media: {"schema": schemas[route.body]} for media in route.media}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _add_file(component: dict[str, Any], name: str) -> None:
    component["properties"][name] = {"type": "string", "format": "binary"}
    component["required"] = [name]
