"""What the coordinator counts: outcomes, times per stage, the records of requests that ended lately."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from stage_runtime.coordinator.events import RequestRecord
from stage_runtime.wire.messages import Timing

#: Seconds; from a hop to a long generation.
BOUNDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
RECORDS: Final = 4096  # ended requests that `GET /v1/requests/{id}` still knows


Recorded = Callable[[], RequestRecord]


class Histogram:
    """Counts of durations up to each of `BOUNDS`."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._sum_s = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS, seconds)] += 1
        self._sum_s += seconds

    def read(self) -> dict[str, Any]:
        """Cumulative, as Prometheus wants it: ``{"buckets": {bound: count}, "sum": seconds}``."""
        total = 0
        buckets: dict[str, int] = {}
        for bound, count in zip([*map(str, BOUNDS), "+Inf"], self._counts, strict=True):
            total += count
            buckets[bound] = total
        return {"buckets": buckets, "sum": self._sum_s}


class RequestStats:
    """All counts of one coordinator."""

    def __init__(self) -> None:
        self.outcomes: Counter[tuple[str, str]] = Counter()  #: (kind, outcome)
        self.retried = 0
        self._queue: defaultdict[str, Histogram] = defaultdict(Histogram)
        self._run: defaultdict[str, Histogram] = defaultdict(Histogram)
        self._records: dict[str, Recorded] = {}  #: Oldest first.

    def ended(self, request_id: str, kind: str, outcome: str, recorded: Recorded) -> None:
        """A request is over. ``recorded`` makes its record when somebody asks: few ever do."""
        self.outcomes[kind, outcome] += 1
        self._records.pop(request_id, None)
        self._records[request_id] = recorded
        if len(self._records) > RECORDS:
            del self._records[next(iter(self._records))]

    def timed(self, timings: Iterable[Timing]) -> None:
        for timing in timings:
            self._queue[timing.stage].add(timing.queue_us / 1e6)
            self._run[timing.stage].add(timing.run_us / 1e6)

    def record(self, request_id: str) -> RequestRecord | None:
        recorded = self._records.get(request_id)
        return recorded() if recorded is not None else None

    def stages(self) -> Mapping[str, dict[str, Any]]:
        """Per stage, its two histograms."""
        return {
            name: {"queue_seconds": queue.read(), "run_seconds": self._run[name].read()}
            for name, queue in self._queue.items()
        }
