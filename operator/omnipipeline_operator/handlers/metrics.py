"""What Prometheus is told of the operator.

Here: the metrics. Not here: serving them (`probes`). Called by `lifecycle`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector


class Metrics:
    """One registry per operator; gauges read what they show when they are asked."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reconciles = Histogram(
            "omnipipeline_operator_reconcile_time_seconds",
            "Time of one look at a pipeline",
            registry=self.registry,
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
        )
        self.failures = Counter(
            "omnipipeline_operator_reconcile_errors_total",
            "Looks that the API server or a fault of ours broke off",
            ["error"],
            registry=self.registry,
        )
        self.relists = Counter(
            "omnipipeline_operator_relists_total", "Complete lists of all kinds", ["result"], registry=self.registry
        )

        self.requests = Counter(
            "omnipipeline_operator_rest_client_requests_total",
            "Requests to the API server without those of the watches; code 0: no answer",
            ["method", "resource", "code"],
            registry=self.registry,
        )

    def counted(self, method: str, resource: str, code: int) -> None:
        """One request to the API server."""
        self.requests.labels(method, resource, str(code)).inc()

    def show(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge whose value is read when somebody scrapes."""
        Gauge(f"omnipipeline_operator_{name}", text, registry=self.registry).set_function(read)


class PipelineMetrics(Collector):
    """The status of every pipeline, read when somebody scrapes: alerts see what `kubectl get` shows.

    read: all pipelines; none in a standby, or each would be counted twice.
    """

    def __init__(self, read: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
        self._read = read

    def collect(self) -> Iterator[GaugeMetricFamily]:
        where = ["namespace", "pipeline"]
        conditions = GaugeMetricFamily(
            "omnipipeline_status_condition",
            "1 for each condition of a pipeline, with its status and reason",
            labels=[*where, "condition", "status", "reason"],
        )
        reasons = GaugeMetricFamily(
            "omnipipeline_unit_status_reason",
            "1 for a unit that is not ready for a reason",
            labels=[*where, "unit", "reason"],
        )
        pods = GaugeMetricFamily(
            "omnipipeline_unit_pods", "Pods of a unit: wanted, updated, ready", labels=[*where, "unit", "state"]
        )
        for pipeline in self._read():
            named = [pipeline["metadata"]["namespace"], pipeline["metadata"]["name"]]
            status = pipeline.get("status", {})
            for each in status.get("conditions", ()):
                said = [str(each.get(key, "")) for key in ("type", "status", "reason")]
                conditions.add_metric([*named, *said], 1)
            for unit in status.get("units", ()):
                if "reason" in unit:
                    reasons.add_metric([*named, unit["name"], unit["reason"]], 1)
                for state, field in (("wanted", "replicas"), ("updated", "updated"), ("ready", "ready")):
                    pods.add_metric([*named, unit["name"], state], unit.get(field, 0))
        yield from (conditions, reasons, pods)
