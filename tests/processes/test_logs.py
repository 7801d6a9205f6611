"""Log lines: fields reach collectors, tracebacks begin with the author's code, and nothing that is logged can fail."""

from __future__ import annotations

import json
import logging
import sys
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
    said = line("done", extra={"level": "mine", "logger": "x", "time": "now", "traceback": "none", "facts": facts})
    assert said == COMMON | {
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
    said = line("done", extra={"value": value, "inside": {"value": value}, "after": 1})
    assert said["after"] == 1
    assert said.keys() == COMMON.keys() | {"value", "inside", "after"}


def test_a_message_with_broken_text_and_an_exception_are_one_line_too() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        said = line("a\nb \ud800", exc_info=True)
    assert said["message"] == "a\nb \\ud800"
    assert said["traceback"].endswith("ValueError: two\nlines\n")


def test_without_an_exception_exc_info_adds_nothing() -> None:
    assert sys.exc_info() == (None, None, None)
    assert line("done", exc_info=True) == COMMON
