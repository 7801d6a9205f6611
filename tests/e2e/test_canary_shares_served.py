"""A revision that is tried with a share of the requests, at two coordinators, in processes as pods have them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import httpx
import pytest

from omnipipeline_spec import planning
from omnipipeline_spec.pipeline import PipelineConfig, StageConfig
from tests.e2e.local_pipelines import PATIENCE_S, Client, eventually
from tests.e2e.pod_pipelines import Pods, pods

BOTH = ("one", "two")
REQUESTS = 60  # at each coordinator


def pipeline(**arguments: str) -> PipelineConfig:
    stage = StageConfig(
        name="say", process="say", factory="worse_stages:say", factory_args=dict(arguments), terminal=True
    )
    return PipelineConfig(name="worse", stages=[stage])


async def asked(made: Pods) -> Counter[int]:
    """Status codes of `REQUESTS` at each coordinator, one after the other."""
    found: Counter[int] = Counter()
    for name in BOTH:
        async with httpx.AsyncClient(base_url=made.url(name), timeout=PATIENCE_S) as http:
            for _ in range(REQUESTS):
                answer = await http.post("/v1/pipeline", json={"inputs": "hello"})
                found[answer.status_code] += 1
    return found


@pytest.mark.long
@pytest.mark.proves("canary")
@pytest.mark.parametrize("fault", ["raises", "dies"])
async def test_a_worse_revision_gets_its_share_and_is_known_by_its_outcomes(base: Path, fault: str) -> None:
    async with pods(pipeline(), base, *BOTH) as made:
        async with Client(made.url("one")) as one, Client(made.url("two")) as two:
            old = made.plan.current.revision
            weight = 0.1
            made.share(planning.plan(pipeline(fault=fault)), weight)
            edited = made.announce(pipeline(fault=fault), awaited=[])
            new = edited.current.revision

            async def tried() -> bool:
                found = [(await each.status())["outcomes"].keys() for each in (one, two)]
                return all(each == {old, new} for each in found)

            async def bindable() -> bool:
                found = [(await each.status())["instances"] for each in (one, two)]
                return all(sum(instance["ready"] for instance in each) == 2 for each in found)

            await eventually(tried)
            await made.begin(edited)
            await eventually(bindable)
            codes = await asked(made)
            outcomes = [(await each.status())["outcomes"] for each in (one, two)]
            metrics = await one.metrics()
            made.share(edited, 0.0)
            failed = {each: sum(found[each]["failed"] for found in outcomes) for each in (old, new)}
            completed = {each: sum(found[each]["completed"] for found in outcomes) for each in (old, new)}
            tenth = round(2 * REQUESTS * weight)
            assert failed[old] == 0
            if fault == "raises":
                assert codes == {200: 2 * REQUESTS - tenth, 500: tenth}
                assert (failed[new], completed) == (tenth, {old: 2 * REQUESTS - tenth, new: 0})
                assert metrics["omnipipeline_revision_requests_total{failed}"] == tenth / 2
            else:
                assert codes == {200: 2 * REQUESTS}, "sent again to the old revision"
                assert completed == {old: 2 * REQUESTS, new: 0}
                assert 1 <= failed[new] <= tenth, "while its process starts again it gets none"
            assert sum(count for _, count in outcomes[0][old]["times"]) == outcomes[0][old]["completed"]
