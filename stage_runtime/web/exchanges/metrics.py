"""The counts of HTTP, and the text of `/metrics`. Called by the probes and, per request, by `middleware`."""

from __future__ import annotations

from collections.abc import Callable

from omnipipeline_spec.types.metrics import Metric
from stage_runtime.coordinator.events import RequestManagerApi
from stage_runtime.metrics import catalog, exposition, planes
from stage_runtime.metrics.samples import Counter, Histogram, Samples, merged
from stage_runtime.web.exchanges.answer_times import AnswerTimes
from stage_runtime.web.exchanges.exchange import Exchange
from stage_runtime.web.realtime.counting import SessionCounts
from stage_runtime.wire.values import Usage


class CoordinatorMetrics:
    """All metrics of the coordinator's process."""

    def __init__(self, manager: RequestManagerApi, *, of_members: bool = False) -> None:
        """of_members: serve the planes' numbers of all processes, too: where no pod serves them (`omni up`)."""
        self._manager = manager
        self._of_members = of_members
        self._answers = Counter(catalog.HTTP_REQUESTS)
        self._sent = Counter(catalog.HTTP_SENT_BYTES)
        self._first_byte = Histogram(catalog.HTTP_FIRST_BYTE)
        self._seconds = Histogram(catalog.HTTP_REQUEST_TIME)
        self._first_token = Histogram(catalog.TIME_TO_FIRST_TOKEN)
        self._first_audio = Histogram(catalog.TIME_TO_FIRST_AUDIO)
        self._token_gap = Histogram(catalog.INTER_TOKEN_LATENCY)
        self._tokens = Counter(catalog.TOKENS)
        self._factor = Histogram(catalog.REAL_TIME_FACTOR)
        self._audio = Counter(catalog.AUDIO_SECONDS)
        self._underruns = Counter(catalog.AUDIO_UNDERRUNS)
        self.sessions = SessionCounts()  #: Counts of live speech, on all ports that show these metrics.
        self._read: dict[Metric, Callable[[], float | None]] = {}

    def observe(self, exchange: Exchange, ended_at: float) -> None:
        """Count one finished exchange."""
        route = f"{exchange.method} {exchange.route}" if exchange.route != "unknown" else "unknown"
        self._answers.add(route, str(exchange.status), exchange.outcome)
        self._seconds.observe(ended_at - exchange.begun_at, route)
        self._sent.add(route, amount=exchange.sent_bytes)
        if exchange.first_byte_at is not None:
            self._first_byte.observe(exchange.first_byte_at - exchange.begun_at, route)

        if exchange.answer_times is not None:
            self._observe_answer(exchange.answer_times, route)

    def _observe_answer(self, times: AnswerTimes, route: str) -> None:
        if times.streamed:
            if times.first_token_s is not None:
                self._first_token.observe(times.first_token_s, route)
            for gap_s in times.token_gaps_s:
                self._token_gap.observe(gap_s, route)
            if times.first_audio_s is not None:
                self._first_audio.observe(times.first_audio_s, route)
                self._underruns.add(route, amount=times.underruns)
        if (tokens := times.tokens.total) != Usage():
            self._tokens.add(route, "prompt", amount=tokens.prompt_tokens)
            self._tokens.add(route, "completion", amount=tokens.completion_tokens)
        if times.real_time_factor is not None:
            self._factor.observe(times.real_time_factor, route)
            self._audio.add(route, amount=times.audio_s)

    def read(self, metric: Metric, value: Callable[[], float | None]) -> None:
        """Serve a metric without labels whose value is read at each scrape. None: it has no value now."""
        self._read[metric] = value

    def render(self) -> bytes:
        return exposition.render(self._samples()).encode()

    def _samples(self) -> Samples:
        counted = (
            self._answers,
            self._first_byte,
            self._seconds,
            self._sent,
            self._first_token,
            self._first_audio,
            self._token_gap,
            self._tokens,
            self._factor,
            self._audio,
            self._underruns,
        )
        read: Samples = {metric: {(): found} for metric, value in self._read.items() if (found := value()) is not None}
        members = planes.samples(self._manager.member_gauges() if self._of_members else {})
        return merged(
            [self._manager.metrics(), *(each.samples() for each in counted), self.sessions.samples(), read, members]
        )
