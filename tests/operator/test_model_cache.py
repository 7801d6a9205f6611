"""The Job that fills the model cache, and what the status remarks on the cache's claim."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
import pytest

from omnipipeline_operator import errors, settings
from omnipipeline_operator.cluster.status_client import FetchStatus
from omnipipeline_operator.controller.observing import model_cache
from omnipipeline_operator.controller.observing.snapshots import Snapshot
from omnipipeline_operator.desired import naming
from omnipipeline_operator.desired.pod_templates.fetching import FETCH
from omnipipeline_operator.kinds import CLAIM, DEPLOYMENT, JOB, PIPELINE, POD
from omnipipeline_operator.settings import NodeModels
from tests.cluster.hub import MODEL, serving
from tests.cluster_kit import REPOSITORY
from tests.operator.fake_api_server import Write
from tests.operator.running import eventually
from tests.operator.test_reconcile_snapshots import SETTINGS, Operator
from tests.patience import patience
from tests.ports import free_port

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
        self._job = job
        self._pods = [
            {"metadata": {"labels": {model_cache.JOB_NAME: of, model_cache.JOB_UID: f"uid of {of}"}}} for of in pods_of
        ]

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
    job = {"metadata": {"name": "fetch", "uid": "uid of fetch"}, "status": status}
    created = [{"kind": "Job", "metadata": {"name": "fetch"}}]
    found = model_cache.podless_job(cast(Snapshot, Jobs(job, *pods_of)), created)
    assert found == (job if lacks else None)
    assert model_cache.podless_job(cast(Snapshot, Jobs(None)), created) is None
    assert model_cache.podless_job(cast(Snapshot, Jobs(job)), []) is None


@pytest.mark.parametrize(
    "modes, phase, pods, surge, problem",
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
    modes: list[str], phase: str, pods: int, surge: int, problem: str | None
) -> None:
    snapshot = cast(Snapshot, Claims(modes, phase))
    created = [{"kind": "PersistentVolumeClaim", "metadata": {"name": NAME}}]
    assert model_cache.shared_claim(snapshot, created, pods, surge=surge) == problem


BOUND = {"phase": "Bound"}


async def claimed(**status: Any) -> Operator:
    """An operator whose pipeline has its claim, of 10Gi and of the class fast."""
    operator = Operator()
    operator.edit(operator.live(PIPELINE, "duo"), **cache("10Gi", "fast"))
    await operator.reconcile()
    operator.watch({**operator.live(CLAIM, NAME), "status": status})
    await operator.reconcile()
    return operator


def cache(size: str, storage_class: str | None = None) -> dict[str, Any]:
    given: dict[str, Any] = {"type": "PersistentVolumeClaim", "size": size}
    return {"modelCache": given | ({"storageClassName": storage_class} if storage_class else {})}


def note(operator: Operator) -> str:
    """The remark of the condition Accepted."""
    found = operator.live(PIPELINE, "duo")["status"]["conditions"]
    [message] = [each["message"] for each in found if each["type"] == "Accepted"]
    return str(message).partition("; ")[2]


def storage(operator: Operator) -> str:
    return str(operator.live(CLAIM, NAME)["spec"]["resources"]["requests"]["storage"])


async def test_a_larger_size_grows_the_claim_once_and_changes_nothing_else_of_it() -> None:
    operator = await claimed(**BOUND)
    before = operator.live(CLAIM, NAME)
    operator.edit(operator.live(PIPELINE, "duo"), **cache("20Gi"))
    assert [write for write in await operator.reconcile() if write[1] == CLAIM.name] == [("merge", CLAIM.name, NAME)]
    after = operator.live(CLAIM, NAME)
    assert after["spec"] == {**before["spec"], "resources": {"requests": {"storage": "20Gi"}}}
    assert [write for write in await operator.reconcile() if write[1] == CLAIM.name] == []
    assert note(operator) == ""


async def test_a_refusal_to_grow_is_quoted_and_the_rest_of_the_spec_is_carried_out() -> None:
    operator = await claimed(**BOUND)

    def refuse(write: Write) -> None:
        if write[1] == CLAIM.name:
            raise errors.Forbidden("PATCH", 403, "the storageclass that provisions the pvc must support resize")

    operator.edit(operator.live(PIPELINE, "duo"), **cache("20Gi"), image="stage:2")
    made = [kind for verb, kind, _ in await operator.reconcile(refuse) if verb == "create"]
    assert made.count("Deployment") == 3
    assert note(operator).startswith(
        f"claim {NAME} cannot grow from 10Gi to 20Gi: the storageclass that provisions the pvc must support resize"
    )
    assert storage(operator) == "10Gi"


@pytest.mark.parametrize(
    "status, edit, remark",
    [
        (BOUND, cache("10Gi", "fast"), ""),
        (BOUND, cache("10240Mi"), ""),
        (BOUND, cache("5Gi"), f"claim {NAME} requests 10Gi, and no claim shrinks to modelCache.size 5Gi"),
        (BOUND, cache("10Gi", "slow"), f"claim {NAME} has storage class fast and keeps it, not slow"),
        ({"phase": "Pending"}, cache("20Gi"), f"claim {NAME} (ReadWriteMany) has no volume yet"),
    ],
)
async def test_what_a_claim_cannot_become_is_remarked(status: Any, edit: dict[str, Any], remark: str) -> None:
    operator = await claimed(**status)
    operator.edit(operator.live(PIPELINE, "duo"), **edit)
    assert [write for write in await operator.reconcile() if write[1] == CLAIM.name] == []
    assert note(operator).partition("; ")[0] == remark


# --- the Job ----------------------------------------------------------------------------------------------------

CACHE = {"type": "PersistentVolumeClaim", "size": "1Gi", "prefetch": {"enabled": True}}
FETCHED: dict[str, Any] = {"modelPath": "me/mine", "modelCache": CACHE}
NEW: dict[str, Any] = {**FETCHED, "imagePullSecrets": [{"name": "registry"}]}


async def fetching(**status: Any) -> tuple[Operator, str]:
    """An operator whose pipeline waits for its Job, and the Job's name."""
    operator = Operator()
    operator.edit(operator.live(PIPELINE, "duo"), **FETCHED)
    await operator.reconcile()
    [name] = [name for kind, _, name in operator.server.objects if kind == JOB.name]
    operator.watch({**operator.live(JOB, name), "status": status})
    return operator, name


async def jobs_written(operator: Operator) -> list[str]:
    return [verb for verb, kind, _ in await operator.reconcile() if kind == JOB.name]


@pytest.mark.parametrize(
    "status",
    [{}, {"active": 1}, {"failed": 7, "conditions": [{"type": "Failed", "status": "True"}]}],
    ids=["no pod", "a pod that waits", "given up"],
)
async def test_a_corrected_spec_replaces_the_job_that_has_not_fetched_the_model(status: dict[str, Any]) -> None:
    operator, name = await fetching(**status)
    assert await jobs_written(operator) == []
    operator.edit(operator.live(PIPELINE, "duo"), **NEW)
    assert await jobs_written(operator) == ["delete", "apply"]
    assert operator.live(JOB, name)["spec"]["template"]["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    assert await jobs_written(operator) == []


async def test_a_job_that_has_fetched_the_model_stays_whatever_is_edited() -> None:
    operator, _ = await fetching(succeeded=1)
    operator.edit(operator.live(PIPELINE, "duo"), **NEW)
    assert await jobs_written(operator) == []


@pytest.mark.parametrize("status, writes", [({"active": 1}, ["delete", "apply"]), ({"succeeded": 1}, [])])
async def test_a_job_of_an_earlier_operator_is_replaced_once_unless_it_has_succeeded(
    status: dict[str, Any], writes: list[str]
) -> None:
    operator, name = await fetching(**status)
    live = operator.live(JOB, name)
    del live["metadata"]["annotations"]
    operator.watch(live)
    assert await jobs_written(operator) == writes
    assert await jobs_written(operator) == []


async def test_pods_of_the_replaced_job_are_not_reported_as_those_of_its_successor() -> None:
    operator, name = await fetching(active=1)
    old = operator.live(JOB, name)["metadata"]["uid"]
    labels = {naming.PIPELINE_LABEL: "duo", model_cache.JOB_NAME: name, model_cache.JOB_UID: old}
    waiting = {"name": "prefetch", "state": {"waiting": {"reason": "ErrImagePull", "message": "401"}}}
    pod: dict[str, Any] = {"name": f"{name}-x", "namespace": "space", "labels": labels}
    operator.watch({"kind": POD.name, "metadata": pod, "status": {"containerStatuses": [waiting]}})

    def why() -> str:
        found = operator.live(PIPELINE, "duo")["status"]["conditions"]
        [reason] = [each["reason"] for each in found if each["type"] == "Ready"]
        return str(reason)

    await operator.reconcile()
    assert why() == "ImagePullBackOff"
    operator.edit(operator.live(PIPELINE, "duo"), **NEW)
    await operator.reconcile()
    assert why() == "Prefetching"


async def test_the_status_says_how_much_the_job_has_fetched_in_steps() -> None:
    operator, name = await fetching(active=1)
    labels = {
        naming.PIPELINE_LABEL: "duo",
        model_cache.JOB_NAME: name,
        model_cache.JOB_UID: operator.live(JOB, name)["metadata"]["uid"],
    }
    pod: dict[str, Any] = {"name": f"{name}-x", "namespace": "space", "labels": labels}
    operator.watch({"kind": POD.name, "metadata": pod, "status": {"podIP": "10.0.0.9", "phase": "Running"}})

    async def message(done: int | None, total: int = 60_000_000_000) -> str:
        found = None if done is None else FetchStatus(bytes_done=done, bytes_total=total)
        operator.coordinators.fetches = {} if found is None else {"10.0.0.9": found}
        operator.now += 10
        await operator.reconcile()
        [ready] = [one for one in operator.live(PIPELINE, "duo")["status"]["conditions"] if one["type"] == "Ready"]
        assert ready["reason"] == "Prefetching"
        return str(ready["message"]).removeprefix(f"Job {name} fetches me/mine")

    assert await message(None) == "", "an image of an earlier version does not answer"
    assert operator.again_s is not None and operator.again_s <= 10
    assert await message(0, total=0) == ""
    assert await message(26_999_999_999) == ": 40 % of 60.0 GB"
    assert await message(27_000_000_000) == ": 45 % of 60.0 GB"
    assert await message(10**12) == ": 100 % of 60.0 GB"
    operator.watch({**operator.live(JOB, name), "status": {"succeeded": 1}})
    await operator.reconcile()
    assert operator.again_s is None or operator.again_s > 10


@pytest.mark.parametrize("is_asked_to_end", [False, True])
def test_a_job_that_fetches_from_a_hub_says_how_far_it_is(tmp_path: Path, is_asked_to_end: bool) -> None:
    size, port, half, goes_on = 40 << 20, free_port(), threading.Event(), threading.Event()

    def hold(start: int) -> None:
        if start >= size // 2:
            half.set()
            goes_on.wait(patience(60))

    with serving("127.0.0.1") as hub:
        hub.has_model, hub.before_piece = True, hold
        hub.files["weights.txt"] = bytes(size)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
        environ = {**kept, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "OMNI_MODEL_PATH": MODEL}
        environ |= {"OMNI_PROGRESS_PORT": str(port), "PYTHONPATH": str(REPOSITORY)}
        with subprocess.Popen([sys.executable, "-c", FETCH], env=environ, stdout=subprocess.DEVNULL) as fetch:
            try:
                assert half.wait(patience(60))
                seen = eventually(lambda: fetched(port), what="some of it is counted")
                assert 0 < seen["bytes_done"] < seen["bytes_total"]
                if is_asked_to_end:
                    fetch.terminate()
                    assert fetch.wait(patience(60)) == 143, "not by the signal itself, which PID 1 would ignore"
            finally:
                goes_on.set()
            assert is_asked_to_end or fetch.wait(patience(60)) == 0


def fetched(port: int) -> dict[str, int] | Literal[False]:
    """The answer of a fetch's pod, once some bytes are there."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=patience(10)) as answer:
            found: dict[str, int] = json.load(answer)
    except urllib.error.URLError:
        return False
    return found if found["bytes_done"] else False


def test_the_job_shows_each_ten_per_cent_of_its_download_as_a_line(tmp_path: Path) -> None:
    with serving("127.0.0.1") as hub:
        hub.has_model = True
        hub.files["weights.txt"] = bytes(40 << 20)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
        environ = {**kept, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "OMNI_MODEL_PATH": MODEL}
        ran = subprocess.run([sys.executable, "-c", FETCH], env=environ, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    percents = [int(found) for found in re.findall(r"(\d+) % of 41\.9MB$", ran.stdout, flags=re.MULTILINE)]
    assert percents and percents[-1] == 100, ran.stdout
    assert percents == sorted(set(percents)) and all(each % 10 == 0 for each in percents)
    assert "fetched to" in ran.stdout and "%|" not in ran.stderr


async def test_the_status_says_how_much_a_pod_has_fetched_to_its_node_and_why_it_cannot() -> None:
    cache = {"type": "Node", "prefetch": {"enabled": True}}
    operator = Operator(settings=msgspec.structs.replace(SETTINGS, node_models=NodeModels(path="/var/lib/models")))
    operator.edit(operator.live(PIPELINE, "duo"), modelPath="s3://models/mine", modelCache=cache)
    await operator.reconcile()
    deployments = [made for (kind, _, _), made in operator.server.objects.items() if kind == DEPLOYMENT.name]
    [labels] = [
        each["spec"]["template"]["metadata"]["labels"]
        for each in deployments
        if "initContainers" in each["spec"]["template"]["spec"]
    ][:1]
    head = {"name": "front-x", "namespace": "space", "uid": "x", "labels": labels}

    async def ready(state: dict[str, Any]) -> tuple[str, str]:
        own = {"podIP": "10.0.0.9", "phase": "Pending", "initContainerStatuses": [{"name": "prefetch", **state}]}
        operator.watch({"kind": POD.name, "metadata": head, "spec": {"nodeName": "n"}, "status": own})
        operator.now += 10
        await operator.reconcile()
        [found] = [one for one in operator.live(PIPELINE, "duo")["status"]["conditions"] if one["type"] == "Ready"]
        return str(found["reason"]), str(found["message"])

    runs = {"state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}
    assert await ready(runs) == ("Prefetching", "pod front-x fetches s3://models/mine to its node")
    operator.coordinators.fetches = {"10.0.0.9": FetchStatus(bytes_done=30, bytes_total=60)}
    reason, message = await ready(runs)
    assert (reason, message[-17:]) == ("Prefetching", "node: 50 % of 0.0 MB"[-17:])
    assert operator.again_s is not None and operator.again_s <= 10
    ended = {"exitCode": 1, "reason": "Error", "message": "cannot fetch s3://models/mine: it does not exist"}
    reason, message = await ready({"state": {"terminated": ended}})
    assert reason == "PrefetchFailed"
    assert message.endswith("pod front-x: container prefetch: cannot fetch s3://models/mine: it does not exist")


@pytest.mark.parametrize(
    "text, found",
    [
        ("", None),
        ('{"path": "", "bound": ""}', None),
        ('{"path": "/var/lib/models", "bound": "200Gi"}', NodeModels(path="/var/lib/models", bound="200Gi")),
        ('{"path": "/", "bound": ""}', "'/' is not the absolute path of a directory for models alone"),
        ('{"path": "models"}', "'models' is not the absolute path"),
        ('{"path": "/var/lib/models/../.."}', "is not the absolute path"),
        ('{"path": "/var/lib/models", "bound": "much"}', "OMNI_OPERATOR_NODE_MODELS: 'much'"),
        ('{"path": 1}', "OMNI_OPERATOR_NODE_MODELS: Expected `str`"),
    ],
)
def test_the_directory_of_nodes_is_one_for_models_alone(text: str, found: NodeModels | str | None) -> None:
    environ = {"OMNI_OPERATOR_STAGE_IMAGE": "stage:1", "OMNI_OPERATOR_NODE_MODELS": text}
    if isinstance(found, str):
        with pytest.raises(errors.ConfigurationError, match=re.escape(found)):
            settings.read(environ, hostname="h")
    else:
        assert settings.read(environ, hostname="h").node_models == found
