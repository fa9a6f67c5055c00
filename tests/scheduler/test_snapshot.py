"""Pictures of the scheduler: every request once, in its state, with the blocks that it holds."""

from __future__ import annotations

import pytest
from engine_loop import Loop
from fake_model import make_request, make_samples, make_scheduler, make_search

from jaxpage.kv.block_map import BlockState, state_counts
from jaxpage.scheduler.scheduler import Scheduler
from jaxpage.scheduler.snapshot import MAX_LISTED, EngineSnapshot, take_snapshot


def by_id(snapshot: EngineSnapshot) -> dict[str, str]:
    listed = [*snapshot.running, *snapshot.waiting]
    assert len({each.request_id for each in listed}) == len(listed)
    return {each.request_id: each.state for each in listed}


def assert_agrees(snapshot: EngineSnapshot, scheduler: Scheduler) -> None:
    """The map shows exactly the blocks that the requests say they hold."""
    holders = [block for request in snapshot.running for block in request.block_ids]
    for block, state in enumerate(snapshot.block_states):
        expected = {0: None, 1: BlockState.USED}.get(holders.count(block), BlockState.SHARED)
        assert expected is None or state == expected
    counts = state_counts(snapshot.block_states)
    assert counts[BlockState.USED] + counts[BlockState.SHARED] == len(set(holders)) == scheduler.kv.pool.num_used
    assert (snapshot.num_running, snapshot.num_waiting) == (len(scheduler.running), scheduler.num_waiting)
    assert all(not request.block_ids for request in snapshot.waiting)


def test_from_waiting_to_the_end() -> None:
    loop = Loop(make_scheduler(max_num_seqs=1, budget=4, caching=True))
    loop.add(make_request("a", range(6), 3))
    loop.add(make_request("b", range(6), 3))
    seen: list[dict[str, str]] = []
    while not loop.is_done:
        snapshot = take_snapshot(loop.scheduler)
        assert_agrees(snapshot, loop.scheduler)
        seen.append(by_id(snapshot))
        loop.step()
    assert seen[0] == {"a": "waiting", "b": "waiting"}
    assert seen[1] == {"a": "prefill", "b": "waiting"}
    assert seen[2] == {"a": "decode", "b": "waiting"}
    assert seen[-1] == {"b": "decode"}
    last = take_snapshot(loop.scheduler)
    assert (last.num_running, last.num_waiting, last.num_finished) == (0, 0, 2)
    assert (last.num_prompt_tokens, last.num_generated_tokens) == (12, 6)
    assert (last.num_queried_tokens, last.num_hit_tokens) == (12, 5), "b has all but its last token from a"
    assert state_counts(last.block_states)[BlockState.CACHED] > 0


def test_counts_of_a_request() -> None:
    loop = Loop(make_scheduler(budget=4, caching=True))
    request = make_request("a", range(6), 3)
    loop.add(request)
    [waiting] = take_snapshot(loop.scheduler).waiting
    assert (waiting.num_prompt_tokens, waiting.num_output_tokens, waiting.num_cached_tokens) == (6, 0, None)
    loop.step()
    loop.step()
    [running] = take_snapshot(loop.scheduler).running
    assert (running.num_output_tokens, running.num_computed_tokens, running.num_cached_tokens) == (1, 6, 0)
    assert running.block_ids == tuple(request.block_ids) and len(running.block_ids) == 2
    assert 0 <= running.age_s < 60


def test_samples_share_their_prompt() -> None:
    loop = Loop(make_scheduler())
    loop.add(*make_samples("a", range(9), 3))
    loop.step()
    snapshot = take_snapshot(loop.scheduler)
    assert_agrees(snapshot, loop.scheduler)
    assert len(snapshot.running) == 3
    assert state_counts(snapshot.block_states)[BlockState.SHARED] == 3


@pytest.mark.parametrize(("mode", "state"), [("recompute", "preempted"), ("swap", "swapped")])
def test_who_lost_the_blocks(mode: str, state: str) -> None:
    loop = Loop(make_scheduler(mode=mode, num_host_blocks=16))
    loop.add(make_request("a", range(9), 8))
    for _ in range(3):
        loop.step()
    scheduler = loop.scheduler
    group = scheduler.group_of(scheduler.running[0])
    assert group is not None
    scheduler.preemption.preempt(group, group.running)
    snapshot = take_snapshot(scheduler)
    assert by_id(snapshot) == {"a": state}
    assert snapshot.num_used_host_blocks == (3 if mode == "swap" else 0)
    assert snapshot.waiting[0].num_preemptions == 1


def test_beams_have_names_of_their_own() -> None:
    loop = Loop(make_scheduler())
    loop.add_search(make_request("a", range(5), 6), make_search(6, 3))
    for _ in range(8):
        loop.step()
        if loop.scheduler.has_requests:
            assert_agrees(take_snapshot(loop.scheduler), loop.scheduler)
            if len(loop.scheduler.running) == 3:
                assert by_id(take_snapshot(loop.scheduler)).keys() == {"a/0", "a/1", "a/2"}
                return
    pytest.fail("the search never had three beams")


def test_long_lists_are_cut_and_counted() -> None:
    scheduler = make_scheduler()
    for number in range(MAX_LISTED + 5):
        scheduler.add(make_request(str(number), range(3)))
    snapshot = take_snapshot(scheduler)
    assert len(snapshot.waiting) == MAX_LISTED
    assert snapshot.num_waiting == MAX_LISTED + 5
    assert snapshot.waiting[0].request_id == "0"
