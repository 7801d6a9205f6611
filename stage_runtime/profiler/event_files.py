"""Event files of a run → events of each request, on one clock.

Reads every ``*.jsonl`` below a folder. A line that cannot be read is counted: the last line of a process that was
killed is cut off. The distance of a process's clock (`events.CLOCK_OFFSET`, measured by
the coordinator) is added to its times.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from stage_runtime.errors import ConfigurationError
from stage_runtime.profiler import events
from stage_runtime.profiler.recording import templates
from stage_runtime.profiler.recording.writing import NOTES, notes_of

MAX_LINE: Final = 1 << 20  # bytes; the recorder writes up to 16 KiB, and a binary file may be one line

_NOTHING: Final = msgspec.Raw(b"null")
_decoder = msgspec.json.Decoder(events.Event)
_metadata = msgspec.json.Decoder(dict[str, Any])


class Moment(NamedTuple):
    """One event of a request. ``time_ns`` is on the reference clock."""

    time_ns: int
    stage: str  #: The stage, of a TP stage's rank 1.. with its rank: ``thinker rank 1``.
    name: str
    process: int  #: Index into `Events.processes`.
    raw: bytes  #: The metadata as JSON.

    @property
    def metadata(self) -> dict[str, Any]:
        return _metadata.decode(self.raw)


class Clock(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """One measurement of a process's clock. The smallest uncertainty sorts first."""

    uncertainty_ns: int
    offset_ns: int  #: Nanoseconds to be added to the process's times.


class Process(msgspec.Struct, kw_only=True):
    """The content of one event file about the process that wrote it."""

    path: Path
    pid: int = 0
    host: str = ""
    incarnation: str = ""
    rank: int = 0  #: The rank in a TP stage.
    offset_ns: int = 0  #: Added to its times.
    uncertainty_ns: int = 0
    dropped: int = 0
    stopped: bool = False  #: The file was closed by the recorder, not by the end of its process.
    notes: bool = False  #: The recorder has closed it and found no room to make lines of the notes beside it.
    unreadable: int = 0  #: lines


class Events(msgspec.Struct, kw_only=True):
    """All events of a run. Those of a request are in order of time."""

    run_ids: set[str]
    processes: list[Process]
    requests: dict[str, list[Moment]]
    count: int


def read(folder: Path) -> Events:
    """All events below ``folder``, or of one file. Raises: ConfigurationError: it has no event file."""
    files = [folder] if folder.is_file() else sorted(each for each in folder.rglob("*.jsonl") if each.is_file())
    beside = {notes_of(path) for path in files}
    files = [path for path in files if path not in beside]
    if not files:
        raise ConfigurationError(f"{folder}: no event files (*.jsonl) in this folder")
    found = Events(run_ids=set(), processes=[], requests={}, count=0)
    shared: dict[Any, Any] = {}  # equal strings are one object: a million events repeat the same few names
    clocks: dict[str, Clock] = {}  # by incarnation; the coordinator's file has them, whichever is read first
    for path in files:
        _read_file(path, found, shared, clocks)
    offsets = [_take_clock(process, clocks) for process in found.processes]
    suffixes = [f" rank {process.rank}" if process.rank else "" for process in found.processes]
    for moments in found.requests.values():
        if any(offsets):
            moments[:] = [each._replace(time_ns=each.time_ns + offsets[each.process]) for each in moments]
        if any(suffixes):  # what one rank begins, another one does not end
            moments[:] = [each._replace(stage=each.stage + suffixes[each.process]) for each in moments]
        moments.sort()
    return found


def _take_clock(process: Process, clocks: dict[str, Clock]) -> int:
    """The process's offset, from here on among its facts."""
    clock = clocks.get(process.incarnation)
    if clock is not None:
        process.offset_ns, process.uncertainty_ns = clock.offset_ns, clock.uncertainty_ns
    return process.offset_ns


def _read_file(path: Path, found: Events, shared: dict[Any, Any], clocks: dict[str, Clock]) -> None:
    process, index = Process(path=path), len(found.processes)
    found.processes.append(process)
    for event in _events(path, process):
        raw = b"{}" if event.metadata == _NOTHING else bytes(event.metadata)
        if raw not in shared:
            try:
                _metadata.decode(raw)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                process.unreadable += 1
                continue
        if event.event_name in _OF_FILES:
            _take_fact(process, event, clocks)
            found.run_ids.add(event.run_id or "")
        if not event.request_id:
            continue
        moment = Moment(
            event.timestamp_ns,
            shared.setdefault(event.stage or "", event.stage or ""),
            shared.setdefault(event.event_name, event.event_name),
            index,
            shared.setdefault(raw, raw),
        )
        found.requests.setdefault(event.request_id, []).append(moment)
        found.run_ids.add(event.run_id or "")
        found.count += 1


def _events(path: Path, process: Process) -> Iterator[events.Event]:
    """The events of a file's lines, and of the notes beside them where the process was killed or still records."""
    if path.name.endswith(NOTES):  # alone
        yield from _decoded(_noted(path, process), process)
        return
    yield from _decoded(_lines(path, process), process)
    notes = notes_of(path)
    if notes.is_file() and (process.notes or not process.stopped):
        yield from _decoded(_noted(notes, process), process)


def _noted(path: Path, process: Process) -> Iterator[bytes]:
    def unreadable() -> None:
        process.unreadable += 1

    for lines in templates.expand(_lines(path, process), unreadable):
        yield from lines.splitlines()


def _decoded(lines: Iterator[bytes], process: Process) -> Iterator[events.Event]:
    for line in lines:
        try:
            yield _decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            process.unreadable += bool(line.strip())


def _lines(path: Path, process: Process) -> Iterator[bytes]:
    """Those that are not too long."""
    try:
        with path.open("rb") as file:
            whole = True  # this piece begins a line
            while line := file.readline(MAX_LINE):
                begins, whole = whole, line.endswith(b"\n") or len(line) < MAX_LINE
                if begins and whole:
                    yield line
                else:
                    process.unreadable += begins
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror or error}") from error


_OF_FILES = frozenset((events.RECORDER_STARTED, events.RECORDER_STOPPED, events.CLOCK_OFFSET))


def _take_fact(process: Process, event: events.Event, clocks: dict[str, Clock]) -> None:
    process.pid = event.pid
    try:
        metadata = _metadata.decode(event.metadata)
        if event.event_name == events.RECORDER_STARTED:
            process.stopped = False  # for a run that was stopped and started again
            process.host, process.incarnation = str(metadata.get("host", "")), str(metadata.get("incarnation", ""))
            process.rank = int(metadata.get("rank", 0))
        elif event.event_name == events.RECORDER_STOPPED:
            process.dropped += int(metadata.get("dropped", 0))
            process.stopped, process.notes = True, bool(metadata.get("notes"))
        else:  # of several measurements the most certain one
            clock = Clock(uncertainty_ns=int(metadata.get("uncertainty_ns", 0)), offset_ns=int(metadata["offset_ns"]))
            measured = str(metadata["incarnation"])
            if abs(clock.offset_ns) > events.MAX_OFFSET_NS:
                raise ValueError("no clock is so far away")
            clocks[measured] = min(clock, clocks.get(measured, clock))
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError, OverflowError):
        process.unreadable += 1


def slowest(found: Events, count: int) -> list[str]:
    """Ids of the requests that took longest, from first to last event."""
    spans = ((moments[-1].time_ns - moments[0].time_ns, request_id) for request_id, moments in found.requests.items())
    return [request_id for _, request_id in heapq.nlargest(count, spans)]
