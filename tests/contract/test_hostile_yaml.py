"""Reading a YAML text ends soon, whatever it holds: in a document, or in one error that names the line."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnipipeline_spec import loading
from omnipipeline_spec.loading import goyaml
from omnipipeline_spec.types.canonical import canonical
from omnipipeline_spec.types.errors import SpecError, UnreadableSpec
from tests.thoroughness import examples

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FILES = sorted(path.read_bytes() for path in EXAMPLES.rglob("*.yaml") if path.stat().st_size < 4000)


class _TooLongError(Exception):
    """More calls were made than a text of this size may cost."""


@contextlib.contextmanager
def at_most(calls: int) -> Iterator[None]:
    """Ends what makes more calls of functions; unlike a timeout, the same on every machine."""
    left = calls

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            sys.setprofile(None)
            raise _TooLongError

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(before)


def chain(first: str, then: str, links: int) -> str:
    """``first``, and ``links`` values, each made of the one before."""
    lines = [f"a0: &a0 {first}"]
    return "\n".join([*lines, *(f"a{n}: &a{n} {then.replace('@', f'*a{n - 1}')}" for n in range(1, links + 1))])


@pytest.mark.proves("hostile-yaml")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (chain("{}", "{<<: [@, @]}", 40), "aliases expand the document beyond 200000 values"),
        (chain("{}", "{<<: @}", 500), "values are nested deeper than 128 levels"),
        (chain("{k: 1}", "{k: @}", 500), "line 1: values are nested deeper than 128 levels"),
        (chain("[1]", "[@]", 500), "line 1: values are nested deeper than 128 levels"),
        ('a: 1\nb: "\\U00110000"', "line 2: "),
        ('a: "\\UFFFFFFFF"', "line 1: "),
        (f"%YAML {'1' * 5000}.1\n---\na: 1", "line 1: "),
        (
            f"? {'k' * 1_000_000}\n: [{'1,' * 1000}]",
            "line 2: the paths of all values have more than 67108864 characters",
        ),
    ],
    ids=["merges", "merge chain", "map chain", "list chain", "escape", "large escape", "version", "long key"],
)
def test_a_small_text_cannot_hang_or_break_the_reader(text: str, message: str) -> None:
    with pytest.raises(UnreadableSpec) as raised, at_most(8_000_000):
        goyaml.documents(text, "f.yaml")
    assert str(raised.value).startswith("f.yaml, line ")
    assert message in str(raised.value)


def test_a_large_map_is_not_copied_for_each_map_that_is_merged_with_it() -> None:
    keys = ", ".join(f"k{n}: 1" for n in range(4_000))
    text = f"a: &a {{{keys}}}\nb: &b {{x: 2, k0: 2}}\nc: {{<<: [*a{', *b' * 4_000}]}}"
    (document,) = goyaml.documents(text, "f.yaml")
    assert len(document.value["c"]) == 4_001
    assert (document.value["c"]["k0"], document.value["c"]["x"]) == (1, 2)


def test_what_aliases_nest_as_deep_as_text_may_is_read() -> None:
    (document,) = goyaml.documents(chain("[1]", "[@]", 125), "f.yaml")
    assert document.value["a125"][0] == document.value["a124"]


PLAIN = st.sampled_from(
    ["1", "x", "~", "yes", '"\\ud800"', '"\\U00110000"', "'<<'", "0x1F", "1e999", ".inf", "", "!!str a"]
)
KEYS = st.sampled_from(["a", "b", "<<", "stages", "1", "~", "? [1]"])
ANCHORS = st.sampled_from(["x", "y", "z"])


def _nested(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    lists = st.lists(inner, max_size=4).map(lambda items: f"[{', '.join(items)}]")
    maps = st.lists(st.tuples(KEYS, inner), max_size=4).map(
        lambda items: f"{{{', '.join(f'{key}: {value}' for key, value in items)}}}"
    )
    return st.tuples(st.none() | ANCHORS, lists | maps).map(lambda one: f"&{one[0]} {one[1]}" if one[0] else one[1])


DOCUMENTS = st.lists(
    st.tuples(KEYS, st.recursive(PLAIN | ANCHORS.map(lambda name: f"*{name}"), _nested, max_leaves=12)), max_size=6
).map(lambda items: "\n".join(f"{key}: {value}" for key, value in items))


@settings(max_examples=examples(200))
@given(text=DOCUMENTS)
def test_documents_with_anchors_and_merges_are_read_or_refused(text: str) -> None:
    with at_most(200_000), contextlib.suppress(UnreadableSpec):
        for document in goyaml.documents(text, "f.yaml"):
            canonical(document.value)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    content = bytearray(draw(st.sampled_from(FILES)))
    for _ in range(draw(st.integers(1, 8))):
        at = draw(st.integers(0, len(content) - 1))
        size = draw(st.integers(0, 4))
        content[at : at + size] = draw(
            st.binary(max_size=4) | st.sampled_from([b"&a ", b"*a", b"<<: ", b"[", b"{", b"\n- "])
        )
    return bytes(content)


@pytest.mark.proves("hostile-yaml")
@settings(max_examples=examples(150))
@given(content=mutated())
def test_a_file_with_any_bytes_changed_is_loaded_or_refused(content: bytes) -> None:
    with at_most(3_000_000), contextlib.suppress(SpecError, UnicodeDecodeError):
        loading.loads(content.decode(), source="f.yaml")
