"""A pipeline is deleted in the middle of something: nothing stays, nothing is logged as a fault, its name is free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.operator.running import Kube, OperatorProcess, eventually, pipeline
from tests.operator.test_cluster_models import cached

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

OWN = "omnipipeline.dev/pipeline=duo"
LEFT = "deployments,pods,services,configmaps,jobs,networkpolicies,poddisruptionbudgets"


def spec(value: str, **more: Any) -> dict[str, Any]:
    """Another value changes each unit."""
    return pipeline(env=[{"name": "A", "value": value}], **more)


def _two_revisions(kube: Kube) -> bool:
    label = "omnipipeline.dev/revision"
    return len({each["metadata"]["labels"].get(label) for each in kube.all("pods", OWN)}) > 1


def _roll(kube: Kube) -> None:
    kube.apply(spec("1"))
    kube.wait_ready("duo")
    kube.apply(spec("2"))
    eventually(lambda: _two_revisions(kube), what="both revisions have pods")


def _canary(kube: Kube) -> None:
    canary = {"canary": {"weight": 50, "stepSeconds": 3600}}
    kube.apply(spec("1", rollout=canary))
    kube.wait_ready("duo")
    kube.apply(spec("2", rollout=canary))
    eventually(lambda: kube.get("omnipipeline", "duo")["status"].get("canary", {}).get("weight"), what="a canary")


def _to_zero(kube: Kube) -> None:
    kube.apply(spec("1"))
    kube.wait_ready("duo")
    kube.apply(spec("1", suspend=True))
    eventually(
        lambda: any(each["spec"]["replicas"] == 0 for each in kube.all("deployments", OWN)), what="a unit goes to zero"
    )


def _prefetch(kube: Kube) -> None:
    kube.apply(cached("some/model"))
    eventually(lambda: kube.names("jobs"), what="the Job is there")


@pytest.mark.parametrize("begin", [_roll, _canary, _to_zero, _prefetch], ids=lambda begin: begin.__name__[1:])
def test_nothing_stays_of_a_pipeline_that_is_deleted_midway_and_its_name_serves_again(
    kube: Kube, operator: OperatorProcess, begin: Callable[[Kube], None]
) -> None:
    operator.start()
    begin(kube)
    kube("delete", "omnipipeline", "duo", "--timeout=50s")
    eventually(lambda: not kube.all(LEFT, OWN), what="nothing is left")
    kube.apply(spec("3"))
    kube.wait_ready("duo")
    assert operator.stop() == 0
    log = operator.log.read_text()
    assert "Traceback" not in log and "unexpected error" not in log
