"""Partners: bounded, even, stable, and the same for every coordinator."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.rules.binding import subsets

SIZES = st.integers(1, 400)


def partners(position: int, sources: int, targets: int) -> set[int]:
    return set(subsets.places(range(targets), subsets.arc(position, sources, targets)))


def by_name(sources: list[str], targets: list[str]) -> dict[str, set[str]]:
    found = {}
    for position, name in enumerate(sorted(sources)):
        of = subsets.arc(position, len(sources), len(targets))
        found[name] = set(subsets.places(sorted(targets), of))
    return found


@pytest.mark.proves("several-coordinators")
@given(SIZES, SIZES)
def test_each_instance_has_equally_many_partners_and_each_partner_its_share(sources: int, targets: int) -> None:
    subsets_of_all = [partners(position, sources, targets) for position in range(sources)]
    assert {len(one) for one in subsets_of_all} == {subsets.size(sources, targets)}
    shares = Counter(target for one in subsets_of_all for target in one)
    assert set(shares) == set(range(targets)), "each instance is somebody's partner"
    assert max(shares.values()) - min(shares.values()) <= 1
    assert min(shares.values()) >= min(subsets.SOURCES_LEAST, sources)


@given(SIZES, SIZES)
def test_a_subset_is_bounded_and_a_small_group_is_one_subset(sources: int, targets: int) -> None:
    size = subsets.size(sources, targets)
    assert size <= targets
    if targets <= sources * subsets.SUBSET // subsets.SOURCES_LEAST:
        assert size == min(targets, subsets.SUBSET)
    if targets <= subsets.SUBSET:
        assert partners(0, sources, targets) == set(range(targets))


names = st.text("0123456789abcdef", min_size=6, max_size=6)


@given(st.lists(names, unique=True, min_size=20, max_size=80), names, st.data())
def test_who_joins_or_leaves_changes_few_partners_of_each(members: list[str], other: str, data: st.DataObject) -> None:
    """Read from the left a join, from the right a death. Groups of about one size: 1 of 16 partners, or 2."""
    if other in members:
        return
    half = data.draw(st.integers(len(members) * 2 // 5, len(members) * 3 // 5))
    sources, targets = members[:half], members[half:]
    before = by_name(sources, targets)
    for after in (by_name([*sources, other], targets), by_name(sources, [*targets, other])):
        for name in sources:
            assert len(after[name] - before[name]) <= 2
            assert len(before[name] - after[name]) <= 2


@given(st.integers(17, 300), st.lists(st.tuples(st.integers(0, 500), st.integers(1, 300)), min_size=1, max_size=3))
def test_the_common_places_are_on_all_arcs_or_on_the_first(targets: int, given_arcs: list[tuple[int, int]]) -> None:
    arcs = [(start % targets, min(length, targets)) for start, length in given_arcs]
    common = subsets.common(arcs, targets)
    places = set(subsets.places(range(targets), common))
    assert 0 < len(places) == common[1]
    assert places <= set(subsets.places(range(targets), arcs[0]))
    if len(arcs) == 2:
        both = set(subsets.places(range(targets), arcs[0])) & set(subsets.places(range(targets), arcs[1]))
        assert places <= both or not both


@pytest.mark.parametrize(
    ("position", "arc"), [(0, (92, 16)), (10, (12, 16)), (40, (72, 16))], ids=["across the start", "inside", "later"]
)
def test_an_arc_lies_around_the_angle_of_its_instance(position: int, arc: subsets.Arc) -> None:
    assert subsets.arc(position, 50, 100) == arc


@pytest.mark.parametrize(
    ("arcs", "common"),
    [
        pytest.param([(10, 16), (20, 16)], (20, 6), id="the second begins on the first"),
        pytest.param([(20, 16), (10, 16)], (20, 6), id="the first begins on the second"),
        pytest.param([(95, 16), (5, 16)], (5, 6), id="over the circle's end"),
        pytest.param([(10, 16), (26, 16)], (10, 16), id="the second begins after the first"),
        pytest.param([(26, 16), (10, 16)], (26, 16), id="the first begins after the second"),
        pytest.param([(10, 16), (12, 3)], (12, 3), id="the second lies on the first"),
    ],
)
def test_the_common_places_of_two_arcs(arcs: list[subsets.Arc], common: subsets.Arc) -> None:
    assert subsets.common(arcs, 100) == common
