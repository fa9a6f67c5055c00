"""Cases SAM and SEED over HTTP: what the sampling fields do to a model whose logits are known."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from api_client import Api
from asking import COMPLETIONS, PATHS, Answer, body_for, both_modes, whole
from driving import ask, ids_of, run
from forced import ForcedModel, Rule

pytestmark = pytest.mark.anyio
V = 294


def noise(scale: float = 3.0) -> Rule:
    """Normal logits, others after each history; as good as any model where two runs are compared."""

    def rule(prompt: list[int], output: list[int], sample: int) -> np.ndarray:
        generator = np.random.default_rng([*prompt, 1000, *output])
        return (scale * generator.standard_normal(V)).astype(np.float32)

    return rule


async def one(api: Api, **body: Any) -> Answer:
    [answer] = await whole(api, COMPLETIONS, **({"ignore_eos": True} | body))
    return answer


def chosen_logprobs(answer: Answer) -> list[float]:
    return answer.logprobs["token_logprobs"]


async def test_sam_1_very_small_temperatures(model: ForcedModel, api: Api) -> None:
    def rule(prompt: list[int], output: list[int], sample: int) -> np.ndarray:
        logits = np.random.default_rng(output).uniform(-60, 59, V).astype(np.float32)
        logits[7 * len(output) % V] = 60
        return logits

    model.scores(rule)
    expected = [7 * position % V for position in range(50)]
    for temperature in (0, 1e-9, 1e-5, 1e-4, 1e-2):
        answer = await one(api, temperature=temperature, max_tokens=50, logprobs=1)
        assert answer.token_ids == expected
        assert all(math.isfinite(value) for value in chosen_logprobs(answer))
    for path in PATHS:
        await api.refused(path, body_for(path, temperature=-0.1), "temperature")
        body = b'{"prompt": "x", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}'
        await api.refused(path, body, "temperature")


async def test_sam_1a_very_large_logits(model: ForcedModel, api: Api) -> None:
    logits = np.full(V, -3e4, np.float32)
    logits[98], logits[97] = 3e4, 2.99e4
    model.scores(logits)
    for temperature in (0, 1):
        answer = await one(api, temperature=temperature, max_tokens=3, logprobs=2)
        assert answer.token_ids == [98] * 3
        assert chosen_logprobs(answer) == pytest.approx([0, 0, 0], abs=1e-4)
    model.scores(np.full(V, 1e4, np.float32))
    for temperature in (0, 1):
        answer = await one(api, temperature=temperature, max_tokens=3, logprobs=2)
        assert chosen_logprobs(answer) == pytest.approx([-math.log(V)] * 3, abs=1e-3)


def test_sam_1b_ties_go_to_the_lowest_id(model: ForcedModel) -> None:
    model.scores({98: 5.0, 97: 5.0})
    for size in (1, 2, 5, 8):
        outputs = run(model.llm, [ask([120, place], max_tokens=20) for place in range(size)])
        assert [ids_of(output) for output in outputs] == [[[97] * 20]] * size


async def test_sam_2_the_off_value_of_top_k_is_not_greedy(model: ForcedModel, api: Api) -> None:
    model.scores(model.only({97 + index: index / 10 for index in range(8)}))
    common: dict[str, Any] = {"temperature": 1, "max_tokens": 60, "seed": 5}
    base = (await one(api, **common)).token_ids
    assert set(base) == set(range(97, 105))
    for top_k in (-1, 0, None, V, V + 1, 10**9):
        assert (await one(api, **common, top_k=top_k)).token_ids == base
    assert set((await one(api, **common, top_k=1)).token_ids) == {104}
    assert set((await one(api, **common, top_k=5)).token_ids) == set(range(100, 105))
    model.scores(model.only(dict.fromkeys(range(97, 105), 1.0)))  # who ties with the last candidate is one, too
    assert set((await one(api, **common, top_k=5)).token_ids) == set(range(97, 105))
    for path in PATHS:
        for top_k in (-2, 1.5, "5"):
            await api.refused(path, body_for(path, top_k=top_k), "top_k")


NEUTRAL = {
    "top_p": 1.0, "top_k": 0, "min_p": 0.0, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1.0,
    "logit_bias": {}, "min_tokens": 0, "bad_words": [], "stop": [], "ignore_eos": False,
}  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
async def test_sam_2a_neutral_values_are_as_good_as_none(path: str, model: ForcedModel, api: Api) -> None:
    model.scores(noise())
    common: dict[str, Any] = {"seed": 3, "temperature": 0.9, "max_tokens": 30}
    [base] = await whole(api, path, **common)
    for name, value in NEUTRAL.items():
        for written in (value, None):
            [answer] = await whole(api, path, **common, **{name: written})
            assert answer.token_ids == base.token_ids, (name, written)


def test_sam_2b_filters_are_per_row(model: ForcedModel) -> None:
    model.scores(model.only({97 + index: index / 10 for index in range(8)}))
    asks = [
        ask([120], temperature=1, top_k=top_k, seed=seed, max_tokens=20)
        for seed, top_k in enumerate([1, 0, 5, 2, -1, 8, 3, 1])
    ]
    together = [ids_of(output)[0] for output in run(model.llm, asks)]
    assert together == [ids_of(run(model.llm, [each])[0])[0] for each in asks]
    assert together[0] == together[7] == [104] * 20


def test_sam_3_top_k_above_the_vocabulary_in_a_mixed_batch(model: ForcedModel) -> None:
    model.scores(noise())
    settings: list[dict[str, Any]] = [
        {}, {"temperature": 1, "top_k": 5}, {"temperature": 1, "top_k": 9_999_999}, {"temperature": 1, "top_p": 0.5}
    ]  # fmt: skip
    asks = [ask([120, place], seed=place, max_tokens=12, **each) for place, each in enumerate(settings)]
    together = [ids_of(output) for output in run(model.llm, asks)]
    assert together == [ids_of(run(model.llm, [each])[0]) for each in asks]
    asks[2].params.top_k = 0
    assert ids_of(run(model.llm, [asks[2]])[0]) == together[2]


async def test_sam_3_more_logprobs_than_the_limit(model: ForcedModel, api: Api) -> None:
    await api.refused(COMPLETIONS, {"prompt": "x", "logprobs": 21}, "logprobs")
    body = body_for(PATHS[1], logprobs=True, top_logprobs=300)
    await api.refused(PATHS[1], body, "top_logprobs")
    assert not model.seen


async def test_sam_3a_fewer_candidates_than_asked_for(model: ForcedModel, api: Api) -> None:
    model.scores({98: 4.0, 97: 3.5, 99: 9.0})
    common: dict[str, Any] = {"temperature": 1, "seed": 1, "max_tokens": 12}
    for allowed in ([97], [97, 97]):
        assert (await one(api, **common, allowed_token_ids=allowed)).token_ids == [97] * 12
    assert set((await one(api, **common, allowed_token_ids=[97, 98], top_k=5)).token_ids) == {97, 98}
    answer = await one(api, **common, allowed_token_ids=[97, 98], logprobs=5)
    assert set(answer.token_ids) == {97, 98}
    assert all(len(entry) == 5 for entry in answer.logprobs["top_logprobs"])
    assert "c" in answer.logprobs["top_logprobs"][0]  # values are those of the model, which knows no ban
    constrained = {"structured_outputs": {"choice": ["a"]}, "logprobs": True, "top_logprobs": 3}
    [answer] = await both_modes(api, PATHS[1], **constrained)
    assert answer.text == "a"
    assert [len(entry["top_logprobs"]) for entry in answer.logprobs["content"]] == [3] * len(answer.token_ids)


async def test_seed_1a_seeds_of_64_bits(model: ForcedModel, api: Api) -> None:
    model.scores({})  # all ids are alike
    common: dict[str, Any] = {"temperature": 1, "max_tokens": 16}
    seeds = (7, 7 + 2**32, 7 + 2**62, -7, 2**63 - 1, -(2**63))
    streams = [(await one(api, **common, seed=seed)).token_ids for seed in seeds]
    assert [(await one(api, **common, seed=seed)).token_ids for seed in seeds] == streams
    assert len({tuple(ids) for ids in streams}) == len(seeds)
    for path in PATHS:
        for seed in (2**63, 1.5, "7"):
            await api.refused(path, body_for(path, seed=seed), "seed")
    assert (await one(api, **common, seed=None)).token_ids != (await one(api, **common, seed=None)).token_ids


@pytest.mark.parametrize("path", PATHS)
async def test_seed_1c_samples_by_index(path: str, model: ForcedModel, api: Api) -> None:
    model.scores(noise())
    common: dict[str, Any] = {"temperature": 1, "max_tokens": 10, "seed": 9, "ignore_eos": True}
    two, four = [await both_modes(api, path, n=n, **common) for n in (2, 4)]
    assert [each.token_ids for each in two] == [each.token_ids for each in four[:2]]
    assert len({tuple(each.token_ids) for each in four}) == 4


def test_seed_1b_forced_logits_under_any_schedule(forced_model: Callable[..., ForcedModel]) -> None:
    results = []
    for options in ({}, {"block_size": 16, "max_num_batched_tokens": 64}):
        model = forced_model(**options)
        model.scores(noise())
        one = ask(list(range(21)), seed=5, temperature=1, max_tokens=20)
        for count in (1, 4, 8):
            results += [ids_of(output)[0] for output in run(model.llm, [one] * count)]
    assert results == [results[0]] * len(results)
