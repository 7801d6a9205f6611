"""Any text that a user or a model can make travels through every write to a real API server."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kubernetes.aio import client as kubernetes_client
from kubernetes.aio import config as kubernetes_config

from omnipipeline_operator import kinds
from omnipipeline_operator.changes import conditions
from omnipipeline_operator.cluster import bodies
from omnipipeline_operator.cluster.applying import MANAGER, Applier
from omnipipeline_operator.cluster.client import Client
from omnipipeline_operator.cluster.store import Store
from omnipipeline_operator.cluster.token_bucket import TokenBucket
from omnipipeline_operator.controller.event_recorder import EventRecorder
from omnipipeline_operator.desired.naming import Owner
from omnipipeline_spec.generating import writing
from omnipipeline_spec.types.status import PipelineStatus
from omnipipeline_spec.types.values import to_document
from tests.operator.running import Kube, OperatorProcess, eventually, pipeline
from tests.operator.test_cluster_history import omni
from tests.operator.test_written_bodies import values, whole
from tests.thoroughness import examples

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

ODD = "\U0001f642 \u2028\u2029\x85\ufeff\uffff\U0010ffff \x07\x1b[31m\x7f\x9b é \\ud83d [shout] - a: b # c"
LONG = "é\U0001f642" * 30_000


class Writer:
    """The operator's client, with the administrator's rights, in one namespace."""

    def __init__(self, kube: Kube, loop: asyncio.AbstractEventLoop, client: Client) -> None:
        self.namespace = kube.namespace
        self.client = client
        self._loop = loop

    def run(self, work: Any) -> Any:
        return self._loop.run_until_complete(work)


@pytest.fixture
def writer(kube: Kube) -> Iterator[Writer]:
    with asyncio.Runner() as runner:
        client = runner.run(_connected(kube.cluster.kubeconfig))
        yield Writer(kube, runner.get_loop(), client)
        runner.run(client.__aexit__(None, None, None))


async def _connected(kubeconfig: Path) -> Client:
    configuration = kubernetes_client.Configuration()
    await kubernetes_config.load_kube_config(str(kubeconfig), client_configuration=configuration)
    api = kubernetes_client.ApiClient(configuration)
    return Client(api, TokenBucket(10_000, 10_000), lambda verb, resource, code: None)


def test_any_value_of_a_spec_comes_back_as_it_was_applied(writer: Writer) -> None:
    @given(values)
    @settings(max_examples=examples(60))
    def comes_back(value: Any) -> None:
        entry = {"apiVersion": "apps/v1", "kind": "ControllerRevision", "revision": 1, "data": {"spec": value}}
        metadata = {"name": "any", "namespace": writer.namespace}
        live = writer.run(
            writer.client.apply({**entry, "metadata": metadata | {"resourceVersion": "1"}}, manager="test")
        )
        uid = live["metadata"]["uid"]
        writer.run(writer.client.delete(kinds.CONTROLLER_REVISION, writer.namespace, "any", uid=uid))
        assert live["data"].get("spec") == whole(value)

    comes_back()


def test_any_text_of_a_child_comes_back_by_each_way_of_writing(writer: Writer) -> None:
    made: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "any", "namespace": writer.namespace},
    }
    writer.run(writer.client.create({**made, "data": {"k": "v"}}))

    @given(st.text(st.characters(exclude_categories=()), max_size=200) | st.sampled_from([ODD, LONG]))
    @settings(max_examples=examples(20))
    def comes_back(text: str) -> None:
        metadata = {**made["metadata"], "annotations": {"k": text[:10_000]}}
        applied = writer.run(writer.client.apply({**made, "metadata": metadata, "data": {"k": text}}, manager=MANAGER))
        patch = {"metadata": {"annotations": {"k": text[:10_000]}}, "data": {"merged": text}}
        merged = writer.run(writer.client.merge(kinds.CONFIG_MAP, writer.namespace, "any", patch))
        assert applied["data"]["k"] == merged["data"]["merged"] == whole(text)
        assert merged["metadata"]["annotations"]["k"] == whole(text[:10_000])

    comes_back()


def test_any_text_of_a_condition_is_written_and_posted(kube: Kube, writer: Writer) -> None:
    kube.apply(pipeline())
    owner = Owner(namespace=kube.namespace, name="duo", uid=kube.get("omnipipeline", "duo")["metadata"]["uid"])
    applier, recorder = Applier(writer.client, Store(), owner), EventRecorder(writer.client, name="test")

    @given(
        st.text(st.characters(exclude_categories=()), max_size=200) | st.sampled_from([ODD, LONG]),
        st.text(max_size=300),
    )
    @settings(max_examples=examples(20))
    def is_written(text: str, reason: str) -> None:
        condition = conditions.condition("Ready", False, reason, text)
        status = to_document(PipelineStatus()) | {"conditions": conditions.merged([condition], (), generation=1, now=0)}
        writer.run(applier.write_status(status))
        writer.run(recorder._post(owner, [condition], warning=True))
        found = writer.run(writer.client.get(kinds.PIPELINE, kube.namespace, "duo"))["status"]["conditions"]
        [live] = [each for each in found if each["type"] == "Ready"]
        assert live["message"] == whole(text[: conditions.MAX_MESSAGE])

    is_written()


def test_kubectl_reads_any_text_of_our_yaml_as_it_was(kube: Kube) -> None:
    @given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), max_size=30))
    @settings(max_examples=examples(8))
    def is_read(texts: list[str]) -> None:
        data = {f"k{number}": text for number, text in enumerate([*texts, ODD, "1e3", "0o17", "y", "~", " a\n b\n"])}
        made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "any"}, "data": data}
        read = kube("create", "--dry-run=client", "-o", "json", "-f", "-", stdin=writing.to_yaml(made))
        assert json.loads(read)["data"] == data

    is_read()


def test_a_pipeline_of_odd_texts_serves_reports_and_goes_back(kube: Kube, operator: OperatorProcess) -> None:
    operator.start()
    odd: dict[str, Any] = {
        "envDefaults": {"GREETING": ODD},
        "expose": {"service": {"annotations": {"their": ODD}}},
        "code": {"inline": {"notes.txt": ODD + "\U0001f642" * 40_000}},
        "runtimeOverrides": {"first": {ODD: ODD, "k" * 1500: [ODD]}},
    }
    kube.apply(pipeline(**odd))
    kube.wait_ready("duo")
    assert kube.get("service", "duo")["metadata"]["annotations"]["their"] == ODD
    eventually(lambda: len(kube.all("controllerrevisions")) == 1, what="the revision is recorded")
    kube.apply(pipeline(**{**odd, "restartedAt": "again"}))
    kube.wait_ready("duo")
    eventually(lambda: len(kube.all("controllerrevisions")) == 2, what="the second revision is recorded")
    went = omni(kube, "undo", "duo")
    assert went.returncode == 0, went.stderr
    assert kube.wait_ready("duo")["spec"]["runtimeOverrides"] == odd["runtimeOverrides"]


def test_the_words_of_a_crash_reach_the_condition_whatever_they_are(kube: Kube, operator: OperatorProcess) -> None:
    operator.start()
    kube.apply(pipeline())
    kube.wait_ready("duo")
    [pod] = kube.all("pods", "omnipipeline.dev/unit=first")
    ended = {
        "exitCode": 1,
        "message": f"ValueError: {ODD}\n---\n{ODD}",
        "startedAt": "2026-01-01T00:00:00Z",
        "finishedAt": "2026-01-01T00:00:01Z",
    }
    container = {"name": "stage", "ready": False, "restartCount": 3, "image": "i", "imageID": "i", "started": False}
    container |= {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": ended}}
    others = [each for each in pod["status"]["conditions"] if each["type"] not in ("Ready", "ContainersReady")]
    unready = [
        {"type": kind, "status": "False", "reason": "ContainersNotReady"} for kind in ("Ready", "ContainersReady")
    ]
    status = {"phase": "Running", "conditions": [*others, *unready], "containerStatuses": [container]}
    name = pod["metadata"]["name"]
    kube(
        "patch",
        "pod",
        name,
        "--subresource=status",
        "--type=merge",
        "-p",
        bodies.encode({"status": status}),
    )
    found = eventually(
        lambda: kube.condition("duo", "Ready").get("reason") == "CrashLoopBackOff" and kube.condition("duo", "Ready")
    )
    assert "ValueError: \U0001f642" in found["message"]
    shown = subprocess.run(
        [sys.executable, "-m", "omnipipeline_operator.kubectl.cli", "-n", kube.namespace, "status", "duo"],
        env=kube.cluster.environment | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
    )
    assert b"Traceback" not in shown.stderr and b"[shout]" in shown.stdout and b"\x1b" not in shown.stdout
