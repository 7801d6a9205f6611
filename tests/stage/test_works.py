"""The requests of a stage by all their names, as a look at each of them would find them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from stage_runtime.stage.inputs.works import Works
from stage_runtime.stage.work import RequestWork, begun
from stage_runtime.wire.parts import Header
from tests.thoroughness import examples

OWNERS = st.sampled_from(["c", "d", "c/r#1"])
IDS = st.sampled_from(["r", "s", "c/r#1", "r#1", ""])


def work(owner: str, request_id: str, attempt: int) -> RequestWork:
    return begun(Header(request_id, attempt, owner, {}, None), gathering=None, sources=())


@settings(max_examples=examples(50))
@given(st.lists(st.tuples(OWNERS, IDS, st.integers(1, 2), st.booleans()), max_size=12))
def test_requests_are_found_by_every_name_and_by_none_when_they_are_over(
    changes: list[tuple[str, str, int, bool]],
) -> None:
    works, there = Works(), dict[tuple[str, str], RequestWork]()
    made = [work(owner, request_id, attempt) for owner, request_id, attempt, _ in changes]
    for one, (owner, request_id, _, stays) in zip(made, changes, strict=True):
        assert works.add(one) is there.get((owner, request_id))
        there[owner, request_id] = one
        if not stays:
            works.remove(one)
            del there[owner, request_id]
    for one in made:
        if there.get((one.owner, one.request_id)) is not one:
            works.remove(one)  # another attempt has its place
    assert set(works.all()) == set(there.values())
    for name in {name for one in made for name in (one.request_id, one.key)}:
        expected = {one for one in there.values() if name in (one.request_id, one.key)}
        assert set(works.named(name)) == expected and len(works.named(name)) == len(expected)
    for one in there.values():
        assert works.find(one.owner, one.request_id) is one
    for one in list(there.values()):
        works.remove(one)
    assert (works._named, works._works) == ({}, {})
