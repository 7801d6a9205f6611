"""Helm install, kubectl apply, requests through the Service, on a real cluster.

Real images, pods on pod IPs, CURVE on. Each promise of the architecture that needs pods stands here once.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import Callable
from functools import partial

import openai
import pytest

from tests.cluster.installing import RELEASE, SYSTEM, Installed, helm, wait_ready
from tests.cluster.load import Load

# The first test waits for images to be built: a fixture's time is bounded by itself.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900, func_only=True)]

# A kubelet gives its own watch of a pod's ConfigMap or Secret one second to begin; on a node that is busy starting
# pods it reports that it was not in time, and mounts the volume at its next try. An object that was missing is
# reported in other words ("configmap ... not found").
KUBELET_WAS_BUSY = re.compile(r"failed to sync (configmap|secret) cache: timed out waiting for the condition$")

REQUESTS = 5000  # through a drain, a scaling 1→3→1 and a roll, half of them streaming, some open across every drain


def test_a_pipeline_whose_node_will_be_lost_is_ready_before(lost_node_pipeline: str) -> None:
    """Here so that the two minutes which this takes pass beside the other tests; test_node_loss.py looks at the end."""


def test_the_charts_own_test_passes(installed: Installed) -> None:
    finished = helm(installed.cluster, "test", RELEASE, "--namespace", SYSTEM, "--timeout", "240s", "--logs")
    assert "answers 'IT WORKS '" in finished.stdout, finished.stdout


def test_the_example_answers_curl_and_the_openai_client_through_its_service(hello: str) -> None:
    body = json.dumps({"model": "hello", "messages": [{"role": "user", "content": "good morning"}]})
    command = ["curl", "-sS", "--max-time", "60", f"{hello}/v1/chat/completions", "-d", body]
    command += ["-H", "content-type: application/json"]
    curled = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=70).stdout)
    assert curled["choices"][0]["message"]["content"] == "GOOD!! MORNING!! "

    with openai.OpenAI(base_url=f"{hello}/v1", api_key="none", max_retries=0, timeout=60) as client:
        stream = client.chat.completions.create(
            model="hello", messages=[{"role": "user", "content": "one two three"}], stream=True
        )
        words = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(words) == "ONE!! TWO!! THREE!! "


def test_every_pod_talks_by_curve_and_none_holds_a_token(installed: Installed, hello: str) -> None:
    pods = installed.pods("hello")
    assert len(pods) == 4, "two coordinators, and one of each group"
    for pod in pods:
        environment = {each["name"] for each in pod["spec"]["containers"][0]["env"]}
        assert "OMNI_CONTROL_KEY_FILE" in environment
        assert pod["spec"]["automountServiceAccountToken"] is False


def test_no_pod_is_the_first_to_be_evicted(installed: Installed, hello: str) -> None:
    assert {pod["status"]["qosClass"] for pod in installed.pods("hello")} == {"Burstable"}


def test_a_healthy_start_leaves_no_warning(installed: Installed, hello: str) -> None:
    pods = {pod["metadata"]["name"] for pod in installed.pods("hello")}
    events = installed.all("events")
    of_pods = [each for each in events if each["involvedObject"]["name"] in pods]
    assert {"Started"} <= {each["reason"] for each in of_pods}
    warnings = [each["message"] for each in of_pods if each["type"] == "Warning"]
    assert [each for each in warnings if not KUBELET_WAS_BUSY.search(each)] == []


def test_the_plugin_shows_a_pipeline_as_a_tree_and_its_logs(installed: Installed, hello: str) -> None:
    shown = installed.plugin("status", "hello")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "Ready=True" in shown.stdout and "front  1/1 ready" in shown.stdout
    assert "ready: shout" in installed.plugin("logs", "hello", "--stage", "shout").stdout
    assert "no stage 'nobody'; it has split, shout" in installed.plugin("logs", "hello", "--stage", "nobody").stderr


async def test_both_replicas_serve_and_a_killed_pod_costs_no_unstreamed_request(
    installed: Installed, choir: str
) -> None:
    async with Load(choir) as load:
        await load.some(200)
        replicas = load.replicas()
        assert len(replicas) == 2, replicas
        victim = next(iter(replicas))
        await asyncio.to_thread(installed.kubectl, "delete", "pod", victim, "--grace-period=0", "--force")
        await load.some(300)
    lost = [entry for entry in load.entries if entry.outcome != "ok" and not entry.streamed]
    assert lost == []
    # A stream whose first words are out can't be begun again: it ends with an error, and there are few.
    assert sum(load.failures().values()) <= 4, load.failures()
    wait_ready(installed.cluster, installed.namespace, "choir")


async def test_scaling_draining_and_rolling_under_load_fail_no_request(installed: Installed, choir: str) -> None:
    async with Load(choir, clients=6, slow=2) as load:
        await load.some(50)
        singing = _names(installed, "voices")
        drained = await asyncio.to_thread(installed.plugin, "drain", "choir", "--stage", "sing")
        assert drained.returncode == 0 and drained.stdout.count("has ended") == 2, drained.stdout + drained.stderr
        assert _names(installed, "voices").isdisjoint(singing)

        for replicas in (3, 1):
            installed.patch("choir", {"processGroups": [{"name": "voices", "replicas": replicas}]})
            await _in_thread_until(partial(lambda n: _ready_pods(installed, "choir", "voices") == n, replicas))
            await load.some(300)

        before = installed.uids("choir")
        restarted = await asyncio.to_thread(installed.plugin, "restart", "choir", "--wait", "--timeout=4m")
        assert restarted.returncode == 0, restarted.stdout + restarted.stderr
        await _in_thread_until(lambda: installed.uids("choir").isdisjoint(before))
        await load.some(max(200, REQUESTS - len(load.entries)))
    assert load.failures() == {}, load.failures()
    assert len(load.entries) >= REQUESTS
    assert len(load.replicas()) >= 6, load.replicas()  # two, their two successors, a third, the new revision's


async def _in_thread_until(condition: Callable[[], bool]) -> None:
    """Wait for the cluster while the load goes on."""
    async with asyncio.timeout(300):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.5)


def _names(installed: Installed, unit: str) -> set[str]:
    """The names of the pods that are not on their way out."""
    pods = installed.pods("choir", unit)
    return {str(pod["metadata"]["name"]) for pod in pods if "deletionTimestamp" not in pod["metadata"]}


def _ready_pods(installed: Installed, name: str, unit: str) -> int:
    """Ready pods; -1 while one is on its way out."""
    pods = installed.pods(name, unit)
    if any("deletionTimestamp" in pod["metadata"] for pod in pods):
        return -1
    conditions = [pod["status"].get("conditions", ()) for pod in pods]
    return sum(any(one["type"] == "Ready" and one["status"] == "True" for one in each) for each in conditions)
