"""A relay between two pods (namespaces) whose peer is killed, frozen, cut off, gone, restarted on the way.

Few of them each time; all, and 10,000 transfers a relay, with OMNI_THOROUGH (`make nightly`).
"""

from __future__ import annotations

import os

import pytest

from benchmarks.faultlab import network, relay_faults
from benchmarks.faultlab.relay_faults import FAULTS, RELAYS, Fault
from tests.thoroughness import THOROUGH

BUSY_S = 2.0  # beyond what a calm machine takes to notice a fault
OFTEN: tuple[tuple[str, Fault], ...] = (
    ("nixl", "freeze"),
    ("mooncake", "restart"),
    ("mooncake", "vanish"),
    ("nccl", "link"),
)
ALL = tuple((relay, fault) for relay in RELAYS for fault in FAULTS)

pytestmark = [
    pytest.mark.long,
    pytest.mark.netns,
    pytest.mark.debian("iproute2"),
    pytest.mark.timeout(3600 if THOROUGH else 300),
    pytest.mark.skipif(
        not network.possible() and not os.environ.get("CI"), reason="needs root, to make network namespaces"
    ),
]


@pytest.mark.parametrize(("relay", "fault"), ALL if THOROUGH else OFTEN)
async def test_a_peer_that_is_hurt_on_the_way_costs_its_own_transfers_alone(relay: str, fault: Fault) -> None:
    outcome = await relay_faults.hurt(relay, fault)
    assert outcome.broken(noticed=THOROUGH, slack_s=BUSY_S) == []
    assert outcome.reason
    assert outcome.transfers > 0 or fault in ("kill", "vanish")


@pytest.mark.parametrize("relay", RELAYS if THOROUGH else ["nccl"])
async def test_a_peer_behind_a_slow_link_is_not_taken_for_a_dead_one(relay: str) -> None:
    outcome = await relay_faults.slow(relay)
    assert outcome.broken() == []


@pytest.mark.parametrize("relay", RELAYS if THOROUGH else ["nixl"])
async def test_what_comes_late_lands_in_no_memory_that_was_given_to_another_transfer(relay: str) -> None:
    outcome = await relay_faults.give_up_often(relay, 10_000 if THOROUGH else 40)
    assert outcome.broken() == []


@pytest.mark.parametrize("relay", RELAYS if THOROUGH else ["mooncake"])
async def test_without_quarantine_it_does(relay: str) -> None:
    outcome = await relay_faults.give_up_often(relay, 1_000, careless=True)
    assert outcome.wrong > 0
