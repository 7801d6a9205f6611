"""Revisions that served are recorded on a real API server, and undoing to one keeps replicas and pods."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest

from tests.operator.running import Kube, OperatorProcess, eventually, pipeline
from tests.operator.test_cluster_children import deployments

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


def omni(kube: Kube, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "omnipipeline_operator.kubectl.cli", "-n", kube.namespace, *arguments],
        env=kube.cluster.environment,
        capture_output=True,
        text=True,
    )


def recorded(kube: Kube) -> list[int]:
    return sorted(int(one["revision"]) for one in kube.all("controllerrevisions", "omnipipeline.dev/pipeline=duo"))


def test_undo_goes_back_to_what_served_and_keeps_the_scale(kube: Kube, operator: OperatorProcess) -> None:
    operator.start()
    kube.apply(pipeline(envDefaults={"GREETING": "hello"}))
    kube.wait_ready("duo")
    eventually(lambda: len(recorded(kube)) == 1, what="the first revision is recorded")
    before = deployments(kube)

    kube.apply(pipeline(envDefaults={"GREETING": "howdy"}))
    kube.wait_ready("duo")
    eventually(lambda: len(recorded(kube)) == 2, what="the second revision is recorded")
    kube.apply(pipeline(envDefaults={"GREETING": "howdy"}, processGroups=[{"name": "first", "replicas": 2}]))
    kube.wait_ready("duo")
    finished = omni(kube, "history", "duo")
    assert "envDefaults" in finished.stdout and finished.stdout.count("(current)") == 1, (
        finished.stdout + finished.stderr
    )
    assert len(recorded(kube)) == 2, "scaling is not a revision"

    went = omni(kube, "undo", "duo")
    assert went.returncode == 0, went.stderr
    back = kube.wait_ready("duo")
    assert back["spec"]["envDefaults"] == {"GREETING": "hello"}
    after = deployments(kube)
    [revision] = before["first"]
    assert after["first"][revision] == 2, "the old Deployment serves again, as large as it was scaled since"
    eventually(lambda: max(recorded(kube)) == back["metadata"]["generation"], what="it is the newest entry again")
    assert len(recorded(kube)) == 2


def test_a_history_has_an_end_and_goes_with_its_pipeline(kube: Kube, operator: OperatorProcess) -> None:
    operator.start()
    limit = {"revisionHistoryLimit": 1}
    for greeting in ("one", "two", "three"):
        kube.apply(pipeline(envDefaults={"GREETING": greeting}, rollout=limit))
        ready = kube.wait_ready("duo")
        newest = ready["metadata"]["generation"]
        eventually(partial(lambda newest: newest in recorded(kube), newest), what=f"{greeting} is recorded")
    eventually(lambda: len(recorded(kube)) == 2, what="the oldest is gone")
    kube("delete", "omnipipeline", "duo")
    eventually(lambda: not recorded(kube), what="the history is gone")
