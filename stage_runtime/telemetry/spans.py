"""A span of a trace, as plain data, and its form on the wire (OTLP). Pure.

`encode` needs the package opentelemetry-proto (the extra ``otel``); nothing else here does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

Value = str | bool | int | float


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Ids are lowercase hex, times nanoseconds since the epoch."""

    trace_id: str
    span_id: str
    parent_id: str | None
    name: str
    kind: Literal["server", "internal"] = "internal"
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Value] = {}
    error: str | None = None  #: Why it failed.
    state: str = ""  #: The trace's ``tracestate``.


def encode(resource: Mapping[str, Value], spans: Sequence[Span]) -> bytes:
    """An ``ExportTraceServiceRequest``. resource: what sends them (``service.name`` and the like)."""
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
    from opentelemetry.proto.trace.v1 import trace_pb2

    request = trace_service_pb2.ExportTraceServiceRequest()
    group = request.resource_spans.add()
    _put(group.resource.attributes, resource)
    scope = group.scope_spans.add()
    scope.scope.name = "omnipipeline"
    for span in spans:
        made = scope.spans.add(
            trace_id=bytes.fromhex(span.trace_id),
            span_id=bytes.fromhex(span.span_id),
            parent_span_id=bytes.fromhex(span.parent_id or ""),
            trace_state=span.state,
            name=_text(span.name),
            kind=trace_pb2.Span.SPAN_KIND_SERVER if span.kind == "server" else trace_pb2.Span.SPAN_KIND_INTERNAL,
            start_time_unix_nano=span.start_ns,
            end_time_unix_nano=max(span.end_ns, span.start_ns),
        )
        _put(made.attributes, span.attributes)
        if span.error is not None:
            made.status.code = trace_pb2.Status.STATUS_CODE_ERROR
            made.status.message = _text(span.error)
    encoded: bytes = request.SerializeToString()
    return encoded


def _put(attributes: Any, values: Mapping[str, Value]) -> None:
    for key, value in values.items():
        field = attributes.add(key=_text(key)).value
        match value:
            case bool():
                field.bool_value = value
            case int():
                field.int_value = value
            case float():
                field.double_value = value
            case _:
                field.string_value = _text(value)


def _text(given: str) -> str:
    """Half a surrogate pair, which a client may have sent, is no text in protobuf."""
    return given.encode("utf-8", "replace").decode()
