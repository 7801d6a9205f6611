"""The run as one page for the browser, with everything in it: it opens from disk, without a network.

Here: what the page shows, as JSON. How it is drawn: ``page.html`` and ``drawing.js`` beside this file.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from importlib import resources
from itertools import islice
from typing import Any, Final

import msgspec

from stage_runtime.profiler import event_files, lines, views
from stage_runtime.profiler.event_files import Events, Moment
from stage_runtime.profiler.views import Hop, Interval

MAX_REQUESTS: Final = 1_000  # drawn; of more, the slowest. The tables are always of all
MAX_ROWS: Final = 400  # of one request: intervals and hops, from its first on. The tables are of all
MAX_STAGES: Final = 200  # with a colour of their own; an event may name any stage
BINS: Final = 200  # of the run's time, for the utilisation of stages
_MARK: Final = "/*DATA*/null"
_DRAWING: Final = "/*DRAWING*/"


def page(found: Events) -> str:
    """The whole page."""
    here = resources.files(__package__)
    template = here.joinpath("page.html").read_text().replace(_DRAWING, here.joinpath("drawing.js").read_text())
    data = msgspec.json.encode(_data(found)).decode()
    # "</script" would end a script element, and "<!--" would change how it is read.
    return template.replace(_MARK, data.replace("<", "\\u003c"))


def _data(found: Events) -> dict[str, Any]:
    report = views.report_of(found, timeline=False)
    drawn = event_files.slowest(found, MAX_REQUESTS)
    requests = [_request(request_id, found.requests[request_id]) for request_id in drawn]
    requests.sort(key=lambda each: each["start"])
    return {
        **{key: report[key] for key in report if key not in ("timeline", "processes")},
        "processes": report["processes"],
        "requests": requests,
        "stages": _stages(found.requests[each["id"]] for each in requests),
        "utilisation": _utilisation(found),
        "durations": sorted(each["duration_ms"] for each in report["timeline"] if each["whole"]),
    }


def _stages(requests: Iterable[Sequence[Moment]]) -> list[str]:
    """The stages in the order of their first events, which chooses their colours."""
    named = dict.fromkeys(each.stage for moments in requests for each in moments if each.stage)
    return list(islice(named, MAX_STAGES))


def _request(request_id: str, moments: Sequence[Moment]) -> dict[str, Any]:
    """Times are milliseconds since the admission. Bounded: the browser is given no more than it draws."""
    pairs, start = views.paired(moments), views.anchor_ns(moments)
    end = views.end_ns(moments)

    def since(time_ns: int) -> float:
        return (time_ns - start) / 1e6

    drawn = lines.of_events(moments, pairs.hops)
    busy = (each for each in pairs.intervals if _is_stay(each))
    return {
        "id": request_id,
        "start": start / 1e6,
        "duration": since(end),
        "whole": views.is_whole(pairs),
        "first": min(since(moments[0].time_ns), 0.0),
        "lines": [[each.label, each.stage, each.start_ms, each.end_ms, each.parts] for each in drawn[:MAX_ROWS]],
        "lines_count": len(drawn),
        "busy": [[each.stage, since(each.start_ns), since(each.end_ns)] for each in islice(busy, MAX_ROWS)],
        "intervals": [
            [each.stage, each.opened, each.closed, since(each.start_ns), since(each.end_ns)]
            for each in heapq.nsmallest(MAX_ROWS, pairs.intervals, key=_place)
        ],
        "hops": [
            [each.source, each.destination, each.kind, each.chunk_id, since(each.start_ns), since(each.end_ns)]
            for each in heapq.nsmallest(MAX_ROWS, pairs.hops, key=_place)
        ],
        "rows": len(pairs.intervals) + len(pairs.hops),
    }


def _is_stay(each: Interval) -> bool:
    """The list of requests shows this event: when a stage had it."""
    return each.opened == "stage_run_start" or (each.opened, each.closed) == ("stage_dispatch", "stage_complete")


def _place(row: Interval | Hop) -> tuple[int, int]:
    """The place in the waterfall: rows go by start, and those that start together by length, the longest first."""
    return row.start_ns, -row.end_ns


def _utilisation(found: Events) -> dict[str, Any]:
    """The mean number of requests that each stage was computing in each slice of the run."""
    first = min((moments[0].time_ns for moments in found.requests.values()), default=0)
    last = max((moments[-1].time_ns for moments in found.requests.values()), default=1)
    width = max((last - first) / BINS, 1.0)
    stages: dict[str, list[float]] = {}
    for moments in found.requests.values():
        for each in views.paired(moments).intervals:
            if (each.opened, each.closed) in _BUSY:
                bins = stages.setdefault(each.stage, [0.0] * BINS)
                _add(bins, (each.start_ns - first) / width, (each.end_ns - first) / width)
    rounded = {stage: [round(value, 3) for value in bins] for stage, bins in sorted(stages.items())}
    return {"seconds": (last - first) / 1e9, "stages": rounded}


_BUSY: Final = {("stage_run_start", "stage_run_end"), ("scheduler_prefill_start", "scheduler_first_emit")}


def _add(bins: list[float], start: float, end: float) -> None:
    """Add the share of each bin between ``start`` and ``end``, in bins."""
    for index in range(max(int(start), 0), min(int(end) + 1, BINS)):
        bins[index] += max(min(end, index + 1) - max(start, index), 0.0)
