"""When the requests of a benchmark are sent. Pure: randomness is passed in."""

from __future__ import annotations

import itertools
import math
from random import Random


def times_s(count: int, rate: float, *, burstiness: float, constant: bool, random: Random) -> list[float]:
    """Seconds after the beginning, one for each request, in order.

    rate: requests a second; infinite: all at once. burstiness: 1 is a Poisson process; below it requests come in
    bursts, above it they are spread more evenly. constant: equal gaps, whatever the burstiness.
    Source: ``vllm bench serve``: gamma distributed gaps, scaled so that the last request comes at ``count / rate``.
    """
    if math.isinf(rate):
        return [0.0] * count
    if constant:
        gaps = [1 / rate] * count
    else:
        gaps = [random.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in range(count)]
    found = list(itertools.accumulate(gaps))
    scale = count / rate / found[-1] if found and found[-1] > 0 else 1.0
    return [one * scale for one in found]
