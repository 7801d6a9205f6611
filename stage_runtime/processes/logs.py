"""How processes log: one line a record, for people or as JSON for collectors."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from stage_runtime.errors import TRACEBACK_LIMIT, format_traceback, safe_str

#: What every record has; whatever else is in one came by ``extra``.
_COMMON = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
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
    """A line for people, and below it a traceback that begins with the author's own code."""

    def formatException(self, ei: Any) -> str:
        return format_traceback(ei[1]).rstrip() if ei[1] is not None else super().formatException(ei)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """What was given as ``extra``."""
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


def configure(log_format: str, *, name: str) -> None:
    """Send the root logger's records to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter(name))
    else:
        handler.setFormatter(TextFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
