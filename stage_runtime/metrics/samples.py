"""Values of metrics at one moment, and the two kinds of counts that a process keeps itself.

Here: the form of values between counting and `/metrics`. Not here: descriptions (`catalog`). Gauges are read at each
scrape and have no class. No locks: each count belongs to one thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import msgspec

from omnipipeline_spec.types.metrics import Metric

Labels: TypeAlias = tuple[str, ...]  #: Values in the order of `Metric.labels`.


class Buckets(msgspec.Struct, frozen=True):
    """A histogram's value. counts: observations up to each of the metric's ``buckets``; last: all of them."""

    counts: tuple[int, ...]
    sum: float


Values: TypeAlias = Mapping[Labels, float | Buckets]
Samples: TypeAlias = Mapping[Metric, Values]


class Counter:
    """A count per set of labels."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._values: dict[Labels, float] = {}

    def add(self, *labels: str, amount: float = 1) -> None:
        self._values[labels] = self._values.get(labels, 0) + amount

    def keep(self, wanted: Callable[[Labels], bool]) -> None:
        """Drop the counts of other labels."""
        self._values = {labels: value for labels, value in self._values.items() if wanted(labels)}

    def samples(self) -> Samples:
        return {self._metric: dict(self._values)}


class Histogram:
    """Observations per set of labels, counted up to each of the metric's ``buckets``."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}

    def observe(self, value: float, *labels: str) -> None:
        counts = self._counts.get(labels)
        if counts is None:
            counts = self._counts[labels] = [0] * (len(self._metric.buckets) + 1)
        counts[bisect_left(self._metric.buckets, value)] += 1
        self._sums[labels] = self._sums.get(labels, 0.0) + value

    def keep(self, wanted: Callable[[Labels], bool]) -> None:
        """Drop the counts of other labels."""
        self._counts = {labels: counts for labels, counts in self._counts.items() if wanted(labels)}
        self._sums = {labels: self._sums[labels] for labels in self._counts}

    def samples(self) -> Samples:
        return {
            self._metric: {labels: Buckets(_cumulative(n), self._sums[labels]) for labels, n in self._counts.items()}
        }


def merged(parts: Iterable[Samples]) -> Samples:
    """All values of each metric; of the same labels the last."""
    found: dict[Metric, dict[Labels, float | Buckets]] = {}
    for part in parts:
        for metric, values in part.items():
            found.setdefault(metric, {}).update(values)
    return found


def _cumulative(counts: Iterable[int]) -> tuple[int, ...]:
    total, found = 0, []
    for count in counts:
        total += count
        found.append(total)
    return tuple(found)
