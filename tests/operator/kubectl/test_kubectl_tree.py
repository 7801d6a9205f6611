"""``kubectl omni status`` shows live objects, and ``drain`` selects pods."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from omnipipeline_operator.kubectl import acting, tree

LABELS = {"omnipipeline.dev/pipeline": "hello", "omnipipeline.dev/unit": "voice"}


def pod(name: str, *, unit: str = "voice", node: str = "n1", leaving: bool = False, **status: Any) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name, "uid": name, "labels": {**LABELS, "omnipipeline.dev/unit": unit}}
    if leaving:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    return {"metadata": metadata, "spec": {"nodeName": node}, "status": {"phase": "Running", **status}}


def pipeline(**status: Any) -> dict[str, Any]:
    return {"metadata": {"namespace": "team", "name": "hello", "generation": 2}, "spec": {}, "status": status}


def shown(resource: dict[str, Any], *pods: dict[str, Any]) -> list[str]:
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(tree.tree(resource, pods, {"voice": ("shout", "whisper")}))
    return [line.strip(" │├└─") for line in console.export_text().splitlines()]


READY: dict[str, Any] = {"conditions": [{"type": "Ready", "status": "True"}]}


def test_a_unit_is_followed_by_its_pods_with_their_states() -> None:
    units = [{"name": "voice", "replicas": 2, "ready": 1, "registered": 1, "updated": 2}]
    lines = shown(pipeline(observedGeneration=2, units=units), pod("b", **READY), pod("a", leaving=True))
    assert lines[2:] == [
        "voice  1/2 ready, 1 registered  [shout, whisper]",
        "a  draining  node n1",
        "b  ready  node n1",
    ]


def test_a_crashing_pod_shows_its_termination_message() -> None:
    crashed = {
        "restartCount": 3,
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": {"terminated": {"message": "Traceback …\nFileNotFoundError: no weights"}},
    }
    lines = shown(
        pipeline(observedGeneration=2, units=[{"name": "voice", "replicas": 1}]), pod("a", containerStatuses=[crashed])
    )
    assert lines[-1] == "a  CrashLoopBackOff: FileNotFoundError: no weights  3 restarts  node n1"


def test_a_pod_that_fits_no_node_shows_the_schedulers_message() -> None:
    refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "Insufficient gpu"}
    lines = shown(
        pipeline(observedGeneration=2, units=[{"name": "voice"}]), pod("a", phase="Pending", conditions=[refused])
    )
    assert "Unschedulable: Insufficient gpu" in lines[-1]


def test_the_pods_that_fetch_the_model_have_a_branch_of_their_own() -> None:
    ended = {"state": {"terminated": {"reason": "Error", "message": "Traceback\nno such model: me/mine\n"}}}
    failed = pod("demo-prefetch-1-x", phase="Failed", containerStatuses=[{"name": "prefetch", **ended}])
    done = pod("demo-prefetch-1-y", phase="Succeeded")
    for each in (failed, done):
        del each["metadata"]["labels"]["omnipipeline.dev/unit"]
    lines = shown(pipeline(), failed, done)
    at = next(number for number, line in enumerate(lines) if "prefetch of the model" in line)
    assert "demo-prefetch-1-x  failed: no such model: me/mine" in lines[at + 1]
    assert "demo-prefetch-1-y  done" in lines[at + 2]


def test_pods_of_a_unit_that_the_spec_no_longer_has_are_shown_too() -> None:
    lines = shown(pipeline(observedGeneration=2, units=[]), pod("old", unit="gone", leaving=True))
    assert lines[-2:] == ["gone (no longer in the spec)", "old  draining  node n1"]


@pytest.mark.parametrize(
    ("status", "title"),
    [
        ({}, "no operator has reconciled it yet"),
        ({"observedGeneration": 1}, "the operator has not reconciled the last change yet"),
        ({"observedGeneration": 2, "revision": {"current": "aa", "update": "bb"}}, "revision aa → bb"),
    ],
)
def test_the_title_shows_when_the_status_is_older_than_the_spec(status: dict[str, Any], title: str) -> None:
    assert title in shown(pipeline(**status))[0]


def test_draining_selects_pods_that_match_all_conditions_and_are_neither_terminating_nor_ended() -> None:
    pods = [pod("a"), pod("b", node="n2"), pod("c", unit="front"), pod("d", leaving=True), pod("e", phase="Failed")]

    def names(**conditions: Any) -> list[str]:
        given = {"names": (), "units": None, "node": None, **conditions}
        return [each["metadata"]["name"] for each in acting.chosen(pods, **given)]

    assert names(node="n1") == ["a", "c"]
    assert names(units=["voice"]) == ["a", "b"]
    assert names(units=["voice"], node="n2") == ["b"]
    assert names(names=("a", "d")) == ["a"]
