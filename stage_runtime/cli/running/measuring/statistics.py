"""Times of requests as the numbers of a benchmark. Pure. Names and meanings are those of ``vllm bench serve``."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

#: name -> what it is, for people.
METRICS: Final = {
    "ttft": "Time to First Token",
    "ttfa": "Time to First Audio",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
    "client_queue_time": "Client-side Queueing",
    "e2el_including_client_queue": "Queue-inclusive End-to-end Latency",
}

_SHORT: Final = {"client_queue_time": "Client Queue Time", "e2el_including_client_queue": "E2EL incl. Client Queue"}


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Times are seconds after it was sent; None: it did not come."""

    latency: float
    begun: float = 0.0  #: When it was sent, after the first one was due.
    queued: float | None = None  #: Seconds that it waited before it was sent for a place among those at once.
    first_token: float | None = None
    first_audio: float | None = None
    gaps: tuple[float, ...] = ()  #: Seconds between pieces of the answer.
    input_tokens: int = 0
    output_tokens: int = 0
    text: str = ""
    error: str = ""

    def values(self, metric: str) -> Sequence[float]:
        """The request's values of a metric, in milliseconds: one, several (``itl``) or none."""
        match metric:
            case "ttft":
                found = [self.first_token]
            case "ttfa":
                found = [self.first_audio]
            case "e2el":
                found = [self.latency]
            case "itl":
                found = list(self.gaps)
            case "client_queue_time":
                found = [self.queued]
            case "e2el_including_client_queue":
                found = [None if self.queued is None else self.latency + self.queued]
            case _:
                found = [self._per_token()]
        return [one * 1000 for one in found if one is not None]

    def _per_token(self) -> float | None:
        if self.first_token is None or self.output_tokens < 2:
            return None
        return (self.latency - self.first_token) / (self.output_tokens - 1)

    def is_good(self, bounds: Mapping[str, float]) -> bool:
        """Whether it kept all bounds, by metric in milliseconds. A request that has no such time has not."""
        for metric, bound in bounds.items():
            longest = max(self.values(metric), default=0.0 if self._is_one_piece(metric) else math.inf)
            if longest > bound:
                return False
        return not self.error

    def _is_one_piece(self, metric: str) -> bool:
        """Whether nothing follows the first token, so that no time after it is too long. vLLM counts it so."""
        pieces = {"tpot": self.output_tokens, "itl": len(self.gaps) + 1}
        return self.first_token is not None and pieces.get(metric) == 1


def percentile(values: Sequence[float], percent: float) -> float:
    """Interpolate linearly between the nearest ranks, as numpy's. values: at least one."""
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def summary(
    outcomes: Sequence[Outcome],
    *,
    duration: float,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    bounds: Mapping[str, float],
) -> dict[str, Any]:
    """duration: seconds from the first request to the last answer. bounds: of goodput, by metric in milliseconds."""
    done = [one for one in outcomes if not one.error]
    given, written = sum(one.input_tokens for one in done), sum(one.output_tokens for one in done)
    duration = max(duration, 1e-9)
    found: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": given,
        "total_output_tokens": written,
        "request_throughput": len(done) / duration,
        "request_goodput": sum(one.is_good(bounds) for one in done) / duration if bounds else None,
        "output_throughput": written / duration,
        "total_token_throughput": (given + written) / duration,
        "max_output_tokens_per_s": float(_most_in_a_second(done)),
        "max_concurrent_requests": _most_at_once(done),
    }
    for metric in metrics:
        values = [value for one in done for value in one.values(metric)]
        found |= _of_values(metric, values, percentiles)
    return found


def _most_in_a_second(done: Sequence[Outcome]) -> int:
    """Pieces with tokens that came within one second, at most; seconds count from the first request."""
    seconds: Counter[int] = Counter()
    for one in done:
        if one.first_token is not None:
            times = itertools.accumulate((one.begun + one.first_token, *one.gaps))
            seconds.update(int(at) for at in times)
    return max(seconds.values(), default=0)


def _most_at_once(done: Sequence[Outcome]) -> int:
    """Requests that were under way at one moment, at most."""
    ends = [(one.begun + one.latency, -1) for one in done]
    steps = sorted([(one.begun, 1) for one in done] + ends)
    return max(itertools.accumulate(step for _, step in steps), default=0)


def _of_values(metric: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    names = [f"p{percent:g}_{metric}_ms" for percent in percentiles]
    if not values:
        return dict.fromkeys([f"mean_{metric}_ms", f"median_{metric}_ms", f"std_{metric}_ms", *names])
    mean = math.fsum(values) / len(values)
    spread = math.sqrt(math.fsum((one - mean) ** 2 for one in values) / len(values))
    found: dict[str, float | None] = {
        f"mean_{metric}_ms": mean,
        f"median_{metric}_ms": percentile(values, 50),
        f"std_{metric}_ms": spread,
    }
    return found | {name: percentile(values, percent) for name, percent in zip(names, percentiles, strict=True)}


def lines(found: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> list[str]:
    """A summary for people, in the form of ``vllm bench serve``."""
    shown = ["Serving Benchmark Result".center(50, "=").replace("Serving", " Serving").replace("Result", "Result ")]
    rows: list[tuple[str, Any]] = [
        ("Successful requests:", found["completed"]),
        ("Failed requests:", found["failed"]),
        ("Benchmark duration (s):", found["duration"]),
        ("Total input tokens:", found["total_input_tokens"]),
        ("Total generated tokens:", found["total_output_tokens"]),
        ("Request throughput (req/s):", found["request_throughput"]),
    ]
    if found["request_goodput"] is not None:
        rows.append(("Request goodput (req/s):", found["request_goodput"]))
    rows += [
        ("Output token throughput (tok/s):", found["output_throughput"]),
        ("Peak output token throughput (tok/s):", found["max_output_tokens_per_s"]),
        ("Peak concurrent requests:", found["max_concurrent_requests"]),
        ("Total token throughput (tok/s):", found["total_token_throughput"]),
    ]
    shown += [_row(name, value) for name, value in rows]
    for metric in metrics:
        if found[f"mean_{metric}_ms"] is None:
            continue
        shown.append(METRICS[metric].center(50, "-"))
        short = _SHORT.get(metric, metric.upper())
        shown.append(_row(f"Mean {short} (ms):", found[f"mean_{metric}_ms"]))
        shown.append(_row(f"Median {short} (ms):", found[f"median_{metric}_ms"]))
        shown += [_row(f"P{one:g} {short} (ms):", found[f"p{one:g}_{metric}_ms"]) for one in percentiles]
    return [*shown, "=" * 50]


def _row(name: str, value: float) -> str:
    return f"{name:<40} {value:<10}" if isinstance(value, int) else f"{name:<40} {value:<10.2f}"
