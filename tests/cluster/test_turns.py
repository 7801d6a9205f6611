"""Two pipelines that may sleep and need the only GPU: who is idle gives it back, and who are both wanted take turns."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.cluster.conftest import CHOIR
from tests.cluster.installing import SYSTEM, Installed, url, wait_for, wait_ready
from tests.cluster.load import Load

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1200, func_only=True),
    # Minutes of waiting. Each run has the rule (tests/operator/test_gangs.py) and whole reconciles of both pipelines
    # (tests/operator/test_gpu_rivals.py).
    pytest.mark.nightly,
]

NAMES = ("matins", "vespers")
GPU = "example.com/gpu"  # of which the node gets one
LIMITS = {"minReplicas": 0, "maxReplicas": 1, "scaleDownDelaySeconds": 5}
OPERATOR = "deployment/omnipipeline"
PATIENCE = "OMNI_OPERATOR_GPU_PATIENCE_SECONDS"


def sleeper(name: str) -> dict[str, Any]:
    """`choir`, whose only singer needs a GPU and leaves when it has nothing to sing."""
    made: dict[str, Any] = yaml.safe_load(CHOIR.read_text())
    made["metadata"]["name"] = name
    next(each for each in made["spec"]["stages"] if each["name"] == "sing")["gpu"] = [0]
    made["spec"]["processGroups"] = [{"name": "voices", "autoscaling": LIMITS, "gpuResourceName": GPU}]
    return made


@pytest.fixture
def one_gpu(installed: Installed) -> Iterator[Installed]:
    """The node advertises one GPU, for which both pipelines are made."""
    cluster = installed.cluster
    nodes = json.loads(cluster.kubectl("get", "nodes", "-l", "!fake", "-o", "json").stdout)["items"]
    name = nodes[0]["metadata"]["name"]
    path = f"/status/capacity/{GPU.replace('/', '~1')}"

    def advertise(*patches: dict[str, str]) -> None:
        cluster.kubectl("patch", "node", name, "--subresource=status", "--type=json", "-p", json.dumps(patches))

    advertise({"op": "add", "path": path, "value": "1"})
    try:
        for each in NAMES:
            installed.apply(sleeper(each))
        for each in NAMES:
            wait_ready(cluster, installed.namespace, each, timeout_s=240)
        yield installed
    finally:
        installed.kubectl("delete", "omnipipeline", *NAMES, "--ignore-not-found", "--wait=false")
        turns_after(installed, "300")
        advertise({"op": "remove", "path": path})


def turns_after(installed: Installed, seconds: str) -> None:
    """How long a pipeline waits for its turn."""
    installed.cluster.kubectl("-n", SYSTEM, "set", "env", OPERATOR, f"{PATIENCE}={seconds}")
    installed.cluster.kubectl("-n", SYSTEM, "rollout", "status", OPERATOR, "--timeout=55s")


def has_gpu(installed: Installed, name: str) -> bool:
    return any(pod["spec"].get("nodeName") for pod in installed.pods(name, "voices"))


@pytest.mark.proves("gangs", "starts-on-demand")
async def test_the_only_gpu_goes_to_whoever_is_wanted_and_by_turns_where_both_are(one_gpu: Installed) -> None:
    installed = one_gpu
    urls = {each: url(installed.cluster, installed.namespace, each) for each in NAMES}
    assert not any(has_gpu(installed, each) for each in NAMES), "both sleep, and are Ready"
    failures: list[str] = []
    for each in NAMES:
        async with Load(urls[each], clients=1) as load:
            await load.some(2)
        failures += load.failures()
    assert has_gpu(installed, NAMES[1]), "the first one was idle and gave it back"
    assert not [each for each in installed.all("events") if each["reason"] == "GPUsYielded"], "nobody had to be asked"

    await asyncio.to_thread(turns_after, installed, "10")
    async with Load(urls[NAMES[0]], clients=1) as one, Load(urls[NAMES[1]], clients=1) as other:
        for _ in range(2):
            for load in (one, other):
                await load.some(3)
        failures += [*one.failures(), *other.failures()]
    assert failures == []
    yielded = {each["involvedObject"]["name"] for each in installed.all("events") if each["reason"] == "GPUsYielded"}
    assert yielded == set(NAMES)
    shown = "it sleeps when nobody asks"
    await asyncio.to_thread(wait_for, shown, lambda: not any(has_gpu(installed, each) for each in NAMES), timeout_s=120)
