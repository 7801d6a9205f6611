"""Requests as OpenTelemetry traces: a span for the request, one for each stage's stay and one for each hop.

The coordinator sends them for all processes: it knows every stage's and hop's start and end (`waterfall`), so stages
send nothing and wait for nobody. Sampling is decided when a request is admitted.
"""

from __future__ import annotations

from collections.abc import Callable

from stage_runtime.coordinator.events import RequestRecord
from stage_runtime.telemetry import traceparents
from stage_runtime.telemetry.exporting import Exporter
from stage_runtime.telemetry.spans import Span
from stage_runtime.telemetry.traceparents import TraceContext


class RequestTracer:
    """Makes and exports the spans of one coordinator's requests."""

    def __init__(self, exporter: Exporter, *, ratio: float) -> None:
        self._exporter = exporter
        self._ratio = ratio

    @property
    def sent(self) -> int:
        """Requests whose spans a collector has taken."""
        return self._exporter.sent

    @property
    def dropped(self) -> int:
        return self._exporter.dropped

    def begin(self, traceparent: str | None, tracestate: str | None) -> TraceContext:
        """A request is admitted. traceparent, tracestate: its client's."""
        return traceparents.begin(traceparent, ratio=self._ratio, state=tracestate)

    def ended(self, context: TraceContext, record: Callable[[], RequestRecord]) -> None:
        """A request is over. ``record`` is called on the exporter's thread."""
        if context.sampled:
            self._exporter.add(lambda: spans_of(context, record()))


def spans_of(context: TraceContext, record: RequestRecord) -> list[Span]:
    """The request's own span first."""
    return [_of_request(context, record), *_of_stages(context, record), *_of_hops(context, record)]


def _of_request(context: TraceContext, record: RequestRecord) -> Span:
    error = record.error
    return Span(
        trace_id=context.trace_id,
        span_id=context.span_id,
        parent_id=context.parent_id,
        name=f"request {record.kind}",
        kind="server",
        start_ns=_time_ns(record, 0.0),
        end_ns=_time_ns(record, record.total_ms or record.age_ms),
        attributes={
            "omni.request.id": record.id,
            "omni.request.kind": record.kind,
            "omni.request.state": record.state,
            "omni.request.attempts": record.attempt,
            **({"omni.first_output_ms": record.first_event_ms} if record.first_event_ms is not None else {}),
        },
        error=f"{error['code']}: {error['message']}" if error else None,
        state=context.state,
    )


def _of_stages(context: TraceContext, record: RequestRecord) -> list[Span]:
    """A span for each stage whose start and end are known."""
    error = record.error or {}
    return [
        Span(
            trace_id=context.trace_id,
            span_id=traceparents.stage_span_id(context.span_id, name),
            parent_id=context.span_id,
            name=name,
            start_ns=_time_ns(record, stage.start_ms),
            end_ns=_time_ns(record, stage.end_ms),
            attributes={
                "omni.stage": name,
                "omni.instance": record.bindings.get(name, ""),
                "omni.queue_ms": stage.queue_ms,
                "omni.run_ms": stage.run_ms,
            },
            error=str(error["message"]) if error.get("stage") == name else None,
            state=context.state,
        )
        for name, stage in record.stages.items()
        if stage.start_ms is not None and stage.end_ms is not None
    ]


def _of_hops(context: TraceContext, record: RequestRecord) -> list[Span]:
    return [
        Span(
            trace_id=context.trace_id,
            span_id=traceparents.new_span_id(),
            parent_id=context.span_id,
            name=f"{hop.source} to {hop.target}",
            start_ns=_time_ns(record, hop.start_ms),
            end_ns=_time_ns(record, hop.end_ms),
            attributes={"omni.hop.source": hop.source, "omni.hop.target": hop.target, "omni.hop.kind": hop.kind},
            state=context.state,
        )
        for hop in record.hops
    ]


def _time_ns(record: RequestRecord, after_ms: float) -> int:
    """The time that is so long after the request was admitted."""
    return int(record.admitted_at * 1e6) * 1000 + int(after_ms * 1e6)
