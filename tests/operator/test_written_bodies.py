"""Bodies that the API server reads as YAML, and the reasons of conditions: pure; a real server is asked elsewhere."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from omnipipeline_operator.changes import conditions
from omnipipeline_operator.cluster import bodies

texts = st.text(st.characters(exclude_categories=()), max_size=30)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(-1e6, 1e6) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts | st.just("k" * 1500), inner, max_size=3),
    max_leaves=8,
)


def whole(value: Any) -> Any:
    """The value as any writer of UTF-8 has to send it: half of a surrogate pair is U+FFFD."""
    if isinstance(value, dict):
        return {whole(key): whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [whole(item) for item in value]
    return "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in value) if isinstance(value, str) else value


@given(values)
def test_a_reader_of_yaml_gets_the_value_of_any_body(value: Any) -> None:
    text = bodies.encode(value)
    text.encode()
    if not bodies._has_long_key(value):
        assert json.loads(text) == whole(value)
    strings = yaml.load(text, yaml.BaseLoader)  # what a scalar other than a text means differs between readers
    assert strings == yaml.load(yaml.safe_dump(whole(value), allow_unicode=False), yaml.BaseLoader) or _numbers(value)


def _numbers(value: Any) -> bool:
    """Whether it holds what PyYAML writes otherwise than JSON: numbers, booleans, null."""
    if isinstance(value, dict):
        return any(map(_numbers, value.values()))
    return any(map(_numbers, value)) if isinstance(value, list) else not isinstance(value, str)


@pytest.mark.parametrize(
    "given, expected",
    [
        ("CrashLoopBackOff", "CrashLoopBackOff"),
        ("Failed 🙂 mount", "Failed___mount"),
        ("9lives", "Unknown"),
        ("", "Unknown"),
        ("A" * 400, "A" * 128),
    ],
)
def test_a_reason_is_one_word_that_the_api_server_takes(given: str, expected: str) -> None:
    assert conditions.condition("Ready", False, given).reason == expected
