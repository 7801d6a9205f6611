"""The demand for each process group at this coordinator, for `/status`, `/metrics` and those who set replicas.

Here: which of the coordinator's numbers count. Not here: the counting (`rules.members.demand`), the decision
(`omnipipeline_spec.scaling`). Called by `request_manager`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec

from omnipipeline_spec.scaling import Load
from stage_runtime.coordinator.membership import Membership
from stage_runtime.coordinator.reporting import member_reports
from stage_runtime.metrics import catalog
from stage_runtime.metrics.samples import Samples
from stage_runtime.rules.members.demand import Demand
from stage_runtime.wire.parts import Timing


class GroupDemand:
    """The demand for all groups of the newest pipeline revision."""

    def __init__(self, membership: Membership, loop: asyncio.AbstractEventLoop) -> None:
        self._membership = membership
        self._loop = loop
        self._demand = Demand(loop.time())

    def arrived(self, terminals: Collection[str] | None) -> None:
        """A request waits for these terminals; None: for all."""
        groups = dict.fromkeys(self._membership.state.met(terminals).values())
        self._demand.arrived(groups, self._loop.time())

    def served(self, bound: Iterable[str], timings: Iterable[Timing]) -> None:
        """A request is complete. bound: the stages that it had instances of."""
        self._demand.served(bound, {timing.stage: timing.run_us / 1e6 for timing in timings})

    def loads(self, held: Mapping[str, int]) -> dict[str, Load]:
        """held: requests that wait here for an instance, by group."""
        newest = next(reversed(self._membership.state.revisions), None)
        return self._demand.loads(
            newest.stages if newest is not None else {},
            member_reports.stage_beats(self._membership),
            ready=member_reports.ready_count(self._membership),
            loading=member_reports.loading_count(self._membership),
            held=held,
            now=self._loop.time(),
        )

    def status(self, held: Mapping[str, int]) -> dict[str, Any]:
        return {group: msgspec.to_builtins(load) for group, load in self.loads(held).items()}

    def samples(self, held: Mapping[str, int]) -> Samples:
        loads = self.loads(held)
        totals = self._demand.totals()
        return {
            catalog.GROUP_ARRIVALS: {(group,): totals.get(group, 0) for group in loads},
            catalog.GROUP_DEMAND: {(group,): load.running + load.waiting for group, load in loads.items()},
            catalog.GROUP_PLACES: {(group,): load.per_instance for group, load in loads.items()},
        }
