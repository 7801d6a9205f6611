"""A cluster with fake nodes, the CRD and the operator's RBAC; a namespace and an operator per test."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import cluster_objects
from tests.cluster_kit import REPOSITORY, Cluster, kit
from tests.operator import running

_numbers = itertools.count()


@pytest.fixture(scope="session")
def prepared(api_server: Cluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[Cluster, Path]:
    """The cluster as `helm install` leaves it, without the operator's pod; and a folder."""
    program = kit()
    assert program is not None
    api_server.kubectl(
        "apply", "--server-side", "--force-conflicts", "-f", str(REPOSITORY / "crds" / "omnipipelines.yaml")
    )
    crd = "crd/omnipipelines.omnipipeline.dev"
    # Just after the CRD is made it has no conditions, which kubectl takes for an error.
    wait = ("wait", "--for=condition=Established", crd, "--timeout=50s")
    running.eventually(lambda: api_server.kubectl(*wait, check=False).returncode == 0, what="the CRD is established")
    api_server.kubectl("create", "namespace", running.SYSTEM, check=False)
    chart = str(REPOSITORY / "charts" / "omnipipeline")
    templates = [
        "--show-only",
        "templates/aggregate.yaml",
        "--show-only",
        "templates/rbac.yaml",
        "--show-only",
        "templates/serviceaccount.yaml",
    ]
    rendered = subprocess.run(
        # The release has the right to PodGroups, which tests of the kind need.
        ["helm", "template", "omni", chart, "-n", running.SYSTEM, "--set", "podGroupScheduler=any", *templates],
        env=api_server.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    api_server.kubectl("-n", running.SYSTEM, "apply", "-f", "-", stdin=rendered.stdout)
    subprocess.run(
        [program, "fakenodes", running.FAKE_GROUP, "3", "4"],
        env=api_server.environment,
        capture_output=True,
        timeout=120,
        check=True,
    )
    return api_server, tmp_path_factory.mktemp("operator")


@pytest.fixture
def kube(prepared: tuple[Cluster, Path]) -> Iterator[running.Kube]:
    """A namespace for one test."""
    cluster, _ = prepared
    name = f"omni-test-{next(_numbers)}"
    if cluster_objects.of(cluster.kubeconfig).get("namespace", name) is not None:  # of an earlier run
        cluster.kubectl("delete", "namespace", name, "--ignore-not-found", "--timeout=50s")
    cluster.kubectl("create", "namespace", name)
    yield running.Kube(cluster=cluster, namespace=name)
    cluster.kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found")


@pytest.fixture
def operator(prepared: tuple[Cluster, Path], kube: running.Kube) -> Iterator[running.OperatorProcess]:
    """An operator that watches this test's namespace, not started yet; its log is shown when the test fails."""
    cluster, folder = prepared
    log = folder / f"{kube.namespace}.log"
    process = running.OperatorProcess(
        environment=running.environment(cluster, folder, namespaces=kube.namespace), log=log
    )
    try:
        yield process
    finally:
        process.close()
        print(log.read_text() if log.exists() else "the operator never started")


@pytest.fixture
def audit(prepared: tuple[Cluster, Path]) -> running.Audit:
    """The writes of the operator's service account from here on."""
    cluster, _ = prepared
    path = cluster.kubeconfig.parent / "logs" / "audit.log"
    return running.Audit(path, f"system:serviceaccount:{running.SYSTEM}:{running.ACCOUNT}")


@pytest.fixture
def election(prepared: tuple[Cluster, Path]) -> Iterator[running.Election]:
    """The operators' Lease; deleted before and after the test."""
    found = running.Election(prepared[0])
    found.close()
    yield found
    found.close()
