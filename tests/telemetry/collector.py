"""An OpenTelemetry collector as small as it can be: takes OTLP over HTTP in protobuf, and keeps the spans."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Collector:
    """The spans that have come. ``status``: its answer."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.requests = 0
        self.status = 200
        self.url = ""
        self.came = threading.Event()

    def take(self, body: bytes, headers: dict[str, str]) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        request = ExportTraceServiceRequest.FromString(body)
        for group in request.resource_spans:
            self.resources.append(attributes(group.resource.attributes))
            self.spans += [span for scope in group.scope_spans for span in scope.spans]
        self.headers.append(headers)
        self.came.set()


def attributes(found: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in found}


@contextmanager
def running(port: int = 0) -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.requests += 1
            if collector.status == 200 and self.path == "/v1/traces":
                collector.take(body, {name.lower(): value for name, value in self.headers.items()})
            self.send_response(collector.status if self.path == "/v1/traces" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        collector.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
