"""The API server is asked about some of the instances that coordinators report, and some get no more requests."""

from __future__ import annotations

from typing import Any, cast

import pytest

from omnipipeline_operator.cluster.client import Client
from omnipipeline_operator.cluster.status_client import CoordinatorStatus, InstanceStatus
from omnipipeline_operator.controller.observing import coordinators
from omnipipeline_operator.controller.observing.coordinators import MAX_ASKED
from omnipipeline_operator.controller.observing.snapshots import Snapshot
from omnipipeline_operator.desired import naming
from omnipipeline_operator.desired.naming import Owner

OWNER = Owner(namespace="space", name="duo", uid="u")


class Pods:
    """A snapshot without pods, and the API server's pods by address."""

    owner = OWNER

    def __init__(self, labels: dict[str, dict[str, str]]) -> None:
        self._labels = labels
        self.addresses_called: list[str] = []

    def addresses(self) -> set[tuple[str, str, str]]:
        return set()

    async def pods_at(self, namespace: str, address: str) -> list[dict[str, Any]]:
        assert namespace == OWNER.namespace
        self.addresses_called.append(address)
        return [{"metadata": {"labels": self._labels[address]}}] if address in self._labels else []


def reported(*addresses: str, unit: str = "first", revision: str = "r") -> CoordinatorStatus:
    instances = [InstanceStatus(unit=unit, revision=revision, endpoint=f"tcp://{each}:1") for each in addresses]
    return CoordinatorStatus(instances=tuple(instances))


async def aside(pods: Pods, *statuses: CoordinatorStatus) -> list[str]:
    return await coordinators.aside(cast(Client, pods), cast(Snapshot, pods), statuses)


async def test_a_pod_with_other_labels_gets_no_more_requests_and_a_new_or_absent_one_does() -> None:
    own = naming.selector("duo", "first", "r")
    pods = Pods({"10.0.0.1": {**own, naming.UNIT_LABEL: "debug"}, "10.0.0.2": own})
    assert await aside(pods, reported("10.0.0.1", "10.0.0.2", "10.0.0.3")) == ["10.0.0.1"]


async def test_an_address_is_asked_for_once_whatever_is_reported_at_it() -> None:
    own = naming.selector("duo", "last", "s")
    pods = Pods({"10.0.0.1": own, "10.0.0.2": own})
    found = await aside(
        pods,
        reported("10.0.0.1", "10.0.0.2"),
        reported("10.0.0.1", "10.0.0.2", unit="last", revision="s"),
        reported("10.0.0.2", unit="last", revision="t"),
    )
    assert found == ["10.0.0.1", "10.0.0.2"], "an instance there is not what its pod is labelled as"
    assert sorted(pods.addresses_called) == ["10.0.0.1", "10.0.0.2"]


async def test_an_address_that_is_left_aside_stays_so_among_many_unknown_ones() -> None:
    pods = Pods({"99.0.0.1": {}})
    many = [f"10.0.0.{number}" for number in range(2 * MAX_ASKED)]
    debugged = InstanceStatus(unit="first", revision="r", endpoint="tcp://99.0.0.1:1", aside=True)
    assert await aside(pods, reported(*many), CoordinatorStatus(instances=(debugged,))) == ["99.0.0.1"]


@pytest.mark.proves("hostile-pod")
async def test_what_is_no_address_is_not_asked_for_and_of_many_addresses_only_some_are() -> None:
    pods = Pods({})
    odd = [
        InstanceStatus(unit="u", revision="r", endpoint=each)
        for each in ("", "x", "tcp://a,b=c:1", "tcp://[", "ipc://z")
    ]
    many = [f"10.0.{number // 250}.{number % 250}" for number in range(10 * MAX_ASKED)]
    assert await aside(pods, CoordinatorStatus(instances=tuple(odd)), reported(*many)) == []
    assert len(pods.addresses_called) == MAX_ASKED and set(pods.addresses_called) <= set(many)
