"""Load balancers learn that a pipeline's stages are away."""

from __future__ import annotations

import pytest

from stage_runtime.rules.graph import edges
from stage_runtime.wire.messages import Beat
from stage_runtime.wire.values import OmniRequest
from tests.coordinator.manager_kit import came, coordinator_harness, new_request
from tests.coordinator.set_clock import SetClock
from tests.coordinator.test_request_manager import BRANCHES


@pytest.mark.proves("needed-stage-gone")
async def test_a_restart_within_the_hold_time_is_not_a_problem() -> None:
    async with coordinator_harness() as made:
        made.coordinator.lost("v1")
        assert made.manager.problem() is None
        assert made.hello("v2", "voice")
        assert made.manager.problem() is None
        made.join("v2", "voice")
        assert made.manager.problem() is None


@pytest.mark.proves("needed-stage-gone")
async def test_a_stage_that_is_gone_for_good_is_a_problem_until_it_is_back() -> None:
    async with coordinator_harness(hold_s=0.1) as made:
        made.coordinator.lost("v1")
        assert await came(made.manager.problem) == "no instance of voice is left, and none is expected"
        assert made.manager.ready(), "for its kubelet: another coordinator would do no better"
        assert made.manager.status()["problem"] == made.manager.problem()
        made.join("v2", "voice")
        assert made.manager.problem() is None


async def test_before_the_first_set_there_is_a_problem_whatever_the_time() -> None:
    async with coordinator_harness(joined=False) as made:
        assert made.manager.problem() == "no instance of front, voice has come yet"
        made.join("f1", "front")
        assert made.manager.problem() == "no instance of voice has come yet"
        made.join("v1", "voice")
        assert made.manager.problem() is None


@pytest.mark.parametrize(("gone", "problem"), [("p1", False), ("v1", False), ("f1", True)])
async def test_a_stage_that_only_some_requests_need_is_not_what_a_balancer_must_know(gone: str, problem: bool) -> None:
    def terminals(request: OmniRequest) -> list[str]:
        return [str(request.inputs)]

    schemas = edges.of_revision(BRANCHES)
    async with coordinator_harness(joined=False, revisions=(BRANCHES,), terminal_stages=terminals, hold_s=0.0) as made:
        for name, group in (("f1", "front"), ("v1", "voice"), ("p1", "paper")):
            made.join(name, group, edges=schemas[group])
        made.coordinator.lost(gone)
        assert (made.manager.problem() is not None) is problem


@pytest.mark.proves("needed-stage-gone")
async def test_a_queue_that_stands_at_all_instances_of_a_group_is_a_problem() -> None:
    clock = SetClock()
    async with coordinator_harness(clock=clock, hold_s=60.0) as made:
        made.join("v2", "voice")
        made.manager.admit(new_request())
        for instance in ("v1", "v2"):
            made.coordinator.received(instance, Beat({"shout": 2}, {"shout": 1}, {"shout": 7}))
        clock.advance(59.0)
        assert made.manager.problem() is None
        clock.advance(2.0)
        assert made.manager.problem() == "the queue of voice stands"
        made.coordinator.received("v2", Beat({"shout": 2}, {"shout": 1}, {"shout": 8}))
        assert made.manager.problem() is None


@pytest.mark.proves("needed-stage-gone")
async def test_instances_that_beat_rarely_do_not_stand_between_two_beats() -> None:
    """`control.heartbeatSeconds` may be anything below `deadAfterSeconds`."""
    clock = SetClock()
    async with coordinator_harness(clock=clock, hold_s=0.0, dead_after_s=40.0) as made:
        made.manager.admit(new_request())
        made.coordinator.received("v1", Beat({"shout": 2}, {"shout": 1}, {"shout": 7}))
        clock.advance(39.0)
        assert made.manager.problem() is None
        clock.advance(60.0)
        assert made.manager.problem() == "the queue of voice stands"
