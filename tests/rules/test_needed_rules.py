"""The stages that a request still needs."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from stage_runtime.rules.graph import needed
from tests.thoroughness import examples

LINE = [("take", "think", "normal"), ("think", "speak", "normal")]
TALKER = [("take", "think", "normal"), ("think", "speak", "normal"), ("think", "speak", "stream")]
FAN = [("take", "left", "normal"), ("take", "right", "normal"), ("left", "join", "normal"), ("right", "join", "normal")]


def test_what_leads_to_a_terminal_is_needed_until_that_has_begun() -> None:
    assert needed.stages(LINE, {"speak"}, ()) == {"take", "think", "speak"}
    assert needed.stages(LINE, {"speak"}, {"speak"}) == {"speak"}
    assert needed.stages(LINE, (), {"speak"}) == set()


def test_a_source_that_streams_is_needed_to_the_end() -> None:
    assert needed.stages(TALKER, {"speak"}, {"speak"}) == {"take", "think", "speak"}


def test_a_source_whose_stream_has_come_to_its_end_is_needed_no_longer() -> None:
    assert needed.stages(TALKER, {"speak"}, {"speak"}, {"think"}) == {"think", "speak"}
    assert needed.stages(TALKER, {"speak"}, (), {"speak"}) == {"speak"}
    assert needed.stages([*TALKER, ("think", "write", "normal")], {"speak", "write"}, (), {"speak"}) == {
        *("take", "think", "speak", "write")
    }


def test_a_join_that_has_begun_needs_none_of_its_sources() -> None:
    assert needed.stages(FAN, {"join"}, {"join"}) == {"join"}
    assert needed.stages(FAN, {"join"}, ()) == {"take", "left", "right", "join"}


def test_of_two_terminals_the_one_that_has_not_begun_keeps_its_sources() -> None:
    edges = [*LINE, ("think", "write", "normal")]
    assert needed.stages(edges, {"speak", "write"}, {"speak"}) == {"take", "think", "speak", "write"}
    assert needed.stages(edges, {"speak"}, {"speak", "write"}) == {"speak"}


NAMES = st.sampled_from("abcdef")
EDGES = st.lists(st.tuples(NAMES, NAMES, st.sampled_from(["normal", "stream"])).filter(lambda one: one[0] < one[1]))


@settings(max_examples=examples(200))
@given(EDGES, st.sets(NAMES), st.sets(NAMES), st.sets(NAMES))
def test_whatever_begins_makes_nothing_needed_and_all_terminals_waited_for_are(
    edges: list[tuple[str, str, str]], waiting: set[str], begun: set[str], supplied: set[str]
) -> None:
    found = needed.stages(edges, waiting, begun, supplied)
    assert waiting <= found <= needed.stages(edges, waiting, begun) <= needed.stages(edges, waiting, ())
    for source, target, kind in edges:
        if target in found and target not in supplied and (kind == "stream" or target not in begun):
            assert source in found
