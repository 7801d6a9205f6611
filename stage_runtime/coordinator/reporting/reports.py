"""The content of `/status` and `/metrics` for one coordinator, beside the counts of its requests (`stats`).

Called by `request_manager`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from omnipipeline_spec.types.plan import CoordinatorPlan, PipelineRevision
from omnipipeline_spec.types.pods import COORDINATOR
from stage_runtime.coordinator.membership import Membership
from stage_runtime.coordinator.reporting import member_reports
from stage_runtime.coordinator.reporting.tracing import RequestTracer
from stage_runtime.metrics import catalog, planes
from stage_runtime.metrics.samples import Samples
from stage_runtime.relays.dispatch import Relays
from stage_runtime.transfers.sending import SendQueues


class Reports:
    """Reads the parts of a coordinator; changes nothing."""

    def __init__(
        self,
        plan: CoordinatorPlan,
        membership: Membership,
        relays: Relays,
        send_queues: SendQueues,
        tracing: RequestTracer | None,
    ) -> None:
        self._plan = plan
        self._membership = membership
        self._relays = relays
        self._send_queues = send_queues
        self._tracing = tracing

    def status(self, *, in_flight: int, awaiting_instance: int, problem: str | None) -> Mapping[str, Any]:
        newest = self._newest
        gauges = self._gauges()
        return {
            "pipeline": self._plan.pipeline,
            "coordinator": self._membership.incarnation,
            "ready": self._membership.ready(),
            "problem": problem,
            "in_flight": in_flight,
            "awaiting_instance": awaiting_instance,
            "stages": list(newest.stages) if newest is not None else [],
            "stage_groups": dict(newest.stages) if newest is not None else {},
            "entry": newest.entry if newest is not None else None,
            "terminals": list(newest.terminals) if newest is not None else [],
            "edges": list(newest.edges) if newest is not None else [],
            "gauges": gauges,
            "transports": planes.transports(gauges),
            **member_reports.status(self._membership),
        }

    def samples(self, *, in_flight: int, kept_nbytes: int) -> Samples:
        """kept_nbytes: of bodies that are kept for a retry."""
        tracing = self._tracing
        of_manager: Samples = {
            catalog.REQUESTS_IN_FLIGHT: {(): in_flight},
            catalog.RETAINED_BODY_BYTES: {(): kept_nbytes},
            catalog.TRACES_SENT: {(): tracing.sent if tracing is not None else 0},
            catalog.TRACES_DROPPED: {(): tracing.dropped if tracing is not None else 0},
        }
        own = planes.samples({COORDINATOR: self._gauges()})
        return {**of_manager, **member_reports.samples(self._membership), **own}

    def _gauges(self) -> dict[str, float]:
        return planes.gauges(
            relays=self._relays.stats(),
            transfers_in_flight=self._send_queues.outstanding,
            edges=self._send_queues.edges(),
            edge_transports=self._edge_transports(),
            sends_queued=self._send_queues.queued,
            events=self._membership.counters(),
        )

    @property
    def _newest(self) -> PipelineRevision | None:
        return next(iter(self._membership.state.revisions[-1:]), None)

    def _edge_transports(self) -> dict[tuple[str, str, str, str], int]:
        """How the instances of the entry stage are reached."""
        entry = self._newest.entry if self._newest is not None else None
        found: Counter[tuple[str, str, str, str]] = Counter()
        for peer, instance in self._membership.state.instances.items():
            if entry in instance.member.stages:
                found[COORDINATOR, entry, *self._relays.transport(peer, self._plan.relay_backend)] += 1
        return dict(found)
