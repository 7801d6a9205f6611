"""The status that observed workloads give, as tables."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from omnipipeline_operator.changes import conditions, workloads
from omnipipeline_operator.changes.deciding import rollout
from omnipipeline_operator.changes.deciding.rollout import DesiredUnit, Goal
from omnipipeline_operator.changes.reporting import assessment, diagnostics, status
from omnipipeline_operator.changes.reporting.status_inputs import Exposure, Refusal, StatusInputs
from omnipipeline_operator.changes.workloads import ObservedPod, Workload
from omnipipeline_spec import loading, planning
from omnipipeline_spec.types.plan import PipelinePlan
from omnipipeline_spec.types.pods import COORDINATOR
from omnipipeline_spec.types.status import PipelineStatus

NOW = 1_800_000_000.0
STAGES = [
    {"name": "first", "process": "first", "factory": "m:first", "next": ["last"], "gpu": [0]},
    {"name": "last", "process": "last", "factory": "m:last", "terminal": True},
]


def planned(**more: Any) -> PipelinePlan:
    head = {"apiVersion": "omnipipeline.dev/v1alpha1", "kind": "OmniPipeline", "metadata": {"name": "duo"}}
    return planning.plan(loading.from_resource({**head, "spec": {"stages": STAGES, **more}}).spec, name="duo")


PLAN = planned()
OLD = planned(envDefaults={"OLD": "1"})


def pod(name: str = "p", **more: Any) -> ObservedPod:
    return ObservedPod(name=name, created_at=NOW - 10, **more)


def workload(unit: str, revision: str, *pods: ObservedPod, **more: Any) -> Workload:
    replicas = more.pop("replicas", 1)
    return Workload(
        unit=unit,
        revision=revision,
        name=f"duo-{unit}-{revision}",
        uid="u",
        replicas=replicas,
        created_at=NOW - 20,
        pods=pods,
        **more,
    )


def all_of(plan: PipelinePlan, *pods: ObservedPod, **more: Any) -> list[Workload]:
    return [workload(unit.name, unit.revision, *pods, **more) for unit in plan.units]


def coordinator(*pods: ObservedPod) -> Workload:
    return workload(COORDINATOR, PLAN.coordinator.revision, *pods)


def inputs(*observed: Workload, **more: Any) -> StatusInputs:
    goal_more = {name: more.pop(name) for name in ("suspended", "paused", "strategy") if name in more}
    goal = Goal(
        units={unit.name: DesiredUnit(revision=unit.revision, replicas=1) for unit in PLAN.units},
        coordinator=DesiredUnit(revision=PLAN.coordinator.revision, replicas=more.pop("coordinators", 1)),
        **goal_more,
    )
    return StatusInputs(
        plan=PLAN,
        goal=goal,
        decision=rollout.decide(goal, observed, {}),
        observed=observed,
        entries=rollout.entries(PLAN.current, [OLD.current], observed),
        exposure=Exposure(url="http://duo.space.svc:8000"),
        **more,
    )


def conditions_of(given: StatusInputs, before: dict[str, Any] | None = None) -> dict[str, tuple[str, str]]:
    _, found = status.summarise(given, before or {}, generation=1, now=NOW)
    return {each.type: (each.status, each.reason) for each in found}


READY = pod(ready=True, ready_since=NOW - 5)
RUNNING = (*all_of(PLAN, READY), coordinator(READY))


def test_all_ready_is_ready_and_the_crd_takes_the_status() -> None:
    made, _ = status.summarise(inputs(*RUNNING), {}, generation=4, now=NOW)
    msgspec.convert(made, PipelineStatus)
    assert conditions_of(inputs(*RUNNING)) == {
        "Accepted": ("True", "Valid"),
        "Ready": ("True", "Serving"),
        "Available": ("True", "Serving"),
        "Scheduled": ("True", "AllScheduled"),
        "CoordinatorReady": ("True", "Serving"),
        "StagesReady": ("True", "AllReady"),
        "Exposed": ("True", "Exposed"),
        "Progressing": ("True", "RolledOut"),
        "Suspended": ("False", "NotSuspended"),
    }
    assert {each["observedGeneration"] for each in made["conditions"]} == {4}
    assert made["stagesReady"] == "2/2"
    assert made["revision"] == {"current": PLAN.current.revision, "update": PLAN.current.revision}


def test_coordinators_that_are_not_ready_yet_are_counted_and_the_others_serve() -> None:
    coordinators = coordinator(READY, READY, pod())
    made, found = status.summarise(
        inputs(*all_of(PLAN, READY), coordinators, coordinators=3), {}, generation=1, now=NOW
    )
    assert made["units"][-1] == {
        "name": COORDINATOR,
        "workload": coordinators.name,
        "replicas": 3,
        "ready": 2,
        "updated": 3,
        "registered": 2,
        "revision": coordinators.revision,
    }
    by_type = {each.type: (each.status, each.reason, each.message) for each in found}
    assert by_type["CoordinatorReady"] == ("True", "Serving", "ready pods: 2/3")
    assert by_type["Progressing"] == ("True", "Starting", "waiting for coordinator 2/3")
    assert by_type["Ready"][:2] == ("True", "Serving")


def test_a_roll_of_the_coordinator_is_late_only_when_it_has_made_no_progress_for_so_long() -> None:
    units = [msgspec.structs.replace(each, created_at=NOW - 9000) for each in all_of(PLAN, pod(ready=True))]
    old = workload(COORDINATOR, "old", READY)
    for age, reason in ((20, "RollingOut"), (4000, "ProgressDeadlineExceeded")):
        made = msgspec.structs.replace(coordinator(pod()), created_at=NOW - age)
        assert conditions_of(inputs(*units, old, made))["Progressing"][1] == reason


def test_a_paused_roll_of_the_coordinator_alone_is_reported_as_paused() -> None:
    old = workload(COORDINATOR, "old", READY)
    found = conditions_of(inputs(*all_of(PLAN, READY), old, paused=True))
    assert (found["Ready"], found["Progressing"]) == (("False", "Paused"), ("Unknown", "Paused"))
    assert found["Available"] == ("True", "Serving")


def test_the_same_facts_give_the_same_status_at_any_time() -> None:
    given = inputs(*RUNNING)
    first, _ = status.summarise(given, {}, generation=1, now=NOW)
    again, found = status.summarise(given, first, generation=1, now=NOW + 1000)
    assert again == first
    assert conditions.transitions(found, first["conditions"]) == []


def test_without_a_coordinator_nothing_is_available() -> None:
    found = conditions_of(inputs(*all_of(PLAN, READY), coordinator(pod())))
    assert (found["Available"], found["Ready"]) == (("False", "Starting"), ("False", "Starting"))


def test_with_only_the_old_revision_ready_requests_are_answered_but_it_is_not_ready() -> None:
    found = conditions_of(inputs(*all_of(PLAN, pod()), *all_of(OLD, READY), coordinator(READY)))
    assert found["Available"] == ("True", "Serving")
    assert found["Ready"] == ("False", "RollingOut")
    assert found["Progressing"] == ("True", "RollingOut")


def test_incomplete_sets_of_two_revisions_do_not_make_a_complete_one() -> None:
    new, old = all_of(PLAN), all_of(OLD)
    observed = (workload("first", new[0].revision, READY), workload("last", old[1].revision, READY), coordinator(READY))
    assert conditions_of(inputs(*observed))["Available"][0] == "False"


def test_a_new_revision_is_not_ready_while_old_pods_still_take_requests() -> None:
    assert conditions_of(inputs(*RUNNING, *all_of(OLD, READY)))["Ready"][0] == "False"
    leaving = all_of(OLD, pod(ready=True, terminating=True), replicas=0)
    assert conditions_of(inputs(*RUNNING, *leaving))["Ready"] == ("True", "Serving")


def test_the_worst_diagnostic_names_its_pod_and_cause() -> None:
    broken = pod("duo-first-x", reason="ImagePullBackOff", message="container stage: no such image")
    unplaced = pod("duo-last-y", reason="Unschedulable", message="0/3 nodes", unschedulable=True)
    first, last = PLAN.units
    given = inputs(
        workload("first", first.revision, broken), workload("last", last.revision, unplaced), coordinator(READY)
    )
    made, found = status.summarise(given, {}, generation=1, now=NOW)
    ready = next(each for each in found if each.type == "Ready")
    assert ready.reason == "ImagePullBackOff"
    assert ready.message == "unit first: pod duo-first-x: container stage: no such image"
    assert conditions_of(given)["Scheduled"] == ("False", "Unschedulable")
    assert [each.get("reason") for each in made["units"]] == ["ImagePullBackOff", "Unschedulable", None]


def test_a_failure_of_a_template_that_was_edited_by_hand_names_the_edit_and_keeps_its_message() -> None:
    first, last = PLAN.units
    edited = "Deployment duo-first-{} was edited by hand (`kubectl omni restart` makes a new one): pod p: no image {}"

    def reported(number: str, before: dict[str, Any]) -> tuple[dict[str, Any], str]:
        broken = pod(reason="ImagePullBackOff", message=f"no image {number}")
        drifted = workload("first", first.revision, broken, drifted=True)
        given = inputs(drifted, workload("last", last.revision, READY), coordinator(READY))
        made, found = status.summarise(given, before, generation=1, now=NOW)
        return made, next(each.message for each in found if each.type == "Ready")

    made, ready = reported("0x1", {})
    assert (made["units"][0]["reason"], ready) == (
        "ImagePullBackOff",
        "unit first: " + edited.format(first.revision, "0x1"),
    )
    assert reported("0x2", made) == (made, ready)


def test_a_pod_that_loads_for_too_long_is_reported() -> None:
    slow = ObservedPod(name="slow", created_at=NOW - PLAN.units[0].startup_deadline_s - 1)
    assert conditions_of(inputs(*all_of(PLAN, slow), coordinator(READY)))["Ready"][1] == "StartupDeadlineExceeded"


def test_a_roll_without_capacity_is_reported_but_not_with_recreate() -> None:
    unplaced = pod("new", reason="Unschedulable", message="0/3 nodes: Insufficient nvidia.com/gpu", unschedulable=True)
    observed = (*all_of(PLAN, unplaced), *all_of(OLD, READY), coordinator(READY))
    assert conditions_of(inputs(*observed))["Progressing"] == ("False", "InsufficientCapacity")
    assert conditions_of(inputs(*observed, strategy="Recreate"))["Progressing"][1] != "InsufficientCapacity"


def test_a_quota_that_has_no_room_for_the_surge_is_insufficient_capacity_and_says_what_helps() -> None:
    first, last = PLAN.units
    quota = 'pods "duo-first-1-x" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=1, used: 1'
    observed = (
        workload("first", first.revision, refused=quota),
        workload("last", last.revision, READY),
        *all_of(OLD, READY),
        coordinator(READY),
    )
    _, found = status.summarise(inputs(*observed), {}, generation=1, now=NOW)
    by_type = {each.type: each for each in found}
    squeezed = by_type["Progressing"]
    assert (squeezed.status, squeezed.reason) == ("False", "InsufficientCapacity")
    assert squeezed.message.startswith("unit first gets no pod beside the old revision: duo-first-")
    assert squeezed.message.endswith("raise the quota, lower its replicas, or choose rollout.strategy: Recreate")
    assert by_type["Ready"].message == squeezed.message
    assert (by_type["Scheduled"].reason, by_type["Available"].status) == ("QuotaExceeded", "True")
    assert conditions_of(inputs(*observed, strategy="Recreate"))["Progressing"][1] != "InsufficientCapacity"
    alone = inputs(*observed[:2], coordinator(READY))
    assert conditions_of(alone)["Progressing"][1] == "Starting", "nothing is replaced"


def test_the_coordinators_surge_is_not_helped_by_recreate() -> None:
    unplaced = workload(COORDINATOR, PLAN.coordinator.revision, pod(reason="Unschedulable", message="0/3 nodes"))
    old = workload(COORDINATOR, "old", READY)
    _, found = status.summarise(inputs(*all_of(PLAN, READY), unplaced, old), {}, generation=1, now=NOW)
    [message] = [each.message for each in found if each.type == "Progressing"]
    assert message == (
        "unit coordinator cannot be scheduled beside the old revision: pod p: 0/3 nodes; "
        "free that much or lower its replicas"
    )


def test_no_progress_for_too_long_is_reported_and_the_old_revision_serves() -> None:
    observed = (*all_of(PLAN, pod()), *all_of(OLD, READY), coordinator(READY))
    found = conditions_of(inputs(*observed, progress_deadline_s=15.0))
    assert found["Progressing"] == ("False", "ProgressDeadlineExceeded")
    assert found["Available"] == ("True", "Serving")


def test_a_passed_deadline_needs_no_further_reconcile() -> None:
    starting = inputs(*all_of(PLAN, pod()), coordinator(READY), progress_deadline_s=100.0)
    assert assessment.deadline(starting, NOW) == NOW + 80
    start = PLAN.units[0].startup_deadline_s
    assert assessment.deadline(starting, NOW + 80) == NOW - 10 + start + 1, "StartupDeadlineExceeded is reported then"
    assert assessment.deadline(starting, NOW + start) is None
    assert assessment.deadline(inputs(*RUNNING), NOW) is None


def test_the_serving_revision_changes_when_the_roll_has_finished() -> None:
    before = {"revision": {"current": OLD.current.revision}}
    half = inputs(*all_of(PLAN, pod()), *all_of(OLD, READY), coordinator(READY))
    assert status.serving_revision(half, before) == OLD.current.revision
    assert status.serving_revision(inputs(*RUNNING), before) == PLAN.current.revision


def test_a_refused_spec_keeps_the_rest_of_the_status() -> None:
    before, _ = status.summarise(inputs(*RUNNING), {}, generation=1, now=NOW)
    refusal = Refusal(reason="InvalidSpec", message="stages[0].next: 'nobody' is not a stage")
    made, found = status.refused(refusal, before, generation=2, available=True, now=NOW + 5)
    assert made["units"] == before["units"]
    assert made["observedGeneration"] == 2
    kinds = {each["type"]: each for each in made["conditions"]}
    assert kinds["Accepted"]["message"] == refusal.message
    assert kinds["Available"]["status"] == "True"
    assert kinds["Available"]["lastTransitionTime"] == conditions.rfc3339(NOW)
    assert kinds["Accepted"]["lastTransitionTime"] == conditions.rfc3339(NOW + 5)
    warnings = {each.condition.type for each in conditions.transitions(found, before["conditions"]) if each.warning}
    assert warnings == {"Accepted", "Ready"}


def test_a_suspended_pipeline_has_no_warning() -> None:
    _, found = status.summarise(inputs(coordinator(), suspended=True), {}, generation=1, now=NOW)
    assert not [each for each in found if conditions.is_bad(each) and each.type != "Available"]
    assert conditions_of(inputs(coordinator(), suspended=True))["Ready"] == ("False", "Suspended")


def test_registered_counts_what_the_coordinator_reports_when_it_answers() -> None:
    first = PLAN.units[0]
    made, _ = status.summarise(inputs(*RUNNING, registered={("first", first.revision): 0}), {}, generation=1, now=NOW)
    assert made["units"][0]["ready"] == 1 and made["units"][0]["registered"] == 0
    made, _ = status.summarise(inputs(*RUNNING), {}, generation=1, now=NOW)
    assert made["units"][0]["registered"] == 1


def test_a_crash_is_reported_with_the_last_line_of_the_container() -> None:
    terminated = {"reason": "Error", "exitCode": 1, "message": "Traceback\n  File x\nValueError: no weights\n"}
    manifest = {
        "metadata": {"name": "p"},
        "status": {
            "conditions": [{"type": "PodScheduled", "status": "True"}],
            "containerStatuses": [
                {
                    "name": "stage",
                    "restartCount": 3,
                    "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}},
                    "lastState": {"terminated": terminated},
                }
            ],
        },
    }
    observed = workloads.read_pod(manifest)
    assert (observed.reason, observed.message, observed.restarts) == (
        "CrashLoopBackOff",
        "container stage: ValueError: no weights",
        3,
    )


def test_a_container_killed_for_memory_is_reported_while_it_waits_for_its_restart() -> None:
    waiting = {"state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}}
    ended = {"lastState": {"terminated": {"reason": "OOMKilled", "exitCode": 137, "message": "loading"}}}
    container = {"name": "stage", **waiting, **ended}
    observed = workloads.read_pod({"metadata": {"name": "p"}, "status": {"containerStatuses": [container]}})
    assert observed.reason == "OOMKilled" and "resources.limits.memory" in observed.message


def test_a_pod_whose_node_does_not_answer_names_the_node() -> None:
    conditions = [{"type": "ContainersReady", "status": "True"}, {"type": "Ready", "status": "False"}]
    manifest = {"metadata": {"name": "p"}, "spec": {"nodeName": "n7"}, "status": {"conditions": conditions}}
    assert (workloads.read_pod(manifest).reason, "n7" in workloads.read_pod(manifest).message) == ("NodeLost", True)
    conditions[1] |= {"reason": "ReadinessGatesNotReady"}
    assert workloads.read_pod(manifest).reason is None


def test_a_terminating_pod_is_lost_when_its_node_does_not_answer_or_long_after_its_grace_period() -> None:
    cut_off = [{"type": "ContainersReady", "status": "True"}, {"type": "Ready", "status": "False"}]

    def lost(after_s: float, found: list[dict[str, str]], **metadata: str) -> bool:
        manifest = {
            "metadata": {"name": "p", **metadata},
            "spec": {"nodeName": "n7"},
            "status": {"conditions": found},
        }
        return workloads.read_pod(manifest, now=NOW + after_s).lost

    deleted = {"deletionTimestamp": conditions.rfc3339(NOW)}
    assert [lost(after_s, [], **deleted) for after_s in (-100, 0, 59, 60)] == [False, False, False, True]
    assert lost(-100, cut_off, **deleted)
    assert not lost(9000, cut_off), "it may come back"


def test_a_roll_names_the_old_pod_that_it_waits_for_and_its_node_and_not_a_lost_one() -> None:
    drains = pod("old-1", terminating=True, node="n1", lost_at=NOW + 90)
    other = pod("old-2", terminating=True, node="n2", lost_at=NOW + 95)
    lost = pod("old-0", terminating=True, lost=True, node="n0", lost_at=NOW - 1)

    def progress(given: StatusInputs) -> tuple[str, str, str]:
        _, found = status.summarise(given, {}, generation=1, now=NOW)
        [progressing] = [each for each in found if each.type == "Progressing"]
        return progressing.status, progressing.reason, progressing.message

    held = [workload(unit.name, unit.revision, replicas=0) for unit in PLAN.units]
    old = [workload(unit.name, unit.revision, drains, other, lost, replicas=0) for unit in OLD.units[:1]]
    recreates = inputs(*held, *old, coordinator(READY), strategy="Recreate")
    message = "waiting for first 0/1, last 0/1, until old pod old-1 on node n1 and 1 more has ended"
    assert progress(recreates) == ("True", "RollingOut", message)
    assert assessment.deadline(recreates, NOW) == NOW + 90

    drained = workload(OLD.units[0].name, OLD.units[0].revision, drains, lost, replicas=0)
    assert progress(inputs(*RUNNING, drained)) == (
        "True",
        "RollingOut",
        "waiting for old pod old-1 on node n1 to end",
    )
    only = workload(OLD.units[0].name, OLD.units[0].revision, lost, replicas=0)
    assert progress(inputs(*RUNNING, only, progress_deadline_s=1.0))[:2] == ("True", "RolledOut")


def test_units_that_wait_for_their_model_report_its_prefetch() -> None:
    running, unplaced = pod("f1"), pod("f2", reason="Unschedulable", message="unbound claim")
    broken = pod("f0", finished=True, reason="Error", message="container prefetch: no such model")

    def readiness(*pods: ObservedPod, gave_up: bool = False, done: tuple[int, int] | None = None) -> tuple[str, str]:
        fetching = diagnostics.of_prefetch("duo-prefetch-1", "me/mine", pods, gave_up=gave_up, done=done)
        _, found = status.summarise(inputs(coordinator(pod(ready=True)), fetching=fetching), {}, generation=1, now=NOW)
        [ready] = [each for each in found if each.type == "Ready"]
        return ready.reason, ready.message

    assert readiness(running) == ("Prefetching", "Job duo-prefetch-1 fetches me/mine")
    assert readiness(unplaced) == ("Unschedulable", "pod f2: unbound claim")
    why = "Job duo-prefetch-1: container prefetch: no such model"
    assert readiness(broken, running) == ("PrefetchFailed", f"{why}; it is retried")
    assert readiness(broken, running, done=(0, 0)) == ("PrefetchFailed", f"{why}; it is retried")
    assert readiness(broken, gave_up=True) == ("PrefetchFailed", f"{why}; delete the Job to retry")
    goes_on = "Job duo-prefetch-1 fetches me/mine: 50 % of 12.0 MB"
    remark = "a pod before this one failed: container prefetch: no such model"
    assert readiness(running, done=(6_000_000, 12_000_000)) == ("Prefetching", goes_on)
    assert readiness(broken, running, done=(6_000_000, 12_000_000)) == ("Prefetching", f"{goes_on}; {remark}")
    assert readiness(broken, gave_up=True, done=(1, 2)) == ("PrefetchFailed", f"{why}; delete the Job to retry")


def leaving(since: float) -> ObservedPod:
    return pod(ready=True, terminating=True, leaving_since=since, lost_at=NOW + 60)


@pytest.mark.parametrize(
    ("old", "switched", "serves"),
    [
        (leaving(NOW - 1), None, False),  # its pre-stop pause: it takes requests
        (leaving(NOW - 5), None, True),  # it drains
        (leaving(NOW - 1), True, True),  # no coordinator binds to it
        (leaving(NOW - 5), False, False),
        (READY, True, False),
    ],
)
def test_ready_means_that_no_new_request_meets_the_old_revision(
    old: ObservedPod, switched: bool | None, serves: bool
) -> None:
    left = workload("a", "old", old, replicas=0)
    found = conditions_of(inputs(*RUNNING, left, switched=switched))
    assert found["Ready"] == (("True", "Serving") if serves else ("False", "RollingOut"))


def test_an_old_coordinator_takes_requests_until_it_drains() -> None:
    for since, ready in ((NOW - 1, "False"), (NOW - 5, "True")):
        left = workload(COORDINATOR, "old", leaving(since), replicas=0)
        given = inputs(*RUNNING, left, switched=True)
        assert conditions_of(given)["Ready"][0] == ready
    assert assessment.deadline(inputs(*RUNNING, workload("a", "old", leaving(NOW - 1), replicas=0)), NOW) == NOW + 3
