"""A coordinator reports the demand for each process group."""

from __future__ import annotations

from typing import Any

import pytest

from stage_runtime.errors import RequestError
from stage_runtime.metrics import catalog, planes
from stage_runtime.wire.messages import Beat
from tests.coordinator.manager_kit import CoordinatorHarness, coordinator_harness, new_request, read


def groups(made: CoordinatorHarness) -> Any:
    return made.manager.status()["groups"]


async def test_status_and_metrics_have_the_load_of_each_group() -> None:
    async with coordinator_harness(terminal_stages=lambda request: ["shout"]) as made:
        made.hello("v2", "voice")
        handle = made.manager.admit(new_request())
        sent = made.submitted("f1")[0]
        made.complete(sent, "shout")
        await read(handle)
        gauges = planes.places({"split": 4})
        made.coordinator.received("f1", Beat({"split": 2}, {"split": 3}, {"split": 1}, gauges))
        made.coordinator.received("v1", Beat({"shout": 0, "write": 0}, {"shout": 1, "write": 0}, {}))
        front, voice = groups(made)["front"], groups(made)["voice"]
        assert front == {
            "ready": 1,
            "pending": 0,
            "arrivals_per_s": pytest.approx(0.5),
            "service_s": 0.0,  # it has reported none
            "running": 3,
            "waiting": 2,
            "held": 0,
            "per_instance": 4,
            "cold_start_s": None,
        }
        assert (voice["ready"], voice["pending"], voice["running"], voice["service_s"]) == (1, 1, 1, 0.002)
        metrics = made.manager.metrics()
        assert metrics[catalog.GROUP_ARRIVALS] == {("front",): 1, ("voice",): 1}
        assert metrics[catalog.GROUP_DEMAND] == {("front",): 5, ("voice",): 1}
        assert metrics[catalog.GROUP_PLACES] == {("front",): 4, ("voice",): 1}


async def test_the_demand_for_a_group_without_an_instance_is_seen_be_its_requests_held_or_refused() -> None:
    async with coordinator_harness(hold_requests=1) as made:
        made.coordinator.lost("v1")
        made.manager.admit(new_request("held"))
        with pytest.raises(RequestError, match="no ready instance of voice, and 1 requests wait"):
            made.manager.admit(new_request("refused"))
        assert {key: groups(made)["voice"][key] for key in ("ready", "waiting")} == {"ready": 0, "waiting": 1}
        metrics = made.manager.metrics()
        assert metrics[catalog.GROUP_ARRIVALS] == {("front",): 2, ("voice",): 2}
        assert metrics[catalog.GROUP_DEMAND] == {("front",): 0, ("voice",): 1}


async def test_a_group_that_no_terminal_of_a_request_needs_has_no_demand_by_it() -> None:
    async with coordinator_harness(terminal_stages=lambda request: ["shout"]) as made:
        assert set(made.membership.state.met(("shout",))) == {"split", "shout"}
        assert made.membership.state.met(("unknown",)) == {}
