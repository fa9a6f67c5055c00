"""The map of a pool agrees with its books, whatever happened in it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jaxpage.kv.block_map import BlockState, block_states, cell_counts, state_counts
from jaxpage.kv.block_pool import BlockPool

FREE, CACHED, USED, SHARED, SCRATCH = BlockState


def states(pool: BlockPool) -> list[BlockState]:
    return list(map(BlockState, block_states(pool)))


def make_findable(pool: BlockPool, block_id: int) -> None:
    pool.index.add(block_id, b"parent of %d" % block_id, (1, 2), b"name of %d" % block_id)


def test_a_block_goes_through_all_states() -> None:
    pool = BlockPool(4)
    assert states(pool) == [SCRATCH, FREE, FREE, FREE]
    [block] = pool.allocate(1)
    assert states(pool)[block] is USED
    make_findable(pool, block)
    assert states(pool)[block] is USED, "that others could find it changes nothing for who holds it"
    pool.hold([block])
    assert states(pool)[block] is SHARED
    pool.free([block])
    assert states(pool)[block] is USED
    pool.free([block])
    assert states(pool)[block] is CACHED
    pool.index.clear()
    assert states(pool) == [SCRATCH, FREE, FREE, FREE]


def test_more_holders_than_a_byte_counts() -> None:
    pool = BlockPool(3)
    [block] = pool.allocate(1)
    for _ in range(299):
        pool.hold([block])
    assert pool.ref_counts[block] == 300
    assert states(pool) == [SCRATCH, SHARED, FREE]


@given(st.data())
def test_states_are_what_the_pool_says(data: st.DataObject) -> None:
    pool = BlockPool(data.draw(st.integers(2, 12)))
    held: list[int] = []
    for action in data.draw(st.lists(st.sampled_from(["take", "share", "free", "name"]), max_size=40)):
        if action == "take" and pool.num_free:
            held += pool.allocate(1)
        elif held:
            block = data.draw(st.sampled_from(held))
            if action == "share":
                pool.hold([block])
                held.append(block)
            elif action == "free":
                pool.free([block])
                held.remove(block)
            elif action == "name":
                make_findable(pool, block)
    seen = states(pool)
    assert seen[0] is SCRATCH
    for block in range(1, pool.num_blocks):
        is_held = {0: CACHED if block in pool.index else FREE, 1: USED}
        assert seen[block] is is_held.get(held.count(block), SHARED)
    counts = state_counts(bytes(seen))
    assert counts[USED] + counts[SHARED] == pool.num_used
    assert counts[FREE] + counts[CACHED] == pool.num_free
    assert counts[SHARED] == pool.num_shared


@given(st.binary(min_size=1, max_size=60).map(lambda raw: bytes(byte % 5 for byte in raw)), st.integers(1, 9))
def test_cells_count_every_block_once(raw: bytes, size: int) -> None:
    counts = cell_counts(raw, size)
    pieces = [raw[start : start + size] for start in range(0, len(raw), size)]
    assert counts == {state: [piece.count(state) for piece in pieces] for state in BlockState}
