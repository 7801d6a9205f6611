"""The block pool: no block is leaked, freed twice or given to two; what is cached holds what its hash says."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stage_runtime.rules.autoregressive.blocks import BlockFault, BlockPool, hash_blocks


def test_a_hash_covers_everything_before_its_block_and_the_salt() -> None:
    one = hash_blocks([1, 2, 3, 4, 5], 2)
    assert len(one) == 2
    assert hash_blocks([1, 2, 3, 4], 2) == one
    assert hash_blocks([9, 2, 3, 4], 2)[1] != one[1]
    assert hash_blocks([1, 2, 3, 4], 2, salt=b"tenant")[0] != one[0]
    assert hash_blocks([1, 2, 3, 4], 2, known=one[:1]) == one


def test_the_least_recently_used_prefix_is_forgotten_first_and_its_end_before_its_beginning() -> None:
    pool = BlockPool(5)
    first, second = hash_blocks([1, 1, 2, 2], 2), hash_blocks([3, 3, 4, 4], 2)
    for hashes in (first, second):
        blocks = pool.take(2)
        for block, content in zip(blocks, hashes, strict=True):
            pool.cache(block, content)
        pool.release(blocks)
    assert pool.free == pool.capacity == 4
    pool.take(1)
    assert (len(pool.find(first)), len(pool.find(second))) == (1, 2)
    pool.take(2)
    assert (len(pool.find(first)), len(pool.find(second))) == (0, 1)


def test_blocks_without_known_content_are_taken_before_cached_ones() -> None:
    pool = BlockPool(4)
    blocks = pool.take(2)
    pool.cache(blocks[0], b"a")
    pool.release(blocks)
    pool.take(2)
    assert pool.find([b"a"]) == [blocks[0]]


def test_the_second_block_with_the_same_content_is_no_second_entry() -> None:
    pool = BlockPool(4)
    one, other = pool.take(2)
    pool.cache(one, b"a")
    pool.cache(other, b"a")
    pool.release([other])
    assert pool.find([b"a"]) == [one]
    assert pool.cached == 1


@pytest.mark.parametrize("blocks", [[0], [1, 1], [3], [2, 3]])
def test_a_wrong_release_raises_and_changes_nothing(blocks: list[int]) -> None:
    pool = BlockPool(4)
    pool.take(2)  # 1 and 2
    with pytest.raises(BlockFault):
        pool.release(blocks)
    assert (pool.free, pool.users(1), pool.users(2)) == (1, 1, 1)


def test_what_is_not_there_is_neither_taken_nor_shared() -> None:
    pool = BlockPool(3)
    with pytest.raises(BlockFault):
        pool.take(3)
    with pytest.raises(BlockFault):
        pool.share([1])
    with pytest.raises(BlockFault):
        pool.cache(1, b"a")
    assert pool.free == 2


class Pools(RuleBasedStateMachine):
    """Users take, share, fill and release blocks in any order; `contents` is what really lies in each."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7)
        self.users: list[list[int]] = []
        self.contents: dict[int, bytes] = {}

    @rule(count=st.integers(0, 4))
    def take(self, count: int) -> None:
        if count > self.pool.free:
            with pytest.raises(BlockFault):
                self.pool.take(count)
            return
        taken = self.pool.take(count)
        for block in taken:
            self.contents.pop(block, None)
        self.users.append(taken)

    @precondition(lambda self: any(self.users))
    @rule(data=st.data(), content=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def fill(self, data: st.DataObject, content: bytes) -> None:
        block = data.draw(st.sampled_from([one for user in self.users for one in user]))
        if self.contents.setdefault(block, content) == content:
            self.pool.cache(block, content)

    @rule(content=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def share(self, content: bytes) -> None:
        found = self.pool.find([content])
        assert [self.contents[block] for block in found] == [content] * len(found)
        self.pool.share(found)
        self.users.append(found)

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.users.pop(data.draw(st.integers(0, len(self.users) - 1))))

    @rule()
    def forget(self) -> None:
        self.pool.forget_all()
        assert self.pool.cached == 0

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        used = [block for user in self.users for block in user]
        assert 0 not in used
        assert self.pool.free == self.pool.capacity - len(set(used))
        assert [self.pool.users(block) for block in range(7)] == [used.count(block) for block in range(7)]


TestPools = Pools.TestCase
