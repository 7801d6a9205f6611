"""New revisions of `choir` that are tried with a share of the requests, under load: worse ones and a good one."""

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
    # Minutes of steps. Each run has the rule (tests/operator/test_canary_rule.py), the operator's steps
    # (tests/operator/test_canaries.py), and the share at two coordinators (tests/e2e/test_canary_shares_served.py).
    pytest.mark.nightly,
]

CANARY = {"weight": 25, "stepSeconds": 15, "abortOn": {"errorRate": 0.1, "p99Seconds": 5.0}}
#: Faults of a worse revision, for each word before it is sung.
FAULTS = {
    "raises": "                    if sum(chunk.data['word'].encode()) % 2: raise ValueError('worse')\n",
    "slow": "                    await asyncio.sleep(4)\n",
}


def canaried(*, fault: str = "", **spec: Any) -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load(CHOIR.read_text())
    code = made["spec"]["code"]["inline"]
    before, loop, after = code["choir.py"].partition("async for chunk in session.chunks():\n")
    code["choir.py"] = before + loop + _dedented(FAULTS.get(fault, "")) + after
    made["spec"]["coordinator"] |= {"replicas": 2}
    made["spec"] |= {"rollout": {"canary": CANARY}, **spec}
    return made


def _dedented(line: str) -> str:
    """The file's text is indented by the manifest: eight columns less."""
    return line[8:]


@pytest.fixture
def with_canary(installed: Installed, choir: str) -> Iterator[str]:
    """The URL of `choir` with a canary for its next revision; afterwards it is as its file says."""
    installed.apply(canaried())
    wait_ready(installed.cluster, installed.namespace, "choir", timeout_s=240)
    yield choir
    installed.kubectl("apply", "-f", str(CHOIR))
    wait_ready(installed.cluster, installed.namespace, "choir", timeout_s=240)


@pytest.mark.proves("canary")
@pytest.mark.parametrize("fault", ["raises", "slow"])
async def test_a_worse_revision_is_taken_back_and_only_its_share_is_hurt(
    installed: Installed, with_canary: str, fault: str
) -> None:
    async with Load(with_canary, clients=8) as load:
        await load.some(40)
        assert load.failures() == {}
        kept = {pod["metadata"]["uid"] for pod in installed.pods("choir", "front")}
        installed.apply(canaried(fault=fault))
        begun = len(load.entries)
        await _reason(installed, "CanaryAborted")
        tried = load.entries[begun:]
        ready = await asyncio.to_thread(installed.condition, "choir", "Available")
        assert ready["status"] == "True"
        status = await asyncio.to_thread(installed.status, "choir")
        assert status["canary"]["aborted"] and status["revision"]["current"] != status["revision"]["update"]
        await asyncio.to_thread(wait_for, "its pods are gone", lambda: _settled(installed) or None, timeout_s=180)
        after = len(load.entries)
        await load.some(60)
        assert {entry.outcome for entry in load.entries[after:]} == {"ok"}, load.failures()
    hurt = [entry for entry in tried if entry.outcome != "ok"]
    print(f"{fault}: {len(hurt)} of {len(tried)} failed meanwhile; {status['canary']['message']}")
    assert all("stage_failed" in entry.outcome or "worse" in entry.outcome for entry in hurt), load.failures()
    assert len(hurt) <= max(0.5 * len(tried), 12), "a quarter goes to it, half at most if it was stepped up once"
    assert kept == {pod["metadata"]["uid"] for pod in installed.pods("choir", "front")}, "no pod of the old one left"
    shown = await asyncio.to_thread(installed.plugin, "status", "choir")
    assert "was taken back" in shown.stdout


@pytest.mark.proves("canary")
async def test_a_good_revision_gets_everything_step_by_step(installed: Installed, with_canary: str) -> None:
    weights: list[int] = []

    def rolled() -> bool:
        found = installed.status("choir")
        weight = found.get("canary", {}).get("weight")
        if weight is not None and weight not in weights:
            weights.append(weight)
        reason = installed.condition("choir", "Progressing").get("reason")
        return bool(weights) and reason == "RolledOut" and found["revision"]["current"] == found["revision"]["update"]

    async with Load(with_canary, clients=6) as load:
        await load.some(20)
        installed.apply(canaried(env=[{"name": "CHANGED", "value": "1"}]))
        await asyncio.to_thread(wait_for, "it has everything", lambda: rolled() or None, timeout_s=400)
        await load.some(20)
    assert load.failures() == {}
    assert weights[:4] == [25, 50, 75, 100]


async def _reason(installed: Installed, reason: str) -> None:
    def found() -> bool | None:
        return installed.condition("choir", "Progressing").get("reason") == reason or None

    await asyncio.to_thread(
        wait_for, lambda: f"{reason}: {json.dumps(installed.status('choir'))}", found, timeout_s=300
    )


def _settled(installed: Installed) -> bool:
    """No pod of the revision that was taken back is left, and the old one has its own again."""
    front = [pod["metadata"]["labels"] for pod in installed.pods("choir", "voices")]
    revisions = {labels["omnipipeline.dev/revision"] for labels in front}
    voices = next(each for each in installed.status("choir")["units"] if each["name"] == "voices")
    return len(revisions) == 1 and voices["ready"] == voices["replicas"] == 2
