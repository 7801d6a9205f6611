"""Diagnostics of pods that do not start, by real kubelets; a pod that is taken out of its unit to be looked at."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.cluster.installing import Installed, pipeline, wait_for, wait_ready
from tests.cluster.load import Load

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900, func_only=True)]

CODE = """
import ctypes
import threading

def private():
    class RepositoryNotFoundError(Exception): pass
    hint = "If this is a private repository, make sure to pass a token\\\\n" * 100
    raise RepositoryNotFoundError("401 Client Error\\\\n\\\\nRepository Not Found\\\\n" + hint)

def crash():
    ctypes.string_at(0)

def hang():
    threading.Event().wait()
"""


def _stage(name: str, *following: str) -> dict[str, object]:
    stage: dict[str, object] = {"name": name, "process": name, "factory": f"made:{name}"}
    return stage | ({"next": list(following)} if following else {"terminal": True})


def _units(installed: Installed, name: str) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in installed.status(name).get("units", ())}


@pytest.mark.proves("failed-start")
def test_the_cause_of_a_crash_is_reported_and_a_hang_exceeds_the_startup_deadline(installed: Installed) -> None:
    stages = [_stage("private", "crash"), _stage("crash", "hang"), _stage("hang")]
    groups = [{"name": "hang", "startup": {"deadlineSeconds": 3}}]
    installed.apply(pipeline("ill", stages, code=CODE, processGroups=groups))
    desired = {
        "private": ("CrashLoopBackOff", "container stage: private: RepositoryNotFoundError: 401 Client Error"),
        "crash": ("CrashLoopBackOff", "(killed by SIGSEGV): Fatal Python error: Segmentation fault in string_at"),
        "hang": ("StartupDeadlineExceeded", " s while starting (hang: loading): no output, no processor time"),
    }

    def all_reported() -> bool:
        observed = _units(installed, "ill")
        return all(
            observed.get(name, {}).get("reason") == reason and text in observed[name]["message"]
            for name, (reason, text) in desired.items()
        )

    try:
        wait_for("all three are reported", all_reported, timeout_s=120)
        # Started again and again, it is reported in the same words.
        wait_for("each has been started again", lambda: _restarts(installed) >= 3, timeout_s=120)
        assert all_reported(), _units(installed, "ill")
    except AssertionError as error:
        raise AssertionError(f"{error}: {_units(installed, 'ill')}") from None
    finally:
        installed.kubectl("delete", "omnipipeline", "ill", "--wait=false")


def _restarts(installed: Installed) -> int:
    """Units whose container has been started again."""
    pods = [pod for unit in ("private", "crash", "hang") for pod in installed.pods("ill", unit)]
    return sum(each["restartCount"] > 0 for pod in pods for each in pod["status"].get("containerStatuses", ()))


def test_a_missing_mount_is_named_and_the_pod_starts_when_it_appears(installed: Installed) -> None:
    echo = "def only():\n    return lambda payload: payload.data\n"
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": {"other": "k"}}
    http = {"apiKeySecretRef": {"name": "keys", "key": "key"}}
    installed.apply(pipeline("needy", [_stage("only")], code=echo, coordinator={"http": http}))

    def reports(reason: str, text: str) -> bool:
        found = _units(installed, "needy").get("coordinator", {})
        return found.get("reason") == reason and text in found["message"]

    try:
        wait_for("the Secret is named", lambda: reports("ReferenceNotFound", "Secret keys"), timeout_s=30)
        installed.kubectl("apply", "-f", "-", stdin=json.dumps(secret))
        wait_for("its key is named", lambda: reports("FailedMount", "non-existent secret key: key"), timeout_s=60)
        installed.kubectl("patch", "secret", "keys", "--type=merge", "-p", '{"stringData":{"key":"k"}}')
        wait_ready(installed.cluster, installed.namespace, "needy")
    finally:
        installed.kubectl("delete", "omnipipeline/needy", "secret/keys", "--ignore-not-found", "--wait=false")


@pytest.mark.proves("pod-aside")
async def test_a_pod_taken_out_of_its_unit_gets_no_more_requests_and_goes_on_running(
    installed: Installed, choir: str
) -> None:
    def aside() -> list[dict[str, Any]]:
        [coordinator] = installed.pods("choir", "coordinator")
        status = httpx.get(f"http://{coordinator['status']['podIP']}:8081/status", timeout=10).json()
        return [each for each in status["instances"] if each["aside"]]

    # The unit would be away until its successor is ready with one replica; another test leaves one.
    installed.patch("choir", {"processGroups": [{"name": "voices", "replicas": 2}]})
    wait_for("two voices", lambda: len(installed.pods("choir", "voices")) == 2, timeout_s=60)
    await asyncio.to_thread(wait_ready, installed.cluster, installed.namespace, "choir")
    async with Load(choir) as load:
        await load.some(100)
        pod = installed.pods("choir", "voices")[0]
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        await asyncio.to_thread(installed.kubectl, "label", "pod", name, "omnipipeline.dev/unit=debug", "--overwrite")
        async with asyncio.timeout(60):
            while not await asyncio.to_thread(aside):
                await asyncio.sleep(0.2)
        [instance] = aside()
        assert pod["status"]["podIP"] in instance["endpoint"]
        await load.some(20)  # those that were bound to it before
        served = aside()[0]["bound_total"]
        await load.some(200)
        assert aside()[0]["bound_total"] == served
    assert load.failures() == {}, load.failures()
    [still] = [each for each in installed.pods("choir") if each["metadata"]["name"] == name]
    assert still["metadata"]["uid"] == uid and "running" in still["status"]["containerStatuses"][0]["state"]
    wait_ready(installed.cluster, installed.namespace, "choir")
    installed.kubectl("delete", "pod", name, "--wait=false")
