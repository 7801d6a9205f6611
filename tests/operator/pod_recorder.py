"""Records every state of a pipeline's pods from a watch, so that states which last a moment are checked too.

Here: recording and replaying. Not here: any assertion.
"""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

from tests.operator.running import Kube, eventually

UNIT = "omnipipeline.dev/unit"
REVISION = "omnipipeline.dev/revision"
Ready = Mapping[tuple[str, str], int]  # (unit, revision) -> ready pods that are not terminating


class PodRecorder:
    """Records from ``with`` on."""

    def __init__(self, kube: Kube, pipeline: str) -> None:
        self._kube = kube
        self._selector = f"omnipipeline.dev/pipeline={pipeline}"
        self._events: list[dict[str, Any]] = []  #: Events in the API server's order; the thread appends.

    def __enter__(self) -> PodRecorder:
        self._watch = subprocess.Popen(
            [
                *("kubectl", "-n", self._kube.namespace, "get", "pods", "-l", self._selector),
                *("--watch", "--output-watch-events", "-o", "json"),
            ],
            env=self._kube.cluster.environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        self._catch_up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._catch_up()
                assert self._watch.poll() is None, "the watch broke off"
        finally:
            self._watch.terminate()
            self._watch.wait(timeout=30)
            self._thread.join(timeout=30)
            assert self._watch.stdout is not None
            self._watch.stdout.close()

    def states(self) -> Iterator[Ready]:
        """The ready pods after each event, from the first complete list on."""
        pods: dict[str, dict[str, Any]] = {}
        for index, event in enumerate(list(self._events)):
            _enter(pods, event)
            if index >= self._first:
                yield _ready(pods.values())

    def _catch_up(self) -> None:
        """Wait until the watch has reported the present state."""

        def caught_up() -> bool:
            pods: dict[str, dict[str, Any]] = {}
            for event in list(self._events):
                _enter(pods, event)
            listed = self._kube.all("pods", self._selector)
            return {each["metadata"]["uid"]: each["metadata"]["resourceVersion"] for each in listed} == {
                uid: each["metadata"]["resourceVersion"] for uid, each in pods.items()
            }

        eventually(caught_up, within_s=60, what="the watch has reported everything")
        self._first = getattr(self, "_first", len(self._events) - 1)

    def _read(self) -> None:
        assert self._watch.stdout is not None
        for line in self._watch.stdout:
            self._events.append(json.loads(line))


def _enter(pods: dict[str, dict[str, Any]], event: Mapping[str, Any]) -> None:
    pod = event["object"]
    if event["type"] == "DELETED":
        pods.pop(pod["metadata"]["uid"], None)
    else:
        pods[pod["metadata"]["uid"]] = pod


def _ready(pods: Any) -> Ready:
    counts: dict[tuple[str, str], int] = {}
    for pod in pods:
        conditions = {each["type"]: each["status"] for each in pod.get("status", {}).get("conditions", ())}
        if conditions.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]:
            labels = pod["metadata"]["labels"]
            key = (labels[UNIT], labels[REVISION])
            counts[key] = counts.get(key, 0) + 1
    return counts
