"""Spans of authors: whatever they hold they are sent, in the trace of their own request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.profiler.recording import summaries
from stage_runtime.telemetry import spans, traceparents
from stage_runtime.telemetry.authors import AuthorSpans
from stage_runtime.telemetry.exporting import Exporter, Make
from stage_runtime.telemetry.settings import TelemetrySettings
from stage_runtime.telemetry.spans import Span
from tests.profiler import odd_values
from tests.telemetry import collector

PATIENCE_S = 100.0  # how long a test waits before it fails, on a machine that others use
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
OTHER = "1" * 32

pytest.importorskip("opentelemetry.proto.trace.v1.trace_pb2")


class Kept(Exporter):
    """Keeps what it shall send."""

    def __init__(self) -> None:
        self.kept: list[Span] = []

    def add(self, make: Make) -> None:
        self.kept += make()


def made(sent: AuthorSpans, request_id: str, metadata: dict[str, Any]) -> bool:
    end = sent.begin("work", request_id, "a", metadata)
    if end is not None:
        end(None)
    return end is not None


def test_spans_of_an_unsampled_request_join_no_older_trace_of_the_same_id() -> None:
    kept = Kept()
    sent = AuthorSpans(kept)
    sent.working("r", "a", f"00-{TRACE}-{PARENT}-01")
    assert made(sent, "r", {})
    for unsampled in (f"00-{OTHER}-{PARENT}-00", None):
        sent.working("r", "a", unsampled)
        assert not made(sent, "r", {})
    sent.working("r", "a", f"00-{OTHER}-{PARENT}-01")
    assert made(sent, "r", {})
    assert [each.trace_id for each in kept.kept] == [TRACE, OTHER]
    assert kept.kept[1].parent_id == traceparents.stage_span_id(PARENT, "a")


def test_integers_that_the_protocol_does_not_take_are_text() -> None:
    span = Span(
        trace_id=TRACE,
        span_id=PARENT,
        parent_id=None,
        name="x",
        start_ns=1,
        end_ns=2,
        attributes={"most": 2**63 - 1, "least": -(2**63), "more": 2**63, "less": -(2**63) - 1, "vast": 10**5000},
    )
    [found] = _decoded(spans.encode({"process.large": 1 << 70}, [[span]]))
    assert collector.attributes(found.attributes) == {
        "most": 2**63 - 1,
        "least": -(2**63),
        "more": str(2**63),
        "less": str(-(2**63) - 1),
        "vast": "<an integer of 16610 bits>",
    }


@given(st.lists(st.dictionaries(st.text(st.characters(exclude_categories=[])), odd_values.values), max_size=3))
def test_whatever_metadata_hold_their_span_is_sent(metadata: list[dict[str, Any]]) -> None:
    kept = Kept()
    sent = AuthorSpans(kept)
    sent.working("r", "a", f"00-{TRACE}-{PARENT}-01")
    for each in metadata:
        assert made(sent, "r", dict(summaries.summarised(each)))  # as the recorder gives them
    assert len(_decoded(spans.encode({}, [kept.kept]))) == len(metadata)


def test_one_entry_that_cannot_be_encoded_is_lost_alone() -> None:
    def one(trace_id: str, name: Any = "whole") -> Sequence[Span]:
        return [Span(trace_id=trace_id, span_id=PARENT, parent_id=None, name=name, start_ns=1, end_ns=2)]

    with collector.running() as taking:
        sending = Exporter(TelemetrySettings(endpoint=f"{taking.url}/v1/traces"), {})
        for number in range(9):
            sending.add(lambda number=number: one("no hex") if number == 4 else one(f"{number:032x}"))  # type: ignore[misc]
        sending.add(lambda: one(TRACE, name=7))
        sending.close(within_s=PATIENCE_S)
        assert [span.name for span in taking.spans] == ["whole"] * 8
    assert (sending.sent, sending.dropped) == (8, 2)


def _decoded(encoded: spans.EncodedSpans) -> list[Any]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    request = ExportTraceServiceRequest.FromString(encoded.request)
    return [span for group in request.resource_spans for scope in group.scope_spans for span in scope.spans]
