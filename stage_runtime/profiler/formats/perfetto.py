"""Events as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

A process of the run is a process of the trace, a stage in it a thread per overlapping interval, a hop an arrow between
two slices of `TOUCH_US`, at its sending and its receiving: an arrow begins and ends in slices, or it is not drawn.
Times are microseconds since the run's first event.
Source: "Trace Event Format", the Chromium project.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, Final

import msgspec

from stage_runtime.profiler import views
from stage_runtime.profiler.event_files import Events, Moment, Process

TOUCH_US: Final = 1.0

TraceEntry = dict[str, Any]


def write(found: Events, file: BinaryIO) -> None:
    """The trace as JSON, entry by entry: a large one does not fit into memory as objects."""
    encoder = msgspec.json.Encoder()
    file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
    for number, entry in enumerate(trace(found)):
        file.write((b",\n" if number else b"\n") + encoder.encode(entry))
    file.write(b"]}\n")


def trace(found: Events) -> Iterator[TraceEntry]:
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
            yield from _arrow(hop, flow, zero, request_id, threads)
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

    def touch(self, process: int, stage: str, time_ns: int) -> int:
        """The id of a slice of `TOUCH_US` at one end of a hop."""
        name = f"{stage}: hops"
        touch = views.Interval(name, "", "", time_ns, time_ns + int(TOUCH_US * 1e3), process)
        return self.of(touch)

    def mark(self, moment: Moment) -> int:
        return self._number(moment.process, moment.stage, 0)

    def _number(self, process: int, stage: str, queue: int) -> int:
        return self.numbers.setdefault((process, stage, queue), len(self.numbers) + 1)


def _arrow(hop: views.Hop, flow: int, zero: int, request_id: str, threads: _Threads) -> Iterator[TraceEntry]:
    """A slice at either end, and in each of them its end of the arrow."""
    name = f"{hop.source} → {hop.destination}"
    ends: tuple[tuple[str, int, str, TraceEntry], ...] = (
        (hop.source, hop.start_ns, "s", {}),
        (hop.destination, hop.end_ns, "f", {"bp": "e"}),
    )
    for process, (stage, time_ns, phase, binding) in zip(hop.processes, ends, strict=True):
        tid = threads.touch(process, stage, time_ns)
        place = {"name": name, "cat": hop.kind, "ts": (time_ns - zero) / 1e3, "pid": process + 1, "tid": tid}
        yield {"ph": "X", **place, "dur": TOUCH_US, "args": {"request_id": request_id, "chunk_id": hop.chunk_id}}
        yield {"ph": phase, **place, "id": flow, **binding}


def _names(processes: Sequence[Process], threads: _Threads) -> Iterator[TraceEntry]:
    for number, process in enumerate(processes, 1):
        name = f"{process.host or process.path.parent.name} {process.path.stem}"
        yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}}
    for (process_index, stage, queue), number in threads.numbers.items():
        name = f"{stage} {queue}" if queue else f"{stage}: events"
        yield {"ph": "M", "name": "thread_name", "pid": process_index + 1, "tid": number, "args": {"name": name}}
