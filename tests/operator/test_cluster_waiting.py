"""The operator of a real API server reports what pods wait for; they start when it appears; one image a revision."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.request
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest

from tests.cluster_kit import REPOSITORY
from tests.operator.running import Audit, Kube, OperatorProcess, eventually, pipeline
from tests.operator.test_cluster_children import SETTLE_S
from tests.operator.test_cluster_diagnostics import wait_reason

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

NEWER = "localhost/omni-stage:newer"
#: A node that is no more than an entry: its pods do what the test says.
NODE = "bare"
PLACED = {"placement": {"tolerations": [{"operator": "Exists"}], "nodeSelector": {"bare": "true"}}}


def on_bare_node(**spec: Any) -> dict[str, Any]:
    groups = [{"name": name, **PLACED} for name in ("first", "last")]
    return pipeline(coordinator={"replicas": 1, **PLACED}, processGroups=groups, **spec)


@pytest.fixture
def bare(kube: Kube) -> Any:
    """A node without a kubelet."""
    room = {"cpu": "8", "memory": "8Gi", "pods": "50"}
    kube("delete", "node", NODE, "--ignore-not-found")
    kube.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE, "labels": {"bare": "true"}}})
    ready = {"type": "Ready", "status": "True", "reason": "Test", "lastHeartbeatTime": "2999-01-01T00:00:00Z"}
    status = {"status": {"capacity": room, "allocatable": room, "conditions": [ready]}}
    kube("patch", "node", NODE, "--subresource=status", "--type=merge", "-p", json.dumps(status))
    yield
    kube("delete", "pods", "--all", "--grace-period=0", "--force")
    kube("delete", "node", NODE)


def pods_of(kube: Kube, unit: str) -> list[Any]:
    return kube.all("pods", f"omnipipeline.dev/unit={unit}")


def set_container_status(kube: Kube, pod: str, **container: Any) -> None:
    """Set the status that a kubelet would."""
    whole = {"name": "stage", "image": "i", "imageID": "", "ready": False, "restartCount": 0, **container}
    status = {"status": {"phase": "Pending", "containerStatuses": [whole]}}
    kube("patch", "pod", pod, "--subresource=status", "--type=merge", "-p", json.dumps(status))


def unit(kube: Kube, name: str) -> dict[str, Any]:
    units = (kube.get("omnipipeline", "duo") or {}).get("status", {}).get("units", ())
    found: dict[str, Any] = next((each for each in units if each["name"] == name), {})
    return found


def config_map(name: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"some.py": ""}}


def secret(name: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": {"key": "k"}}


def images(kube: Kube) -> dict[str, str]:
    """The images of Deployments whose replicas are not 0."""
    return {
        each["metadata"]["labels"]["omnipipeline.dev/unit"]: each["spec"]["template"]["spec"]["containers"][0]["image"]
        for each in kube.all("deployments")
        if each["spec"]["replicas"]
    }


@pytest.mark.proves("missing-references")
def test_missing_references_are_reported_and_the_pods_start_when_they_appear(
    kube: Kube, operator: OperatorProcess
) -> None:
    operator.start()
    desired = pipeline(
        code={"configMapRef": {"name": "my-code"}},
        envFrom=[{"secretRef": {"name": "hub"}}, {"secretRef": {"name": "o", "optional": True}}],
    )
    desired["spec"]["coordinator"]["http"] = {"apiKeySecretRef": {"name": "keys", "key": "key"}}
    kube.apply(desired)
    condition = wait_reason(kube, "Ready", "ReferenceNotFound")
    assert "ConfigMap my-code (code.configMapRef)" in condition["message"]
    assert "Secret keys (coordinator.http.apiKeySecretRef)" in unit(kube, "coordinator")["message"]
    assert "Secret hub (envFrom[0])" in unit(kube, "first")["message"]
    assert "Secret o" not in unit(kube, "first")["message"]
    assert kube.all("pods") == [], "none would start"
    kube.apply(config_map("my-code"), secret("keys"))
    eventually(lambda: "ConfigMap" not in unit(kube, "first").get("message", ""), within_s=20)
    assert "Secret hub (envFrom[0]) does not exist" in unit(kube, "first")["message"]
    kube.apply(secret("hub"))
    kube.wait_ready("duo", within_s=30)


def test_a_roll_with_a_missing_reference_keeps_running_pods_and_reports_it(
    kube: Kube, operator: OperatorProcess
) -> None:
    operator.start()
    kube.apply(pipeline())
    kube.wait_ready("duo")
    pods = {each["metadata"]["uid"] for each in kube.all("pods")}
    kube.apply(pipeline(env=[{"name": "T", "valueFrom": {"secretKeyRef": {"name": "token", "key": "k"}}}]))
    assert "Secret token (env T)" in wait_reason(kube, "Ready", "ReferenceNotFound")["message"]
    assert kube.condition("duo", "Available")["status"] == "True"
    assert pods <= {each["metadata"]["uid"] for each in kube.all("pods")}
    kube.apply(secret("token"))
    kube.wait_ready("duo", within_s=40)


@pytest.mark.proves("missing-references")
def test_refused_pods_are_retried_soon(kube: Kube, operator: OperatorProcess) -> None:
    operator.start()
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few"}, "spec": {"hard": {"pods": "0"}}}
    kube.apply(quota)
    kube.apply(pipeline(serviceAccountName="mine"))
    eventually(lambda: unit(kube, "first").get("reason") == "PodsRefused", what="the account is named")
    assert 'serviceaccount "mine" not found' in unit(kube, "first")["message"]
    kube("create", "serviceaccount", "mine")
    wait_reason(kube, "Scheduled", "QuotaExceeded")
    before = kube.get("omnipipeline", "duo")["status"]
    tried = "omnipipeline.dev/tried"
    eventually(lambda: all(tried in each["metadata"]["annotations"] for each in kube.all("deployments")), within_s=60)
    assert kube.get("omnipipeline", "duo")["status"] == before, "another attempt, the same words"
    kube("delete", "resourcequota", "few")
    kube.wait_ready("duo", within_s=60)


@pytest.mark.proves("missing-references")
@pytest.mark.usefixtures("bare")
def test_a_failed_mount_is_reported_with_the_kubelets_message(kube: Kube, operator: OperatorProcess) -> None:
    operator.start()
    volume = {"name": "data", "csi": {"driver": "nowhere.example.org"}}
    desired = on_bare_node()
    desired["spec"]["processGroups"][0]["podTemplate"] = {"spec": {"volumes": [volume]}}
    kube.apply(desired)
    [pod] = eventually(
        lambda: [each for each in pods_of(kube, "first") if any(v["name"] == "data" for v in each["spec"]["volumes"])]
    )
    name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
    message = 'MountVolume.SetUp failed for volume "data" : mount failed: exit status 32'
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{name}.1"},
        "involvedObject": {"kind": "Pod", "namespace": kube.namespace, "name": name, "uid": uid},
        "type": "Warning",
        "reason": "FailedMount",
        "message": message,
        "lastTimestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    kube.apply(event)
    set_container_status(kube, name, state={"waiting": {"reason": "ContainerCreating"}})
    eventually(lambda: unit(kube, "first").get("reason") == "FailedMount", within_s=30)
    assert message in unit(kube, "first")["message"]


@pytest.mark.usefixtures("bare")
def test_one_crash_is_one_reason_few_writes_and_one_event_however_often_it_happens(
    kube: Kube, operator: OperatorProcess, audit: Audit
) -> None:
    operator.start()
    kube.apply(on_bare_node())
    [pod] = eventually(lambda: pods_of(kube, "first"))
    name = pod["metadata"]["name"]
    eventually(lambda: unit(kube, "first"))
    crash = {
        "exitCode": 1,
        "reason": "Error",
        "startedAt": "2026-01-01T00:00:00Z",
        "finishedAt": "2026-01-01T00:00:20Z",
    }
    time.sleep(SETTLE_S)  # the writes of its start have come
    audit.mark()
    observed = set()
    for number in range(4):
        message = f"first: OSError: no weights (request 0x7{number})\n---\nTraceback\nmake sure to pass a token"
        ended = {"terminated": {**crash, "message": message}}
        set_container_status(kube, name, state=ended, restartCount=number)
        eventually(lambda: unit(kube, "first").get("reason"), what="the crash is reported")
        observed.add((unit(kube, "first")["reason"], unit(kube, "first")["message"]))
        back_off = {"waiting": {"reason": "CrashLoopBackOff", "message": f"back-off {number}0s restarting"}}
        set_container_status(kube, name, state=back_off, lastState=ended, restartCount=number)
        observed.add((unit(kube, "first")["reason"], unit(kube, "first")["message"]))
        running = {"running": {"startedAt": "2999-01-01T00:00:00Z"}}
        set_container_status(kube, name, state=running, lastState=ended, restartCount=number + 1)
        observed.add((unit(kube, "first")["reason"], unit(kube, "first")["message"]))
    assert observed == {("CrashLoopBackOff", f"pod {name}: container stage: first: OSError: no weights (request 0x70)")}
    # A condition may follow a moment after the unit.
    eventually(lambda: kube.condition("duo", "Ready")["reason"] == "CrashLoopBackOff")
    written = [what for _, what, _, _ in audit.writes()]
    assert written.count("omnipipelines/status") <= 2, audit.writes()
    events = [each for each in kube.all("events") if each["involvedObject"]["kind"] == "OmniPipeline"]
    crashed = [each["message"] for each in events if each["reason"] == "CrashLoopBackOff"]
    named = sorted(each for one in crashed for each in re.findall("(Available|Ready) is False", one))
    assert named == ["Available", "Ready"], "each condition is reported once"
    with urllib.request.urlopen(f"http://127.0.0.1:{operator.port}/metrics") as answer:
        metrics = answer.read().decode()
    labels = f'namespace="{kube.namespace}",pipeline="duo"'
    assert f'omnipipeline_unit_status_reason{{{labels},reason="CrashLoopBackOff",unit="first"}} 1.0' in _sorted(metrics)
    ready = f'condition="Ready",namespace="{kube.namespace}",pipeline="duo",reason="CrashLoopBackOff",status="False"'
    assert f"omnipipeline_status_condition{{{ready}}} 1.0" in _sorted(metrics)


def _sorted(metrics: str) -> str:
    """Labels by name."""
    lines = []
    for line in metrics.splitlines():
        name, brace, rest = line.partition("{")
        labels, _, value = rest.partition("}")
        lines.append(f"{name}{{{','.join(sorted(labels.split(',')))}}}{value}" if brace else line)
    return "\n".join(lines)


@pytest.mark.proves("other-stage-image")
@pytest.mark.usefixtures("bare")
def test_a_pipeline_that_waits_for_a_bad_image_gets_the_one_that_the_chart_names_next(
    kube: Kube, operator: OperatorProcess
) -> None:
    operator.start(OMNI_OPERATOR_STAGE_IMAGE="localhost/omni-stage:typo")
    kube.apply(on_bare_node())
    names = ("first", "last", "coordinator")
    for name in names:
        [pod] = eventually(partial(lambda name: pods_of(kube, name), name))
        message = 'Back-off pulling image "localhost/omni-stage:typo": ErrImagePull: not found'
        set_container_status(
            kube, pod["metadata"]["name"], state={"waiting": {"reason": "ImagePullBackOff", "message": message}}
        )
    eventually(lambda: unit(kube, "first").get("reason") == "ImagePullBackOff")
    operator.stop()
    operator.start(OMNI_OPERATOR_STAGE_IMAGE=NEWER)
    eventually(lambda: images(kube) == dict.fromkeys(names, NEWER), within_s=40, what="all have the newer image")
    eventually(lambda: kube.get("omnipipeline", "duo")["status"]["revision"]["updateImage"] == NEWER)


@pytest.mark.proves("other-stage-image")
def test_a_pipeline_revision_has_one_image_whatever_the_chart_names_meanwhile(
    kube: Kube, operator: OperatorProcess
) -> None:
    old = operator.environment["OMNI_OPERATOR_STAGE_IMAGE"]

    def desired(first: int, last: int, drain: int) -> dict[str, Any]:
        made = pipeline()
        for stage, size in zip(made["spec"]["stages"], (first, last), strict=True):
            stage["factoryArgs"] = {"size": size}
        made["spec"]["coordinator"]["drain"] = {"timeoutSeconds": drain}
        return made

    def now_on(image: str) -> None:
        found = kube.wait_ready("duo")
        assert images(kube) == dict.fromkeys(("first", "last", "coordinator"), image)
        assert found["status"]["revision"]["updateImage"] == found["status"]["revision"]["currentImage"] == image

    operator.start()
    kube.apply(desired(1, 1, 60))
    now_on(old)
    operator.stop()
    operator.start(OMNI_OPERATOR_STAGE_IMAGE=NEWER)
    kube.apply(desired(2, 1, 60))
    now_on(old)  # the rest runs it, and is not restarted for an edit of one unit
    kube.apply(desired(3, 3, 61))
    now_on(NEWER)  # nothing of before is in it
    kube.apply(desired(1, 3, 61))
    now_on(NEWER)  # a unit that has a Deployment of before, with the old image
    kube.apply(desired(2, 1, 60))
    now_on(old)  # as it was


def test_a_template_edited_by_hand_is_not_brought_back_by_a_rollback(kube: Kube, operator: OperatorProcess) -> None:
    operator.start()
    kube.apply(pipeline())
    kube.wait_ready("duo")
    [name] = kube.names("deployments", "omnipipeline.dev/unit=first")
    [kept] = kube.names("deployments", "omnipipeline.dev/unit=last")
    uids = {each: kube.get("deployment", each)["metadata"]["uid"] for each in (name, kept)}
    edited = '{"spec":{"template":{"spec":{"terminationGracePeriodSeconds":7}}}}'
    kube("patch", "deployment", name, "--type=merge", "-p", edited)
    kube.apply(pipeline(envDefaults={"CHANGED": "1"}))
    kube.wait_ready("duo")
    kube.apply(pipeline())
    kube.wait_ready("duo")
    back = kube.get("deployment", name)
    assert back["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > 7
    assert back["metadata"]["uid"] != uids[name], "made anew"
    assert kube.get("deployment", kept)["metadata"]["uid"] == uids[kept], "scaled up again"


@pytest.mark.proves("orphaned-children")
def test_orphans_of_a_deleted_pipeline_are_adopted_by_its_successor(kube: Kube, operator: OperatorProcess) -> None:
    operator.start()
    desired = pipeline(networkPolicy={}, disruption={"podDisruptionBudget": {}})
    kube.apply(desired)
    first = kube.wait_ready("duo")["metadata"]["uid"]
    kinds = "deployments,configmaps,services,networkpolicies,poddisruptionbudgets,controllerrevisions"
    eventually(lambda: kube.names("controllerrevisions"), what="its history is recorded")
    before = {(each["kind"], each["metadata"]["name"]): each["metadata"]["uid"] for each in kube.all(kinds, LABELLED)}
    pods = {each["metadata"]["uid"] for each in kube.all("pods")}
    kube("delete", "omnipipeline", "duo", "--cascade=orphan")
    assert {each["metadata"]["uid"] for each in kube.all("pods")} == pods
    theirs = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "owner"}}
    kube.apply(theirs)
    kube.apply(desired)
    second = kube.wait_ready("duo")["metadata"]["uid"]
    assert second != first
    for each in kube.all(kinds, LABELLED):
        assert [owner["uid"] for owner in each["metadata"]["ownerReferences"]] == [second], each["metadata"]["name"]
    after = {(each["kind"], each["metadata"]["name"]): each["metadata"]["uid"] for each in kube.all(kinds, LABELLED)}
    assert after == before
    assert {each["metadata"]["uid"] for each in kube.all("pods")} == pods
    kube("delete", "omnipipeline", "duo")
    eventually(lambda: not kube.names("deployments") and not kube.names("services"), what="its children go with it")


LABELLED = "omnipipeline.dev/pipeline=duo"


@pytest.mark.proves("orphaned-children")
def test_an_orphan_with_another_owner_is_not_adopted(kube: Kube, operator: OperatorProcess) -> None:
    operator.start()
    kube.apply(pipeline())
    kube.wait_ready("duo")
    kube("delete", "omnipipeline", "duo", "--cascade=orphan")
    kube.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "owner"}})
    uid = kube.get("configmap", "owner")["metadata"]["uid"]
    owner = [{"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": uid}]
    kube("patch", "service", "duo", "--type=merge", "-p", json.dumps({"metadata": {"ownerReferences": owner}}))
    kube.apply(pipeline())
    assert "Service duo" in wait_reason(kube, "Accepted", "NameConflict")["message"]
    assert kube.get("service", "duo")["metadata"]["ownerReferences"] == owner


def test_a_pipeline_that_no_operator_has_reconciled_reports_that(kube: Kube, operator: OperatorProcess) -> None:
    kube.apply(pipeline())
    header, line = kube("get", "omnipipeline", "duo").splitlines()
    assert line.split()[:3] == ["duo", "Unknown", "NoOperatorYet"], (header, line)
    assert "watches its namespace" in kube.condition("duo", "Ready")["message"]
    operator.start()
    kube.wait_ready("duo")
    conditions = {each["type"]: each["reason"] for each in kube.get("omnipipeline", "duo")["status"]["conditions"]}
    assert "NoOperatorYet" not in conditions.values() and len(conditions) == 9


def test_a_child_labelled_for_another_pipeline_comes_back_at_once(kube: Kube, operator: OperatorProcess) -> None:
    operator.start()
    kube.apply(pipeline(), pipeline("other"))
    kube.wait_ready("duo")
    kube.wait_ready("other")
    [name] = kube.names("deployments", f"{LABELLED},omnipipeline.dev/unit=first")
    for kind, child in (("service", "duo"), ("deployment", name), ("configmap", "duo-revisions")):
        kube("label", kind, child, "omnipipeline.dev/pipeline=other", "--overwrite")
        eventually(
            partial(lambda kind, child: child in kube.names(kind, LABELLED), kind, child),
            within_s=20,
            what=f"{kind} {child}",
        )


def test_an_administrator_of_a_namespace_can_install_the_operator_there(kube: Kube) -> None:
    user = "somebody"
    kube("create", "rolebinding", "them", "--clusterrole=admin", f"--user={user}")
    values = [f"watchNamespaces={{{kube.namespace}}}", "rbac.aggregate=false", "crds.install=false"]
    rendered = subprocess.run(
        ["helm", "template", "mine", str(REPOSITORY / "charts" / "omnipipeline"), "-n", kube.namespace]
        + [part for value in values for part in ("--set", value)],
        env=kube.cluster.environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    eventually(  # the roles are put together by a controller
        lambda: not kube.cluster.kubectl("apply", f"--as={user}", "-f", "-", stdin=rendered, check=False).returncode,
        within_s=20,
        what=kube.cluster.kubectl("apply", f"--as={user}", "-f", "-", stdin=rendered, check=False).stderr,
    )
