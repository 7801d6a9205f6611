"""Others edit our children and have objects under our names, on a real API server."""

from __future__ import annotations

import json
import time
from collections import Counter
from functools import partial

import pytest

from tests.operator.running import Audit, Kube, OperatorProcess, eventually, pipeline
from tests.operator.test_cluster_children import SETTLE_S, deployments

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


def service(name: str, **labels: str) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": labels},
        "spec": {"selector": {"app": "somebody"}, "ports": [{"port": 1234}]},
    }


@pytest.mark.proves("foreign-owner")
@pytest.mark.parametrize("labelled", [False, True], ids=["plain", "with our labels"])
def test_a_foreign_service_under_our_name_is_never_adopted(
    kube: Kube, operator: OperatorProcess, labelled: bool
) -> None:
    labels = {"omnipipeline.dev/pipeline": "duo", "app.kubernetes.io/name": "omnipipeline"} if labelled else {}
    kube.apply(service("duo", **labels))
    theirs = kube.get("service", "duo")
    operator.start()
    kube.apply(pipeline())
    refused = eventually(
        lambda: kube.condition("duo", "Accepted").get("reason") == "NameConflict" and kube.condition("duo", "Accepted")
    )
    assert "Service duo" in refused["message"]
    time.sleep(SETTLE_S)
    assert kube.get("service", "duo") == theirs
    kube("delete", "service", "duo")
    kube("annotate", "omnipipeline", "duo", "look=again")
    kube.wait_ready("duo")
    assert kube.get("service", "duo")["spec"]["selector"]["omnipipeline.dev/pipeline"] == "duo"


def test_kubectl_scale_of_a_pipeline_is_refused_and_a_patch_of_one_group_scales_that_one(
    kube: Kube, operator: OperatorProcess
) -> None:
    operator.start()
    kube.apply(pipeline())
    before = kube.wait_ready("duo")
    refused = kube.cluster.kubectl("-n", kube.namespace, "scale", "omnipipeline", "duo", "--replicas=3", check=False)
    assert refused.returncode == 1
    assert 'omnipipelines.omnipipeline.dev "duo" not found' in refused.stderr, "the API server's words for no scale"
    assert kube.get("omnipipeline", "duo")["spec"] == before["spec"]
    groups = [each["name"] for each in before["spec"]["processGroups"]]
    change = {"op": "add", "path": f"/spec/processGroups/{groups.index('last')}/replicas", "value": 2}
    kube("patch", "omnipipeline", "duo", "--type=json", "-p", json.dumps([change]))
    kube.wait_ready("duo")
    units = [
        each["metadata"]["labels"]["omnipipeline.dev/unit"] for each in kube.all("pods", "omnipipeline.dev/pipeline")
    ]
    assert Counter(units) == {"first": 1, "last": 2, "coordinator": 1}


def test_our_fields_are_restored_and_foreign_ones_stay(kube: Kube, operator: OperatorProcess, audit: Audit) -> None:
    operator.start()
    kube.apply(pipeline())
    kube.wait_ready("duo")
    patch = '{"metadata":{"annotations":{"theirs":"stays"}},"spec":{"selector":{"omnipipeline.dev/unit":"wrong"}}}'
    kube("patch", "service", "duo", "--type=merge", "-p", patch)
    eventually(
        lambda: kube.get("service", "duo")["spec"]["selector"]["omnipipeline.dev/unit"] == "coordinator",
        what="the selector is ours again",
    )
    assert kube.get("service", "duo")["metadata"]["annotations"]["theirs"] == "stays"
    name = next(iter(kube.names("deployments", "omnipipeline.dev/unit=first")))
    kube("scale", "deployment", name, "--replicas=4")
    eventually(lambda: kube.get("deployment", name)["spec"]["replicas"] == 1, what="replicas are ours again")
    kube("delete", "service", "duo-peers")
    eventually(lambda: kube.get("service", "duo-peers"), what="the Service is back")
    kube("delete", "deployment", name)
    eventually(lambda: kube.get("deployment", name), what="the Deployment is back")
    kube("patch", "configmap", "duo-revisions", "--type=merge", "-p", '{"data":{"revisions.json":"nonsense"}}')
    eventually(
        lambda: kube.get("configmap", "duo-revisions")["data"]["revisions.json"].startswith("["),
        what="the revisions are ours again",
    )
    kube.wait_ready("duo")
    time.sleep(1)
    audit.mark()
    time.sleep(SETTLE_S)
    assert audit.writes() == []


def test_a_child_that_lost_its_label_is_found_again_with_all_its_pods(kube: Kube, operator: OperatorProcess) -> None:
    operator.start()
    kube.apply(pipeline())
    kube.wait_ready("duo")
    kube.apply(pipeline(processGroups=[{"name": "first", "replicas": 3}]))
    kube.wait_ready("duo")
    pods = {each["metadata"]["uid"] for each in kube.all("pods")}
    name = next(iter(kube.names("deployments", "omnipipeline.dev/unit=first")))
    uid = kube.get("deployment", name)["metadata"]["uid"]
    for kind, child in (("deployment", name), ("service", "duo"), ("configmap", "duo-revisions")):
        kube("label", kind, child, "omnipipeline.dev/pipeline-")
        eventually(
            partial(lambda kind, child: child in kube.names(kind), kind, child), what=f"{kind} {child} has its label"
        )
    assert kube.get("deployment", name)["metadata"]["uid"] == uid
    time.sleep(SETTLE_S)
    assert {each["metadata"]["uid"] for each in kube.all("pods")} == pods


def test_a_template_edited_by_hand_is_reported_and_kept(kube: Kube, operator: OperatorProcess) -> None:
    operator.start()
    kube.apply(pipeline())
    kube.wait_ready("duo")
    name = next(iter(kube.names("deployments", "omnipipeline.dev/unit=first")))
    kube("rollout", "restart", f"deployment/{name}")

    def drift() -> object:
        units = kube.get("omnipipeline", "duo")["status"]["units"]
        return next(each for each in units if each["name"] == "first").get("reason") == "TemplateEdited"

    eventually(drift, what="the drift is reported")
    before = kube.get("deployment", name)["spec"]["template"]
    time.sleep(SETTLE_S)
    assert kube.get("deployment", name)["spec"]["template"] == before
    kube.apply(pipeline(restartedAt="now"))
    kube.wait_ready("duo")
    assert name not in {unit["workload"] for unit in kube.get("omnipipeline", "duo")["status"]["units"]}


def test_a_lost_secret_gets_a_successor_and_every_unit_rolls_onto_it(kube: Kube, operator: OperatorProcess) -> None:
    operator.start()
    kube.apply(pipeline())
    kube.wait_ready("duo")
    (first,) = kube.names("secrets")
    before = deployments(kube)
    kube("delete", "secret", first)
    changed = pipeline()
    changed["spec"]["stages"][1]["factoryArgs"] = {"size": 2}
    kube.apply(changed)
    kube.wait_ready("duo")
    (second,) = kube.names("secrets")
    assert second != first
    for deployment in kube.all("deployments"):
        unit = deployment["spec"]["selector"]["matchLabels"]["omnipipeline.dev/unit"]
        volumes = {each["name"]: each for each in deployment["spec"]["template"]["spec"]["volumes"]}
        is_old = deployment["metadata"]["name"] in {f"duo-{unit}-{revision}" for revision in before[unit]}
        assert deployment["spec"]["replicas"] == (0 if is_old else 1)
        assert volumes["control"]["secret"]["secretName"] == (first if is_old else second)
