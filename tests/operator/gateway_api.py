"""The part of the Gateway API's HTTPRoute that these tests need, written from its public schema (v1, standard channel).

Here: its CRD, with the fields that we write, their bounds, and the rules of time-outs. Not here: a Gateway, or a
controller that serves one: tests write the status that it would.
"""

from __future__ import annotations

from typing import Any, Final

GROUP: Final = "gateway.networking.k8s.io"
NAME: Final = f"httproutes.{GROUP}"

_TEXT: Final[dict[str, Any]] = {"type": "string", "minLength": 1, "maxLength": 253}
_HOST: Final = r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
_DURATION: Final[dict[str, Any]] = {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
_PORT: Final[dict[str, Any]] = {"type": "integer", "format": "int32", "minimum": 1, "maximum": 65535}


def _list(items: dict[str, Any], at_most: int) -> dict[str, Any]:
    return {"type": "array", "maxItems": at_most, "items": items, "x-kubernetes-list-type": "atomic"}


_PARENT: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "group": {"type": "string", "maxLength": 253, "default": GROUP},
        "kind": {**_TEXT, "default": "Gateway"},
        "name": _TEXT,
        "namespace": {**_TEXT, "maxLength": 63},
        "sectionName": _TEXT,
        "port": _PORT,
    },
}
_BACKEND: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "group": {"type": "string", "maxLength": 253, "default": ""},
        "kind": {**_TEXT, "default": "Service"},
        "name": _TEXT,
        "namespace": {**_TEXT, "maxLength": 63},
        "port": _PORT,
        "weight": {"type": "integer", "format": "int32", "minimum": 0, "maximum": 1000000, "default": 1},
    },
    "x-kubernetes-validations": [
        {
            "rule": "(size(self.group) == 0 && self.kind == 'Service') ? has(self.port) : true",
            "message": "Must have port for Service reference",
        }
    ],
}
_TIMEOUTS: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"request": _DURATION, "backendRequest": _DURATION},
    "x-kubernetes-validations": [
        {
            "rule": "!(has(self.request) && has(self.backendRequest) && duration(self.request) != duration('0s') && "
            "duration(self.backendRequest) > duration(self.request))",
            "message": "backendRequest timeout cannot be longer than request timeout",
        }
    ],
}
_PATH: Final[dict[str, Any]] = {
    "type": "object",
    "default": {"type": "PathPrefix", "value": "/"},
    "properties": {
        "type": {"type": "string", "default": "PathPrefix"},
        "value": {"type": "string", "maxLength": 1024, "default": "/"},
    },
}
_RULE: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "name": _TEXT,
        "matches": {
            **_list({"type": "object", "properties": {"path": _PATH}}, 64),
            "default": [{"path": {"type": "PathPrefix", "value": "/"}}],
        },
        "backendRefs": _list(_BACKEND, 16),
        "timeouts": _TIMEOUTS,
    },
}
_CONDITION: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["type", "status", "reason", "message", "lastTransitionTime"],
    "properties": {
        "type": {"type": "string"},
        "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
        "reason": {"type": "string"},
        "message": {"type": "string"},
        "lastTransitionTime": {"type": "string", "format": "date-time"},
        "observedGeneration": {"type": "integer", "format": "int64"},
    },
}
_SPEC: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "parentRefs": _list(_PARENT, 32),
        "hostnames": _list({"type": "string", "minLength": 1, "maxLength": 253, "pattern": _HOST}, 16),
        "rules": {**_list(_RULE, 16), "default": [{"matches": [{"path": {"type": "PathPrefix", "value": "/"}}]}]},
    },
}
_STATUS: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["parents"],
    "properties": {
        "parents": _list(
            {
                "type": "object",
                "required": ["parentRef", "controllerName"],
                "properties": {
                    "parentRef": _PARENT,
                    "controllerName": _TEXT,
                    "conditions": {
                        "type": "array",
                        "maxItems": 8,
                        "items": _CONDITION,
                        "x-kubernetes-list-type": "map",
                        "x-kubernetes-list-map-keys": ["type"],
                    },
                },
            },
            32,
        )
    },
}

CRD: Final[dict[str, Any]] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {
        "name": NAME,
        "annotations": {"api-approved.kubernetes.io": "unapproved, a part of it for tests"},
    },
    "spec": {
        "group": GROUP,
        "scope": "Namespaced",
        "names": {"kind": "HTTPRoute", "listKind": "HTTPRouteList", "plural": "httproutes", "singular": "httproute"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "required": ["spec"],
                        "properties": {
                            "apiVersion": {"type": "string"},
                            "kind": {"type": "string"},
                            "metadata": {"type": "object"},
                            "spec": _SPEC,
                            "status": _STATUS,
                        },
                    }
                },
            }
        ],
    },
}


def accepted(status: str, reason: str) -> dict[str, Any]:
    """The status that a Gateway's controller writes."""
    condition = {"type": "Accepted", "status": status, "reason": reason, "message": f"it is {reason}"}
    condition["lastTransitionTime"] = "2026-01-01T00:00:00Z"
    parent = {"parentRef": {"name": "shared"}, "controllerName": "example.org/gateways", "conditions": [condition]}
    return {"status": {"parents": [parent]}}
