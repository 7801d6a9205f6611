"""A request and its prefill instance at the coordinator: introduced, spared, lost, without harm to the request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from stage_runtime.coordinator.binding.broken_connections import RECONNECT_S
from stage_runtime.coordinator.events import ResultEvent
from stage_runtime.coordinator.neighbours import TICK_S
from stage_runtime.rules.graph import edges
from stage_runtime.wire.messages import Beat, Deregister, Members, PeerUnreachable, Unbound
from tests.coordinator.manager_kit import REVISION, CoordinatorHarness, came, coordinator_harness, new_request, read
from tests.coordinator.set_clock import SetClock

PAIRED = msgspec.structs.replace(
    REVISION,
    units={**REVISION.units, "apart": "x1"},
    groups={**REVISION.groups, "apart": "apart"},
    stages={**REVISION.stages, "shout-prefill": "apart"},
    edges=(*REVISION.edges, ("shout-prefill", "shout", "kv")),
)
SCHEMAS = edges.of_revision(PAIRED)


@asynccontextmanager
async def paired(*prefills: str, clock: SetClock | None = None) -> AsyncIterator[CoordinatorHarness]:
    async with coordinator_harness(
        terminal_stages=lambda request: ["shout"], revisions=(PAIRED,), joined=False, clock=clock
    ) as made:
        made.join("f1", "front", edges=SCHEMAS["front"])
        made.join("v1", "voice", edges=SCHEMAS["voice"])
        for one in prefills:
            made.join(one, "apart", revision="x1", edges=SCHEMAS["apart"])
        yield made


def introduced(made: CoordinatorHarness, incarnation: str) -> set[str]:
    return {
        one.incarnation
        for message in made.channels.sent[incarnation]
        if isinstance(message, Members)
        for one in message.joined
    }


async def test_a_request_names_its_prefill_instance_and_both_halves_meet() -> None:
    async with paired("p1") as made:
        handle = made.manager.admit(new_request())
        (sent,) = made.submitted("f1")
        assert sent.header.bindings == {"split": "f1", "shout": "v1", "shout-prefill": "p1"}
        assert "p1" in introduced(made, "v1")
        assert "v1" in introduced(made, "p1")
        assert "p1" not in introduced(made, "f1")
        made.complete(sent, "shout", "served")
        assert await read(handle) == [ResultEvent(stage="shout", data="served")]
        assert made.manager.live.bindings.count("p1") == 0


async def test_the_pipeline_is_ready_and_serves_without_prefill() -> None:
    async with paired() as made:
        assert made.membership.state.complete()
        assert made.manager.problem() is None
        handle = made.manager.admit(new_request())
        (sent,) = made.submitted("f1")
        assert sent.header.bindings == {"split": "f1", "shout": "v1"}
        made.complete(sent, "shout", "served")
        assert await read(handle) == [ResultEvent(stage="shout", data="served")]


async def test_the_death_of_a_prefill_instance_costs_no_attempt_and_is_told() -> None:
    clock = SetClock()
    async with paired("p1", clock=clock) as made:
        handle = made.manager.admit(new_request())
        (sent,) = made.submitted("f1")
        made.coordinator.lost("p1")
        clock.advance(TICK_S)
        assert ("p1",) in [one.gone for one in made.channels.sent["v1"] if isinstance(one, Members)]
        made.complete(sent, "shout", "served")
        assert await read(handle) == [ResultEvent(stage="shout", data="served")]
        assert made.record("r1").attempt == 1


async def test_a_cut_between_the_halves_fails_no_request() -> None:
    clock = SetClock()
    async with paired("p1", clock=clock) as made:
        handle = made.manager.admit(new_request())
        (sent,) = made.submitted("f1")
        made.coordinator.received("v1", PeerUnreachable("p1"))
        made.coordinator.received("p1", PeerUnreachable("v1"))
        clock.advance(RECONNECT_S)
        assert made.submitted("f1") == [sent]
        made.complete(sent, "shout", "served")
        assert await read(handle) == [ResultEvent(stage="shout", data="served")]


async def test_a_draining_prefill_instance_is_unbound_while_its_requests_go_on() -> None:
    async with paired("p1", "p2") as made:
        handles = [made.manager.admit(new_request(f"r{n}")) for n in range(4)]
        assert (made.manager.live.bindings.count("p1"), made.manager.live.bindings.count("p2")) == (2, 2)
        made.coordinator.received("p1", Deregister("a roll"))
        assert made.manager.live.bindings.count("p1") == 0
        assert [type(one) for one in made.channels.sent["p1"]].count(Unbound) == 1
        assert made.membership.state.instances["p1"].bound == 0
        for sent in made.submitted("f1"):
            made.complete(sent, "shout", "served")
        for handle in handles:
            assert await read(handle) == [ResultEvent(stage="shout", data="served")]
        assert made.membership.state.instances["p1"].bound == 0
        assert made.membership.state.instances["p2"].bound == 0


async def test_a_draining_decode_instance_keeps_its_requests() -> None:
    async with paired("p1") as made:
        made.manager.admit(new_request())
        made.coordinator.received("v1", Deregister("a roll"))
        assert made.manager.live.bindings.count("v1") == 1


async def test_turns_of_a_conversation_are_bound_to_the_pair_that_met_it() -> None:
    async with paired("p1", "p2") as made:
        made.join("v2", "voice", edges=SCHEMAS["voice"])
        for name in ("v1", "v2", "p1", "p2"):
            blocks = {"engine_kv_blocks:shout": 100.0, "engine_kv_blocks_used:shout": 0.0}
            made.membership.beat(name, Beat({}, {}, {}, blocks))

        def bound(number: int, inputs: str) -> tuple[str, str]:
            made.manager.admit(new_request(f"r{number}", inputs=inputs))
            found = made.submitted("f1")[-1].header.bindings
            return found["shout"], found["shout-prefill"]

        first, other = bound(1, "what was said so far " * 150), bound(2, "another conversation " * 150)
        assert all(one != two for one, two in zip(first, other, strict=True))
        assert bound(3, "another conversation " * 150 + "and then more") == other  # load alone would take the first
        assert bound(4, "another conversation " * 150 + "and even more") == other
        assert bound(5, "short") == first


async def test_a_request_that_is_sent_again_goes_where_its_beginning_was_met() -> None:
    async with paired("p1", "p2") as made:
        made.join("v2", "voice", edges=SCHEMAS["voice"])
        for name in ("v1", "v2", "p1", "p2"):
            made.membership.beat(name, Beat({}, {}, {}, {"engine_kv_blocks:shout": 100.0}))
        for number in (1, 2):
            made.manager.admit(new_request(f"r{number}", inputs="what was said so far " * 150))
        (sent, _more) = made.submitted("f1")
        decode, prefill = sent.header.bindings["shout"], sent.header.bindings["shout-prefill"]
        made.coordinator.lost(decode)
        again = (await came(lambda: made.submitted("f1")[3:] and made.submitted("f1")))[2:]
        (other,) = {"v1", "v2"} - {decode}
        found = [(one.header.bindings["shout"], one.header.bindings["shout-prefill"]) for one in again]
        assert found == [(other, prefill)] * 2  # load alone would take each prefill instance once


async def test_an_instance_that_reports_no_cache_is_chosen_by_load_alone() -> None:
    async with paired("p1", "p2") as made:
        for number in range(4):
            made.manager.admit(new_request(f"r{number}", inputs="what was said so far " * 150))
        pairs = [one.header.bindings["shout-prefill"] for one in made.submitted("f1")]
        assert sorted(pairs) == ["p1", "p1", "p2", "p2"]
