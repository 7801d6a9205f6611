"""The image of a pipeline revision, as a table of observed workloads."""

from __future__ import annotations

import pytest

from omnipipeline_operator.changes.workloads import ObservedPod, Workload
from omnipipeline_operator.controller.revisions import pinning
from omnipipeline_operator.desired import config
from omnipipeline_operator.desired.naming import IMAGES_PIN, Owner
from omnipipeline_spec.types.plan import PipelineRevision

DAY = "stage:day"


def made(image: str, *pods: ObservedPod, replicas: int = 1, born: float = 0.0) -> Workload:
    return Workload(
        unit="u",
        revision="r",
        name=f"d-{image}-{born}",
        uid="u",
        replicas=replicas,
        created_at=born,
        pods=pods,
        image=image,
    )


RUNS = ObservedPod(name="p", ready=True, started=True)
CRASHES = ObservedPod(name="p", reason="CrashLoopBackOff", started=True)
WAITS = ObservedPod(name="p", reason="Unschedulable")
UNPULLED = ObservedPod(name="p", reason="ImagePullBackOff")


@pytest.mark.parametrize(
    ("own", "remembered", "chosen"),
    [
        ([], None, DAY),
        ([], "stage:known", "stage:known"),
        ([made("stage:a", RUNS)], "stage:known", "stage:a"),
        ([made("stage:a", CRASHES)], None, "stage:a"),
        ([made("stage:a", WAITS)], None, "stage:a"),
        ([made("stage:a")], None, "stage:a"),
        ([made("stage:bad", UNPULLED)], "stage:bad", DAY),
        ([made("stage:bad", UNPULLED), made("stage:bad", WAITS)], "stage:bad", DAY),
        # Somewhere it was pulled: it is a node that lacks it.
        ([made("stage:a", UNPULLED), made("stage:a", RUNS)], "stage:a", "stage:a"),
        # A rollback: what the revision was made with, the newest where they differ.
        ([made("stage:a", replicas=0, born=1), made("stage:b", replicas=0, born=2)], None, "stage:b"),
        # A part of it runs, a part is revived.
        ([made("stage:old", replicas=0, born=9), made("stage:new", RUNS)], "stage:old", "stage:new"),
        ([made("stage:a", RUNS), made("stage:b", RUNS), made("stage:b", RUNS)], None, "stage:b"),
    ],
)
def test_running_pods_decide_the_image_then_the_pin_then_the_default(
    own: list[Workload], remembered: str | None, chosen: str
) -> None:
    assert pinning.pinned_image(own, remembered, DAY) == chosen


def test_each_revision_s_image_is_kept_with_the_list_and_read_back() -> None:
    def entry(name: str) -> PipelineRevision:
        return PipelineRevision(revision=name, units={}, groups={}, stages={}, entry="a", terminals=("a",), edges=())

    owner = Owner(namespace="n", name="p", uid="u")
    images = {"old": "stage:1", "gone": "stage:0"}
    listed = config.revisions([entry("old"), entry("new")], owner, image="stage:2", control_secret="s", images=images)
    assert config.read_images(listed) == {"old": "stage:1", "new": "stage:2"}
    listed["metadata"]["annotations"][IMAGES_PIN] = "nonsense"
    assert config.read_images(listed) == {"old": "stage:2", "new": "stage:2"}
    same = config.revisions([entry("old"), entry("new")], owner, image="stage:1", control_secret="s", images=images)
    assert IMAGES_PIN not in same["metadata"]["annotations"], "an upgrade of the operator writes nothing"
    assert config.read_images(same) == {"old": "stage:1", "new": "stage:1"}
    assert config.read_images(None) == {}
