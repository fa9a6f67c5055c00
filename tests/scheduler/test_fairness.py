"""Who is served when: long prompts beside short ones, large requests among small ones, priorities."""

from __future__ import annotations

from typing import Any

import pytest
from engine_loop import Loop
from fake_model import make_request, make_samples, make_scheduler, make_search

from jaxpage.request import FinishReason, Request
from jaxpage.scheduler.admission import MAX_OVERTAKES


def first_step(loop: Loop, name: str) -> int:
    """The step that gave a request its first token."""
    return next(index for index, step in enumerate(loop.history) for row in step if row[0] == name and row[2])


def test_fair_1_a_long_prompt_does_not_stop_the_short_ones() -> None:
    loop = Loop(make_scheduler(num_usable=300, budget=32, max_num_seqs=16, max_model_len=800))
    for name in ("x", "y"):
        loop.add(make_request(name, [1], 60))
    loop.step()
    loop.step()
    loop.add(make_request("long", [2] * 640, 2))
    loop.step()
    shorts = [f"s{index}" for index in range(5)]
    for index, name in enumerate(shorts):
        loop.add(make_request(name, [index] * 8, 3))
    arrival = len(loop.history)
    loop.run_all()
    loop.verify()
    steps = [{name: count for name, count, _ in step} for step in loop.history]
    last_of_long = first_step(loop, "long")
    for step in steps[2 : last_of_long + 1]:
        assert step["x"] == step["y"] == 1, "a decode is left out"
        assert step["long"] >= 1, "the long prompt stands still"
    for index, name in enumerate(shorts):
        bound = 2 + -(-8 * (index + 1) // (30 // 2))
        assert first_step(loop, name) - arrival + 1 <= bound
    assert [sum(step.values()) for step in steps[2:last_of_long]] == [32] * (last_of_long - 2), "the budget is used"


def test_fair_1_without_short_ones_a_long_prompt_has_all_of_the_budget() -> None:
    loop = Loop(make_scheduler(budget=32, max_model_len=400))
    loop.add(make_request("long", [2] * 100, 1))
    loop.run_all()
    assert [step[0][1] for step in loop.history] == [32, 32, 32, 4]


def test_fair_1_several_prompts_are_under_way_together() -> None:
    loop = Loop(make_scheduler(budget=16, max_model_len=100, threshold=16))
    loop.add(make_request("long", [2] * 60, 1))
    loop.step()
    loop.add(make_request("short", [3] * 12, 1))
    loop.step()
    loop.step()
    assert loop.history[1:] == [[("short", 8, False), ("long", 8, False)], [("short", 4, True), ("long", 12, False)]]
    loop.run_all()
    loop.verify()


def test_fair_1a_a_large_request_under_a_steady_flow_of_small_ones() -> None:
    loop = Loop(make_scheduler(num_usable=16, max_num_seqs=16))
    for index in range(6):
        loop.add(make_request(f"before {index}", [index] * 3, 6))
        loop.step()
    large = make_request("large", [3] * 37, 3)
    loop.add(large)
    arrival = len(loop.samples)
    started = 0
    for index in range(400):
        loop.add(make_request(f"small {index}", [index % 12] * 3, 6))
        loop.step()
        if large.num_cached_tokens < 0:
            started = sum(request.num_cached_tokens >= 0 for request in loop.samples[arrival:])
    assert 0 < started <= MAX_OVERTAKES, "it is passed, but not for ever"
    assert large.is_finished
    ended = sum(request.is_finished for request in loop.samples[arrival:])
    assert ended > 300, "the small ones go on being served"
    loop.run_all()
    loop.verify()


def test_fair_1b_priorities_then_arrival() -> None:
    loop = Loop(make_scheduler(max_num_seqs=1, policy="priority"))
    loop.add(make_request("running", [1] * 4, 4), priority=-5)
    loop.step()
    for name, priority in [("five", 5), ("first zero", 0), ("minus three", -3), ("second zero", 0)]:
        loop.add(make_request(name, [2] * 4, 2), priority=priority)
    loop.run_all()
    loop.verify()
    order = [request.request_id for request in loop.ended]
    assert order == ["running", "minus three", "first zero", "second zero", "five"]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("full", ["blocks", "slots"])
def test_fair_1b_the_running_one_gives_way(mode: str, lag: int, full: str) -> None:
    sizes: dict[str, Any] = {"num_usable": 8} if full == "blocks" else {"max_num_seqs": 1}
    loop = Loop(make_scheduler(policy="priority", mode=mode, num_host_blocks=8, **sizes))
    low, high = make_request("low", range(11), 20), make_request("high", range(17), 8)
    loop.add(low, priority=5)
    while len(low.token_ids) < 16:
        loop.step(lag)
    loop.add(high, priority=-1)
    loop.step(lag)
    assert (high.slot >= 0, low.slot, low.num_preemptions) == (True, -1, 1)
    loop.run_all(lag)
    loop.verify()
    assert loop.ended == [high, low]
    assert (high.num_preemptions, low.num_preemptions) == (0, 1)


def test_fair_1b_nobody_gives_way_where_that_does_not_help() -> None:
    """Too few blocks, or too few slots, are held by those behind."""
    loop = Loop(make_scheduler(num_usable=8, max_num_seqs=4, policy="priority"))
    urgent, low = make_request("urgent", range(17), 3), make_request("low", range(4), 9)
    loop.add(urgent, priority=-1)
    loop.add(low, priority=5)
    loop.step()
    loop.add(make_request("middle", range(22), 2))
    loop.add_search(make_request("wide", range(2), 3), make_search(3, 4), priority=1)
    loop.step()
    loop.step()
    assert (urgent.num_preemptions, low.num_preemptions) == (0, 0)
    loop.run_all()
    loop.verify()


def test_fair_1b_slots_of_those_behind_are_counted() -> None:
    loop = Loop(make_scheduler(max_num_seqs=4, policy="priority"))
    urgent, low = make_request("urgent", range(5), 9), make_request("low", range(4), 9)
    loop.add(urgent, priority=-1)
    loop.add(low, priority=5)
    loop.step()
    loop.add_search(make_request("wide", range(2), 3), make_search(3, 4))
    for _ in range(4):
        loop.step()
    assert low.num_preemptions == 0, "all of its slots would not be enough"
    loop.run_all()
    loop.verify()


def test_fair_1b_blocks_that_samples_share_are_counted_once() -> None:
    loop = Loop(make_scheduler(num_usable=24, policy="priority"))
    low = make_samples("low", range(16), 3, 20)
    loop.add(make_request("urgent", range(32), 20), priority=-1)
    loop.add(*low, priority=5)
    for _ in range(3):
        loop.step()
    assert (loop.scheduler.kv.pool.num_used, sum(len(request.block_ids) for request in low)) == (9 + 7, 15)
    loop.add(make_request("head", [1] * 68, 4))
    loop.step()
    assert [request.num_preemptions for request in low] == [0, 0, 0], "they hold 7 blocks, and 9 are lacking"
    loop.run_all()
    loop.verify()


def test_fair_1b_equal_priorities_do_not_give_way() -> None:
    loop = Loop(make_scheduler(max_num_seqs=2, policy="priority"))
    group = make_samples("a", range(6), 2, 8)
    loop.add(*group, priority=1)
    loop.step()
    loop.add(make_request("b", range(6), 8), priority=1)
    loop.run_all()
    loop.verify()
    assert loop.scheduler.stats.num_preemptions == 0


def test_fair_1c_the_head_of_the_queue_does_not_fit_yet() -> None:
    loop = Loop(make_scheduler(num_usable=16))
    long = make_request("long", range(26), 6)
    loop.add(long)
    loop.step()
    head = make_request("head", [3] * 38, 2)
    loop.add(head)
    smalls = [make_request(f"s{index}", [index] * 5, 3) for index in range(5)]
    for small in smalls:
        loop.add(small)
    started: dict[Request, int] = {}
    while not loop.is_done:
        loop.step()
        for request in (head, *smalls):
            if request.slot >= 0 or request.is_finished:
                started.setdefault(request, len(loop.history))
        if not long.is_finished:
            assert head not in started
    assert started[smalls[0]] == 2, "they need not wait for the head"
    assert max(started[small] for small in smalls) <= 6
    end_of_long = max(index for index, step in enumerate(loop.history) for name, _, _ in step if name == "long")
    assert started[head] == end_of_long + 2, "in the step after the one that ended the long one"
    loop.verify()


def test_who_was_passed_too_often_is_passed_no_more() -> None:
    loop = Loop(make_scheduler(num_usable=30, max_num_seqs=64))
    loop.add(make_request("long", range(30), 60))
    loop.step()
    large = loop.add(make_request("large", [3] * 100, 2))
    for index in range(MAX_OVERTAKES + 10):
        loop.add(make_request(f"{index}", [index % 12], 1))
        loop.step()
    started = [request for request in loop.samples[2:] if request.num_cached_tokens >= 0]
    assert (len(started), large.num_overtakes) == (MAX_OVERTAKES, MAX_OVERTAKES)
    loop.scheduler.finish(loop.samples[0], FinishReason.ABORT)
    loop.run_all()
    loop.verify()
