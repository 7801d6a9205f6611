"""Events whose metadata are known before, but for two numbers. Noted by hot paths, made into lines later.

A note is a tuple of numbers and the request's id: neither the thread that notes it nor the writer makes a mapping or a
line, which would cost more than all the rest of a recording. The file of notes names each template once (`Definition`).
`expand` makes the lines of such a file. Used by `recorder`, `writing`, `reading`, and by who makes templates.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

#: number of the template, request id, nanoseconds since the epoch, attempt, number
TemplateNote = tuple[int, str, int, int, int]

MAX_EVENTS: Final = 16  # of one template
_SIZE_OF_REST: Final = 90  # bytes of a line beside its template's: the request's id, the time, the run's id, numbers

_lock: Final = threading.Lock()
_encode = msgspec.json.Encoder().encode
#: Templates of this process, by number. A few for each stage; notes name them by number.
_templates: Final[list[Template]] = []


class Template:
    """Events of one stage that happen at the same moment.

    events: the name and the metadata of each; each also gets ``attempt``. number: the name of a further number that
    is noted each time, in the metadata of the event ``numbered``. attempts: False: the metadata are complete
    without one.
    """

    __slots__ = ("_definition", "id", "size")

    def __init__(
        self,
        stage: str,
        *events: tuple[str, Mapping[str, Any]],
        number: str | None = None,
        numbered: int = -1,
        attempts: bool = True,
    ) -> None:
        encoded = [(name, msgspec.Raw(_encode(metadata))) for name, metadata in events]
        with _lock:
            self.id: Final = len(_templates)
            _templates.append(self)
        self._definition = Definition(self.id, "", 0, stage, encoded, number, numbered % max(len(events), 1), attempts)
        #: Bytes of its lines, about.
        self.size: Final = len(_encode(self._definition)) + len(events) * (_SIZE_OF_REST + len(stage))

    def __len__(self) -> int:
        """How many events."""
        return len(self._definition.events)

    def definition(self, run_id: str, pid: int) -> Definition:
        return msgspec.structs.replace(self._definition, run_id=run_id, pid=pid)


def of(number: int) -> Template:
    """The template of this process with this number."""
    return _templates[number]


class Definition(msgspec.Struct, frozen=True):
    """A template, as the file of notes has it before the first note of it."""

    template: int
    run_id: str
    pid: int
    stage: str
    events: list[tuple[str, msgspec.Raw]]
    number: str | None
    numbered: int
    attempts: bool

    def pieces(self) -> _Pieces:
        """Raises: MsgspecError: metadata that is not a mapping."""
        pairs = []
        for name, raw in self.events[:MAX_EVENTS]:
            metadata = msgspec.json.decode(raw, type=dict[str, Any])
            begin = {"stage": self.stage, "event_name": name, "timestamp_ns": 0}
            end = {
                "run_id": self.run_id,
                "pid": self.pid,
                "metadata": metadata | ({"attempt": 0} if self.attempts else {}),
            }
            closing = b"0}}" if self.attempts else b"}}"
            pairs.append((b"," + _encode(begin)[1:-2], b"," + _encode(end)[1 : -len(closing)]))
        if self.number is None or not 0 <= self.numbered < len(pairs):
            return tuple(pairs), self.attempts, None, 0
        separator = b"," if self.attempts or bytes(self.events[self.numbered][1]) != b"{}" else b""
        return tuple(pairs), self.attempts, separator + _encode(self.number) + b":", self.numbered


#: The pieces of each event: what is between the request's id and the time, and between the time and the attempt, as
#: JSON; whether there is an attempt; what is between it and the further number, and in which event.
_Pieces = tuple[tuple[tuple[bytes, bytes], ...], bool, bytes | None, int]

_decode = msgspec.json.Decoder(TemplateNote | Definition).decode


def expand(lines: Iterable[bytes], unreadable: Callable[[], None]) -> Iterator[bytes]:
    """The lines of events, as `recorder` writes them, of the notes in a file; of each note together.

    unreadable: called for each line that is not a note of a template that was defined before it.
    """
    known: dict[int, _Pieces] = {}
    for line in lines:
        try:
            read = _decode(line)
            if isinstance(read, Definition):
                known[read.template] = read.pieces()
            else:
                yield _lines(read, known[read[0]])
        except (msgspec.MsgspecError, KeyError, UnicodeDecodeError, RecursionError):
            if line.strip():
                unreadable()


def _lines(note: TemplateNote, pieces: _Pieces) -> bytes:
    """Joined from pieces, which costs a third of encoding them."""
    _, request_id, time_ns, attempt, number = note
    pairs, attempts, before_number, numbered = pieces
    begin = b'{"request_id":' + _encode(request_id)
    tried = b"%d" % attempt if attempts else b""
    made: list[bytes] = []
    for index, (before, after) in enumerate(pairs):
        end = b"%b%d}}\n" % (before_number, number) if before_number is not None and index == numbered else b"}}\n"
        made += (begin, before, b"%d" % time_ns, after, tried, end)
        time_ns += 1  # readers order events by time
    return b"".join(made)


def count(lines: bytes) -> int:
    """The events of the notes in some lines of a file of notes."""
    found = 0
    for line in lines.splitlines():
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            if isinstance(read := _decode(line), tuple):
                found += len(of(read[0]))
    return found
