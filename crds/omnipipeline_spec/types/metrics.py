"""The description of a Prometheus metric, from which a program's `/metrics`, the docs and the chart's tests are made.

Here: the form of a description and what follows from a list of them. Not here: any metric (each program has one list),
counting (prometheus_client). Called by the operator, the runtime and tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

import msgspec


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One metric family; a counter's name ends in ``_total``."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  #: Bounds of a histogram's buckets.


#: Suffix of each series of a family -> the label that it has beside the family's own.
_SERIES: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "counter": {"": ()},
    "gauge": {"": ()},
    "histogram": {"_bucket": ("le",), "_sum": (), "_count": ()},
}


def series(metrics: Iterable[Metric]) -> dict[str, frozenset[str]]:
    """Name of every series -> its labels, as Prometheus has them."""
    return {
        each.name + suffix: frozenset((*each.labels, *more))
        for each in metrics
        for suffix, more in _SERIES[each.kind].items()
    }


def table(metrics: Sequence[Metric]) -> list[str]:
    """The lines of a Markdown table: name with labels, kind, help."""
    rows = [f"| `{each.name}{_selector(each)}` | {each.kind} | {each.help} |" for each in metrics]
    return ["| metric | kind | value |", "|---|---|---|", *rows]


def _selector(metric: Metric) -> str:
    return f"{{{','.join(metric.labels)}}}" if metric.labels else ""
