"""Samples and beams of one prompt: computed once, shared until they part, preempted and resumed together."""

from __future__ import annotations

from typing import Any

import pytest
from engine_loop import Loop
from fake_model import make_request, make_samples, make_scheduler, make_search, undisturbed_search

from jaxpage.request import FinishReason
from jaxpage.scheduler.group import RequestGroup

SWAP = {"mode": "swap", "num_host_blocks": 64}
WAYS = pytest.mark.parametrize("more", [{}, SWAP], ids=["recompute", "swap"])


def num_computed(loop: Loop) -> int:
    return sum(count for step in loop.history for _, count, _ in step)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("length", [1, 3, 4, 6, 8, 13])
@pytest.mark.parametrize("n", [2, 4, 8])
class TestSamples:
    def test_the_prompt_is_computed_once_and_each_divergence_copies_one_block(
        self, caching: bool, lag: int, length: int, n: int
    ) -> None:
        loop = Loop(make_scheduler(caching=caching, max_num_seqs=8))
        loop.add(*make_samples("a", range(length), n, 6))
        loop.step(lag)
        assert loop.history[0] == [("a0", length, True)] + [(f"a{index}", 0, True) for index in range(1, n)]
        assert loop.scheduler.kv.pool.num_used == -(-length // 4)
        loop.run_all(lag)
        loop.verify()
        assert num_computed(loop) == length + n * 5
        assert loop.scheduler.kv.counters.num_copied_blocks == (n - 1 if length % 4 else 0)
        assert loop.scheduler.stats.num_prompt_tokens == length
        assert loop.scheduler.stats.num_generated_tokens == 6 * n

    def test_in_chunks(self, caching: bool, lag: int, length: int, n: int) -> None:
        loop = Loop(make_scheduler(caching=caching, max_num_seqs=8, budget=8, block_size=2))
        loop.add(*make_samples("a", range(length), n, 3))
        loop.run_all(lag)
        loop.verify()
        assert num_computed(loop) == length + n * 2

    def test_more_samples_than_slots(self, caching: bool, lag: int, length: int, n: int) -> None:
        """Who comes later shares what a sibling still holds, and computes one token of the prompt again."""
        loop = Loop(make_scheduler(caching=caching, max_num_seqs=2, num_usable=20))
        loop.add(*make_samples("a", range(length), n, 6))
        loop.run_all(lag)
        loop.verify()
        late = n - 2
        assert num_computed(loop) <= length + n * 5 + late * (length if not caching else 1)


class TestPreemption:
    @WAYS
    @pytest.mark.parametrize("lag", [0, 1])
    @pytest.mark.parametrize("caching", [True, False])
    def test_pre_1b_samples_whose_tails_do_not_fit_together(
        self, lag: int, caching: bool, more: dict[str, Any]
    ) -> None:
        loop = Loop(make_scheduler(num_usable=8, caching=caching, **more))
        requests = make_samples("a", range(8), 4, 16)
        loop.add(*requests)
        loop.run_all(lag)
        loop.verify()
        assert requests[0].num_preemptions == 0, "the first goes on"
        assert loop.scheduler.stats.num_preemptions > 0

    @pytest.mark.parametrize("mode", ["recompute", "swap"])
    @pytest.mark.parametrize("lag", [0, 1])
    @pytest.mark.parametrize("caching", [True, False])
    @pytest.mark.parametrize("members", [[0], [1], [2], [0, 1, 2]])
    def test_pre_2b_of_forked_samples(self, mode: str, lag: int, caching: bool, members: list[int]) -> None:
        loop = Loop(make_scheduler(num_host_blocks=16, caching=caching))
        requests = make_samples("a", range(6), 3, 12)
        loop.add(*requests)
        loop.step(lag)
        for _ in range(2):
            used = loop.scheduler.kv.pool.num_used
            loop.preempt(*[requests[index] for index in members], mode=mode)
            while any(request.slot < 0 for request in requests):
                loop.step(lag)
            assert loop.scheduler.kv.pool.num_used <= used + 3, "sharing is lost"
            for _ in range(3):
                loop.step(lag)
        loop.run_all(lag)
        loop.verify()

    @pytest.mark.parametrize("caching", [True, False])
    def test_pre_2b_shared_blocks_are_swapped_once_and_shared_again(self, caching: bool) -> None:
        loop = Loop(make_scheduler(num_host_blocks=16, caching=caching))
        requests = make_samples("a", range(6), 3, 12)
        loop.add(*requests)
        loop.step()
        loop.step()
        pool, counters = loop.scheduler.kv.pool, loop.scheduler.kv.counters
        assert (pool.num_used, pool.num_shared) == (4, 1)
        loop.preempt(*requests, mode="swap")
        assert (counters.num_swapped_out_blocks, pool.num_used) == (4, 0)
        loop.scheduler.kv.reset_prefix_cache()
        loop.step()
        assert (counters.num_swapped_in_blocks, pool.num_used, pool.num_shared) == (4, 4, 1)
        assert loop.history[-1] == [(f"a{index}", 1, True) for index in range(3)], "nothing is computed again"
        loop.run_all()
        loop.verify()

    def test_a_recomputed_sample_shares_with_its_siblings_without_a_cache(self) -> None:
        loop = Loop(make_scheduler())
        requests = make_samples("a", range(13), 3, 12)
        loop.add(*requests)
        for _ in range(3):
            loop.step()
        loop.preempt(requests[1])
        loop.history.clear()
        loop.step()
        counts = {name: count for name, count, _ in loop.history[0]}
        same = next(
            place
            for place, tokens in enumerate(zip(*[requests[index].token_ids[13:] for index in (0, 1)], strict=False))
            if tokens[0] != tokens[1]
        )
        assert counts["a1"] <= 3 - same, "the prompt, and what is alike after it, is there already"
        loop.run_all()
        loop.verify()

    @pytest.mark.parametrize("index", [0, 1, 2])
    @pytest.mark.parametrize("lag", [0, 1])
    @pytest.mark.parametrize("where", ["running", "swapped", "waiting"])
    def test_one_sample_ends_alone(self, index: int, lag: int, where: str) -> None:
        loop = Loop(make_scheduler(num_host_blocks=16, caching=True))
        requests = make_samples("a", range(6), 3, 12)
        group = loop.add(*requests)
        for _ in range(3 if where != "waiting" else 0):
            loop.step(lag)
        if where == "swapped":
            loop.preempt(*requests, mode="swap")
        loop.abort(group, [requests[index]])
        loop.checks.books()
        loop.run_all(lag)
        loop.verify()
        others = [request for request in requests if request is not requests[index]]
        assert [len(request.token_ids) for request in others] == [18, 18]


def start_beams(lag: int = 0, num_steps: int = 10, **more: Any) -> tuple[Loop, RequestGroup]:
    """BEAM-1c: a prompt of 6, width 4, 30 tokens; the pool holds three full copies in blocks of 4."""
    loop = Loop(make_scheduler(num_usable=27, **more))
    group = loop.add_search(make_request("a", range(6), 30), make_search(30, 4))
    for _ in range(num_steps):
        loop.step(lag)
    return loop, group


@pytest.mark.parametrize("caching", [True, False])
class TestBeams:
    @pytest.mark.parametrize("lag", [0, 1])
    def test_beam_1c_the_prompt_is_stored_once(self, caching: bool, lag: int) -> None:
        loop, group = start_beams(lag, 1, caching=caching)
        most = 0
        while not loop.is_done:
            if len(group.requests) == 4:
                assert len({request.block_ids[0] for request in group.requests}) == 1
            most = max(most, loop.scheduler.kv.pool.num_used)
            loop.step(lag)
        loop.verify()
        assert most < 4 * 9
        assert sum(count for name, count, _ in loop.history[0]) == 6
        assert loop.scheduler.stats.num_preemptions == 0

    def test_beam_1c_abort(self, caching: bool) -> None:
        loop, group = start_beams(caching=caching)
        first = group.requests[0]
        loop.abort(group)
        assert (loop.scheduler.kv.pool.num_used, first.finish_reason) == (0, FinishReason.ABORT)
        loop.run_all()
        loop.verify()

    @pytest.mark.parametrize("mode", ["recompute", "swap"])
    @pytest.mark.parametrize("lag", [0, 1])
    @pytest.mark.parametrize("budget", [8, 64])
    def test_beam_1c_preempted(self, caching: bool, mode: str, lag: int, budget: int) -> None:
        loop, group = start_beams(lag, caching=caching, num_host_blocks=30, budget=budget)
        while not group.can_be_preempted:
            loop.step(lag)
        used = loop.scheduler.kv.pool.num_used
        members = list(group.requests)
        loop.preempt(*members, mode=mode)
        assert loop.scheduler.kv.pool.num_used == 0
        while group.waiting:
            loop.step(lag)
        assert loop.scheduler.kv.pool.num_used <= used + 4, "sharing is lost"
        loop.run_all(lag)
        loop.verify()
        assert loop.scheduler.stats.num_preemptions == len(members)

    def test_beams_beside_samples(self, caching: bool) -> None:
        loop = Loop(make_scheduler(num_usable=20, caching=caching, num_host_blocks=10, mode="swap"))
        prompt = list(range(6))
        loop.add_search(make_request("x", prompt, 12), make_search(12, 3))
        loop.add(*make_samples("a", prompt, 3, 12))
        loop.add_search(make_request("y", prompt, 12), make_search(12, 2, early_stopping=True, end_ids=[3]))
        loop.run_all()
        loop.verify()

    def test_beams_that_do_not_fit_end_as_they_stand(self, caching: bool) -> None:
        loop = Loop(make_scheduler(num_usable=4, caching=caching))
        request = make_request("a", range(6), 30)
        group = loop.add_search(request, make_search(30, 4))
        loop.run_all()
        loop.verify()
        assert group.search is not None
        num_tokens = group.search._num_tokens
        cut = undisturbed_search(request.prompt_token_ids, group.search, num_tokens)
        assert 0 < num_tokens < 30
        assert [beam.token_ids for beam in group.search.ended] == [beam.token_ids for beam in cut.ended]


class TestBeamsReturn:
    """Beams whose blocks were recomputed or swapped go on, whatever is tight."""

    def test_into_slots_that_are_all_their_own(self) -> None:
        loop = Loop(make_scheduler(num_usable=6, max_num_seqs=3))
        group = loop.add_search(make_request("a", range(3), 6), make_search(6, 3))
        loop.step()
        loop.preempt(*group.running)
        loop.run_all()
        loop.verify()

    def test_one_after_the_other_though_they_were_preempted_often(self) -> None:
        """Spare blocks are for the growth of others, not of siblings."""
        loop = Loop(make_scheduler(num_usable=3, block_size=8, budget=4))
        group = loop.add_search(make_request("a", range(4), 6), make_search(6, 2))
        loop.step()
        for _ in range(3):
            loop.preempt(*group.running)
            loop.step()
            loop.step()
        loop.run_all()
        loop.verify()

    def test_not_into_a_step_with_too_little_budget_left(self) -> None:
        loop = Loop(make_scheduler(max_num_seqs=6, budget=6, threshold=4, num_host_blocks=20))
        group = loop.add_search(make_request("a", range(2), 6), make_search(6, 4))
        loop.step()
        loop.add(make_request("long", range(30), 2))
        loop.step()
        loop.preempt(*group.running, mode="swap")
        loop.step()
        assert (loop.history[-1], len(group.running)) == ([("long", 6, False)], 4)
        loop.run_all()
        loop.verify()

    def test_who_came_back_in_part_gives_way_to_the_head_of_the_queue(self) -> None:
        """The head lacks what the first beam holds, and the other beams wait behind the head."""
        loop = Loop(make_scheduler(num_usable=10, block_size=2))
        first = make_request("first", range(11), 6)
        loop.add(first)
        group = loop.add_search(make_request("beams", range(5), 6), make_search(6, 2))
        loop.step()
        loop.preempt(*group.running)
        loop.step()
        assert [request.slot >= 0 for request in group.requests] == [True, False]
        loop.preempt(first)
        loop.run_all()
        loop.verify()
        assert loop.ended[0] is first
