"""Cases LIM: no new tokens, budgets around the prompt's length, more samples than rows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from api_client import Api
from asking import CHAT, COMPLETIONS, both_modes, streamed, whole
from driving import ask, ids_of, run
from forced import ForcedModel

from jaxpage.errors import ParameterError

if TYPE_CHECKING:
    from jaxpage import LLM

pytestmark = pytest.mark.anyio
HELLO = [19556, 957, 1462, 314]  # "Hello my name is"


@pytest.fixture
def smol(forced_model: Callable[..., ForcedModel]) -> ForcedModel:
    """SMOL with logits that differ after each history."""
    model = forced_model("smol")

    def rule(prompt: list[int], output: list[int], sample: int) -> np.ndarray:
        generator = np.random.default_rng([*prompt, *output])
        return generator.standard_normal(model.vocab_size).astype(np.float32)

    model.scores(rule)
    return model


@pytest.fixture
async def smol_api(smol: ForcedModel) -> AsyncIterator[Api]:
    async with smol.serving() as api:
        yield api


async def test_lim_1_scoring_a_prompt(smol_api: Api) -> None:
    body: dict[str, Any] = {"prompt": "Hello my name is", "max_tokens": 0, "logprobs": 2}
    [answer] = await both_modes(smol_api, COMPLETIONS, **body, echo=True)
    assert answer.ending == ("Hello my name is", "length", None, 0)
    assert answer.usage["completion_tokens"] == 0
    scores = answer.logprobs
    assert {len(values) for values in scores.values()} == {4}
    assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
    assert scores["text_offset"] == [0, 5, 8, 13]
    await smol_api.refused(COMPLETIONS, body, "max_tokens")
    assert (await whole(smol_api, COMPLETIONS, max_tokens=3, ignore_eos=True))[0].finish_reason == "length"


async def test_lim_1a_the_form_that_evaluation_harnesses_send(smol_api: Api) -> None:
    prompts = [HELLO, [19556, 905]]
    body: dict[str, Any] = {"echo": True, "logprobs": 1, "temperature": 0, "seed": 1234}
    together = (await smol_api.complete(prompt=prompts, max_tokens=1, **body))["choices"]
    assert [choice["index"] for choice in together] == [0, 1]
    for prompt, choice in zip(prompts, together, strict=True):
        scores = choice["logprobs"]
        assert {len(values) for values in scores.values()} == {len(prompt) + 1}
        assert [value is None for value in scores["token_logprobs"]] == [True] + [False] * len(prompt)
        alone = (await smol_api.complete(prompt=prompt, max_tokens=0, **body))["choices"][0]["logprobs"]
        assert alone["token_logprobs"][1:] == pytest.approx(scores["token_logprobs"][1:-1], abs=1e-4)
        # The generated token is the argmax.
        assert scores["token_logprobs"][-1] == max(scores["top_logprobs"][-1].values())


async def test_lim_1a_an_argmax_of_the_prompt_has_the_best_value(smol: ForcedModel, smol_api: Api) -> None:
    smol.scores({957: 5.0, 905: 4.0})
    body: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    for prompt, is_best in (([19556, 957], True), ([19556, 905], False)):
        scores = (await smol_api.complete(prompt=prompt, **body))["choices"][0]["logprobs"]
        assert (scores["token_logprobs"][1] == max(scores["top_logprobs"][1].values())) == is_best


async def test_lim_1b_scoring_a_prompt_of_one_token(smol_api: Api) -> None:
    for max_tokens in (0, 1):
        body: dict[str, Any] = {"prompt": [19556], "echo": True, "logprobs": 1, "max_tokens": max_tokens}
        [answer] = await both_modes(smol_api, COMPLETIONS, **body)
        values = answer.logprobs["token_logprobs"]
        assert values[0] is None
        assert len(values) == 1 + max_tokens
        assert all(value is not None for value in values[1:])
        assert answer.text.startswith("Hello")


async def test_lim_1c_zero_and_absent_limits(smol: ForcedModel, smol_api: Api) -> None:
    smol.says([81] * 600)
    for name in ("max_tokens", "max_completion_tokens"):
        await smol_api.refused(CHAT, {"messages": [{"role": "user", "content": "Hi"}], name: 0}, name)
    [answer] = await whole(smol_api, COMPLETIONS, max_tokens=None)
    assert (answer.finish_reason, len(answer.token_ids)) == ("length", 16)
    messages = [{"role": "user", "content": "Hi " * 440}]  # leaves little of the context of 512
    answer = await smol_api.chat(messages=messages, temperature=0)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 512
    body: dict[str, Any] = {"prompt": "Hello my name is", "echo": True, "max_tokens": 0, "n": 2}
    answers = await streamed(smol_api, COMPLETIONS, **body)
    assert [each.ending for each in answers] == [("Hello my name is", "length", None, 0)] * 2
    assert [len(each.deltas) for each in answers] == [1, 1]


def noise(prompt: list[int], output: list[int], sample: int) -> np.ndarray:
    """Logits that differ after each history."""
    return np.random.default_rng([*prompt, *output]).standard_normal(294).astype(np.float32)


def greedy(prompt: list[int], count: int) -> list[int]:
    """What ``noise`` makes of a prompt."""
    output: list[int] = []
    for _ in range(count):
        output.append(int(noise(prompt, output, 0).argmax()))
    return output


@pytest.mark.parametrize(("chunked", "budget"), [(True, 32), (False, 128)])
def test_lim_2_a_prompt_above_the_step_budget(
    chunked: bool, budget: int, forced_model: Callable[..., ForcedModel], random_ids: Callable[..., list[int]]
) -> None:
    model = forced_model(max_model_len=128, max_num_batched_tokens=budget, enable_chunked_prefill=chunked)
    model.scores(noise)
    prompts = [random_ids(64), random_ids(4)]
    outputs = run(model.llm, [ask(prompt, max_tokens=4) for prompt in prompts])
    assert [ids_of(output) for output in outputs] == [[greedy(prompt, 4)] for prompt in prompts]


def test_lim_2_a_budget_that_could_never_take_a_whole_prompt(forced_model: Callable[..., ForcedModel]) -> None:
    with pytest.raises(ParameterError, match=r"max_num_batched_tokens: 32 is below max_model_len 128"):
        forced_model(max_model_len=128, max_num_batched_tokens=32, enable_chunked_prefill=False)


@pytest.mark.parametrize("budget", [1, 3, 12, 13, 14, 64])
def test_lim_2a_budgets_around_a_block_and_the_prompt(
    budget: int,
    forced_model: Callable[..., ForcedModel],
    random_ids: Callable[..., list[int]],
    scheduled: Callable[[LLM], list[list[int]]],
) -> None:
    prompt = random_ids(13)
    model = forced_model(max_num_batched_tokens=budget, max_num_seqs=1)
    model.scores(noise)
    steps = scheduled(model.llm)
    assert ids_of(run(model.llm, [ask(prompt, max_tokens=8)])[0]) == [greedy(prompt, 8)]
    prefill = [budget] * (13 // budget) + ([13 % budget] if 13 % budget else [])
    assert [counts for counts in steps if counts] == [[count] for count in [*prefill, *[1] * 7]]


@pytest.fixture
def scheduled() -> Iterator[Callable[[LLM], list[list[int]]]]:
    """Gives a list that grows by the tokens of each request in each step of an engine."""
    with pytest.MonkeyPatch.context() as patch:

        def watch(llm: LLM) -> list[list[int]]:
            steps: list[list[int]] = []
            scheduler = llm.engine.core.scheduler
            schedule = scheduler.schedule

            def noted() -> Any:
                result = schedule()
                steps.append([item.num_tokens for item in result.requests])
                return result

            patch.setattr(scheduler, "schedule", noted)
            return steps

        yield watch


async def test_lim_2b_more_samples_than_slots(forced_model: Callable[..., ForcedModel]) -> None:
    model = forced_model(max_num_seqs=2)
    model.says(lambda prompt, sample: [97 + sample] * 6)
    async with model.serving() as api:
        for path in (COMPLETIONS, CHAT):
            answers = await both_modes(api, path, n=5, max_tokens=6)
            assert [each.text for each in answers] == [letter * 6 for letter in "abcde"]
            assert [each.text for each in await both_modes(api, path, max_tokens=6)] == ["aaaaaa"]
        many = await api.complete(prompt=[[120 + place] for place in range(7)], max_tokens=6)
        assert [choice["text"] for choice in many["choices"]] == ["aaaaaa"] * 7
