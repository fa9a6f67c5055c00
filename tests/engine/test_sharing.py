"""Blocks are reused, run out and come back: prefix hits, pools that are too small, more samples than slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy_reference
import pytest
from driving import ask, assert_same_scores, ids_of, run

from jaxpage.errors import ParameterError

if TYPE_CHECKING:
    from numpy_reference import RandomModel

    from jaxpage import LLM

SMALL_POOL = {"num_gpu_blocks_override": 8}


@pytest.fixture
def model(random_model: Callable[..., RandomModel]) -> RandomModel:
    return random_model()


@pytest.fixture
def llm(llm_for: Callable[..., LLM], model: RandomModel) -> LLM:
    return llm_for(model.directory)


@pytest.fixture
def small(llm_for: Callable[..., LLM], model: RandomModel) -> LLM:
    return llm_for(model.directory, **SMALL_POOL)


@pytest.mark.parametrize(("length", "cached"), [(6, 5), (8, 7), (11, 10), (16, 15)])
def test_a_repeated_prompt_computes_one_token_pfx_1(
    length: int, cached: int, llm: LLM, model: RandomModel, random_ids: Callable[..., list[int]]
) -> None:
    prompt = random_ids(length)
    expected = numpy_reference.greedy(model.config, model.tensors, prompt, 12)
    outputs = [run(llm, [ask(prompt, max_tokens=12, logprobs=20)])[0] for _ in range(3)]
    assert [ids_of(output) for output in outputs] == [[expected]] * 3
    for output in outputs[1:]:
        assert_same_scores(output.outputs[0].logprobs, outputs[0].outputs[0].logprobs)
    assert [output.num_cached_tokens for output in outputs] == [0, cached, cached]


def test_equal_prompts_at_the_same_time_pfx_1b(
    llm: LLM, model: RandomModel, random_ids: Callable[..., list[int]]
) -> None:
    prompt, pool = random_ids(13), llm.engine.core.scheduler.kv.pool
    expected = numpy_reference.greedy(model.config, model.tensors, prompt, 5)
    for arrivals in ([0] * 8, [0] * 4 + [1] * 4):
        llm.reset_prefix_cache()
        outputs = run(llm, [ask(prompt, max_tokens=5, arrives_at=step) for step in arrivals])
        assert [ids_of(output) for output in outputs] == [[expected]] * 8
        assert pool.num_free == pool.num_usable
    [output] = run(llm, [ask(prompt, max_tokens=5, n=8)])
    assert ids_of(output) == [expected] * 8


def test_generated_blocks_are_reused_by_the_next_turn_pfx_1a(
    llm: LLM, model: RandomModel, random_ids: Callable[..., list[int]]
) -> None:
    history, cached = random_ids(7), []
    for turn, count in enumerate((6, 8, 8)):
        output = run(llm, [ask(history, max_tokens=count)])[0]
        assert ids_of(output) == [numpy_reference.greedy(model.config, model.tensors, history, count)]
        cached.append(output.num_cached_tokens)
        history = history + output.outputs[0].token_ids + random_ids(5, seed=turn)
    # Turn 1 leaves 12 of its 13 tokens in the cache, turn 2 leaves 25 of 26.
    assert cached == [0, 12, 25]


def test_salts_share_nothing(llm: LLM, random_ids: Callable[..., list[int]]) -> None:
    prompt = random_ids(16)
    engine = llm.engine
    hits = []
    for salt in ("a", "b", None, "a"):
        engine.add("salted", prompt, ask(prompt, max_tokens=2).params, cache_salt=salt)
        while engine.has_work:
            outputs = engine.step()
        hits.append(outputs[-1].num_cached_tokens)
    assert hits == [0, 0, 0, 15]


def test_lim_2b_more_samples_than_slots(llm: LLM, random_ids: Callable[..., list[int]]) -> None:
    slots = llm.engine.config.max_num_seqs
    outputs = run(
        llm, [ask(random_ids(5), n=2 * slots + 3, seed=1, temperature=1.0, max_tokens=6), ask([1], max_tokens=3)]
    )
    assert [len(ids) for ids in ids_of(outputs[0])] == [6] * (2 * slots + 3)
    assert [sample.index for sample in outputs[0].outputs] == list(range(2 * slots + 3))
    assert len(ids_of(outputs[1])[0]) == 3
    many = run(llm, [ask(random_ids(3, seed=index), max_tokens=4) for index in range(3 * slots)])
    assert all(len(ids_of(output)[0]) == 4 for output in many)


def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers_pre_1(
    small: LLM, random_ids: Callable[..., list[int]]
) -> None:
    with pytest.raises(ParameterError, match=r"has 40 tokens and needs 10 KV blocks of 4; the whole KV cache has 8"):
        run(small, [ask(random_ids(40))])
    assert len(ids_of(run(small, [ask(random_ids(5), max_tokens=6)])[0])[0]) == 6


def test_output_ends_where_the_pool_ends_pre_1(
    small: LLM, model: RandomModel, random_ids: Callable[..., list[int]]
) -> None:
    prompt = random_ids(20)
    output = run(small, [ask(prompt, max_tokens=100)])[0]
    assert output.outputs[0].finish_reason == "length"
    # 32 tokens have keys and values; the token after the last of them is known too.
    assert len(ids_of(output)[0]) == 13
    assert ids_of(output) == [numpy_reference.greedy(model.config, model.tensors, prompt, 13)]


def test_samples_whose_tails_do_not_fit_together_pre_1b(
    small: LLM, llm: LLM, random_ids: Callable[..., list[int]]
) -> None:
    each = ask(random_ids(8), n=4, seed=1, temperature=1.0, max_tokens=16, logprobs=1)
    stats = small.engine.core.scheduler.stats
    preemptions = stats.num_preemptions
    squeezed, free = run(small, [each])[0], run(llm, [each])[0]
    assert stats.num_preemptions > preemptions
    assert ids_of(squeezed) == ids_of(free)
    assert [sample.text for sample in squeezed.outputs] == [sample.text for sample in free.outputs]
    pool = small.engine.core.scheduler.kv.pool
    assert pool.num_free == pool.num_usable == 8


@pytest.mark.parametrize("caching", [True, False])
def test_samples_share_the_prompt_and_copy_what_they_write_pfx_1b(
    caching: bool, llm_for: Callable[..., LLM], model: RandomModel, random_ids: Callable[..., list[int]]
) -> None:
    llm = llm_for(model.directory, enable_prefix_caching=caching)
    scheduler = llm.engine.core.scheduler
    prompt, computed, used = random_ids(13), [], []
    copies = scheduler.kv.counters.num_copied_blocks
    schedule = scheduler.schedule

    def recorded():
        result = schedule()
        computed.append(result.num_tokens)
        used.append(scheduler.kv.pool.num_used)
        return result

    scheduler.schedule = recorded
    try:
        output = run(llm, [ask(prompt, n=8, seed=1, temperature=1.0, max_tokens=3)])[0]
    finally:
        del scheduler.schedule
    # The prompt once, then two tokens of each sample: the third is never fed back.
    assert [count for count in computed if count] == [13, 8, 8]
    assert used[:2] == [4, 4 + 7]
    assert scheduler.kv.counters.num_copied_blocks == copies + 7
    alone = [run(llm, [ask(prompt, n=index + 1, seed=1, temperature=1.0, max_tokens=3)])[0] for index in range(3)]
    for index, each in enumerate(alone):
        assert ids_of(each) == ids_of(output)[: index + 1]
