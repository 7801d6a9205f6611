"""A model of an S3 server: a Job whose pods are killed fetches it into a claim, and the pipeline serves it."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stage_runtime.weights import folders
from tests.cluster.installing import Installed, Volume, ask, node_address, pipeline, url, wait_for, wait_ready
from tests.patience import patience
from tests.weights import s3_server
from tests.weights.s3_server import BUCKET, S3

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600, func_only=True),
    # Each run has the same in processes: tests/weights (kills, ranges, damage), tests/operator (the Job, its share).
    pytest.mark.nightly,
]

NAME = "stored"
MODEL = f"s3://{BUCKET}/mine"
WEIGHTS = random.Random(0).randbytes(8 << 20)
FILES = {"config.json": b"{}", "weights/model.bin": WEIGHTS, "weights.txt": b"forty two"}
KEY, SECRET = "AKIAOFTHETEST", "hidden-from-all-but-the-job"
CODE = """
import os, pathlib
import stage_runtime as omni

def weights_text(model_path):
    known = pathlib.Path(model_path, "weights.txt").read_text()
    size = pathlib.Path(model_path, "weights", "model.bin").stat().st_size
    keys = sorted(name for name in os.environ if name.startswith("AWS_"))
    def run(payload):
        yield omni.Chunk(omni.Text(f"{known}, {size} bytes, keys: {keys}"))
    return run
"""
ANSWER = f"forty two, {len(WEIGHTS)} bytes, keys: []"


class Held:
    """The weights are sent up to a share, then their connection waits until `go_on`."""

    def __init__(self, s3: S3) -> None:
        self._s3 = s3
        self._path = f"/{BUCKET}/mine/weights/model.bin"
        self._goes_on = threading.Event()
        self._goes_on.set()
        self._limit = 0
        s3.between[self._path] = self._piece

    def at(self, nbytes: int) -> None:
        """Wait again, once so many bytes have been sent to all."""
        before, self._limit, self._goes_on = self._goes_on, nbytes, threading.Event()
        before.set()

    def go_on(self) -> None:
        self._goes_on.set()

    def _piece(self, piece: bytes) -> bytes:
        if self._s3.sent.get(self._path, 0) >= self._limit:
            self._goes_on.wait(patience(300))
        return piece


@pytest.fixture
def s3(installed: Installed) -> Iterator[S3]:
    with s3_server.serving(node_address(installed)) as s3:
        s3.clear()
        for path, content in FILES.items():
            s3.put(f"mine/{path}", content)
        keys = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
        variables = s3.environment(node_address(installed)) | keys
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "store"}, "stringData": variables}
        installed.kubectl("apply", "-f", "-", stdin=json.dumps(secret))
        yield s3
        installed.kubectl("delete", "secret", "store")


def test_a_job_that_is_killed_goes_on_and_the_pipeline_serves_what_it_fetched(
    installed: Installed, volume: Volume, s3: S3
) -> None:
    held = Held(s3)
    held.at(len(WEIGHTS) // 2)
    installed.apply(desired(volume))
    try:
        share = wait_for("the share is in the status", lambda: said(installed, "Prefetching", " % of "), timeout_s=240)
        assert share.endswith("% of 8.4 MB") and 0 < int(share.rpartition(": ")[2].partition(" ")[0]) <= 55, share
        shown = installed.plugin("status", NAME).stdout
        assert share in shown, shown

        [crashed] = job_pods(installed)
        kill(crashed)
        held.at(0)
        failed = wait_for("the crash is reported", lambda: said(installed, "PrefetchFailed"), timeout_s=60)
        assert "it is retried" in failed
        first = part(volume).stat().st_size
        assert 0 < first < len(WEIGHTS)

        held.at(3 * len(WEIGHTS) // 4)
        wait_for("another pod goes on", lambda: part(volume).stat().st_size > first, timeout_s=120)
        after = wait_for("its share is in the status", lambda: said(installed, "Prefetching", " % of "), timeout_s=60)
        assert "a pod before this one failed: " in after, after
        [running] = [each for each in job_pods(installed) if each["status"]["phase"] == "Running"]
        held.at(0)
        # Less than its grace period, which a program would use up that ignores SIGTERM.
        installed.kubectl("delete", "pod", running["metadata"]["name"], "--timeout=20s")
        second = part(volume).stat().st_size
        assert installed.pods(NAME, "reader") == [], "stages wait for their model"
    finally:
        held.go_on()
    wait_ready(installed.cluster, installed.namespace, NAME, timeout_s=240)
    assert s3.ranges("mine/weights/model.bin") == [
        f"bytes={start}-{len(WEIGHTS) - 1}" for start in (0, first, second)
    ], "nothing is fetched twice"
    assert s3.ranges("mine/weights.txt") == [f"bytes=0-{len(FILES['weights.txt']) - 1}"]
    assert {path: (model(volume) / path).read_bytes() for path in FILES} == FILES
    assert ask(url(installed.cluster, installed.namespace, NAME)) == ANSWER
    assert [each for each in (KEY, SECRET) if each in everything_said(installed)] == []

    # A file that is damaged on the disk is refused by a new pod, and fetched again with the Job.
    os.truncate(model(volume) / "weights" / "model.bin", 100)
    s3.asked.clear()
    [old] = installed.pods(NAME, "reader")
    installed.kubectl("delete", "pod", old["metadata"]["name"], "--timeout=60s")
    wait_for("the damage is reported", lambda: damage(installed), timeout_s=120)
    [job] = jobs(installed)
    installed.kubectl("delete", "job", job["metadata"]["name"])
    wait_for("the damaged file is fetched", lambda: s3.ranges("mine/weights/model.bin"), timeout_s=120)
    wait_ready(installed.cluster, installed.namespace, NAME, timeout_s=240)
    assert ask(url(installed.cluster, installed.namespace, NAME)) == ANSWER
    assert s3.ranges("mine/weights.txt") == []

    installed.kubectl("delete", "omnipipeline", NAME, "--cascade=foreground", "--timeout=120s")
    installed.kubectl("delete", "persistentvolumeclaim", f"{NAME}-models", "--timeout=60s")


def desired(volume: Volume) -> dict[str, Any]:
    cache = {"type": "PersistentVolumeClaim", "size": "10Mi", "storageClassName": volume.storage_class}
    stages: list[dict[str, object]] = [
        {"name": "reader", "process": "reader", "factory": "made:weights_text", "terminal": True},
    ]
    prefetch = {"enabled": True, "secretName": "store"}
    return pipeline(NAME, stages, code=CODE, modelPath=MODEL, modelCache=cache | {"prefetch": prefetch})


def said(installed: Installed, reason: str, words: str = "") -> str | None:
    """The message of Ready, once its reason is this one and the message has these words."""
    found = installed.condition(NAME, "Ready")
    message = str(found.get("message", ""))
    return message if found.get("reason") == reason and words in message else None


def damage(installed: Installed) -> str | None:
    message = str(installed.condition(NAME, "Ready").get("message", ""))
    return message if f"weights/model.bin: has 100 bytes, and {len(WEIGHTS)} were fetched" in message else None


def jobs(installed: Installed) -> list[dict[str, Any]]:
    return installed.all("jobs", f"omnipipeline.dev/pipeline={NAME}")


def job_pods(installed: Installed) -> list[dict[str, Any]]:
    [job] = jobs(installed)
    return installed.all("pods", f"batch.kubernetes.io/controller-uid={job['metadata']['uid']}")


def kill(pod: dict[str, Any]) -> None:
    """SIGKILL to what runs in the pod, as the kernel does where memory is short: the node is this machine."""
    named = pod["metadata"]["uid"].replace("-", "_"), pod["metadata"]["uid"]
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            cgroup, command = (folder / "cgroup").read_text(), (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if any(each in cgroup for each in named) and b"prefetch" in command:
            os.kill(int(folder.name), signal.SIGKILL)
            return
    raise AssertionError(f"no process of pod {pod['metadata']['name']} fetches")


def part(volume: Volume) -> Path:
    """The weights that have come so far."""
    [found] = volume.folder.rglob("*.parts/weights/model.bin")
    return found


def model(volume: Volume) -> Path:
    return folders.link(volume.folder, MODEL)


def everything_said(installed: Installed) -> str:
    """All objects of the namespace but the Secret, and the logs of the Job's pods that are left."""
    kinds = "omnipipelines,jobs,pods,deployments,configmaps,events"
    logs = [
        installed.kubectl("logs", each["metadata"]["name"], "--all-containers")
        for each in (*job_pods(installed), *installed.pods(NAME))
    ]
    return "\n".join([installed.kubectl("get", kinds, "-o", "json"), *logs])
