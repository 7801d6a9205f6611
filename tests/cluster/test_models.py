"""The model cache: a claim that a Job fills before pods start, from a hub that the test plays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import hub
from tests.cluster.hub import Hub
from tests.cluster.installing import Installed, ask, pipeline, url, wait_for, wait_ready

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600, func_only=True)]

CLASS = "by-hand"
CODE = """
import stage_runtime as omni

def weights_text(model_path, model_revision):
    from huggingface_hub import hf_hub_download
    weights = hf_hub_download(model_path, "weights.txt", revision=model_revision, local_files_only=True)
    with open(weights) as file:
        known = file.read()
    def run(payload):
        yield omni.Chunk(omni.Text(known))
    return run
"""


@pytest.fixture
def volume(installed: Installed, tmp_path: Path) -> Iterator[str]:
    """A volume on this machine, which is the node; the cluster makes none by itself."""
    folder = tmp_path / "models"
    folder.mkdir()
    folder.chmod(0o777)
    for parent in tmp_path.parents[:2]:
        parent.chmod(0o755)
    tmp_path.chmod(0o755)
    spec = {
        "capacity": {"storage": "10Mi"},
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": CLASS,
        "hostPath": {"path": str(folder)},
    }
    manifest = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": CLASS}, "spec": spec}
    installed.cluster.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))
    yield CLASS
    installed.cluster.kubectl("delete", "persistentvolume", CLASS, "--wait=false")


def test_pods_wait_for_the_model_and_a_failed_fetch_is_reported_and_retried(installed: Installed, volume: str) -> None:
    cluster, namespace = installed.cluster, installed.namespace
    [node] = [each for each in installed.all("nodes") if "fake" not in each["metadata"]["labels"]]
    [address] = [each["address"] for each in node["status"]["addresses"] if each["type"] == "InternalIP"]
    cache = {"type": "PersistentVolumeClaim", "size": "10Mi", "storageClassName": volume}
    stages: list[dict[str, object]] = [
        {"name": "reader", "process": "reader", "factory": "made:weights_text", "terminal": True},
    ]
    with hub.serving(address) as source:
        desired = pipeline(
            "cached",
            stages,
            code=CODE,
            modelPath=hub.MODEL,
            modelRevision=hub.REVISION,
            modelCache=cache | {"prefetch": {"enabled": True}},
            envDefaults={"HF_HUB_OFFLINE": "1"},
            env=[{"name": "HF_ENDPOINT", "value": source.url}],
        )
        installed.apply(desired)
        _fails_then_works(installed, source)
        wait_ready(cluster, namespace, "cached")
        assert sorted(source.downloads) == sorted(hub.FILES)
    assert ask(url(cluster, namespace, "cached")) == hub.FILES["weights.txt"].decode()
    shown = installed.plugin("status", "cached").stdout
    assert "prefetch of the model" in shown and "  done" in shown, shown

    installed.kubectl("delete", "omnipipeline", "cached", "--cascade=foreground", "--timeout=120s")
    [claim] = [each for each in installed.all("persistentvolumeclaims") if each["metadata"]["name"] == "cached-models"]
    assert claim["status"]["phase"] == "Bound" and "ownerReferences" not in claim["metadata"]
    installed.kubectl("delete", "persistentvolumeclaim", "cached-models", "--timeout=60s")


def _fails_then_works(installed: Installed, source: Hub) -> None:
    def failed() -> str | None:
        found = installed.condition("cached", "Ready")
        return found["message"] if found.get("reason") == "PrefetchFailed" else None

    message = wait_for("the failure is reported", failed, timeout_s=300)
    assert f"cannot fetch {hub.MODEL}: RepositoryNotFoundError" in message and "it is retried" in message
    assert installed.pods("cached", "reader") == []
    source.has_model = True
