"""Block tables of requests: what is found in the cache, all-or-nothing admission, naming, forks and copies."""

from __future__ import annotations

import pytest
from kv_driving import cached_tokens, compute, make_request, manager

from jaxpage.kv.block_ops import BlockOp, BlockOpKind
from jaxpage.kv.manager import NO_PREFIX
from jaxpage.params import SamplingParams


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for(num_tokens: int, num_blocks: int) -> None:
    assert manager().blocks_for(num_tokens) == num_blocks


@pytest.mark.parametrize("block_size", range(1, 17))
def test_pfx_1_a_repeated_prompt_leaves_exactly_one_token_to_compute(block_size: int) -> None:
    for length in range(1, 41):
        kv = manager(64, block_size)
        tokens = list(range(length))
        assert [cached_tokens(kv, tokens) for _ in range(3)] == [0, length - 1, length - 1]
        counters = kv.counters
        assert (counters.num_queried_tokens, counters.num_hit_tokens) == (3 * length, 2 * (length - 1))
        assert counters.num_full_block_hit_tokens == 2 * ((length - 1) // block_size * block_size)
        assert counters.num_copied_blocks == 2 * ((length - 1) % block_size > 0)


def test_nothing_is_found_without_prefix_caching() -> None:
    kv = manager(enable_prefix_caching=False)
    assert [cached_tokens(kv, list(range(15))) for _ in range(2)] == [0, 0]
    assert (len(kv.pool.index), kv.counters.num_queried_tokens) == (0, 0)


def test_a_request_that_scores_its_prompt_takes_nothing_from_the_cache() -> None:
    kv = manager()
    cached_tokens(kv, list(range(16)))
    assert cached_tokens(kv, list(range(16)), params=SamplingParams(prompt_logprobs=1)) == 0
    assert cached_tokens(kv, list(range(16)), params=SamplingParams(prompt_logprobs=0)) == 0
    assert cached_tokens(kv, list(range(16)), params=SamplingParams(logprobs=1)) == 15


def test_pfx_3_salts_separate() -> None:
    kv = manager(64, model="model name")
    tokens = list(range(13))
    salts = ["a", "b", None, "model name"]
    assert [cached_tokens(kv, tokens, cache_salt=salt) for salt in salts] == [0, 0, 0, 0]
    assert [cached_tokens(kv, tokens, cache_salt=salt) for salt in salts] == [12, 12, 12, 12]


def test_pfx_3_a_block_behind_a_different_block_is_not_found() -> None:
    kv = manager()
    cached_tokens(kv, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert cached_tokens(kv, [0, 2, 3, 4, 5, 6, 7, 8, 9]) == 0


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ([1, 23, 9], [12, 3, 9], 0),
        ([0, 1, 2], [1, 0, 2], 0),
        ([256, 0, 5], [1, 0, 5], 0),
        ([97] * 5, [97] * 7, 5),
    ],
)
def test_pfx_3a_look_alikes(first: list[int], second: list[int], found: int) -> None:
    kv = manager(block_size=2)
    cached_tokens(kv, first)
    assert cached_tokens(kv, second) == found


def test_pfx_2c_a_hit_inside_a_block_gets_a_copy() -> None:
    kv = manager()
    tokens = list(range(11))
    running = make_request(tokens)
    compute(kv, running)
    for shared, found in [(2, 2), (3, 3), (4, 4), (6, 6), (7, 7), (8, 8)]:
        assert cached_tokens(kv, [*tokens[:shared], 99, 98]) == found
    assert cached_tokens(kv, [*tokens, 99]) == 8, "its last block is not full, and it is still being written"
    kv.free(running)
    for shared, found in [(5, 5), (7, 7), (9, 9), (11, 11)]:
        assert cached_tokens(kv, [*tokens[:shared], 97, 96]) == found


def test_the_source_of_a_copy_stays_with_its_holder() -> None:
    kv = manager()
    first, second = make_request(list(range(8))), make_request([*range(6), 99])
    compute(kv, first)
    kv.take_block_ops()
    assert compute(kv, second) == 6
    assert second.block_ids[0] == first.block_ids[0]
    assert second.block_ids[1] != first.block_ids[1]
    assert kv.take_block_ops() == [BlockOp(BlockOpKind.COPY, first.block_ids[1], second.block_ids[1])]
    assert kv.pool.ref_counts[first.block_ids[1]] == 1


def test_what_the_step_itself_writes_is_shared_but_not_copied() -> None:
    """Copies come before the step's writes."""
    kv = manager()
    kv.begin_step()
    first = make_request(list(range(8)))
    compute(kv, first, being_written=True)
    second = make_request([*range(6), 99])
    prefix = kv.find_prefix(second)
    assert (prefix.block_ids, prefix.source, prefix.num_tokens) == (first.block_ids[:1], -1, 4)
    kv.begin_step()
    assert kv.find_prefix(second) == (first.block_ids[:1], first.block_ids[1], 6)


def test_requests_share_blocks_while_both_run() -> None:
    kv = manager()
    first, second = make_request(list(range(13))), make_request(list(range(13)))
    assert (compute(kv, first), compute(kv, second)) == (0, 12)
    assert first.block_ids[:3] == second.block_ids[:3]
    assert first.block_ids[3] != second.block_ids[3]
    assert [kv.pool.ref_counts[block] for block in first.block_ids] == [2, 2, 2, 1]
    assert kv.pool.num_shared == 3
    kv.free(first)
    assert [kv.pool.ref_counts[block] for block in second.block_ids] == [1, 1, 1, 1]
    kv.free(second)
    assert kv.pool.num_free == kv.pool.num_usable


@pytest.mark.parametrize("a_first", [True, False])
def test_pfx_2_find_hold_and_allocate_are_one_act(a_first: bool) -> None:
    """8 usable blocks: 5 held, 2 cached of X, 1 free. A revives X's blocks and needs one more, B needs two new ones."""
    kv = manager(8)
    assert kv.allocate(make_request([50] * 20), NO_PREFIX, 20)
    x = list(range(8))
    cached_tokens(kv, x)
    a, b = make_request([*x, 20, 21, 22, 23]), make_request(list(range(30, 38)))
    prefix = kv.find_prefix(a)
    assert prefix.num_tokens == 8
    if a_first:
        assert kv.allocate(a, prefix, 12)
        assert not kv.allocate(b, kv.find_prefix(b), 8)
        assert a.block_ids[:2] == prefix.block_ids
    else:
        assert kv.allocate(b, kv.find_prefix(b), 8)
        prefix = kv.find_prefix(a)
        assert prefix.num_tokens == 4, "B took the free block and the tail of X"
        assert not kv.allocate(a, prefix, 12)
    kv.pool.check_integrity()


def test_admission_is_all_or_nothing() -> None:
    kv = manager(4)
    cached_tokens(kv, list(range(9)))
    before = (kv.pool.num_free, len(kv.pool.index), kv.counters.num_queried_tokens)
    request = make_request(list(range(20)))
    prefix = kv.find_prefix(request)
    assert prefix.num_tokens == 9
    assert not kv.allocate(request, prefix, 20)
    assert not kv.allocate(request, prefix, 16), "its first chunk would fit, but never its last one"
    assert (request.block_ids, kv.block_ops) == ([], [])
    assert (kv.pool.num_free, len(kv.pool.index), kv.counters.num_queried_tokens) == before
    shorter = make_request(list(range(16)))
    assert not kv.allocate(shorter, kv.find_prefix(shorter), 12, num_spare_blocks=1)
    assert kv.allocate(shorter, kv.find_prefix(shorter), 12)
    assert kv.pool.num_free == 1, "the last chunk takes its block later"


def test_a_source_may_be_the_block_its_copy_goes_to() -> None:
    """The only free block holds what is found: nothing has to move."""
    kv = manager(1)
    cached_tokens(kv, [1, 2, 3])
    request = make_request([1, 2, 9])
    assert compute(kv, request) == 2
    assert kv.take_block_ops() == []
    assert request.block_ids == [1]


def test_pfx_2b_held_blocks_are_never_evicted() -> None:
    kv = manager(8)
    prefix = list(range(12))
    a, b, c = make_request([*prefix, 20]), make_request([*prefix, 30]), make_request(list(range(40, 60)))
    compute(kv, a)
    compute(kv, b)
    assert kv.pool.num_free == 3
    assert not kv.allocate(c, kv.find_prefix(c), 20)
    kv.free(a)  # its tail block only: the prefix is held by B
    assert kv.pool.num_free == 4
    assert not kv.allocate(c, kv.find_prefix(c), 20)
    kv.free(b)
    assert kv.allocate(c, kv.find_prefix(c), 20)


def test_pfx_2a_tails_are_evicted_before_heads() -> None:
    kv = manager(4)
    x = list(range(14))
    assert cached_tokens(kv, x) == 0
    # All four blocks of X are findable; Y takes its last two.
    assert cached_tokens(kv, list(range(20, 28))) == 0
    assert cached_tokens(kv, x) == 8


def test_pfx_3c_reset_frees_nothing_that_is_held() -> None:
    kv = manager(8, block_size=16)
    tokens = list(range(40))
    assert [cached_tokens(kv, tokens), cached_tokens(kv, tokens)] == [0, 39]
    kv.reset_prefix_cache()
    running = make_request(tokens)
    assert compute(kv, running) == 0
    kv.reset_prefix_cache()
    assert (len(running.block_ids), kv.pool.num_used) == (3, 3)
    assert cached_tokens(kv, tokens) == 0
    kv.free(running)
    kv.check_integrity(is_idle=True)


def test_append_slots_grows_by_whole_blocks_or_not_at_all() -> None:
    kv = manager(3)
    request = make_request(list(range(6)))
    assert kv.allocate(request, NO_PREFIX, 6)
    assert kv.append_slots(request, 8)
    assert len(request.block_ids) == 2
    assert not kv.append_slots(request, 13)
    assert len(request.block_ids) == 2
    assert kv.append_slots(request, 9)
    assert len(request.block_ids) == 3
    assert kv.append_slots(request, 5), "fewer tokens than there is room for"
    assert len(request.block_ids) == 3


def test_only_computed_and_known_tokens_are_named() -> None:
    kv = manager()
    request = make_request(list(range(13)))
    compute(kv, request, 6)
    assert len(kv.pool.index) == 1
    assert kv.append_slots(request, 18)
    request.num_computed_tokens = 18  # five of them are not known yet
    kv.name_blocks(request, being_written=False)
    assert len(kv.pool.index) == 3
    request.token_ids += [50, 51, 52, 53, 54]
    kv.name_blocks(request, being_written=False)
    assert len(kv.pool.index) == 4
    assert cached_tokens(kv, [*range(13), 50, 51, 52, 0]) == 16


def test_a_freed_request_can_be_admitted_again_and_finds_itself() -> None:
    kv = manager()
    request = make_request(list(range(13)))
    request.num_cached_tokens = compute(kv, request)
    kv.free(request)
    assert (request.block_ids, request.num_named_blocks) == ([], 0)
    assert compute(kv, request) == 12
    assert kv.counters.num_queried_tokens == 13, "recomputing is not a new prompt"
