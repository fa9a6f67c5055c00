"""Forks share blocks until somebody writes; swapped blocks come back shared as before."""

from __future__ import annotations

import pytest
from kv_driving import cached_tokens, compute, make_request, manager

from jaxpage.kv.block_ops import BlockOp, BlockOpKind
from jaxpage.kv.manager import KVCacheManager
from jaxpage.request import Request


def forked(kv: KVCacheManager, length: int, count: int) -> list[Request]:
    """A request of ``length`` tokens and its forks, all of it shared."""
    parent = make_request(list(range(length)))
    compute(kv, parent)
    children = [make_request(list(range(length))) for _ in range(count - 1)]
    for child in children:
        kv.fork(parent, child, length)
        child.num_computed_tokens = length
    return [parent, *children]


def grow(kv: KVCacheManager, request: Request, token_id: int) -> bool:
    if not kv.append_slots(request, request.num_computed_tokens + 1):
        return False
    request.token_ids.append(token_id)
    request.num_computed_tokens += 1
    kv.name_blocks(request, being_written=False)
    return True


@pytest.mark.parametrize("caching", [True, False])
def test_a_fork_takes_no_block_and_each_divergence_one_copy(caching: bool) -> None:
    kv = manager(16, enable_prefix_caching=caching)
    requests = forked(kv, 6, 3)
    assert kv.pool.num_used == 2
    assert [request.block_ids for request in requests] == [[1, 2]] * 3
    assert [grow(kv, request, index) for index, request in enumerate(requests)] == [True] * 3
    assert (kv.counters.num_copied_blocks, kv.pool.num_used) == (2, 4), "the last one keeps the original"
    tails = [request.block_ids[1] for request in requests]
    assert len(set(tails)) == 3 and tails[2] == 2
    assert kv.take_block_ops() == [BlockOp(BlockOpKind.COPY, 2, tail) for tail in tails[:2]]
    for request in requests:
        kv.free(request)
    kv.check_integrity(is_idle=True)


def test_a_fork_at_a_block_border_copies_nothing() -> None:
    kv = manager(16)
    requests = forked(kv, 8, 3)
    assert all(grow(kv, request, index) for index, request in enumerate(requests))
    assert (kv.counters.num_copied_blocks, kv.pool.num_used) == (0, 5)


def test_a_fork_shares_as_many_tokens_as_it_says() -> None:
    kv = manager(16)
    parent, child = make_request(list(range(11))), make_request(list(range(6)))
    compute(kv, parent)
    kv.fork(parent, child, 6)
    assert child.block_ids == parent.block_ids[:2]
    assert (child.block_hashes, child.num_named_blocks) == (parent.block_hashes[:1], 1)


def test_a_copy_needs_a_free_block() -> None:
    kv = manager(2)
    first, second = forked(kv, 6, 2)
    assert not grow(kv, first, 1)
    assert (first.block_ids, kv.block_ops) == ([1, 2], [])
    kv.free(second)
    assert grow(kv, first, 1)
    assert kv.block_ops == []


@pytest.mark.parametrize("caching", [True, False])
def test_pre_2b_shared_blocks_are_swapped_once_and_shared_again(caching: bool) -> None:
    kv = manager(16, enable_prefix_caching=caching, num_host_blocks=16)
    requests = forked(kv, 6, 3)
    for index, request in enumerate(requests[1:]):
        assert grow(kv, request, index)
    kv.take_block_ops()
    swapped = kv.swap_out(requests)
    assert swapped is not None
    assert (kv.counters.num_swapped_out_blocks, len(swapped.host_blocks), kv.num_free_host_blocks) == (4, 4, 12)
    assert (kv.pool.num_used, [request.block_ids for request in requests]) == (0, [[], [], []])
    assert [kind for kind, _, _ in kv.take_block_ops()] == [BlockOpKind.SWAP_OUT] * 4
    kv.reset_prefix_cache()
    assert kv.swap_in(swapped)
    assert (kv.counters.num_swapped_in_blocks, kv.pool.num_used, kv.num_free_host_blocks) == (4, 4, 16)
    assert len({request.block_ids[0] for request in requests}) == 1
    assert kv.pool.ref_counts[requests[0].block_ids[0]] == 3
    assert len({request.block_ids[1] for request in requests}) == 3
    for request in requests:
        kv.free(request)
    kv.check_integrity(is_idle=True)


def test_full_blocks_that_the_device_still_has_are_not_moved_back() -> None:
    kv = manager(16, num_host_blocks=16)
    request = make_request(list(range(11)))
    compute(kv, request)
    before = list(request.block_ids)
    swapped = kv.swap_out([request])
    assert swapped is not None and kv.swap_in(swapped)
    assert request.block_ids[:2] == before[:2]
    assert kv.counters.num_swapped_in_blocks == 1
    assert cached_tokens(kv, [*range(8), 99]) == 8


def test_what_is_shared_with_others_stays_with_them() -> None:
    kv = manager(16, num_host_blocks=16)
    first, second = forked(kv, 6, 2)
    swapped = kv.swap_out([second])
    assert swapped is not None
    assert (first.block_ids, kv.pool.num_used, kv.counters.num_swapped_out_blocks) == ([1, 2], 2, 2)
    assert kv.swap_in(swapped)
    assert first.block_ids[1] not in second.block_ids
    kv.free(first)
    kv.free(second)
    kv.check_integrity(is_idle=True)


def test_swaps_are_all_or_nothing() -> None:
    kv = manager(4, num_host_blocks=2)
    first = make_request(list(range(10)))
    compute(kv, first)
    assert kv.swap_out([first]) is None
    assert (len(first.block_ids), kv.num_free_host_blocks, kv.block_ops) == (3, 2, [])
    kv.free(first)
    second, third = make_request(list(range(20, 27))), make_request(list(range(30, 39)))
    compute(kv, second)
    swapped = kv.swap_out([second])
    assert swapped is not None
    compute(kv, third)
    ops = list(kv.block_ops)
    assert not kv.swap_in(swapped), "one block is free"
    assert (second.block_ids, kv.num_free_host_blocks, kv.block_ops) == ([], 0, ops)
    kv.free(third)
    assert not kv.swap_in(swapped, num_spare_blocks=3)
    assert kv.swap_in(swapped, num_spare_blocks=2)


def test_an_end_on_the_host_keeps_what_others_share() -> None:
    kv = manager(8, num_host_blocks=8)
    first, second = forked(kv, 6, 2)
    assert grow(kv, second, 1)
    swapped = kv.swap_out([first, second])
    assert swapped is not None and kv.num_free_host_blocks == 5
    kv.drop_swapped(swapped, first)
    assert kv.num_free_host_blocks == 6
    assert kv.swap_in(swapped)
    kv.free(second)
    kv.check_integrity(is_idle=True)


def test_wasted_slots_count_a_shared_block_once() -> None:
    kv = manager(8)
    first, second = forked(kv, 6, 2)
    assert kv.num_wasted_slots([first, second]) == 2
    assert grow(kv, second, 1)
    assert kv.num_wasted_slots([first, second]) == 2 + 1
    assert kv.append_slots(second, 9)
    assert kv.num_wasted_slots([first, second]) == 2 + 1 + 4
    assert kv.num_wasted_slots([]) == 0
