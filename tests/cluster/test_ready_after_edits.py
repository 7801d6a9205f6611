"""Ready and its `observedGeneration`: from then on new requests meet the revision of that generation alone."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.cluster.installing import Installed, ask, pipeline, url, wait_for, wait_ready

pytestmark = [pytest.mark.cluster, pytest.mark.nightly, pytest.mark.timeout(900, func_only=True)]

CODE = """
import stage_runtime as omni

def say(payload):
    return omni.Text("revision {number}")

def stage():
    return say
"""
NAME = "edited"
EDITS = 2
LOOK_S = 6.0  # longer than the pause in which a pod that was told to end still takes requests


@pytest.fixture
def edited(installed: Installed) -> Iterator[str]:
    """URL of a pipeline of one stage that says its revision."""
    stages: list[dict[str, object]] = [{"name": "say", "process": "say", "factory": "made:stage", "terminal": True}]
    installed.apply(pipeline(NAME, stages, code=CODE.format(number=0)))
    wait_ready(installed.cluster, installed.namespace, NAME)
    yield url(installed.cluster, installed.namespace, NAME)
    installed.kubectl("delete", "omnipipeline", NAME, "--timeout=60s")


def test_a_pipeline_that_is_ready_answers_by_its_new_revision_alone(installed: Installed, edited: str) -> None:
    for number in range(1, EDITS + 1):
        before = installed.condition(NAME, "Ready")["observedGeneration"]
        installed.patch(NAME, {"code": {"inline": {"made.py": CODE.format(number=number)}}})
        wait_for("Ready for the edit", lambda: _is_ready(installed, before), timeout_s=200)  # noqa: B023
        met: Counter[str] = Counter()
        end = time.monotonic() + LOOK_S
        while time.monotonic() < end:
            met[ask(edited)] += 1
        assert set(met) == {f"revision {number}"}, met


def _is_ready(installed: Installed, before: int) -> bool:
    ready = installed.condition(NAME, "Ready")
    return bool(ready["status"] == "True" and ready["observedGeneration"] > before)
