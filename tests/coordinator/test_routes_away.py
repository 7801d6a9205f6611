"""A request whose route leads to a stage without an instance waits for it, or fails with its name."""

from __future__ import annotations

import pytest

from stage_runtime.rules.graph import edges
from tests.coordinator.manager_kit import CoordinatorHarness, coordinator_harness, error_of, new_request, read
from tests.rules.test_partial_binding_rules import TALK

SCHEMAS = edges.of_revision(TALK)


def join(made: CoordinatorHarness, *groups: str) -> None:
    for group in groups:
        made.join(group, group, revision="1", edges=SCHEMAS[group])


async def test_a_request_that_does_not_meet_what_is_away_is_served() -> None:
    async with coordinator_harness(joined=False, revisions=(TALK,), hold_s=0.0) as made:
        join(made, "front", "listen", "voice")
        handle = made.manager.admit(new_request())
        (sent,) = made.submitted("front")
        assert sent.header.bindings == {"take": "front", "listen": "listen", "speak": "voice"}
        assert sent.header.away == ("chat", "language")
        made.complete(sent, "speak", "said")
        assert [one.data for one in await read(handle)] == ["said"]
        assert made.manager.problem() is None


@pytest.mark.proves("unneeded-stage-missing")
async def test_a_route_to_what_is_away_waits_for_it_and_begins_again() -> None:
    async with coordinator_harness(joined=False, revisions=(TALK,), hold_s=60.0) as made:
        join(made, "front", "listen", "voice")
        handle = made.manager.admit(new_request())
        (sent,) = made.submitted("front")
        made.fail(sent, "take", "unavailable", "away", away="chat")
        assert made.aborted("front") == [("r1", sent.header.attempt)] and len(made.submitted("front")) == 1
        join(made, "language")
        _, again = made.submitted("front")
        assert again.header.bindings.keys() == TALK.stages.keys() and again.header.away == ()
        made.complete(again, "speak", "answered")
        assert [one.data for one in await read(handle)] == ["answered"]
        assert made.manager.live.retried == 0


@pytest.mark.proves("unneeded-stage-missing")
async def test_a_route_to_what_is_gone_is_503_with_its_name() -> None:
    async with coordinator_harness(joined=False, revisions=(TALK,), hold_s=0.0) as made:
        join(made, "front", "listen", "voice")
        handle = made.manager.admit(new_request())
        made.fail(made.submitted("front")[0], "take", "unavailable", "away", away="chat")
        error = await error_of(handle)
        assert (error.code, error.stage) == ("unavailable", "language")
        assert str(error) == "no instance of language is ready or expected; the route leads to chat"


async def test_what_is_away_ends_an_answer_that_has_begun() -> None:
    async with coordinator_harness(joined=False, revisions=(TALK,), hold_s=60.0) as made:
        join(made, "front", "listen", "voice")
        handle = made.manager.admit(new_request(stream=True))
        (sent,) = made.submitted("front")
        made.chunk(sent, "speak", 0, "a")
        made.fail(sent, "take", "unavailable", "away", away="chat")
        error = await error_of(handle)
        assert (error.code, error.stage) == ("unavailable", "chat")


async def test_a_stage_that_is_not_away_is_a_failure_like_another() -> None:
    """Nothing is sent again without end, whatever an instance sends."""
    async with coordinator_harness(joined=False, revisions=(TALK,), hold_s=60.0) as made:
        join(made, "front", "listen", "voice")
        handle = made.manager.admit(new_request())
        made.fail(made.submitted("front")[0], "take", "unavailable", "odd", away="speak")
        assert (await error_of(handle)).code == "unavailable"
        assert len(made.submitted("front")) == 1


@pytest.mark.parametrize(("gone", "problem"), [("language", False), ("listen", False), ("voice", True)])
async def test_only_what_every_route_meets_is_a_problem(gone: str, problem: bool) -> None:
    async with coordinator_harness(joined=False, revisions=(TALK,), hold_s=0.0) as made:
        join(made, *TALK.groups)
        made.coordinator.lost(gone)
        assert (made.manager.problem() is not None) is problem


async def test_when_all_ways_are_gone_that_is_a_problem() -> None:
    async with coordinator_harness(joined=False, revisions=(TALK,), hold_s=0.0) as made:
        join(made, *TALK.groups)
        made.coordinator.lost("language")
        made.coordinator.lost("listen")
        assert made.manager.problem() == "no instance of listen, language is left, and none is expected"
