"""Children on a real API server are created, follow the spec, and belong to their pipeline."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.operator import later_operator
from tests.operator.running import Audit, Kube, OperatorProcess, eventually, pipeline

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

SETTLE_S = 3.0  # for "nothing more happens": several watch events would have arrived by then


def deployments(kube: Kube) -> dict[str, dict[str, int]]:
    """unit -> revision -> replicas."""
    found: dict[str, dict[str, int]] = {}
    for each in kube.all("deployments", "omnipipeline.dev/pipeline"):
        labels = each["spec"]["selector"]["matchLabels"]
        unit = found.setdefault(labels["omnipipeline.dev/unit"], {})
        unit[labels["omnipipeline.dev/revision"]] = each["spec"]["replicas"]
    return found


def test_a_pipeline_becomes_ready_and_a_reconcile_of_a_newer_operator_writes_nothing(
    kube: Kube, operator: OperatorProcess, audit: Audit
) -> None:
    operator.start()
    kube.apply(pipeline(networkPolicy={}, disruption={"podDisruptionBudget": {}}))
    kube("wait", "--for=condition=Ready", "omnipipeline/duo", "--timeout=50s")
    ready = kube.wait_ready("duo")
    assert ready["status"]["stagesReady"] == "2/2"
    assert {each["name"] for each in ready["status"]["units"]} == {"first", "last", "coordinator"}
    assert ready["status"]["revision"]["current"] == ready["status"]["revision"]["update"]
    assert ready["status"]["endpoint"]["url"] == f"http://duo.{kube.namespace}.svc:8000"
    assert kube.names("services") == {"duo", "duo-peers"}
    assert kube.names("networkpolicies") == {"duo-pods", "duo-http"}
    assert len(kube.names("poddisruptionbudgets")) == 3
    assert len(kube.names("deployments")) == 3
    assert len(kube.names("configmaps")) == 4
    assert len(kube.names("secrets")) == 1
    for kind in ("deployments", "configmaps", "services", "secrets", "networkpolicies", "poddisruptionbudgets"):
        for child in kube.all(kind, "omnipipeline.dev/pipeline"):
            assert child["metadata"]["ownerReferences"][0]["uid"] == ready["metadata"]["uid"]
    uids = {each["metadata"]["uid"] for each in kube.all("pods")}
    time.sleep(SETTLE_S)
    assert operator.stop() == 0
    audit.mark()
    operator.start(OMNI_OPERATOR_RELIST_SECONDS="1", OMNI_OPERATOR_STAGE_IMAGE="localhost/omni-stage:newer").managing()
    time.sleep(SETTLE_S)
    assert audit.writes() == []
    assert operator.stop() == 0
    operator.program = (str(Path(__file__).with_name("later_operator.py")),)
    operator.start()
    eventually(lambda: later_operator.SAID in kube.get("service", "duo")["metadata"].get("annotations", {}))
    time.sleep(SETTLE_S)
    assert {each[1] for each in audit.writes()} == {"services"}, "no template, and so no pod"
    assert {each["metadata"]["uid"] for each in kube.all("pods")} == uids


def test_what_the_spec_no_longer_asks_for_is_removed(kube: Kube, operator: OperatorProcess) -> None:
    operator.start()
    rich = pipeline(
        networkPolicy={},
        disruption={"podDisruptionBudget": {}},
        expose={"ingress": {"host": "omni.example.org", "annotations": {"example.org/body-size": "64m"}}},
    )
    kube.apply(rich)
    kube.wait_ready("duo")
    assert kube.names("ingresses") == {"duo"}
    pending = kube.condition("duo", "Exposed")
    assert (pending["status"], pending["reason"]) == ("False", "AddressPending") and "Ingress duo" in pending["message"]
    assert "external" not in kube.get("omnipipeline", "duo")["status"]["endpoint"]
    address = '{"status":{"loadBalancer":{"ingress":[{"ip":"192.0.2.1"}]}}}'
    kube("patch", "ingress", "duo", "--subresource=status", "--type=merge", "-p", address)
    eventually(lambda: kube.condition("duo", "Exposed")["status"] == "True", what="the Ingress has an address")
    assert kube.get("ingress", "duo")["metadata"]["annotations"]["example.org/body-size"] == "64m"
    assert kube.get("omnipipeline", "duo")["status"]["endpoint"]["external"] == "http://omni.example.org"
    pods = {each["metadata"]["uid"] for each in kube.all("pods")}
    kube.apply(pipeline(networkPolicy={"enabled": False}))
    for kind in ("ingresses", "networkpolicies", "poddisruptionbudgets"):
        eventually(partial(lambda kind: not kube.names(kind), kind), what=f"no {kind}")
    assert kube.names("services") == {"duo", "duo-peers"}
    assert {each["metadata"]["uid"] for each in kube.all("pods")} == pods


@pytest.mark.proves("starts-on-demand")
def test_a_unit_that_may_sleep_has_no_pod_and_the_pipeline_is_ready(kube: Kube, operator: OperatorProcess) -> None:
    operator.start()
    kube.apply(pipeline(processGroups=[{"name": "last", "autoscaling": {"minReplicas": 0, "maxReplicas": 2}}]))
    kube.wait_ready("duo")
    assert not kube.all("pods", "omnipipeline.dev/unit=last")
    assert kube.get("configmap", "duo-revisions")["data"]["on-demand.json"] == '["last"]'
    units = {each["name"]: each for each in kube.get("omnipipeline", "duo")["status"]["units"]}
    assert (units["last"]["replicas"], units["last"]["scaling"]) == (0, "starts with 0")
    kube.apply(pipeline(processGroups=[{"name": "last", "replicas": 2}]))
    kube.wait_ready("duo")
    assert "scaling" not in {each["name"]: each for each in kube.get("omnipipeline", "duo")["status"]["units"]}["last"]
    assert len(kube.all("pods", "omnipipeline.dev/unit=last")) == 2


def test_a_bad_spec_leaves_what_runs_alone_and_names_every_fault(
    kube: Kube, operator: OperatorProcess, audit: Audit
) -> None:
    operator.start()
    kube.apply(pipeline())
    kube.wait_ready("duo")
    kube.wait_recorded("duo")
    before = deployments(kube)
    bad = pipeline(
        stages=[
            {"name": "first", "process": "first", "factory": "some.module:first", "next": ["last"]},
            {"name": "last", "process": "last", "factory": "some.module:last", "terminal": True},
            {"name": "lost", "process": "lost", "factory": "some.module:lost", "next": ["last"]},
        ],
        dataPlane={"allowTCP": False},
    )
    audit.mark()
    kube.apply(bad)
    refused = eventually(
        lambda: kube.condition("duo", "Accepted").get("status") == "False" and kube.condition("duo", "Accepted")
    )
    assert refused["reason"] == "InvalidSpec"
    assert "lost" in refused["message"] and "dataPlane.allowTCP" in refused["message"]
    assert kube.condition("duo", "Available")["status"] == "True"
    assert kube.condition("duo", "Ready")["reason"] == "InvalidSpec"
    time.sleep(SETTLE_S)
    assert deployments(kube) == before
    assert [each[1] for each in audit.writes() if each[1] != "events"] == ["omnipipelines/status"], "no hot retry"
    kube.apply(pipeline())
    kube.wait_ready("duo")
    assert deployments(kube) == before


def test_only_the_unit_that_changed_rolls_and_going_back_scales_the_old_one_up(
    kube: Kube, operator: OperatorProcess
) -> None:
    operator.start()
    kube.apply(pipeline())
    kube.wait_ready("duo")
    before = deployments(kube)
    changed = pipeline()
    changed["spec"]["stages"][1]["factoryArgs"] = {"size": 2}
    kube.apply(changed)
    kube.wait_ready("duo")
    after = deployments(kube)
    (old,) = before["last"]
    assert after["last"][old] == 0 and sum(after["last"].values()) == 1
    assert len(after["last"]) == 2
    kube.apply(pipeline())
    kube.wait_ready("duo")
    assert deployments(kube)["last"][old] == 1
    assert set(deployments(kube)["last"]) == set(after["last"])


def test_an_edit_of_inline_code_rolls_the_units_that_use_it_alone(kube: Kube, operator: OperatorProcess) -> None:
    stages: list[dict[str, Any]] = [
        {"name": "first", "process": "first", "factory": "front:make", "next": ["last"]},
        {"name": "last", "process": "last", "factory": "back:make", "terminal": True},
    ]
    files = {"front.py": "import words\n", "words.py": "", "back.py": "def make(): ...\n"}
    operator.start()
    kube.apply(pipeline(stages=stages, code={"inline": files}))
    kube.wait_ready("duo")
    before = deployments(kube)
    kube.apply(pipeline(stages=stages, code={"inline": {**files, "words.py": "WORD = 'edited'\n"}}))
    kube.wait_ready("duo")
    after = deployments(kube)
    assert {unit for unit in after if after[unit] != before[unit]} == {"first"}
    assert sum(after["first"].values()) == 1


def test_replicas_exposure_and_profiling_never_restart_a_pod(kube: Kube, operator: OperatorProcess) -> None:
    operator.start()
    kube.apply(pipeline())
    kube.wait_ready("duo")
    pods = {each["metadata"]["uid"] for each in kube.all("pods")}
    kube.apply(
        pipeline(
            processGroups=[{"name": "first", "replicas": 3}],
            expose={"service": {"port": 80}},
            profiling={"maxSeconds": 60},
            networkPolicy={},
        )
    )
    kube.wait_ready("duo")
    eventually(lambda: len(kube.all("pods")) == 5)
    assert pods < {each["metadata"]["uid"] for each in kube.all("pods")}
    assert kube.get("service", "duo")["spec"]["ports"][0]["port"] == 80
    kube.apply(pipeline())
    eventually(lambda: len([each for each in kube.all("pods") if "deletionTimestamp" not in each["metadata"]]) == 3)
    assert kube.condition("duo", "Ready")["status"] == "True"


def test_suspending_takes_the_pods_and_keeps_the_rest(kube: Kube, operator: OperatorProcess) -> None:
    operator.start()
    kube.apply(pipeline())
    kube.wait_ready("duo")
    kube.apply(pipeline(suspend=True))
    eventually(lambda: not kube.all("pods"), what="no pods")
    assert kube.condition("duo", "Ready")["reason"] == "Suspended"
    assert kube.condition("duo", "Suspended")["status"] == "True"
    assert kube.names("services") == {"duo", "duo-peers"}
    kube.apply(pipeline())
    kube.wait_ready("duo")


def test_deleting_leaves_nothing_and_the_name_can_be_used_at_once(kube: Kube, operator: OperatorProcess) -> None:
    operator.start()
    kube.apply(pipeline())
    kube.wait_ready("duo")
    kube("delete", "omnipipeline", "duo", "--wait=true", "--timeout=50s")
    kube.apply(pipeline())
    ready = kube.wait_ready("duo")
    for kind in ("deployments", "services", "configmaps"):
        for child in kube.all(kind, "omnipipeline.dev/pipeline"):
            assert child["metadata"]["ownerReferences"][0]["uid"] == ready["metadata"]["uid"]
    kube("delete", "omnipipeline", "duo", "--wait=true", "--timeout=50s")
    for kind in ("deployments", "pods", "services", "configmaps", "secrets"):
        eventually(partial(lambda kind: not kube.names(kind), kind), what=f"no {kind} left")


def test_the_largest_pipeline_with_the_longest_names_gets_all_its_children(
    kube: Kube, operator: OperatorProcess
) -> None:
    operator.start()
    names = [f"s{index:02d}{'x' * 60}" for index in range(64)]
    stages = [
        {
            "name": name,
            "process": name,
            "factory": "some.module:stage",
            # 16 edges each are taken, too (tests/contract), and cost the API server 4 s for every write.
            **({"next": names[index + 1 : index + 3], "routeFn": "m:route"} if index < 63 else {"terminal": True}),
        }
        for index, name in enumerate(names)
    ]
    pipeline_name = f"p{'y' * 37}"
    kube.apply(pipeline(pipeline_name, stages=stages))
    ready = kube.wait_ready(pipeline_name, within_s=300)
    assert ready["status"]["stagesReady"] == "64/64"
    assert len(ready["status"]["units"]) == 65
    made = kube.names("deployments")
    assert len(made) == 65 and max(map(len, made)) == 63


def inlined(text: str, **more: Any) -> dict[str, Any]:
    """Both stages from one inline module."""
    made = pipeline(code={"inline": {"made.py": text}}, **more)
    for stage in made["spec"]["stages"]:
        stage["factory"] = f"made:{stage['name']}"
    return made


def test_a_comment_in_inline_code_reaches_the_plans_and_rolls_no_unit(kube: Kube, operator: OperatorProcess) -> None:
    def plans() -> dict[str, str]:
        held = {each["metadata"]["name"]: each["data"] for each in kube.all("configmaps", "omnipipeline.dev/revision")}
        return {name: data["plan.json"] for name, data in held.items() if "coordinator" not in name}

    operator.start()
    kube.apply(inlined("def first(): return 1\ndef last(): return 2\n"))
    kube.wait_ready("duo")
    before, uids = deployments(kube), {each["metadata"]["uid"] for each in kube.all("pods")}
    kube.apply(inlined("# why it is one\ndef first(): return 1\ndef last(): return 2\n"))
    eventually(lambda: all("why it is one" in each for each in plans().values()), what="the plans have the text")
    kube.wait_ready("duo")
    assert deployments(kube) == before and len(plans()) == 2
    assert {each["metadata"]["uid"] for each in kube.all("pods")} == uids
    name = next(iter(plans()))
    kube("patch", "configmap", name, "--type=merge", "-p", '{"data":{"plan.json":"{}"}}')
    eventually(lambda: "why it is one" in plans()[name], what="what somebody has written over is restored")
    kube.apply(inlined("def first(): return 3\ndef last(): return 2\n"))
    eventually(lambda: len(deployments(kube)["first"]) == 2, what="another value rolls its users")


def test_an_undo_runs_the_template_of_the_revision_though_it_was_edited(kube: Kube, operator: OperatorProcess) -> None:
    """An undo does so at once: its edited pods may still end."""
    operator.start()
    kube.apply(pipeline())
    kube.wait_ready("duo")
    [(revision, _)] = deployments(kube)["first"].items()
    name = f"duo-first-{revision}"
    kube("set", "env", f"deployment/{name}", "EDITED=yes")

    def edited() -> list[bool]:
        pods = kube.all("pods", f"omnipipeline.dev/revision={revision}")
        return ["EDITED" in str(each["spec"]["containers"]) for each in pods]

    eventually(lambda: edited() == [True], what="the pod has what was edited")
    changed = pipeline()
    changed["spec"]["stages"][0]["factoryArgs"] = {"size": 2}
    kube.apply(changed)
    eventually(lambda: deployments(kube)["first"].get(revision) == 0, what="the edited pod was told to end")
    kube.apply(pipeline())
    eventually(lambda: deployments(kube)["first"].get(revision) == 1, what="its revision serves again")
    assert "EDITED" not in str(kube.get("deployment", name)["spec"]["template"])
    kube.wait_ready("duo")
    eventually(lambda: edited() == [False], what="the pods are of the revision")
