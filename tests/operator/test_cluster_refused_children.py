"""A child that is refused, or that no apply can mend, stops no other one and no later edit, on a real API server."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.operator.running import Audit, Kube, OperatorProcess, eventually, pipeline
from tests.operator.test_cluster_children import SETTLE_S
from tests.thoroughness import rows

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

SPEC: dict[str, Any] = {"networkPolicy": {}, "disruption": {"podDisruptionBudget": {}}}


def patched(kube: Kube, kind: str, name: str, patch: Any, form: str = "merge") -> None:
    kube("patch", kind, name, f"--type={form}", "-p", json.dumps(patch))


def the_budget(kube: Kube) -> str:
    return min(kube.names("poddisruptionbudgets", "omnipipeline.dev/unit=first"))


def ports(kube: Kube) -> list[tuple[str, int]]:
    return [(each["name"], each["port"]) for each in kube.get("service", "duo")["spec"]["ports"]]


def edit_ports(kube: Kube) -> Callable[[], object]:
    """The case of the report: two ports of one name."""
    patched(kube, "service", "duo", {"spec": {"ports": [{"name": "http", "port": 9999, "targetPort": "http"}]}})
    return lambda: ports(kube) == [("http", 8000)]


def add_to_selector(kube: Kube) -> Callable[[], object]:
    patched(kube, "service", "duo", {"spec": {"selector": {"app": "theirs"}}})
    return lambda: "app" not in kube.get("service", "duo")["spec"]["selector"]


def set_min_available(kube: Kube) -> Callable[[], object]:
    """The field beside maxUnavailable is invalid, and a merge keeps it."""
    name = the_budget(kube)
    patched(kube, "poddisruptionbudget", name, {"spec": {"maxUnavailable": None, "minAvailable": 1}})
    return lambda: (
        "minAvailable" not in (kube.get("poddisruptionbudget", name) or {"spec": {"minAvailable": 1}})["spec"]
    )


def make_immutable(kube: Kube) -> Callable[[], object]:
    patched(kube, "configmap", "duo-revisions", {"immutable": True, "data": {"revisions.json": "nonsense"}})
    gone = {"data": {"revisions.json": ""}}  # it is replaced: deleted, then made again
    return lambda: (kube.get("configmap", "duo-revisions") or gone)["data"]["revisions.json"].startswith("[")


def widen_policy(kube: Kube) -> Callable[[], object]:
    more = {"podSelector": {"matchExpressions": [{"key": "app", "operator": "In", "values": ["theirs"]}]}}
    patched(kube, "networkpolicy", "duo-pods", {"spec": more})
    return lambda: "matchExpressions" not in kube.get("networkpolicy", "duo-pods")["spec"]["podSelector"]


def remove_labels(kube: Kube) -> Callable[[], object]:
    """Those by which the operator finds it."""
    labels = kube.get("service", "duo")["metadata"]["labels"]
    patched(kube, "service", "duo", {"metadata": {"labels": dict.fromkeys(labels)}})
    return lambda: kube.get("service", "duo")["metadata"].get("labels") == labels


def remove_owner(kube: Kube) -> Callable[[], object]:
    patched(kube, "service", "duo", {"metadata": {"ownerReferences": None}})
    return lambda: kube.get("service", "duo")["metadata"].get("ownerReferences")


EDITS = (
    edit_ports,
    remove_labels,
    add_to_selector,
    set_min_available,
    make_immutable,
    remove_owner,
    widen_policy,
)


@pytest.mark.parametrize("edit", rows(EDITS, each_run=5))
def test_a_child_that_was_edited_by_hand_is_ours_again_and_later_edits_are_carried_out(
    kube: Kube, operator: OperatorProcess, audit: Audit, edit: Callable[[Kube], Callable[[], object]]
) -> None:
    operator.start()
    kube.apply(pipeline(**SPEC))
    kube.wait_ready("duo")
    patched(kube, "service", "duo", {"metadata": {"annotations": {"theirs": "stays"}}})
    address = kube.get("service", "duo")["spec"]["clusterIP"]
    restored = edit(kube)
    eventually(restored, what="the child is ours again")
    assert kube.condition("duo", "Accepted")["status"] == "True"
    kube.apply(pipeline(**SPEC, expose={"service": {"port": 8001, "annotations": {"ours": "x"}}}))
    eventually(lambda: ports(kube) == [("http", 8001)], what="the edit is carried out")
    kube.apply(pipeline(**SPEC))
    eventually(lambda: ports(kube) == [("http", 8000)], what="what an edit removes is removed")
    service = kube.get("service", "duo")
    assert "ours" not in service["metadata"]["annotations"]
    assert (service["metadata"]["annotations"]["theirs"], service["spec"]["clusterIP"]) == ("stays", address)
    shown = json.loads(kube("get", "service", "duo", "-o", "json", "--show-managed-fields"))
    managers = {each["manager"] for each in shown["metadata"]["managedFields"]}
    assert "omnipipeline-operator-replacer" not in managers
    kube.wait_ready("duo")
    time.sleep(1)
    audit.mark()
    time.sleep(SETTLE_S)
    assert audit.writes() == [], "no writer fights another one"


def test_a_port_that_somebody_added_stays_and_causes_no_writes(
    kube: Kube, operator: OperatorProcess, audit: Audit
) -> None:
    operator.start(OMNI_OPERATOR_RELIST_SECONDS="1")
    kube.apply(pipeline())
    kube.wait_ready("duo")
    more = [{"op": "add", "path": "/spec/ports/-", "value": {"name": "theirs", "port": 9999}}]
    patched(kube, "service", "duo", more, "json")
    time.sleep(1)
    audit.mark()
    time.sleep(SETTLE_S)
    assert audit.writes() == []
    assert ports(kube) == [("http", 8000), ("theirs", 9999)]


def test_an_invalid_child_of_the_spec_is_named_and_the_others_are_written(
    kube: Kube, operator: OperatorProcess
) -> None:
    operator.start()
    kube.apply(pipeline())
    kube.wait_ready("duo")
    uid = kube.get("networkpolicy", "duo-http")["metadata"]["uid"]
    bad = {"ingressFrom": [{"ipBlock": {"cidr": "not a block!"}}]}
    first = {"name": "first", "replicas": 2}
    kube.apply(pipeline(networkPolicy=bad, processGroups=[first], envDefaults={"A": "1"}))
    refused = eventually(
        lambda: kube.condition("duo", "Accepted").get("reason") == "ChildRefused" and kube.condition("duo", "Accepted")
    )
    assert "not a block!" in refused["message"]
    eventually(lambda: len(kube.all("pods", "omnipipeline.dev/unit=first")) == 2, what="the edit is carried out")
    assert kube.get("networkpolicy", "duo-http")["metadata"]["uid"] == uid, "a spec's fault deletes nothing"
    kube.apply(pipeline(processGroups=[first], envDefaults={"A": "1"}))
    kube.wait_ready("duo")


def test_a_child_that_waits_for_a_finalizer_stops_nothing(kube: Kube, operator: OperatorProcess) -> None:
    operator.start()
    kube.apply(pipeline())
    kube.wait_ready("duo")
    patched(kube, "service", "duo-peers", {"metadata": {"finalizers": ["example.com/theirs"]}})
    kube("delete", "service", "duo-peers", "--wait=false")
    waiting = eventually(
        lambda: kube.condition("duo", "Accepted").get("reason") == "NameConflict" and kube.condition("duo", "Accepted")
    )
    assert "is being deleted (it waits for example.com/theirs)" in waiting["message"]
    kube.apply(pipeline(expose={"service": {"port": 8001}}))
    eventually(lambda: ports(kube) == [("http", 8001)], what="the edit is carried out")
    patched(kube, "service", "duo-peers", {"metadata": {"finalizers": None}})
    kube.wait_ready("duo")
    assert "deletionTimestamp" not in kube.get("service", "duo-peers")["metadata"]
