"""kubectl remembers which versions a cluster serves: each cluster of the tests has a memory of its own."""

from __future__ import annotations

from tests import cluster_kit


def test_clusters_of_one_address_share_nothing_that_kubectl_remembers() -> None:
    found = [cluster_kit.cluster_of(f"export KUBECONFIG={each}/admin.conf PATH={each}/bin:$PATH") for each in "ab"]
    assert [each.environment.get("KUBECACHEDIR") for each in found] == ["a/kubectl-cache", "b/kubectl-cache"]
