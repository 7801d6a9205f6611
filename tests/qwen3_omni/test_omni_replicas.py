"""Two talkers and two vocoders behind one thinker: each request stays with its own, and all answers are right.

Tensors go by tcp, so that one pipeline of six processes that load torch tests that relay, too.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.qwen3_omni.omni_cases import CASES
from tests.qwen3_omni.test_omni_answers import ask, check, pipeline
from tests.thoroughness import THOROUGH, rows

pytestmark = pytest.mark.long

REPLICAS = "processGroups=[{name: talker, replicas: 2}, {name: voice, replicas: 2}]"
#: Two processes for what is not repeated: the encoders' rows cross to the thinker.
FRONT = ["stages.audio_encoder.process=eyes", "stages.thinker.process=front"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("relay", rows(["tcp", "auto"], each_run=1))
async def test_requests_are_shared_among_two_talkers_and_two_vocoders_and_stay_there(
    tiny_omni: str, oracle: dict[str, Any], relay: str
) -> None:
    async with pipeline(tiny_omni, REPLICAS, *FRONT, f"relayBackend={relay}") as client:
        asked = [*CASES, *CASES] if THOROUGH else [*CASES]
        for case, answer in zip(asked, await asyncio.gather(*(ask(client, case) for case in asked)), strict=True):
            check(tiny_omni, oracle, case, answer)
        shares = {group: await bound(client, group) for group in ("talker", "voice", "front")}
    assert [len(shares[group]) for group in shares] == [2, 2, 1]
    for counts in shares.values():  # none is bound twice: what streams to an instance goes on there
        assert sum(counts) == len(asked) and min(counts) > 0, shares


async def bound(client: httpx.AsyncClient, group: str) -> list[int]:
    """Requests that each instance of the group has had."""
    instances = (await client.get("/status")).json()["instances"]
    return [int(one["bound_total"]) for one in instances if one["group"] == group]
