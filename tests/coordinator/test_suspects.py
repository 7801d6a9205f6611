"""A request that ends the process that it runs in, and its neighbours."""

from __future__ import annotations

import logging
from functools import partial

import pytest

from stage_runtime.coordinator.events import ResultEvent
from stage_runtime.wire.messages import Submit
from tests.coordinator.manager_kit import CoordinatorHarness, came, coordinator_harness, error_of, new_request, read


def at(made: CoordinatorHarness, instance: str) -> list[Submit]:
    """The messages that were sent to this instance of the stage that dies."""
    return [one for one in made.submitted("f1") if one.header.bindings["shout"] == instance]


def names(sent: list[Submit]) -> list[str]:
    return [one.header.request_id for one in sent]


def sent_as(made: CoordinatorHarness, name: str) -> list[Submit]:
    return [one for one in at(made, "v3") if one.header.request_id == name]


async def test_the_second_end_under_the_same_request_ends_it_and_names_it(caplog: pytest.LogCaptureFixture) -> None:
    async with coordinator_harness() as made:
        handle = made.manager.admit(new_request("killer"))
        made.coordinator.lost("v1")
        made.join("v2", "voice")
        with caplog.at_level(logging.WARNING):
            made.coordinator.lost("v2")
        error = await error_of(handle)
        assert (error.code, error.stage) == ("stage_failed", "shout")  # HTTP adds x-should-retry: false
        (line,) = [one.message for one in caplog.records if one.levelno == logging.ERROR]
        assert line.startswith("request killer was under way at each of these instances of 'shout'")
        assert line.endswith("v1, v2; it is not sent again")
        made.join("v3", "voice")
        assert at(made, "v3") == []


@pytest.mark.proves("killer-request")
async def test_neighbours_of_a_killer_are_served_and_only_it_is_ended_after_two_ends() -> None:
    async with coordinator_harness(terminal_stages=lambda request: ["shout"]) as made:
        handles = {name: made.manager.admit(new_request(name)) for name in ("a", "killer", "b")}
        made.coordinator.lost("v1")
        made.join("v2", "voice")
        assert names(at(made, "v2")) == ["a"], "they take turns"
        made.complete(at(made, "v2")[0], "shout", "of a")
        assert await came(lambda: names(at(made, "v2")) == ["a", "killer"])
        late = made.manager.admit(new_request("late"))
        made.coordinator.lost("v2")
        assert (await error_of(handles["killer"])).code == "stage_failed"
        made.join("v3", "voice")
        assert await came(lambda: len(at(made, "v3")) == 1)
        for name, other in (("b", handles["b"]), ("late", late)):
            (sent,) = await came(partial(sent_as, made, name))
            made.complete(sent, "shout", name)
            assert await read(other) == [ResultEvent(stage="shout", data=name)]
        assert await read(handles["a"]) == [ResultEvent(stage="shout", data="of a")]


async def test_suspects_go_to_several_instances_at_once_and_new_requests_to_the_others() -> None:
    async with coordinator_harness(terminal_stages=lambda request: ["shout"]) as made:
        for name in ("a", "killer", "b"):
            made.manager.admit(new_request(name))
        for instance in ("v2", "v3", "v4"):
            made.join(instance, "voice")
        made.coordinator.lost("v1")
        assert sorted(len(at(made, one)) for one in ("v2", "v3", "v4")) == [1, 1, 1]
        made.coordinator.lost("v4")
        made.join("v5", "voice")
        for number in range(4):
            made.manager.admit(new_request(f"new {number}"))
        assert set(names(at(made, "v5"))) >= {f"new {number}" for number in range(4)}


async def test_a_neighbour_that_streams_again_lets_the_next_one_go() -> None:
    async with coordinator_harness(terminal_stages=lambda request: ["shout"]) as made:
        for name in ("a", "b"):
            made.manager.admit(new_request(name, stream=True))
        made.coordinator.lost("v1")
        made.join("v2", "voice")
        made.chunk(at(made, "v2")[0], "shout", 0, "word")
        assert await came(lambda: names(at(made, "v2")) == ["a", "b"])


async def test_ends_of_different_stages_blame_nobody() -> None:
    async with coordinator_harness() as made:
        handle = made.manager.admit(new_request())
        made.coordinator.lost("v1")
        made.join("v2", "voice")
        made.coordinator.lost("f1")
        assert (await error_of(handle)).code == "unavailable"


async def test_an_end_that_a_neighbour_has_noticed_first_counts_too() -> None:
    async with coordinator_harness() as made:
        handle = made.manager.admit(new_request())
        made.fail(made.submitted("f1")[0], "split", "transport_failed", "no connection", unreachable="v1")
        made.coordinator.lost("v1")
        made.join("v2", "voice")
        (_, again) = made.submitted("f1")
        made.fail(again, "split", "transport_failed", "no connection", unreachable="v2")
        made.coordinator.lost("v2")
        assert (await error_of(handle)).code == "stage_failed"


async def test_without_retries_the_first_end_is_answered_as_unavailable() -> None:
    async with coordinator_harness(retries=0) as made:
        handle = made.manager.admit(new_request())
        made.coordinator.lost("v1")
        assert (await error_of(handle)).code == "unavailable"


async def test_instances_that_end_together_with_no_request_in_common_make_no_suspects() -> None:
    async with coordinator_harness(terminal_stages=lambda request: ["shout"]) as made:
        made.join("v2", "voice")
        for number in range(4):
            made.manager.admit(new_request(f"r{number}"))
        made.channels.interrupted = {"v1", "v2"}  # a machine goes, with both
        made.coordinator.lost("v1")
        made.coordinator.lost("v2")
        made.channels.interrupted = set()
        made.join("v3", "voice")
        assert len(at(made, "v3")) == 4, "all at once"


async def test_of_many_suspects_several_go_at_once_and_after_a_second_end_one_at_a_time() -> None:
    async with coordinator_harness(terminal_stages=lambda request: ["shout"]) as made:
        for number in range(16):
            made.manager.admit(new_request(f"r{number}"))
        made.coordinator.lost("v1")
        made.join("v2", "voice")
        assert len(at(made, "v2")) == 2
        made.coordinator.lost("v2")
        made.join("v3", "voice")
        assert len(at(made, "v3")) == 1, "two were at both ends"
        assert made.manager.in_flight == 16, "and none is suspected yet"
