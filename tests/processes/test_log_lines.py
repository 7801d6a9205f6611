"""No text that is logged for people begins a line of the log, whatever an author's exception says."""

from __future__ import annotations

import logging
import sys

from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.processes import logs

FORM = logs.TextFormatter("%(levelname)s %(name)s: %(message)s")
FORGED = "INFO stage: all is well"


def formatted(text: str, error: BaseException | None = None) -> str:
    info = None if error is None else (type(error), error, error.__traceback__)
    return FORM.format(logging.LogRecord("stage", logging.ERROR, __file__, 1, "it failed: %s", (text,), info))


def raised(text: str) -> ValueError:
    try:
        try:
            raise KeyError(text)
        except KeyError as inner:
            inner.add_note(text)
            raise ValueError(text) from inner
    except ValueError as error:
        return error


def test_further_lines_of_a_message_are_indented_and_control_characters_escaped() -> None:
    assert formatted("no\n" + FORGED) == f"ERROR stage: it failed: no\n    {FORGED}"
    assert formatted("a\rb\x1b[2Jc\td\u2028e\x00\x85") == "ERROR stage: it failed: a\\rb\\x1b[2Jc\td\\u2028e\\x00\\x85"


def test_a_traceback_begins_no_line_with_the_text_of_an_exception() -> None:
    lines = formatted("x", raised("no\n" + FORGED)).splitlines()
    assert [line for line in lines if FORGED in line and not line.startswith(("    ", "KeyError: "))] == []
    assert lines[1] == "Traceback (most recent call last):"
    assert "ValueError: no" in lines


@given(st.text(st.sampled_from("ab:\n\r\x0b\x0c\x1b\x1c\x85\u2028\u2029")))
def test_only_the_first_line_of_any_record_begins_at_its_margin(text: str) -> None:
    assert all(line.startswith("    ") for line in formatted(text).splitlines()[1:])


def test_a_record_without_an_exception_s_value_is_formatted() -> None:
    record = logging.LogRecord("stage", logging.ERROR, __file__, 1, "x", (), sys.exc_info())
    assert FORM.format(record).splitlines()[0] == "ERROR stage: x"
