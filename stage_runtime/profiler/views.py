"""Events → three views: each request's timeline, intervals per stage, hops per edge.

Pure but for reading the files (`event_files`). Keys: docs/profiling.md, "The report". An event that opens
two intervals closes each on its own; what is left open at the end is counted as unpaired, never guessed.
"""

from __future__ import annotations

import os
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from omnipipeline_spec.types.pods import COORDINATOR
from stage_runtime.profiler import event_files, events
from stage_runtime.profiler.event_files import Events, Moment

_CLOSERS: Final[dict[str, list[tuple[str, str]]]] = {}
_OPENERS: Final[dict[str, list[tuple[str, str]]]] = {}
for _pair in events.INTERVALS:
    _OPENERS.setdefault(_pair[0], []).append(_pair)
    _CLOSERS.setdefault(_pair[1], []).append(_pair)
WHOLE: Final = (events.REQUEST_ADMISSION, events.TERMINAL_RESPONSE)
_RECEIVES: Final = {received: (sent, kind) for sent, (received, kind) in events.HOPS.items()}


class Interval(NamedTuple):
    """The time between an opening and a closing event of one request in one stage."""

    stage: str
    opened: str
    closed: str
    start_ns: int
    end_ns: int
    process: int


class Hop(NamedTuple):
    """One message from stage to stage. ``end_ns`` < ``start_ns`` means that the clocks are further apart than
    measured."""

    source: str
    destination: str
    kind: str  #: ``payload`` or ``stream``
    chunk_id: int | str | None
    start_ns: int
    end_ns: int
    processes: tuple[int, int]  #: of the source, of the destination


class PairedEvents(NamedTuple):
    """The pairs in the events of one request. ``unpaired``: hop events without their other half, by name."""

    intervals: list[Interval]
    hops: list[Hop]
    unpaired: Counter[str]


def build_report(folder: str | os.PathLike[str], *, timeline: bool = True) -> dict[str, Any]:
    """The three views of a run's event files, as plain values for JSON.

    folder:   of the files, searched with its subfolders; or one file.
    timeline: False leaves each request's events out, which is most of a large report.
    Raises: ConfigurationError: no event file is found.
    """
    return report_of(event_files.read(Path(folder)), timeline=timeline)


def report_of(found: Events, *, timeline: bool = True) -> dict[str, Any]:
    """The same as `build_report`, for events that were read already."""
    stages: dict[tuple[str, str, str], array[int]] = defaultdict(lambda: array("q"))
    hops: dict[tuple[str, str, str], array[int]] = defaultdict(lambda: array("q"))
    unpaired: Counter[str] = Counter()
    requests = []
    for request_id, moments in found.requests.items():
        pairs = paired(moments)
        unpaired.update(pairs.unpaired)
        for each in pairs.intervals:
            stages[each.stage, each.opened, each.closed].append(each.end_ns - each.start_ns)
        for hop in pairs.hops:
            hops[hop.source, hop.destination, hop.kind].append(hop.end_ns - hop.start_ns)
        requests.append(_request(request_id, moments, whole=is_whole(pairs), timeline=timeline))
    return {
        "run_ids": sorted(found.run_ids),
        "request_count": len(found.requests),
        "partial_count": sum(not each["whole"] for each in requests),
        "event_count": found.count,
        "dropped_count": sum(process.dropped for process in found.processes),
        "unreadable_lines": sum(process.unreadable for process in found.processes),
        "processes": [_process(process) for process in found.processes],
        "timeline": requests,
        "stage_breakdown": [
            {"stage": stage, "open_event": opened, "close_event": closed, **_figures(taken)}
            for (stage, opened, closed), taken in sorted(stages.items())
        ],
        "hop_breakdown": [
            {"source": source, "destination": destination, "kind": kind, **_figures(taken)}
            for (source, destination, kind), taken in sorted(hops.items())
        ],
        "unpaired_hops": dict(sorted(unpaired.items())),
    }


def paired(moments: Sequence[Moment]) -> PairedEvents:
    """Intervals and hops of one request, whose events are in order of time."""
    return PairedEvents(list(_intervals(moments)), *_hops(moments))


def anchor_ns(moments: Sequence[Moment]) -> int:
    """When the request was admitted; of one whose admission was not recorded, its first event."""
    return next((each.time_ns for each in moments if each.name == events.REQUEST_ADMISSION), moments[0].time_ns)


def end_ns(moments: Sequence[Moment]) -> int:
    """When the request was over; of one that was not, its last event. Releases of its transfers may come later."""
    over = (each.time_ns for each in moments if each.name == events.TERMINAL_RESPONSE)
    return max(over, default=moments[-1].time_ns)


def is_whole(pairs: PairedEvents) -> bool:
    """Whether its admission and its end were recorded: only then its time is known."""
    return any((each.opened, each.closed) == WHOLE for each in pairs.intervals)


def _intervals(moments: Sequence[Moment]) -> Iterator[Interval]:
    """Each pair of events has a stack of its own, per stage and per key that distinguishes concurrent ones."""
    pending: dict[tuple[Any, ...], list[Moment]] = {}
    attempts: dict[tuple[str, int], str] = {}  # (stage, process) -> the latest attempt that an event there carries
    for moment in moments:
        opens, closes = _pairs_of(moment.name)
        if not (opens or closes):
            continue
        facts = moment.metadata if len(moment.raw) > 2 else {}
        if "attempt" in facts:
            attempts[moment.stage, moment.process] = str(facts["attempt"])
        attempt = attempts.get((moment.stage, moment.process))
        for pair in closes:
            stack = pending.get((moment.stage, pair, _distinction(pair, facts, attempt)))
            if stack := stack or pending.get((moment.stage, pair, None)):
                opened = stack.pop()
                yield Interval(moment.stage, *pair, opened.time_ns, moment.time_ns, moment.process)
        for pair in opens:
            pending.setdefault((moment.stage, pair, _distinction(pair, facts, attempt)), []).append(moment)


def _pairs_of(name: str) -> tuple[Sequence[tuple[str, str]], Sequence[tuple[str, str]]]:
    """The intervals that an event opens, and those it closes; ``x_start`` and ``x_end`` of authors are one, too."""
    opens, closes = _OPENERS.get(name, ()), _CLOSERS.get(name, ())
    if name.endswith("_start") and not any(pair[1] == f"{name[:-6]}_end" for pair in opens):
        opens = (*opens, (name, f"{name[:-6]}_end"))
    elif name.endswith("_end") and not any(pair[0] == f"{name[:-4]}_start" for pair in closes):
        closes = (*closes, (f"{name[:-4]}_start", name))
    return opens, closes


def _distinction(pair: tuple[str, str], facts: Mapping[str, Any], attempt: str | None) -> tuple[str, ...] | str | None:
    """A ``start`` and an ``end`` carry the same facts; other pairs differ by the attempt alone.

    attempt: an author's event carries none and has that of the runtime's events before it; None: none came before it.
    """
    if (pair[0].endswith("_start") and pair[1].endswith("_end")) or pair in events.ALIKE:
        return tuple(str(facts[key]) for key in events.DISTINCT_BY if key in facts)
    return attempt


def _hops(moments: Sequence[Moment]) -> tuple[list[Hop], Counter[str]]:
    """Hops are paired by (source, destination, kind, chunk, attempt). A reception may be seen before its sending:
    clocks differ.
    """
    sent: dict[tuple[Any, ...], list[Moment]] = defaultdict(list)
    received: dict[tuple[Any, ...], list[Moment]] = defaultdict(list)
    for moment in moments:
        if moment.name in events.HOPS:
            facts, kind = moment.metadata, events.HOPS[moment.name][1]
            key = (moment.stage, str(facts.get("to_stage")), kind, _key(facts, "chunk_id"), _key(facts, "attempt"))
            sent[key].append(moment)
        elif moment.name in _RECEIVES:
            facts, kind = moment.metadata, _RECEIVES[moment.name][1]
            source = str(facts.get("from_stage"))
            if kind == "payload" and source in (COORDINATOR, "None"):
                continue  # the request itself, whose sending is its admission
            received[source, moment.stage, kind, _key(facts, "chunk_id"), _key(facts, "attempt")].append(moment)
    hops, unpaired = [], Counter[str]()
    for key, starts in sent.items():
        ends = received.pop(key, [])
        hops += [
            Hop(*key[:4], start.time_ns, end.time_ns, (start.process, end.process))
            for start, end in zip(starts, ends, strict=False)
        ]
        _count(unpaired, f"{key[2]} sent, not received", len(starts) - len(ends))
        _count(unpaired, f"{key[2]} received, not sent", len(ends) - len(starts))
    for key, ends in received.items():
        _count(unpaired, f"{key[2]} received, not sent", len(ends))
    return hops, unpaired


def _key(facts: Mapping[str, Any], name: str) -> int | str | None:
    """The key by which messages are distinguished; comparable for any content of a file."""
    value = facts.get(name)
    return value if value is None or isinstance(value, int | str) else str(value)


def _count(counter: Counter[str], what: str, number: int) -> None:
    if number > 0:
        counter[what] += number


def _request(request_id: str, moments: Sequence[Moment], *, whole: bool, timeline: bool) -> dict[str, Any]:
    start = anchor_ns(moments)
    found: dict[str, Any] = {
        "request_id": request_id,
        "start_ns": start,
        "duration_ms": round((end_ns(moments) - start) / 1e6, 6),
        "whole": whole,
    }
    if timeline:
        found["events"] = [
            {
                "t_rel_ms": round((each.time_ns - start) / 1e6, 6),
                "stage": each.stage,
                "event_name": each.name,
                "metadata": each.metadata,
            }
            for each in moments
        ]
    return found


def _process(process: event_files.Process) -> dict[str, Any]:
    return {
        "file": process.path.name,
        "host": process.host,
        "pid": process.pid,
        "incarnation": process.incarnation,
        "rank": process.rank,
        "clock_offset_ms": round(process.offset_ns / 1e6, 6),
        "clock_uncertainty_ms": round(process.uncertainty_ns / 1e6, 6),
        "dropped": process.dropped,
        "complete": process.stopped,
    }


def _figures(taken_ns: array[int]) -> dict[str, Any]:
    """Milliseconds. Percentiles are of the nearest rank."""
    ordered = sorted(taken_ns)
    total = sum(ordered)
    return {
        "count": len(ordered),
        "total_ms": _ms(total),
        "avg_ms": _ms(total / len(ordered)),
        "p50_ms": _ms(percentile(ordered, 50)),
        "p95_ms": _ms(percentile(ordered, 95)),
        "max_ms": _ms(ordered[-1]),
    }


def percentile(ordered: Sequence[int], percent: int) -> int:
    """Nearest rank, of a sorted sequence that is not empty."""
    return ordered[max(-(-len(ordered) * percent // 100) - 1, 0)]


def _ms(nanoseconds: float) -> float:
    return round(nanoseconds / 1e6, 6)
