"""Steps that fail: the request at fault ends, all others get the tokens they have alone."""

from __future__ import annotations

from typing import Any

import pytest
from engine_loop import Loop
from fake_model import make_request, make_samples, make_scheduler, make_search

from jaxpage.request import FinishReason, Request


def requests(count: int, max_tokens: int = 8) -> list[Request]:
    return [make_request(str(index), range(index, index + 6), max_tokens) for index in range(count)]


def loop_with(*all_requests: Request, **engine: Any) -> Loop:
    loop = Loop(make_scheduler(**engine))
    for request in all_requests:
        loop.add(request)
    return loop


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("position", [0, 5, 6, 9], ids=["first", "last of the prompt", "first output", "later"])
def test_the_request_at_fault_ends_and_no_other(position: int, num_stages: int) -> None:
    all_requests = requests(6)
    loop = loop_with(*all_requests, num_stages=num_stages, num_usable=20)
    loop.poison[all_requests[3]] = position
    loop.run_all(lag=num_stages)
    loop.verify()
    reasons = [request.finish_reason for request in all_requests]
    assert reasons == [FinishReason.LENGTH] * 3 + [FinishReason.ERROR] + [FinishReason.LENGTH] * 2
    assert len(all_requests[3].token_ids) == max(6, position + 1), "what it had before its fault is kept"


def test_a_fault_that_does_not_come_again_ends_nobody() -> None:
    all_requests = requests(4)
    loop = loop_with(*all_requests)
    loop.step()
    loop.fails_next = True
    loop.run_all()
    loop.verify()
    assert {request.finish_reason for request in all_requests} == {FinishReason.LENGTH}
    assert set(loop.num_faults.values()) == {1}


def test_every_request_at_fault_is_found() -> None:
    all_requests = requests(6)
    loop = loop_with(*all_requests)
    loop.poison |= {all_requests[0]: 7, all_requests[4]: 8, all_requests[5]: 3}
    loop.run_all()
    loop.verify()
    failed = [index for index, each in enumerate(all_requests) if each.finish_reason is FinishReason.ERROR]
    assert failed == [0, 4, 5]


def test_suspects_run_alone_and_newcomers_wait() -> None:
    all_requests = requests(3)
    loop = loop_with(*all_requests)
    loop.step()
    loop.fails_next = True
    loop.step()
    newcomer = make_request("new", range(5))
    loop.add(newcomer)
    num_before = len(loop.history)
    loop.run_all()
    loop.verify()
    alone = [{name for name, _, _ in step} for step in loop.history[num_before:]]
    assert alone[:3] == [{"2"}, {"1"}, {"0"}]
    assert {"0", "1", "2", "new"} in alone, "then everybody goes on"


def test_samples_fail_together_and_a_search_ends_with_an_error() -> None:
    samples = make_samples("s", range(6), 3, 8)
    loop = loop_with(*requests(2), num_usable=30)
    loop.add(*samples)
    search = loop.add_search(make_request("b", range(8), 6), make_search(6, 2))
    loop.poison[samples[1]] = 8
    loop.poison[search.requests[0]] = 9
    loop.run_all()
    loop.verify()
    assert {sample.finish_reason for sample in samples} == {FinishReason.ERROR}
    assert search.search is not None
    assert {beam.finish_reason for beam in search.search.ended} == {FinishReason.ERROR}
    assert {each.finish_reason for each in loop.samples if each not in samples} == {FinishReason.LENGTH}


def test_swapped_requests_are_computed_again() -> None:
    all_requests = requests(2, max_tokens=12)
    loop = loop_with(*all_requests, num_usable=7, num_host_blocks=20, mode="swap")
    kv = loop.scheduler.kv
    while not kv.num_swapped_requests:
        loop.step()
    loop.fails_next = True
    loop.step()
    assert kv.num_swapped_requests == 0 and kv.num_free_host_blocks == 20, "what was swapped is worth nothing"
    loop.run_all()
    loop.verify()
    assert {request.finish_reason for request in all_requests} == {FinishReason.LENGTH}
