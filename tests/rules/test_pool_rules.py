"""Pools of eligible instances: after any events they equal what a scan of all instances would find."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.rules.binding.pools import Endpoints, Pool, Pools

ITEMS = st.sampled_from("abcdef")


@given(st.lists(st.tuples(st.booleans(), ITEMS)))
def test_a_pool_holds_its_items_in_the_order_of_their_names(events: list[tuple[bool, str]]) -> None:
    pool, model = Pool[str](), set[str]()
    for add, name in events:
        if add:
            pool.add(name, name.upper())
            model.add(name)
        else:
            pool.discard(name)
            model.discard(name)
        assert pool.names == sorted(model)
        assert pool.items == [one.upper() for one in pool.names]
        assert {one for one in "abcdef" if one in pool} == model
        assert all(pool.position(one) == place for place, one in enumerate(pool.names))


@given(st.lists(st.tuples(ITEMS, st.one_of(st.none(), st.integers(0, 2)))))
def test_each_item_stands_in_one_pool_and_a_change_of_emptiness_is_returned(
    events: list[tuple[str, int | None]],
) -> None:
    pools, model = Pools[int, str](), dict[str, int]()
    for name, kind in events:
        filled = set(model.values())
        changed = pools.put(name, name, kind)
        model.pop(name, None)
        if kind is not None:
            model[name] = kind
        assert changed == (set(model.values()) != filled)
        for one in range(3):
            pool = pools.get(one)
            assert (pool.items if pool else []) == sorted(name for name, its in model.items() if its == one)
            assert pool is None or len(pool) > 0


@given(st.lists(st.tuples(st.booleans(), ITEMS, st.integers(0, 2))))
def test_endpoints_know_who_else_is_there(events: list[tuple[bool, str, int]]) -> None:
    endpoints, model = Endpoints(), set[tuple[str, str]]()
    for add, item, place in events:
        where = str(place)
        if add:
            endpoints.add(item, where)
            model.add((item, where))
        else:
            endpoints.discard(item, where)
            model.discard((item, where))
        for one in "abcdef":
            assert sorted(endpoints.others(one, where)) == sorted(n for n, at in model if at == where and n != one)
