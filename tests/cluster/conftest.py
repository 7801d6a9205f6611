"""The chart's release and the pipelines that the tests of this folder share.

They run in the order of the files: what serves, GPUs, models, a lost node, profiles, relays between pods, the release's
upgrade, a roll to another protocol, foreign pods, and at the end what is left after deleting everything.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.installing import (
    CHART,
    PIPELINE,
    RELEASE,
    SYSTEM,
    Images,
    Installed,
    Volume,
    build_images,
    helm,
    image_values,
    objects,
    pipeline,
    url,
    wait_for,
    wait_ready,
)
from tests.cluster_kit import REPOSITORY, Cluster, kit

CRD = "omnipipelines.omnipipeline.dev"
HELLO = REPOSITORY / "examples" / "hello" / "pipeline.yaml"
DOOMED, SPARE = "doomed", "spare"  # groups of the kit's simulated nodes
CHOIR = REPOSITORY / "tests" / "cluster" / "choir.yaml"
#: Objects that tests of several files use; every namespace has the last one.
SHARED = {"hello", "choir", "bereft", "kube-root-ca.crt"}
RELEASED = pytest.StashKey[Installed]()


@pytest.fixture(scope="session")
def images(node_cluster: Cluster) -> Images:
    return build_images()


@pytest.fixture(scope="session")
def installed(request: pytest.FixtureRequest, node_cluster: Cluster, images: Images) -> Iterator[Installed]:
    """Helm install into a fresh namespace."""
    cluster, namespace = node_cluster, "omni-e2e"
    # The pods are held to Kubernetes' strictest standard.
    restricted = "pod-security.kubernetes.io/enforce=restricted"
    # A fresh cluster has no definition of ours; one that other tests applied by hand is not helm's to take over.
    cluster.kubectl("delete", "crd", CRD, "--ignore-not-found", "--timeout=60s")
    _end_namespaces(cluster, SYSTEM, namespace)
    for name in (SYSTEM, namespace):
        cluster.kubectl("create", "namespace", name)
        cluster.kubectl("label", "namespace", name, restricted)
    before = objects(cluster)
    options = ["--namespace", SYSTEM, *image_values(images), "--wait", "--timeout", "300s"]
    try:
        done = helm(cluster, "install", RELEASE, str(CHART), *options, check=False)
        assert done.returncode == 0, f"{done.stderr}\n{_last_words(cluster)}"
        release = Installed(cluster=cluster, namespace=namespace, images=images, before=before)
        request.session.stash[RELEASED] = release
        yield release
    finally:
        helm(cluster, "uninstall", RELEASE, "--namespace", SYSTEM, "--wait", "--ignore-not-found")
        _end_namespaces(cluster, namespace, SYSTEM)


@pytest.fixture(scope="module", autouse=True)
def _nothing_stays_of_a_failed_module(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that fails leaves its objects; the next files' tests need an empty namespace."""
    failed = request.session.testsfailed
    yield
    release = request.session.stash.get(RELEASED, None)
    if release is None or request.session.testsfailed == failed:
        return
    for kind in ("omnipipelines", "secrets", "configmaps", "persistentvolumeclaims", "pods"):
        for found in release.all(kind):
            name = found["metadata"]["name"]
            if "ownerReferences" not in found["metadata"] and name not in SHARED:
                release.kubectl("delete", kind, name, "--ignore-not-found", "--timeout=60s")


@pytest.fixture(scope="session")
def hello(installed: Installed) -> str:
    """URL of the example, applied as it is in the repository."""
    return _applied(installed, "hello", str(HELLO))


@pytest.fixture(scope="session")
def choir(installed: Installed) -> str:
    """URL of three groups in a row, the middle one twice."""
    return _applied(installed, "choir", str(CHOIR))


@pytest.fixture
def volume(installed: Installed, tmp_path: Path) -> Iterator[Volume]:
    """A volume on this machine, which is the node; the cluster makes none by itself."""
    folder = tmp_path / "models"
    folder.mkdir()
    folder.chmod(0o777)
    for parent in tmp_path.parents[:2]:
        parent.chmod(0o755)
    tmp_path.chmod(0o755)
    name = "by-hand"
    spec = {
        "capacity": {"storage": "10Mi"},
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": name,
        "hostPath": {"path": str(folder)},
    }
    manifest = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec}
    installed.cluster.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))
    yield Volume(storage_class=name, folder=folder)
    installed.cluster.kubectl("delete", "persistentvolume", name, "--wait=false")


@pytest.fixture(scope="session")
def lost_node_pipeline(installed: Installed) -> Iterator[str]:
    """A pipeline whose node has just stopped answering; Kubernetes needs two minutes to react.

    The nodes are simulated: the cluster and the operator are tested, and no container runs. Simulated nodes of other
    tests are deleted first: where the cluster was started a second time they are lost, too, and Kubernetes evicts
    nothing while more than two nodes and 55 % of them are.
    """
    installed.cluster.kubectl("delete", "nodes", "-l", "fake", "--ignore-not-found")
    _kit("fakenodes", DOOMED, "1", "0")
    _kit("fakenodes", SPARE, "1", "0")
    stages: list[dict[str, object]] = [{"name": "only", "process": "only", "factory": "made:only", "terminal": True}]
    tolerated = [{"key": "fake", "operator": "Exists", "effect": "NoSchedule"}]
    either = [{"matchExpressions": [{"key": "fake", "operator": "In", "values": [DOOMED, SPARE]}]}]
    first = {"matchExpressions": [{"key": "fake", "operator": "In", "values": [DOOMED]}]}
    affinity = {
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": either},
        "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "preference": first}],
    }
    placed = {"tolerations": tolerated, "affinity": {"nodeAffinity": affinity}}
    beside = {"tolerations": tolerated, "nodeSelector": {"fake": SPARE}}
    name = "bereft"
    desired = pipeline(
        name, stages, code="", processGroups=[{"name": "only", "placement": placed}], coordinator={"placement": beside}
    )
    try:
        installed.apply(desired)
        wait_ready(installed.cluster, installed.namespace, name)
        [pod] = installed.pods(name, "only")
        assert pod["spec"]["nodeName"] == f"{DOOMED}-1"
        _kit("losenodes", DOOMED)
        yield name
    finally:
        delete_lost_node_pipeline(installed, name)


def delete_lost_node_pipeline(installed: Installed, name: str) -> None:
    """Remove the pipeline of `lost_node_pipeline` and its nodes, if they are still there."""
    if not installed.cluster.kubectl("get", "nodes", f"{DOOMED}-1", "--ignore-not-found", "-o", "name").stdout:
        return
    installed.kubectl("delete", "omnipipeline", name, "--wait=false", "--ignore-not-found")

    def gone() -> bool:
        """Delete by force: no kubelet can report that the lost node's pod has ended."""
        mine = ("-l", f"{PIPELINE}={name}")
        installed.kubectl("delete", "pods", *mine, "--grace-period=0", "--force")
        return not installed.kubectl("get", "deployments,replicasets,pods", *mine, "-o", "name")

    wait_for(f"{name} is gone", gone, timeout_s=120)
    _kit("losenodes", SPARE)
    installed.cluster.kubectl("delete", "nodes", f"{DOOMED}-1", f"{SPARE}-1", "--ignore-not-found")


def _kit(*arguments: str) -> None:
    program = kit()
    assert program is not None, "a lost node needs the kit ($OMNI_CLUSTER_KIT)"
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"


def _applied(installed: Installed, name: str, file: str) -> str:
    installed.kubectl("apply", "--validate=strict", "-f", file)
    wait_ready(installed.cluster, installed.namespace, name)
    return url(installed.cluster, installed.namespace, name)


def _end_namespaces(cluster: Cluster, *namespaces: str) -> None:
    """Delete those that are there; their pods have their time to drain."""
    cluster.kubectl("delete", "namespace", *namespaces, "--ignore-not-found", "--wait=false")

    def gone() -> bool:
        return not cluster.kubectl("get", "namespace", *namespaces, "--ignore-not-found", "-o", "name").stdout

    wait_for(f"{', '.join(namespaces)} are gone", gone, timeout_s=400)


def _last_words(cluster: Cluster) -> str:
    """The operator's last log lines."""
    selector = f"app.kubernetes.io/instance={RELEASE}"
    arguments = ["-n", SYSTEM, "logs", "-l", selector, "--tail=30"]
    return "".join(cluster.kubectl(*arguments, *more, check=False).stdout for more in ((), ("--previous",)))
