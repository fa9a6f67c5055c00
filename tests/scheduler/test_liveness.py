"""Whatever arrives in whatever order, in however small a pool: every request ends, with the tokens it has alone."""

from __future__ import annotations

import dataclasses

import pytest
from fake_model import END_ID, VOCAB_SIZE, Loop, make_request, make_scheduler, undisturbed
from hypothesis import event, given, settings
from hypothesis import strategies as st

from jaxpage.request import FinishReason, Request

pytestmark = pytest.mark.timeout(3600)  # the nightly profile runs long
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
def sizes(draw: st.DrawFn) -> dict[str, object]:
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


def expected(request: Request, num_slots: int) -> tuple[list[int], FinishReason]:
    if request.max_tokens == 0:
        return [], FinishReason.LENGTH
    return undisturbed(request, MAX_MODEL_LEN, num_slots)


@settings(max_examples=max(300, settings().max_examples))
@given(st.data())
def test_everything_ends_as_it_does_alone(data: st.DataObject) -> None:
    engine = data.draw(sizes(), "sizes")
    num_slots = engine["num_usable"] * engine["block_size"]
    plan = data.draw(arrivals(num_slots), "arrivals")
    lags = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=8), "lags")

    loop = Loop(make_scheduler(**engine))
    pool = loop.scheduler.kv.pool
    idle = 0
    for step in range(MAX_STEPS):
        for arrival in plan:
            if arrival.step == step:
                loop.scheduler.add(arrival.request)
            elif arrival.abort_step == step and loop.scheduler.get(arrival.request.request_id) is not None:
                loop.scheduler.finish(arrival.request, FinishReason.ABORT)
        schedule = loop.step(lags[step % len(lags)])
        idle = 0 if schedule.requests or not loop.scheduler.has_requests else idle + 1
        assert idle < 3, "nothing is computed though requests wait"
        if step > LAST_ARRIVAL and not loop.scheduler.has_requests and not loop.in_flight:
            break
    else:
        raise AssertionError(f"not done after {MAX_STEPS} steps")

    for arrival in plan:
        tokens, reason = expected(arrival.request, num_slots)
        output = arrival.request.token_ids[arrival.request.num_prompt_tokens :]
        if arrival.request.finish_reason is FinishReason.ABORT:
            assert output == tokens[: len(output)]
        else:
            assert (output, arrival.request.finish_reason) == (tokens, reason)
    ended = [arrival.request for arrival in plan if arrival.request.finish_reason is not FinishReason.ABORT]
    assert sorted(request.request_id for request in loop.ended) == sorted(request.request_id for request in ended)
    assert pool.num_free == pool.num_usable
    assert (loop.scheduler.waiting, loop.scheduler.running) == (type(loop.scheduler.waiting)(), [])
    assert loop.scheduler.stats.num_finished == len(plan)
    event(f"preemptions: {min(loop.scheduler.stats.num_preemptions, 5)}")
    event(f"most preemptions of one: {max(arrival.request.num_preemptions for arrival in plan)}")
