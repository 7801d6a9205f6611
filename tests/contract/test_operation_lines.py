"""How commands ask for an operation of engines, and show what came of it."""

from __future__ import annotations

import pytest

from omnipipeline_spec import operations


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no JSON"),
        ("[1]", "a JSON object is expected"),
        ("null", "a JSON object is expected"),
        ('{"a": NaN}', "NaN is not a number"),
        ('{"a": -Infinity}', "-Infinity is not a number"),
        ('{"a": 1e999}', "no JSON"),
        ('{"a": "\\ud800"}', "surrogates"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "no JSON"),
        ('{"a": ' + "9" * 5000 + "}", "no JSON"),
    ],
)
def test_arguments_that_no_request_can_carry_are_refused_by_name(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        operations.arguments(text)


def test_each_process_has_one_line_whatever_it_has_answered() -> None:
    facts = {"stage": "s", "group": "g", "instance": "i"}
    answer = {
        "results": [
            {**facts, "rank": 0, "value": {"a": "b\n"}, "error": None},
            {**facts, "rank": 1, "value": None, "error": "no\x1b[2J\nmemory\x9b"},
        ]
    }
    first, second = operations.lines(answer)
    assert (first.text, first.failed) == ('g i: {"a": "b\\n"}', False)
    assert second.failed and second.text.startswith("g i rank 1: no") and second.text.isprintable()
