"""The operator's metrics: one list, and the registry that serves it.

Here: every metric there is, in the terms of controller-runtime (the operator itself) and of kube-state-metrics
(pipelines). Not here: serving them (`probes`). Called by `lifecycle`; tests compare the chart and docs/operations.md
with the list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from omnipipeline_spec.types.metrics import Metric

RECONCILE_TIME: Final = Metric(
    name="omnipipeline_operator_reconcile_time_seconds",
    kind="histogram",
    help="Time of one reconcile of one pipeline",
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
RECONCILE_ERRORS: Final = Metric(
    name="omnipipeline_operator_reconcile_errors_total",
    kind="counter",
    help="Reconciles that ended with an error and are retried",
    labels=("error",),
)
RELISTS: Final = Metric(
    name="omnipipeline_operator_relists_total",
    kind="counter",
    help="Lists of all kinds, by result: success or error",
    labels=("result",),
)
REST_CLIENT_REQUESTS: Final = Metric(
    name="omnipipeline_operator_rest_client_requests_total",
    kind="counter",
    help="Requests to the API server without those of the watches; code is `<error>` where no answer came",
    labels=("method", "resource", "code"),
)
LEADER: Final = Metric(
    name="omnipipeline_operator_leader_election_master_status",
    kind="gauge",
    help="1 in the operator that holds the Lease, 0 in a standby",
)
WORKQUEUE_DEPTH: Final = Metric(
    name="omnipipeline_operator_workqueue_depth",
    kind="gauge",
    help="Pipelines that are waiting for a reconcile or in one",
)
WORKQUEUE_OLDEST: Final = Metric(
    name="omnipipeline_operator_workqueue_oldest_item_seconds",
    kind="gauge",
    help="How long the pipeline that waits longest has been due",
)
WORKQUEUE_LONGEST_FAILING: Final = Metric(
    name="omnipipeline_operator_workqueue_longest_failing_seconds",
    kind="gauge",
    help="How long the pipeline that fails longest has had no reconcile without an error",
)
STORE_OBJECTS: Final = Metric(
    name="omnipipeline_operator_store_objects", kind="gauge", help="Objects in the operator's store"
)
PIPELINES: Final = Metric(
    name="omnipipeline_operator_pipelines", kind="gauge", help="Pipelines in the operator's store"
)
WATCH_EVENTS: Final = Metric(
    name="omnipipeline_operator_watch_events_total", kind="counter", help="Events that the watches have received"
)
_OF_PIPELINE: Final = ("namespace", "pipeline")
STATUS_CONDITION: Final = Metric(
    name="omnipipeline_status_condition",
    kind="gauge",
    help="1 for each condition of a pipeline",
    labels=(*_OF_PIPELINE, "condition", "status", "reason"),
)
UNIT_STATUS_REASON: Final = Metric(
    name="omnipipeline_unit_status_reason",
    kind="gauge",
    help="1 while a unit is not ready for this reason",
    labels=(*_OF_PIPELINE, "unit", "reason"),
)
UNIT_SPEC_REPLICAS: Final = Metric(
    name="omnipipeline_unit_spec_replicas",
    kind="gauge",
    help="Pods that the spec asks for",
    labels=(*_OF_PIPELINE, "unit"),
)
UNIT_STATUS_REPLICAS_UPDATED: Final = Metric(
    name="omnipipeline_unit_status_replicas_updated",
    kind="gauge",
    help="Pods of the current unit revision",
    labels=(*_OF_PIPELINE, "unit"),
)
UNIT_STATUS_REPLICAS_READY: Final = Metric(
    name="omnipipeline_unit_status_replicas_ready",
    kind="gauge",
    help="Pods that are ready, of any unit revision",
    labels=(*_OF_PIPELINE, "unit"),
)

#: Metrics of the operator itself.
OPERATOR: Final = (
    RECONCILE_TIME,
    RECONCILE_ERRORS,
    WORKQUEUE_DEPTH,
    WORKQUEUE_OLDEST,
    WORKQUEUE_LONGEST_FAILING,
    PIPELINES,
    STORE_OBJECTS,
    WATCH_EVENTS,
    RELISTS,
    REST_CLIENT_REQUESTS,
    LEADER,
)
#: Metrics of pipelines, read from their status by the operator that leads: a standby would count each twice.
STATUS: Final = (
    STATUS_CONDITION,
    UNIT_STATUS_REASON,
    UNIT_SPEC_REPLICAS,
    UNIT_STATUS_REPLICAS_UPDATED,
    UNIT_STATUS_REPLICAS_READY,
)

Sample: TypeAlias = tuple[tuple[str, ...], float]  # values of the labels, value


class OperatorMetrics:
    """One registry per operator."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reconcile_time = Histogram(
            RECONCILE_TIME.name, RECONCILE_TIME.help, buckets=RECONCILE_TIME.buckets, registry=self.registry
        )
        self.reconcile_errors = self._counter(RECONCILE_ERRORS)
        self.relists = self._counter(RELISTS)
        self._requests = self._counter(REST_CLIENT_REQUESTS)

    def count_request(self, method: str, resource: str, code: int) -> None:
        """One request to the API server; code 0: no answer."""
        self._requests.labels(method, resource, str(code or "<error>")).inc()

    def read(self, metric: Metric, value: Callable[[], float]) -> None:
        """Serve a metric without labels whose value is read at each scrape."""
        self.registry.register(_ScrapedFamilies({metric: lambda: [((), value())]}))

    def read_status(self, pipelines: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
        """Serve the metrics of pipelines, read from their resources at each scrape."""

        def of_all(samples: Callable[[Mapping[str, Any]], Iterable[Sample]]) -> Callable[[], Iterable[Sample]]:
            return lambda: [one for each in pipelines() for one in samples(each)]

        read: dict[Metric, Callable[[], Iterable[Sample]]] = {
            STATUS_CONDITION: of_all(_conditions),
            UNIT_STATUS_REASON: of_all(_reasons),
            UNIT_SPEC_REPLICAS: of_all(lambda pipeline: _replicas(pipeline, "replicas")),
            UNIT_STATUS_REPLICAS_UPDATED: of_all(lambda pipeline: _replicas(pipeline, "updated")),
            UNIT_STATUS_REPLICAS_READY: of_all(lambda pipeline: _replicas(pipeline, "ready")),
        }
        self.registry.register(_ScrapedFamilies(read))

    def _counter(self, metric: Metric) -> Counter:
        return Counter(metric.name, metric.help, metric.labels, registry=self.registry)


class _ScrapedFamilies(Collector):
    """Families whose samples are read at each scrape."""

    def __init__(self, samples: Mapping[Metric, Callable[[], Iterable[Sample]]]) -> None:
        self._samples = samples

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        for metric, samples in self._samples.items():
            made = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = made(metric.name, metric.help, labels=metric.labels)
            for labels, value in samples():
                family.add_metric(labels, value)
            yield family


def _conditions(pipeline: Mapping[str, Any]) -> Iterator[Sample]:
    for each in pipeline.get("status", {}).get("conditions", ()):
        yield (*_names(pipeline), *(str(each.get(key, "")) for key in ("type", "status", "reason"))), 1.0


def _reasons(pipeline: Mapping[str, Any]) -> Iterator[Sample]:
    for unit in pipeline.get("status", {}).get("units", ()):
        if "reason" in unit:
            yield (*_names(pipeline), unit["name"], unit["reason"]), 1.0


def _replicas(pipeline: Mapping[str, Any], field: str) -> Iterator[Sample]:
    for unit in pipeline.get("status", {}).get("units", ()):
        yield (*_names(pipeline), unit["name"]), unit.get(field, 0)


def _names(pipeline: Mapping[str, Any]) -> tuple[str, str]:
    return pipeline["metadata"]["namespace"], pipeline["metadata"]["name"]
