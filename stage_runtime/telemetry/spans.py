"""A span of a trace, as plain data, and its form on the wire (OTLP). Pure.

`encode` needs the package opentelemetry-proto (the extra ``otel``); nothing else here does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec

Value = str | bool | int | float

MAX_DIGITS_BITS: Final = 2_000  # of an integer that is written as text; Python makes none of more than 4,300 digits
_INTEGERS: Final = range(-1 << 63, 1 << 63)  # of the protocol; larger ones become text


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


class EncodedSpans(NamedTuple):
    """``request``: an ``ExportTraceServiceRequest``. ``problems``: by index the entries that are not in it, and why."""

    request: bytes
    problems: dict[int, Exception]


def encode(resource: Mapping[str, Value], entries: Sequence[Sequence[Span]]) -> EncodedSpans:
    """An entry is whole in the request, or not in it. resource: what sends them (``service.name`` and the like)."""
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

    request = trace_service_pb2.ExportTraceServiceRequest()
    group = request.resource_spans.add()
    _put(group.resource.attributes, resource)
    scope = group.scope_spans.add()
    scope.scope.name = "omnipipeline"
    problems: dict[int, Exception] = {}
    for index, entry in enumerate(entries):
        before = len(scope.spans)
        try:
            for span in entry:
                _add(scope.spans, span)
        except Exception as error:  # whatever an author's values do to protobuf
            problems[index] = error
            del scope.spans[before:]
    return EncodedSpans(request.SerializeToString(), problems)


def _add(spans: Any, span: Span) -> None:
    from opentelemetry.proto.trace.v1 import trace_pb2

    made = spans.add(
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


def _put(attributes: Any, values: Mapping[str, Value]) -> None:
    for key, value in values.items():
        field = attributes.add(key=_text(key)).value
        match value:
            case bool():
                field.bool_value = value
            case int() if value in _INTEGERS:
                field.int_value = value
            case int() if value.bit_length() > MAX_DIGITS_BITS:
                field.string_value = f"<an integer of {value.bit_length()} bits>"
            case int():
                field.string_value = str(value)
            case float():
                field.double_value = value
            case _:
                field.string_value = _text(value)


def _text(given: str) -> str:
    """Half a surrogate pair, which a client may have sent, is not text in protobuf."""
    return given.encode("utf-8", "replace").decode()
