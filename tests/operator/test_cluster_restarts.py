"""Operators die after any write, and two of them run at once, on a real API server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cluster_kit import Cluster
from tests.operator import running
from tests.operator.crashing_operator import CRASH_EXIT_CODE
from tests.operator.running import Audit, Election, Kube, OperatorProcess, eventually, pipeline
from tests.operator.test_cluster_children import SETTLE_S
from tests.thoroughness import rows

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

FAILOVER_S = 20.0
DEATHS = rows((0, 1, 2, 4, 7, 11, 15), each_run=4)  # writes that an operator makes before it dies


def shape(kube: Kube) -> dict[str, Any]:
    """The fields of the children that the operator decides, without those of the API server and random ones."""
    found: dict[str, Any] = {}
    for kind in ("deployments", "configmaps", "services", "networkpolicies", "poddisruptionbudgets"):
        for each in kube.all(kind, "omnipipeline.dev/pipeline"):
            spec = json.loads(json.dumps(each.get("spec", each.get("data"))))
            for chosen in ("clusterIP", "clusterIPs"):
                spec.pop(chosen, None)
            text = json.dumps(spec, sort_keys=True)
            for secret in kube.names("secrets"):
                text = text.replace(secret, "SECRET")
            text = text.replace(kube.namespace, "NAMESPACE")
            found[f"{kind}/{each['metadata']['name']}"] = text
    return found


@pytest.fixture
def places(kube: Kube) -> Iterator[dict[int, Kube]]:
    """A namespace for each write before which an operator dies."""
    found = {limit: Kube(cluster=kube.cluster, namespace=f"{kube.namespace}-{limit}") for limit in DEATHS}
    names = [each.namespace for each in found.values()]
    for name in names:
        kube.cluster.kubectl("create", "namespace", name)
    yield found
    kube.cluster.kubectl("delete", "namespace", *names, "--wait=false")


@pytest.mark.proves("operator-dies")
def test_dying_before_any_write_and_starting_again_ends_in_the_same_state(
    kube: Kube, operator: OperatorProcess, audit: Audit, prepared: tuple[Cluster, Path], places: dict[int, Kube]
) -> None:
    rich = pipeline(networkPolicy={}, disruption={"podDisruptionBudget": {}})
    operator.start()
    audit.mark()
    kube.apply(rich)
    kube.wait_ready("duo")
    time.sleep(1)
    desired = shape(kube)
    made = [each for each in audit.writes() if each[0] in ("patch", "create") and each[3] in (200, 201)]
    assert operator.stop() == 0
    assert len(made) > max(DEATHS)
    for limit, place in places.items():
        place.apply(rich)
        operator.environment = running.environment(*prepared, namespaces=place.namespace)
        operator.program = (str(Path(__file__).with_name("crashing_operator.py")), str(limit))
        operator.start()
        assert operator.process is not None
        assert operator.process.wait(timeout=60) == CRASH_EXIT_CODE, f"it lived through {limit} writes"
    everywhere = ",".join(place.namespace for place in places.values())
    operator.environment = running.environment(*prepared, namespaces=everywhere)
    operator.program = ("-m", "omnipipeline_operator")
    operator.start()
    for limit, place in places.items():
        place.wait_ready("duo")
        assert shape(place) == desired, f"after dying before write {limit + 1}"
        assert len(place.names("secrets")) == 1


@pytest.mark.proves("operator-dies")
def test_a_roll_goes_on_where_a_dead_operator_left_it(kube: Kube, operator: OperatorProcess) -> None:
    dying = str(Path(__file__).with_name("crashing_operator.py"))
    operator.start()
    kube.apply(pipeline(processGroups=[{"name": "first", "replicas": 2}]))
    kube.wait_ready("duo")
    assert operator.stop() == 0
    kube.apply(pipeline(processGroups=[{"name": "first", "replicas": 2}], envDefaults={"CHANGED": "1"}))
    for limit in (1, 2, 3, 4):
        operator.program = (dying, str(limit))
        operator.start()
        assert operator.process is not None
        assert operator.process.wait(timeout=60) == CRASH_EXIT_CODE
    operator.program = ("-m", "omnipipeline_operator")
    operator.start()
    ready = kube.wait_ready("duo")
    assert ready["status"]["revision"]["current"] == ready["status"]["revision"]["update"]
    replicas = {each["metadata"]["name"]: each["spec"]["replicas"] for each in kube.all("deployments")}
    workloads = {each["workload"]: each["replicas"] for each in ready["status"]["units"]}
    assert {name: count for name, count in replicas.items() if count} == workloads


def test_what_is_deleted_or_recreated_while_no_watch_runs_is_recognised(kube: Kube, operator: OperatorProcess) -> None:
    operator.start()
    kube.apply(pipeline("gone"), pipeline("anew"))
    kube.wait_ready("gone")
    before = kube.wait_ready("anew")
    assert operator.stop() == 0
    kube("delete", "omnipipeline", "gone", "anew", "--wait=true", "--timeout=50s")
    kube.apply(pipeline("anew"))
    operator.start()
    after = eventually(
        lambda: kube.condition("anew", "Ready").get("status") == "True" and kube.get("omnipipeline", "anew"),
        within_s=120,
    )
    assert after["metadata"]["uid"] != before["metadata"]["uid"]
    gone = "omnipipeline.dev/pipeline=gone"
    for kind in ("deployments", "services", "configmaps"):
        eventually(partial(lambda kind: not kube.names(kind, gone), kind), what=f"no {kind} left")
        for child in kube.all(kind, "omnipipeline.dev/pipeline=anew"):
            assert [each["uid"] for each in child["metadata"]["ownerReferences"]] == [after["metadata"]["uid"]]
    time.sleep(SETTLE_S)
    assert kube.names("deployments", gone) == set()


def test_of_two_operators_one_writes_and_the_other_takes_over_within_20_s(
    kube: Kube, prepared: tuple[Cluster, Path], tmp_path: Path, election: Election
) -> None:
    cluster, folder = prepared
    variables = running.environment(cluster, folder, namespaces=kube.namespace, lease=True)
    one = OperatorProcess(environment=variables | {"OMNI_OPERATOR_POD_NAME": "one"}, log=tmp_path / "one.log")
    other = OperatorProcess(environment=variables | {"OMNI_OPERATOR_POD_NAME": "other"}, log=tmp_path / "other.log")
    try:
        one.start()
        eventually(lambda: election.holder() == "one")
        other.start()
        kube.apply(pipeline())
        kube.wait_ready("duo")
        assert "managing" not in other.log.read_text()
        one.kill()
        killed = time.time()
        kube.apply(pipeline(processGroups=[{"name": "first", "replicas": 2}]))
        eventually(lambda: len(kube.all("pods")) == 4, within_s=100, what="the other has taken over")
        assert election.holder() == "other"
        assert election.acquired_at() - killed < FAILOVER_S
        one.start()
        time.sleep(SETTLE_S)
        assert other.stop() == 0
        eventually(lambda: election.holder() == "one", what="a released lease is taken")
    finally:
        for process in (one, other):
            process.close()
            print(process.log.read_text() if process.log.exists() else "")
