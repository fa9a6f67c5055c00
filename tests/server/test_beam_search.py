"""use_beam_search on both endpoints: what reaches the engine, how beams are shown, what is refused."""

from __future__ import annotations

import asyncio

import pytest
from api_client import Api

from jaxpage.params import BeamSearchParams

pytestmark = pytest.mark.anyio

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
BOTH = [(COMPLETIONS, {"prompt": "Hi"}), (CHAT, {"messages": [{"role": "user", "content": "Hi"}]})]
both = pytest.mark.parametrize(("path", "base"), BOTH, ids=["completions", "chat"])
BEAMS = {"use_beam_search": True, "n": 2}


@both
async def test_fields_reach_the_search(api, engine, path, base):
    await api.post(path, base | {"use_beam_search": True, "max_tokens": 5})
    given = {"length_penalty": 0.5, "early_stopping": "never", "ignore_eos": True, "stop_token_ids": [98]}
    given |= {"include_stop_str_in_output": True, "skip_special_tokens": False}
    engine.scheduling_policy = "priority"
    body = base | BEAMS | given | {"max_tokens": 5, "cache_salt": "s", "priority": -1, "detokenize": False}
    assert (await api.post(path, body)).status_code == 200
    assert [params for _, params, _ in engine.seen] == [
        BeamSearchParams(beam_width=1, max_tokens=5),
        BeamSearchParams(beam_width=2, max_tokens=5, **given),
    ]
    assert (engine.seen[1][2], engine.priorities[1]) == ("s", -1)


async def test_beams_are_choices_best_first(api, engine):
    engine.script = lambda prompt, beam: [prompt[0], 120 + beam]
    answer = await api.complete(prompt=["ab", "c"], **BEAMS, return_token_ids=True, echo=True)
    choices = answer["choices"]
    assert [(choice["index"], choice["text"]) for choice in choices] == [
        (0, "ababx"), (1, "ababy"), (2, "ccx"), (3, "ccy"),
    ]  # fmt: skip
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    assert [choice["token_ids"] for choice in choices[2:]] == [[99, 120, 257], [99, 121, 257]]
    assert all(choice["logprobs"] is None for choice in choices)
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["usage"]["prompt_tokens"] == 2
    answer = await api.chat(**BEAMS, max_tokens=1)
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["[", "["]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 2


async def test_logprobs_of_beams_look_like_those_of_samples(api, engine):
    sampled = (await api.complete(prompt="Hi", logprobs=2))["choices"][0]
    for choice in (await api.complete(prompt="Hi", logprobs=2, **BEAMS))["choices"]:
        assert choice == sampled | {"index": choice["index"]}
    sampled = (await api.chat(logprobs=True, top_logprobs=2))["choices"][0]
    for choice in (await api.chat(logprobs=True, top_logprobs=2, **BEAMS))["choices"]:
        assert choice == sampled | {"index": choice["index"]}
    await api.refused(COMPLETIONS, {"prompt": "Hi", "logprobs": -1} | BEAMS, "logprobs")
    engine.max_logprobs = -1
    whole = (await Api(engine).complete(prompt="Hi", logprobs=-1, **BEAMS))["choices"][1]["logprobs"]
    assert engine.seen[-1][1].logprobs == engine.vocab_size
    assert len(whole["top_logprobs"][0]) == 4, "all that the fake engine has"


@both
async def test_beam_1a_widths(api, engine, path, base):
    for width in (0, -1, 513, 1_000_000, 1.5, "2", True):
        await api.refused(path, base | {"use_beam_search": True, "n": width}, "n")
    assert not engine.seen
    answer = await api.post(path, base | {"use_beam_search": True, "n": 300, "max_tokens": 1})
    assert len(answer.json()["choices"]) == 300
    engine.max_num_seqs = 4
    message = await api.refused(path, base | {"use_beam_search": True, "n": 5}, "n")
    assert message == "n: 5 is above max_num_seqs 4"


@both
@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("stream", [True]),
        ("seed", [0, 5]),
        ("best_of", [1, 3]),
        ("temperature", [0.5, 2, 3]),
        ("top_p", [0.9, 0]),
        ("top_k", [1, 293]),
        ("min_p", [0.1]),
        ("presence_penalty", [0.1]),
        ("frequency_penalty", [-1]),
        ("repetition_penalty", [1.1, 0]),
        ("stop", ["x", ["x"]]),
        ("min_tokens", [1]),
        ("logit_bias", [{"5": 1}, {"5": 0}]),
        ("allowed_token_ids", [[5], []]),
        ("spaces_between_special_tokens", [False]),
        ("prompt_logprobs", [0, 1]),
        ("length_penalty", ["x", True]),
        ("early_stopping", ["x", 1, 0]),
        ("stop_token_ids", [[294], "x"]),
        ("max_tokens", [65]),
        ("response_format", [{"type": "json_object"}]),
        ("structured_outputs", [{"choice": ["a"]}]),
    ],
)
async def test_fields_without_effect_are_refused(api, engine, path, base, field, values):
    for value in values:
        await api.refused(path, base | BEAMS | {field: value}, field)
    assert not engine.seen


async def test_prompts_are_not_scored(api, engine):
    await api.refused(COMPLETIONS, {"prompt": "Hi", "echo": True, "logprobs": 0} | BEAMS, "echo")
    await api.refused(COMPLETIONS, {"prompt": "Hi", "echo": True, "max_tokens": 0} | BEAMS, "max_tokens")
    assert not engine.seen


@both
async def test_neutral_values_and_the_models_own_are_no_reason_to_refuse(engine, path, base):
    engine.generation_config = {"temperature": 0.6, "top_k": 7, "top_p": 0.9, "repetition_penalty": 1.1}
    api = Api(engine)
    neutral = {
        "stream": False, "seed": None, "best_of": 2, "temperature": 1, "top_p": 1.0, "top_k": -1, "min_p": 0,
        "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1, "stop": [], "min_tokens": 0,
        "logit_bias": {}, "allowed_token_ids": None, "spaces_between_special_tokens": True, "length_penalty": 1.0,
        "early_stopping": False, "stop_token_ids": [],
    }  # fmt: skip
    for changes in ({}, {"temperature": 0}, {"top_k": 0}, {"top_k": 294}):
        response = await api.post(path, base | BEAMS | neutral | changes)
        assert response.status_code == 200, response.text
    assert (await api.post(path, base | BEAMS)).status_code == 200


async def test_a_client_that_gives_up_ends_its_search(api, engine):
    engine.step_s = 60.0
    waiting = asyncio.create_task(api.complete(prompt="Hi", **BEAMS))
    while not engine.running:
        await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert len(engine.aborted) == 1
    assert not engine.running
