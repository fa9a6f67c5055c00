"""Whatever arrives in whatever order, in however small a pool: every request ends, with the tokens it has alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from engine_loop import Loop
from fake_model import END_ID, VOCAB_SIZE, make_request, make_samples, make_scheduler
from hypothesis import event, given, settings
from hypothesis import strategies as st

from jaxpage.request import FinishReason, Request
from jaxpage.scheduler.admission import MAX_OVERTAKES

pytestmark = pytest.mark.timeout(0)  # the nightly profile runs long
MAX_MODEL_LEN = 24
MAX_STEPS = 2000
LAST_ARRIVAL = 12


@dataclasses.dataclass
class Arrival:
    """A request that comes with step ``step`` and is aborted with step ``abort_step``, if it is not over by then."""

    step: int
    request: Request
    abort_step: int | None


@st.composite
def sizes(draw: st.DrawFn) -> dict[str, Any]:
    chunked = draw(st.sampled_from([True, True, False]))
    max_num_seqs = draw(st.sampled_from([4, 3, 2, 1]))
    return {
        "num_usable": draw(st.sampled_from([5, 6, 7, 8, 4, 3, 2, 1, 10])),
        "block_size": draw(st.sampled_from([4, 3, 2, 1])),
        "max_num_seqs": max_num_seqs,
        "budget": draw(st.integers(max_num_seqs, 16)) if chunked else draw(st.integers(MAX_MODEL_LEN, 32)),
        "max_model_len": MAX_MODEL_LEN,
        "chunked": chunked,
        "caching": draw(st.booleans()),
        "mode": draw(st.sampled_from(["recompute", "swap"])),
        "num_host_blocks": draw(st.sampled_from([8, 2])),
        "threshold": draw(st.sampled_from([0, 3, 24])),
        "num_stages": draw(st.sampled_from([1, 2, 4])),
    }


@st.composite
def arrivals(draw: st.DrawFn, max_prompt_tokens: int) -> list[Arrival]:
    """Requests that mostly come together, with prompts that often begin alike."""
    stem = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=MAX_MODEL_LEN, max_size=MAX_MODEL_LEN))
    result = []
    for index in range(draw(st.sampled_from([4, 5, 6, 7, 3, 2, 1]))):
        length = draw(st.integers(1, min(max_prompt_tokens, MAX_MODEL_LEN - 1)))
        num_shared = draw(st.integers(0, length))
        prompt = stem[:num_shared] + [(token + index) % VOCAB_SIZE for token in stem[num_shared:length]]
        max_tokens = draw(st.sampled_from([12, 15, 20, 8, 4, 1, 0]))
        request = make_request(
            str(index),
            prompt,
            max_tokens,
            end_ids=draw(st.sampled_from([(), (END_ID,), (END_ID, 3)])),
            min_tokens=draw(st.integers(0, min(max_tokens, 4))),
        )
        abort_step = draw(st.sampled_from([None, None, None, 2, 5, 9, 14]))
        result.append(Arrival(draw(st.sampled_from([0, 0, 1, 2, 3, 6, LAST_ARRIVAL])), request, abort_step))
    return result


@settings(max_examples=max(300, settings().max_examples))
@given(st.data())
def test_everything_ends_as_it_does_alone(data: st.DataObject) -> None:
    engine = data.draw(sizes(), "sizes")
    num_slots = engine["num_usable"] * engine["block_size"]
    plan = data.draw(arrivals(num_slots), "arrivals")
    lags = data.draw(st.lists(st.integers(0, engine["num_stages"]), min_size=1, max_size=8), "lags")

    loop = Loop(make_scheduler(**engine))
    for step in range(MAX_STEPS):
        for arrival in plan:
            if arrival.step == step:
                loop.add(arrival.request)
            elif arrival.abort_step == step and loop.scheduler.group_of(arrival.request) is not None:
                loop.scheduler.finish(arrival.request, FinishReason.ABORT)
        loop.step(lags[step % len(lags)])
        if step > LAST_ARRIVAL and loop.is_done:
            break
    else:
        raise AssertionError(f"not done after {MAX_STEPS} steps")

    loop.verify()
    ended = [arrival.request for arrival in plan if arrival.request.finish_reason is not FinishReason.ABORT]
    assert sorted(request.request_id for request in loop.ended) == sorted(request.request_id for request in ended)
    assert loop.scheduler.stats.num_finished == len(plan)
    event(f"preemptions: {min(loop.scheduler.stats.num_preemptions, 5)}")
    event(f"most preemptions of one: {max(arrival.request.num_preemptions for arrival in plan)}")


@pytest.mark.parametrize(
    ("lag", "caching", "more"),
    [(0, True, {}), (1, True, {"mode": "swap", "num_host_blocks": 20}), (1, False, {})],
    ids=["recompute", "swap", "no cache"],
)
def test_a_burst_of_2000_requests_into_a_pool_that_holds_five(lag: int, caching: bool, more: dict[str, Any]) -> None:
    """All end, nobody is passed by more than the stated number of groups, and nothing is left behind."""
    loop = Loop(make_scheduler(num_usable=10, max_num_seqs=16, caching=caching, budget=32, **more), books_every=100)
    num_requests = 0
    while num_requests < 2000:
        # Up to 8 tokens each, so two blocks: the first ones of each lot are alike.
        n = 2 if num_requests % 100 == 0 else 1
        prompt = [num_requests // 8 % VOCAB_SIZE, *range(num_requests % 4)]
        loop.add(*make_samples(f"{num_requests}.", prompt, n, 1 + num_requests % 5))
        num_requests += n
    assert loop.scheduler.num_waiting == num_requests
    loop.run_all(lag, max_steps=4000)
    loop.verify()
    assert len(loop.ended) == loop.scheduler.stats.num_finished == num_requests
    order = {request: place for place, request in enumerate(loop.samples)}
    lead = max(order[request] - place for place, request in enumerate(loop.ended))
    assert lead <= MAX_OVERTAKES + loop.scheduler.roster.max_num_seqs
