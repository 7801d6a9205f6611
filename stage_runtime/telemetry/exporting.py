"""Sends spans to an OpenTelemetry collector: OTLP over HTTP, in protobuf, from a thread of its own.

Serving never waits for it: what finds the queue full is dropped and counted. While the collector is away, spans wait in
the queue and one line is logged; another one when it is back.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from stage_runtime.errors import ConfigurationError
from stage_runtime.telemetry import spans
from stage_runtime.telemetry.settings import TelemetrySettings
from stage_runtime.telemetry.spans import Span, Value

log = logging.getLogger(__name__)

MAX_QUEUED: Final = 2048  # requests
BATCH: Final = 256  # requests in one message
FLUSH_EVERY_S: Final = 1.0
RETRY_MOST_S: Final = 30.0
REQUEST_S: Final = 10.0
LAST_S: Final = 3.0  # for what is queued when the process ends
RETRYABLE: Final = frozenset((429, 502, 503, 504))  # Source: OTLP specification, "Failures"

Make = Callable[[], Sequence[Span]]


class Exporter:
    """The span exporter of one process. ``add`` from any thread."""

    def __init__(self, settings: TelemetrySettings, resource: Mapping[str, Value]) -> None:
        """Raises: ConfigurationError: the machine has no thread left for it."""
        self.sent = 0  #: Requests whose spans a collector has taken.
        self.dropped = 0
        self._settings = settings
        self._resource = {**resource, **settings.resource}
        self._queue: deque[Make] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._failing = False
        self._losing = False  #: Spans that cannot be made or encoded were logged; later ones are counted only.
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise ConfigurationError(str(error)) from error

    def add(self, make: Make) -> None:
        """The spans of one request, made when they are sent."""
        if len(self._queue) >= MAX_QUEUED:
            self.dropped += 1
            return
        self._queue.append(make)

    def close(self, *, within_s: float = LAST_S) -> None:
        """Send what is queued, if that works at once and within this time."""
        self._closing = True
        self._wake.set()
        self._thread.join(within_s)

    def _run(self) -> None:
        wait_s = FLUSH_EVERY_S
        while True:
            self._wake.wait(wait_s)
            while self._queue and self._send_batch():
                pass
            wait_s = min(2 * wait_s, RETRY_MOST_S) if self._queue else FLUSH_EVERY_S
            if self._closing:
                return

    def _send_batch(self) -> bool:
        """False: the collector is away, and the batch stays queued."""
        batch = [self._queue[index] for index in range(min(BATCH, len(self._queue)))]
        made: list[Sequence[Span]] = []
        lost: list[Exception] = []
        for make in batch:
            try:
                made.append(make())
            except Exception as error:  # a bug of ours costs this request's spans alone
                lost.append(error)
        try:
            encoded = spans.encode(self._resource, made)
            lost += encoded.problems.values()
            if len(lost) < len(batch):
                self._post(encoded.request)
        except _AwayError as error:
            if not self._failing:
                self._failing = True
                log.warning("no traces reach %s: %s (they wait; logged once)", self._settings.endpoint, error)
            return False
        except Exception as error:  # the outermost loop: neither a collector nor a bug of ours may end serving
            self.dropped += len(batch)
            if not self._failing:
                self._failing = True
                log.warning("traces are dropped: %s: %s (logged once)", self._settings.endpoint, error)
        else:
            self.sent += len(batch) - len(lost)
            self.dropped += len(lost)
            if lost and not self._losing:
                self._losing = True
                log.warning("the spans of a request are dropped: %r (logged once)", lost[0])
            if self._failing:
                self._failing = False
                log.info("traces reach %s again; %d were dropped", self._settings.endpoint, self.dropped)
        for _ in batch:
            self._queue.popleft()
        return True

    def _post(self, body: bytes) -> None:
        """Raises: _AwayError: worth another try. OSError: the collector refuses it for good."""
        import urllib.error  # a process without a collector imports no HTTP client
        import urllib.request

        headers = {"content-type": "application/x-protobuf", **self._settings.headers}
        request = urllib.request.Request(self._settings.endpoint, data=body, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_S) as answer:
                answer.read()
        except urllib.error.HTTPError as error:
            with error:
                if error.code in RETRYABLE:
                    raise _AwayError(f"status {error.code}") from None
                raise
        except OSError as error:
            raise _AwayError(str(getattr(error, "reason", error))) from None


class _AwayError(Exception):
    """The collector cannot be reached now."""
