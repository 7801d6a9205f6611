"""Prometheus' text of what the request manager counts and what HTTP sees. Called by the probes and, per request, by
`middleware`.

The request manager's numbers are read when asked for. Names begin with ``omnipipeline_``; what each key of
`RequestManagerApi.metrics`
becomes:

    requests            {(kind, outcome): n}          requests_total{kind,outcome}
    stages              {stage: {name: number|hist}}  stage_<name>{stage}
    instances_ready     {group: n}                    instances_ready{group}
    control             {event: n}                    control_events_total{event}
    relay               {name: number}                relay_<name>, untyped: some of them count, some do not
    any other           number | hist                 <name>

A histogram is ``{"buckets": {upper bound: count so far}, "sum": s}`` with cumulative counts, ``+Inf`` last. A name
that ends in ``_total`` is a counter, every other a gauge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    UnknownMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from stage_runtime.coordinator.events import RequestManagerApi
from stage_runtime.web.exchange import Exchange

CONTENT_TYPE: Final[bytes] = CONTENT_TYPE_PLAIN_0_0_4.encode()
_PREFIX: Final = "omnipipeline_"
_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


Families = dict[str, Any]  # by name; prometheus_client's base type of families has no ``add_metric``


class Metrics:
    """All metrics of the coordinator's process."""

    def __init__(self, manager: RequestManagerApi) -> None:
        # the library's second series for each of ours, which no dashboard reads
        disable_created_metrics()  # type: ignore[no-untyped-call]
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_ManagerCollector(manager))
        labels = ("route",)
        self._answers = Counter(
            f"{_PREFIX}http_requests",
            "Answers by route, status and outcome.",
            (*labels, "status", "outcome"),
            registry=registry,
        )
        self._first_byte = Histogram(
            f"{_PREFIX}http_first_byte_seconds",
            "Request read to first byte out.",
            labels,
            buckets=_SECONDS,
            registry=registry,
        )
        self._seconds = Histogram(
            f"{_PREFIX}http_request_seconds",
            "Request read to last byte out.",
            labels,
            buckets=_SECONDS,
            registry=registry,
        )
        self._sent = Counter(f"{_PREFIX}http_sent_bytes", "Bytes of answers' bodies.", labels, registry=registry)
        self._registry = registry

    def observe(self, exchange: Exchange, ended_at: float) -> None:
        """Count one finished exchange."""
        route = f"{exchange.method} {exchange.route}" if exchange.route != "unknown" else "unknown"
        self._answers.labels(route, str(exchange.status), exchange.outcome).inc()
        self._seconds.labels(route).observe(ended_at - exchange.begun_at)
        self._sent.labels(route).inc(exchange.sent_bytes)
        if exchange.first_byte_at is not None:
            self._first_byte.labels(route).observe(exchange.first_byte_at - exchange.begun_at)

    def watch(self, name: str, words: str, read: Callable[[], float]) -> None:
        """Show one more number, read when asked for."""
        Gauge(f"{_PREFIX}{name}", words, registry=self._registry).set_function(read)

    def render(self) -> bytes:
        return generate_latest(self._registry)


class _ManagerCollector(Collector):
    def __init__(self, manager: RequestManagerApi) -> None:
        self._manager = manager

    def collect(self) -> Iterator[Metric]:
        families: Families = {}
        for key, value in self._manager.metrics().items():
            match key:
                case "requests":
                    for (kind, outcome), number in value.items():
                        _add(families, "requests_total", {"kind": kind, "outcome": outcome}, number)
                case "stages":
                    for stage, row in value.items():
                        for name, number in row.items():
                            _add(families, f"stage_{name}", {"stage": stage}, number)
                case "instances_ready":
                    for group, number in value.items():
                        _add(families, key, {"group": group}, number)
                case "control":
                    for event, number in value.items():
                        _add(families, "control_events_total", {"event": event}, number)
                case "relay":
                    for name, number in value.items():
                        full = f"{_PREFIX}relay_{name}"
                        families[full] = UnknownMetricFamily(full, f"relay_{name}", number)
                case _:
                    _add(families, key, {}, value)
        return iter(families.values())


def _add(families: Families, name: str, labels: dict[str, str], value: Any) -> None:
    """One sample. What is neither a number nor a histogram has no place here and is left out (a name, a list)."""
    full, values = _PREFIX + name, list(labels.values())
    if isinstance(value, Mapping) and "buckets" in value:
        family = families.setdefault(full, HistogramMetricFamily(full, name, labels=list(labels)))
        buckets = [(_bound(bound), float(count)) for bound, count in value["buckets"].items()]
        family.add_metric(values, buckets, value["sum"])
    elif isinstance(value, (int, float)):
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        families.setdefault(full, kind(full, name, labels=list(labels))).add_metric(values, float(value))


def _bound(bound: Any) -> str:
    """As Prometheus writes it, so that ``1`` and ``1.0`` are one bucket."""
    number = float(bound)
    return "+Inf" if math.isinf(number) else repr(number)
