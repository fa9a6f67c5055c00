"""Block tables of requests: what is found in the cache, all-or-nothing admission, naming of full blocks."""

from __future__ import annotations

import itertools

import pytest

from jaxpage.kv.manager import KVCacheManager
from jaxpage.request import Request, SamplingParams

IDS = itertools.count()


def make_request(token_ids: list[int], **fields: object) -> Request:
    params = fields.pop("params", None) or SamplingParams()
    return Request(f"request {next(IDS)}", token_ids, params, max_tokens=16, **fields)


def compute(kv: KVCacheManager, request: Request, num_tokens: int | None = None) -> int:
    """Admits a request and computes its tokens; returns how many were found in the cache."""
    num_tokens = num_tokens or len(request.token_ids)
    prefix = kv.find_prefix(request)
    assert kv.admit(request, prefix, num_tokens)
    request.num_computed_tokens = num_tokens
    kv.name_full_blocks(request)
    return len(prefix) * kv.block_size


def cached_tokens(kv: KVCacheManager, token_ids: list[int], **fields: object) -> int:
    """Tokens found for a request that comes and goes."""
    request = make_request(token_ids, **fields)
    found = compute(kv, request)
    kv.free(request)
    kv.pool.check_integrity()
    return found


def manager(num_usable: int = 32, block_size: int = 4, enable_prefix_caching: bool = True) -> KVCacheManager:
    return KVCacheManager(num_usable + 1, block_size, enable_prefix_caching)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for(num_tokens: int, num_blocks: int) -> None:
    assert manager().blocks_for(num_tokens) == num_blocks


@pytest.mark.parametrize(("length", "found"), [(1, 0), (4, 0), (5, 4), (6, 4), (8, 4), (11, 8), (16, 12), (17, 16)])
def test_a_hit_leaves_at_least_one_token_to_compute(length: int, found: int) -> None:
    kv = manager()
    tokens = list(range(length))
    assert [cached_tokens(kv, tokens) for _ in range(3)] == [0, found, found]
    assert (kv.num_queried_tokens, kv.num_hit_tokens) == (3 * length, 2 * found)


def test_nothing_is_found_without_prefix_caching() -> None:
    kv = manager(enable_prefix_caching=False)
    assert [cached_tokens(kv, list(range(16))) for _ in range(2)] == [0, 0]
    assert kv.pool.num_cached == 0


def test_a_request_that_scores_its_prompt_takes_nothing_from_the_cache() -> None:
    kv = manager()
    cached_tokens(kv, list(range(16)))
    assert cached_tokens(kv, list(range(16)), params=SamplingParams(prompt_logprobs=1)) == 0
    assert cached_tokens(kv, list(range(16)), params=SamplingParams(prompt_logprobs=0)) == 0
    assert cached_tokens(kv, list(range(16)), params=SamplingParams(logprobs=1)) == 12


def test_salts_separate() -> None:
    kv = manager(64)
    tokens = list(range(13))
    salts = ["a", "b", None, "model name"]
    assert [cached_tokens(kv, tokens, cache_salt=salt) for salt in salts] == [0, 0, 0, 0]
    assert [cached_tokens(kv, tokens, cache_salt=salt) for salt in salts] == [12, 12, 12, 12]


def test_a_block_behind_a_different_block_is_not_found() -> None:
    kv = manager()
    cached_tokens(kv, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert cached_tokens(kv, [0, 2, 3, 4, 5, 6, 7, 8, 9]) == 0


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ([1, 23, 9], [12, 3, 9], 0),
        ([0, 1, 2], [1, 0, 2], 0),
        ([256, 0, 5], [1, 0, 5], 0),
        ([97] * 5, [97] * 7, 4),
    ],
)
def test_look_alikes(first: list[int], second: list[int], found: int) -> None:
    kv = manager(block_size=2)
    cached_tokens(kv, first)
    assert cached_tokens(kv, second) == found


def test_a_partly_filled_block_is_not_shared() -> None:
    kv = manager()
    tokens = list(range(11))
    running = make_request(tokens)
    compute(kv, running)
    for shared, found in [(3, 0), (4, 4), (5, 4), (6, 4), (7, 4), (8, 8), (11, 8)]:
        assert cached_tokens(kv, [*tokens[:shared], 99, 98]) == found
    kv.free(running)
    for shared, found in [(5, 4), (7, 4), (8, 8), (11, 8)]:
        assert cached_tokens(kv, [*tokens[:shared], 97, 96]) == found


def test_requests_share_blocks_while_both_run() -> None:
    kv = manager()
    first, second = make_request(list(range(13))), make_request(list(range(13)))
    assert (compute(kv, first), compute(kv, second)) == (0, 12)
    assert first.block_ids[:3] == second.block_ids[:3]
    assert first.block_ids[3] != second.block_ids[3]
    assert [kv.pool.ref_count(block) for block in first.block_ids] == [2, 2, 2, 1]
    kv.free(first)
    assert [kv.pool.ref_count(block) for block in second.block_ids] == [1, 1, 1, 1]
    kv.free(second)
    assert kv.pool.num_free == kv.pool.num_usable


@pytest.mark.parametrize("a_first", [True, False])
def test_find_hold_and_allocate_are_one_act(a_first: bool) -> None:
    """8 usable blocks: 5 held, 2 cached of X, 1 free. A revives X's blocks and needs one more, B needs two new ones."""
    kv = manager(8)
    assert kv.admit(make_request([50] * 20), [], 20)
    x = list(range(8))
    cached_tokens(kv, x)
    a, b = make_request([*x, 20, 21, 22, 23]), make_request(list(range(30, 38)))
    found = kv.find_prefix(a)
    assert len(found) == 2
    if a_first:
        assert kv.admit(a, found, 12)
        assert not kv.admit(b, kv.find_prefix(b), 8)
        assert a.block_ids[:2] == found
    else:
        assert kv.admit(b, kv.find_prefix(b), 8)
        found = kv.find_prefix(a)
        assert len(found) == 1, "B took the free block and the tail of X"
        assert not kv.admit(a, found, 12)
    kv.pool.check_integrity()


def test_admission_is_all_or_nothing() -> None:
    kv = manager(4)
    cached_tokens(kv, list(range(9)))
    before = (kv.pool.num_free, kv.pool.num_cached, kv.num_queried_tokens, kv.num_hit_tokens)
    request = make_request(list(range(20)))
    found = kv.find_prefix(request)
    assert len(found) == 2
    assert not kv.admit(request, found, 20)
    assert request.block_ids == []
    assert (kv.pool.num_free, kv.pool.num_cached, kv.num_queried_tokens, kv.num_hit_tokens) == before
    assert not kv.admit(request, found, 16), "its first chunk would fit, but never its last one"
    assert kv.admit(make_request(list(range(16))), found, 12)
    assert kv.pool.num_free == 1, "the last chunk takes its block later"


def test_held_blocks_are_never_evicted() -> None:
    kv = manager(8)
    prefix = list(range(12))
    a, b, c = make_request([*prefix, 20]), make_request([*prefix, 30]), make_request(list(range(40, 60)))
    compute(kv, a)
    compute(kv, b)
    assert kv.pool.num_free == 3
    assert not kv.admit(c, kv.find_prefix(c), 20)
    kv.free(a)  # its tail block only: the prefix is held by B
    assert kv.pool.num_free == 4
    assert not kv.admit(c, kv.find_prefix(c), 20)
    kv.free(b)
    assert kv.admit(c, kv.find_prefix(c), 20)


def test_tails_are_evicted_before_heads() -> None:
    kv = manager(4)
    x = list(range(14))
    assert cached_tokens(kv, x) == 0
    assert cached_tokens(kv, list(range(20, 28))) == 0
    assert cached_tokens(kv, x) == 8


def test_append_slots_grows_by_whole_blocks_or_not_at_all() -> None:
    kv = manager(3)
    request = make_request(list(range(6)))
    assert kv.admit(request, [], 6)
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
    assert kv.pool.num_cached == 1
    assert kv.append_slots(request, 18)
    request.num_computed_tokens = 18  # five of them are not known yet
    kv.name_full_blocks(request)
    assert kv.pool.num_cached == 3
    request.token_ids += [50, 51, 52, 53, 54]
    kv.name_full_blocks(request)
    assert kv.pool.num_cached == 4
    assert cached_tokens(kv, [*range(13), 50, 51, 52, 0]) == 16


def test_a_freed_request_can_be_admitted_again_and_finds_itself() -> None:
    kv = manager()
    request = make_request(list(range(13)))
    compute(kv, request)
    kv.free(request)
    assert (request.block_ids, request.num_named_blocks) == ([], 0)
    assert compute(kv, request) == 12
