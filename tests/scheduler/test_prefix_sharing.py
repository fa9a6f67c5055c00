"""What requests share through the prefix cache: who finds what, who waits, and that nobody's tokens change."""

from __future__ import annotations

import contextlib
import random

import pytest
from engine_loop import Loop
from fake_model import make_request, make_samples, make_scheduler

from jaxpage.kv import manager
from jaxpage.kv.block_hash import block_hash
from jaxpage.request import Request


def cached(loop: Loop, prompt: list[int], max_tokens: int = 1, lag: int = 0) -> int:
    """Runs a request to its end; the prompt tokens it found."""
    request = make_request(f"{len(loop.samples)}", prompt, max_tokens)
    loop.add(request)
    loop.run_all(lag)
    return request.num_cached_tokens


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("length", [6, 8, 11, 16])
def test_pfx_1_a_hit_that_covers_the_whole_prompt(lag: int, length: int) -> None:
    loop = Loop(make_scheduler(caching=True))
    prompt = list(range(length))
    assert [cached(loop, prompt, 12, lag) for _ in range(3)] == [0, length - 1, length - 1]
    loop.verify()
    assert sum(count for step in loop.history for _, count, _ in step) == length + 2 + 3 * 11


@pytest.mark.parametrize("block_size", range(1, 17))
def test_pfx_1_a_repeated_prompt_computes_exactly_one_token(block_size: int) -> None:
    for length in range(1, 41):
        loop = Loop(make_scheduler(block_size=block_size, caching=True))
        prompt = [token % 12 for token in range(length)]
        assert [cached(loop, prompt), cached(loop, prompt)] == [0, length - 1]
        assert loop.history == [[("0", length, True)], [("1", 1, True)]]
        loop.verify()


@pytest.mark.parametrize("lag", [0, 1])
def test_pfx_1a_the_second_and_third_turn_of_a_chat(lag: int) -> None:
    """Keys and values exist for all but the last token of an answer."""
    loop = Loop(make_scheduler(caching=True))
    tokens = list(range(7))
    for num_known, max_tokens in [(0, 6), (12, 8), (25, 4)]:
        request = make_request(f"{num_known}", tokens, max_tokens)
        loop.add(request)
        loop.run_all(lag)
        assert request.num_cached_tokens == num_known
        tokens = [*request.token_ids, 1, 2, 3, 4, 5]
    loop.verify()


class TestEqualPrompts:
    """PFX-1b."""

    @pytest.mark.parametrize("lag", [0, 1])
    @pytest.mark.parametrize("caching", [True, False])
    def test_pfx_1b_in_one_step(self, lag: int, caching: bool) -> None:
        loop = Loop(make_scheduler(caching=caching, budget=256))
        requests = [make_request(str(index), range(13), 5) for index in range(8)]
        for request in requests:
            loop.add(request)
        loop.step(lag)
        assert loop.scheduler.kv.pool.num_used == (3 + 8 if caching else 4 * 8)
        assert [count for _, count, _ in loop.history[0]] == ([13] + [1] * 7 if caching else [13] * 8)
        loop.run_all(lag)
        loop.verify()
        assert {tuple(request.token_ids) for request in requests} == {tuple(requests[0].token_ids)}

    @pytest.mark.parametrize("caching", [True, False])
    def test_pfx_1b_as_samples(self, caching: bool) -> None:
        loop = Loop(make_scheduler(caching=caching, budget=256))
        loop.add(*make_samples("a", range(13), 8, 5))
        loop.step()
        assert loop.scheduler.kv.pool.num_used == 4
        loop.step()
        assert loop.scheduler.kv.pool.num_used == 3 + 8
        loop.run_all()
        loop.verify()

    def test_pfx_1b_one_step_apart(self) -> None:
        loop = Loop(make_scheduler(caching=True, budget=256))
        for lot in range(2):
            for index in range(4):
                loop.add(make_request(f"{lot}{index}", range(13), 5))
            loop.step()
        assert loop.scheduler.kv.pool.num_used == 3 + 8
        loop.run_all()
        loop.verify()


@pytest.mark.parametrize(("num_cached", "rest"), [(8, 13), (16, 5)])
def test_pfx_1c_hits_that_end_inside_a_chunk(num_cached: int, rest: int) -> None:
    loop = Loop(make_scheduler(budget=6, caching=True))
    cached(loop, list(range(num_cached)))
    loop.add(make_request("x", [9], 9))
    loop.add(make_request("y", [10], 9))
    loop.step()
    loop.history.clear()
    request = make_request("z", [*range(num_cached), *[11] * (21 - num_cached)], 6)
    loop.add(request)
    loop.run_all()
    loop.verify()
    assert request.num_cached_tokens == num_cached
    counts = [count for step in loop.history for name, count, _ in step if name == "z"]
    assert counts == [4] * (rest // 4) + [rest % 4] + [1] * 5


@pytest.mark.parametrize("a_first", [True, False])
@pytest.mark.parametrize("chunked", [True, False])
def test_pfx_2_a_block_found_for_one_request_is_not_given_to_another(a_first: bool, chunked: bool) -> None:
    loop = Loop(make_scheduler(num_usable=8, caching=True, chunked=chunked, budget=128))
    x = list(range(8))
    cached(loop, x)
    loop.add(make_request("long", [11] * 17, 3))
    loop.step()
    pool = loop.scheduler.kv.pool
    assert (pool.num_used, len(pool.index)) == (5, 2 + 5)
    pair = [make_request("a", [*x, 11, 10, 9, 8], 4), make_request("b", [7, 7, 7, 7, 6, 6, 6, 6], 4)]
    for request in pair if a_first else reversed(pair):
        loop.add(request)
    loop.step()
    assert sorted(request.slot >= 0 for request in pair) == [False, True]
    loop.run_all()
    loop.verify()


@pytest.mark.parametrize("seed", range(3))
def test_pfx_2_500_requests_with_shared_prefixes_in_a_pool_for_three(seed: int) -> None:
    draw = random.Random(seed)
    stems = [[draw.randrange(12) for _ in range(12)] for _ in range(4)]
    loop = Loop(make_scheduler(num_usable=15, caching=True, budget=24), books_every=20)
    for index in range(500):
        stem = draw.choice(stems)[: draw.randint(1, 12)]
        loop.add(make_request(str(index), stem + [draw.randrange(3) for _ in range(draw.randint(0, 4))], 4))
    loop.run_all(seed % 2, max_steps=3000)
    loop.verify()
    assert loop.scheduler.kv.counters.num_hit_tokens > 500


def test_pfx_2a_a_prefix_outlives_what_follows_it() -> None:
    loop = Loop(make_scheduler(num_usable=4, caching=True))
    x, y = [token % 12 for token in range(14)], [7, 6, 5, 4, 3, 2, 1, 0]
    assert [cached(loop, prompt) for prompt in (x, y, x)] == [0, 0, 8]
    loop.verify()


def test_pfx_2b_held_blocks_are_never_evicted() -> None:
    loop = Loop(make_scheduler(num_usable=8, caching=True))
    prefix = list(range(12))
    a, b, c = (
        make_request("a", [*prefix, 1], 3),
        make_request("b", [*prefix, 2], 6),
        make_request("c", [5] * 20, 3),
    )
    for request in (a, b, c):
        loop.add(request)
    loop.step()
    assert (loop.scheduler.kv.pool.num_used, c.slot) == (5, -1)
    while c.slot < 0:
        loop.step()
    assert a.is_finished and b.is_finished
    loop.run_all()
    loop.verify()


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("is_running", [True, False])
def test_pfx_2c_partly_filled_blocks_are_copied(lag: int, is_running: bool) -> None:
    loop = Loop(make_scheduler(caching=True))
    first = make_request("p", [0, 1, 2, 3, 4, 5], 5 if not is_running else 60)
    loop.add(first)
    while len(first.token_ids) < 11:
        loop.step(lag)
    others: dict[int, Request] = {}
    for shared in (5, 6, 7, 8):
        different = (first.token_ids[shared] + 1) % 12
        others[shared] = make_request(f"{shared}", [*first.token_ids[:shared], different, 0], 6)
        loop.add(others[shared])
        loop.step(lag)
    assert first.is_finished is not is_running
    loop.run_all(lag)
    loop.verify()
    assert {shared: request.num_cached_tokens for shared, request in others.items()} == {5: 5, 6: 6, 7: 7, 8: 8}


def test_pfx_3_salts_separate() -> None:
    loop = Loop(make_scheduler(caching=True))
    found = []
    for salt in ["a", "b", None, "a", "b", None]:
        request = make_request(f"{len(found)}", range(13), 2, salt=salt)
        loop.add(request)
        loop.run_all()
        found.append(request.num_cached_tokens)
    assert found == [0, 0, 0, 12, 12, 12]
    loop.verify()


@pytest.mark.parametrize("bits", [8, 128])
def test_pfx_3_names_of_128_bits_keep_wrong_hits_away(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With names of 8 bits the same requests do meet, so the strong ones are what is used."""
    monkeypatch.setattr(manager, "block_hash", lambda *args: block_hash(*args)[: bits // 8])
    draw = random.Random(0)
    loop = Loop(make_scheduler(num_usable=64, caching=True, budget=128), books_every=100)
    for index in range(2000):
        loop.add(make_request(str(index), [draw.randrange(12) for _ in range(9)], 1))
    with contextlib.nullcontext() if bits == 128 else pytest.raises(AssertionError):
        loop.run_all(max_steps=3000)
        loop.verify()


def test_pfx_3c_reset_of_the_cache() -> None:
    loop = Loop(make_scheduler(block_size=16, caching=True))
    prompt = [token % 12 for token in range(40)]
    assert [cached(loop, prompt), cached(loop, prompt)] == [0, 39]
    loop.scheduler.kv.reset_prefix_cache()
    running = make_request("running", prompt, 9)
    loop.add(running)
    loop.step()
    assert running.num_cached_tokens == 0
    loop.scheduler.kv.reset_prefix_cache()
    loop.step()
    other = make_request("other", prompt, 2)
    loop.add(other)
    loop.step()
    assert (other.num_cached_tokens, running.is_finished) == (0, False)
    loop.run_all()
    loop.verify()
