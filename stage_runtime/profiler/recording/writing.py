"""The files of one run of a process, and the thread that writes them.

Here: lines of events (`events_<stage>_<pid>.jsonl`), while a run is recorded the notes of templates beside them
(`*.notes.jsonl`), and the one file of lines that is made of both when it stops. Making lines costs more processor time
than all the rest of a recording, so notes stay notes while requests are served. Not here: what is recorded
(`recorder`). The notes of a process that was killed stay beside its file; `reading` takes them as they are. No failure
here reaches who records.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import shutil
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from omnipipeline_spec.types.pods import COORDINATOR
from stage_runtime.profiler import events
from stage_runtime.profiler.recording import summaries, templates
from stage_runtime.profiler.recording.templates import TemplateNote

log = logging.getLogger(__name__)

FLUSH_EVERY_S: Final = 0.5  # a killed process loses what is younger
MAX_QUEUED: Final = 200_000  # events between two looks of the writer: 400,000 a second
MAX_BYTES: Final = 1 << 30  # of one process's lines; a run that is never stopped must not fill the disk
MAX_LINE: Final = 16 << 10  # of one event; metadata is for small scalars
END_NBYTES: Final = 1024  # more than the last line of a file takes
NOTES: Final = ".notes.jsonl"
TOGETHER: Final = 64  # lines that are encoded in one call: about 12 KiB, so that none of them exceeds `MAX_LINE`
SLICE: Final = 500  # notes of which lines are made before others may run: half a millisecond
PAUSE_S: Final = 0.001  # after a slice

_encoder = msgspec.json.Encoder()
_template_of = itemgetter(0)


class EventLine(msgspec.Struct, gc=False):
    """One line, with the fields of `events.Event` in its order: made as fast as a tuple, encoded faster than a dict."""

    request_id: str
    stage: str
    event_name: str
    timestamp_ns: int
    run_id: str
    pid: int
    metadata: Mapping[str, Any]


class AppendedFile:
    """A file that grows by lines. A line that a full disk cuts is ended before the next line begins."""

    def __init__(self, path: Path, count: Callable[[bytes], int], file: BinaryIO | None = None) -> None:
        """count: the events in some lines of it."""
        self.path = path
        self.lost = 0  #: Events that were not written.
        self.cut = False  #: It ends in the middle of a line.
        self._count = count
        self._file = file

    @property
    def open(self) -> bool:
        return self._file is not None

    def append(self, lines: bytes) -> None:
        """Makes the file. Raises: OSError: not all was written. The rest is counted."""
        if not lines:
            return
        data, done = b"\n" + lines if self.cut else lines, 0
        try:
            if self._file is None:
                self._file = self.path.open("ab", buffering=0)
            while done < len(data):
                done += self._file.write(memoryview(data)[done:]) or 0
        except OSError:
            self.lost += self._count(data[max(data.rfind(b"\n", 0, done) + 1, len(data) - len(lines)) :])
            self.cut = self.cut if done == 0 else data[done - 1] != ord("\n")
            raise
        self.cut = False

    def end(self, make: Callable[[], bytes]) -> None:
        """Append the last line. It takes the place of the lines before it on a full disk, which count as lost.

        make: gives the line, with what is lost by then.
        Raises: OSError: the file has no room for it, either.
        """
        lost, cut = self.lost, self.cut
        try:
            self.append(make())
            return
        except OSError:
            self.lost, self.cut = lost, cut  # the line itself is not an event
        with self.path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - END_NBYTES - MAX_LINE, 0))
            read_from, tail = file.tell(), file.read()
            start = tail.rfind(b"\n", 0, max(len(tail) - END_NBYTES, 0)) + 1
            if len(tail) < END_NBYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            replaced = tail[start:]
            self.lost += self._count(replaced[: replaced.rfind(b"\n") + 1])
            file.seek(read_from + start)
            file.write(make())
            file.truncate()
        self.cut = False

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class RunWriter:
    """The files, queues and counters of one run. Those who record append to ``lines`` and ``notes``."""

    def __init__(self, run_id: str, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self.run_id = run_id
        self.pid = os.getpid()
        self.path = path
        self.lines: deque[EventLine] = deque()
        self.notes: deque[TemplateNote] = deque()
        self.refused = 0  #: Events that were not queued, since too many were.
        self._dropped = 0  #: Events that could not be encoded or did not fit.
        self._max_bytes = max_bytes
        self._expected = 0  #: Bytes of the lines that were written or will be made of the notes.
        self._defined: set[int] = set()  #: Templates that the file of notes defines.
        self._main = AppendedFile(path, lambda lines: lines.count(b"\n"))
        self._beside = AppendedFile(notes_of(path), templates.count)
        self._why = ""  #: it was stopped
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="profiler", daemon=True)
        self._failed = False  #: A failure was logged; later ones are counted only.
        self._disk = ""  #: The first failure of the disk.

    @property
    def dropped(self) -> int:
        """Events that no file has."""
        return self.refused + self._dropped + self._main.lost + self._beside.lost

    @property
    def missing(self) -> str:
        """The bytes that the disk did not take, and why; empty: it took all."""
        return f"{self.dropped} events were not written: {self._disk}" if self._disk and self.dropped else ""

    def line(self, event: str, request_id: str, stage: str, time_ns: int, metadata: Mapping[str, Any]) -> EventLine:
        return EventLine(request_id, stage, event, time_ns, self.run_id, self.pid, metadata)

    def start(self) -> None:
        """Write what is queued, so that the file of a process that is killed at once has its name. Raises: OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._write_lines()
        self._thread.start()

    def stop(self, why: str, timeout_s: float) -> None:
        """Write what is queued, and lines for all notes. Afterwards the writer may go on with a long file."""
        self._why = why
        self._stopping.set()
        self._thread.join(timeout_s)

    def flush(self) -> None:
        """Write what is queued; nothing that is queued meanwhile, or it might never end."""
        for write in (self._write_notes, self._write_lines):
            try:
                write()
            except Exception as error:  # a full disk must not end serving
                self._log(error)

    def _run(self) -> None:
        """The thread."""
        while not self._stopping.wait(FLUSH_EVERY_S):
            self.flush()
        self.flush()
        try:
            if not self._beside.open:
                self._main.end(self._last_line)
            elif not self._settle():
                self._main.end(functools.partial(self._last_line, notes_kept=True))
        except Exception as error:  # the outermost: as above
            self._log(error)
        finally:
            self._main.close()
            self._beside.close()

    # --- while it is recorded -----------------------------------------------------------------------------------

    def _write_lines(self) -> None:
        lines = [self.lines.popleft() for _ in range(len(self.lines))]
        made = bytearray()
        for start in range(0, len(lines), TOGETHER):
            self._encode(lines[start : start + TOGETHER], made)
        self._expected += len(made)
        self._main.append(bytes(made))

    def _encode(self, lines: list[EventLine], made: bytearray) -> None:
        """Add them to ``made``: in one call, or one by one where one may be no JSON, too long or beyond the bound."""
        try:
            encoded = _encoder.encode_lines(lines)
        except Exception:  # an author's metadata
            encoded = b""
        if 0 < len(encoded) <= MAX_LINE and self._room(made, encoded):
            made += encoded
            return
        for line in lines:
            encoded = self._alone(line)
            if encoded and self._room(made, encoded):
                made += encoded
            else:
                self._dropped += 1

    def _alone(self, line: EventLine) -> bytes:
        """The event encoded as it is, or with its metadata made plain, or with few of them; the first that is possible.

        Returns: empty: it cannot be written, because its names are not text.
        """
        problem = ""
        for make in (_as_it_is, summaries.plain, summaries.brief):
            try:
                encoded = _encoder.encode_lines([msgspec.structs.replace(line, metadata=make(line.metadata))])
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            if len(encoded) <= MAX_LINE:
                return encoded
            problem = f"an event has {len(encoded)} bytes"
        self._log(problem)
        return b""

    def _room(self, made: bytearray, more: bytes) -> bool:
        return self._expected + len(made) + len(more) <= self._max_bytes

    def _write_notes(self) -> None:
        notes = [self.notes.popleft() for _ in range(len(self.notes))]
        if not notes:
            return
        used = Counter(map(_template_of, notes))
        nbytes = sum(templates.of(template).size * count for template, count in used.items())
        if self._expected + nbytes > self._max_bytes:
            self._dropped += sum(len(templates.of(template)) * count for template, count in used.items())
            return
        self._expected += nbytes
        try:
            encoded = _encoder.encode_lines(notes)
        except UnicodeEncodeError as error:  # a request id that is not text
            self._log(error)
            encoded = b"".join(self._one_by_one(notes))
        new = used.keys() - self._defined
        definitions = [templates.of(template).definition(self.run_id, self.pid) for template in sorted(new)]
        self._beside.append(_encoder.encode_lines(definitions) + encoded)
        self._defined |= new

    def _one_by_one(self, notes: list[TemplateNote]) -> Iterator[bytes]:
        for note in notes:
            try:
                yield _encoder.encode_lines([note])
            except UnicodeEncodeError:
                self._dropped += len(templates.of(note[0]))

    def _log(self, error: Exception | str) -> None:
        if isinstance(error, OSError):
            self._disk = self._disk or str(error)
        if not self._failed:
            self._failed = True
            log.error("profiler events are dropped (logged once per process): %s: %s", self.path, error)

    # --- when it is stopped -------------------------------------------------------------------------------------

    def _last_line(self, *, notes_kept: bool = False) -> bytes:
        """There is always room for it."""
        facts = {"dropped": self.dropped, "why": self._why, **({"notes": True} if notes_kept else {})}
        stopped = self.line(events.RECORDER_STOPPED, "", COORDINATOR, time.time_ns(), facts)
        return _encoder.encode_lines([stopped])

    def _settle(self) -> bool:
        """Make one file of the lines and of lines for the notes; others may run in between.

        Returns: False: it did not fit. The notes stay beside the lines.
        """
        settled = self.path.with_name(f"{self.path.name}.settled")
        try:
            with settled.open("wb") as file:
                with self.path.open("rb") as lines:
                    shutil.copyfileobj(lines, file)
                if self._main.cut:
                    file.write(b"\n")
                self._expand(file)
                file.write(self._last_line())
            settled.replace(self.path)
            self._beside.path.unlink()
        except OSError as error:
            self._log(error)
            with contextlib.suppress(OSError):
                settled.unlink(missing_ok=True)
            return False
        return True

    def _expand(self, file: BinaryIO) -> None:
        room = self._max_bytes - file.tell()
        with self._beside.path.open("rb") as notes:
            for index, lines in enumerate(templates.expand(notes, unreadable=lambda: None)):
                room -= len(lines)
                if room < 0:
                    self._dropped += lines.count(b"\n")
                else:
                    file.write(lines)
                if index % SLICE == SLICE - 1:
                    time.sleep(PAUSE_S)


def _as_it_is(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    return metadata


def notes_of(path: Path) -> Path:
    """The file of notes beside a file of lines."""
    return path.with_name(path.name.removesuffix(".jsonl") + NOTES)
