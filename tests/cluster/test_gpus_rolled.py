"""Rolls of a pipeline that holds all GPUs of its cluster, under load: `choir` with GPUs, and as it was at the end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.cluster.conftest import CHOIR
from tests.cluster.installing import Installed, wait_for, wait_ready
from tests.cluster.load import Load

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900, func_only=True),
    # Minutes. Each run has the steps (tests/operator/test_cluster_rolls.py) and the wait (e2e/test_replaced_pods.py).
    pytest.mark.nightly,
]

GPUS = {"sing": [0], "sign": [1]}  # four with two replicas: all that the kit's node has


def with_gpus(replicas: int, rollout: dict[str, object], **spec: object) -> dict[str, Any]:
    """Requests wait for a second only, unless the operator knows that an instance will come."""
    made: dict[str, Any] = yaml.safe_load(CHOIR.read_text())
    for stage in made["spec"]["stages"]:
        stage["gpu"] = GPUS.get(stage["name"], [])
    made["spec"]["processGroups"] = [{"name": name, "replicas": replicas} for name in ("front", "voices", "back")]
    made["spec"]["coordinator"] |= {"hold": {"seconds": 1}}
    made["spec"] |= {"rollout": rollout, **spec}
    return made


@pytest.fixture
def choir_restored(installed: Installed, choir: str) -> Iterator[str]:
    """Its URL; afterwards it is as its file says."""
    yield choir
    installed.kubectl("apply", "-f", str(CHOIR))
    wait_ready(installed.cluster, installed.namespace, "choir", timeout_s=240)


@pytest.mark.proves("roll-out")
async def test_a_roll_without_spare_gpus_fails_no_request(installed: Installed, choir_restored: str) -> None:
    async with Load(choir_restored, clients=4, slow=1) as load:
        await _applied(installed, with_gpus(2, {"maxSurge": 0, "maxUnavailable": 1}), gpus=4)
        await load.some(50)
        before = installed.uids("choir")
        restarted = await asyncio.to_thread(installed.plugin, "restart", "choir", "--wait", "--timeout=4m")
        assert restarted.returncode == 0, restarted.stdout + restarted.stderr
        await _full(installed, 4)
        assert installed.uids("choir").isdisjoint(before)
        await load.some(50)

        slow_to_load = [{"name": "LOADING_S", "value": "4"}]
        before = installed.uids("choir")
        await _applied(installed, with_gpus(1, {"strategy": "Recreate"}, env=slow_to_load), gpus=2)
        assert installed.uids("choir").isdisjoint(before)
        await load.some(50)
    assert load.failures() == {}, load.failures()


async def _applied(installed: Installed, manifest: dict[str, Any], *, gpus: int) -> None:
    """Applied and Ready, with so many GPUs."""

    def apply() -> None:
        installed.kubectl("apply", "--validate=strict", "-f", "-", stdin=json.dumps(manifest))
        wait_ready(installed.cluster, installed.namespace, "choir", timeout_s=240)

    await asyncio.to_thread(apply)
    await _full(installed, gpus)


async def _full(installed: Installed, gpus: int) -> None:
    """All pods of the revision are ready, and no old one is left."""

    def rolled() -> bool:
        held = installed.status("choir")["gpus"]
        done = installed.condition("choir", "Progressing").get("reason") == "RolledOut"
        return done and (held["requested"], held["ready"], held["terminating"]) == (gpus, gpus, 0)

    await asyncio.to_thread(wait_for, f"{gpus} GPUs are ready", lambda: rolled() or None, timeout_s=240)
