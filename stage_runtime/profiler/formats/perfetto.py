"""Events as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

A process of the run is a process of the trace, a stage in it a thread per overlapping interval, a hop an arrow between
the events of its sending and receiving. Times are microseconds since the run's first event.
Source: "Trace Event Format", the Chromium project.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import msgspec

from stage_runtime.profiler import views
from stage_runtime.profiler.reading import Events, Moment, Process

Entry = dict[str, Any]


def write(found: Events, file: BinaryIO) -> None:
    """The trace as JSON, entry by entry: a large one does not fit into memory as objects."""
    encoder = msgspec.json.Encoder()
    file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
    for number, entry in enumerate(trace(found)):
        file.write((b",\n" if number else b"\n") + encoder.encode(entry))
    file.write(b"]}\n")


def trace(found: Events) -> Iterator[Entry]:
    """The trace's entries, of `reading.read`."""
    zero = min((moments[0].time_ns for moments in found.requests.values()), default=0)
    threads = _Threads()
    flow = 0
    for request_id, moments in found.requests.items():
        pairs = views.paired(moments)
        for each in pairs.intervals:
            yield {
                "ph": "X",
                "name": f"{each.opened} → {each.closed}",
                "cat": "interval",
                "ts": (each.start_ns - zero) / 1e3,
                "dur": (each.end_ns - each.start_ns) / 1e3,
                "pid": each.process + 1,
                "tid": threads.of(each),
                "args": {"request_id": request_id, "stage": each.stage},
            }
        for moment in moments:
            yield {
                "ph": "i",
                "s": "t",
                "name": moment.name,
                "cat": "event",
                "ts": (moment.time_ns - zero) / 1e3,
                "pid": moment.process + 1,
                "tid": threads.mark(moment),
                "args": {"request_id": request_id, **moment.metadata},
            }
        for hop in pairs.hops:
            flow += 1
            name = f"{hop.source} → {hop.destination}"
            places = _places(moments, threads, hop)
            for phase, time_ns, (pid, tid) in zip("sf", (hop.start_ns, hop.end_ns), places, strict=True):
                entry = {"ph": phase, "name": name, "cat": hop.kind, "id": flow, "pid": pid, "tid": tid}
                yield entry | {"ts": (time_ns - zero) / 1e3} | ({"bp": "e"} if phase == "f" else {})
    yield from _names(found.processes, threads)


class _Threads:
    """Threads of the trace: intervals of one thread must nest, so those that overlap get threads of their own."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[int, str, int], int] = {}  #: (process, stage, send queue) -> tid
        self._ends: dict[tuple[int, str], list[int]] = {}  #: the end of each send queue's last interval

    def of(self, interval: views.Interval) -> int:
        ends = self._ends.setdefault((interval.process, interval.stage), [])
        queue = next((index for index, end in enumerate(ends) if end <= interval.start_ns), len(ends))
        ends[queue:] = [interval.end_ns, *ends[queue + 1 :]]
        return self._number(interval.process, interval.stage, queue + 1)

    def mark(self, moment: Moment) -> int:
        return self._number(moment.process, moment.stage, 0)

    def _number(self, process: int, stage: str, queue: int) -> int:
        return self.numbers.setdefault((process, stage, queue), len(self.numbers) + 1)


def _places(moments: Sequence[Moment], threads: _Threads, hop: views.Hop) -> list[tuple[int, int]]:
    found = []
    for stage, time_ns in ((hop.source, hop.start_ns), (hop.destination, hop.end_ns)):
        [moment, *_] = [each for each in moments if each.stage == stage and each.time_ns == time_ns]
        found.append((moment.process + 1, threads.mark(moment)))
    return found


def _names(processes: Sequence[Process], threads: _Threads) -> Iterator[Entry]:
    for number, process in enumerate(processes, 1):
        name = f"{process.host or process.path.parent.name} {process.path.stem}"
        yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}}
    for (process_index, stage, queue), number in threads.numbers.items():
        name = f"{stage} {queue}" if queue else f"{stage}: events"
        yield {"ph": "M", "name": "thread_name", "pid": process_index + 1, "tid": number, "args": {"name": name}}
