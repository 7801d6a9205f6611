"""The exporter and a collector: spans arrive; one that is away or refuses costs nothing but spans."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Sequence

import msgspec
import pytest

from stage_runtime.errors import ConfigurationError
from stage_runtime.telemetry import exporting
from stage_runtime.telemetry.exporting import Exporter
from stage_runtime.telemetry.settings import TelemetrySettings
from stage_runtime.telemetry.spans import Span
from tests.telemetry import collector

STACK_TOO_LARGE = 1 << 47  # bytes: all that a process can address, so that no thread can start
PATIENCE_S = 100.0  # how long a test waits before it fails, on a machine that others use

pytest.importorskip("opentelemetry.proto.trace.v1.trace_pb2")


def spans(number: int) -> Sequence[Span]:
    return [
        Span(
            trace_id=f"{number:032x}",
            span_id=f"{number:016x}",
            parent_id=None,
            name=f"request {number}",
            start_ns=10,
            end_ns=20,
            attributes={"text": "x", "flag": True, "count": 3, "share": 0.5},
            error="it failed" if number == 2 else None,
        )
    ]


class Heard(logging.Handler):
    """Says that something was logged."""

    def __init__(self, logged: threading.Event) -> None:
        super().__init__()
        self._logged = logged

    def emit(self, record: logging.LogRecord) -> None:
        self._logged.set()


def exporter(url: str) -> Exporter:
    settings = TelemetrySettings(endpoint=f"{url}/v1/traces", headers={"tenant": "a"}, resource={"service.name": "own"})
    return Exporter(settings, {"service.name": "p", "service.instance.id": "i"})


def test_without_a_thread_for_it_no_traces_are_sent_and_that_is_a_fault_of_the_configuration() -> None:
    """Processes log it, and serve without."""
    before = threading.stack_size(STACK_TOO_LARGE)
    try:
        with pytest.raises(ConfigurationError, match="can't start new thread"):
            exporter("http://127.0.0.1:9")
    finally:
        threading.stack_size(before)


def test_spans_arrive_as_they_were_made() -> None:
    with collector.running() as taking:
        sending = exporter(taking.url)
        for number in (1, 2):
            sending.add(lambda number=number: spans(number))  # type: ignore[misc]
        sending.close(within_s=PATIENCE_S)
        resources = {tuple(each.items()) for each in taking.resources}  # of one batch or of two
        assert resources == {(("service.name", "own"), ("service.instance.id", "i"))}
        assert (taking.headers[0]["tenant"], taking.headers[0]["content-type"]) == ("a", "application/x-protobuf")
        first, second = taking.spans
    assert (first.trace_id, first.span_id, first.name) == (bytes(15) + b"\1", bytes(7) + b"\1", "request 1")
    assert (first.start_time_unix_nano, first.end_time_unix_nano, first.status.code) == (10, 20, 0)
    assert collector.attributes(first.attributes) == {"text": "x", "flag": True, "count": 3, "share": 0.5}
    assert (second.status.code, second.status.message) == (2, "it failed")
    assert (sending.sent, sending.dropped) == (2, 0)


@pytest.mark.proves("collector-away")
def test_while_the_collector_is_away_spans_wait_up_to_a_bound_and_one_line_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, exporting.__name__)
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    logged = threading.Event()
    handler = Heard(logged)
    exporting.log.addHandler(handler)
    sending = exporter(f"http://127.0.0.1:{port}")
    for _ in range(exporting.MAX_QUEUED + 7):
        sending.add(lambda: spans(1))
    assert sending.dropped == 7
    assert logged.wait(PATIENCE_S)
    exporting.log.removeHandler(handler)
    with collector.running(port) as taking:
        assert taking.came.wait(PATIENCE_S)
        sending.close(within_s=PATIENCE_S)
        assert len(taking.spans) == exporting.MAX_QUEUED
    assert (sending.sent, sending.dropped) == (exporting.MAX_QUEUED, 7)
    away, back = (record.getMessage() for record in caplog.records if record.name == exporting.__name__)
    assert away.startswith(f"no traces reach http://127.0.0.1:{port}/v1/traces: ")
    assert back.endswith("again; 7 were dropped")


@pytest.mark.parametrize("status", [400, 404, 500])
def test_what_a_collector_refuses_for_good_is_dropped_and_counted(status: int) -> None:
    with collector.running() as taking:
        taking.status = status
        sending = exporter(taking.url)
        sending.add(lambda: spans(1))
        sending.close(within_s=PATIENCE_S)
        assert (taking.requests, sending.sent, sending.dropped) == (1, 0, 1)


def test_what_one_request_holds_costs_the_others_of_its_batch_nothing() -> None:
    def broken() -> Sequence[Span]:
        raise KeyError("no such stage")

    def strange() -> Sequence[Span]:
        return [
            msgspec.structs.replace(one, error="half a \ud800", attributes={"\udfff": "\ud83d"}) for one in spans(1)
        ]

    with collector.running() as taking:
        sending = exporter(taking.url)
        for make in (broken, strange, lambda: spans(2)):
            sending.add(make)
        sending.close(within_s=PATIENCE_S)
        first, second = taking.spans
    assert (first.status.message, collector.attributes(first.attributes)) == ("half a ?", {"?": "?"})
    assert second.name == "request 2"
    assert (sending.sent, sending.dropped) == (2, 1)


def test_a_span_that_cannot_be_made_is_dropped_and_others_are_sent(caplog: pytest.LogCaptureFixture) -> None:
    with collector.running() as taking:
        sending = exporter(taking.url)
        sending.add(lambda: [Span(trace_id="no hex", span_id="", parent_id=None, name="", start_ns=0, end_ns=0)])
        sending.close(within_s=PATIENCE_S)
        again = exporter(taking.url)
        again.add(lambda: spans(1))
        again.close(within_s=PATIENCE_S)
        assert (sending.dropped, again.sent, len(taking.spans)) == (1, 1, 1)
