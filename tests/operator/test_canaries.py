"""A revision that is tried and taken back: whole reconciles against an API server and coordinators in memory."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
import pytest
from rich.console import Console

from omnipipeline_operator.changes.conditions import rfc3339
from omnipipeline_operator.cluster.status_client import CoordinatorStatus, InstanceStatus, RevisionOutcomes
from omnipipeline_operator.desired import naming
from omnipipeline_operator.kinds import CONFIG_MAP, DEPLOYMENT, PIPELINE, POD
from omnipipeline_operator.kubectl import tree
from omnipipeline_spec.types.pods import CANARY_FILE, COORDINATOR
from omnipipeline_spec.types.quantities import MAX_STAGES
from omnipipeline_spec.types.status import PipelineStatus
from tests.operator.test_reconcile_snapshots import KEY, Operator

CANARY = {"weight": 40, "stepSeconds": 30, "abortOn": {"errorRate": 0.1}}
GROUPS = [{"name": "first", "replicas": 2}]


class Cluster:
    """An operator, and what Deployment controllers, kubelets and two coordinators do."""

    def __init__(self) -> None:
        self.operator = Operator()  # its pipeline has no child yet
        self.outcomes: dict[str, RevisionOutcomes] = {}
        self.answers = True

    def edit(self, **spec: Any) -> None:
        spec = {"rollout": {"canary": CANARY}, "processGroups": GROUPS, **spec}
        self.operator.edit(self.operator.live(PIPELINE, "duo"), **spec)

    async def settle(self, seconds: float = 0.0) -> None:
        """Reconcile until nothing changes, with pods that are ready at once."""
        self.operator.now += seconds
        self._play()
        for _ in range(20):
            writes = await self.operator.reconcile()
            if not self._play() and not writes:
                return
        raise AssertionError(f"no end: {writes}")

    def _play(self) -> bool:
        """Whether any pod came or went. Each coordinator knows all pods."""
        self.operator.store.put(self.operator.live(CONFIG_MAP, "duo-revisions"))  # a merge patch is seen by its watch
        wanted, known = set(), {name for kind, _, name in self.operator.server.objects if kind == POD.name}
        for kind, _, name in list(self.operator.server.objects):
            if kind == DEPLOYMENT.name:
                live = self.operator.live(DEPLOYMENT, name)
                for number in range(live["spec"]["replicas"]):
                    wanted.add(f"{name}-{number}")
                    if f"{name}-{number}" not in known:
                        self._start(live, f"{name}-{number}")
        for name in known - wanted:
            gone = self.operator.server.objects.pop((POD.name, KEY[0], name))
            self.operator.store.drop(gone)
        self.operator.coordinators.answers = self._statuses() if self.answers else []
        return known != wanted

    def _start(self, deployment: dict[str, Any], name: str) -> None:
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        at = rfc3339(self.operator.now)
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": at}
        address = f"10.0.0.{len(self.operator.server.objects)}"
        metadata = {"name": name, "namespace": KEY[0], "labels": labels, "creationTimestamp": at}
        status = {"podIP": address, "phase": "Running", "conditions": [ready]}
        self.operator.watch({"apiVersion": "v1", "kind": POD.name, "metadata": metadata, "spec": {}, "status": status})

    def _statuses(self) -> list[CoordinatorStatus]:
        instances = []
        for (kind, _, _), pod in self.operator.server.objects.items():
            if kind == POD.name and pod["metadata"]["labels"][naming.UNIT_LABEL] != COORDINATOR:
                labels = pod["metadata"]["labels"]
                unit, revision = labels[naming.UNIT_LABEL], labels[naming.REVISION_LABEL]
                endpoint = f"tcp://{pod['status']['podIP']}:5550"
                instances.append(InstanceStatus(unit=unit, revision=revision, endpoint=endpoint, ready=True))
        one = CoordinatorStatus(revisions=self.listed(), instances=tuple(instances), outcomes=self.outcomes)
        return [one, one]

    @property
    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.operator.live(PIPELINE, "duo")["status"]
        return found

    def condition(self, kind: str) -> tuple[str, str]:
        found = next(each for each in self.status["conditions"] if each["type"] == kind)
        return found["status"], found["reason"]

    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = self.operator.live(CONFIG_MAP, "duo-revisions")["data"]
        return found

    def listed(self) -> tuple[str, ...]:
        return tuple(each["revision"] for each in json.loads(self.data()["revisions.json"]))

    def share(self) -> Any:
        return json.loads(self.data().get(CANARY_FILE, '"none"'))

    def pods(self, unit: str) -> dict[str, int]:
        """The replicas by unit revision, those without any left out."""
        found = {}
        for (kind, _, _), one in self.operator.server.objects.items():
            labels = one["spec"]["selector"]["matchLabels"] if kind == DEPLOYMENT.name else {}
            if labels.get(naming.UNIT_LABEL) == unit and one["spec"]["replicas"]:
                found[labels[naming.REVISION_LABEL]] = one["spec"]["replicas"]
        return found


@pytest.fixture
async def cluster() -> Cluster:
    """A pipeline that serves, with a canary for what comes next."""
    cluster = Cluster()
    cluster.edit()
    await cluster.operator.reconcile()
    await cluster.settle()
    assert cluster.condition("Ready") == ("True", "Serving")
    assert CANARY_FILE not in cluster.data(), "a first revision has nothing to be compared with"
    return cluster


async def tried(cluster: Cluster) -> tuple[str, str]:
    """The revision that serves, and one that is tried beside it."""
    cluster.edit(env=[{"name": "A", "value": "1"}])
    await cluster.settle()
    revisions = cluster.status["revision"]
    return revisions["current"], revisions["update"]


@pytest.mark.proves("canary")
async def test_a_revision_is_tried_and_gets_more_with_each_step_until_it_serves(cluster: Cluster) -> None:
    old, new = await tried(cluster)
    assert cluster.share() == {"revision": new, "weight": 0.4}
    assert cluster.listed() == (old, new)
    assert sorted(cluster.pods("first").values()) == [1, 2] and sorted(cluster.pods("last").values()) == [1, 1]
    assert cluster.condition("Progressing") == ("True", "Canary")
    assert cluster.condition("Ready") == ("False", "RollingOut") and cluster.condition("Available")[0] == "True"
    assert cluster.operator.again_s == 2.0, "no watch reports attempts"
    cluster.outcomes = {old: RevisionOutcomes(completed=60), new: RevisionOutcomes(completed=40, failed=1)}
    await cluster.settle(29)
    assert cluster.share()["weight"] == 0.4
    await cluster.settle(1)
    assert (cluster.share()["weight"], cluster.status["canary"]["weight"]) == (0.8, 80)
    assert cluster.status["canary"]["message"].startswith("gets 80 % of the requests after 2 of 82 attempts failed")
    assert cluster.status["revision"]["current"] == old
    await cluster.settle(30)
    assert cluster.status["revision"]["current"] == new and cluster.listed() == (new,)
    assert cluster.share() is None and "canary" not in cluster.status
    assert cluster.condition("Ready") == ("True", "Serving")
    assert (list(cluster.pods("first").values()), list(cluster.pods("last").values())) == ([2], [1])
    assert not await cluster.operator.reconcile()


@pytest.mark.proves("canary")
async def test_a_worse_revision_is_taken_back_and_stays_so_until_the_next_edit(cluster: Cluster) -> None:
    before = cluster.pods("first") | cluster.pods("last")
    old, new = await tried(cluster)
    await cluster.settle(30)
    cluster.outcomes = {old: RevisionOutcomes(completed=60), new: RevisionOutcomes(completed=5, failed=5)}
    await cluster.settle(2)
    assert cluster.pods("first") | cluster.pods("last") == before
    assert cluster.listed() == (old,)
    assert cluster.share() == {"revision": new, "weight": 0.0}, "a coordinator may not have read the list yet"
    assert cluster.condition("Ready") == cluster.condition("Progressing") == ("False", "CanaryAborted")
    assert cluster.condition("Available") == ("True", "Serving")
    assert cluster.condition("StagesReady") == ("True", "AllReady")
    assert cluster.status["revision"] == {**cluster.status["revision"], "current": old, "update": new}
    message = cluster.status["canary"]["message"]
    assert message.startswith(f"revision {new} was taken back, {old} serves: 10 of 20 attempts failed, with the old")
    events = [one for (kind, _, _), one in cluster.operator.server.objects.items() if kind == "Event"]
    warned = [one for one in events if one["reason"] == "CanaryAborted"]
    assert warned and all(one["type"] == "Warning" and new in one["note"] for one in warned)
    assert f"canary: revision {new} was taken back" in _shown(cluster)
    cluster.outcomes = {}
    await cluster.settle(1000)
    assert not await cluster.operator.reconcile()
    assert cluster.operator.again_s is None, "nothing is left to be waited for"

    cluster.edit(env=[{"name": "A", "value": "2"}])
    await cluster.settle()
    assert cluster.condition("Progressing") == ("True", "Canary")
    assert cluster.listed() == (old, cluster.status["revision"]["update"])
    cluster.edit()
    await cluster.settle()
    assert cluster.condition("Ready") == ("True", "Serving") and cluster.listed() == (old,)
    assert "canary" not in cluster.status


async def test_a_revision_that_was_taken_back_comes_when_the_author_wants_no_canary(cluster: Cluster) -> None:
    _, new = await tried(cluster)
    cluster.outcomes = {new: RevisionOutcomes(failed=9)}
    await cluster.settle(2)
    assert cluster.condition("Ready") == ("False", "CanaryAborted")
    cluster.edit(env=[{"name": "A", "value": "1"}], rollout={})
    await cluster.settle()
    assert cluster.condition("Ready") == ("True", "Serving") and cluster.listed() == (new,)


async def test_it_stays_taken_back_while_the_pipeline_is_suspended_and_after_it(cluster: Cluster) -> None:
    old, new = await tried(cluster)
    cluster.outcomes = {new: RevisionOutcomes(failed=9)}
    await cluster.settle(2)
    for suspend in (True, False):
        cluster.edit(env=[{"name": "A", "value": "1"}], suspend=suspend)
        await cluster.settle()
        assert cluster.status["canary"]["aborted"] and cluster.listed() == (old,)
    assert cluster.condition("Available") == ("True", "Serving")


async def test_a_trial_that_a_pause_interrupts_begins_anew_beside_the_old_revision(cluster: Cluster) -> None:
    before = cluster.pods("first") | cluster.pods("last")
    old, new = await tried(cluster)
    cluster.edit(env=[{"name": "A", "value": "1"}], suspend=True)
    await cluster.settle()
    await cluster.settle(1000)
    assert cluster.pods("first") == cluster.pods("last") == {}
    assert cluster.listed() == (old,) and cluster.status["revision"]["current"] == old
    assert cluster.operator.again_s is None, "nothing happens in the pause"
    cluster.edit(env=[{"name": "A", "value": "1"}])
    cluster.answers = False
    await cluster.settle()
    assert cluster.pods("first") | cluster.pods("last") == before, "the old revision comes back first"
    assert cluster.condition("Progressing") == ("True", "Canary")
    assert "from the beginning" in cluster.status["canary"]["message"]
    cluster.answers = True
    await cluster.settle(2)
    assert cluster.listed() == (old, new) and cluster.share() == {"revision": new, "weight": 0.4}
    assert sorted(cluster.pods("first").values()) == [1, 2]
    cluster.outcomes = {new: RevisionOutcomes(failed=9)}
    await cluster.settle(2)
    assert cluster.condition("Ready") == ("False", "CanaryAborted") and cluster.listed() == (old,)


async def test_a_paused_edit_without_a_canary_makes_nothing_when_the_pipeline_was_suspended_meanwhile(
    cluster: Cluster,
) -> None:
    cluster.edit(rollout={})
    await cluster.settle()
    before, old = cluster.pods("first") | cluster.pods("last"), cluster.listed()
    edited: dict[str, Any] = {"env": [{"name": "A", "value": "1"}]}
    cluster.edit(**edited, rollout={"paused": True})
    await cluster.settle()
    cluster.edit(**edited, rollout={"paused": True}, suspend=True)
    await cluster.settle()
    assert cluster.pods("first") == cluster.pods("last") == {}
    cluster.edit(**edited, rollout={"paused": True})
    await cluster.settle()
    assert cluster.pods("first") | cluster.pods("last") == before
    assert cluster.status["revision"]["current"] == old[0] == cluster.listed()[0]
    assert (cluster.condition("Ready"), cluster.condition("Available")) == (("False", "Paused"), ("True", "Serving"))
    assert not await cluster.operator.reconcile()
    cluster.edit(**edited, rollout={})
    await cluster.settle()
    assert cluster.condition("Ready") == ("True", "Serving") and cluster.listed() != old


@pytest.mark.parametrize("failed", [0, 9])
async def test_the_key_stays_while_a_revision_is_tried_or_taken_back(cluster: Cluster, failed: int) -> None:
    old, new = await tried(cluster)
    cluster.outcomes = {new: RevisionOutcomes(failed=failed)}
    await cluster.settle(2)
    listed, pods = cluster.listed(), cluster.pods("first")
    resource = cluster.operator.live(PIPELINE, "duo")
    asked = {**resource, "metadata": {**resource["metadata"], "annotations": {naming.KEY_ROTATION: "monday"}}}
    cluster.operator.watch(asked)
    await cluster.settle(1)
    assert (cluster.listed(), cluster.pods("first")) == (listed, pods)
    accepted = next(each for each in cluster.status["conditions"] if each["type"] == "Accepted")
    assert "The key stays until" in accepted["message"]
    cluster.edit()  # the old spec again
    await cluster.settle()
    await cluster.settle(2)
    assert cluster.condition("Ready") == ("True", "Serving") and "canary" not in cluster.status
    assert old not in cluster.listed(), "the key is replaced now"
    annotations = cluster.operator.live(CONFIG_MAP, "duo-revisions")["metadata"]["annotations"]
    assert annotations[naming.KEY_ROTATION] == "monday"


async def test_nobody_is_told_of_a_step_while_no_coordinator_answers(cluster: Cluster) -> None:
    await tried(cluster)
    cluster.answers = False
    await cluster.settle(1)
    await cluster.settle(1000)
    assert cluster.share()["weight"] == 0.4


async def test_pods_of_another_key_are_not_tried_for_they_share_no_requests(cluster: Cluster) -> None:
    resource = cluster.operator.live(PIPELINE, "duo")
    asked = {**resource["metadata"], "annotations": {naming.KEY_ROTATION: "monday"}}
    cluster.operator.edit({**resource, "metadata": asked}, rollout={"canary": CANARY}, processGroups=GROUPS)
    await cluster.settle()
    assert cluster.condition("Ready") == ("True", "Serving") and "canary" not in cluster.status


def _shown(cluster: Cluster) -> str:
    console = Console(width=400)
    with console.capture() as captured:
        console.print(tree.tree(cluster.operator.live(PIPELINE, "duo"), [], {}))
    return captured.get()


async def test_the_crd_takes_the_status_when_every_process_was_renamed_and_the_revision_is_taken_back() -> None:
    def stages(suffix: str) -> list[dict[str, Any]]:
        names = [f"s{number}" for number in range(MAX_STAGES)]
        made: list[dict[str, Any]] = [
            {"name": name, "process": f"{name}{suffix}", "factory": "m:f", "next": [after]}
            for name, after in itertools.pairwise([*names, ""])
        ]
        return [*made[:-1], {key: value for key, value in made[-1].items() if key != "next"} | {"terminal": True}]

    cluster = Cluster()
    cluster.edit(stages=stages("a"), processGroups=[])
    await cluster.operator.reconcile()
    await cluster.settle()
    cluster.edit(stages=stages("b"), processGroups=[])
    await cluster.settle()
    old, new = cluster.status["revision"]["current"], cluster.status["revision"]["update"]
    cluster.outcomes = {old: RevisionOutcomes(completed=60), new: RevisionOutcomes(completed=0, failed=40)}
    await cluster.settle(40)
    assert cluster.condition("Ready") == ("False", "CanaryAborted")
    msgspec.convert(cluster.status, PipelineStatus)
