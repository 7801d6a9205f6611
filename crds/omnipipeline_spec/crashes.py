"""Termination messages, and finding the cause of an exit in a program's output.

Here: the form of a termination message (written by the runtime and the prefetch Job, read by the operator), and the
rule that finds the cause in the last output of any program. Not here: writing files, reading pods. Called by the
runtime's ``processes`` and the operator's ``changes``.

Our termination messages are the cause in one line, a line `RULE`, and details. A container that could not write one (a
foreign image, a killed process) has the end of its log instead (the kubelet's policy FallbackToLogsOnError). The cause
is found there by the crash output of language runtimes.
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
#: Exit code of a program that was ended because it made no progress during its start.
EXIT_HUNG: Final = 4


def message(cause: str, details: str = "") -> bytes:
    """A termination message of at most `MAX_BYTES` of UTF-8: the cause, then the end of the details."""
    first = _cut(one_line(cause).encode(errors="replace"), MAX_CAUSE)
    between = f"\n{RULE}\n".encode()
    rest = details.strip("\n").encode(errors="replace")
    room = MAX_BYTES - len(first) - len(between)
    if len(rest) > room:
        mark = "…\n".encode()
        rest = mark + rest[len(mark) - room :].decode(errors="ignore").encode()
    return first + between + rest


def cause(text: str) -> str:
    """The line of a termination message or log with the cause of the program's end.

    The last crash in a log counts: the program survived the others. Empty for an empty text.
    """
    first, _, rest = text.partition("\n")
    if rest.partition("\n")[0] == RULE:
        return one_line(first)
    lines = [_plain(line[:MAX_LINE]) for line in text.splitlines()]
    marks = list(_marks(lines))
    if marks:
        return one_line(marks[-1])
    texts = [_text_of(line) for line in lines if line.strip()]
    wrong = [line for line, is_error in texts if is_error]
    return one_line(_unwrapped((wrong or [line for line, _ in texts] or [""])[-1]))


def is_fatal(line: str) -> bool:
    """Whether a line starts the output of a fatal crash; the lines before it do not explain the exit."""
    line = _plain(line[:MAX_LINE])
    return bool(_FATAL.match(line) or _THROWN.search(line) or _ABORTED.search(line) or _PANIC_GO.match(line))


def raised(error: BaseException) -> str:
    """An exception in one line: its type, the first line of its message, and its first cause."""
    if isinstance(error, BaseExceptionGroup):
        return raised(error.exceptions[0])  # the group's own message only counts its members
    chain = [_summary(error)]
    origin, seen = error.__cause__, {id(error)}
    while origin is not None and id(origin) not in seen:
        seen.add(id(origin))
        chain[1:], origin = [_summary(origin)], origin.__cause__  # only the first of the chain is kept
    return _because(chain[0], chain[1] if len(chain) > 1 else None)


def one_line(text: str) -> str:
    """The text without control characters and repeated blanks, for terminals and conditions."""
    return " ".join(_CONTROL.sub(" ", _ESCAPES.sub("", text)).split())


_ESCAPES: Final = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|[@-Z\\-_])")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]+")
#: Prefix of the lines of a rank's output, and of an exception group's.
_PREFIX: Final = re.compile(r"^(?:\[\w*rank\d+\]:? ?|\s*\| ?)+")


def _plain(line: str) -> str:
    line = _ESCAPES.sub("", line).rstrip("\r").rpartition("\r")[2]  # the last state of a progress bar
    return _PREFIX.sub("", line)


def _summary(error: BaseException) -> str:
    try:
        text = str.__getitem__(str(error), slice(16 * MAX_LINE))
    except BaseException:  # an author's `__str__` may raise, exit, or give no str
        text = "(its message cannot be shown)"
    first = next((line for line in text.splitlines() if line.strip()), "")
    name = type(error).__name__
    return f"{name}: {first[:MAX_LINE]}" if first else name


def _because(summary: str, origin: str | None) -> str:
    """The message with its cause, unless the message already contains it."""
    if origin is None or origin in summary or origin.partition(": ")[2] in summary.partition(": ")[2]:
        return summary
    return f"{summary} (because of {origin})"


# --- marks of a crash, in order ----------------------------------------------------------------------------------

_TRACEBACK: Final = "Traceback (most recent call last):"
#: Lines before tracebacks that do not end the program.
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
            at, summary = _raised_below(lines, at)
            if summary and not ignored:
                chained = any(each.strip() == _CHAINED for each in lines[max(0, at - 60) : at]) and before
                before = _because(summary, before.partition(" (because of ")[0] if chained else None)
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
    """The first line of a traceback, or a frame when the text starts inside one."""
    return line.lstrip(" +").startswith(_TRACEBACK) or bool(_FRAME.match(line))


def _raised_below(lines: Sequence[str], at: int) -> tuple[int, str]:
    """The index after the exception's line, and the exception: the first less indented line below the frames."""
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
    """faulthandler's first line with the location from the stack below it, or the abort's own message above it."""
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
    """An uncaught C++ exception: its type, and its message from the next line."""
    thrown = _THROWN.search(lines[at])
    kind = thrown["type"] if thrown else None
    summary = next((what[1] for line in lines[at + 1 : at + 3] if (what := _WHAT.match(line))), None)
    return ": ".join(filter(None, (kind or lines[at].strip(), summary)))


def _text_of(line: str) -> tuple[str, bool]:
    """The text of an output line, and whether it reports an error; for a structured log line the level decides."""
    try:
        entry = json.loads(line) if line.startswith("{") else None
    except (ValueError, RecursionError):
        entry = None
    if not isinstance(entry, dict):
        return line, bool(_ERROR.search(line))
    words = [entry.get(key) for key in ("traceback", "exception", "exc_info", "message", "msg", "event")]
    summary = next((word for word in words if isinstance(word, str) and word.strip()), line)
    return (cause(summary) if "\n" in summary else summary), str(entry.get("level", "")).lower() in _ERROR_LEVELS


def _unwrapped(line: str) -> str:
    """The innermost error: a container runtime adds a prefix per layer."""
    return _WRAPPED.split(line)[-1].removesuffix(": unknown")


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _cut(text: bytes, size: int) -> bytes:
    if len(text) <= size:
        return text
    return text[: size - 3].decode(errors="ignore").encode() + "…".encode()
