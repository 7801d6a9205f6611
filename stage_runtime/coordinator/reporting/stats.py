"""The coordinator's counts: outcomes, times per stage, the records of requests that ended lately."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final

from stage_runtime.coordinator.events import RequestRecord
from stage_runtime.metrics import catalog
from stage_runtime.metrics.samples import Histogram, Samples
from stage_runtime.wire.parts import Timing

RECORDS: Final = 4096  # ended requests that `GET /v1/requests/{id}` still knows
FAILURES: Final = 32  # of those that did not complete, shown after many others have


Recorded = Callable[[], RequestRecord]


class RequestStats:
    """All counts of one coordinator."""

    def __init__(self) -> None:
        self.outcomes: Counter[tuple[str, str]] = Counter()  #: (kind, outcome)
        self._queue_time = Histogram(catalog.STAGE_QUEUE_TIME)
        self._run_time = Histogram(catalog.STAGE_RUN_TIME)
        self._records: dict[str, Recorded] = {}  #: Oldest first.
        self._failed: deque[Recorded] = deque(maxlen=FAILURES)  #: Oldest first.

    def ended(self, request_id: str, kind: str, outcome: str, recorded: Recorded) -> None:
        """A request is over. ``recorded`` makes its record on demand: few are ever read."""
        self.outcomes[kind, outcome] += 1
        self._records.pop(request_id, None)
        self._records[request_id] = recorded
        if outcome != "completed":
            self._failed.append(recorded)
        if len(self._records) > RECORDS:
            del self._records[next(iter(self._records))]

    def timed(self, timings: Iterable[Timing]) -> None:
        for timing in timings:
            self._queue_time.observe(timing.queue_us / 1e6, timing.stage)
            self._run_time.observe(timing.run_us / 1e6, timing.stage)

    def record(self, request_id: str) -> RequestRecord | None:
        recorded = self._records.get(request_id)
        return recorded() if recorded is not None else None

    def latest(self, most: int) -> list[RequestRecord]:
        """The last ``most`` requests that ended, and the last `FAILURES` that did not complete."""
        found = {one: None for one in (*islice(reversed(self._records.values()), most), *self._failed)}
        return [recorded() for recorded in found]

    def samples(self) -> Samples:
        return {
            catalog.REQUESTS: {labels: count for labels, count in self.outcomes.items()},
            **self._queue_time.samples(),
            **self._run_time.samples(),
        }
