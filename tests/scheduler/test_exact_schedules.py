"""Which tokens each step computes, to the number."""

from __future__ import annotations

import pytest
from engine_loop import Loop
from fake_device import FakeDevice
from fake_model import END_ID, make_request, make_scheduler, undisturbed

from jaxpage.request import FinishReason, RequestStatus


def counts(loop: Loop) -> list[list[int]]:
    return [[count for _, count, _ in step] for step in loop.history]


@pytest.mark.parametrize(
    ("budget", "prefill"),
    [(1, [1] * 13), (3, [3, 3, 3, 3, 1]), (12, [12, 1]), (13, [13]), (14, [13]), (64, [13])],
)
@pytest.mark.parametrize("lag", [0, 1])
def test_a_prompt_is_cut_into_chunks_of_the_budget(budget: int, prefill: list[int], lag: int) -> None:
    loop = Loop(make_scheduler(budget=budget))
    request = make_request("a", range(1, 14), 8)
    loop.add(request)
    loop.run_all(lag)
    assert counts(loop) == [[count] for count in prefill + [1] * 7]
    assert [samples for [(_, _, samples)] in loop.history] == [False] * (len(prefill) - 1) + [True] * 8
    assert request.token_ids[13:] == undisturbed(request, 128, 256)[0]


def test_prompts_share_a_step_until_the_budget_is_spent() -> None:
    loop = Loop(make_scheduler(budget=10))
    for name, length in [("a", 4), ("b", 4), ("c", 4), ("d", 1)]:
        loop.add(make_request(name, range(length), 2))
    loop.run_all()
    assert loop.history == [
        [("a", 4, True), ("b", 4, True), ("c", 2, False)],
        [("a", 1, True), ("b", 1, True), ("c", 2, True), ("d", 1, True)],
        [("c", 1, True), ("d", 1, True)],
    ]


def test_decodes_come_before_prompts_under_way() -> None:
    loop = Loop(make_scheduler(budget=8))
    loop.add(make_request("long", range(20), 2))
    loop.add(make_request("next", range(3), 4))
    loop.step()
    loop.step()
    loop.step()
    assert loop.history[-1] == [("long", 4, True), ("next", 3, True)]
    loop.add(make_request("late", range(30), 1))
    loop.step()
    assert loop.history[-1] == [("long", 1, True), ("next", 1, True), ("late", 6, False)]
    loop.add(make_request("last", range(2), 1))
    loop.step()
    # "late" is long (more than a quarter of the budget): the short one goes first, into at most half of the rest.
    assert loop.history[-1] == [("next", 1, True), ("last", 2, True), ("late", 5, False)]
    loop.run_all()


def test_a_long_prompt_under_way_shares_the_step_with_short_ones() -> None:
    loop = Loop(make_scheduler(budget=6, max_num_seqs=3))
    loop.add(make_request("a", range(5), 1))
    loop.add(make_request("b", range(20), 2))
    loop.step()
    loop.add(make_request("c", range(1), 3))
    for _ in range(4):
        loop.step()
    assert loop.history == [
        [("a", 5, True), ("b", 1, False)],
        [("c", 1, True), ("b", 5, False)],
        [("c", 1, True), ("b", 5, False)],
        [("c", 1, True), ("b", 5, False)],
        [("b", 4, True)],
    ]
    loop.add(make_request("d", range(9), 1))
    loop.step()
    loop.step()
    assert loop.history[-2:] == [[("b", 1, True), ("d", 5, False)], [("d", 4, True)]]


def test_prompts_of_one_kind_go_on_in_the_order_of_arrival() -> None:
    loop = Loop(make_scheduler(budget=6, threshold=50))
    for name in "ab":
        loop.add(make_request(name, range(8), 1))
    loop.run_all()
    assert loop.history == [[("a", 6, False)], [("a", 2, True), ("b", 4, False)], [("b", 4, True)]]


def test_no_more_requests_run_than_there_are_slots() -> None:
    loop = Loop(make_scheduler(max_num_seqs=2))
    for index in range(5):
        loop.add(make_request(str(index), range(3), 2))
    loop.run_all()
    assert [[name for name, _, _ in step] for step in loop.history] == [["0", "1"]] * 2 + [["2", "3"]] * 2 + [["4"]] * 2


def test_a_slot_is_free_again_one_step_later_with_steps_in_flight() -> None:
    loop = Loop(make_scheduler(max_num_seqs=1))
    for index in range(2):
        loop.add(make_request(str(index), range(3), 2))
    loop.run_all(lag=1)
    assert [step[0][0] for step in loop.history] == ["0", "0", "1", "1"]


def test_a_head_that_does_not_fit_lets_smaller_ones_pass() -> None:
    loop = Loop(make_scheduler(num_usable=8))
    loop.add(make_request("a", range(20), 4))
    loop.add(make_request("b", range(20), 1))
    loop.add(make_request("c", range(2), 1))
    loop.run_all()
    assert [[name for name, _, _ in step] for step in loop.history] == [["a", "c"], ["a"], ["a"], ["a"], ["b"]]


def test_without_chunks_a_prompt_waits_for_room_in_one_step() -> None:
    loop = Loop(make_scheduler(budget=16, max_model_len=16, chunked=False))
    loop.add(make_request("a", range(10), 3))
    loop.add(make_request("b", range(16 - 1), 1))
    loop.add(make_request("c", range(4), 1))
    loop.run_all()
    assert loop.history == [
        [("a", 10, True), ("c", 4, True)],
        [("a", 1, True), ("b", 15, True)],
        [("a", 1, True)],
    ]


def test_a_cached_prefix_is_not_computed_again() -> None:
    loop = Loop(make_scheduler(budget=6, caching=True))
    loop.add(make_request("first", range(8), 1))
    loop.run_all()
    loop.add(make_request("x", [9], 9))
    loop.add(make_request("y", [10], 9))
    loop.step()
    request = make_request("second", range(21), 1)
    loop.add(request)
    for _ in range(4):
        loop.step()
    # 21 - 8 = 13 tokens, four a step beside two decodes
    assert [step[2:] for step in loop.history[-4:]] == [
        [("second", 4, False)],
        [("second", 4, False)],
        [("second", 4, False)],
        [("second", 1, True)],
    ]
    assert request.num_cached_tokens == 8
    loop.run_all()


@pytest.mark.parametrize("lag", [0, 1])
def test_the_second_turn_of_a_chat_finds_the_first_answer(lag: int) -> None:
    """Keys and values exist for all but the last token: 7 + 6 - 1 = 12, three full blocks."""
    loop = Loop(make_scheduler(caching=True))
    first = make_request("turn 1", range(7), 6)
    loop.add(first)
    loop.run_all(lag)
    assert len(first.token_ids) == 13
    second = make_request("turn 2", [*first.token_ids, 1, 2, 3, 4, 5], 8)
    loop.add(second)
    loop.run_all(lag)
    assert second.num_cached_tokens == 12
    assert second.token_ids[18:] == undisturbed(second, 128, 256)[0]


def test_equal_prompts_in_one_step_share_blocks() -> None:
    loop = Loop(make_scheduler(caching=True, budget=256))
    requests = [make_request(str(index), range(13), 5) for index in range(8)]
    for request in requests:
        loop.add(request)
    loop.step()
    assert loop.scheduler.kv.pool.num_usable - loop.scheduler.kv.pool.num_free == 3 + 8
    loop.run_all()
    assert {tuple(request.token_ids) for request in requests} == {tuple(requests[0].token_ids)}


@pytest.mark.parametrize("lag", [0, 1])
class TestLimits:
    def test_max_tokens(self, lag: int) -> None:
        loop = Loop(make_scheduler())
        requests = [make_request(str(count), range(5), count) for count in (1, 2, 7)]
        for request in requests:
            loop.add(request)
        loop.run_all(lag)
        assert [len(request.token_ids) - 5 for request in requests] == [1, 2, 7]
        assert {request.finish_reason for request in requests} == {FinishReason.LENGTH}
        assert sum(map(sum, counts(loop))) == 15 + 0 + 1 + 6, "nothing is computed past the last token"

    def test_max_tokens_zero_computes_the_prompt_only(self, lag: int) -> None:
        loop = Loop(make_scheduler(budget=4))
        request = make_request("a", range(6), 0)
        loop.add(request)
        loop.run_all(lag)
        assert counts(loop) == [[4], [2]]
        assert (request.token_ids, request.finish_reason) == (list(range(6)), FinishReason.LENGTH)
        assert loop.scheduler.stats.num_generated_tokens == 0

    def test_max_model_len(self, lag: int) -> None:
        loop = Loop(make_scheduler(max_model_len=10))
        request = make_request("a", range(6), 100)
        loop.add(request)
        loop.run_all(lag)
        assert (len(request.token_ids), request.finish_reason) == (10, FinishReason.LENGTH)
        assert sum(map(sum, counts(loop))) == 9

    def test_an_end_id_stops_and_is_kept(self, lag: int) -> None:
        loop = Loop(make_scheduler())
        request = make_request("a", range(5), 50, end_ids=range(6))
        loop.add(request)
        loop.run_all(lag)
        assert request.finish_reason is FinishReason.STOP
        assert request.stop_reason is None
        assert [token in range(6) for token in request.token_ids[5:]] == [False] * (len(request.token_ids) - 6) + [True]

    def test_a_stop_id_of_the_user_is_named(self, lag: int) -> None:
        loop = Loop(make_scheduler())
        expected = undisturbed(make_request("a", range(5), 3), 128, 256)[0]
        request = make_request("a", range(5), 50, stop_token_ids=[expected[0]])
        loop.add(request)
        loop.run_all(lag)
        assert (request.token_ids[5:], request.stop_reason) == (expected[:1], expected[0])

    @pytest.mark.parametrize(
        ("min_tokens", "max_tokens", "length", "reason"),
        [(6, 6, 6, FinishReason.LENGTH), (6, 7, 7, FinishReason.STOP), (0, 7, 1, FinishReason.STOP)],
    )
    def test_min_tokens(
        self,
        lag: int,
        min_tokens: int,
        max_tokens: int,
        length: int,
        reason: FinishReason,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        # The end id is best at every step and masked while output_index < min_tokens.
        monkeypatch.setattr(FakeDevice, "sample", lambda self, item: 3 if item.output_index < min_tokens else END_ID)
        loop = Loop(make_scheduler())
        request = make_request("a", range(5), max_tokens, end_ids=[END_ID], min_tokens=min_tokens)
        loop.add(request)
        loop.run_all(lag)
        assert (len(request.token_ids) - 5, request.finish_reason) == (length, reason)

    def test_an_end_id_below_min_tokens_does_not_stop(self, lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(FakeDevice, "sample", lambda self, item: END_ID)
        loop = Loop(make_scheduler())
        request = make_request("a", range(5), 9, end_ids=[END_ID], min_tokens=3)
        loop.add(request)
        loop.run_all(lag)
        assert (request.token_ids[5:], request.finish_reason) == ([END_ID] * 4, FinishReason.STOP)


class TestPendingTokens:
    def test_a_step_is_scheduled_before_the_token_of_the_one_before_is_known(self) -> None:
        loop = Loop(make_scheduler())
        request = make_request("a", range(5), 4)
        loop.add(request)
        loop.step(lag=1)
        assert (request.num_pending_tokens, request.num_tokens, request.num_known_output_tokens) == (1, 6, 0)
        [item] = loop.step(lag=1).requests
        assert (item.start, item.num_tokens, item.samples, item.output_index) == (5, 1, True, 1)
        assert (len(request.token_ids), request.num_pending_tokens) == (6, 1)
        assert loop.step(lag=1).requests[0].start == 6
        assert loop.step(lag=1).requests[0].output_index == 3
        assert loop.step(lag=1).requests == [], "the token in flight is the last one"
        assert request.is_finished

    def test_a_request_that_ended_meanwhile_gets_nothing(self) -> None:
        loop = Loop(make_scheduler())
        request = make_request(
            "a", range(5), 20, stop_token_ids=undisturbed(make_request("a", range(5), 1), 128, 99)[0]
        )
        loop.add(request)
        loop.step(lag=1)
        loop.step(lag=1)
        assert (request.finish_reason, len(request.token_ids)) == (FinishReason.STOP, 6)
        assert len(loop.in_flight) == 1
        loop.step(lag=1)
        assert len(request.token_ids) == 6
        assert not loop.scheduler.has_requests


class TestFinish:
    def test_waiting(self) -> None:
        loop = Loop(make_scheduler(max_num_seqs=1))
        first, second = make_request("a", range(5)), make_request("b", range(5))
        loop.add(first)
        loop.add(second)
        loop.step()
        loop.scheduler.finish(second, FinishReason.ABORT)
        assert (second.status, second.finish_reason) == (RequestStatus.FINISHED, FinishReason.ABORT)
        loop.run_all()
        assert len(first.token_ids) == 9

    @pytest.mark.parametrize("num_steps", [1, 2, 3])
    @pytest.mark.parametrize("lag", [0, 1])
    def test_running(self, num_steps: int, lag: int) -> None:
        loop = Loop(make_scheduler(budget=8, caching=True))
        first, second = make_request("a", range(10), 6), make_request("b", range(9, 0, -1), 6)
        loop.add(first)
        loop.add(second)
        for _ in range(num_steps):
            loop.step(lag)
        loop.scheduler.finish(first, FinishReason.STOP, "stop string")
        assert (first.block_ids, first.slot, first.stop_reason) == ([], -1, "stop string")
        loop.run_all(lag)
        assert second.token_ids[9:] == undisturbed(second, 128, 256)[0]

    @pytest.mark.parametrize("mode", ["recompute", "swap"])
    def test_preempted_with_a_token_in_flight(self, mode: str) -> None:
        loop = Loop(make_scheduler(num_usable=8, num_host_blocks=8, mode=mode))
        first, second = make_request("a", range(16), 9), make_request("b", range(16), 9)
        loop.add(first)
        loop.add(second)
        loop.step(lag=1)
        # Both want a block more, and there is none: the later one gives way while its first token is in flight.
        schedule = loop.scheduler.schedule()
        assert (schedule.num_preempted, second.status, second.num_pending_tokens) == (1, RequestStatus.WAITING, 1)
        results = loop.device.run(schedule)
        loop.in_flight.append((schedule, *results))
        loop.scheduler.finish(second, FinishReason.ABORT)
        assert loop.scheduler.kv.num_free_host_blocks == 8
        loop.scheduler.update(*loop.in_flight.popleft())
        loop.run_all(lag=1)
        loop.verify()
        assert (len(second.token_ids), len(first.token_ids)) == (16, 25)

    def test_twice_keeps_the_first_reason(self) -> None:
        scheduler = make_scheduler()
        request = make_request("a", range(5))
        scheduler.add(request)
        scheduler.finish(request, FinishReason.ABORT)
        scheduler.finish(request, FinishReason.STOP)
        assert (request.finish_reason, scheduler.stats.num_finished) == (FinishReason.ABORT, 1)
        assert scheduler.group_of(request) is None
        assert not scheduler.has_requests

    def test_a_request_is_added_once(self) -> None:
        scheduler = make_scheduler()
        request = make_request("a", range(5))
        group = scheduler.add(request)
        assert scheduler.group_of(request) is group
        with pytest.raises(AssertionError, match="request a was added before"):
            scheduler.add(request)
