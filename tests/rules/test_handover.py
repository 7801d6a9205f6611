"""Blocks of prompts that come from afar: who holds them, when they are free, and how far a room is."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stage_runtime.errors import IllegalEvent
from stage_runtime.rules.autoregressive.blocks import BlockPool
from stage_runtime.rules.kv.handover import ROOM, KVPoll, Load, Loads, LoadStatus, RoomEvent, moved


def hashes(prompt: int, count: int, shared: int = 0) -> list[bytes]:
    """The hashes of a prompt's blocks; the first ``shared`` ones are those of every prompt."""
    return [b"all%d" % at if at < shared else b"%d.%d" % (prompt, at) for at in range(count)]


def test_what_is_here_already_is_not_asked_for() -> None:
    pool = BlockPool(20)
    loads = Loads(pool)
    here = pool.take(2)
    for block, content in zip(here, hashes(1, 2), strict=True):
        pool.cache(block, content)
    pool.release(here)
    loads.add(Load("r", hashes(1, 5), 6))
    (load,) = loads.start()
    assert (load.first, load.missing, load.blocks[:2]) == (2, range(2, 5), here)
    assert pool.free == 19 - 5
    loads.end("r")
    assert pool.free == 19


def test_a_load_waits_until_there_is_room_and_none_overtakes_it() -> None:
    pool = BlockPool(11)
    loads = Loads(pool)
    for name, blocks in (("a", 6), ("b", 7), ("c", 1)):
        loads.add(Load(name, hashes(ord(name), blocks), blocks + 1))
    assert [one.request_id for one in loads.start()] == ["a"]
    loads.end("a")
    assert [one.request_id for one in loads.start()] == ["b", "c"]


def test_loads_leave_room_for_the_ends_of_their_prompts() -> None:
    """Three loads of four blocks fit a pool of twelve; the fifth block of each, which is computed here, would not."""
    pool = BlockPool(13)
    loads = Loads(pool)
    for name in ("a", "b", "c"):
        loads.add(Load(name, hashes(ord(name), 4), 5))
    assert [one.request_id for one in loads.start()] == ["a", "b"]


def test_what_has_come_is_found_as_a_prefix_and_what_has_not_is_free() -> None:
    pool = BlockPool(20)
    loads = Loads(pool)
    loads.add(Load("r", hashes(1, 5), 6))
    (load,) = loads.start()
    loads.fill(load, 0, 2)
    loads.finish(load)
    loads.end("r")
    assert len(pool.find(hashes(1, 5))) == 2
    assert pool.free == 19


@pytest.mark.parametrize(("first", "count"), [(0, 1), (2, 0), (4, 2), (5, 1), (-1, 1), (3, -1)])
def test_blocks_that_were_not_asked_for_are_refused(first: int, count: int) -> None:
    pool = BlockPool(20)
    loads = Loads(pool)
    here = pool.take(1)
    pool.cache(here[0], hashes(1, 1)[0])
    loads.add(Load("r", hashes(1, 5), 6))
    (load,) = loads.start()
    with pytest.raises(IllegalEvent):
        loads.fill(load, first, count)
    loads.fill(load, 1, 4)
    with pytest.raises(IllegalEvent):
        loads.fill(load, 4, 1)
    assert load.complete


@pytest.mark.parametrize("state", KVPoll)
@pytest.mark.parametrize("event", RoomEvent)
def test_a_room_that_is_over_stays_so(state: KVPoll, event: RoomEvent) -> None:
    after = ROOM.get((state, event))
    if state in (KVPoll.Failed, KVPoll.Success):
        assert after is None
    if after is None:
        with pytest.raises(IllegalEvent):
            moved(state, event)
    else:
        assert moved(state, event) is after and (after > state or after in (KVPoll.Failed, KVPoll.Transferring))


class LoadsMachine(RuleBasedStateMachine):
    """Loads, pieces, failures, aborts and other users come in any order: no block leaks, none has two meanings."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(16)
        self.loads = Loads(self.pool)
        self.names = itertools.count()
        self.others: list[list[int]] = []
        self.content: dict[int, bytes] = {}  #: The hash that is true of what was written into a block last.

    @rule(prompt=st.integers(0, 3), count=st.integers(1, 6), shared=st.integers(0, 3))
    def ask(self, prompt: int, count: int, shared: int) -> None:
        wanted = hashes(prompt, count, min(shared, count))
        found = len(self.pool.find(wanted))
        if found < count and self.loads.loader(wanted[found]) is None:
            self.loads.add(Load(f"r{next(self.names)}", wanted, count + 1))

    @rule(spare=st.integers(0, 2))
    def start(self, spare: int) -> None:
        for load in self.loads.start(spare):
            for index in load.missing:
                self.content.pop(load.blocks[index], None)

    def _loading(self) -> list[Load]:
        return [one for one in self.loads if one.status is LoadStatus.LOADING]

    @rule(data=st.data())
    def piece(self, data: st.DataObject) -> None:
        if not self._loading():
            return
        load = data.draw(st.sampled_from(self._loading()))
        left = [index for index in load.missing if index not in load.filled]
        if left:
            index = data.draw(st.sampled_from(left))
            self.content[load.blocks[index]] = load.hashes[index]
            self.loads.fill(load, index, 1)
        if load.complete:
            self.loads.finish(load)

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        if self._loading():
            self.loads.finish(data.draw(st.sampled_from(self._loading())))

    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        """It fails whatever its blocks hold: one piece was not what it claimed to be."""
        if self._loading():
            load = data.draw(st.sampled_from(self._loading()))
            for index in load.missing:
                self.content.pop(load.blocks[index], None)
            self.loads.finish(load, believed=False)

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if len(self.loads):
            self.loads.end(data.draw(st.sampled_from([one.request_id for one in self.loads])))

    @rule()
    def let_go(self) -> None:
        self.loads.let_go()
        assert all(one.status is not LoadStatus.LOADED for one in self.loads)

    @rule(count=st.integers(1, 5))
    def another_takes(self, count: int) -> None:
        if count <= self.pool.free:
            taken = self.pool.take(count)
            for block in taken:
                self.content.pop(block, None)
            self.others.append(taken)

    @rule()
    def another_ends(self) -> None:
        if self.others:
            self.pool.release(self.others.pop(0))

    @invariant()
    def a_known_block_holds_what_it_is_known_for(self) -> None:
        for prompt, shared in itertools.product(range(4), range(4)):
            wanted = hashes(prompt, 6, shared)
            for block, content in zip(self.pool.find(wanted), wanted, strict=False):
                assert self.content.get(block) == content

    @invariant()
    def blocks_are_of_loads_or_others_or_free(self) -> None:
        used = {block for load in self.loads for block in load.blocks} | {b for blocks in self.others for b in blocks}
        assert self.pool.capacity - self.pool.free == len(used)

    @invariant()
    def each_load_could_be_begun_if_nothing_else_ran(self) -> None:
        begun = [one for one in self.loads if one.status is not LoadStatus.WAITING]
        assert sum(one.total for one in begun) <= self.pool.capacity

    def teardown(self) -> None:
        for load in self.loads:
            self.loads.end(load.request_id)
        for blocks in self.others:
            self.pool.release(blocks)
        assert self.pool.free == self.pool.capacity


TestLoads = LoadsMachine.TestCase
