"""What HTTP counts, and the text of `/metrics`. Called by the probes and, per request, by `middleware`."""

from __future__ import annotations

from collections.abc import Callable

from omnipipeline_spec.types.metrics import Metric
from stage_runtime.coordinator.events import RequestManagerApi
from stage_runtime.metrics import catalog, exposition, planes
from stage_runtime.metrics.samples import Counter, Histogram, Samples, merged
from stage_runtime.web.exchange import Exchange


class Metrics:
    """All metrics of the coordinator's process."""

    def __init__(self, manager: RequestManagerApi, *, of_members: bool = False) -> None:
        """of_members: serve the planes' numbers of all processes, too: where no pod serves them (`omni up`)."""
        self._manager = manager
        self._of_members = of_members
        self._answers = Counter(catalog.HTTP_REQUESTS)
        self._sent = Counter(catalog.HTTP_SENT_BYTES)
        self._first_byte = Histogram(catalog.HTTP_FIRST_BYTE)
        self._seconds = Histogram(catalog.HTTP_REQUEST_TIME)
        self._read: dict[Metric, Callable[[], float]] = {}

    def observe(self, exchange: Exchange, ended_at: float) -> None:
        """Count one finished exchange."""
        route = f"{exchange.method} {exchange.route}" if exchange.route != "unknown" else "unknown"
        self._answers.add(route, str(exchange.status), exchange.outcome)
        self._seconds.observe(ended_at - exchange.begun_at, route)
        self._sent.add(route, amount=exchange.sent_bytes)
        if exchange.first_byte_at is not None:
            self._first_byte.observe(exchange.first_byte_at - exchange.begun_at, route)

    def read(self, metric: Metric, value: Callable[[], float]) -> None:
        """Serve a metric without labels whose value is read at each scrape."""
        self._read[metric] = value

    def render(self) -> bytes:
        return exposition.render(self._samples()).encode()

    def _samples(self) -> Samples:
        counted = (self._answers, self._first_byte, self._seconds, self._sent)
        read: Samples = {metric: {(): value()} for metric, value in self._read.items()}
        members = planes.samples(self._manager.member_gauges() if self._of_members else {})
        return merged([self._manager.metrics(), *(each.samples() for each in counted), read, members])
