"""Requests go where the beginnings of their prompts are cached, as far as load allows: a table, laws, a simulation."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage_runtime.rules.binding import prefixes
from stage_runtime.rules.binding.balancing import CROWDED_WORTH, GroupLoad, Load, least
from stage_runtime.rules.binding.membership_state import MembershipState
from stage_runtime.rules.binding.pools import Pool
from stage_runtime.rules.binding.prefixes import PIECE_NBYTES, PIECES_MOST, WHOLE_WORTH, Prefixes
from tests.rules.test_kv_pairs import REST, member, membership
from tests.thoroughness import examples

WORDS = "all that one conversation has said so far, and nobody else has; "


def chat(*turns: str, **params: Any) -> prefixes.Hashes:
    messages = [{"role": "user", "content": turn} for turn in turns]
    return prefixes.hashes("chat", {"messages": messages}, params)


def pool(**scores: float) -> Pool[Load]:
    made: Pool[Load] = Pool()
    for name, score in scores.items():
        made.add(name, Load(incarnation=name, score=score))
    return made


def test_a_longer_conversation_begins_with_the_hashes_of_the_shorter_one() -> None:
    short, long = chat(WORDS * 20), chat(WORDS * 20, WORDS * 9)
    assert len(short) == len(WORDS) * 20 // PIECE_NBYTES
    assert long[: len(short)] == short and len(long) > len(short)


@pytest.mark.parametrize(
    "other",
    [chat("x" + WORDS * 20), chat(WORDS * 20, tools=[{"type": "function"}]), prefixes.hashes("completion", WORDS, {})],
)
def test_prompts_that_begin_otherwise_share_no_hash(other: prefixes.Hashes) -> None:
    assert not set(other) & set(chat(WORDS * 20))


def test_hashes_are_bounded_and_short_prompts_have_none() -> None:
    assert chat("hello") == []
    assert len(chat(WORDS * 10_000)) == PIECES_MOST


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


DEEP: Any = "x"
for _ in range(5000):
    DEEP = [DEEP]
STRANGE = [None, 7, {"messages": [Unprintable()] * 99}, {"messages": "no list"}, "\ud800" * 999, b"x" * 99999, DEEP]
STRANGE += [10**5000, -(10**5000), float("nan")]


@pytest.mark.parametrize("inputs", STRANGE, ids=[str(number) for number in range(len(STRANGE))])
def test_inputs_of_any_kind_are_hashed_or_left_out(inputs: object) -> None:
    assert len(prefixes.hashes("pipeline", inputs, {})) <= PIECES_MOST


class Many(list[Any]):
    """Far more than a prompt has; whoever reads on to the end is told."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(100_000):
            yield self[0]
        raise AssertionError("all of it was read")


@pytest.mark.parametrize("empty", ["", b"", {}, []], ids=repr)
def test_a_million_empty_values_cost_the_coordinator_a_few_thousand(empty: object) -> None:
    assert len(prefixes.hashes("pipeline", Many([empty]), {})) == PIECES_MOST


@settings(max_examples=examples(100))
@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from("abcdefg")), max_size=60), st.integers(1, 30))
def test_what_is_remembered_is_bounded_and_hints_name_only_who_was_bound(
    bound: list[tuple[int, str]], most: int
) -> None:
    remembered, met = Prefixes(most), dict[int, set[str]]()
    for number, instance in bound:
        remembered.note(chat(str(number) + WORDS * 20), [instance])
        met.setdefault(number, set()).add(instance)
        assert len(remembered) <= most
    for number in range(10):
        hints = remembered.hints(chat(str(number) + WORDS * 20))
        assert hints.keys() <= met.get(number, set())
        assert len(hints) <= prefixes.HOLDERS_MOST


@pytest.mark.parametrize(
    ("scores", "hints", "chosen"),
    [
        ({"a": 0, "b": 0}, {"b": 1}, "b"),  # equal load: any prefix decides
        ({"a": 0, "b": 2}, {"b": WHOLE_WORTH}, "b"),
        ({"a": 0, "b": 2}, {"b": 1}, "a"),  # not worth two requests
        ({"a": 0, "b": 2.1}, {"b": 64}, "a"),  # overloaded
        ({"a": 8, "b": 12}, {"b": 64}, "b"),
        ({"a": 8, "b": 12.1}, {"b": 64}, "a"),
        ({"a": 0, "b": 9, "c": 1}, {"b": 64, "c": 8}, "c"),  # the next best
        ({"a": 0, "b": 1, "c": 1.5}, {"b": 8, "c": 9}, "c"),  # the longer one
        ({"a": 0, "b": 1}, {"gone": 64}, "a"),
        ({"a": 0, "b": 1}, {"b": 64, "a": 64}, "a"),  # of equals, the idler one
    ],
)
def test_the_longest_prefix_wins_unless_its_holder_is_overloaded(
    scores: dict[str, float], hints: dict[str, int], chosen: str
) -> None:
    found = pool(**scores)
    assert prefixes.kept(found, hints, (), least(found.items)).incarnation == chosen


NAMES = st.sampled_from("abcdef")


@settings(max_examples=examples(200))
@given(
    st.dictionaries(NAMES, st.floats(0, 50), min_size=1),
    st.dictionaries(NAMES, st.integers(1, PIECES_MOST)),
    st.sets(NAMES),
)
def test_a_hint_leads_to_an_instance_of_the_pool_that_may_be_used_and_is_not_overloaded(
    scores: dict[str, float], hints: dict[str, int], without: set[str]
) -> None:
    found = pool(**scores)
    chosen = least(found.items)
    given_ = prefixes.kept(found, hints, without, chosen)
    assert given_.incarnation in scores
    assert given_ is chosen or (given_.incarnation in hints and given_.incarnation not in without)
    assert given_.score <= 1.25 * chosen.score + 2


def test_both_sides_of_a_pair_are_chosen_by_prefix() -> None:
    others = [member(f"d{n}", "thinker") for n in range(3)] + [member(f"p{n}", "apart") for n in range(3)]
    made = membership(REST[0], REST[2], *others)
    for _ in range(2):
        bound = made.bind(hints={"d1": 9, "p2": 9})[1]
        assert (bound["think"], bound["think-prefill"]) == ("d1", "p2")
    assert made.bind(hints={"p2": 9}, exclude=frozenset(["p2"]))[1]["think-prefill"] != "p2"


def test_an_instance_without_free_blocks_counts_as_loaded() -> None:
    group, full, free = GroupLoad(), Load(incarnation="full", kv_blocks=100, kv_used=1.0), Load(incarnation="free")
    for _ in range(40):
        group.beat(full, 0, 0)
        group.beat(free, 0, 0)
    assert full.score == pytest.approx(CROWDED_WORTH, abs=0.01) and free.score == 0
    assert not full.at_rest  # it must be seen when it has room again
    full.kv_used = 0.85
    for _ in range(40):
        group.beat(full, 0, 0)
    assert full.score == 0 and full.at_rest


def caching() -> MembershipState:
    """Four instances of each side, all with caches."""
    sides = [member(f"{one}{n}", group) for one, group in (("d", "thinker"), ("p", "apart")) for n in range(4)]
    made = membership(REST[0], REST[2], *sides)
    for name in made.instances:
        if name[0] in "dp" and name not in ("d", "p"):
            made.beat(name, 0, 0, 1000, 0)
    return made


def test_where_prompts_go_matters_only_with_caches_on_two_instances_of_a_group() -> None:
    made = caching()
    assert made.caches_apart and made.caching("d0") and not made.caching("f") and not made.caching("gone")
    for name in [name for name in made.instances if name[0] in "dp" and not name.endswith("0")]:
        made.leave(name)
    assert not made.caches_apart


def share_of_hits(*, hinted: bool) -> tuple[float, Counter[str]]:
    """Turns of 40 conversations in random order, eight requests at once: how many meet the decode instance that has
    the turn before.
    """
    made, remembered, chance = caching(), Prefixes(), random.Random(7)
    said = {number: str(number) + WORDS * 20 for number in range(40)}
    last, under_way, hits, turns = dict[int, str](), list[dict[str, str]](), 0, 0
    used: Counter[str] = Counter()
    for _ in range(600):
        number = chance.randrange(40)
        prompt = chat(said[number])
        bound = made.bind(hints=remembered.hints(prompt) if hinted else {})[1]
        remembered.note(prompt, {one for one in bound.values() if made.caching(one)})
        if number in last:
            turns += 1
            hits += last[number] == bound["think"]
        last[number] = bound["think"]
        used[bound["think"]] += 1
        said[number] += WORDS * 8
        under_way.append(bound)
        if len(under_way) > 8:
            made.unbind(under_way.pop(chance.randrange(8)))
    return hits / turns, used


def test_turns_of_a_conversation_meet_the_instance_that_holds_the_turns_before() -> None:
    share, used = share_of_hits(hinted=True)
    assert share > 0.85
    assert max(used.values()) < 1.5 * min(used.values())  # and all are used
    assert share_of_hits(hinted=False)[0] < 0.4


def test_a_beginning_that_all_prompts_share_does_not_fill_one_instance() -> None:
    made, remembered = caching(), Prefixes()
    prompt = chat(WORDS * 40)
    for _ in range(64):
        bound = made.bind(hints=remembered.hints(prompt))[1]
        remembered.note(prompt, {one for one in bound.values() if made.caching(one)})
    loads = [made.instances[f"d{n}"].bound for n in range(4)]
    assert max(loads) <= 1.25 * min(loads) + 2
