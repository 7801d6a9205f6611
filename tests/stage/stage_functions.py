"""Hooks that the stage tests name by dotted path."""

from __future__ import annotations

from typing import Any

import stage_runtime as omni


def merge_all(inputs: dict[str, omni.StagePayload]) -> dict[str, Any]:
    """Who came and what it brought, the long part aside."""
    return {source: payload.data["id"] for source, payload in inputs.items()}


def bad_if_told(request_id: str) -> None:
    if request_id.startswith("bad"):
        raise ValueError("as told")


def bad_route(request_id: str, output: Any) -> str:
    bad_if_told(request_id)
    return "b"


def nowhere(request_id: str, output: Any) -> str:
    return "ghost" if request_id.startswith("bad") else "b"


def own_data(request_id: str, output: Any) -> omni.Routed:
    return omni.Routed({"b": {"for": "b"}, "c": {"for": "c"}})


def bad_project(payload: omni.StagePayload) -> Any:
    bad_if_told(payload.request.id)
    return payload


def for_b(payload: omni.StagePayload) -> Any:
    return {"for": "b"}


def for_c(payload: omni.StagePayload) -> Any:
    return {"for": "c"}


def bad_done(request_id: str, output: Any) -> list[str]:
    bad_if_told(request_id)
    return ["b"]


def nobody(request_id: str, output: Any) -> None:
    return None


def bad_wait(request_id: str, source: str, payload: omni.StagePayload) -> list[str]:
    bad_if_told(request_id)
    return ["a", "b"]


def wait_as_asked(request_id: str, source: str, payload: omni.StagePayload) -> list[str] | None:
    """``a`` decides who is waited for; until it comes nobody knows."""
    return list(payload.data["wait"]) if source == "a" else None


def bad_merge(inputs: dict[str, omni.StagePayload]) -> Any:
    bad_if_told(next(iter(inputs.values())).request.id)
    return merge_all(inputs)


def exits(request_id: str, output: Any) -> str:
    if request_id.startswith("bad"):
        raise SystemExit("as told")
    return "b"
