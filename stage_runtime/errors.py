"""The error tree of the runtime. A class exists when some caller acts differently on it.

OmniError
├── RequestError            one request fails; carries a code of the closed list and the client's message
│   ├── RouteAway           a route leads to a stage without a ready instance: the request is bound again, or fails
│   └── InvalidRequest      the user's fault (400); stages may raise it
│       └── ContextLengthExceeded   the prompt is longer than the model takes; agents shorten it
├── ValueRefused            LOCAL: a value that cannot be encoded: refused at the sender, with its path
├── PeerError               the other end's fault
│   ├── ProtocolError       a frame that cannot be understood: counted and dropped
│   ├── TransferError       a relay could not move a payload (the request fails with transport_failed)
│   │   ├── RelayFailed     it does not reach a peer that may be alive: the next relay is used
│   │   ├── RelayRefused    no relay that the pipeline allows reaches the peer: which, and why
│   │   └── NoConnection    this process has no link to the peer: the request is sent again, not to this instance
│   └── EngineDeadError     an engine's process has ended: nothing more is computed for those who wait
├── LimitReached            LOCAL: no room for another peer: which limit, and what to do; the peer is refused
├── ConfigurationError      plan, environment or a dotted name is wrong: the process must not start
├── HookError               a user's function raised or broke its contract: stage, hook, cause
└── IllegalEvent            LOCAL: a state machine has no row for an event: a fault of ours, with the history
"""

from __future__ import annotations

import contextlib
import errno
import os
import traceback as tracebacks
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from omnipipeline_spec.types.errors import clipped

#: code -> HTTP status: the closed list that clients may count on.
CODES: Final[dict[str, int]] = {
    "invalid_request": 400,
    "context_length_exceeded": 400,
    "unauthorized": 401,
    "unsupported_endpoint": 404,
    "not_found": 404,
    "duplicate_request": 409,
    "cancelled": 499,
    "too_large": 413,
    "rate_limited": 429,
    "stage_failed": 500,
    "transport_failed": 502,
    "unavailable": 503,
    "deadline": 504,
}


#: Words of an engine's error, by which a coordinator tells a missing folder of an adapter from a wrong one.
NO_FOLDER: Final = "this folder does not exist"
ENGINES_CHANGE: Final = "engines are being started or ended"
#: Words in errors of an operation that the same engine, or the next one in its place, may carry out later.
ENGINE_AWAY: Final = ("EngineDeadError: ", "the engine crashed: ", "no answer within ", ENGINES_CHANGE)
TEXT_LIMIT: Final = 2000  # characters of an error's text: a longer one helps no reader and fits into no message
TRACEBACK_LIMIT: Final = 48_000
ESCAPED: Final = 6  # characters of a half of a surrogate pair, as `safe_str` writes it
#: The errors of msgspec for bytes that it cannot decode. Text that is not UTF-8, and lists that are nested too deep,
#: raise Python's own.
UNDECODABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
#: Numbers of an `OSError` of ``accept`` for which the next call would fail alike: no descriptor or memory is left.
NO_ROOM: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class OmniError(Exception):
    """Root of the runtime's errors."""


class RequestError(OmniError):
    """A request ends with this: ``code`` of `CODES`, the stage and hook that caused it, a message for the client."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        stage: str | None = None,
        hook: str | None = None,
        request_id: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code if code in CODES else "stage_failed"
        self.message = message
        self.stage = stage
        self.hook = hook
        self.request_id = request_id
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def status(self) -> int:
        return CODES[self.code]


class RouteAway(RequestError):
    """The route of a request leads to ``away``, which had no ready instance when the request was bound."""

    def __init__(self, stage: str, away: str) -> None:
        super().__init__("unavailable", f"the route leads to {away!r}, which had no ready instance", stage=stage)
        self.away = away


class InvalidRequest(RequestError):
    """The request cannot be served as it is: the client's fault. Stages raise it for input they refuse."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__("invalid_request", message, param=param)


class ContextLengthExceeded(InvalidRequest, ValueError):
    """A prompt of ``count`` tokens. Clients look for this code and for the words of OpenAI's message."""

    def __init__(self, count: int, longest: int) -> None:
        super().__init__(
            f"This model's maximum context length is {longest} tokens. However, your messages resulted in {count} "
            "tokens. Please reduce the length of the messages.",
            param="messages",
        )
        self.code = "context_length_exceeded"


def refusal(error: ValueError) -> RequestError:
    """The error of a request for a value that an engine has refused."""
    return error if isinstance(error, RequestError) else InvalidRequest(str(error))


class ValueRefused(OmniError):
    """A value that cannot be encoded in MessagePack; ``path`` is its place."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


class PeerError(OmniError):
    """The other end's fault."""


class ProtocolError(PeerError):
    """A frame that cannot be understood: garbage, another protocol version, a field out of bounds."""


class OtherProtocol(ProtocolError):
    """A frame of another protocol version: the rest of it is ignored."""


class TransferError(PeerError):
    """A relay could not move a payload."""


class RelayFailed(TransferError):
    """A relay does not reach a peer that may be alive. The next relay is used for what follows."""


class RelayRefused(TransferError):
    """No relay that the pipeline allows reaches a peer that is alive."""


class NoConnection(TransferError):
    """This process has no link to a peer, which is dead or will be connected again: ``peer`` is its incarnation."""

    def __init__(self, message: str, peer: str) -> None:
        super().__init__(message)
        self.peer = peer


class LimitReached(OmniError):
    """This process has no room for another peer: names the limit and what to do."""


class EngineDeadError(PeerError):
    """The process of an engine has ended, or has announced that it will."""


class ConfigurationError(OmniError):
    """Plan, environment or a dotted name is wrong: the process must not start."""

    def __init__(self, message: str) -> None:
        super().__init__(clipped(message, most=2 * TEXT_LIMIT))


class HookError(OmniError):
    """A user's function raised, or gave back what its contract does not allow."""

    def __init__(self, stage: str, hook: str, message: str) -> None:
        super().__init__(f"{stage}.{hook}: {message}")
        self.stage = stage
        self.hook = hook
        self.message = message


class IllegalEvent(OmniError):
    """A state machine's table has no row for this event. ``history``: what happened before, oldest first."""

    def __init__(self, name: str, problem: str, history: tuple[str, ...]) -> None:
        super().__init__(f"{name}: {problem}")
        self.history = history


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Give an error of writing a file the file's name: that of a full disk has none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def safe_str(value: object, *, limit: int = TEXT_LIMIT, how: Callable[[object], str] = str) -> str:
    """``str(value)``, at most ``limit`` characters of valid Unicode. Never raises, whatever ``__str__`` does.

    how: `repr` for what is quoted.
    """
    try:
        text = str.__getitem__(how(value), slice(limit))
        return str.encode(text, errors="backslashreplace").decode()[:limit]
    except BaseException as error:  # an author's __str__ may raise, exit, or give no str
        return f"<{_type_name(value)}, whose text cannot be had: {_type_name(error)}>"


def describe(error: BaseException) -> str:
    """``ValueError: no``: the text of a foreign exception for logs and clients. Never raises."""
    return f"{_type_name(error)}: {safe_str(error)}"[:TEXT_LIMIT]


def format_traceback(error: BaseException, *, quoted: Callable[[str], str] | None = None) -> str:
    """Its traceback from the author's first frame on, the end of a very long one. Never raises.

    quoted: changes the texts of the exceptions, which may have lines of their own.
    """
    try:
        whole = tracebacks.TracebackException.from_exception(error)
        _drop_runtime_frames(whole)
        if quoted is not None:
            _quote(whole, quoted)
        end = "".join(whole.format())[-TRACEBACK_LIMIT:]
        return safe_str(end, limit=ESCAPED * TRACEBACK_LIMIT)[-TRACEBACK_LIMIT:]
    except BaseException:
        return f"{''.join(tracebacks.format_tb(error.__traceback__))[-TRACEBACK_LIMIT:]}{describe(error)}"


def _quote(report: tracebacks.TracebackException | None, quoted: Callable[[str], str]) -> None:
    """Change the text of every exception of the chain."""
    if report is not None:
        report._str = quoted(str(report))  # type: ignore[attr-defined]  # `traceback` has no other way to set it
        if report.__notes__:
            report.__notes__ = [quoted(str(note)) for note in report.__notes__]
        for each in (report.__cause__, report.__context__, *(report.exceptions or ())):
            _quote(each, quoted)


def _drop_runtime_frames(report: tracebacks.TracebackException | None) -> None:
    """Drop the frames that lead to the author's code, in every exception of the chain. An exception that has none keeps
    all, unless it names a place in a file of theirs itself.
    """
    if report is None:
        return
    foreign = [at for at, frame in enumerate(report.stack) if not is_ours(frame.filename)]
    if foreign:
        del report.stack[: foreign[0]]
    else:
        named = vars(report).get("filename")  # a SyntaxError's: the place of the fault, which has no frame
        if named and os.path.isabs(named) and not is_ours(named):
            report.stack.clear()
    for other in (report.__cause__, report.__context__, *(report.exceptions or ())):
        _drop_runtime_frames(other)


def is_ours(file: str) -> bool:
    """Whether a frame of this file leads to an author's code without being part of it: ours, imports, threads."""
    return file.startswith(_OURS)


def raised_at(error: BaseException) -> str:
    """``file:line`` of the author's last frame; empty when none of theirs was reached."""
    frames = [frame for frame in tracebacks.extract_tb(error.__traceback__) if not is_ours(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


_STDLIB: Final = os.path.dirname(os.__file__)
_OURS: Final = (
    os.path.join(os.path.dirname(__file__), ""),
    os.path.join(_STDLIB, "importlib", ""),
    os.path.join(_STDLIB, "threading.py"),
    "<frozen importlib",
)


def _type_name(value: object) -> str:
    return str(type.__dict__["__name__"].__get__(type(value)))
