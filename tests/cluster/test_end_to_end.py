"""The whole, as users meet it: helm install, kubectl apply, requests through the Service, on a real cluster.

Real images, pods on pod IPs, CURVE on. Each promise of the architecture that needs pods stands here once.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from cluster_kit import REPOSITORY
from installing import RELEASE, SYSTEM, Installed, helm, read, url, wait_for, wait_ready
from ledger import Load

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

HELLO = REPOSITORY / "examples" / "hello" / "pipeline.yaml"
CHOIR = REPOSITORY / "tests" / "cluster" / "choir.yaml"
KINDS = "omnipipelines,deployments,replicasets,pods,configmaps,secrets,services,networkpolicies,poddisruptionbudgets"
PIPELINE = "omnipipeline.dev/pipeline"
REQUESTS = 5000  # through a scaling 1→3→1 and a roll, half of them streaming, some open across every drain


@pytest.fixture(scope="module")
def hello(installed: Installed) -> str:
    """URL of the example, applied as it is in the repository."""
    installed.cluster.kubectl("-n", installed.namespace, "apply", "--validate=strict", "-f", str(HELLO))
    wait_ready(installed.cluster, installed.namespace, "hello")
    return url(installed.cluster, installed.namespace, "hello")


@pytest.fixture(scope="module")
def choir(installed: Installed) -> Iterator[str]:
    """URL of three groups in a row, the middle one twice."""
    installed.cluster.kubectl("-n", installed.namespace, "apply", "--validate=strict", "-f", str(CHOIR))
    wait_ready(installed.cluster, installed.namespace, "choir")
    yield url(installed.cluster, installed.namespace, "choir")
    installed.cluster.kubectl("-n", installed.namespace, "delete", "omnipipeline", "choir", "--ignore-not-found")


def test_the_charts_own_test_passes(installed: Installed) -> None:
    told = helm(installed.cluster, "test", RELEASE, "--namespace", SYSTEM, "--timeout", "240s", "--logs")
    assert "answers 'IT WORKS '" in told.stdout, told.stdout


def test_the_example_answers_curl_and_the_openai_client_through_its_service(hello: str) -> None:
    body = json.dumps({"model": "hello", "messages": [{"role": "user", "content": "good morning"}]})
    command = ["curl", "-sS", "--max-time", "20", f"{hello}/v1/chat/completions", "-d", body]
    command += ["-H", "content-type: application/json"]
    curled = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout)
    assert curled["choices"][0]["message"]["content"] == "GOOD!! MORNING!! "

    with openai.OpenAI(base_url=f"{hello}/v1", api_key="none", max_retries=0, timeout=20) as client:
        stream = client.chat.completions.create(
            model="hello", messages=[{"role": "user", "content": "one two three"}], stream=True
        )
        said = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(said) == "ONE!! TWO!! THREE!! "


def test_every_pod_talks_by_curve_and_none_holds_a_token(installed: Installed, hello: str) -> None:
    pods = read(installed.cluster, "-n", installed.namespace, "pods", "-l", f"{PIPELINE}=hello")["items"]
    assert len(pods) == 3
    for pod in pods:
        environment = {each["name"] for each in pod["spec"]["containers"][0]["env"]}
        assert "OMNI_CONTROL_KEY_FILE" in environment
        assert pod["spec"]["automountServiceAccountToken"] is False


def test_the_plugin_shows_a_pipeline_as_a_tree_and_its_logs(installed: Installed, hello: str) -> None:
    def plugin(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["python", "-m", "omnipipeline_operator.kubectl.cli", "-n", installed.namespace, *arguments]
        return subprocess.run(
            command, env=_with_venv(installed), cwd=REPOSITORY, capture_output=True, text=True, timeout=60
        )

    shown = plugin("status", "hello")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "Ready=True" in shown.stdout and "front  1/1 ready" in shown.stdout
    assert "ready: shout" in plugin("logs", "hello", "--stage", "shout").stdout
    assert "no stage 'nobody'; it has split, shout" in plugin("logs", "hello", "--stage", "nobody").stderr


async def test_both_replicas_serve_and_a_killed_pod_costs_no_unstreamed_request(
    installed: Installed, choir: str
) -> None:
    async with Load(choir) as load:
        await load.some(200)
        singers = load.singers()
        assert len(singers) == 2, singers
        victim = next(iter(singers))
        _kubectl(installed, "delete", "pod", victim, "--grace-period=0", "--force")
        await load.some(300)
    lost = [entry for entry in load.entries if entry.outcome != "ok" and not entry.streamed]
    assert lost == []
    # A stream whose first words are out can't be begun again: it ends with an error, and there are few.
    assert sum(load.failures().values()) <= 4, load.failures()
    wait_ready(installed.cluster, installed.namespace, "choir")


async def test_scaling_and_rolling_under_load_fail_no_request(installed: Installed, choir: str) -> None:
    async with Load(choir, clients=6, slow=2) as load:
        await load.some(50)
        for replicas in (3, 1):
            _patch(installed, "choir", {"processGroups": [{"name": "voices", "replicas": replicas}]})
            await _in_thread_until(lambda n=replicas: _ready_pods(installed, "choir", "voices") == n)
            await load.some(500)
        before = _pod_names(installed, "choir")
        _patch(installed, "choir", {"restartedAt": "2026-01-01T00:00:00Z"})
        await _in_thread_until(lambda: _pod_names(installed, "choir").isdisjoint(before))
        await load.some(max(200, REQUESTS - len(load.entries)))
    assert load.failures() == {}, load.failures()
    assert len(load.entries) >= REQUESTS
    assert len(load.singers()) >= 4, load.singers()  # two, a third, and the new revision's


def test_a_deleted_pipeline_leaves_nothing(installed: Installed, hello: str, choir: str) -> None:
    for name in ("hello", "choir"):
        _kubectl(installed, "delete", "omnipipeline", name, "--timeout=60s")
    wait_for("nothing is left", lambda: _left(installed) == [] or None, timeout_s=90)


def _left(installed: Installed) -> list[str]:
    items = read(installed.cluster, "-n", installed.namespace, KINDS, "-l", PIPELINE)["items"]
    return [f"{item['kind']}/{item['metadata']['name']}" for item in items]


async def _in_thread_until(condition: Callable[[], bool]) -> None:
    """Wait for the cluster while the load goes on."""
    deadline = time.monotonic() + 120
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline, "the cluster did not get there in 120 s"
        await asyncio.sleep(0.5)


def _pods(installed: Installed, name: str, unit: str | None = None) -> list[Any]:
    selector = f"{PIPELINE}={name}" + (f",omnipipeline.dev/unit={unit}" if unit else "")
    items: list[Any] = read(installed.cluster, "-n", installed.namespace, "pods", "-l", selector)["items"]
    return items


def _pod_names(installed: Installed, name: str) -> set[str]:
    return {str(pod["metadata"]["name"]) for pod in _pods(installed, name)}


def _ready_pods(installed: Installed, name: str, unit: str) -> int:
    """Ready pods; -1 while one is on its way out."""
    pods = _pods(installed, name, unit)
    if any("deletionTimestamp" in pod["metadata"] for pod in pods):
        return -1
    conditions = [pod["status"].get("conditions", ()) for pod in pods]
    return sum(any(one["type"] == "Ready" and one["status"] == "True" for one in each) for each in conditions)


def _patch(installed: Installed, name: str, spec: dict[str, object]) -> None:
    patch = json.dumps({"spec": spec})
    _kubectl(installed, "patch", "omnipipeline", name, "--type=merge", f"--patch={patch}")


def _kubectl(installed: Installed, *arguments: str) -> None:
    installed.cluster.kubectl("-n", installed.namespace, *arguments)


def _with_venv(installed: Installed) -> dict[str, str]:
    environment = installed.cluster.environment
    return {**environment, "PATH": f"{Path(sys.executable).parent}:{environment['PATH']}"}
