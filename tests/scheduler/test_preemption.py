"""Requests that lose their blocks: who, when, what is computed again, and that the tokens stay the same."""

from __future__ import annotations

from typing import Any

import pytest
from engine_loop import Loop
from fake_model import make_request, make_scheduler, undisturbed

from jaxpage.request import FinishReason, Request
from jaxpage.scheduler.preemption import PreemptionPolicy

SLOTS = 32  # 8 usable blocks of 4
SWAP = {"mode": "swap", "num_host_blocks": 64}


def run(requests: list[Request], lag: int, **settings: Any) -> Loop:
    """Runs the requests together; each must end as it does alone."""
    loop = Loop(make_scheduler(**{"num_usable": 8, **settings}))
    for request in requests:
        loop.add(request)
    loop.run_all(lag)
    loop.verify()
    return loop


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("caching", [False, True])
class TestTinyPool:
    def test_pre_1_a_request_alone_ends_when_the_pool_is_full(self, lag: int, caching: bool) -> None:
        request = make_request("a", range(20), 100)
        loop = run([request], lag, caching=caching)
        # 32 tokens have a place; the token that the last of them gives needs none.
        assert len(request.token_ids) == SLOTS + 1
        assert request.num_preemptions == 0
        assert loop.ended == [request]

    def test_pre_1_a_prompt_that_never_fits_is_told_before(self, lag: int, caching: bool) -> None:
        scheduler = make_scheduler(num_usable=8, caching=caching)
        assert scheduler.fits(32)
        assert not scheduler.fits(33)

    @pytest.mark.parametrize("budget", [3, 64])
    def test_a_prompt_that_fills_the_pool(self, lag: int, caching: bool, budget: int) -> None:
        requests = [make_request("a", range(32), 5), make_request("b", range(5), 5)]
        run(requests, lag, caching=caching, budget=budget)
        assert len(requests[0].token_ids) == 33

    @pytest.mark.parametrize("count", [2, 4])
    @pytest.mark.parametrize(
        "more", [{}, SWAP, {"mode": "swap", "num_host_blocks": 3}], ids=["recompute", "swap", "few"]
    )
    def test_pre_1a_requests_that_fit_one_at_a_time(
        self, lag: int, caching: bool, count: int, more: dict[str, Any]
    ) -> None:
        requests = [make_request(str(index), range(index, index + 10), 20) for index in range(count)]
        loop = run(requests, lag, caching=caching, **more)
        assert max(request.num_preemptions for request in requests) <= 2
        assert loop.scheduler.stats.num_preemptions >= 1
        assert [request.request_id for request in loop.ended] == [request.request_id for request in requests]

    @pytest.mark.parametrize("budget", [2, 64])
    def test_requests_with_one_prompt(self, lag: int, caching: bool, budget: int) -> None:
        run([make_request(str(index), range(8), 16) for index in range(4)], lag, caching=caching, budget=budget)

    @pytest.mark.parametrize("num_usable", [1, 2, 3])
    @pytest.mark.parametrize(("length", "max_tokens"), [(3, 1), (4, 4), (12, 1)])
    def test_pre_1c_pools_at_the_edge(
        self, lag: int, caching: bool, num_usable: int, length: int, max_tokens: int
    ) -> None:
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


class TestForced:
    def test_pre_3_prompt_and_generated_tokens_are_computed_again(self) -> None:
        loop = Loop(make_scheduler(budget=4))
        request = make_request("a", range(6), 24)
        loop.add(request)
        while len(request.token_ids) < 15:
            loop.step()
        loop.history.clear()
        loop.preempt(request)
        for _ in range(4):
            loop.step()
        assert loop.history == [[("a", 4, False)]] * 3 + [[("a", 3, True)]]
        loop.run_all()
        loop.verify()
        assert (request.num_prompt_tokens, request.num_preemptions) == (6, 1)

    def test_pre_3_in_the_middle_of_the_first_prefill_and_twice(self) -> None:
        loop = Loop(make_scheduler(budget=4))
        request = make_request("a", range(10), 5)
        loop.add(request)
        loop.step()
        loop.preempt(request)
        loop.step()
        loop.step()
        loop.preempt(request)
        loop.run_all()
        loop.verify()
        assert [count for [(_, count, _)] in loop.history] == [4, 4, 4, 4, 4, 2, 1, 1, 1, 1]

    def test_pre_3_a_swapped_request_goes_on_where_it_was(self) -> None:
        loop = Loop(make_scheduler(budget=4, num_host_blocks=8))
        request = make_request("a", range(10), 5)
        loop.add(request)
        loop.step()
        loop.preempt(request, mode="swap")
        loop.step()
        loop.preempt(request, mode="swap")
        loop.run_all()
        loop.verify()
        assert [count for [(_, count, _)] in loop.history] == [4, 4, 2, 1, 1, 1, 1]
        stats, counters = loop.scheduler.stats, loop.scheduler.kv.counters
        assert (stats.num_swap_preemptions, stats.num_recompute_preemptions) == (2, 0)
        assert (counters.num_swapped_out_blocks, counters.num_swapped_in_blocks) == (3, 3)

    @pytest.mark.parametrize("length", [7, 8, 9, 12, 13])
    @pytest.mark.parametrize("caching", [False, True])
    @pytest.mark.parametrize("lag", [0, 1])
    @pytest.mark.parametrize("mode", ["recompute", "swap"])
    def test_pre_3a_at_block_borders(self, length: int, caching: bool, lag: int, mode: str) -> None:
        loop = Loop(make_scheduler(caching=caching, num_host_blocks=8))
        request = make_request("a", range(6), 10)
        loop.add(request)
        while len(request.token_ids) < length:
            loop.step(lag)
        loop.preempt(request, mode=mode)
        while not request.block_ids:
            loop.step(lag)
        assert len(request.block_ids) == -(-request.num_computed_tokens // 4)
        loop.run_all(lag)
        loop.verify()

    @pytest.mark.parametrize("lag", [0, 1])
    def test_pre_3b_own_old_blocks_are_used_again(self, lag: int) -> None:
        loop = Loop(make_scheduler(caching=True))
        request = make_request("a", range(12), 20)
        loop.add(request)
        while len(request.token_ids) < 21:
            loop.step(lag)
        loop.history.clear()
        loop.preempt(request)
        while not loop.history:
            loop.step(lag)
        # Full blocks are shared and the last one is copied: the one token that had no keys and values is computed.
        assert loop.history == [[("a", 1, True)]]
        loop.run_all(lag)
        loop.verify()
        assert request.num_cached_tokens == 0, "that of the first admission"
        assert loop.scheduler.stats.num_prompt_tokens == 12
        assert loop.scheduler.kv.counters.num_queried_tokens == 12

    @pytest.mark.parametrize(("mode", "first", "count"), [("recompute", 0, 7), ("swap", 6, 1)])
    def test_a_preempted_request_with_a_token_in_flight_waits_for_it(self, mode: str, first: int, count: int) -> None:
        loop = Loop(make_scheduler(num_host_blocks=8))
        request = make_request("a", range(6), 5)
        loop.add(request)
        loop.step(lag=1)
        loop.preempt(request, mode=mode)
        assert loop.step(lag=1).requests == []
        assert (len(request.token_ids), request.num_pending_tokens) == (7, 0)
        schedule = loop.step(lag=1)
        [item] = schedule.requests
        assert (item.start, item.num_tokens, item.output_index, schedule.admitted) == (first, count, 1, [request])
        loop.run_all(lag=1)
        loop.verify()

    def test_the_last_in_order_gives_way_and_comes_back_before_later_arrivals(self) -> None:
        loop = Loop(make_scheduler(num_usable=6))
        requests = {name: make_request(name, range(8), 12) for name in "abc"}
        for request in requests.values():
            loop.add(request)
        loop.step()
        loop.step()
        assert [name for name, _, _ in loop.history[-1]] == ["a", "b"]
        loop.add(make_request("d", range(2), 1))
        assert [group.requests[0].request_id for group in loop.scheduler.waiting] == ["c", "d"]
        loop.run_all()
        loop.verify()
        steps = [[name for name, _, _ in step] for step in loop.history]
        assert next(index for index, names in enumerate(steps) if "d" in names) >= next(
            index for index, names in enumerate(steps) if index > 0 and "c" in names
        )
        assert requests["a"].num_preemptions == 0

    def test_who_has_nobody_behind_waits_instead_of_starting_again(self) -> None:
        """The last in order pauses until a block is free; it keeps what it has."""
        loop = Loop(make_scheduler(num_usable=4))
        first, last = make_request("a", range(8), 4), make_request("b", range(4), 8)
        loop.add(first)
        loop.step()
        loop.add(last)
        for _ in range(6):
            loop.step()
        assert loop.history[1] == [("a", 1, True), ("b", 4, True)]
        assert loop.history[2] == loop.history[3] == [("a", 1, True)]
        assert loop.history[4] == [("b", 1, True)]
        assert (first.num_preemptions, last.num_preemptions) == (0, 0)
        loop.run_all()
        loop.verify()

    def test_stop_ids_and_limits_count_tokens_from_before(self) -> None:
        request = make_request("a", range(6), 7)
        loop = Loop(make_scheduler())
        loop.add(request)
        for _ in range(3):
            loop.step()
        loop.preempt(request)
        loop.run_all()
        assert (len(request.token_ids), request.finish_reason) == (13, FinishReason.LENGTH)
        assert request.token_ids[6:] == undisturbed(request, 128, 256)[0]


class TestPolicy:
    def test_a_full_host_means_computing_again(self) -> None:
        requests = [make_request(str(index), range(index, index + 10), 20) for index in range(3)]
        loop = run(requests, 0, mode="swap", num_host_blocks=1)
        stats = loop.scheduler.stats
        assert (stats.num_swap_preemptions, stats.num_recompute_preemptions > 0) == (0, True)

    @pytest.mark.parametrize(("seconds_per_token", "is_swapped"), [(1.0, True), (0.1, False)])
    def test_auto_takes_what_costs_less(self, seconds_per_token: float, is_swapped: bool) -> None:
        """A block of four tokens, out and in: one second; to compute it again: four times the cost of a token."""
        policy = PreemptionPolicy("auto", seconds_per_token=seconds_per_token, seconds_per_block=0.5)
        assert policy.prefers_swap(12, 3) is is_swapped
        loop = Loop(make_scheduler(num_usable=8, num_host_blocks=8))
        loop.scheduler.preemption.policy = policy
        for index in range(2):
            loop.add(make_request(str(index), range(index, index + 10), 20))
        loop.run_all()
        loop.verify()
        stats = loop.scheduler.stats
        assert (stats.num_swap_preemptions > 0, stats.num_recompute_preemptions > 0) == (is_swapped, not is_swapped)

    @pytest.mark.parametrize("mode", ["swap", "recompute"])
    def test_a_forced_way_asks_for_no_costs(self, mode: str) -> None:
        assert PreemptionPolicy(mode, seconds_per_token=1.0).prefers_swap(4, 1) is (mode == "swap")
