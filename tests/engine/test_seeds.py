"""Sampling is a function of (seed, sample, position) and the request's own settings; nothing around it matters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from driving import Ask, ask, assert_same_scores, ids_of, preempt_at, run

from jaxpage import RequestOutputKind

if TYPE_CHECKING:
    from pathlib import Path

    from numpy_reference import RandomModel

    from jaxpage import LLM


@pytest.fixture(scope="module")
def directory(random_model: Callable[..., RandomModel]) -> Path:
    return random_model().directory


@pytest.fixture
def llm(llm_for: Callable[..., LLM], directory: Path) -> LLM:
    return llm_for(directory)


def test_seed_1_a_seeded_request_does_not_notice_its_neighbours(llm: LLM, random_ids: Callable[..., list[int]]) -> None:
    seeded = ask(random_ids(13), seed=42, temperature=0.8, max_tokens=16)
    expected = ids_of(run(llm, [seeded])[0])
    neighbours = [ask(random_ids(5 + index, seed=1), temperature=1.0, max_tokens=9 + index) for index in range(7)]
    crowds = []
    for others in (neighbours[:1], neighbours, [dataclasses.replace(seeded, params=_with_seed(seeded, 43))]):
        llm.reset_prefix_cache()
        for place in (0, len(others)):
            outputs = run(llm, [*others[:place], seeded, *others[place:]])
            assert ids_of(outputs.pop(place)) == expected
            crowds.append([ids_of(output) for output in outputs])
    assert crowds[2] != crowds[3], "unseeded requests repeated themselves"
    assert crowds[4] == crowds[5] != [expected]

    after_hit = run(llm, [seeded])[0]
    assert after_hit.num_cached_tokens == 12
    assert ids_of(after_hit) == expected
    for counts in [(5,), (14, 20)]:
        hook = preempt_at(*counts)
        llm.reset_prefix_cache()
        assert ids_of(run(llm, [seeded], hook)[0]) == expected
        assert not hook.left


def _with_seed(each: Ask, seed: int) -> Any:
    return dataclasses.replace(each.params, seed=seed)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 2, "max_num_seqs": 2},
        {"max_num_batched_tokens": 5},
        {"max_num_batched_tokens": 64},
        {"block_size": 16, "num_gpu_blocks_override": 32},
        {"num_gpu_blocks_override": 8},
    ],
)
def test_seed_1b_schedule_and_shapes_do_not_matter(
    options: dict[str, int], llm_for: Callable[..., LLM], directory: Path, random_ids: Callable[..., list[int]]
) -> None:
    # 12 tokens and not 20, so that the request fits the small pool.
    seeded = ask(random_ids(21), seed=5, temperature=1.0, max_tokens=12)
    expected = ids_of(run(llm_for(directory), [seeded])[0])
    llm = llm_for(directory, **options)
    assert ids_of(run(llm, [seeded])[0]) == expected
    for batch in (4, 8):
        llm.reset_prefix_cache()
        assert [ids_of(output) for output in run(llm, [seeded] * batch)] == [expected] * batch
    streamed = dataclasses.replace(seeded.params, output_kind=RequestOutputKind.DELTA)
    assert ids_of(run(llm, [dataclasses.replace(seeded, params=streamed)])[0]) == expected


def test_seed_1c_samples_of_one_seed_are_told_apart_by_index(llm: LLM, random_ids: Callable[..., list[int]]) -> None:
    prompt = random_ids(6)
    two, four, streamed = (
        ids_of(run(llm, [ask(prompt, seed=9, n=n, temperature=1.0, max_tokens=16, output_kind=kind)])[0])
        for n, kind in [
            (2, RequestOutputKind.CUMULATIVE),
            (4, RequestOutputKind.CUMULATIVE),
            (4, RequestOutputKind.DELTA),
        ]
    )
    assert two == four[:2]
    assert streamed == four
    assert len({tuple(sample) for sample in four}) == 4
    assert four[0] == ids_of(run(llm, [ask(prompt, seed=9, temperature=1.0, max_tokens=16)])[0])[0]


def test_seed_1c_unseeded_requests_and_samples_differ(llm: LLM, random_ids: Callable[..., list[int]]) -> None:
    one = ask(random_ids(6), temperature=1.0, max_tokens=24)
    pair = run(llm, [one, one, dataclasses.replace(one, params=dataclasses.replace(one.params, n=2))])
    assert len({tuple(sample) for output in pair for sample in ids_of(output)}) == 4


def test_seed_1a_any_64_bit_seed_is_its_own(llm: LLM, random_ids: Callable[..., list[int]]) -> None:
    seeds = (0, 1, -1, 2**32, 2**32 + 1, 2**63 - 1, -(2**63), 7, 7 + 2**32, 7 + 2**62, -7)
    asks = [ask(random_ids(6), temperature=1.0, seed=seed) for seed in seeds]
    outputs, again = run(llm, asks), run(llm, asks)
    assert len({tuple(ids_of(output)[0]) for output in outputs}) == len(seeds)
    assert [ids_of(output) for output in again] == [ids_of(output) for output in outputs]


def test_sam_2a_neutral_values_are_the_same_as_none(llm: LLM, random_ids: Callable[..., list[int]]) -> None:
    neutral: list[dict[str, Any]] = [
        {"top_p": 1.0},
        {"top_k": 0},
        {"top_k": -1},
        {"top_k": 10**12},
        {"min_p": 0.0},
        {"presence_penalty": 0.0},
        {"frequency_penalty": 0},
        {"repetition_penalty": 1.0},
        {"logit_bias": {}},
        {"logit_bias": {5: 0.0}},
        {"logit_bias": None},
        {"min_tokens": 0},
        {"stop": []},
        {"stop": None},
        {"stop_token_ids": []},
        {"allowed_token_ids": list(range(294))},
        {"bad_words": []},
        {"bad_words": None},
    ]
    common = {"seed": 3, "temperature": 0.9, "max_tokens": 30, "ignore_eos": False}
    asks = [ask(random_ids(9), **common, **change) for change in ({}, *neutral)]
    base, *others = run(llm, asks)
    for change, output in zip(neutral, others, strict=True):
        assert ids_of(output) == ids_of(base), change


def test_sam_3b_rows_leave_the_batch_and_the_others_keep_their_settings(
    llm: LLM, random_ids: Callable[..., list[int]]
) -> None:
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0, "repetition_penalty": 1.5},
        {"temperature": 0.3, "top_k": 3, "seed": 1},
        {"temperature": 0.6, "logit_bias": {40: 6.0, 41: -100.0}, "seed": 2},
        {"temperature": 0.9, "presence_penalty": 1.5, "seed": 3},
        {"temperature": 1.2, "top_p": 0.5, "seed": 4},
        {"temperature": 1.5, "frequency_penalty": -1.0, "seed": 5},
        {"temperature": 0.0, "allowed_token_ids": [60, 61, 62]},
        {"temperature": 2.0, "min_p": 0.3, "top_k": 50, "seed": 6},
    ]
    asks = [ask(random_ids(4, seed=index), max_tokens=2 + index, **each) for index, each in enumerate(settings)]
    for order in (asks, asks[::-1]):
        together = [ids_of(output) for output in run(llm, order)]
        assert together == [ids_of(run(llm, [each])[0]) for each in order]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("counts", [(13,), (18,), (13, 18, 25)])
def test_nothing_of_the_history_is_lost_by_a_preemption_pre_2(
    mode: str,
    counts: tuple[int, ...],
    llm_for: Callable[..., LLM],
    directory: Path,
    random_ids: Callable[..., list[int]],
) -> None:
    llm = llm_for(directory, preemption_mode=mode, swap_space=0.001)
    prompt = random_ids(9)
    common: dict[str, Any] = {"temperature": 0.9, "seed": 11, "max_tokens": 24, "min_tokens": 10, "logprobs": 3}
    common |= {"presence_penalty": 1.2, "frequency_penalty": 0.4, "output_kind": RequestOutputKind.DELTA}
    whole = run(llm, [ask(prompt, **common)])[0].outputs[0]
    # The last letter comes up late, so that the stop string has work to do after the preemptions.
    stop = [letter for letter in whole.text if letter.isascii() and letter.isprintable()][-1]
    for ends in ({}, {"stop": [stop]}):
        each = ask(prompt, **common, **ends)
        undisturbed = run(llm, [each])[0].outputs[0]
        hook = preempt_at(*counts)
        stats = llm.engine.core.scheduler.stats
        preemptions = stats.num_preemptions, stats.num_swap_preemptions
        again = run(llm, [each], hook)[0]
        assert stats.num_preemptions == preemptions[0] + len(counts) - len(hook.left) > preemptions[0]
        assert (stats.num_swap_preemptions > preemptions[1]) is (mode == "swap")
        assert again.prompt_token_ids == prompt
        sample = again.outputs[0]
        assert sample.token_ids == undisturbed.token_ids
        assert sample.text == undisturbed.text
        assert (sample.finish_reason, sample.stop_reason) == (undisturbed.finish_reason, undisturbed.stop_reason)
        assert_same_scores(sample.logprobs, undisturbed.logprobs)
        if ends:
            assert sample.stop_reason == stop
            assert len(sample.token_ids) >= 10
