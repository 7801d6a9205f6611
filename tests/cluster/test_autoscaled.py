"""Replicas that follow the load of `choir`, under load, from one to three, back, to none and again to one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from tests.cluster.conftest import CHOIR
from tests.cluster.installing import Installed, wait_for, wait_ready
from tests.cluster.load import Load

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900, func_only=True),
    # Minutes of waiting. Each run has the rule (tests/contract/test_scaling.py), the operator's steps
    # (tests/operator/test_scaled_units.py), and the way from none and back (tests/processes/test_autoscaling.py).
    pytest.mark.nightly,
]

LIMITS = {"minReplicas": 0, "maxReplicas": 3, "scaleDownDelaySeconds": 10}


def scaled() -> dict[str, Any]:
    """`choir`, whose singers sing two songs at once and are as many as are needed."""
    made: dict[str, Any] = yaml.safe_load(CHOIR.read_text())
    code = made["spec"]["code"]["inline"]
    before, singing, after = code["choir.py"].partition("def sing(")
    code["choir.py"] = before + singing + after.replace("Streaming(run)", "Streaming(run, concurrency=2)", 1)
    made["spec"]["processGroups"] = [{"name": "voices", "autoscaling": LIMITS}]
    return made


@pytest.fixture
def follows_its_load(installed: Installed, choir: str) -> Iterator[str]:
    """The URL of `choir`; afterwards it is as its file says."""
    installed.kubectl("apply", "--validate=strict", "-f", "-", stdin=json.dumps(scaled()))
    wait_ready(installed.cluster, installed.namespace, "choir", timeout_s=240)
    yield choir
    installed.kubectl("apply", "-f", str(CHOIR))
    wait_ready(installed.cluster, installed.namespace, "choir", timeout_s=240)


def unit(installed: Installed) -> dict[str, Any]:
    found = (each for each in installed.status("choir")["units"] if each["name"] == "voices")
    return next(found)


def shown(installed: Installed) -> str:
    """The unit's line that a person sees."""
    lines = installed.plugin("status", "choir").stdout.splitlines()
    return next(each for each in lines if " voices  " in each)


@pytest.mark.proves("starts-on-demand")
async def test_replicas_follow_the_load_to_none_and_back_and_no_request_fails(
    installed: Installed, follows_its_load: str
) -> None:
    url = follows_its_load
    failures: list[str] = []
    async with Load(url, clients=1, slow=1) as one:
        await _until(installed, lambda found: (found["replicas"], found["ready"]) == (1, 1))
        async with Load(url, clients=6, slow=6) as many:
            await _until(installed, lambda found: (found["replicas"], found["ready"]) == (3, 3))
            assert "by its load: up to 3: " in await asyncio.to_thread(shown, installed)
            await many.some(6)
        await _until(installed, lambda found: (found["replicas"], found["ready"]) == (1, 1))
        assert "by its load: down to 1: " in await asyncio.to_thread(shown, installed)
        failures += [*one.failures(), *many.failures()]
    await _until(installed, lambda found: (found["replicas"], found["ready"]) == (0, 0))
    assert "by its load: down to 0: no request" in await asyncio.to_thread(shown, installed)
    gone = "a pod that ends takes requests for a while"
    await asyncio.to_thread(wait_for, gone, lambda: not installed.pods("choir", "voices") or None, timeout_s=120)
    assert installed.condition("choir", "Ready")["status"] == "True", "it answers: requests wait for the first instance"
    async with Load(url, clients=2) as again:
        await again.some(10)
        assert unit(installed)["replicas"] >= 1
        failures += again.failures()
    assert failures == []


async def _until(installed: Installed, reached: Callable[[dict[str, Any]], bool]) -> None:
    def probe() -> bool | None:
        return reached(unit(installed)) or None

    await asyncio.to_thread(wait_for, lambda: f"the replicas are reached: {unit(installed)}", probe, timeout_s=300)
