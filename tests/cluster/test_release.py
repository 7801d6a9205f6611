"""The release is upgraded and rolled back while a pipeline serves: no pod of the pipeline is touched."""

from __future__ import annotations

import asyncio

import pytest

from tests.cluster.installing import CHART, RELEASE, SYSTEM, Installed, helm, wait_for
from tests.cluster.load import Load

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600, func_only=True)]

#: Another pod of the operator, a standby, and another image for pipelines that are made from now on.
OTHER = ["--set", "replicas=2,logFormat=text,podDisruptionBudget.enabled=true", "--set-string", "stageImage.tag=next"]


async def test_an_upgrade_and_a_rollback_restart_no_pod_of_a_pipeline(installed: Installed, choir: str) -> None:
    before = installed.uids("choir")
    async with Load(choir, clients=2) as load:
        await load.some(20)
        try:
            await asyncio.to_thread(_upgraded, installed)
            assert installed.uids("choir") == before
        finally:
            await asyncio.to_thread(_rolled_back, installed)
        await load.some(20)
    assert load.failures() == {}, load.failures()
    assert installed.uids("choir") == before


def _upgraded(installed: Installed) -> None:
    options = ["--reuse-values", *OTHER, "--wait", "--timeout", "240s"]
    helm(installed.cluster, "upgrade", RELEASE, str(CHART), "--namespace", SYSTEM, *options)
    # The new operator works: it makes what is asked for now, and leaves the rest alone.
    installed.patch("choir", {"disruption": {"podDisruptionBudget": {"enabled": True}}})
    wait_for("a budget for each unit and the coordinators", lambda: _budgets(installed) == 4, timeout_s=120)


def _rolled_back(installed: Installed) -> None:
    helm(installed.cluster, "rollback", RELEASE, "1", "--namespace", SYSTEM, "--wait", "--timeout", "240s")
    installed.patch("choir", {"disruption": {"podDisruptionBudget": {"enabled": False}}})
    wait_for("no budget", lambda: _budgets(installed) == 0, timeout_s=120)


def _budgets(installed: Installed) -> int:
    selector = "omnipipeline.dev/pipeline=choir"
    return len(installed.all("poddisruptionbudgets", selector))
