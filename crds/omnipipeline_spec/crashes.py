"""What a process leaves behind when it ends with an error, and which line of it is the cause.

Here: the form of a termination message (written by the runtime and the prefetch Job, read by the operator), and the
rule that finds the cause in any program's last output. Not here: writing files, reading pods. Called by the runtime's
``processes`` and the operator's ``changes``.

A termination message of ours is the cause in one line, a line `RULE`, and details. A container that could not write one
(a foreign image, a killed process) leaves the end of its log, as the kubelet's policy FallbackToLogsOnError asks for;
in that the cause is found by the marks that language runtimes leave.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Final

MAX_BYTES: Final = 4096  # of a termination message; the kubelet keeps no more
MAX_CAUSE: Final = 1024  # bytes of its first line: the rest is for the end of the details
MAX_LINE: Final = 2048  # characters of an output line that are looked at
RULE: Final = "---"
#: Exit code of a program that was ended because it did nothing while it started.
EXIT_HUNG: Final = 4


def message(cause: str, details: str = "") -> bytes:
    """A termination message: at most `MAX_BYTES` of UTF-8, the cause first, of the details the end."""
    first = _cut(one_line(cause).encode(errors="replace"), MAX_CAUSE)
    between = f"\n{RULE}\n".encode()
    rest = details.strip("\n").encode(errors="replace")
    room = MAX_BYTES - len(first) - len(between)
    if len(rest) > room:
        mark = "…\n".encode()
        rest = mark + rest[len(mark) - room :].decode(errors="ignore").encode()
    return first + between + rest


def cause(text: str) -> str:
    """The one line of a termination message, or of the end of a log, that says why the program ended.

    Of several crashes the last one counts: what was logged earlier was survived. Empty when the text is.
    """
    first, _, rest = text.partition("\n")
    if rest.partition("\n")[0] == RULE:
        return one_line(first)
    lines = [_plain(line[:MAX_LINE]) for line in text.splitlines()]
    marks = list(_marks(lines))
    if marks:
        return one_line(marks[-1])
    said = [_told(line) for line in lines if line.strip()]
    wrong = [line for line, is_error in said if is_error]
    return one_line(_unwrapped((wrong or [line for line, _ in said] or [""])[-1]))


def is_fatal(line: str) -> bool:
    """Whether a line begins what no program survives: what stands before it is not needed to explain its end."""
    line = _plain(line[:MAX_LINE])
    return bool(_FATAL.match(line) or _THROWN.search(line) or _ABORTED.search(line) or _PANIC_GO.match(line))


def raised(error: BaseException) -> str:
    """An exception in one line: its type, the first line of what it says, and what it was raised from."""
    if isinstance(error, BaseExceptionGroup):
        return raised(error.exceptions[0])  # the group's own message only counts its members
    said = [_said(error)]
    origin, seen = error.__cause__, {id(error)}
    while origin is not None and id(origin) not in seen:
        seen.add(id(origin))
        said[1:], origin = [_said(origin)], origin.__cause__  # the first of a chain is where it began
    return _because(said[0], said[1] if len(said) > 1 else None)


def one_line(text: str) -> str:
    """Without control characters and runs of blanks: what a terminal or a condition can show."""
    return " ".join(_CONTROL.sub(" ", _ESCAPES.sub("", text)).split())


_ESCAPES: Final = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|[@-Z\\-_])")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]+")
#: What stands before each line of a rank's output, and inside an exception group.
_PREFIX: Final = re.compile(r"^(?:\[\w*rank\d+\]:? ?|\s*\| ?)+")


def _plain(line: str) -> str:
    line = _ESCAPES.sub("", line).rstrip("\r").rpartition("\r")[2]  # of a progress bar what it showed last
    return _PREFIX.sub("", line)


def _said(error: BaseException) -> str:
    try:
        text = str.__getitem__(str(error), slice(16 * MAX_LINE))
    except BaseException:  # an author's `__str__` may raise, exit, or give no str
        text = "(its message cannot be shown)"
    first = next((line for line in text.splitlines() if line.strip()), "")
    name = type(error).__name__
    return f"{name}: {first[:MAX_LINE]}" if first else name


def _because(said: str, origin: str | None) -> str:
    """A message that repeats what it was raised from needs no second telling."""
    if origin is None or origin in said or origin.partition(": ")[2] in said.partition(": ")[2]:
        return said
    return f"{said} (because of {origin})"


# --- marks of a crash, in order ----------------------------------------------------------------------------------

_TRACEBACK: Final = "Traceback (most recent call last):"
#: Before tracebacks that Python prints and goes on from.
_SURVIVED: Final = ("Exception ignored ", "Exception in thread ", "Task exception was never retrieved")
_CHAINED: Final = "The above exception was the direct cause of the following exception:"
_FRAME: Final = re.compile(r'^ *File "[^"]*", line \d+(?:, in |$)')
_RAISED: Final = re.compile(r"^[A-Za-z_][\w.<>]*(?::|$)")
_MEMBER: Final = re.compile(r"^ *[-+]+ \d+ -+$")  # of an exception group
_FATAL: Final = re.compile(r"^Fatal Python error: ")
_STACK: Final = re.compile(r'^ *File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>.*)')  # faulthandler's
_THROWN: Final = re.compile(r"terminate called (?:after throwing an instance of '(?P<type>[^']*)'|without|recursively)")
_WHAT: Final = re.compile(r"^ *what\(\): *(.*)")
_ABORTED: Final = re.compile(
    r"Assertion .* failed|^(?:double free|free\(\): |malloc\(\): |realloc\(\): |munmap_chunk\(\)|corrupted )|"
    r"stack smashing detected|buffer overflow detected|pure virtual method called|^F\d{4} |Check failed: "
)
_PANIC: Final = re.compile(r"^thread '[^']*' .*panicked at (?P<where>.*):$")
_PANIC_GO: Final = re.compile(r"^(?:panic|fatal error): ")
_ERROR: Final = re.compile(
    r"\b(?:\w*error|\w*exception|fatal|fail(?:ed|ure)?|cannot|can't|could not|killed|denied|refused|not found|"
    r"no such|no module)\b",
    re.IGNORECASE,
)
_WRAPPED: Final = re.compile(r"(?:error during container init|unable to start container process): ")
_ERROR_LEVELS: Final = ("error", "critical", "fatal")


def _marks(lines: Sequence[str]) -> Iterator[str]:
    at, before = 0, ""
    while at < len(lines):
        line = lines[at]
        if _is_traceback(line):
            ignored = at > 0 and lines[at - 1].lstrip().startswith(_SURVIVED)
            at, said = _raised_below(lines, at)
            if said and not ignored:
                chained = any(each.strip() == _CHAINED for each in lines[max(0, at - 60) : at]) and before
                before = _because(said, before.partition(" (because of ")[0] if chained else None)
                yield before
            continue
        if _MEMBER.match(line) and at + 1 < len(lines) and _RAISED.match(lines[at + 1]):
            yield _with_message(lines, at + 1)
        elif _FATAL.match(line):
            yield _fatal(lines, at)
        elif _THROWN.search(line):
            yield _thrown(lines, at)
        elif _ABORTED.search(line) or _PANIC_GO.match(line):
            yield line
        elif panic := _PANIC.match(line):
            below = lines[at + 1].strip() if at + 1 < len(lines) else ""
            yield f"panicked: {below} ({panic['where']})"
        at += 1


def _is_traceback(line: str) -> bool:
    """Its head, or where the log's end begins below the head, a frame."""
    return line.lstrip(" +").startswith(_TRACEBACK) or bool(_FRAME.match(line))


def _raised_below(lines: Sequence[str], at: int) -> tuple[int, str]:
    """The line after an exception's, and the exception: the first line below the frames that is indented less."""
    is_head = not _FRAME.match(lines[at])
    indent = _indent(lines[at]) if is_head else _indent(lines[at]) - 1
    for below in range(at + 1, len(lines)):
        line = lines[below]
        if line.strip() and _indent(line) <= indent and _RAISED.match(line.strip()):
            return below + 1, _with_message(lines, below)
    return len(lines), ""


def _with_message(lines: Sequence[str], at: int) -> str:
    """An exception whose message begins with a line break has it on the lines below."""
    line = lines[at].strip()
    if not line.endswith(":"):
        return line
    below = next((each.strip() for each in lines[at + 1 :] if each.strip()), "")
    return f"{line} {below}"


def _fatal(lines: Sequence[str], at: int) -> str:
    """faulthandler's head; why a program aborted itself stands above it, where it was stands below."""
    for above in range(at - 1, max(-1, at - 8), -1):
        if _THROWN.search(lines[above]):
            return _thrown(lines, above)
        if _ABORTED.search(lines[above]):
            return lines[above]
    current = next((n for n in range(at + 1, len(lines)) if lines[n].startswith("Current thread")), at)
    stack = next((found for line in lines[current + 1 :] if (found := _STACK.match(line))), None)
    if stack is None:
        return lines[at]
    return f"{lines[at]} in {stack['name']} ({stack['file'].rpartition('/')[2]}:{stack['line']})"


def _thrown(lines: Sequence[str], at: int) -> str:
    """A C++ exception that nobody caught: its type, and what it says on the next line."""
    thrown = _THROWN.search(lines[at])
    kind = thrown["type"] if thrown else None
    said = next((what[1] for line in lines[at + 1 : at + 3] if (what := _WHAT.match(line))), None)
    return ": ".join(filter(None, (kind or lines[at].strip(), said)))


def _told(line: str) -> tuple[str, bool]:
    """An output line, and whether it speaks of an error; a structured log line says so by its level."""
    try:
        entry = json.loads(line) if line.startswith("{") else None
    except (ValueError, RecursionError):
        entry = None
    if not isinstance(entry, dict):
        return line, bool(_ERROR.search(line))
    words = [entry.get(key) for key in ("traceback", "exception", "exc_info", "message", "msg", "event")]
    said = next((word for word in words if isinstance(word, str) and word.strip()), line)
    return (cause(said) if "\n" in said else said), str(entry.get("level", "")).lower() in _ERROR_LEVELS


def _unwrapped(line: str) -> str:
    """A container runtime wraps what went wrong into each of its layers."""
    return _WRAPPED.split(line)[-1].removesuffix(": unknown")


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _cut(text: bytes, size: int) -> bytes:
    if len(text) <= size:
        return text
    return text[: size - 3].decode(errors="ignore").encode() + "…".encode()
