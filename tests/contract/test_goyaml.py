"""YAML as kubectl reads it: the table was taken from a real kubectl, and is compared with one where there is one."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from omnipipeline_spec.loading import goyaml
from omnipipeline_spec.types import canonical
from omnipipeline_spec.types.errors import UnreadableSpec
from tests.cluster_kit import Cluster

SCALARS: list[tuple[str, Any]] = [
    ("1e3", 1000),
    ("1E5", 100000),
    ("1e+3", 1000),
    ("0o17", 15),
    ("0O17", 15),
    ("017", 15),
    ("-017", -15),
    ("08", 8),
    ("0o8", "0o8"),
    ("0x1F", 31),
    ("-0x1F", -31),
    ("0x", "0x"),
    ("0b101", 5),
    ("-0b11", -3),
    ("0b12", "0b12"),
    ("1_000", 1000),
    ("1__0", 10),
    ("1_", 1),
    ("_1", "_1"),
    ("0x_1F", 31),
    ("1.0", 1),
    ("1.", 1),
    (".5", 0.5),
    (".5_0", 0.5),
    (".1_", ".1_"),
    ("._5", "._5"),
    ("+.5", 0.5),
    ("-0.0", 0),
    ("1e400", "1e400"),
    ("1e-400", 0),
    ("1e21", 1e21),
    ("9223372036854775807", 2**63 - 1),
    ("-9223372036854775808", -(2**63)),
    ("12:30:45", "12:30:45"),
    ("190:20:30", "190:20:30"),
    ("2001-01-01", "2001-01-01"),
    ("2001-01-01T00:00:00Z", "2001-01-01T00:00:00Z"),
    ("inf", "inf"),
    ("nan", "nan"),
    ("0x1p-2", "0x1p-2"),
    ("1,000", "1,000"),
    ("=", "="),
    ("1.5e3.2", "1.5e3.2"),
    ("--1", "--1"),
    *[(word, True) for word in ("y", "Y", "yes", "Yes", "YES", "on", "On", "ON", "true", "True", "TRUE")],
    *[(word, False) for word in ("n", "N", "no", "No", "NO", "off", "Off", "OFF", "false", "False", "FALSE")],
    *[(word, None) for word in ("~", "null", "Null", "NULL")],
    *[(word, word) for word in ("yEs", "tRue", "nULL", "oN", "none", "None", "nil")],
    ('"yes"', "yes"),
    ("'1'", "1"),
    ("!!str 1", "1"),
    ("!!str yes", "yes"),
    ("'a''b'", "a'b"),
    ('"\\u00e9\\x41"', "éA"),
]


@pytest.mark.parametrize(("text", "value"), SCALARS, ids=[text for text, _ in SCALARS])
def test_a_scalar_is_what_go_makes_of_it(text: str, value: Any) -> None:
    (document,) = goyaml.documents(f"v: [{text}]" if "," not in text else f"v:\n- {text}", "t")
    (read,) = canonical.canonical(document.value["v"])
    assert (type(read), read) == (type(value), value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2", "line 2: a is written twice"),
        ("a: {b: 1,\n  b: 2}", "line 2: a.b is written twice"),
        ("1: a\n'1': b", "line 2: 1 is written twice"),
        ("a: .inf", "line 1: .inf cannot be represented in JSON"),
        ("a: 9223372036854775808", "line 1: 9223372036854775808 is beyond 64 bits"),
        ("a: -9223372036854775809", "line 1: -9223372036854775809 is beyond 64 bits"),
        (f"a: {'9' * 6000}", f"line 1: {'9' * 66}… is beyond 64 bits"),
        (f"a: 0b{'1' * 6000}", "… is beyond 64 bits"),
        ("a: 1\nb: \0", "line 2: the character U+0000 is not allowed in YAML"),
        ("a: 1\nb: \x1b[31m", "line 2: the character U+001B is not allowed in YAML"),
        ("a: \ud800", "line 1: the character U+D800 is not allowed in YAML"),
        (f"a: 1\nb: {'[' * 5000}", "line 2: values are nested deeper than 128 levels"),
        (f"a: 1\nb: {'{a: ' * 5000}", "line 2: values are nested deeper than 128 levels"),
        ("\n".join(f"{' ' * level}a:" for level in range(2000)), "line 128: values are nested deeper than 128 levels"),
        ("- " * 2000, "line 1: values are nested deeper than 128 levels"),
        ("a: !foo 1", "line 1: the tag !foo is not supported"),
        ("a: !!binary aGk=", "the tag tag:yaml.org,2002:binary is not supported"),
        ("? [1]\n: 2", "a key must be a scalar"),
        ("~: 1", "a key must not be null"),
        ("0.5: 1", "the key 0.5 is a number with a fraction"),
        ("a: &x [*x]", "an alias contains itself"),
        ("a: [", "line 1: "),
        ("a: b: c", "line 1: mapping values are not allowed here"),
        ("a: *nowhere", "found undefined alias"),
        ("<<: 1", "<< takes a map"),
    ],
)
def test_what_could_be_read_in_two_ways_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(UnreadableSpec) as raised:
        goyaml.documents(text, "file.yaml")
    assert str(raised.value).startswith("file.yaml, line ")
    assert message in str(raised.value)


def test_a_small_text_cannot_grow_without_end() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    with pytest.raises(UnreadableSpec, match="aliases expand the document beyond"):
        goyaml.documents("\n".join(lines), "t")


def test_what_is_nested_as_deep_as_it_may_be_is_read_wherever_it_stands() -> None:
    deep = f"{'[' * 127}1{']' * 127}"
    first, second = goyaml.documents(f"{deep}\n---\n{deep}", "t")
    assert first.value == second.value


def test_keys_are_strings_and_merged_maps_yield_to_their_own() -> None:
    text = "base: &b {x: 1, z: 2}\nmore: &m {z: 5, w: 6}\nv: {<<: [*b, *m], x: 3, 1: a, yes: b, 1e3: c, 0x10: d}"
    (document,) = goyaml.documents(text, "t")
    assert document.value["v"] == {"x": 3, "z": 2, "w": 6, "1": "a", "true": "b", "1000": "c", "16": "d"}


def test_each_value_knows_its_line() -> None:
    (document,) = goyaml.documents("a: 1\nb:\n- c: 2\n  d: 3\n", "t")
    assert {path: document.lines[path] for path in ("a", "b", "b[0].c", "b[0].d")} == {
        "a": 1,
        "b": 2,
        "b[0].c": 3,
        "b[0].d": 4,
    }


def test_documents_are_read_one_by_one_and_empty_ones_left_out() -> None:
    assert [document.value for document in goyaml.documents("---\na: 1\n---\n---\nb: 2\n...\n", "t")] == [
        {"a": 1},
        {"b": 2},
    ]


@pytest.mark.cluster
def test_a_real_kubectl_reads_two_thousand_odd_scalars_alike(api_server: Cluster) -> None:
    order = random.Random(20260101)
    alphabet = "0011789._-+eExXoObBfFyYnNtT"
    drawn = {"".join(order.choice(alphabet) for _ in range(order.randint(1, 7))) for _ in range(2500)}
    texts = sorted(text for text in drawn if text not in ("-", "---", "..."))
    texts += [text for text, _ in SCALARS]
    text = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: x}\nx:\n" + "".join(f"- {each}\n" for each in texts)
    done = api_server.kubectl("annotate", "--local", "-f", "-", "-o", "json", "q=1", stdin=text)
    theirs = canonical.canonical(json.loads(done.stdout)["x"])
    (document,) = goyaml.documents(text, "t")
    ours = canonical.canonical(document.value["x"])
    assert [(t, o) for t, o, k in zip(texts, ours, theirs, strict=True) if (type(o), o) != (type(k), k)] == []
