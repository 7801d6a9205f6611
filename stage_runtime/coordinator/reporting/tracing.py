"""Requests as OpenTelemetry traces: a span for the request, one for each stage's stay and one for each hop.

The coordinator sends them for all processes: it knows every stage's and hop's start and end (`waterfall`), so stages
send nothing and wait for nobody. Sampling is decided when a request is admitted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from stage_runtime.coordinator.events import RequestRecord
from stage_runtime.telemetry import traceparents
from stage_runtime.telemetry.exporting import Exporter
from stage_runtime.telemetry.spans import Span, Value
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
    admitted_ns = int(record.admitted_at * 1e6) * 1000
    error = record.error or {}

    def span(
        name: str, start_ms: float, end_ms: float, attributes: Mapping[str, Value], why: str | None, span_id: str
    ) -> Span:
        return Span(
            trace_id=context.trace_id,
            span_id=span_id,
            parent_id=context.span_id,
            name=name,
            start_ns=admitted_ns + int(start_ms * 1e6),
            end_ns=admitted_ns + int(end_ms * 1e6),
            attributes=attributes,
            error=why,
            state=context.state,
        )

    request = Span(
        trace_id=context.trace_id,
        span_id=context.span_id,
        parent_id=context.parent_id,
        name=f"request {record.kind}",
        kind="server",
        start_ns=admitted_ns,
        end_ns=admitted_ns + int((record.total_ms or record.age_ms) * 1e6),
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
    stages = [
        span(
            name,
            stage.start_ms,
            stage.end_ms,
            {
                "omni.stage": name,
                "omni.instance": record.bindings.get(name, ""),
                "omni.queue_ms": stage.queue_ms,
                "omni.run_ms": stage.run_ms,
            },
            str(error["message"]) if error.get("stage") == name else None,
            traceparents.stage_span_id(context.span_id, name),
        )
        for name, stage in record.stages.items()
        if stage.start_ms is not None and stage.end_ms is not None
    ]
    hops = [
        span(
            f"{hop.source} to {hop.target}",
            hop.start_ms,
            hop.end_ms,
            {"omni.hop.source": hop.source, "omni.hop.target": hop.target, "omni.hop.kind": hop.kind},
            None,
            traceparents.new_span_id(),
        )
        for hop in record.hops
    ]
    return [request, *stages, *hops]
