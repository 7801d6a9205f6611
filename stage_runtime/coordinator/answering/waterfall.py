"""When each stage and each hop of one request began and ended, from what stages and the coordinator measured.

Pure. Always on, so the hot path only keeps stamps: this is computed when the request's record is read. Times
of a process are on its own clock; the coordinator adds the distance that it has measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from omnipipeline_spec.types.pods import COORDINATOR
from stage_runtime.coordinator.events import HopTiming, StageTiming
from stage_runtime.rules.graph import kvpairs
from stage_runtime.rules.graph.edges import EdgeKey
from stage_runtime.wire.parts import Timing


class Observed(msgspec.Struct, kw_only=True):
    """The coordinator's own observations of a request, in microseconds since the epoch."""

    admitted_us: int
    submitted_us: int = 0  #: The current attempt was sent to its entry stage.
    entry: str = ""
    edges: Sequence[EdgeKey] = ()  #: Edges of the attempt's revision, without kv edges.
    received_us: dict[tuple[str, bool], int] = {}  #: (terminal, by stream) -> its first chunk, or its result
    clocks_us: Mapping[str, int] = {}  #: instance -> to be added to its times

    def begin(self, entry: str, edges: tuple[EdgeKey, ...], now_us: int) -> None:
        """An attempt is sent."""
        self.entry, self.edges, self.submitted_us = entry, kvpairs.without(edges), now_us
        self.received_us = {}

    def received(self, stage: str, now_us: int, *, stream: bool) -> None:
        """A terminal's chunk or result can be given to the client. The first chunk of a stream counts."""
        if (stage, stream) not in self.received_us:
            self.received_us[stage, stream] = now_us


class _StageSpan(msgspec.Struct, frozen=True):
    """One stage's time on the coordinator's clock, in microseconds."""

    start_us: int
    end_us: int
    timing: Timing


def draw(
    observed: Observed, timings: Mapping[str, Timing], bindings: Mapping[str, str]
) -> tuple[dict[str, StageTiming], tuple[HopTiming, ...]]:
    """Stages by name, hops in order of their start. A stage that has not reported has neither."""
    spans = {
        name: _span(timing, observed.clocks_us.get(bindings.get(name, ""), 0))
        for name, timing in timings.items()
        if timing.ended_us
    }
    since = observed.admitted_us
    stages = {
        name: StageTiming(
            queue_ms=timing.queue_us / 1000,
            run_ms=timing.run_us / 1000,
            start_ms=_ms(spans[name].start_us - since) if name in spans else None,
            end_ms=_ms(spans[name].end_us - since) if name in spans else None,
        )
        for name, timing in timings.items()
    }
    hops = [
        HopTiming(
            source=source,
            target=target,
            kind="stream" if stream else "payload",
            start_ms=_ms(start_us - since),
            end_ms=_ms(max(end_us, start_us) - since),  # clocks are known to some microseconds only
        )
        for source, target, stream, start_us, end_us in _hops(observed, spans)
    ]
    return stages, tuple(sorted(hops, key=lambda hop: (hop.start_ms, hop.end_ms)))


def _hops(observed: Observed, spans: Mapping[str, _StageSpan]) -> Iterator[tuple[str, str, bool, int, int]]:
    """(source, target, by stream, start, end) in microseconds since the epoch."""
    entry = spans.get(observed.entry)
    if entry is not None:
        yield COORDINATOR, observed.entry, False, observed.submitted_us, entry.start_us
    for source, target, kind in observed.edges:
        stream = kind == "stream"
        sent = _sent_us(spans.get(source), target, stream=stream)
        received = _received_us(spans.get(target), source, stream, alone=_inputs(observed, target) == 1)
        if sent is not None and received is not None:
            yield source, target, stream, sent, received
    for (terminal, stream), received_us in observed.received_us.items():
        sent = _sent_us(spans.get(terminal), COORDINATOR, stream=stream)
        if sent is not None:
            yield terminal, COORDINATOR, stream, sent, received_us


def _span(timing: Timing, clock_us: int) -> _StageSpan:
    end_us = timing.ended_us + clock_us
    return _StageSpan(end_us - timing.run_us - timing.queue_us, end_us, timing)


def _sent_us(span: _StageSpan | None, target: str, *, stream: bool) -> int | None:
    if span is None or not stream:
        return None if span is None else span.end_us
    return next((span.end_us - before for name, before in span.timing.streamed if name == target), None)


def _received_us(span: _StageSpan | None, source: str, stream: bool, *, alone: bool) -> int | None:
    """alone: it is the only input of the stage."""
    if span is None or alone:
        return None if span is None else span.start_us
    return next(
        (span.start_us + after for name, by, after in span.timing.received if (name, by) == (source, stream)), None
    )


def _inputs(observed: Observed, stage: str) -> int:
    return sum(target == stage for _, target, _ in observed.edges)


def _ms(microseconds: int) -> float:
    return microseconds / 1000
