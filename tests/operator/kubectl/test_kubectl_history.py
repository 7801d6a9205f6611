"""The differences between two specs, and the spec that `undo` writes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnipipeline_operator.kubectl import history
from omnipipeline_operator.kubectl.access import KubectlError
from omnipipeline_operator.kubectl.history import ServedRevision

STAGES: list[dict[str, Any]] = [
    {"name": "a", "process": "p", "factory": "m:a", "next": ["b"]},
    {"name": "b", "process": "q", "factory": "m:b", "terminal": True},
]


def spec(**fields: Any) -> dict[str, Any]:
    return {"stages": STAGES, **fields}


def entry(number: int, *, current: bool = False) -> ServedRevision:
    return ServedRevision(number=number, revision="f00", created="now", spec=spec(), changed=(), current=current)


@pytest.mark.parametrize(
    "old, new, expected",
    [
        (spec(), spec(), ()),
        (spec(image="x:1"), spec(image="x:2"), ("image",)),
        (spec(), spec(stages=[{**STAGES[0], "factoryArgs": {"k": 1}}, STAGES[1]]), ("stages[a].factoryArgs",)),
        (spec(), spec(stages=[*STAGES, {"name": "c"}]), ("stages[c] added",)),
        (spec(stages=[*STAGES, {"name": "c"}]), spec(), ("stages[c] removed",)),
        (spec(), spec(stages=STAGES[::-1]), ("the order of stages",)),
        # A field that `undo` leaves as it is is not a difference.
        (spec(), spec(suspend=True, rollout={"paused": True}), ()),
        (spec(), spec(processGroups=[{"name": "p", "replicas": 3}]), ()),
        (spec(), spec(coordinator={"replicas": 3}), ()),
        (spec(coordinator={"replicas": 3, "retries": 2}), spec(coordinator={"retries": 2}), ()),
        (spec(), spec(coordinator={"replicas": 3, "retries": 2}), ("coordinator",)),
        (spec(rollout={"maxSurge": 2}), spec(rollout={"maxSurge": 2, "paused": True}), ()),
        (spec(), spec(processGroups=[{"name": "p", "replicas": 3, "sharedMemory": "1Gi"}]), ("processGroups",)),
    ],
)
def test_a_difference_is_named_by_its_field(old: Any, new: Any, expected: tuple[str, ...]) -> None:
    assert history.differences(old, new) == expected


def test_what_was_scaled_suspended_or_paused_since_then_stays_so() -> None:
    old = spec(image="x:1", suspend=False, processGroups=[{"name": "p", "replicas": 2}, {"name": "q", "replicas": 9}])
    live = spec(
        image="x:2",
        suspend=True,
        rollout={"paused": True},
        coordinator={"replicas": 3, "retries": 2},
        processGroups=[{"name": "p", "replicas": 5}, {"name": "q"}, {"name": "gone", "replicas": 4}],
    )
    assert history.restored(old, live) == spec(
        image="x:1",
        suspend=True,
        rollout={"paused": True},
        coordinator={"replicas": 3},
        processGroups=[{"name": "p", "replicas": 5}, {"name": "q"}],
    )
    assert old["processGroups"][0]["replicas"] == 2, "the entry itself is left alone"


def test_replicas_are_not_set_beside_autoscaling() -> None:
    scaled = [{"name": "p", "autoscaling": {"maxReplicas": 4}}]
    live = spec(processGroups=[{"name": "p", "replicas": 5}, {"name": "q", "replicas": 2}])
    assert history.restored(spec(processGroups=scaled), live)["processGroups"] == [
        *scaled,
        {"name": "q", "replicas": 2},
    ]


def test_replicas_of_prefill_stay_and_those_of_a_process_that_was_fused_go() -> None:
    apart = {**STAGES[1], "disaggregation": {"prefill": {"process": "early"}}}
    alone = {"name": "c", "factory": "m:c", "disaggregation": {"prefill": {"process": "x"}, "decode": {"process": "r"}}}
    live = spec(processGroups=[{"name": name, "replicas": 3} for name in ("p", "q", "early", "r")])
    old = {"stages": [STAGES[0], apart, alone]}
    assert history.restored(old, live)["processGroups"] == live["processGroups"]
    fused = history.restored(spec(fusedStages=[["a", "b"]]), live)
    assert fused["processGroups"] == [{"name": "p", "replicas": 3}]


def pods(*gpus: int) -> list[dict[str, Any]]:
    """The stages with a GPU each: those of one id share a pod."""
    return [{**stage, "gpu": gpu} for stage, gpu in zip(STAGES, gpus, strict=True)]


def of_groups(spec: dict[str, Any]) -> dict[str, Any]:
    return {group["name"]: group.get("replicas") for group in spec.get("processGroups", ())}


@pytest.mark.parametrize(
    ("live", "expected"),
    [
        ({"p": 3, "q": 2}, {"p": 3, "q": 3}),
        ({"p": 3}, {"p": 3}),
        ({"q": 2}, {"q": 2}),
        ({}, {}),
    ],
)
def test_groups_that_share_a_pod_again_get_one_count(live: dict[str, int], expected: dict[str, int]) -> None:
    apart = spec(processGroups=[{"name": name, "replicas": count} for name, count in live.items()])
    shared = {"stages": pods(0, 0)}
    assert of_groups(history.restored(shared, {**apart, "stages": pods(0, 1)})) == expected
    assert (
        history.restored(shared, {**apart, "stages": pods(0, 1)} | {"processGroups": []}).get("processGroups") is None
    )


def test_a_group_keeps_the_count_of_the_pod_that_it_leaves() -> None:
    live = {"stages": pods(0, 0), "processGroups": [{"name": "p", "replicas": 3}]}
    assert of_groups(history.restored({"stages": pods(0, 1)}, live)) == {"p": 3, "q": 3}
    assert history.differences(live, live) == ()


def test_replicas_are_not_set_beside_a_group_of_the_pod_that_has_autoscaling() -> None:
    old = {"stages": pods(0, 0), "processGroups": [{"name": "p", "autoscaling": {"maxReplicas": 4}}]}
    live = {"stages": pods(0, 1), "processGroups": [{"name": "q", "replicas": 2}]}
    assert history.restored(old, live) == old


@pytest.mark.parametrize(
    "live",
    [
        spec(processGroups=[{"name": "p", "autoscaling": {"minReplicas": 2, "maxReplicas": 8}}]),
        {"stages": [{**STAGES[1], "name": "other", "process": "other"}]},
    ],
)
def test_the_old_replicas_come_back_where_the_live_spec_has_none_of_its_own(live: dict[str, Any]) -> None:
    old = spec(processGroups=[{"name": "p", "replicas": 4}])
    assert history.restored(old, live) == old


def test_replicas_of_none_are_not_carried_to_a_process_that_is_not_prefill() -> None:
    apart = {**STAGES[1], "disaggregation": {"prefill": {"process": "p"}}}
    live = {"stages": [apart], "processGroups": [{"name": "p", "replicas": 0}]}
    assert history.restored(spec(processGroups=[{"name": "p", "replicas": 4}]), live) == spec(
        processGroups=[{"name": "p", "replicas": 4}]
    )


def test_local_devices_fit_the_replicas_that_stay() -> None:
    def of(**group: Any) -> dict[str, Any]:
        return {"stages": pods(0, 1), "processGroups": [{"name": "p", **group}]}

    old, both = of(localGpus=[[0]]), [[0], [1]]
    assert history.restored(old, of(replicas=2, localGpus=both)) == of(localGpus=both, replicas=2)
    assert history.restored(old, of(replicas=2)) == of(replicas=2)
    assert history.restored(of(replicas=2, localGpus=both), of()) == of()


groups = st.lists(
    st.fixed_dictionaries(
        {"name": st.sampled_from("pq")},
        optional={"replicas": st.integers(1, 5), "sharedMemory": st.sampled_from(["1Gi", "2Gi"])},
    ),
    unique_by=lambda group: str(group["name"]),
)
specs = st.fixed_dictionaries(
    {"stages": st.sampled_from([STAGES, pods(0, 0), pods(0, 1)])},
    optional={
        "image": st.sampled_from(["x:1", "x:2"]),
        "suspend": st.booleans(),
        "rollout": st.fixed_dictionaries({}, optional={"paused": st.booleans(), "maxSurge": st.integers(1, 3)}),
        "coordinator": st.fixed_dictionaries(
            {}, optional={"replicas": st.integers(1, 3), "retries": st.integers(0, 2)}
        ),
        "processGroups": groups,
    },
)


@given(specs, specs)
def test_after_going_back_nothing_differs_and_going_back_again_changes_nothing(old: Any, live: Any) -> None:
    now = history.restored(old, live)
    assert history.differences(old, now) == ()
    assert history.restored(old, now) == now


def test_the_newest_entry_that_is_not_the_spec_is_the_default() -> None:
    assert history.chosen([entry(1), entry(3), entry(4, current=True)], None).number == 3
    assert history.chosen([entry(1), entry(3)], None).number == 3, "the spec has never served"
    with pytest.raises(KubectlError, match="no earlier revision"):
        history.chosen([entry(4, current=True)], None)
    with pytest.raises(KubectlError, match="revision 2 is not in the history, which has 1, 3"):
        history.chosen([entry(1), entry(3)], 2)
