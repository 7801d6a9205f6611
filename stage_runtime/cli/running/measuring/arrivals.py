"""When the requests of a benchmark are sent. Pure: randomness is passed in."""

from __future__ import annotations

import itertools
import math
from random import Random

import msgspec


class Ramp(msgspec.Struct, frozen=True, kw_only=True):
    """A rate that grows from the first request to the last, by the same step or the same factor."""

    exponential: bool
    start: float  #: Requests a second; above 0 if exponential.
    end: float

    def rate(self, index: int, count: int) -> float:
        share = index / max(count - 1, 1)
        if self.exponential:
            return self.start * math.pow(self.end / self.start, share)
        return self.start + (self.end - self.start) * share


def times_s(
    count: int, rate: float, *, burstiness: float, constant: bool, random: Random, ramp: Ramp | None = None
) -> list[float]:
    """Seconds after the beginning, one for each request, in order.

    rate: requests a second; infinite: all at once. burstiness: 1 is a Poisson process; below it requests come in
    bursts, above it they are spread more evenly. constant: equal gaps, whatever the burstiness.
    ramp: the rate, instead of ``rate``. A rate of 0 puts a request off to the next one's.
    Source: ``vllm bench serve``: gamma distributed gaps, scaled so that the last request comes at ``count / rate``;
        those of a ramp are not scaled.
    """
    if ramp is None and math.isinf(rate):
        return [0.0] * count
    rates = [rate if ramp is None else ramp.rate(index, count) for index in range(count)]
    gaps = [
        0.0 if each == 0 else 1 / each if constant else random.gammavariate(burstiness, 1 / (each * burstiness))
        for each in rates
    ]
    found = list(itertools.accumulate(gaps))
    if ramp is not None:
        return found
    scale = count / rate / found[-1] if found and found[-1] > 0 else 1.0
    return [one * scale for one in found]
