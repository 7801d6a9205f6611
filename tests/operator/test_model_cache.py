"""What the status remarks on the model cache's claim."""

from __future__ import annotations

from typing import Any, cast

import pytest

from omnipipeline_operator.controller import model_cache
from omnipipeline_operator.controller.snapshots import Snapshot

NAME = "duo-models"
SHARED = "delete it, and the operator makes another one, or name your own claim"


class Claims:
    """A snapshot with one claim."""

    def __init__(self, modes: list[str], phase: str) -> None:
        self._claim = {"metadata": {"name": NAME}, "spec": {"accessModes": modes}, "status": {"phase": phase}}

    def claim(self, name: str) -> dict[str, Any]:
        assert name == NAME
        return self._claim


class Jobs:
    """A snapshot with one Job and the pods of another."""

    def __init__(self, job: dict[str, Any] | None, *pods_of: str) -> None:
        self._job, self._pods = job, [{"metadata": {"labels": {model_cache.JOB_NAME: of}}} for of in pods_of]

    def child(self, kind: Any, name: str) -> dict[str, Any] | None:
        return self._job

    def pods(self) -> list[dict[str, Any]]:
        return self._pods


@pytest.mark.parametrize(
    "status, pods_of, lacks",
    [
        ({}, [], True),
        ({"active": 0}, ["another"], True),
        ({"active": 1}, ["fetch"], False),
        ({"succeeded": 1}, [], False),
        ({"conditions": [{"type": "Failed", "status": "True"}]}, [], False),
        ({"conditions": [{"type": "Suspended", "status": "False"}]}, [], True),
    ],
)
def test_a_job_that_has_not_ended_and_has_no_pod_is_found(status: Any, pods_of: list[str], lacks: bool) -> None:
    job = {"metadata": {"name": "fetch"}, "status": status}
    created = [{"kind": "Job", "metadata": {"name": "fetch"}}]
    found = model_cache.podless_job(cast(Snapshot, Jobs(job, *pods_of)), created)
    assert found == (job if lacks else None)
    assert model_cache.podless_job(cast(Snapshot, Jobs(None)), created) is None
    assert model_cache.podless_job(cast(Snapshot, Jobs(job)), []) is None


@pytest.mark.parametrize(
    "modes, phase, pods, surge, said",
    [
        (["ReadWriteMany"], "Pending", 1, 0, f"claim {NAME} (ReadWriteMany) has no volume yet"),
        (["ReadWriteMany"], "Bound", 9, 3, None),
        (["ReadOnlyMany", "ReadWriteOnce"], "Bound", 9, 3, None),
        (
            ["ReadWriteOnce"],
            "Bound",
            2,
            1,
            f"claim {NAME} is ReadWriteOnce: its 2 pods can start on one node only; {SHARED}",
        ),
        (
            ["ReadWriteOnce"],
            "Bound",
            1,
            1,
            f"claim {NAME} is ReadWriteOnce: in a roll-out the new pod can start on the old one's node only; "
            "rollout.strategy: Recreate ends the old one first",
        ),
        (["ReadWriteOnce"], "Bound", 1, 0, None),
    ],
)
def test_a_claim_that_pods_cannot_share_is_remarked_on_a_roll_outs_pods_included(
    modes: list[str], phase: str, pods: int, surge: int, said: str | None
) -> None:
    snapshot = cast(Snapshot, Claims(modes, phase))
    created = [{"kind": "PersistentVolumeClaim", "metadata": {"name": NAME}}]
    assert model_cache.shared_claim(snapshot, created, pods, surge=surge) == said
