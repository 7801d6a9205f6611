"""A request without an instance of some stages: nobody waits for these, and a route to one is reported."""

from __future__ import annotations

from typing import Any

import pytest

import stage_runtime as omni
from stage_runtime.wire.parts import Failure
from tests.stage.stage_kit import plan, world
from tests.stage.test_stream_ends import APART, echo, given_by, place, read_all_and_payload

ROUTE = "tests.stage.test_absent_stages:route"


def route(request_id: str, output: dict[str, Any]) -> str:
    return str(output["to"])


@APART
@pytest.mark.parametrize("joined", [False, True])
async def test_a_stage_does_not_wait_for_a_stream_of_a_stage_that_is_away(apart: bool, joined: bool) -> None:
    """b, which would stream to c, and give it a payload, is away; a route leads past it."""
    inputs: dict[str, Any] = {"inputs_from": ("a", "b")}
    if joined:
        inputs |= {
            "wait_for": ("a", "b"),
            "wait_for_fn": "tests.stage.test_absent_stages:wait_for",
            "merge_fn": "tests.stage.test_absent_stages:merge",
        }
    plans = [
        plan("r", entry=True, next=("a", "b"), route_fn=ROUTE),
        plan("a", next=("c",), inputs_from=("r",)),
        plan("c", terminal=True, stream_from=("b",), **inputs),
    ]
    async with world() as made:
        made.away = ("b",)
        place(made, plans, {"r": echo, "a": echo, "c": omni.Streaming(read_all_and_payload)}, apart=apart)
        made.submit("r1", "r", {"to": "a", "id": 7})
        await made.until(lambda: bool(given_by(made, "c")))
        assert given_by(made, "c") == [[[], 7]]
        await made.until(lambda: all(host.idle for host in made.hosts.values()))


def wait_for(request_id: str, source: str, payload: omni.StagePayload) -> list[str]:
    return [source]


def merge(inputs: dict[str, omni.StagePayload]) -> omni.StagePayload:
    (payload,) = inputs.values()
    return payload


async def test_a_route_to_a_stage_that_is_away_is_reported_before_anything_is_sent() -> None:
    plans = [
        plan("r", entry=True, next=("a", "b"), route_fn=ROUTE),
        plan("a", terminal=True, inputs_from=("r",)),
    ]
    async with world() as made:
        made.away = ("b",)
        place(made, plans, {"r": echo, "a": echo}, apart=True)
        made.submit("r1", "r", {"to": "b"})
        await made.until(lambda: bool(made.failed()))
        message = "the route leads to 'b', which had no ready instance"
        assert made.failed() == {"r1": Failure("unavailable", message, "r", "routeFn", away="b")}
        assert not made.results()
