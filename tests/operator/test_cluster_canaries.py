"""A trial that a pause interrupts, and a key that stays meanwhile: a real API server, no coordinator answers."""

from __future__ import annotations

from typing import Any

import pytest

from omnipipeline_operator.desired import naming
from tests.operator.running import Kube, OperatorProcess, eventually, pipeline
from tests.operator.test_cluster_children import deployments
from tests.operator.test_cluster_rolls import units_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def spec(value: str, **more: Any) -> dict[str, Any]:
    """A pipeline with a canary; another value changes each unit."""
    env = [{"name": "A", "value": value}]
    return pipeline(env=env, rollout={"canary": {"weight": 50, "stepSeconds": 3600}}, **more)


def running(kube: Kube) -> set[tuple[str, str]]:
    """The units with replicas, with their revisions, the coordinator left out."""
    found = deployments(kube)
    return {(unit, one) for unit in ("first", "last") for one, replicas in found.get(unit, {}).items() if replicas}


def test_after_a_pause_in_mid_canary_only_the_old_revision_comes_back(kube: Kube, operator: OperatorProcess) -> None:
    old, new = set(units_of(spec("1")).items()), set(units_of(spec("2")).items())
    operator.start()
    kube.apply(spec("1"))
    kube.wait_ready("duo")
    serving = kube.get("omnipipeline", "duo")["status"]["revision"]["current"]
    kube.apply(spec("2"))
    eventually(lambda: running(kube) == old | new, what="the new revision stands beside the old one")
    kube("annotate", "omnipipeline", "duo", f"{naming.KEY_ROTATION}=monday")
    eventually(
        lambda: "The key stays until" in kube.condition("duo", "Accepted")["message"], what="the key is not replaced"
    )
    kube.apply(spec("2", suspend=True))
    eventually(lambda: not running(kube) and not kube.all("pods"), what="a pause")
    kube.apply(spec("2"))
    eventually(lambda: running(kube) == old, what="the old revision is back")
    status = kube.get("omnipipeline", "duo")["status"]
    assert status["revision"]["current"] == serving
    assert status["canary"]["weight"] == 0 and "from the beginning" in status["canary"]["message"]
    assert running(kube) == old
