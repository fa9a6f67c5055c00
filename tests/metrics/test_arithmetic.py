"""The arithmetic that the metrics' specification demands, cases A to I, on a real engine with a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from driving import Ask, ask, preempt_at, run
from scrapes import Scrape, check_idle

from jaxpage import BeamSearchParams, PoolingParams, SamplingParams
from jaxpage.scheduler.preemption import PreemptionPolicy

if TYPE_CHECKING:
    from jaxpage import LLM
    from jaxpage.engine.front import Engine

PROMPT_TIMES = ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time")
OUTCOMES = ("stop", "length", "abort", "error")
END = 'request_success_total{finished_reason="%s"}'


@pytest.fixture
def measure(tiny: LLM, scrape: Callable[[LLM], Scrape]) -> Callable[..., dict[str, float]]:
    """Runs requests, each set after the other, and gives what has moved; 0 for what has not."""

    def changes(*sets: Any, before_step: Any = None) -> dict[str, float]:
        before = scrape(tiny)
        accepted = tiny.engine.metrics.read().num_accepted
        check_idle(before)

        def watched(engine: Engine) -> None:
            page = scrape(tiny)  # checks what must hold at any moment
            there = page["num_requests_running"] + page["num_requests_waiting"]
            ended = sum(page[END % reason] for reason in OUTCOMES)
            assert ended + there == engine.metrics.read().num_accepted
            if before_step is not None:
                before_step(engine)

        for asks in sets:
            run(tiny, asks, watched)
        after = scrape(tiny)
        check_idle(after)
        assert sum(after[END % reason] - before[END % reason] for reason in OUTCOMES) == (
            tiny.engine.metrics.read().num_accepted - accepted
        )
        moved = after.since(before)
        return {key: moved.get(key, 0) for key in after if not key.startswith("http_")}

    return changes


def check(moved: dict[str, float], expected: dict[str, float]) -> None:
    assert {key: moved[key] for key in expected} == expected


def test_a_one_after_the_other(measure: Callable[..., dict[str, float]], random_ids: Callable[..., list[int]]) -> None:
    moved = measure(*[[ask(random_ids(9, seed), max_tokens=10)] for seed in range(10)])
    check(moved, {f"{name}_seconds_count": 10 for name in (*PROMPT_TIMES, "request_inference_time")})
    expected = {
        "time_to_first_token_seconds_count": 10,
        "inter_token_latency_seconds_count": 90,
        "request_time_per_output_token_seconds_count": 10,
        "request_prompt_tokens_count": 10,
        "request_prompt_tokens_sum": 90,
        "request_generation_tokens_count": 10,
        "request_generation_tokens_sum": 100,
        "request_params_n_count": 10,
        "request_params_n_sum": 10,
        "request_params_max_tokens_count": 10,
        "request_params_max_tokens_sum": 100,
        "request_max_num_generation_tokens_sum": 100,
        "request_num_preemptions_count": 10,
        "request_num_preemptions_sum": 0,
        "request_prefill_kv_computed_tokens_sum": 90,
        "iteration_tokens_total_count": 100,
        "iteration_tokens_total_sum": 190,
        "prompt_tokens_total": 90,
        'prompt_tokens_by_source_total{source="local_compute"}': 90,
        "prefix_cache_queries_total": 90,
        "prefix_cache_hits_total": 0,
        "generation_tokens_total": 100,
        END % "length": 10,
    }
    check(moved, expected)
    times = {name: moved[f"{name}_seconds_sum"] for name in (*PROMPT_TIMES, "request_inference_time")}
    prefill_and_decode = times["request_prefill_time"] + times["request_decode_time"]
    assert times["request_inference_time"] == pytest.approx(prefill_and_decode)
    first = times["request_queue_time"] + times["request_prefill_time"]
    assert moved["time_to_first_token_seconds_sum"] == pytest.approx(first)
    assert times["e2e_request_latency"] == pytest.approx(first + times["request_decode_time"])
    gaps = moved["inter_token_latency_seconds_sum"]
    assert gaps == pytest.approx(times["request_decode_time"])
    assert moved["request_time_per_output_token_seconds_sum"] == pytest.approx(gaps / 9)


def test_b_samples_of_one_prompt(
    measure: Callable[..., dict[str, float]], random_ids: Callable[..., list[int]]
) -> None:
    moved = measure([ask(random_ids(20, 50), max_tokens=5, n=3, temperature=1, seed=1)])
    expected = {
        END % "length": 3,
        "generation_tokens_total": 15,
        "prompt_tokens_total": 20,
        "time_to_first_token_seconds_count": 1,
        "inter_token_latency_seconds_count": 12,
        "request_params_n_count": 1,
        "request_params_n_sum": 3,
        "request_generation_tokens_count": 3,
        "request_generation_tokens_sum": 15,
        "request_max_num_generation_tokens_count": 1,
        "request_max_num_generation_tokens_sum": 5,
        "request_time_per_output_token_seconds_count": 3,
        "iteration_tokens_total_sum": 35,
    }
    check(moved, expected)


def test_c_the_same_prompt_again(
    measure: Callable[..., dict[str, float]], tiny: LLM, random_ids: Callable[..., list[int]]
) -> None:
    cached: list[int] = []

    def once(prompt: list[int]) -> dict[str, float]:
        moved = measure([ask(prompt, max_tokens=4)])
        cached.append(int(moved["prefix_cache_hits_total"]))
        return moved

    moved = [once(random_ids(40, 60)) for _ in range(4)]
    total = {key: sum(each[key] for each in moved) for key in moved[0]}
    hits = sum(cached)
    assert cached[0] == 0 and 3 * 32 <= hits <= 3 * 39
    again = run(tiny, [ask(random_ids(40, 60), max_tokens=4)])[0]
    assert again.num_cached_tokens == cached[-1]
    expected = {
        "prefix_cache_queries_total": 160,
        "prompt_tokens_total": 160,
        "prompt_tokens_cached_total": hits,
        'prompt_tokens_by_source_total{source="local_cache_hit"}': hits,
        'prompt_tokens_by_source_total{source="local_compute"}': 160 - hits,
        "request_prefill_kv_computed_tokens_sum": 160 - hits,
        "iteration_tokens_total_sum": 160 - hits + 16,
    }
    check(total, expected)


def test_d_two_prompts_in_a_call(
    measure: Callable[..., dict[str, float]], random_ids: Callable[..., list[int]]
) -> None:
    moved = measure([ask(random_ids(length, 70), max_tokens=4, n=2, temperature=1) for length in (11, 23)])
    expected = {"prompt_tokens_total": 34, "request_params_n_count": 2, "request_params_n_sum": 4, END % "length": 4}
    check(moved, expected)


def test_e_chunked_prefill(measure: Callable[..., dict[str, float]], random_ids: Callable[..., list[int]]) -> None:
    moved = measure([ask(random_ids(100, 80), max_tokens=6)])  # 64 tokens in a step
    expected = {
        "iteration_tokens_total_count": 2 + 6 - 1,
        "iteration_tokens_total_sum": 100 + 6,
        "time_to_first_token_seconds_count": 1,
    }
    check(moved, expected)


def test_f_only_the_prompt(measure: Callable[..., dict[str, float]], random_ids: Callable[..., list[int]]) -> None:
    moved = measure([ask(random_ids(13, 90), max_tokens=0, prompt_logprobs=0)])
    expected = {
        "generation_tokens_total": 0,
        "prompt_tokens_total": 13,
        END % "length": 1,
        "time_to_first_token_seconds_count": 0,
        "inter_token_latency_seconds_count": 0,
        "prefix_cache_queries_total": 0,  # a prompt that is scored is not looked up
        "iteration_tokens_total_sum": 13,
        "e2e_request_latency_seconds_count": 1,
        "request_decode_time_seconds_count": 1,
        "request_decode_time_seconds_sum": 0,
    }
    check(moved, expected)


@pytest.mark.parametrize("samples", [1, 2])
def test_h_a_client_that_leaves(
    measure: Callable[..., dict[str, float]], random_ids: Callable[..., list[int]], samples: int
) -> None:
    seen = 0

    def leave(engine: Engine) -> None:
        nonlocal seen
        for request in engine.core.scheduler.running:
            seen = request.num_known_output_tokens
        if seen == 7:
            engine.abort(next(iter(engine._prompts)))

    moved = measure([ask(random_ids(9, 100), max_tokens=50, n=samples)], before_step=leave)
    assert moved["generation_tokens_total"] >= 7 * samples
    expected = {
        END % "abort": samples,
        "e2e_request_latency_seconds_count": 0,
        "request_generation_tokens_count": 0,
        "time_to_first_token_seconds_count": 1,
    }
    check(moved, expected)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("num_prompt_tokens", [9, 40])
def test_i_preemption(
    measure: Callable[..., dict[str, float]],
    tiny: LLM,
    random_ids: Callable[..., list[int]],
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    num_prompt_tokens: int,
) -> None:
    monkeypatch.setattr(tiny.engine.core.scheduler.preemption, "policy", PreemptionPolicy(mode))
    held, generated = num_prompt_tokens + 5, 6  # the last token is sampled, and not yet computed
    moved = measure([ask(random_ids(num_prompt_tokens, 110), max_tokens=12)], before_step=preempt_at(held))
    blocks = -(-held // 16)
    expected = {
        "num_preemptions_total": 1,
        "request_num_preemptions_sum": 1,
        "prompt_tokens_total": num_prompt_tokens,
        "generation_tokens_total": 12,
        "prefix_cache_queries_total": num_prompt_tokens,
        "prefix_cache_hits_total": 0,
        'preempted_tokens_total{kind="recompute"}': held * (mode == "recompute"),
        'preempted_tokens_total{kind="swap"}': held * (mode == "swap"),
        "recomputed_tokens_total": (num_prompt_tokens + generated) * (mode == "recompute"),
        'swap_blocks_total{direction="out"}': blocks * (mode == "swap"),
        'swap_blocks_total{direction="in"}': blocks * (mode == "swap"),
        END % "length": 1,
    }
    check(moved, expected)


def test_i_preempted_in_the_middle_of_a_prompt_and_found_again(
    measure: Callable[..., dict[str, float]],
    tiny: LLM,
    random_ids: Callable[..., list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only what was computed before can be computed again, and what the prefix cache still has is not."""
    preemption = tiny.engine.core.scheduler.preemption
    monkeypatch.setattr(preemption, "policy", PreemptionPolicy("recompute"))
    left = [64]

    def preempt(engine: Engine) -> None:
        scheduler = engine.core.scheduler
        for request in list(scheduler.running):
            if left and request.num_computed_tokens == left[0]:
                left.clear()
                group = scheduler.group_of(request)
                assert group is not None
                preemption.preempt(group, group.running)

    moved = measure([ask(random_ids(100, 115), max_tokens=3)], before_step=preempt)
    expected = {
        "num_preemptions_total": 1,
        'preempted_tokens_total{kind="recompute"}': 64,
        "recomputed_tokens_total": 0,
        "prompt_tokens_total": 100,
        "prefix_cache_hits_total": 0,
        "iteration_tokens_total_sum": 103,
    }
    check(moved, expected)


def test_a_search_counts_as_one_sample(
    measure: Callable[..., dict[str, float]], random_ids: Callable[..., list[int]]
) -> None:
    most: list[float] = []

    def look(engine: Engine) -> None:
        most.append(engine.metrics.read().counts.num_running)

    params = BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True)
    moved = measure([Ask(random_ids(9, 120), params)], before_step=look)
    assert max(most) == 1
    expected = {
        END % "length": 1,
        "generation_tokens_total": 12,
        "request_generation_tokens_sum": 12,
        "request_generation_tokens_count": 1,
        "request_max_num_generation_tokens_sum": 4,
        "request_params_n_sum": 3,
        "time_to_first_token_seconds_count": 1,
        "inter_token_latency_seconds_count": 0,
        "prompt_tokens_total": 9,
        "e2e_request_latency_seconds_count": 1,
    }
    check(moved, expected)


def test_embeddings_are_prompts_without_tokens(
    tiny: LLM, scrape: Callable[[LLM], Scrape], random_ids: Callable[..., list[int]]
) -> None:
    before = scrape(tiny)
    tiny.engine.add("vector", random_ids(9, 130), PoolingParams())
    tiny.engine.add("gone", random_ids(9, 131), PoolingParams())
    tiny.engine.abort("gone")
    while tiny.engine.has_work:
        tiny.engine.step()
    after = scrape(tiny)
    check_idle(after)
    moved = after.since(before)
    assert (moved[END % "stop"], moved[END % "abort"]) == (1, 1)
    assert (moved["prompt_tokens_total"], moved["e2e_request_latency_seconds_count"]) == (9, 1)
    assert "generation_tokens_total" not in moved and "time_to_first_token_seconds_count" not in moved


def test_nothing_is_counted_of_what_is_refused(tiny: LLM, scrape: Callable[[LLM], Scrape]) -> None:
    before = scrape(tiny)
    with pytest.raises(ValueError, match="prompt"):
        tiny.engine.add("refused", [], SamplingParams())
    assert scrape(tiny).since(before) == {}


def test_samples_that_wait_for_their_prompt_are_deferred(tiny: LLM, random_ids: Callable[..., list[int]]) -> None:
    tiny.engine.add("long", random_ids(100, 140), SamplingParams(n=3, max_tokens=2, ignore_eos=True))
    tiny.engine.step()
    counts = tiny.engine.metrics.read().counts
    assert (counts.num_running, counts.num_waiting, counts.num_deferred) == (1, 2, 2)
    tiny.engine.step()
    counts = tiny.engine.metrics.read().counts
    assert (counts.num_running, counts.num_waiting, counts.num_deferred) == (3, 0, 0)
    run(tiny, [])
