"""The pool of blocks: counts, and the order in which blocks are handed out again. Random use: test_manager_machine."""

from __future__ import annotations

import pytest

from jaxpage.kv.block_pool import SCRATCH_BLOCK, BlockPool


def name_block(pool: BlockPool, block_id: int, name: bytes) -> None:
    pool.index.add(block_id, b"", list(name), name)


def named_pool(num_blocks: int, names: list[bytes]) -> BlockPool:
    """A pool whose first blocks are held and have these names."""
    pool = BlockPool(num_blocks)
    for block_id, name in zip(pool.allocate(len(names)), names, strict=True):
        name_block(pool, block_id, name)
    return pool


def test_a_pool_needs_a_block_beside_the_scratch_block() -> None:
    with pytest.raises(ValueError, match=r"num_blocks: .* got 1"):
        BlockPool(1)
    pool = BlockPool(2)
    assert (pool.num_blocks, pool.num_usable, pool.num_free) == (2, 1, 1)


def test_the_scratch_block_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.ref_counts[SCRATCH_BLOCK] == 0
    pool.check_integrity()


def test_a_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.hold(blocks[:1])
    pool.free(blocks)
    assert [pool.ref_counts[block] for block in blocks] == [1, 0]
    assert pool.num_free == 2
    pool.free(blocks[:1])
    assert pool.num_free == pool.num_usable == 3


def test_a_freed_block_can_be_found_and_revived() -> None:
    pool = named_pool(5, [b"a", b"b"])
    pool.free([1, 2])
    assert pool.index.find([b"a", b"b"]) == [1, 2]
    assert (pool.num_unheld([1, 2]), pool.is_free(1)) == (2, True)
    pool.hold([1, 2])
    assert (pool.num_unheld([1, 2]), pool.num_free, pool.is_free(1)) == (0, 2, False)
    assert sorted(pool.allocate(2)) == [3, 4]


def test_shared_blocks_are_counted_once_each() -> None:
    pool = BlockPool(6)
    blocks = pool.allocate(3)
    assert (pool.num_shared, pool.num_used) == (0, 3)
    pool.hold(blocks[:2])
    pool.hold(blocks[:1])
    assert (pool.num_shared, pool.num_used, pool.ref_counts[blocks[0]]) == (2, 3, 3)
    pool.free(blocks)
    assert pool.num_shared == 1
    pool.free(blocks[:2])
    pool.free(blocks[:1])
    assert (pool.num_shared, pool.num_used) == (0, 0)
    pool.check_integrity()


def test_blocks_that_cannot_be_found_go_first() -> None:
    pool = named_pool(6, [b"a", b"b"])
    unnamed = pool.allocate(3)
    pool.free([1, 2])
    pool.free(unnamed)
    assert set(pool.allocate(3)) == set(unnamed)
    assert pool.index.find([b"a", b"b"]) == [1, 2]


def test_of_named_blocks_the_one_freed_longest_ago_goes_first() -> None:
    pool = named_pool(4, [b"a", b"b", b"c"])
    for block in (2, 1, 3):
        pool.free([block])
    assert [pool.allocate(1)[0] for _ in range(3)] == [2, 1, 3]


def test_the_tail_of_a_sequence_goes_before_its_head() -> None:
    pool = named_pool(4, [b"a", b"b", b"c"])
    pool.free([1, 2, 3])
    assert pool.allocate(1) == [3]
    assert pool.index.find([b"a", b"b", b"c"]) == [1, 2]


def test_partial_blocks_take_their_turn_among_full_ones() -> None:
    pool = named_pool(5, [b"a", b"b"])
    partial = pool.allocate(1)
    pool.index.add(partial[0], b"", [200], None)
    unnamed = pool.allocate(1)
    for block in (1, partial[0], 2, unnamed[0]):
        pool.free([block])
    assert pool.allocate(4) == [unnamed[0], 1, partial[0], 2]
    assert len(pool.index) == 0


@pytest.mark.parametrize("by_touch", [True, False])
def test_a_block_that_was_of_use_is_young_again(by_touch: bool) -> None:
    pool = named_pool(4, [b"a", b"b", b"c"])
    for block in (1, 2, 3):
        pool.free([block])
    if by_touch:
        pool.touch(1)
    else:
        pool.hold([1])
        pool.free([1])
    assert pool.allocate(3) == [2, 3, 1]


def test_touching_a_held_block_changes_nothing() -> None:
    pool = named_pool(3, [b"a"])
    pool.touch(1)
    assert (pool.num_free, pool.ref_counts[1]) == (1, 1)
    pool.check_integrity()


def test_an_allocated_block_can_no_longer_be_found() -> None:
    pool = named_pool(2, [b"a"])
    pool.free([1])
    assert pool.allocate(1) == [1]
    assert pool.index.find([b"a"]) == []
    name_block(pool, 1, b"b")
    assert pool.index.find([b"b"]) == [1]


def test_wrong_use_is_caught() -> None:
    pool = BlockPool(3)
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 free"):
        pool.allocate(3)
    with pytest.raises(AssertionError, match="freed more often"):
        pool.free([1])


def test_books_that_contradict_each_other_are_caught() -> None:
    pool = named_pool(3, [b"a"])
    pool.ref_counts[1] = 0
    with pytest.raises(AssertionError, match="free list"):
        pool.check_integrity()
    pool.ref_counts[1] = 2
    with pytest.raises(AssertionError, match="miscounted"):
        pool.check_integrity()
    name_block(pool, SCRATCH_BLOCK, b"b")
    pool.ref_counts[1] = 1
    with pytest.raises(AssertionError, match="scratch block"):
        pool.check_integrity()
