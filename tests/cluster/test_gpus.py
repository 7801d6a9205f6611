"""GPUs as Kubernetes gives them out, and what is said of pods that find none or do not last.

The kit's node advertises four devices that do not exist: pods get their ids, and run on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.installing import Installed, ask, pipeline, url, wait_for, wait_ready

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600, func_only=True)]

CODE = """
import os
import stage_runtime as omni

def first():
    def run(payload):
        with open("/models/left", "w") as file:
            file.write("shared")
        return {"host": os.uname().nodename, "pid": os.getpid()}
    return run

def last():
    def run(payload):
        with open("/models/left") as file:
            words = [file.read(), os.environ["NVIDIA_VISIBLE_DEVICES"]]
        words += [payload.data["host"], os.uname().nodename, payload.data["pid"], os.getpid()]
        yield omni.Chunk(omni.Text(" ".join(map(str, words))))
    return run

def broken():
    raise RuntimeError("the weights are not there")
"""


def _stages(gpus: list[int]) -> list[dict[str, object]]:
    """Two groups that share GPU 0; the first may want more."""
    first: dict[str, object] = {"name": "first", "process": "first", "factory": "made:first", "next": ["last"]}
    first |= {"gpu": gpus, "tpSize": len(gpus), "gpuMemory": {"fraction": 0.4}}
    last: dict[str, object] = {"name": "last", "process": "last", "factory": "made:last", "terminal": True}
    return [first, last | {"gpu": [0], "gpuMemory": {"fraction": 0.4}}]


def _duet(gpus: list[int]) -> dict[str, Any]:
    cache = {"type": "EmptyDir", "size": "1Mi"}
    return pipeline("duet", _stages(gpus), code=CODE, modelCache=cache)


@pytest.fixture(autouse=True)
def gone(installed: Installed) -> Iterator[None]:
    yield
    installed.kubectl("delete", "omnipipeline", "duet", "frail", "--ignore-not-found", "--wait=false")


def test_groups_that_share_a_gpu_share_a_pod_and_a_surge_without_room_is_explained(installed: Installed) -> None:
    installed.apply(_duet([0]))
    wait_ready(installed.cluster, installed.namespace, "duet")
    [unit] = [each for each in installed.status("duet")["units"] if each["name"] != "coordinator"]
    [pod] = installed.pods("duet", unit["name"])
    [container] = pod["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    shared, device, *hosts, one, other = ask(url(installed.cluster, installed.namespace, "duet")).split()
    assert shared == "shared" and device.count("GPU-") == 1
    assert hosts == [pod["metadata"]["name"]] * 2 and one != other

    installed.apply(_duet([0, 1, 2, 3]))
    condition = wait_for("no room", lambda: _reason(installed, "Progressing", "InsufficientCapacity"), timeout_s=120)
    assert "Insufficient nvidia.com/gpu" in condition["message"] and "Recreate" in condition["message"]
    assert "Insufficient nvidia.com/gpu" in installed.condition("duet", "Scheduled")["message"]
    assert installed.condition("duet", "Available")["status"] == "True"
    shown = installed.plugin("status", "duet")
    assert shown.returncode == 1 and shown.stdout.count("Insufficient nvidia.com/gpu") >= 2, shown.stdout
    assert ask(url(installed.cluster, installed.namespace, "duet")).startswith("shared ")

    installed.apply(_duet([0]))
    wait_ready(installed.cluster, installed.namespace, "duet")
    assert pod["metadata"]["uid"] in installed.uids("duet")


def test_a_crashing_pod_and_one_without_memory_are_reported_with_their_cause(installed: Installed) -> None:
    stages: list[dict[str, object]] = [
        {"name": "first", "process": "front", "factory": "made:broken", "next": ["last"]},
        {"name": "last", "process": "back", "factory": "made:last", "terminal": True},
    ]
    little = {"requests": {"memory": "16Mi"}, "limits": {"memory": "48Mi"}}
    groups = [{"name": "back", "resources": little}]
    installed.apply(pipeline("frail", stages, code=CODE, processGroups=groups))

    def reported() -> dict[str, tuple[str, str]]:
        units = installed.status("frail").get("units", ())
        return {each["name"]: (each.get("reason", ""), each.get("message", "")) for each in units}

    desired = {"front": "CrashLoopBackOff", "back": "OOMKilled"}

    def both() -> dict[str, tuple[str, str]] | None:
        observed = reported()
        reasons = {name: reason for name, (reason, _) in observed.items()}
        return observed if reasons | desired == reasons else None

    try:
        observed = wait_for("both are reported", both, timeout_s=240)
    except AssertionError as error:
        raise AssertionError(f"{error}: {reported()}") from None
    assert "RuntimeError: the weights are not there" in observed["front"][1]
    assert "resources.limits.memory" in observed["back"][1]
    ready = installed.condition("frail", "Ready")  # one of the two, whichever is worse just now
    assert ready["status"] == "False" and ready["message"].startswith(("unit front: ", "unit back: ")), ready


def _reason(installed: Installed, kind: str, reason: str) -> dict[str, Any] | None:
    found = installed.condition("duet", kind)
    return found if found.get("reason") == reason else None
