"""Structured output through a real engine with random weights: whatever the model likes, what ends obeys."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from driving import ask, ids_of, preempt_at, run

from jaxpage import RequestOutputKind, SamplingParams, StructuredOutputsParams
from jaxpage.errors import ParameterError

if TYPE_CHECKING:
    from numpy_reference import RandomModel

    from jaxpage import LLM

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "夏", "🐈"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture
def llm(llm_for: Callable[..., LLM], random_model: Callable[..., RandomModel]) -> LLM:
    return llm_for(random_model().directory)


def shaped(prompt: list[int], **params: Any) -> Any:
    form = StructuredOutputsParams(**{name: params.pop(name) for name in ("json", "regex", "choice") if name in params})
    return ask(prompt, **({"ignore_eos": False, "max_tokens": 100, "structured_outputs": form} | params))


def test_so_3_every_sample_validates_and_stops(llm: LLM, random_ids: Callable[..., list[int]]) -> None:
    asks = [shaped(random_ids(19, seed), json=SCHEMA, n=3, temperature=1.5, seed=seed) for seed in range(4)]
    for output in run(llm, asks):
        assert len({sample.text for sample in output.outputs}) == 3
        for sample in output.outputs:
            assert sample.finish_reason == "stop" and sample.stop_reason is None
            jsonschema.validate(json.loads(sample.text), SCHEMA)


def test_beside_free_requests(llm: LLM, random_ids: Callable[..., list[int]]) -> None:
    prompts = [random_ids(7, seed) for seed in range(3)]
    alone = [ids_of(run(llm, [ask(prompt, max_tokens=20)])[0]) for prompt in prompts]
    asks = [ask(prompt, max_tokens=20) for prompt in prompts]
    asks += [shaped(prompt, choice=["yes", "no", "夏目"], arrives_at=2) for prompt in prompts]
    outputs = run(llm, asks)
    assert [ids_of(each) for each in outputs[:3]] == alone
    assert all(each.outputs[0].text in ("yes", "no", "夏目") for each in outputs[3:])


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption_changes_nothing(
    llm_for: Callable[..., LLM],
    random_model: Callable[..., RandomModel],
    random_ids: Callable[..., list[int]],
    mode: str,
) -> None:
    swap = {"preemption_mode": "swap", "swap_space": 0.01} if mode == "swap" else {"preemption_mode": "recompute"}
    llm = llm_for(random_model().directory, **swap)
    prompt = random_ids(11)
    calm = run(llm, [shaped(prompt, json=SCHEMA)])[0]
    llm.reset_prefix_cache()
    disturbed = run(llm, [shaped(prompt, json=SCHEMA)], preempt_at(5, 14, 20, 21))[0]
    assert ids_of(disturbed) == ids_of(calm)
    jsonschema.validate(json.loads(calm.outputs[0].text), SCHEMA)


def test_streams_join_to_the_whole(llm: LLM, random_ids: Callable[..., list[int]]) -> None:
    prompt = random_ids(9)
    whole = run(llm, [shaped(prompt, json=SCHEMA)])[0]
    joined = run(llm, [shaped(prompt, json=SCHEMA, output_kind=RequestOutputKind.DELTA)])[0]
    assert joined.outputs[0].text == whole.outputs[0].text


def test_a_cut_answer_is_the_beginning_of_a_valid_one(llm: LLM, random_ids: Callable[..., list[int]]) -> None:
    output = run(llm, [shaped(random_ids(9), json=SCHEMA, max_tokens=6)])[0].outputs[0]
    assert output.finish_reason == "length" and len(output.token_ids) == 6
    assert output.text.startswith("{")


def test_logprobs_are_raw(llm: LLM, random_ids: Callable[..., list[int]]) -> None:
    output = run(llm, [shaped(random_ids(5), choice=["yes"], logprobs=2)])[0].outputs[0]
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)
    assert any(entry[token].rank > 2 for entry, token in zip(output.logprobs, output.token_ids, strict=True))


@pytest.mark.parametrize(
    "other", [{"ignore_eos": True}, {"min_tokens": 3}, {"allowed_token_ids": [5]}, {"bad_words": ["a"]}]
)
def test_what_could_leave_nothing_over_is_refused(llm: LLM, other: dict[str, Any]) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a"]), **other)
    with pytest.raises(ParameterError, match=next(iter(other))):
        llm.generate([[1, 2]], params)


def test_so_1_what_does_not_compile_is_refused_before_it_is_queued(llm: LLM) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="("))
    with pytest.raises(ParameterError, match=r"structured_outputs\.regex"):
        llm.generate([[1, 2]], params)
    assert not llm.engine.has_work
    with pytest.raises(ParameterError, match="exactly one"):
        StructuredOutputsParams()
    with pytest.raises(ParameterError, match="exactly one"):
        StructuredOutputsParams(regex="a", choice=["a"])
