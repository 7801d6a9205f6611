"""Spans of authors (`profiler.recording.recorder.span`) as OpenTelemetry's, sent by the process that makes them.

The coordinator sends the spans of requests, stages and hops. It knows no author's: these are sent from here, as
children of their stage's span, whose id both derive from the request's. `profiler.recording.recorder.Traces`.
"""

from __future__ import annotations

import contextvars
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final

from stage_runtime.telemetry import traceparents
from stage_runtime.telemetry.exporting import Exporter
from stage_runtime.telemetry.spans import Span, Value

KEPT: Final = 4096  # requests at a stage, the latest ones: a span of an older one is not sent
MAX_TEXT: Final = 2_000  # characters of a list or mapping

_inside: contextvars.ContextVar[tuple[str, str] | None] = contextvars.ContextVar("omni_author_span", default=None)


class AuthorSpans:
    """The spans of the authors' code in one process. Any thread."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter
        self._works: OrderedDict[tuple[str, str], tuple[str, str]] = OrderedDict()

    def working(self, request_id: str, stage: str, traceparent: str | None) -> None:
        """The stage's function begins with a request."""
        found = traceparents.sampled_parent(traceparent)
        self._works.pop((stage, request_id), None)  # an earlier request's of the same id
        if found is not None:
            trace_id, request_span = found
            self._works[stage, request_id] = trace_id, traceparents.stage_span_id(request_span, stage)
            if len(self._works) > KEPT:
                self._works.popitem(last=False)

    def begin(
        self, name: str, request_id: str, stage: str, metadata: Mapping[str, Any]
    ) -> Callable[[BaseException | None], None] | None:
        """Returns: what ends the span. None: its request is not sampled, or not known here."""
        known = self._works.get((stage, request_id))
        if known is None:
            return None
        trace_id, stage_span = known
        around = _inside.get()
        parent = around[1] if around is not None and around[0] == trace_id else stage_span
        span_id, start_ns = traceparents.new_span_id(), time.time_ns()
        _inside.set((trace_id, span_id))

        def end(error: BaseException | None) -> None:
            _inside.set(around)
            made = Span(
                trace_id=trace_id,
                span_id=span_id,
                parent_id=parent,
                name=name,
                start_ns=start_ns,
                end_ns=time.time_ns(),
                attributes={"omni.request.id": request_id, "omni.stage": stage, **_attributes(metadata)},
                error=None if error is None else type(error).__name__,
            )
            self._exporter.add(lambda: [made])

        return end


def _attributes(metadata: Mapping[str, Any]) -> dict[str, Value]:
    """Metadata as a span records them: small values, and texts in place of all others."""
    return {
        str(key): value if isinstance(value, str | bool | int | float) else str(value)[:MAX_TEXT]
        for key, value in metadata.items()
    }
