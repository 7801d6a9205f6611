"""Prometheus' text of samples, version 0.0.4. Called by `web` and by the probes of a stage's pod.

prometheus_client is not used: PID 1 of a stage's pod stays small, and most values are read at each scrape.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from omnipipeline_spec.types.metrics import Metric
from stage_runtime.metrics.samples import Buckets, Samples, Values

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def render(samples: Samples) -> str:
    """One block per metric that has a value."""
    return "".join(line + "\n" for metric, values in samples.items() if values for line in _block(metric, values))


def _block(metric: Metric, values: Values) -> Iterator[str]:
    yield f"# HELP {metric.name} {_escaped(metric.help)}"
    yield f"# TYPE {metric.name} {metric.kind}"
    for labels, value in values.items():
        pairs = list(zip(metric.labels, labels, strict=True))
        if not isinstance(value, Buckets):
            yield f"{metric.name}{_selector(pairs)} {_number(value)}"
            continue
        for bound, count in zip((*metric.buckets, math.inf), value.counts, strict=True):
            yield f"{metric.name}_bucket{_selector([*pairs, ('le', _number(bound))])} {count}"
        yield f"{metric.name}_sum{_selector(pairs)} {_number(value.sum)}"
        yield f"{metric.name}_count{_selector(pairs)} {value.counts[-1]}"


def _selector(pairs: list[tuple[str, str]]) -> str:
    inside = ",".join(f'{name}="{_escaped(value, quotes=True)}"' for name, value in pairs)
    return f"{{{inside}}}" if inside else ""


def _escaped(text: str, *, quotes: bool = False) -> str:
    escaped = text.replace("\\", r"\\").replace("\n", r"\n")
    return escaped.replace('"', r"\"") if quotes else escaped


def _number(value: float) -> str:
    """The number as Prometheus writes it: buckets whose bounds are ``1`` and ``1.0`` would be two."""
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(float(value))
