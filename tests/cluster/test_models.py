"""The model cache: a claim that a Job fills before pods start, from a hub that the test plays."""

from __future__ import annotations

import pytest

from tests.cluster import hub
from tests.cluster.hub import Hub
from tests.cluster.installing import Installed, Volume, ask, node_address, pipeline, url, wait_for, wait_ready

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600, func_only=True)]

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


def test_pods_wait_for_the_model_and_a_failed_fetch_is_reported_and_retried(
    installed: Installed, volume: Volume
) -> None:
    cluster, namespace = installed.cluster, installed.namespace
    cache = {"type": "PersistentVolumeClaim", "size": "10Mi", "storageClassName": volume.storage_class}
    stages: list[dict[str, object]] = [
        {"name": "reader", "process": "reader", "factory": "made:weights_text", "terminal": True},
    ]
    with hub.serving(node_address(installed)) as source:
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
