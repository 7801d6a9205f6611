"""Times of requests as the numbers of a benchmark. Pure. Names and meanings are those of ``vllm bench serve``."""

from __future__ import annotations

import math
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
}


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Times are seconds after it was sent; None: there was none."""

    latency: float
    first_token: float | None = None
    first_audio: float | None = None
    gaps: tuple[float, ...] = ()  #: Between pieces of the answer.
    input_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    def values(self, metric: str) -> Sequence[float]:
        """In milliseconds: one, several (``itl``) or none."""
        match metric:
            case "ttft":
                found = [self.first_token]
            case "ttfa":
                found = [self.first_audio]
            case "e2el":
                found = [self.latency]
            case "itl":
                found = list(self.gaps)
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
            values = self.values(metric)
            if not values or max(values) > bound:
                return False
        return not self.error


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
    }
    for metric in metrics:
        values = [value for one in done for value in one.values(metric)]
        found |= _of_values(metric, values, percentiles)
    return found


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
        ("Total token throughput (tok/s):", found["total_token_throughput"]),
    ]
    shown += [_row(name, value) for name, value in rows]
    for metric in metrics:
        if found[f"mean_{metric}_ms"] is None:
            continue
        shown.append(METRICS[metric].center(50, "-"))
        short = metric.upper()
        shown.append(_row(f"Mean {short} (ms):", found[f"mean_{metric}_ms"]))
        shown.append(_row(f"Median {short} (ms):", found[f"median_{metric}_ms"]))
        shown += [_row(f"P{one:g} {short} (ms):", found[f"p{one:g}_{metric}_ms"]) for one in percentiles]
    return [*shown, "=" * 50]


def _row(name: str, value: float) -> str:
    return f"{name:<40} {value:<10}" if isinstance(value, int) else f"{name:<40} {value:<10.2f}"
