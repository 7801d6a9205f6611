"""Workloads that do not start are checked for missing references, and these are reported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec
import pytest

from omnipipeline_operator import errors
from omnipipeline_operator.changes import workloads
from omnipipeline_operator.changes.conditions import rfc3339
from omnipipeline_operator.changes.workloads import ObservedPod, Workload
from omnipipeline_operator.cluster.applying import Applier
from omnipipeline_operator.cluster.client import Client
from omnipipeline_operator.controller.observing import missing
from omnipipeline_operator.controller.observing.missing import RECENT_S, MissingReferences, ReferenceChecker
from omnipipeline_operator.desired import children, naming
from omnipipeline_operator.desired.naming import Owner
from omnipipeline_operator.desired.pod_templates.pods import PodFacts
from omnipipeline_spec import loading, planning

NOW = 1_800_000_000.0
OWNER = Owner(namespace="n", name="p", uid="u")


class Server:
    """The requests that a check makes to an API server."""

    def __init__(self, *, secret: bool | Exception = True, events: tuple[dict[str, Any], ...] = ()) -> None:
        self.secret, self.events = secret, events
        self.calls: list[str] = []

    async def get(self, kind: Any, namespace: str, name: str) -> dict[str, Any]:
        self.calls.append(f"{kind.name} {name}")
        raise errors.NotFound("GET", 404, "no")

    async def warnings(self, namespace: str, **about: str) -> list[Any]:
        self.calls.append(f"events of {about}")
        return list(self.events)

    async def secret_is_missing(self, manifest: Any) -> bool:
        self.calls.append(f"Secret {manifest['metadata']['name']}")
        if isinstance(self.secret, Exception):
            raise self.secret
        return not self.secret


async def ask(
    server: Server,
    *observed: Workload,
    podless_job: dict[str, Any] | None = None,
    lacking: Mapping[str, str] = {},
    **spec: Any,
) -> MissingReferences:
    stage = {"name": "only", "process": "only", "factory": "m:only", "terminal": True, "gpu": [0]}
    head = {"apiVersion": "omnipipeline.dev/v1alpha1", "kind": "OmniPipeline", "metadata": {"name": "p"}}
    pipeline = loading.from_resource({**head, "spec": {"stages": [stage], **spec}}).spec
    plan = planning.plan(pipeline, name="p")
    desired = children.children(pipeline, plan, PodFacts(owner=OWNER, image="i", control_secret="s"))
    [unit] = [each for each in desired.workloads if each.unit == "only"]
    live = [msgspec.structs.replace(each, revision=unit.revision) for each in observed]
    asker = ReferenceChecker(cast(Client, server), cast(Applier, server), OWNER, now=NOW)
    decided = {("only", unit.revision): 1}
    return await asker.check(desired, live, decided, every_s=3.0, podless_job=podless_job, lacking=lacking)


def waiting(*ages: float) -> Workload:
    pods = tuple(
        ObservedPod(name=f"p{n}", uid=f"u{n}", created_at=NOW - age, waits_for_volumes=True)
        for n, age in enumerate(ages)
    )
    return Workload(unit="only", revision="", name="d", uid="u", replicas=1, pods=pods)


def event(reason: str, age_s: float) -> dict[str, Any]:
    return {"reason": reason, "message": f"{reason}\n  because", "lastTimestamp": rfc3339(NOW - age_s)}


NEEDS: dict[str, Any] = {"envFrom": [{"secretRef": {"name": "hub"}}], "code": {"configMapRef": {"name": "code"}}}


async def test_units_with_missing_references_are_held_and_each_reference_is_checked_once() -> None:
    server = Server(secret=False)
    found = await ask(server, **NEEDS)
    assert [(each.unit, each.reason, each.message) for each in found.diagnostics] == [
        ("only", "ReferenceNotFound", "ConfigMap code (code.configMapRef), Secret hub (envFrom[0]) do not exist")
    ]
    assert [unit for unit, _ in found.held] == ["only"] and found.again_s == 3.0
    assert sorted(server.calls) == ["ConfigMap code", "Secret hub"]


@pytest.mark.parametrize("name", ["../../other/configmaps/theirs", "..", "a?b", "a/b", "A b"])
async def test_the_api_server_is_asked_for_no_name_that_leads_elsewhere(name: str) -> None:
    """The path of a request is cut where it has two points: a tenant could ask for objects of other namespaces."""
    server = Server()
    volumes = [{"name": "c", "configMap": {"name": name}}, {"name": "s", "secret": {"secretName": name}}]
    found = await ask(server, processGroups=[{"name": "only", "podTemplate": {"spec": {"volumes": volumes}}}])
    assert [each.message for each in found.diagnostics] == [
        f"ConfigMap {name} (volume c), Secret {name} (volume s) do not exist"
    ]
    assert server.calls == []


@pytest.mark.parametrize(
    "refusal", [errors.Forbidden("POST", 403, "exceeded quota"), errors.Unavailable("POST", 0, "")]
)
async def test_a_secret_whose_existence_is_unknown_holds_nothing_back(refusal: Exception) -> None:
    found = await ask(Server(secret=refusal), envFrom=NEEDS["envFrom"])
    assert (found.held, found.diagnostics) == (frozenset(), ())


async def test_workloads_that_have_started_are_not_checked() -> None:
    server = Server(secret=False)
    runs = Workload(
        unit="only", revision="", name="d", uid="u", replicas=1, pods=(ObservedPod(name="p", started=True),)
    )
    assert await ask(server, runs, **NEEDS) == MissingReferences()
    assert server.calls == []


async def test_a_new_pod_of_a_workload_that_has_started_is_reported_while_it_waits_for_its_volumes() -> None:
    """A Secret that has lost a key: the pods that run keep what they have read."""
    runs = ObservedPod(name="p", uid="u", started=True, ready=True, created_at=NOW - 900)
    one = msgspec.structs.replace(waiting(60), pods=(runs, *waiting(60).pods))
    server = Server(secret=False, events=(event("FailedMount", 9),))
    found = await ask(server, one, **NEEDS)
    assert [(each.unit, each.reason, each.message) for each in found.diagnostics] == [
        ("only", "FailedMount", "pod p0: FailedMount because")
    ]
    assert (found.held, found.again_s) == (frozenset(), 30.0)
    assert server.calls == ["events of {'uid': 'u0'}"]


async def test_without_an_api_for_claims_a_unit_that_needs_it_gets_no_pods_unless_it_runs() -> None:
    claiming: dict[str, Any] = {"processGroups": [{"name": "only", "gpuClaim": {"deviceClassName": "gpu"}}]}
    lacking = {"ResourceClaimTemplate": "the server could not find the requested resource"}
    found = await ask(Server(), waiting(1.0), lacking=lacking, **claiming)
    assert [(each.unit, each.reason, each.message) for each in found.diagnostics] == [
        (
            "only",
            "DeviceClaimsMissing",
            "gpuClaim needs ResourceClaimTemplate of resource.k8s.io/v1, which the operator cannot read in this "
            "cluster: the server could not find the requested resource",
        )
    ]
    assert [unit for unit, _ in found.held] == ["only"]
    runs = msgspec.structs.replace(waiting(), pods=(ObservedPod(name="p", started=True),))
    assert await ask(Server(), runs, lacking=lacking, **claiming) == MissingReferences()
    assert await ask(Server(), lacking=lacking) == MissingReferences(), "only who asks for claims"
    assert await ask(Server(), lacking={"HTTPRoute": "gone"}, **claiming) == MissingReferences()


async def test_of_many_waiting_pods_the_oldest_ones_newest_failure_is_reported() -> None:
    events = (
        event("FailedScheduling", 1),
        event("FailedMount", 9),
        event("FailedAttachVolume", 2),
        event("Unhealthy", 0),
    )
    server = Server(events=events)
    found = await ask(server, waiting(5, 60, 5))
    assert [(each.reason, each.message) for each in found.diagnostics] == [
        ("FailedAttachVolume", "pod p1: FailedAttachVolume because")
    ]
    assert server.calls == ["events of {'uid': 'u1'}"]
    assert found.again_s == 30.0 and found.held == frozenset()


async def test_an_old_event_of_a_kubelet_is_ignored() -> None:
    server = Server(events=(event("FailedMount", RECENT_S + 1),))
    assert (await ask(server, waiting(600))).diagnostics == ()


async def test_the_time_of_an_event_may_be_any_that_kubernetes_takes() -> None:
    odd = {**event("FailedMount", 1), "lastTimestamp": "0000-01-01T00:00:00Z"}
    found = await ask(Server(events=(odd, event("FailedAttachVolume", 2))), waiting(600))
    assert [each.reason for each in found.diagnostics] == ["FailedAttachVolume"]


def test_pods_that_are_refused_are_retried_though_the_clock_was_set_back() -> None:
    refused = Workload(unit="only", revision="", name="d", uid="u", replicas=1, refused_since=NOW - 60, refused="quota")
    soon = [msgspec.structs.replace(refused, tried_at=NOW + ahead) for ahead in (-60, 3600)]
    assert [missing.retry_at(each, NOW) for each in soon] == [NOW - 50] * 2


async def test_a_job_without_pods_is_reported_with_the_last_refusal_of_one() -> None:
    job = {"metadata": {"name": "fetch", "uid": "j", "creationTimestamp": rfc3339(NOW - 20)}}
    refused = 'Error creating: pods "fetch-x7k" is forbidden: exceeded quota: few, must specify limits.cpu'
    refusal = {**event("FailedCreate", 900), "message": refused}
    server = Server(events=(refusal, event("SuccessfulDelete", 0)))
    found = await ask(server, podless_job=job)
    assert [(each.unit, each.reason, each.message) for each in found.diagnostics] == [
        ("", "QuotaExceeded", "Job fetch: pods are forbidden: exceeded quota: few, must specify limits.cpu")
    ]
    assert (server.calls, found.again_s, found.held) == (["events of {'uid': 'j'}"], 10.0, frozenset())
    assert (await ask(Server(), podless_job=job)).diagnostics == ()


async def test_an_event_that_stands_for_similar_ones_is_reported_as_one_of_them() -> None:
    """Its text begins otherwise from the tenth on; the name of a pod in it changes with each attempt."""
    combined, quota = "(combined from similar events): ", "exceeded quota: few"
    of_pod = {**event("FailedCreate", 9), "message": f'{combined}Error creating: pods "d-1-x7k" is forbidden: {quota}'}
    refused = Workload(unit="only", revision="", name="d", uid="u", replicas=1, refused_since=NOW - 60, refused="first")
    found = await ask(Server(events=({**of_pod, "involvedObject": {"name": "d-1"}},)), refused)
    assert found.refused == {"d": f'pods "d-1-x7k" is forbidden: {quota}'}
    job = {"metadata": {"name": "fetch", "uid": "j", "creationTimestamp": rfc3339(NOW - 20)}}
    found = await ask(Server(events=(of_pod,)), podless_job=job)
    assert [each.message for each in found.diagnostics] == [f"Job fetch: pods are forbidden: {quota}"]
    mount = {**event("FailedMount", 9), "message": f"{combined}no such key"}
    found = await ask(Server(events=(mount,)), waiting(60))
    assert [each.message for each in found.diagnostics] == ["pod p0: no such key"]


async def test_a_pod_that_has_just_been_made_is_given_time() -> None:
    server = Server(events=(event("FailedMount", 0),))
    found = await ask(server, waiting(1))
    assert (found.diagnostics, server.calls, found.again_s) == ((), [], 2.0)


async def test_a_missing_pull_secret_is_named_with_the_image_that_cannot_be_pulled() -> None:
    pods = (ObservedPod(name="p", reason="ImagePullBackOff", message="container stage: 401"),)
    unpulled = Workload(unit="only", revision="", name="d", uid="u", replicas=1, pods=pods)
    found = await ask(Server(secret=False), unpulled, imagePullSecrets=[{"name": "registry"}])
    [diagnostic] = found.diagnostics
    assert diagnostic.message == "pod p: container stage: 401; Secret registry (imagePullSecrets) does not exist"


# --- pods with containers of the author's ------------------------------------------------------------------------

INITIALIZES = {"waiting": {"reason": "PodInitializing"}}
CREATES = {"waiting": {"reason": "ContainerCreating"}}
UNPULLED = {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}
RUNS = {"running": {"startedAt": rfc3339(NOW - 30)}}
COMPLETED = {"terminated": {"exitCode": 0, "finishedAt": rfc3339(NOW - 40)}}


def pod(
    stage: dict[str, Any], *, proxy: dict[str, Any] | None = None, init: dict[str, Any] | None = None, unit: str = "a"
) -> ObservedPod:
    """A pod a minute old, with the generated container and those that the author, or an injector, has added."""
    name = "coordinator" if unit == "coordinator" else "stage"
    containers = [{"name": name, "state": stage}, *([{"name": "istio-proxy", "state": proxy}] if proxy else [])]
    status: dict[str, Any] = {"containerStatuses": containers}
    if init:
        status["initContainerStatuses"] = [{"name": "wait", "state": init}]
    metadata = {"name": "p", "creationTimestamp": rfc3339(NOW - 60), "labels": {naming.UNIT_LABEL: unit}}
    return workloads.read_pod({"metadata": metadata, "status": status})


@pytest.mark.parametrize(
    "found, waits",
    [
        (pod(CREATES), True),
        (pod(CREATES, proxy=CREATES), True),
        (pod(INITIALIZES, init=INITIALIZES), True),
        (pod(INITIALIZES, proxy=INITIALIZES, init=INITIALIZES), True),
        (pod(INITIALIZES, init=RUNS), False),
        (pod(INITIALIZES, init=COMPLETED), False),
        (pod(UNPULLED, proxy=CREATES), False),
        (pod(RUNS), False),
    ],
)
def test_a_pod_waits_for_its_volumes_until_a_container_or_an_init_container_is_made(
    found: ObservedPod, waits: bool
) -> None:
    assert found.waits_for_volumes == waits
    unit = Workload(unit="a", revision="", name="d", uid="u", replicas=1, pods=(found,))
    assert missing.pods_are_stuck([unit], NOW) == waits


@pytest.mark.parametrize("unit", ["a", "coordinator"])
def test_a_proxy_that_runs_does_not_make_its_pod_count_as_started(unit: str) -> None:
    waiting = pod(UNPULLED, proxy=RUNS, unit=unit)
    assert (waiting.started, waiting.started_at) == (False, 0.0)
    assert Workload(unit=unit, revision="", name="d", uid="u", replicas=1, pods=(waiting,)).waits_for_image
    loads = pod(RUNS, proxy=UNPULLED, unit=unit)
    assert (loads.started, loads.started_at) == (True, NOW - 30)
    assert pod(COMPLETED, proxy=RUNS, unit=unit).started
