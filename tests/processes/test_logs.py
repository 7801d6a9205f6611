"""Log lines: fields reach collectors, tracebacks begin with the author's code, and nothing that is logged can fail."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stage_runtime.processes import logs


def line(message: str, *arguments: Any, **more: Any) -> dict[str, Any]:
    """The JSON object that a record becomes."""
    logger = logging.Logger("stage.talker")
    seen: list[str] = []

    class Collecting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(self.format(record))

    handler = Collecting()
    handler.setFormatter(logs.JsonFormatter("voice"))
    logger.addHandler(handler)
    logger.info(message, *arguments, **more)
    (text,) = seen
    assert "\n" not in text
    found: dict[str, Any] = json.loads(text)
    found.pop("time")
    return found


COMMON = {"level": "info", "process": "voice", "logger": "stage.talker", "message": "done"}


def test_fields_of_extra_stand_beside_the_message() -> None:
    extra = {"request_id": "r1", "tokens": 7, "shape": (2, 3), "ratio": 0.5, "none": None, "nested": {"a": [1]}}
    assert line("done", extra=extra) == COMMON | extra | {"shape": [2, 3]}


def test_the_facts_of_a_request_are_fields_of_their_own() -> None:
    facts = {"request_id": "r1", "status": 200, "first_byte_ms": None}
    assert line("done", extra={"facts": facts}) == COMMON | facts
    assert line("done", extra={"facts": 3}) == COMMON | {"facts": 3}


def test_a_field_never_replaces_what_every_line_has() -> None:
    facts = {"process": 3, "message": "x", 7: "seven"}
    entry = line("done", extra={"level": "mine", "logger": "x", "time": "now", "traceback": "none", "facts": facts})
    assert entry == COMMON | {
        "extra.level": "mine",
        "extra.logger": "x",
        "extra.time": "now",
        "traceback": "none",
        "extra.process": 3,
        "extra.message": "x",
        "7": "seven",
    }


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no")

    __repr__ = __str__


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    "value", [Unprintable(), LOOP, float("nan"), 1 << 80, "\ud800", b"\xff", {1: 2}, {(1, 2): 3}, object]
)
def test_whatever_a_field_holds_the_line_is_json(value: Any) -> None:
    entry = line("done", extra={"value": value, "inside": {"value": value}, "after": 1})
    assert entry["after"] == 1
    assert entry.keys() == COMMON.keys() | {"value", "inside", "after"}


def test_a_message_with_broken_text_and_an_exception_are_one_line_too() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        entry = line("a\nb \ud800", exc_info=True)
    assert entry["message"] == "a\nb \\ud800"
    assert entry["traceback"].endswith("ValueError: two\nlines\n")


def test_without_an_exception_exc_info_adds_nothing() -> None:
    assert sys.exc_info() == (None, None, None)
    assert line("done", exc_info=True) == COMMON


#: Changes of authors' code to logging, in factories or for a request.
DONE_TO_LOGGING = {
    "a filter of the handler": "logging.getLogger().handlers[0].addFilter(raising)",
    "a filter of the root": "logging.getLogger().addFilter(raising)",
    "a handler of the root": "logging.getLogger().handlers[0].emit = raising",
    "a filter of ours": "logging.getLogger('stage_runtime.stage').addFilter(raising)",
    "a handler of ours": "logging.getLogger('stage_runtime').addHandler(Raising())",
    "a record factory": "logging.setLogRecordFactory(raising)",
    "dictConfig": "logging.config.dictConfig({'version': 1, 'root': {'level': 'ERROR', 'handlers': []}})",
    "fileConfig": "logging.config.fileConfig(io.StringIO(FILE))",
    "disable": "logging.disable(logging.CRITICAL)",
    "shutdown": "logging.shutdown()",
    "stderr closed": "sys.stderr.close()",
    "descriptor closed": "os.close(2)",
}
PROGRAM = """
import io, logging, logging.config, os, sys
from stage_runtime.processes import logs

FILE = '''
[loggers]
keys=root
[handlers]
keys=
[formatters]
keys=
[logger_root]
level=ERROR
handlers=
'''

def raising(*args, **more):
    raise SystemExit("of the author's")

class Raising(logging.Handler):
    emit = raising

ours = [logging.getLogger(name) for name in ("stage_runtime.stage", "uvicorn.error", "asyncio", "concurrent.futures")]
logs.configure("text", name="voice")
%s
for logger in ours:
    logger.warning("that of %%s", logger.name)
logging.getLogger("stage_runtime.stage").error("failed", exc_info=ValueError("the cause"))
print("went on")
"""


@pytest.mark.parametrize("done", DONE_TO_LOGGING)
def test_nothing_that_authors_do_to_logging_reaches_the_records_of_the_runtime(done: str, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM % DONE_TO_LOGGING[done])
    ended = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=False)
    assert ended.stdout == "went on\n", ended.stderr
    reports = [line.partition(" ")[2] for line in ended.stderr.splitlines() if " that of " in line]
    assert reports == [
        "WARNING stage_runtime.stage: that of stage_runtime.stage",
        "WARNING uvicorn.error: that of uvicorn.error",
        "WARNING asyncio: that of asyncio",
        "WARNING concurrent.futures: that of concurrent.futures",
    ]
    assert "ERROR   stage_runtime.stage: failed\nValueError: the cause\n" in ended.stderr


def test_authors_records_go_by_the_root_logger_and_the_runtimes_do_not(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(
        "import logging\n"
        "from stage_runtime.processes import logs\n"
        "logs.configure('text', name='voice')\n"
        "logging.getLogger('stage.voice').info('by default')\n"
        "logging.getLogger().handlers[0].setFormatter(logging.Formatter('mine: %(message)s'))\n"
        "logging.getLogger('stage.voice').info('as I like it')\n"
        "logging.getLogger('stage_runtime.stage').info('as ever')\n"
        "logging.getLogger('stage_runtime.stage').setLevel(logging.ERROR)\n"
        "logging.getLogger('stage_runtime.stage').info('not asked for')\n"
    )
    ended = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=True)
    default, mine, ours = ended.stderr.splitlines()
    assert default.endswith("INFO    stage.voice: by default")
    assert mine == "mine: as I like it"
    assert ours.endswith("INFO    stage_runtime.stage: as ever")
