"""What Prometheus is told of the operator.

Here: the metrics. Not here: serving them (`probes`). Called by `lifecycle`.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Metrics:
    """One registry per operator; gauges read what they show when they are asked."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.looks = Histogram(
            "omnipipeline_operator_reconcile_seconds",
            "Time of one look at a pipeline",
            registry=self.registry,
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
        )
        self.failures = Counter(
            "omnipipeline_operator_reconcile_failures_total",
            "Looks that the API server or a fault of ours broke off",
            ["error"],
            registry=self.registry,
        )
        self.relists = Counter(
            "omnipipeline_operator_relists_total", "Complete lists of all kinds", ["outcome"], registry=self.registry
        )

        self.requests = Counter(
            "omnipipeline_operator_api_requests_total",
            "Requests to the API server without those of the watches; code 0: no answer",
            ["verb", "resource", "code"],
            registry=self.registry,
        )

    def counted(self, verb: str, resource: str, code: int) -> None:
        """One request to the API server."""
        self.requests.labels(verb, resource, str(code)).inc()

    def show(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge whose value is read when somebody scrapes."""
        Gauge(f"omnipipeline_operator_{name}", text, registry=self.registry).set_function(read)
