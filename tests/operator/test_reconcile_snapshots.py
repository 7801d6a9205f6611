"""A whole reconcile against an API server in memory: which snapshot its decisions and its report are made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec
import pytest

from omnipipeline_operator import errors
from omnipipeline_operator.cluster.client import Client
from omnipipeline_operator.cluster.status_client import CoordinatorStatus, FetchStatus, StatusClient
from omnipipeline_operator.cluster.store import PipelineKey, Store
from omnipipeline_operator.controller.reconciling import Reconciler
from omnipipeline_operator.desired import naming
from omnipipeline_operator.kinds import CONFIG_MAP, DEPLOYMENT, PIPELINE, POLICY, SERVICE
from omnipipeline_operator.settings import DefaultResources, Settings
from omnipipeline_spec.cluster import Resources
from omnipipeline_spec.types.pods import COORDINATOR
from tests.operator.fake_api_server import ApiServer, Write

KEY = ("space", "duo")
STAGES: list[dict[str, Any]] = [
    {"name": "first", "process": "first", "factory": "m:first", "next": ["last"]},
    {"name": "last", "process": "last", "factory": "m:last", "terminal": True},
]


SETTINGS = Settings(stage_image="stage:1")


class Coordinators:
    """A status client whose answers the test chooses; at first it has none."""

    def __init__(self) -> None:
        self.answers: list[CoordinatorStatus] = []
        self.fetches: dict[str, FetchStatus] = {}  #: Statuses of the pods of prefetch Jobs, by address.
        self.asked: Callable[[], None] = lambda: None  #: Called before each answer.

    async def ask(self, addresses: Any) -> list[CoordinatorStatus]:
        self.asked()
        return self.answers

    async def fetch(self, address: str) -> FetchStatus | None:
        return self.fetches.get(address)


class Operator:
    """The store, a reconciler, and the API server that both see."""

    def __init__(
        self, settings: Settings = SETTINGS, *, lacking: Callable[[], Mapping[str, errors.ClusterError]] = dict
    ) -> None:
        self.server, self.store = ApiServer(), Store()
        self.coordinators, self.now = Coordinators(), 1_800_000_000.0
        client, status_client = cast(Client, self.server), cast(StatusClient, self.coordinators)
        self.woken: list[PipelineKey] = []
        self._reconciler = Reconciler(
            client,
            self.store,
            status_client,
            settings,
            clock=lambda: self.now,
            wake=self.woken.append,
            lacking=lacking,
        )
        metadata: dict[str, Any] = {"name": KEY[1], "namespace": KEY[0], "uid": "u", "generation": 1}
        self.edit({"apiVersion": PIPELINE.api_version, "kind": PIPELINE.name, "metadata": metadata})

    def edit(self, resource: dict[str, Any], **spec: Any) -> None:
        """Write the pipeline's spec, as its author does."""
        generation = resource["metadata"]["generation"] + 1
        metadata = {**resource["metadata"], "generation": generation}
        self.watch({**resource, "metadata": metadata, "spec": {"stages": STAGES, **spec}})

    def watch(self, manifest: dict[str, Any]) -> None:
        """Write an object as another writer, and deliver its watch event."""
        self.store.put(self.server.put(manifest))

    def live(self, kind: Any, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.server.objects[kind.key, KEY[0], name]
        return found

    async def reconcile(self, before_write: Callable[[Write], None] = lambda write: None) -> list[Write]:
        """The writes of one reconcile."""
        self.server.writes, self.server.before_write = [], before_write
        self.again_s = await self._reconciler.reconcile(KEY)
        return self.server.writes


@pytest.fixture
async def operator() -> Operator:
    """An operator whose pipeline has all its children."""
    operator = Operator()
    await operator.reconcile()
    return operator


async def test_a_second_reconcile_writes_nothing(operator: Operator) -> None:
    assert await operator.reconcile() == []


async def test_a_key_that_is_rotated_in_a_pause_is_made_when_the_pause_ends(operator: Operator) -> None:
    resource = operator.live(PIPELINE, "duo")
    asked = {**resource["metadata"], "annotations": {naming.KEY_ROTATION: "monday"}}
    operator.edit({**resource, "metadata": asked}, rollout={"paused": True})
    for _ in range(3):
        writes = await operator.reconcile()
        operator.store.put(operator.live(CONFIG_MAP, "duo-revisions"))
    assert writes == []
    operator.edit(operator.live(PIPELINE, "duo"))
    assert ("create", "Secret") in {write[:2] for write in await operator.reconcile()}


async def test_what_follows_from_the_spec_alone_waits_for_no_coordinators_answer(operator: Operator) -> None:
    written_by_then: list[Write] = []
    operator.coordinators.asked = lambda: written_by_then.extend(operator.server.writes)
    annotations = {"example.org/edit": "1"}
    operator.edit(operator.live(PIPELINE, "duo"), image="stage:2", expose={"service": {"annotations": annotations}})
    writes = await operator.reconcile()
    assert written_by_then == [("apply", "Service", "duo")] == writes[:1]
    assert ("create", "Deployment") in {write[:2] for write in writes[1:]}, "the list of revisions needs the answers"


async def test_a_revision_that_serves_is_recorded_once_also_before_the_watch_brings_the_mark(
    operator: Operator,
) -> None:
    operator.edit(operator.live(PIPELINE, "duo"), coordinator={"replicas": 1})
    await operator.reconcile()
    for (kind, _, name), made in list(operator.server.objects.items()):
        if kind == DEPLOYMENT.name:
            labels = made["spec"]["selector"]["matchLabels"]
            metadata = {"name": f"{name}-x", "namespace": KEY[0], "uid": name, "labels": labels}
            ready = [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}]
            operator.watch({"kind": "Pod", "metadata": metadata, "status": {"conditions": ready}})
    recorded = [write[:2] for write in await operator.reconcile()].count(("apply", "ControllerRevision"))
    assert recorded == 1
    assert "ControllerRevision" not in {kind for _, kind, _ in await operator.reconcile()}


async def test_a_coordinators_pod_is_annotated_only_after_the_list_has_changed(operator: Operator) -> None:
    deployments = [operator.live(DEPLOYMENT, name) for kind, _, name in operator.server.objects if kind == "Deployment"]
    (made,) = (one for one in deployments if one["spec"]["selector"]["matchLabels"][naming.UNIT_LABEL] == COORDINATOR)
    template = made["spec"]["template"]["metadata"]
    metadata = {**template, "name": "pod", "namespace": KEY[0], "uid": "pod"}
    status = {"podIP": "10.0.0.1", "phase": "Running"}
    operator.watch({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {}, "status": status})
    assert ("merge", "Pod", "pod") not in await operator.reconcile()
    operator.edit(operator.live(PIPELINE, "duo"), image="stage:2")
    assert ("merge", "Pod", "pod") in await operator.reconcile()


async def test_an_empty_selector_that_the_api_server_drops_is_not_written_again(operator: Operator) -> None:
    sources = [{"podSelector": {"matchLabels": {}}}, {"namespaceSelector": {"matchExpressions": []}}]
    operator.edit(operator.live(PIPELINE, "duo"), networkPolicy={"ingressFrom": sources})
    await operator.reconcile()
    live = operator.live(POLICY, "duo-http")
    live["spec"]["ingress"][0]["from"] = [{"podSelector": {}}, {"namespaceSelector": {}}]
    operator.watch(live)
    assert await operator.reconcile() == []
    live["spec"]["ingress"][0]["from"] = [{"podSelector": {"matchLabels": {"a": "b"}}}]
    operator.watch(live)
    assert await operator.reconcile() == [("apply", "NetworkPolicy", "duo-http")]


async def test_deployments_that_an_earlier_operator_has_made_are_left_as_they_are(operator: Operator) -> None:
    for kind, _, name in list(operator.server.objects):
        if kind == DEPLOYMENT.name:
            live = operator.live(DEPLOYMENT, name)
            del live["spec"]["progressDeadlineSeconds"], live["spec"]["template"]["metadata"]["annotations"]
            operator.watch(live)
    assert await operator.reconcile() == []


@pytest.mark.parametrize("refused", [("delete", "Ingress"), ("merge", "Pod"), ("apply", "Service")])
async def test_a_deletion_an_annotation_or_an_adoption_that_is_refused_stops_no_other_write(
    operator: Operator, refused: tuple[str, str]
) -> None:
    def refuse(write: Write) -> None:
        if write[:2] == refused:
            raise errors.Forbidden("", 403, "a policy denies it")

    more: dict[str, Any] = {"expose": {"ingress": {}}, "disruption": {"podDisruptionBudget": {}}}
    operator.edit(operator.live(PIPELINE, "duo"), **more)
    await operator.reconcile()
    template = next(
        one["spec"]["template"]
        for one in operator.server.objects.values()
        if one["kind"] == DEPLOYMENT.name and one["metadata"]["labels"][naming.UNIT_LABEL] == COORDINATOR
    )
    metadata = {**template["metadata"], "annotations": {}, "name": "pod", "namespace": KEY[0], "uid": "pod"}
    operator.watch({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": {"podIP": "10.0.0.1"}})
    orphan = operator.live(SERVICE, "duo-peers")
    orphan["metadata"]["ownerReferences"] = []
    operator.watch(orphan)
    operator.edit(operator.live(PIPELINE, "duo"))
    with pytest.raises(errors.Forbidden):
        await operator.reconcile(refuse)
    written = {write[:2] for write in operator.server.writes}
    assert {("delete", "PodDisruptionBudget"), ("apply status", "OmniPipeline")} <= written


NOBODY = 'Internal error occurred: failed calling webhook "w.example.org": failed to call webhook: Post: no endpoints'
BROKEN = 'admission webhook "w.example.org" denied the request: cannot list what it needs'


@pytest.mark.parametrize(
    "status, message",
    [(500, NOBODY), (500, BROKEN), (409, BROKEN), (404, BROKEN), (404, "the server could not find the resource")],
)
async def test_a_child_that_a_webhook_or_a_removed_kind_stands_in_the_way_of_is_told_and_stops_no_other_one(
    status: int, message: str
) -> None:
    def refuse(write: Write) -> None:
        if write[1] == refused:
            raise errors.of_status("PATCH /routes/duo", status, message)

    for refused in (SERVICE.name, DEPLOYMENT.name):
        operator = Operator()
        with pytest.raises(errors.ClusterError):
            await operator.reconcile(refuse)
        made = {kind for kind, _, _ in operator.server.objects}
        assert {SERVICE.name, POLICY.name, DEPLOYMENT.name} - {refused} <= made
        by_type = {each["type"]: each for each in operator.live(PIPELINE, "duo")["status"]["conditions"]}
        told = message if "webhook" in message else f"PATCH /routes/duo: {message} (404)"
        assert (by_type["Accepted"]["reason"], by_type["Accepted"]["message"]) == ("ChildRefused", told)
        assert by_type["Ready"]["message"] == told


async def test_a_pipeline_whose_service_was_refused_is_not_exposed(operator: Operator) -> None:
    def taken(write: Write) -> None:
        if write == ("apply", "Service", "duo"):
            raise errors.Forbidden("", 403, "exceeded quota: few")

    def exposed(of: Operator) -> tuple[str, str, str]:
        conditions = of.live(PIPELINE, "duo")["status"]["conditions"]
        return next((one["status"], one["reason"], one["message"]) for one in conditions if one["type"] == "Exposed")

    without = Operator()
    with pytest.raises(errors.Forbidden):
        await without.reconcile(taken)
    assert exposed(without) == ("False", "ServiceMissing", "Service duo of this pipeline does not exist")
    assert exposed(operator) == ("True", "Exposed", "http://duo.space.svc:8000")


async def test_faults_of_a_spec_stand_in_one_line_for_lists_show_the_first_alone(operator: Operator) -> None:
    limits = {"name": "first", "resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}}
    operator.edit(operator.live(PIPELINE, "duo"), processGroups=[limits, {"name": "nobody"}])
    await operator.reconcile()
    message = operator.live(PIPELINE, "duo")["status"]["conditions"][0]["message"]
    first = "processGroups[1].name: 'nobody' is not a process group; there are 'first', 'last'"
    assert message == f"{first}; processGroups[0].resources.limits.cpu: 1 is less than the request of 2"


async def test_a_deployment_that_somebody_made_with_another_selector_is_made_anew(operator: Operator) -> None:
    name = next(name for kind, _, name in operator.server.objects if kind == DEPLOYMENT.name)
    live = operator.live(DEPLOYMENT, name)
    ours = live["spec"]["selector"]
    live["spec"]["selector"] = {"matchExpressions": [{"key": "app", "operator": "Exists"}]}
    operator.watch(live)
    await operator.reconcile()
    assert operator.live(DEPLOYMENT, name)["spec"]["selector"] == ours


@pytest.mark.proves("odd-values")
async def test_an_exception_while_a_spec_is_planned_is_reported_and_logged_and_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = DefaultResources(stage=Resources(requests={"cpu": "much"}))
    operator = Operator(msgspec.structs.replace(SETTINGS, default_resources=broken))
    assert await operator.reconcile() == [("apply status", "OmniPipeline", "duo")]
    assert operator.again_s == 60.0
    by_type = {each["type"]: each for each in operator.live(PIPELINE, "duo")["status"]["conditions"]}
    accepted = by_type["Accepted"]
    assert (accepted["status"], accepted["reason"]) == ("False", "PlanningFailed")
    assert "ValueError: 'much' is not a quantity" in accepted["message"]
    assert [record.exc_info is not None for record in caplog.records if "cannot be planned" in record.message] == [True]


async def test_the_status_reports_what_the_same_reconcile_has_made() -> None:
    operator = Operator()
    await operator.reconcile()
    units = operator.live(PIPELINE, "duo")["status"]["units"]
    assert {each["workload"] for each in units} == {
        name for kind, _, name in operator.server.objects if kind == DEPLOYMENT.name
    }


async def test_what_a_watch_brings_during_the_writes_is_left_to_the_next_reconcile(operator: Operator) -> None:
    edited = operator.live(SERVICE, "duo")
    edited = {**edited, "spec": {**edited["spec"], "type": "NodePort"}}

    def edit_once(write: Write) -> None:
        if operator.server.writes == []:
            operator.watch(edited)

    operator.edit(operator.live(PIPELINE, "duo"), image="stage:2")
    assert ("apply", "Service", "duo") not in await operator.reconcile(edit_once)
    assert ("apply", "Service", "duo") in await operator.reconcile()


async def test_a_quota_that_admits_no_secret_keeps_no_new_revision_from_being_made(operator: Operator) -> None:
    operator.server.refusals = {"Secret": errors.Forbidden("POST", 403, "exceeded quota: few")}
    operator.edit(operator.live(PIPELINE, "duo"), image="stage:2")
    writes = await operator.reconcile()
    assert [kind for verb, kind, _ in writes if verb == "create"].count(DEPLOYMENT.name) == 3
    assert writes[-1] == ("apply status", "OmniPipeline", "duo")


async def test_a_secret_that_is_missing_is_made_anew_before_pods_need_it(operator: Operator) -> None:
    [secret] = [address for address in operator.server.objects if address[0] == "Secret"]
    del operator.server.objects[secret]
    operator.edit(operator.live(PIPELINE, "duo"), image="stage:2")
    assert await operator.reconcile() == [("apply", "ConfigMap", "duo-revisions")]
    assert ("create", "Secret") in [write[:2] for write in await operator.reconcile()]


async def test_a_new_key_is_made_once_for_each_time_that_one_is_asked_for(operator: Operator) -> None:
    def secrets() -> set[str]:
        return {name for kind, _, name in operator.server.objects if kind == "Secret"}

    def mounted() -> set[str]:
        made = [one for (kind, _, _), one in operator.server.objects.items() if kind == DEPLOYMENT.name]
        volumes = [volume for one in made for volume in one["spec"]["template"]["spec"]["volumes"]]
        return {volume["secret"]["secretName"] for volume in volumes if volume["name"] == "control"}

    first = secrets()
    for occasion in ("monday", "tuesday"):
        before = secrets()
        resource = operator.live(PIPELINE, "duo")
        annotated = {**resource["metadata"], "annotations": {naming.KEY_ROTATION: occasion}}
        operator.edit({**resource, "metadata": annotated})
        assert await operator.reconcile() == [("apply", "ConfigMap", "duo-revisions")]
        writes = await operator.reconcile()
        assert [write[:2] for write in writes].count(("create", "Secret")) == 1
        assert [write[:2] for write in writes].count(("create", "Deployment")) == 3, "a new revision of every unit"
        assert len(secrets() - before) == 1 and secrets() - before <= mounted()
        assert ("create", "Secret") not in [write[:2] for write in await operator.reconcile()]
    assert first <= secrets(), "pods of the old revision have the old key until they have ended"


async def test_a_new_pipeline_that_asks_for_a_key_gets_one_and_no_second() -> None:
    operator = Operator()
    resource = operator.live(PIPELINE, "duo")
    operator.edit({**resource, "metadata": {**resource["metadata"], "annotations": {naming.KEY_ROTATION: "copied"}}})
    assert [write[:2] for write in await operator.reconcile()].count(("create", "Secret")) == 1
    assert await operator.reconcile() == []


async def test_a_pipeline_without_curve_has_no_key_to_rotate() -> None:
    operator = Operator()
    resource = operator.live(PIPELINE, "duo")
    annotated = {**resource["metadata"], "annotations": {naming.KEY_ROTATION: "monday"}}
    operator.edit({**resource, "metadata": annotated}, control={"security": {"mode": "None"}})
    await operator.reconcile()
    assert await operator.reconcile() == []


async def test_a_plan_without_a_deployment_is_kept_when_its_deployment_is_made(operator: Operator) -> None:
    [name] = [name for kind, _, name in operator.server.objects if kind == DEPLOYMENT.name and "first" in name]
    deployment = operator.server.objects.pop((DEPLOYMENT.name, KEY[0], name))
    operator.store.drop(deployment)
    assert await operator.reconcile() == [("create", "Deployment", name)]


def _pod(operator: Operator, unit: str, number: int) -> dict[str, Any]:
    """A ready pod of a unit, without an address: no coordinator is asked."""
    deployments = [operator.live(DEPLOYMENT, name) for kind, _, name in operator.server.objects if kind == "Deployment"]
    (made,) = (one for one in deployments if one["spec"]["selector"]["matchLabels"][naming.UNIT_LABEL] == unit)
    metadata = {**made["spec"]["template"]["metadata"], "name": f"{unit}-{number}", "namespace": KEY[0]}
    status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"nodeName": "n"}, "status": status}


async def test_counts_are_written_once_a_second_and_conditions_at_once(operator: Operator) -> None:
    writes = ("apply status", "OmniPipeline", "duo")
    operator.edit(operator.live(PIPELINE, "duo"), processGroups=[{"name": "first", "replicas": 3}])
    await operator.reconcile()
    for number in range(2):
        operator.watch(_pod(operator, "first", number))
        assert await operator.reconcile() == []
        assert operator.again_s is not None and operator.again_s <= 1.0
    operator.now += 1.0
    assert await operator.reconcile() == [writes]
    unit = operator.live(PIPELINE, "duo")["status"]["units"][0]
    assert (unit["name"], unit["ready"]) == ("first", 2)
    operator.watch(_pod(operator, "last", 0))
    assert writes in await operator.reconcile(), "StagesReady has changed"
    assert [one["ready"] for one in operator.live(PIPELINE, "duo")["status"]["units"]] == [2, 1, 0]
