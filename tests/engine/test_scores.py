"""Logprobs of prompts and outputs: complete and the same whatever the cache, the chunks and the preemptions do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy_reference
import pytest
from driving import ask, assert_same_scores, ids_of, preempt_at, run

from jaxpage import RequestOutputKind

if TYPE_CHECKING:
    from numpy_reference import RandomModel

    from jaxpage import LLM
    from jaxpage.request import LogprobDict


@pytest.fixture
def model(random_model: Callable[..., RandomModel]) -> RandomModel:
    return random_model()


@pytest.fixture
def llm(llm_for: Callable[..., LLM], model: RandomModel) -> LLM:
    return llm_for(model.directory)


def assert_true_scores(
    model: RandomModel, token_ids: list[int], entries: list[LogprobDict | None], first: int, count: int
) -> None:
    """``entries`` are the model's logprobs of ``token_ids`` from position ``first`` on, with ``count`` alternatives."""
    logprobs = numpy_reference.log_softmax(numpy_reference.logits(model.config, model.tensors, token_ids))
    for position, entry in enumerate(entries, first):
        if position == 0:
            assert entry is None
            continue
        before, token = logprobs[position - 1], token_ids[position]
        best = np.argsort(-before)[:count].tolist()
        assert set(entry) == {*best, token}
        for listed, value in entry.items():
            assert abs(value.logprob - before[listed]) < 1e-4
            assert value.rank == 1 + int((before > before[listed]).sum())


def test_logprobs_are_the_log_softmax_of_raw_logits(
    llm: LLM, model: RandomModel, random_ids: Callable[..., list[int]]
) -> None:
    # Neither the temperature nor penalties nor the bias are in them.
    prompt = random_ids(11)
    edits = {"temperature": 0.5, "seed": 1, "repetition_penalty": 1.3, "logit_bias": {9: 3.0}}
    output = run(llm, [ask(prompt, max_tokens=8, logprobs=4, prompt_logprobs=3, **edits)])[0]
    sample = output.outputs[0]
    assert_true_scores(model, prompt, output.prompt_logprobs, 0, 3)
    assert_true_scores(model, prompt + sample.token_ids, sample.logprobs, len(prompt), 4)
    chosen = [entry[token].logprob for entry, token in zip(sample.logprobs, sample.token_ids, strict=True)]
    assert abs(sample.cumulative_logprob - sum(chosen)) < 1e-5


def test_zero_logprobs_list_the_chosen_token_only(llm: LLM, random_ids: Callable[..., list[int]]) -> None:
    output = run(llm, [ask(random_ids(5), max_tokens=4, logprobs=0, prompt_logprobs=0)])[0]
    sample = output.outputs[0]
    assert [list(entry) for entry in sample.logprobs] == [[token] for token in sample.token_ids]
    assert [list(entry) for entry in output.prompt_logprobs[1:]] == [[token] for token in output.prompt_token_ids[1:]]


def test_log_1_prompt_scores_when_the_prompt_is_cached(
    llm: LLM, model: RandomModel, random_ids: Callable[..., list[int]]
) -> None:
    p = random_ids(13)
    q = p[:8] + random_ids(5, seed=2)
    plain, scored_p = ask(p, max_tokens=2), ask(p, max_tokens=2, prompt_logprobs=2)
    scored_q = ask(q, max_tokens=2, prompt_logprobs=2)
    for order in ([plain, scored_p, scored_q], [scored_q, scored_p, plain], [scored_p, plain, scored_q]):
        llm.reset_prefix_cache()
        for each in order:
            output = run(llm, [each])[0]
            if each is not plain:
                assert len(output.prompt_logprobs) == 13
                assert_true_scores(model, each.prompt, output.prompt_logprobs, 0, 2)


@pytest.mark.parametrize("chunk", [1, 3, 4, 16, 21, 22, 64])
def test_log_1a_prompt_scores_across_chunks(
    chunk: int, llm_for: Callable[..., LLM], model: RandomModel, random_ids: Callable[..., list[int]]
) -> None:
    llm = llm_for(model.directory, max_num_batched_tokens=chunk)
    prompt = random_ids(22)
    scored = ask(prompt, max_tokens=1, prompt_logprobs=3)
    decoding = [ask(random_ids(3, seed=index), max_tokens=30) for index in range(2)]
    for others in ([], decoding):
        scored.arrives_at = 4 if others else 0
        output = run(llm, [scored, *others])[0]
        assert len(output.prompt_logprobs) == 22
        assert_true_scores(model, prompt, output.prompt_logprobs, 0, 3)


def test_log_1b_scored_and_plain_requests_follow_each_other(llm: LLM, random_ids: Callable[..., list[int]]) -> None:
    p = random_ids(13)
    plain, scored = ask(p, max_tokens=8), ask(p, max_tokens=8, prompt_logprobs=1)
    expected = ids_of(run(llm, [plain])[0])
    llm.reset_prefix_cache()
    run(llm, [scored])
    after_scored = run(llm, [plain])[0]
    assert ids_of(after_scored) == expected
    assert after_scored.num_cached_tokens == 12
    llm.reset_prefix_cache()
    run(llm, [plain])
    together = run(llm, [scored, plain])
    assert [ids_of(output) for output in together] == [expected] * 2
    assert together[1].num_cached_tokens == 12


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_log_1c_prompt_scores_and_preemption(
    kind: RequestOutputKind, llm: LLM, random_ids: Callable[..., list[int]]
) -> None:
    scored = ask(random_ids(20), max_tokens=10, prompt_logprobs=2, logprobs=2, output_kind=kind)
    undisturbed = run(llm, [scored])[0]
    hook = preempt_at(16, 25)
    output = run(llm, [scored], hook)[0]
    assert not hook.left
    assert ids_of(output) == ids_of(undisturbed)
    assert output.prompt_logprobs.count(None) == 1
    assert_same_scores(output.prompt_logprobs, undisturbed.prompt_logprobs)
    assert_same_scores(output.outputs[0].logprobs, undisturbed.outputs[0].logprobs)


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA])
def test_log_3c_each_sample_has_its_own_scores(
    kind: RequestOutputKind, llm: LLM, model: RandomModel, random_ids: Callable[..., list[int]]
) -> None:
    prompt = random_ids(9)
    params = {"n": 3, "seed": 4, "temperature": 1.0, "logprobs": 2, "max_tokens": 10, "output_kind": kind}
    output = run(llm, [ask(prompt, **params)])[0]
    assert [sample.index for sample in output.outputs] == [0, 1, 2]
    for sample in output.outputs:
        assert_true_scores(model, prompt + sample.token_ids, sample.logprobs, len(prompt), 2)


def test_prompt_scores_are_only_given_complete(llm: LLM, random_ids: Callable[..., list[int]]) -> None:
    engine = llm.engine
    params = ask([], n=2, max_tokens=4, prompt_logprobs=1).params
    engine.add("scored", random_ids(40), params)
    for _ in range(3):
        assert engine.step() == []
    ended = engine.abort("scored")
    assert ended is not None
    assert ended.prompt_logprobs is None
    while engine.has_work:
        assert engine.step() == []


def test_lim_1b_scoring_a_prompt_of_one_token(llm: LLM) -> None:
    for max_tokens in (0, 1):
        output = run(llm, [ask([65], max_tokens=max_tokens, prompt_logprobs=1, logprobs=1)])[0]
        assert output.prompt_logprobs == [None]
        assert len(output.outputs[0].token_ids) == len(output.outputs[0].logprobs) == max_tokens
        assert output.outputs[0].finish_reason == "length"


def test_scoring_without_generating(llm: LLM, model: RandomModel, random_ids: Callable[..., list[int]]) -> None:
    prompt = random_ids(30)
    output = run(llm, [ask(prompt, max_tokens=0, prompt_logprobs=2)])[0]
    assert output.outputs[0].token_ids == []
    assert output.outputs[0].text == ""
    assert_true_scores(model, prompt, output.prompt_logprobs, 0, 2)
