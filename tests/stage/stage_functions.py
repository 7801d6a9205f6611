"""Hooks that the stage tests name by dotted path."""

from __future__ import annotations

import random
import threading
from typing import Any

import stage_runtime as omni


def merge_all(inputs: dict[str, omni.StagePayload]) -> dict[str, Any]:
    """The sources that came and the ids that they brought, the long part aside."""
    return {source: payload.data["id"] for source, payload in inputs.items()}


def popping_merge(inputs: dict[str, omni.StagePayload]) -> dict[str, Any]:
    return {source: inputs.pop(source).data["id"] for source in ("a", "b")}


def bad_on_request(request_id: str) -> None:
    if request_id.startswith("bad"):
        raise ValueError("on purpose")


def bad_route(request_id: str, output: Any) -> str:
    bad_on_request(request_id)
    return "b"


def nowhere(request_id: str, output: Any) -> str:
    return "ghost" if request_id.startswith("bad") else "b"


def own_data(request_id: str, output: Any) -> omni.Routed:
    return omni.Routed({"b": {"for": "b"}, "c": {"for": "c"}})


def routed_to_a_list(request_id: str, output: Any) -> omni.Routed:
    payloads: Any = ["b"] if request_id == "bad" else {"b": output}
    return omni.Routed(payloads)


def bad_project(payload: omni.StagePayload) -> Any:
    bad_on_request(payload.request.id)
    return payload


def for_b(payload: omni.StagePayload) -> Any:
    return {"for": "b"}


def given_for_b(payload: omni.StagePayload) -> omni.StagePayload:
    """The payload that it was given, with other data."""
    payload.data = {"for": "b"}
    return payload


def for_c(payload: omni.StagePayload) -> Any:
    return {"for": "c"}


def bad_done(request_id: str, output: Any) -> list[str]:
    bad_on_request(request_id)
    return ["b"]


def nobody(request_id: str, output: Any) -> None:
    return None


def bad_wait(request_id: str, source: str, payload: omni.StagePayload) -> list[str]:
    bad_on_request(request_id)
    return ["a", "b"]


def wait_as_asked(request_id: str, source: str, payload: omni.StagePayload) -> list[str] | None:
    """``a`` decides who is waited for; until it comes nobody knows."""
    return list(payload.data["wait"]) if source == "a" else None


def never_knows(request_id: str, source: str, payload: omni.StagePayload) -> list[str] | None:
    """Knows only of requests that ask for somebody."""
    return list(payload.data["wait"]) or None


def written_into(payload: omni.StagePayload) -> Any:
    """The projection of its target, which writes where all targets could see it."""
    if isinstance(payload.data, dict):
        payload.data["projected"] = len(payload.data)
    return payload.data


def bad_merge(inputs: dict[str, omni.StagePayload]) -> Any:
    bad_on_request(next(iter(inputs.values())).request.id)
    return merge_all(inputs)


def exits(request_id: str, output: Any) -> str:
    if request_id.startswith("bad"):
        raise SystemExit("on purpose")
    return "b"


merging, merge_on = threading.Event(), threading.Event()


def held_merge(inputs: dict[str, omni.StagePayload]) -> Any:
    """Blocks until a test lets it go on."""
    merging.set()
    assert merge_on.wait(60)
    return merge_all(inputs)


def routes_as_requested(request_id: str, output: Any) -> Any:
    return output["to"]


def ends_as_requested(request_id: str, output: Any) -> Any:
    return output["done"]


def first_of(inputs: dict[str, omni.StagePayload]) -> Any:
    return next(iter(inputs.values())).data


def by_chance(request_id: str, output: Any) -> list[str]:
    """Some of ``next``, at least one; the same in every run."""
    targets = output["edges"][output["at"]]
    chance = random.Random(f"{request_id} {output['at']}")
    return chance.sample(targets, chance.randint(1, len(targets)))


def some_by_chance(request_id: str, output: Any) -> list[str]:
    targets = output["streams"][output["at"]]
    chance = random.Random(f"{request_id} {output['at']} done")
    return chance.sample(targets, chance.randint(0, len(targets)))


async def _later() -> str:
    return "b"


def async_route(request_id: str, output: Any) -> Any:
    return _later() if request_id.startswith("bad") else "b"


def lazy_route(request_id: str, output: Any) -> Any:
    return (name for name in ["b"]) if request_id.startswith("bad") else "b"


def async_project(payload: omni.StagePayload) -> Any:
    return _later() if payload.request.id.startswith("bad") else payload


def async_merge(inputs: dict[str, omni.StagePayload]) -> Any:
    bad = next(iter(inputs.values())).request.id.startswith("bad")
    return _later() if bad else merge_all(inputs)


REFUSED = omni.InvalidRequest("no speech", param="audio")  # one for all hooks, as an author may keep one


def refused_on_request(request_id: str) -> None:
    if request_id.startswith("bad"):
        raise REFUSED


def refusing_route_fn(request_id: str, output: Any) -> str:
    refused_on_request(request_id)
    return "b"


def refusing_project_payload(payload: omni.StagePayload) -> Any:
    refused_on_request(payload.request.id)
    return payload


def refusing_stream_done_to_fn(request_id: str, output: Any) -> list[str]:
    refused_on_request(request_id)
    return ["b"]


def refusing_wait_for_fn(request_id: str, source: str, payload: omni.StagePayload) -> list[str]:
    refused_on_request(request_id)
    return ["a", "b"]


def refusing_merge_fn(inputs: dict[str, omni.StagePayload]) -> Any:
    refused_on_request(next(iter(inputs.values())).request.id)
    return merge_all(inputs)
