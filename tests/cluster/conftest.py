"""The chart's release that the tests of this folder share, and a namespace for their pipelines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster_kit import Cluster
from installing import CHART, RELEASE, SYSTEM, Images, Installed, build_images, helm, image_values, read, wait_for

CRD = "omnipipelines.omnipipeline.dev"


@pytest.fixture(scope="session")
def images(node_cluster: Cluster) -> Images:
    return build_images()


@pytest.fixture(scope="session")
def installed(node_cluster: Cluster, images: Images) -> Iterator[Installed]:
    """Helm install into a fresh namespace; afterwards helm uninstall leaves nothing but the CRD."""
    cluster, namespace = node_cluster, "omni-e2e"
    # What the pods may do is held to Kubernetes' strictest standard.
    restricted = "pod-security.kubernetes.io/enforce=restricted"
    # A fresh cluster has no definition of ours; one that other tests applied by hand is not helm's to take over.
    cluster.kubectl("delete", "crd", CRD, "--ignore-not-found", "--timeout=60s")
    for name in (SYSTEM, namespace):
        cluster.kubectl("delete", "namespace", name, "--ignore-not-found", "--timeout=60s")
        cluster.kubectl("create", "namespace", name)
        cluster.kubectl("label", "namespace", name, restricted)
    options = ["--namespace", SYSTEM, *image_values(images), "--wait", "--timeout", "180s"]
    try:
        done = helm(cluster, "install", RELEASE, str(CHART), *options, check=False)
        assert done.returncode == 0, f"{done.stderr}\n{_last_words(cluster)}"
        yield Installed(cluster=cluster, namespace=namespace, images=images)
    finally:
        helm(cluster, "uninstall", RELEASE, "--namespace", SYSTEM, "--wait")
        left = wait_for("the operator's pods are gone", lambda: _without_pods(cluster), timeout_s=60)
        cluster.kubectl("delete", "namespace", namespace, SYSTEM, "--timeout=60s")
    assert left == "nothing"
    assert cluster.kubectl("get", "crd", CRD, "-o", "name").stdout


def _last_words(cluster: Cluster) -> str:
    """What the operator said before it ended."""
    selector = f"app.kubernetes.io/instance={RELEASE}"
    arguments = ["-n", SYSTEM, "logs", "-l", selector, "--tail=30"]
    return "".join(cluster.kubectl(*arguments, *more, check=False).stdout for more in ((), ("--previous",)))


def _without_pods(cluster: Cluster) -> str | None:
    kinds = "deployments,pods,configmaps,serviceaccounts,roles,rolebindings,networkpolicies"
    labelled = read(cluster, "-n", SYSTEM, kinds, "-l", f"app.kubernetes.io/instance={RELEASE}")["items"]
    cluster_wide = read(cluster, "clusterroles,clusterrolebindings", "-l", f"app.kubernetes.io/instance={RELEASE}")
    return None if labelled or cluster_wide["items"] else "nothing"
