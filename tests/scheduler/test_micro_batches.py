"""Several steps in flight: who is in which micro-batch of a pipeline, and that tokens come from the right step."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from engine_loop import Loop
from fake_model import END_ID, make_request, make_samples, make_scheduler, make_search

from jaxpage.request import FinishReason
from jaxpage.scheduler.schedule import Schedule

STAGES = [2, 4]


def pipeline(num_stages: int, num_requests: int, max_tokens: int = 40, **settings: Any) -> Loop:
    loop = Loop(make_scheduler(**{"max_num_seqs": 16, "num_usable": 256, "num_stages": num_stages, **settings}))
    for index in range(num_requests):
        loop.add(make_request(str(index), range(index, index + 3), max_tokens))
    return loop


def steps(loop: Loop, count: int) -> list[Schedule]:
    """As many steps as there are stages are in flight."""
    return [loop.step(loop.scheduler.num_stages) for _ in range(count)]


def names(schedule: Schedule) -> list[str]:
    return [item.request.request_id for item in schedule.requests]


class TestSteadyDecode:
    @pytest.mark.parametrize(
        ("num_stages", "num_requests"), [(1, 3), (2, 2), (2, 6), (2, 7), (4, 4), (4, 8), (4, 11), (3, 16)]
    )
    def test_micro_batches_are_even_and_none_is_empty(self, num_stages: int, num_requests: int) -> None:
        loop = pipeline(num_stages, num_requests)
        steps(loop, 2 * num_stages)
        steady = steps(loop, 5 * num_stages)
        for first in range(len(steady) - num_stages + 1):
            window = [names(schedule) for schedule in steady[first : first + num_stages]]
            assert sorted(itertools.chain(*window)) == sorted(map(str, range(num_requests))), (
                "each once in so many steps"
            )
            assert max(map(len, window)) - min(map(len, window)) <= 1
            assert min(map(len, window)) >= 1
        assert [schedule.call for schedule in steady] == list(range(2 * num_stages, 7 * num_stages))
        loop.run_all(num_stages)
        loop.verify()

    @pytest.mark.parametrize("num_stages", STAGES)
    def test_those_that_came_together_are_dealt_out_at_once(self, num_stages: int) -> None:
        loop = pipeline(num_stages, 8)
        first, *others = steps(loop, 2 * num_stages)
        assert len(first.requests) == 8
        sizes = [len(schedule.requests) for schedule in others]
        assert sizes == [0] * (num_stages - 1) + [8 // num_stages] * num_stages

    def test_a_gap_is_filled_from_the_steps_before_it(self) -> None:
        loop = pipeline(4, 8)
        steps(loop, 8)
        lanes = {names(schedule)[0]: schedule for schedule in steps(loop, 4)}
        empty = lanes.popitem()[1]
        for item in empty.requests:
            loop.scheduler.finish(item.request, FinishReason.ABORT)
        steps(loop, 4)
        assert sorted(len(schedule.requests) for schedule in steps(loop, 4)) == [1, 1, 2, 2]
        loop.run_all(4)
        loop.verify()

    @pytest.mark.parametrize("num_requests", [1, 2, 3])
    def test_fewer_requests_than_stages_go_on_as_soon_as_their_tokens_are_there(self, num_requests: int) -> None:
        loop = pipeline(4, num_requests, max_tokens=10)
        schedules = []
        while not loop.is_done:
            schedules += steps(loop, 1)
        loop.verify()
        for name in map(str, range(num_requests)):
            calls = [schedule.call for schedule in schedules if name in names(schedule)]
            assert len(calls) == 10
            waits = [after - before for before, after in itertools.pairwise(calls)]
            assert waits[1:] == [4] * 8, "but for the first, when those that came together are dealt out"

    def test_nobody_is_served_later_than_the_others_for_coming_last(self) -> None:
        """The ninth request of four stages shares a step, and each step gives it its turn all the same."""
        loop = pipeline(4, 9, max_tokens=60)
        steps(loop, 100)
        lengths = [len(request.token_ids) for request in loop.samples]
        assert max(lengths) - min(lengths) <= 1


class TestPrompts:
    def test_chunks_follow_one_another_and_the_token_is_awaited(self) -> None:
        loop = pipeline(4, 0, budget=4)
        loop.add(make_request("a", range(10), 3))
        steps(loop, 4)
        assert loop.history == [[("a", 4, False)], [("a", 4, False)], [("a", 2, True)]]
        loop.run_all(4)
        loop.verify()

    def test_a_prompt_shares_every_step_with_the_decodes(self) -> None:
        loop = pipeline(2, 4, budget=8, max_num_seqs=8)
        steps(loop, 6)
        loop.add(make_request("long", range(40), 1))
        loop.history.clear()
        steps(loop, 5)
        assert [step[-1] for step in loop.history] == [("long", 6, False)] * 5
        loop.run_all(2)
        loop.verify()


class TestBeams:
    @pytest.mark.parametrize("num_stages", STAGES)
    def test_beams_wait_for_their_step_and_others_go_on(self, num_stages: int) -> None:
        loop = pipeline(num_stages, 4)
        loop.add_search(make_request("b", range(5), 6), make_search(6, 3))
        schedules = steps(loop, 4 * num_stages)
        calls = [schedule.call for schedule in schedules if any(item.request.is_beam for item in schedule.requests)]
        assert len(calls) >= 3
        assert all(after - before >= 2 for before, after in itertools.pairwise(calls))
        others = [schedule for schedule in schedules[2:] if not schedule.is_empty and schedule.call not in calls]
        assert others
        loop.run_all(num_stages)
        loop.verify()


class TestSmallPools:
    @pytest.mark.parametrize("num_stages", STAGES)
    @pytest.mark.parametrize("caching", [False, True])
    @pytest.mark.parametrize("mode", ["swap", "recompute"])
    @pytest.mark.parametrize("num_usable", [5, 8, 12])
    def test_samples_beams_and_aborts(self, num_stages: int, caching: bool, mode: str, num_usable: int) -> None:
        loop = pipeline(
            num_stages, 0, num_usable=num_usable, caching=caching, mode=mode, num_host_blocks=10, max_model_len=20
        )
        for index in range(6):
            prompt = [1, 2, 3, 4, 5, index // 2]
            loop.add(*make_samples(f"{index}.", prompt, 1 + index % 3, 12, end_ids=[END_ID]))
        loop.add_search(make_request("beams", [1, 2, 3, 4], 8), make_search(8, 2))
        dropped = loop.add(make_request("dropped", range(8), 12))
        for _ in range(9):
            loop.step(num_stages)
        loop.abort(dropped)
        loop.run_all(num_stages)
        loop.verify()
        assert loop.scheduler.stats.num_preemptions > 0

    @pytest.mark.parametrize(("mode", "first", "count"), [("recompute", 0, 7), ("swap", 6, 1)])
    def test_one_preempted_in_flight_waits_for_its_token(self, mode: str, first: int, count: int) -> None:
        """Four steps later, though it would have its turn before; the others go on."""
        loop = Loop(make_scheduler(num_host_blocks=8, num_stages=4))
        other, request = make_request("b", range(30), 20), make_request("a", range(6), 5)
        loop.add(other)
        steps(loop, 1)
        loop.add(request)
        [item] = steps(loop, 1)[0].requests
        assert item.request is request
        loop.preempt(request, mode=mode)
        schedules = steps(loop, 6)
        resumed = next(schedule for schedule in schedules if request in schedule.admitted)
        item = next(item for item in resumed.requests if item.request is request)
        assert (item.start, item.num_tokens, item.output_index) == (first, count, 1)
        loop.run_all(4)
        loop.verify()

    def test_a_slot_and_blocks_are_handed_on_while_earlier_steps_still_run(self) -> None:
        loop = Loop(make_scheduler(num_usable=2, max_num_seqs=1, num_stages=4))
        dropped, request = make_request("a", range(6), 2), make_request("b", range(6), 2)
        group = loop.add(dropped)
        steps(loop, 1)
        loop.add(request)
        blocks, slot = list(dropped.block_ids), dropped.slot
        loop.abort(group)
        [schedule] = steps(loop, 1)
        assert (names(schedule), sorted(request.block_ids), request.slot) == (["b"], sorted(blocks), slot)
        assert len(loop.in_flight) == 2
        loop.run_all(4)
        loop.verify()


def test_the_checks_see_a_token_that_is_read_too_early() -> None:
    """A scheduler for one stage over a device with two asks for tokens that are not there yet."""
    loop = pipeline(1, 2)
    loop.device.num_stages = 2
    with pytest.raises(AssertionError, match="a token is read before"):
        for _ in range(3):
            loop.step(1)
