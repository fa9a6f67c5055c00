"""The pool of blocks: counts, names, and the order in which blocks are handed out again."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxpage.kv.block_pool import SCRATCH_BLOCK, BlockPool

pytestmark = pytest.mark.timeout(3600)  # the nightly profile runs long
NUM_BLOCKS = 7
NAMES = [bytes([letter]) for letter in b"abcdefgh"]


def named_pool(num_blocks: int, names: list[bytes]) -> BlockPool:
    """A pool whose first blocks are held and have these names."""
    pool = BlockPool(num_blocks)
    for block_id, name in zip(pool.allocate(len(names)), names, strict=True):
        pool.name(block_id, name)
    return pool


def test_a_pool_needs_a_block_beside_the_scratch_block() -> None:
    with pytest.raises(ValueError, match=r"num_blocks: .* got 1"):
        BlockPool(1)
    pool = BlockPool(2)
    assert (pool.num_blocks, pool.num_usable, pool.num_free) == (2, 1, 1)


def test_the_scratch_block_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.ref_count(SCRATCH_BLOCK) == 0
    pool.check_integrity()


def test_a_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.hold(blocks[:1])
    pool.free(blocks)
    assert [pool.ref_count(block) for block in blocks] == [1, 0]
    assert pool.num_free == 2
    pool.free(blocks[:1])
    assert pool.num_free == pool.num_usable == 3


def test_find_stops_at_the_first_unknown_name() -> None:
    pool = named_pool(5, [b"a", b"b", b"c"])
    assert pool.find([b"a", b"b", b"x", b"c"]) == [1, 2]
    assert pool.find([b"x", b"a"]) == []
    assert pool.num_cached == 3


def test_a_freed_block_can_be_found_and_revived() -> None:
    pool = named_pool(5, [b"a", b"b"])
    pool.free([1, 2])
    assert pool.find([b"a", b"b"]) == [1, 2]
    assert pool.num_unheld([1, 2]) == 2
    pool.hold([1, 2])
    assert (pool.num_unheld([1, 2]), pool.num_free) == (0, 2)
    assert sorted(pool.allocate(2)) == [3, 4]


def test_blocks_without_a_name_go_first() -> None:
    pool = named_pool(6, [b"a", b"b"])
    unnamed = pool.allocate(3)
    pool.free([1, 2])
    pool.free(unnamed)
    assert set(pool.allocate(3)) == set(unnamed)
    assert pool.find([b"a", b"b"]) == [1, 2]


def test_of_named_blocks_the_one_freed_longest_ago_goes_first() -> None:
    pool = named_pool(4, [b"a", b"b", b"c"])
    for block in (2, 1, 3):
        pool.free([block])
    assert [pool.allocate(1)[0] for _ in range(3)] == [2, 1, 3]


def test_the_tail_of_a_sequence_goes_before_its_head() -> None:
    pool = named_pool(4, [b"a", b"b", b"c"])
    pool.free([1, 2, 3])
    assert pool.allocate(1) == [3]
    assert pool.find([b"a", b"b", b"c"]) == [1, 2]


def test_holding_a_block_again_makes_it_young() -> None:
    pool = named_pool(4, [b"a", b"b", b"c"])
    for block in (1, 2, 3):
        pool.free([block])
    pool.hold([1])
    pool.free([1])
    assert pool.allocate(3) == [2, 3, 1]


def test_allocating_forgets_the_name() -> None:
    pool = named_pool(2, [b"a"])
    pool.free([1])
    assert pool.allocate(1) == [1]
    assert pool.find([b"a"]) == []
    assert pool.num_cached == 0
    pool.name(1, b"b")
    assert pool.find([b"b"]) == [1]


def test_the_first_block_of_a_name_stays_the_one_found() -> None:
    pool = named_pool(4, [b"a", b"a"])
    assert pool.find([b"a"]) == [1]
    pool.free([1, 2])
    assert pool.allocate(2) == [2, 3]
    assert pool.find([b"a"]) == [1]


def test_a_block_keeps_its_first_name() -> None:
    pool = named_pool(3, [b"a"])
    pool.name(1, b"b")
    assert (pool.find([b"a"]), pool.find([b"b"])) == ([1], [])


def test_forgetting_names_frees_no_block() -> None:
    pool = named_pool(4, [b"a", b"b"])
    pool.free([2])
    pool.forget_names()
    assert (pool.find([b"a"]), pool.num_cached, pool.num_free, pool.ref_count(1)) == ([], 0, 2, 1)


def test_wrong_use_is_caught() -> None:
    pool = BlockPool(3)
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 free"):
        pool.allocate(3)
    with pytest.raises(AssertionError, match="freed more often"):
        pool.free([1])
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.name(2, b"a")


class PoolMachine(RuleBasedStateMachine):
    """Random use of a small pool beside a model of plain dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.holders: list[list[int]] = []  # block lists as their holders know them
        self.name_of: dict[int, bytes] = {}
        self.freed_at: dict[int, int] = {}
        self.clock = 0

    def count(self, block: int) -> int:
        return sum(blocks.count(block) for blocks in self.holders)

    def free_blocks(self) -> list[int]:
        return [block for block in range(1, NUM_BLOCKS) if self.count(block) == 0]

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        free = self.free_blocks()
        wanted = data.draw(st.integers(0, len(free)))
        blocks = self.pool.allocate(wanted)
        unnamed = {block for block in free if block not in self.name_of}
        named = sorted(set(free) - unnamed, key=lambda block: self.freed_at[block])
        from_unnamed = min(wanted, len(unnamed))
        assert set(blocks[:from_unnamed]) <= unnamed
        assert blocks[from_unnamed:] == named[: wanted - from_unnamed]
        for block in blocks:
            self.name_of.pop(block, None)
        self.holders.append(blocks)

    @rule(names=st.lists(st.sampled_from(NAMES), max_size=4, unique=True))
    def find_and_hold(self, names: list[bytes]) -> None:
        block_of = {name: block for block, name in self.name_of.items()}
        expected = []
        for name in names:
            if name not in block_of:
                break
            expected.append(block_of[name])
        found = self.pool.find(names)
        assert found == expected
        assert self.pool.num_unheld(found) == len(set(found) & set(self.free_blocks()))
        self.pool.hold(found)
        self.holders.append(found)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        blocks = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.free(blocks)
        for block in reversed(blocks):
            self.clock += 1
            self.freed_at[block] = self.clock

    @precondition(lambda self: any(self.holders))
    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def name(self, data: st.DataObject, name: bytes) -> None:
        block = data.draw(st.sampled_from(sorted({block for blocks in self.holders for block in blocks})))
        self.pool.name(block, name)
        if block not in self.name_of and name not in self.name_of.values():
            self.name_of[block] = name

    @rule()
    def forget(self) -> None:
        self.pool.forget_names()
        self.name_of.clear()

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check_integrity()
        assert [self.pool.ref_count(block) for block in range(NUM_BLOCKS)] == list(map(self.count, range(NUM_BLOCKS)))
        assert self.pool.num_free == len(self.free_blocks())
        assert self.pool.num_cached == len(self.name_of)


TestPoolMachine = PoolMachine.TestCase
