"""Groups whose old pods end before new ones start: coordinators are told that requests wait for them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from omnipipeline_operator.kinds import CONFIG_MAP, DEPLOYMENT, PIPELINE
from omnipipeline_spec.types.pods import ON_DEMAND_FILE
from tests.operator.test_reconcile_snapshots import KEY, Operator

ALONE = {"maxSurge": 0, "maxUnavailable": 1}


def awaited(operator: Operator) -> list[str] | None:
    """The list as coordinators read it; None: the list does not exist."""
    text = operator.live(CONFIG_MAP, "duo-revisions")["data"].get(ON_DEMAND_FILE)
    return None if text is None else msgspec.json.decode(text, type=list[str])


def ready_pod(operator: Operator, unit: str) -> None:
    """The only Deployment of a unit gets a pod that is ready."""
    found = [one for (kind, _, _), one in operator.server.objects.items() if kind == DEPLOYMENT.name]
    [its] = [one for one in found if one["metadata"]["name"].startswith(f"duo-{unit}-")]
    name = its["metadata"]["name"]
    metadata: dict[str, Any] = {"name": f"{name}-x", "namespace": KEY[0], "uid": name}
    metadata |= {"labels": its["spec"]["selector"]["matchLabels"]}
    ready = [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}]
    operator.watch({"kind": "Pod", "metadata": metadata, "status": {"conditions": ready}})


@pytest.mark.parametrize("rollout", [{"strategy": "Recreate"}, ALONE], ids=lambda one: "+".join(one))
async def test_requests_wait_for_each_group_until_it_has_a_ready_pod(rollout: dict[str, Any]) -> None:
    operator = Operator()
    await operator.reconcile()
    assert awaited(operator) is None, "beside a surge nothing is awaited"
    operator.edit(operator.live(PIPELINE, "duo"), rollout=rollout)
    await operator.reconcile()
    assert awaited(operator) == ["first", "last"]
    ready_pod(operator, "first")
    await operator.reconcile()
    assert awaited(operator) == ["last"]
    ready_pod(operator, "last")
    await operator.reconcile()
    assert awaited(operator) == []


async def test_requests_do_not_wait_for_pods_that_lack_a_secret() -> None:
    operator = Operator()
    given = [{"secretRef": {"name": "absent"}}]
    operator.edit(operator.live(PIPELINE, "duo"), rollout={"strategy": "Recreate"}, envFrom=given)
    await operator.reconcile()
    assert awaited(operator) in (None, [])
