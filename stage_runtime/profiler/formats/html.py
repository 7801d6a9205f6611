"""The run as one page for the browser, with everything in it: it opens from disk, without a network.

Here: what the page shows, as JSON. How it is drawn: ``page.html`` beside this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import Any, Final

import msgspec

from stage_runtime.profiler import reading, views
from stage_runtime.profiler.reading import Events, Moment

MAX_REQUESTS: Final = 1_000  # drawn; of more, the slowest. The tables are always of all
BINS: Final = 200  # of the run's time, for the utilisation of stages
_MARK: Final = "/*DATA*/null"


def page(found: Events) -> str:
    """The whole page."""
    template = resources.files(__package__).joinpath("page.html").read_text()
    data = msgspec.json.encode(_data(found)).decode()
    # Within a script element, "</script" would end it, and "<!--" would change how it is read.
    return template.replace(_MARK, data.replace("<", "\\u003c"))


def _data(found: Events) -> dict[str, Any]:
    report = views.report_of(found, timeline=False)
    drawn = reading.slowest(found, MAX_REQUESTS)
    requests = [_request(request_id, found.requests[request_id]) for request_id in drawn]
    requests.sort(key=lambda each: each["start"])
    return {
        **{key: report[key] for key in report if key not in ("timeline", "processes")},
        "processes": report["processes"],
        "requests": requests,
        "utilisation": _utilisation(found),
        "durations": sorted(each["duration_ms"] for each in report["timeline"]),
    }


def _request(request_id: str, moments: Sequence[Moment]) -> dict[str, Any]:
    """Times are milliseconds since the admission."""
    pairs, start = views.paired(moments), views.anchor_ns(moments)
    end = views.end_ns(moments)
    return {
        "id": request_id,
        "start": start / 1e6,
        "duration": (end - start) / 1e6,
        "intervals": [
            [each.stage, each.opened, each.closed, (each.start_ns - start) / 1e6, (each.end_ns - start) / 1e6]
            for each in pairs.intervals
        ],
        "hops": [
            [
                each.source,
                each.destination,
                each.kind,
                each.chunk_id,
                (each.start_ns - start) / 1e6,
                (each.end_ns - start) / 1e6,
            ]
            for each in pairs.hops
        ],
        "events": [[each.stage, each.name, (each.time_ns - start) / 1e6] for each in moments],
    }


def _utilisation(found: Events) -> dict[str, Any]:
    """Per stage and slice of the run: in how many requests it was computing on average."""
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
