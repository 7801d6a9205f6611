"""A child that another writer changes back at once is corrected ever less often, and the status says so."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from omnipipeline_operator import errors
from omnipipeline_operator.controller.observing.contests import CALM_S, FREE, MOST_S, Contests
from omnipipeline_operator.desired import naming
from omnipipeline_operator.kinds import PIPELINE, POLICY
from tests.operator.fake_api_server import Write
from tests.operator.test_reconcile_snapshots import Operator

KEY = ("space", "duo")


def stamped(stamp: str, name: str = "duo-pods") -> dict[str, Any]:
    metadata = {"name": name, "annotations": {naming.APPLIED: stamp}}
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata}


def corrections(contests: Contests, times: list[float], until_s: int) -> list[float]:
    """When the child is corrected that another writer changes ten times a second."""
    found, began = [], times[0]
    for step in range(10 * until_s):
        times[0] = began + step / 10
        if contests.may_correct(KEY, stamped("a")):
            contests.corrected(KEY, stamped("a"))
            found.append(times[0])
    return found


def test_corrections_in_a_row_come_ever_less_often() -> None:
    times = [1000.0]
    contests = Contests(lambda: times[0])
    found = corrections(contests, times, 600)
    gaps = [round(later - earlier, 1) for earlier, later in itertools.pairwise(found)]
    assert gaps[: FREE + 7] == [*[0.1] * (FREE - 1), 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, MOST_S, MOST_S]


def test_an_edit_or_calm_ends_a_contest_and_another_child_has_its_own() -> None:
    times = [1000.0]
    contests = Contests(lambda: times[0])
    corrections(contests, times, 10)
    assert "NetworkPolicy duo-pods is changed back by another writer" in str(contests.remark(KEY))
    assert not contests.may_correct(KEY, stamped("a"))
    assert contests.may_correct(KEY, stamped("a", "duo-http")) and contests.may_correct(KEY, stamped("b"))
    contests.corrected(KEY, stamped("b"))
    assert contests.remark(KEY) is None
    corrections(contests, times, 10)
    times[0] += CALM_S
    assert (contests.remark(KEY), contests.again_s(KEY)) == (None, None)
    assert contests.may_correct(KEY, stamped("a"))


async def test_a_correction_that_is_refused_each_time_stays_refused() -> None:
    def refuse(write: Write) -> None:
        if write == ("apply", "Service", "duo"):
            raise errors.Forbidden("", 403, "not with dual stack")

    operator = Operator()
    await operator.reconcile()
    operator.edit(operator.live(PIPELINE, "duo"), expose={"service": {"port": 9000}})
    for _ in range(3 * FREE):
        with pytest.raises(errors.Forbidden):
            await operator.reconcile(refuse)
    accepted = operator.live(PIPELINE, "duo")["status"]["conditions"][0]
    assert (accepted["reason"], accepted["message"]) == ("ChildRefused", "not with dual stack")


async def test_a_policy_that_a_second_operator_writes_too_is_left_for_a_while_and_named_in_the_status() -> None:
    operator = Operator()
    await operator.reconcile()
    written = 0
    for _ in range(50):
        theirs = operator.live(POLICY, "duo-pods")
        theirs["spec"]["ingress"] = [{"from": [{"podSelector": {"matchLabels": {"a": "b"}}}]}]
        operator.watch(theirs)
        operator.now += 0.2
        written += ("apply", "NetworkPolicy", "duo-pods") in await operator.reconcile()
    assert FREE <= written < 10
    assert operator.again_s is not None and operator.again_s <= MOST_S
    accepted = operator.live(PIPELINE, "duo")["status"]["conditions"][0]
    assert accepted["status"] == "True"
    assert "NetworkPolicy duo-pods is changed back by another writer again and again" in accepted["message"]
