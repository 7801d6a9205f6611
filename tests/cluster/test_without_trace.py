"""Nothing is left after the pipelines and then the release are deleted; pods serve without an operator."""

from __future__ import annotations

import pytest

from tests.cluster.conftest import CHOIR, CRD
from tests.cluster.installing import RELEASE, SYSTEM, Installed, ask, helm, objects, url, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600, func_only=True)]

#: Every namespace has them.
OF_A_NAMESPACE = {"configmap/kube-root-ca.crt", "serviceaccount/default"}


def test_a_deleted_pipeline_leaves_nothing(installed: Installed, choir: str) -> None:
    installed.kubectl("delete", "omnipipeline", "choir", "--timeout=60s")
    wait_for("nothing is left", lambda: not _about(installed, "choir"), timeout_s=300)


def test_an_uninstalled_release_leaves_the_definition_and_pipelines_that_serve(
    installed: Installed, hello: str
) -> None:
    cluster, pods = installed.cluster, installed.uids("hello")
    helm(cluster, "uninstall", RELEASE, "--namespace", SYSTEM, "--wait", "--timeout", "120s")
    wait_for("nothing of ours runs", lambda: objects(cluster, SYSTEM) <= OF_A_NAMESPACE, timeout_s=120)
    left = {each for each in objects(cluster) - installed.before if "omni" in each}
    assert left == {
        f"customresourcedefinition.apiextensions.k8s.io/{CRD}",
        "apiservice.apiregistration.k8s.io/v1alpha1.omnipipeline.dev",  # Kubernetes' own, one for each group
    }
    assert ask(hello, "still here") == "STILL!! HERE!! "
    assert installed.uids("hello") == pods
    installed.kubectl("delete", "omnipipeline", "hello", "--timeout=60s")
    _wait_until_empty(installed)


def test_what_the_plugin_prints_serves_without_an_operator(installed: Installed) -> None:
    printed = installed.plugin("manifests", "-f", str(CHOIR), "--image", installed.images.stage, "--with-key")
    assert printed.returncode == 0, printed.stderr
    installed.kubectl("apply", "-f", "-", stdin=printed.stdout)
    installed.kubectl("wait", "deployments", "--all", "--for=condition=Available", "--timeout=55s")
    here = url(installed.cluster, installed.namespace, "choir")
    assert ask(here, "one two").startswith("ONE TWO -- choir-voices-")
    installed.kubectl("delete", "--wait=false", "-f", "-", stdin=printed.stdout)
    _wait_until_empty(installed)


def _wait_until_empty(installed: Installed) -> None:
    """The namespace holds nothing that a test or a pipeline has made."""

    def left() -> frozenset[str]:
        return objects(installed.cluster, installed.namespace) - OF_A_NAMESPACE

    wait_for(lambda: f"nothing is left, but there is {sorted(left())}", lambda: not left(), timeout_s=300)


def _about(installed: Installed, name: str) -> list[str]:
    """Everything in the namespace that is named after a pipeline."""
    live = objects(installed.cluster, installed.namespace)
    return [each for each in live if each.partition("/")[2].startswith(name)]
