"""Models in a directory of a node: two pods fetch one once, whoever is killed goes on, and namespaces may refuse it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stage_runtime.weights import folders
from tests.cluster.installing import (
    CHART,
    RELEASE,
    SYSTEM,
    Installed,
    ask,
    helm,
    node_address,
    pipeline,
    url,
    wait_for,
    wait_ready,
)
from tests.cluster.test_stored_models import ANSWER, CODE, FILES, MODEL, WEIGHTS, Held, kill
from tests.weights import s3_server
from tests.weights.s3_server import S3

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600, func_only=True),
    # Each run has the same in processes (tests/weights), and the pods as tables (tests/operator/test_children.py).
    pytest.mark.nightly,
]

NAME = "near"
ENFORCE = "pod-security.kubernetes.io/enforce"


@pytest.fixture
def folder(installed: Installed, tmp_path: Path) -> Iterator[Path]:
    """The nodes' directory, which the chart's DaemonSet has made; the node is this machine."""
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)
    folder, cluster = tmp_path / "models", installed.cluster
    cluster.kubectl("label", "--overwrite", "namespace", SYSTEM, f"{ENFORCE}=privileged")
    options = ["--namespace", SYSTEM, "--reuse-values", "--wait", "--timeout", "120s"]
    try:
        given = ["--set", f"nodeModels.path={folder}", "--set", "nodeModels.bound=20Mi"]
        given += ["--set", "nodeModels.nodeSelector.kubernetes\\.io/hostname=" + node_name(installed)]
        helm(cluster, "upgrade", RELEASE, str(CHART), *options, *given)
        owner = wait_for("the directory is there", lambda: folder.exists() and folder.stat(), timeout_s=60)
        wait_for("it is the pods'", lambda: folder.stat().st_uid == 65532, timeout_s=60)
        assert owner
        yield folder
    finally:
        helm(cluster, "upgrade", RELEASE, str(CHART), *options, "--set", "nodeModels.path=")
        cluster.kubectl("label", "--overwrite", "namespace", SYSTEM, f"{ENFORCE}=restricted")


def node_name(installed: Installed) -> str:
    """The node that runs pods: simulated ones have no directories."""
    [name] = [each["metadata"]["name"] for each in installed.all("nodes") if "fake" not in each["metadata"]["labels"]]
    return str(name)


@pytest.fixture
def near(installed: Installed) -> Iterator[Installed]:
    """A namespace whose pods may have directories of the node."""
    name = "omni-e2e-near"
    installed.cluster.kubectl("create", "namespace", name)
    yield replace(installed, namespace=name)
    installed.cluster.kubectl("delete", "namespace", name, "--timeout=120s")


@pytest.fixture
def s3(installed: Installed, near: Installed) -> Iterator[S3]:
    with s3_server.serving(node_address(installed)) as s3:
        s3.clear()
        for path, content in FILES.items():
            s3.put(f"mine/{path}", content)
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "store"}}
        variables = s3.environment(node_address(installed))
        for each in (near, installed):
            each.kubectl("apply", "-f", "-", stdin=json.dumps({**secret, "stringData": variables}))
        yield s3
        installed.kubectl("delete", "secret", "store")


def desired(name: str, replicas: int) -> dict[str, Any]:
    stages: list[dict[str, object]] = [
        {"name": "reader", "process": "reader", "factory": "made:weights_text", "terminal": True},
    ]
    cache = {"type": "Node", "prefetch": {"enabled": True, "secretName": "store"}}
    groups = [{"name": "reader", "replicas": replicas}]
    return pipeline(name, stages, code=CODE, modelPath=MODEL, modelCache=cache, processGroups=groups)


def said(installed: Installed, name: str, reason: str, words: str = "") -> str | None:
    found = installed.condition(name, "Ready")
    message = str(found.get("message", ""))
    return message if found.get("reason") == reason and words in message else None


def running(pod: dict[str, Any]) -> bool:
    states = [each.get("state", {}) for each in pod["status"].get("initContainerStatuses", ())]
    return any("running" in each for each in states)


def test_pods_of_a_node_share_one_download_which_a_kill_does_not_begin_anew(
    installed: Installed, near: Installed, folder: Path, s3: S3
) -> None:
    held = Held(s3)
    held.at(len(WEIGHTS) // 2)
    near.apply(desired(NAME, 2))
    try:
        share = wait_for("the share is in the status", lambda: said(near, NAME, "Prefetching", " % of "), timeout_s=240)
        assert f"fetches {MODEL} to its node: " in share, share
        wait_for("both wait", lambda: [running(each) for each in near.pods(NAME, "reader")] == [True] * 2, timeout_s=60)
        [part] = folder.rglob("*.parts/weights/model.bin")
        first = part.stat().st_size
        assert 0 < first < len(WEIGHTS)
        for pod in near.pods(NAME, "reader"):
            kill(pod)
    finally:
        held.go_on()
        held.at(len(WEIGHTS) * 9)
    wait_ready(near.cluster, near.namespace, NAME, timeout_s=240)
    begun = [int(each.removeprefix("bytes=").partition("-")[0]) for each in s3.ranges("mine/weights/model.bin")]
    assert len(begun) == 2 and begun[0] == 0 and begun[1] >= first, "one download, gone on with after the kill"
    assert {path: (folders.link(folder, MODEL) / path).read_bytes() for path in FILES} == FILES
    assert ask(url(near.cluster, near.namespace, NAME)) == ANSWER

    # Another pipeline with the model on this node fetches nothing, also while the store does not answer.
    s3.asked.clear()
    near.apply(desired("nearer", 1))
    wait_ready(near.cluster, near.namespace, "nearer", timeout_s=240)
    assert s3.asked == []
    assert ask(url(near.cluster, near.namespace, "nearer")) == ANSWER
    [pod, *_] = near.pods(NAME, "reader")
    near.kubectl("exec", pod["metadata"]["name"], "--", "python3", "-c", READ_ONLY)

    # A namespace whose pods must be restricted refuses the directory, and the status says so.
    installed.apply(desired("strict", 1))
    wait_for("it is refused", lambda: said(installed, "strict", "PodSecurity", "hostPath"), timeout_s=120)
    installed.kubectl("delete", "omnipipeline", "strict", "--cascade=foreground", "--timeout=120s")
    for name in (NAME, "nearer"):
        near.kubectl("delete", "omnipipeline", name, "--cascade=foreground", "--timeout=120s")
    assert os.listdir(folder / "s3"), "the model outlives its pipelines"


READ_ONLY = """
try:
    open("/models/x", "w")
except OSError as error:
    assert error.errno == 30, error
else:
    raise SystemExit("a stage writes to the node's directory")
"""
