"""How processes log: one line a record, for people or as JSON for collectors.

Authors' records go by the root logger, which authors may configure as they like. The records of the runtime, and of the
libraries that its I/O loop logs by, have loggers and a handler of their own: nothing that authors do to logging (their
filters and handlers, `dictConfig` with its defaults, `logging.disable`) silences them or raises in the runtime's code.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import time
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from stage_runtime import diagnostics
from stage_runtime.errors import TRACEBACK_LIMIT, format_traceback, safe_str

#: Attributes that every record has; all others came by ``extra``.
_COMMON = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_CONTROL: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")  # all but tab and newline
MAX_NAME = 256  # characters of a field's name
_FACTS = "facts"  #: An ``extra`` of this name holds several fields.


class JsonFormatter(logging.Formatter):
    """One JSON object a line: what every line has, then the fields of ``extra`` under their own names."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "process": self._name,
            "logger": record.name,
            "message": safe_str(record.getMessage(), limit=TRACEBACK_LIMIT),
        }
        if record.exc_info and record.exc_info[1] is not None:
            entry["traceback"] = format_traceback(record.exc_info[1])
        for given, value in _fields(record).items():
            name = safe_str(given, limit=MAX_NAME)
            entry[f"extra.{name}" if name in entry else name] = _plain(value)
        return msgspec.json.encode(entry).decode()


class TextFormatter(logging.Formatter):
    """A line for people, and below it a traceback that begins with the author's own code.

    No text that is logged begins a line: what follows a line break in it is indented.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        return indented(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        if ei[1] is None:
            return super().formatException(ei)
        return _escaped(format_traceback(ei[1], quoted=indented)).rstrip()


def indented(text: str) -> str:
    """Its further lines indented, its other control characters escaped."""
    return _escaped(text.replace("\n", "\n    "))


def _escaped(text: str) -> str:
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """The fields given as ``extra``."""
    given = {name: value for name, value in vars(record).items() if name not in _COMMON}
    facts = given.pop(_FACTS, None)
    return {**given, **facts} if isinstance(facts, Mapping) else given | ({} if facts is None else {_FACTS: facts})


def _plain(value: Any) -> Any:
    """A value as JSON has it, else its text; no value makes a log line fail."""
    if type(value) is str:
        return safe_str(value, limit=TRACEBACK_LIMIT)
    try:
        return msgspec.json.decode(msgspec.json.encode(value, enc_hook=safe_str))
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError):
        return safe_str(value, how=repr)


class RuntimeLogger(logging.Logger):
    """A logger whose calls never raise, and that only its own level and filters silence."""

    @property
    def disabled(self) -> bool:
        """Never: ``disable_existing_loggers``, a default of `logging.config`, means the author's loggers."""
        return False

    @disabled.setter
    def disabled(self, value: bool) -> None:
        pass

    def isEnabledFor(self, level: int) -> bool:
        return level >= self.getEffectiveLevel()

    def makeRecord(
        self,
        name: str,
        level: int,
        fn: str,
        lno: int,
        msg: object,
        args: Any,
        exc_info: Any,
        func: str | None = None,
        extra: Mapping[str, object] | None = None,
        sinfo: str | None = None,
    ) -> logging.LogRecord:
        """The record that Python makes by default: an author's `logging.setLogRecordFactory` may raise."""
        record = logging.LogRecord(name, level, fn, lno, msg, args, exc_info, func, sinfo)
        vars(record).update(extra or {})
        return record

    def handle(self, record: logging.LogRecord) -> None:
        wanted: Any = True
        with contextlib.suppress(BaseException):
            wanted = self.filter(record)
        if wanted:
            with contextlib.suppress(BaseException):
                self.callHandlers(record)


class RuntimeHandler(logging.Handler):
    """Writes to `diagnostics`."""

    def __init__(self) -> None:
        super().__init__()
        diagnostics.descriptor()  # before authors' code runs

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception:
            text = f"{record.levelname} {record.name}: {safe_str(record.msg, limit=TRACEBACK_LIMIT)}"
        diagnostics.write_line(text)


#: The parents of loggers that the runtime's own threads log by; the rest of them is left to authors.
RUNTIME: Final = ("stage_runtime", "uvicorn", "asyncio", "concurrent.futures")


def configure(log_format: str, *, name: str, level: str = "info") -> None:
    """Send all records to stderr: authors' by the root logger, the runtime's by its own. level: the least of both."""
    least = logging.getLevelNamesMapping()[level.upper()]
    formatter: logging.Formatter = TextFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")
    if log_format == "json":
        formatter = JsonFormatter(name)
    authors, own = logging.StreamHandler(sys.stderr), RuntimeHandler()
    authors.setFormatter(formatter)
    own.setFormatter(formatter)
    logging.basicConfig(level=least, handlers=[authors], force=True)
    for parent in RUNTIME:
        logger = logging.getLogger(parent)
        logger.handlers, logger.propagate = [own], False
        # uvicorn says that it starts and stops, asyncio which selector it uses
        logger.setLevel(
            max(least, logging.WARNING if parent == "uvicorn" else logging.INFO if parent == "asyncio" else 0)
        )
    protect()


def protect() -> None:
    """Make the runtime's loggers, as far as there are any, `RuntimeLogger`s. Again once more modules are imported."""
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and any(name == one or name.startswith(f"{one}.") for one in RUNTIME):
            with contextlib.suppress(TypeError):  # made by an author's `logging.setLoggerClass`
                logger.__class__ = RuntimeLogger
