"""Requests that lose their blocks: who, when, what is computed again, and that the tokens stay the same."""

from __future__ import annotations

import pytest
from fake_model import Loop, make_request, make_scheduler, undisturbed

from jaxpage.request import FinishReason, Request

SLOTS = 32  # 8 usable blocks of 4


def run(requests: list[Request], lag: int, **settings: object) -> Loop:
    """Runs the requests together; each must end as it does alone."""
    loop = Loop(make_scheduler(**{"num_usable": 8, **settings}))
    for request in requests:
        loop.scheduler.add(request)
    loop.run_all(lag)
    num_slots = loop.scheduler.kv.pool.num_usable * loop.block_size
    for request in requests:
        expected = undisturbed(request, loop.scheduler.max_model_len, num_slots)
        assert (request.token_ids[request.num_prompt_tokens :], request.finish_reason) == expected
    return loop


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("caching", [False, True])
class TestTinyPool:
    def test_a_request_alone_ends_when_the_pool_is_full(self, lag: int, caching: bool) -> None:
        request = make_request("a", range(20), 100)
        loop = run([request], lag, caching=caching)
        # 32 tokens have a place; the token that the last of them gives needs none.
        assert len(request.token_ids) == SLOTS + 1
        assert request.num_preemptions == 0
        assert loop.ended == [request]

    def test_a_prompt_that_never_fits_is_told_before(self, lag: int, caching: bool) -> None:
        scheduler = make_scheduler(num_usable=8, caching=caching)
        assert scheduler.fits(32)
        assert not scheduler.fits(33)

    @pytest.mark.parametrize("budget", [3, 64])
    def test_a_prompt_that_fills_the_pool(self, lag: int, caching: bool, budget: int) -> None:
        requests = [make_request("a", range(32), 5), make_request("b", range(5), 5)]
        run(requests, lag, caching=caching, budget=budget)
        assert len(requests[0].token_ids) == 33

    @pytest.mark.parametrize("count", [2, 4])
    def test_requests_that_fit_one_at_a_time(self, lag: int, caching: bool, count: int) -> None:
        requests = [make_request(str(index), range(index, index + 10), 20) for index in range(count)]
        loop = run(requests, lag, caching=caching)
        assert max(request.num_preemptions for request in requests) <= 2
        assert loop.scheduler.stats.num_preemptions >= 1
        assert [request.request_id for request in loop.ended] == [request.request_id for request in requests]

    @pytest.mark.parametrize("budget", [2, 64])
    def test_requests_with_one_prompt(self, lag: int, caching: bool, budget: int) -> None:
        run([make_request(str(index), range(8), 16) for index in range(4)], lag, caching=caching, budget=budget)

    @pytest.mark.parametrize("num_usable", [1, 2, 3])
    @pytest.mark.parametrize(("length", "max_tokens"), [(3, 1), (4, 4), (12, 1)])
    def test_pools_at_the_edge(self, lag: int, caching: bool, num_usable: int, length: int, max_tokens: int) -> None:
        """A prompt fits if it needs no more blocks than there are; then at most one token more than slots exists."""
        scheduler = make_scheduler(num_usable=num_usable)
        assert scheduler.fits(length) == (length <= 4 * num_usable)
        if scheduler.fits(length):
            request = make_request("a", range(length), max_tokens)
            run([request], lag, num_usable=num_usable, caching=caching)
            assert len(request.token_ids) == min(length + max_tokens, 4 * num_usable + 1)

    @pytest.mark.parametrize("budget", [64, 5])
    def test_a_preempted_request_as_long_as_the_pool(self, lag: int, caching: bool, budget: int) -> None:
        """With a shared prefix the second holds all blocks when the first takes one back: it can never return whole."""
        requests = [make_request("a", range(12), 3), make_request("b", range(32), 5)]
        run(requests, lag, caching=caching, budget=budget)


def preempt(loop: Loop, request: Request) -> None:
    """As if the pool were short: nothing else takes blocks from a lone request."""
    loop.scheduler._preempt(request)


class TestRecompute:
    def test_prompt_and_generated_tokens_are_computed_again(self) -> None:
        loop = Loop(make_scheduler(budget=4))
        request = make_request("a", range(6), 24)
        loop.scheduler.add(request)
        while len(request.token_ids) < 15:
            loop.step()
        loop.history.clear()
        preempt(loop, request)
        for _ in range(4):
            loop.step()
        assert loop.history == [[("a", 4, False)]] * 3 + [[("a", 3, True)]]
        loop.run_all()
        assert request.token_ids[6:] == undisturbed(request, 128, 256)[0]
        assert (request.num_prompt_tokens, request.num_preemptions) == (6, 1)

    def test_in_the_middle_of_the_first_prefill_and_twice(self) -> None:
        loop = Loop(make_scheduler(budget=4))
        request = make_request("a", range(10), 5)
        loop.scheduler.add(request)
        loop.step()
        preempt(loop, request)
        loop.step()
        loop.step()
        preempt(loop, request)
        loop.run_all()
        assert [count for [(_, count, _)] in loop.history] == [4, 4, 4, 4, 4, 2, 1, 1, 1, 1]
        assert request.token_ids[10:] == undisturbed(request, 128, 256)[0]

    @pytest.mark.parametrize("length", [7, 8, 9, 12, 13])
    @pytest.mark.parametrize("caching", [False, True])
    @pytest.mark.parametrize("lag", [0, 1])
    def test_at_block_borders(self, length: int, caching: bool, lag: int) -> None:
        loop = Loop(make_scheduler(caching=caching))
        request = make_request("a", range(6), 10)
        loop.scheduler.add(request)
        while len(request.token_ids) < length:
            loop.step(lag)
        preempt(loop, request)
        while not request.block_ids:
            loop.step(lag)
        assert len(request.block_ids) == -(-request.num_computed_tokens // 4)
        loop.run_all(lag)
        assert request.token_ids[6:] == undisturbed(request, 128, 256)[0]

    @pytest.mark.parametrize(("lag", "rest"), [(0, 1), (1, 2)])
    def test_own_old_blocks_are_used_again(self, lag: int, rest: int) -> None:
        loop = Loop(make_scheduler(caching=True))
        request = make_request("a", range(12), 20)
        loop.scheduler.add(request)
        while len(request.token_ids) < 21:
            loop.step(lag)
        loop.history.clear()
        preempt(loop, request)
        while not loop.history:
            loop.step(lag)
        # 20 of the tokens lie in five full blocks; with a step in flight one more token came in.
        assert loop.history == [[("a", rest, True)]]
        loop.run_all(lag)
        assert request.token_ids[12:] == undisturbed(request, 128, 256)[0]
        assert request.num_cached_tokens == 0, "that of the first admission"
        assert loop.scheduler.stats.num_prompt_tokens == 12

    def test_a_preempted_request_with_a_token_in_flight_waits_for_it(self) -> None:
        loop = Loop(make_scheduler())
        request = make_request("a", range(6), 5)
        loop.scheduler.add(request)
        loop.step(lag=1)
        preempt(loop, request)
        assert loop.step(lag=1).requests == []
        assert (len(request.token_ids), request.num_pending_tokens) == (7, 0)
        [item] = loop.step(lag=1).requests
        assert (item.start, item.num_tokens, item.is_admitted, item.output_index) == (0, 7, True, 1)
        loop.run_all(lag=1)
        assert request.token_ids[6:] == undisturbed(request, 128, 256)[0]

    def test_the_youngest_goes_first_and_comes_back_before_later_arrivals(self) -> None:
        loop = Loop(make_scheduler(num_usable=6))
        for name in "abc":
            loop.scheduler.add(make_request(name, range(8), 12))
        loop.step()
        loop.step()
        assert [name for name, _, _ in loop.history[-1]] == ["a", "b"]
        loop.scheduler.add(make_request("d", range(2), 1))
        assert [request.request_id for request in loop.scheduler.waiting] == ["c", "d"]
        loop.run_all()
        first_steps = {name: index for index, step in reversed(list(enumerate(loop.history))) for name, _, _ in step}
        back = next(
            index for index, step in enumerate(loop.history) if index > 0 and "c" in [name for name, _, _ in step]
        )
        assert first_steps["d"] >= back

    def test_stop_ids_and_limits_count_tokens_from_before(self) -> None:
        request = make_request("a", range(6), 7)
        loop = Loop(make_scheduler())
        loop.scheduler.add(request)
        for _ in range(3):
            loop.step()
        preempt(loop, request)
        loop.run_all()
        assert (len(request.token_ids), request.finish_reason) == (13, FinishReason.LENGTH)
