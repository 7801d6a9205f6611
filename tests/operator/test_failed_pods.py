"""Pods that a kubelet refuses or evicts: what is reported of them, and how long."""

from __future__ import annotations

from typing import Any

import pytest

from omnipipeline_operator.changes import workloads
from omnipipeline_operator.changes.conditions import rfc3339
from omnipipeline_operator.changes.reporting import diagnostics
from omnipipeline_operator.changes.reporting.diagnostics import Diagnostic
from omnipipeline_operator.changes.workloads import ObservedPod, Workload

NOW = 1_800_000_000.0
REFUSAL = "Pod was rejected: Allocate failed: no healthy devices present"
MEMORY = "The node was low on resource: memory."


def failed(
    name: str, reason: str, message: str = REFUSAL, *, age_s: float = 10, life_s: float = 1, **status: Any
) -> ObservedPod:
    """A pod whose phase is Failed, ``age_s`` after its creation and ``life_s`` before its end."""
    made = {"name": name, "creationTimestamp": rfc3339(NOW - age_s)}
    ended = [{"type": "DisruptionTarget", "status": "True", "lastTransitionTime": rfc3339(NOW - age_s + life_s)}]
    observed = {"phase": "Failed", "reason": reason, "message": message, "conditions": ended, **status}
    return workloads.read_pod({"metadata": made, "status": observed})


READY = ObservedPod(name="ready", created_at=NOW - 5, ready=True, admitted=True)
LOADS = ObservedPod(name="loads", created_at=NOW - 5, admitted=True)
UNSEEN = ObservedPod(name="unseen", created_at=NOW - 1)
UNPLACED = ObservedPod(name="unplaced", created_at=NOW - 1, reason="Unschedulable", message="0/3 nodes")
REFUSED = failed("refused", "UnexpectedAdmissionError")
LEAVES = ObservedPod(name="leaves", created_at=NOW - 90, ready=True, terminating=True)


def diagnosed(*pods: ObservedPod, replicas: int = 1, after_s: float = 0) -> Diagnostic | None:
    unit = Workload(unit="first", revision="r", name="d", uid="u", replicas=replicas, pods=pods)
    return diagnostics.of_workload(unit, startup_deadline_s=9000, now=NOW + after_s)


def reason(*pods: ObservedPod, replicas: int = 1, after_s: float = 0) -> str | None:
    found = diagnosed(*pods, replicas=replicas, after_s=after_s)
    return None if found is None else found.reason


def test_a_unit_whose_pods_are_refused_names_the_newest_with_the_kubelets_words_and_their_number() -> None:
    older = [failed(f"p{age}", "UnexpectedAdmissionError", "older", age_s=age) for age in (20, 30)]
    other = failed("e", "Evicted", MEMORY, age_s=99)
    assert diagnosed(*older, REFUSED, other, UNSEEN) == Diagnostic(
        unit="first", reason="UnexpectedAdmissionError", message=f"pod refused: {REFUSAL} (3 pods failed so)"
    )
    assert diagnosed(REFUSED) == Diagnostic(
        unit="first", reason="UnexpectedAdmissionError", message=f"pod refused: {REFUSAL} (1 pod failed so)"
    )


@pytest.mark.parametrize(
    "pods, replicas, expected",
    [
        ([REFUSED, LOADS], 1, "UnexpectedAdmissionError"),
        ([REFUSED, LEAVES], 1, "UnexpectedAdmissionError"),
        ([REFUSED, READY, UNSEEN], 2, "UnexpectedAdmissionError"),
        ([REFUSED, READY], 1, None),
        ([REFUSED, READY, LOADS], 2, None),
        ([REFUSED, READY, UNPLACED], 2, "Unschedulable"),
        ([REFUSED], 0, None),
        ([UNSEEN], 1, None),
    ],
)
def test_a_refused_pod_is_reported_while_its_unit_lacks_pods_that_can_say_why(
    pods: list[ObservedPod], replicas: int, expected: str | None
) -> None:
    assert reason(*pods, replicas=replicas) == expected


def test_an_evicted_pod_is_reported_by_its_eviction_and_not_by_how_its_container_ended() -> None:
    killed = {"name": "stage", "state": {"terminated": {"reason": "Error", "exitCode": 137}}}
    evicted = failed("p", "Evicted", MEMORY, containerStatuses=[killed])
    found = diagnosed(evicted, LOADS)
    assert found is not None and (found.reason, found.message) == ("Evicted", f"pod p: {MEMORY} (1 pod failed so)")


@pytest.mark.parametrize("life_s, reported_s", [(1, 60), (600, 1200), (90_000, 1800)])
def test_an_eviction_is_reported_twice_as_long_as_the_pod_lived_within_limits(life_s: float, reported_s: float) -> None:
    evicted = failed("p", "Evicted", MEMORY, age_s=life_s, life_s=life_s)
    assert reason(evicted, LOADS, after_s=reported_s - 1) == "Evicted"
    assert reason(evicted, LOADS, after_s=reported_s + 1) is None


@pytest.mark.parametrize("kubelets, word", [("OutOfnvidia.com/gpu", "OutOfnvidia_com_gpu"), ("OutOfcpu", "OutOfcpu")])
def test_the_kubelets_reason_becomes_one_that_a_condition_may_have(kubelets: str, word: str) -> None:
    assert reason(failed("p", kubelets)) == word


def test_hundreds_of_refused_pods_change_the_message_a_few_times() -> None:
    messages: list[str] = []
    for number in range(1, 300):
        pods = [failed(f"p{n}", "UnexpectedAdmissionError", age_s=40 - n // 10) for n in range(number)]
        found = diagnosed(*pods)
        assert found is not None
        before = messages[-1] if messages else None
        message = diagnostics.stabilized(found, found.reason, before).message
        messages += [message] if message != before else []
    assert [each.rpartition(" (")[2] for each in messages] == [
        "1 pod failed so)",
        *(f"{number} pods failed so)" for number in range(2, 10)),
        "10 pods or more failed so)",
        "100 pods or more failed so)",
    ]


@pytest.mark.parametrize(
    "replicas, pod, serves",
    [
        (1, ObservedPod(name="p", started=True), True),
        (1, ObservedPod(name="p"), False),
        # An undo scales it up again: its template must be the revision's by then.
        (0, ObservedPod(name="p", started=True, terminating=True), False),
    ],
)
def test_a_workload_at_zero_may_be_made_anew_while_its_pods_end(replicas: int, pod: ObservedPod, serves: bool) -> None:
    unit = Workload(unit="first", revision="r", name="d", uid="u", replicas=replicas, pods=(pod,))
    assert unit.serves is serves
