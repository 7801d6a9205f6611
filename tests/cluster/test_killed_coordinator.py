"""One of two coordinators, killed by force under load: what is lost, and what clients save that ask again."""

from __future__ import annotations

import asyncio

import pytest

from tests.cluster.installing import Installed, wait_for, wait_ready
from tests.cluster.load import Load

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600, func_only=True)]


@pytest.mark.proves("killed-coordinator")
async def test_one_of_two_killed_by_force_costs_only_streams_that_had_begun(installed: Installed, choir: str) -> None:
    installed.patch("choir", {"coordinator": {"replicas": 2}})
    wait_for("two coordinators", lambda: _ready(installed) == 2, timeout_s=120)
    try:
        async with Load(choir, clients=8, slow=4, again=True) as load:
            await load.some(60)
            doomed = installed.pods("choir", "coordinator")[0]["metadata"]
            kill = ("delete", "pod", doomed["name"], "--force", "--grace-period=0")
            await asyncio.to_thread(installed.kubectl, *kill)
            await load.some(120)
        lost = [one for one in load.entries if one.outcome != "ok"]
        assert all(one.streamed and not one.streamed_nothing for one in lost), lost
        assert {one.outcome for one in lost} <= {"RemoteProtocolError", "ReadError"}, lost
        repeated = sum(one.repeats > 0 for one in load.entries)
        print(f"{len(load.entries)} requests, {repeated} asked again, {len(lost)} streams cut")
        assert repeated, "the killed coordinator had requests"
    finally:
        installed.patch("choir", {"coordinator": {"replicas": 1}})
    wait_for("one coordinator", lambda: len(installed.pods("choir", "coordinator")) == 1, timeout_s=200)
    wait_ready(installed.cluster, installed.namespace, "choir")


def _ready(installed: Installed) -> int:
    conditions = [one["status"].get("conditions", ()) for one in installed.pods("choir", "coordinator")]
    return sum(any(each["type"] == "Ready" and each["status"] == "True" for each in some) for some in conditions)
