"""A pipeline revision that is tried beside others: its share of the requests, and what became of each one's. Pure.

Here: shares and counts at one coordinator. Not here: whether the revision is better or worse, which the operator judges
from the sum of all coordinators. Called by `rules.binding.membership_state` and `coordinator.reporting.outcomes`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from omnipipeline_spec.types.plan import CanaryShare

#: Codes of failures that are the pipeline's and not the client's; a request that is cancelled or refused tells nothing.
FAULTS: Final = frozenset({"stage_failed", "transport_failed", "unavailable", "deadline"})
RESOLUTION: Final = 1.05  # from one counted time to the next: 5 %, some 200 of them between a millisecond and a minute
SHORTEST_S: Final = 1e-4


def shares(sets: Sequence[tuple[str, int]], canary: CanaryShare | None) -> list[float]:
    """The share of requests for each of several revisions that can serve, in proportion.

    sets: (revision, its complete sets of instances). canary: its revision gets its weight, the others divide the rest.
    Shares follow the complete sets without one, or where it cannot serve.
    """
    tried = None if canary is None else next((one for one, _ in sets if one == canary.revision), None)
    rest = sum(count for revision, count in sets if revision != tried)
    if canary is None or tried is None or not rest:
        return [float(count) for _, count in sets]
    return [canary.weight if one == tried else (1 - canary.weight) * count / rest for one, count in sets]


class Outcomes:
    """The ended attempts of one revision."""

    def __init__(self) -> None:
        self.completed = 0
        self.failed = 0  #: Failures by the pipeline's fault, those that were sent again included.
        self._times: dict[int, int] = {}  #: Times of those that completed: power of `RESOLUTION` -> how many.

    def complete(self, took_s: float) -> None:
        self.completed += 1
        power = math.floor(math.log(max(took_s, SHORTEST_S), RESOLUTION))
        self._times[power] = self._times.get(power, 0) + 1

    def fail(self) -> None:
        self.failed += 1

    def report(self) -> dict[str, Any]:
        """Counts for `/status`. times: (seconds, attempts that took about as long), ascending."""
        times = [(round(RESOLUTION ** (power + 0.5), 6), count) for power, count in sorted(self._times.items())]
        return {"completed": self.completed, "failed": self.failed, "times": times}
